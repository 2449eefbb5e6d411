"""Time of attention over a packed step: our kernel and torch's padded attention, on one layer of an 8 B model.

    python benchmarks/attention.py --quick --json attention.json
    python benchmarks/attention.py --blocks --json blocks.json

Each sequence has about 500 committed tokens, scattered over the KV cache, its last token and a draft tree. The result
of each system is compared with the slow version before it is timed. Without CUDA nothing is timed: `--smoke` then only
shows that everything runs, the kernel through Triton's interpreter (`TRITON_INTERPRET=1`).

`--blocks` times the kernel alone under the block sizes of a small grid, and names those with the least time over all
problems: the defaults of `Blocks` in `triton_attention.py` should be these on such devices.

Nobody has run this on a GPU yet: no result of it is published.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from common import Spread, benchmark_parser, scale_of, write_json

from laserbatch.pipeline.decoding.attention.metadata import AttentionMetadata, LaunchShape
from laserbatch.pipeline.decoding.attention.torch_attention import Group, cut_groups, torch_attention
from laserbatch.pipeline.decoding.token_tree import TokenTree, TreeBatch

SEED = 0
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
CONTEXT = 500  # committed tokens, give or take a fifth
TOLERANCE = 0.02  # relative error in bfloat16


@dataclass(frozen=True)
class Scale:
    """Batch sizes and tree sizes to measure, and repetitions of each."""

    batches: tuple[int, ...]
    trees: tuple[int, ...]
    num_repetitions: int
    context: int = CONTEXT


FULL = Scale((1, 16, 64, 128, 256), (0, 4, 16, 64), 100)
QUICK = Scale((1, 64, 256), (0, 4, 16, 64), 30)
BLOCKS = Scale((1, 64, 256), (0, 8), 20)  # as in a night: plain decoding, and trees that pay at these batch sizes
SMOKE = Scale((1, 3), (0, 5), 2, context=40)


@dataclass(frozen=True)
class Problem:
    """One layer's attention in one step: queries, the cache's keys and values, and which keys each query attends to."""

    query: torch.Tensor  # (num_tokens, num_heads, head_dim)
    keys: torch.Tensor  # (num_kv_heads, num_slots, head_dim)
    values: torch.Tensor
    metadata: AttentionMetadata
    max_keys: int

    @cached_property
    def expected(self) -> torch.Tensor:
        """The correct result, computed by torch in float32."""
        query, keys, values = (tensor.float() for tensor in (self.query, self.keys, self.values))
        groups = [one_group(self.metadata)]
        output = torch_attention(query, keys, values, groups, HEAD_DIM**-0.5, None, None, None)
        return output.to(self.query.dtype)

    @property
    def num_sequences(self) -> int:
        return len(self.metadata.num_committed)


def _random_tree(rng, num_nodes: int) -> TokenTree:
    parents = np.array([rng.integers(-1, i) if i else -1 for i in range(num_nodes)], np.int32)
    nothing = np.zeros(num_nodes, np.int32)
    return TokenTree(nothing, parents, nothing.astype(np.float32), nothing.astype(np.uint8))


def make_problem(batch: int, tree: int, context: int, device: torch.device) -> Problem:
    """Random queries, keys and trees; each sequence has one chain token and `tree` draft tokens."""
    rng = np.random.default_rng(SEED)
    committed = np.sort(rng.integers(context * 4 // 5, context * 6 // 5 + 1, batch))  # sorted, as in groups
    trees = TreeBatch.of([_random_tree(rng, tree) for _ in range(batch)])
    masks = trees.ancestors.reshape(batch, tree)
    sizes = committed + 1 + tree
    positions = committed[:, None] + np.hstack((np.zeros((batch, 1), np.int32), trees.depths.reshape(batch, tree)))

    def tensor(array, dtype: type[np.integer] = np.int32) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(device)

    metadata = AttentionMetadata(
        slots=tensor(rng.permutation(int(sizes.sum()))),
        cu_seqlens_k=tensor(np.append(0, np.cumsum(sizes))),
        num_committed=tensor(committed),
        cu_seqlens_q=tensor(np.arange(batch + 1) * (1 + tree)),
        num_chain=tensor(np.ones(batch)),
        ancestors=tensor(np.concatenate((np.zeros((batch, 1), np.int64), masks), 1).reshape(-1), np.int64),
        positions=tensor(positions.reshape(-1)),
    )
    generator = torch.Generator(device).manual_seed(SEED)
    shapes = ((batch * (1 + tree), NUM_HEADS), (NUM_KV_HEADS, int(sizes.sum())), (NUM_KV_HEADS, int(sizes.sum())))
    query, keys, values = (
        torch.randn(*shape, HEAD_DIM, generator=generator, device=device).to(torch.bfloat16) for shape in shapes
    )
    return Problem(query, keys, values, metadata, int(sizes.max()))


def kernel_system(problem: Problem, **blocks) -> Callable[[], torch.Tensor]:
    """A call of the Triton kernel, which reads keys from their slots."""
    from laserbatch.pipeline.decoding.attention.triton_attention import triton_attention

    shape = LaunchShape.of(problem.max_keys, len(problem.query), problem.num_sequences, len(problem.keys))
    arguments = (problem.query, problem.keys, problem.values, problem.metadata, HEAD_DIM**-0.5)
    return lambda: triton_attention(*arguments, shape=shape, **blocks)


def one_group(metadata: AttentionMetadata) -> Group:
    """All sequences as one group, padded to the longest."""
    on_host = AttentionMetadata(**{name: tensor.cpu().numpy() for name, tensor in vars(metadata).items()})
    (group,) = cut_groups(on_host, call_cost=1 << 60)
    return group


def sdpa_system(problem: Problem, gathers: bool) -> Callable[[], torch.Tensor]:
    """torch's attention with a padded mask and folded query heads; keys are gathered in each call, or once before."""
    group, batch, folded = one_group(problem.metadata), problem.num_sequences, NUM_HEADS // NUM_KV_HEADS
    slots, sees = (torch.from_numpy(array).to(problem.query.device) for array in (group.slots, group.sees))
    queries = problem.query.view(batch, -1, NUM_HEADS, HEAD_DIM).transpose(1, 2)
    num_new = queries.shape[2]
    folded_queries = queries.reshape(batch, NUM_KV_HEADS, folded * num_new, HEAD_DIM).contiguous()
    mask = torch.where(sees, 0.0, torch.finfo(torch.bfloat16).min).to(torch.bfloat16)[:, None].repeat(1, 1, folded, 1)

    def gather(memory: torch.Tensor) -> torch.Tensor:
        return memory.index_select(1, slots.view(-1)).view(NUM_KV_HEADS, *slots.shape, HEAD_DIM).transpose(0, 1)

    contiguous = None if gathers else [gather(memory).contiguous() for memory in (problem.keys, problem.values)]

    def run() -> torch.Tensor:
        keys, values = contiguous or (gather(problem.keys), gather(problem.values))
        out = F.scaled_dot_product_attention(folded_queries, keys, values, attn_mask=mask)
        return out.view(batch, NUM_HEADS, num_new, HEAD_DIM).transpose(1, 2).reshape(-1, NUM_HEADS, HEAD_DIM)

    return run


SYSTEMS: dict[str, Callable[[Problem], Callable[[], torch.Tensor]]] = {
    "kernel": kernel_system,
    "sdpa-gathered": lambda problem: sdpa_system(problem, gathers=True),
    "sdpa-contiguous": lambda problem: sdpa_system(problem, gathers=False),
}


def times_us(run: Callable[[], torch.Tensor], num_repetitions: int) -> list[float]:
    """Microseconds of each call on the device.

    Like the engine, this replays calls from a CUDA graph, so that no launch waits for Python. Before each call it
    overwrites the device's cache, because a model's other layers run between two calls of one layer.
    """
    for _ in range(3):  # compiles, chooses algorithms
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):  # even if the capture fails
        run()
    other_layers = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_repetitions)]
    for start, end in events:
        other_layers.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [1000 * start.elapsed_time(end) for start, end in events]


def measure(problem: Problem, name: str, scale: Scale, **options) -> dict:
    """The row of one system on one problem: its error and, on CUDA, its times; or the reason why it failed."""
    row: dict = {"system": name}
    try:
        run = SYSTEMS[name](problem, **options)
        error = float((run().float() - problem.expected.float()).norm() / problem.expected.float().norm())
        row |= {"relative_error": error, "right": error <= TOLERANCE}
        if problem.query.device.type == "cuda":
            row["us"] = Spread.of(times_us(run, scale.num_repetitions))
    except Exception as failure:  # a system that is not installed, does not compile or cannot be captured
        return row | {"failed": f"{type(failure).__name__}: {failure}".splitlines()[0][:200]}
    if "us" in row:
        num_bytes = 2 * problem.keys.numel() * problem.keys.element_size()
        row["kv_gb_per_s"] = num_bytes / row["us"].median / 1000
    return row


def blocks_grid() -> list:
    """The block sizes to try, the default first."""
    from laserbatch.pipeline.decoding.attention.triton_attention import DEFAULT_BLOCKS, Blocks

    tried = [
        Blocks(keys, rows, warps, stages)
        for keys, rows, warps, stages in product((32, 64, 128), (16, 64), (4, 8), (2, 3))
        if warps == 4 or keys * rows >= 4096  # smaller blocks have too little work for eight warps
    ]
    return [DEFAULT_BLOCKS, *(blocks for blocks in tried if blocks != DEFAULT_BLOCKS)]


def measure_blocks(scale: Scale, device: torch.device, grid: Sequence) -> dict:
    """The times of each problem under each block size, and the block size with the least geometric mean time."""
    rows, over_default = [], {}
    problems = {(b, t): make_problem(b, t, scale.context, device) for b in scale.batches for t in scale.trees}
    for blocks in grid:
        for (batch, tree), problem in problems.items():
            row = {"batch": batch, "tree": tree, "blocks": asdict(blocks)}
            row |= measure(problem, "kernel", scale, blocks=blocks)
            rows.append(row)
        own = rows[-len(problems) :]
        if all(row.get("right") and "us" in row for row in own):
            ratios = [row["us"].median / first["us"].median for row, first in zip(own, rows, strict=False)]
            over_default[blocks] = float(np.exp(np.mean(np.log(ratios))))
            print(f"{over_default[blocks]:.3f} of the default's time  {blocks}", flush=True)
    best = min(over_default, key=lambda blocks: over_default[blocks], default=None)
    print(f"the best: {best}")
    return {"rows": rows, "best": best and {**asdict(best), "time_over_default": over_default[best]}}


def describe(row: dict) -> str:
    place = f"batch {row['batch']:>3}  tree {row['tree']:>2}  {row['system']:<16}"
    if "failed" in row:
        return f"{place}  failed: {row['failed']}"
    timed = f"  {row['us']} us  {row['kv_gb_per_s']:.0f} GB/s of keys and values" if "us" in row else "  not timed"
    return f"{place}  error {row['relative_error']:.1e}{'' if row['right'] else ' WRONG'}{timed}"


def main(words: Sequence[str] | None = None) -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--blocks", action="store_true", help="time only the kernel, under a grid of block sizes")
    options = parser.parse_args(words)
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if on_cuda else "cpu")
    if not on_cuda and options.size != "smoke":
        print("attention.py: this machine has no CUDA device, so nothing was timed; --smoke shows that it runs")
        return 1
    scale = scale_of(options, FULL, QUICK, SMOKE)
    heads = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM, "dtype": "bfloat16"}
    if options.blocks:
        scale = scale_of(options, BLOCKS, BLOCKS, SMOKE)
        blocks = measure_blocks(scale, device, blocks_grid())
        if options.json:
            write_json(options.json, {"context": scale.context, **heads, **blocks})
        return 0
    rows = []
    for batch in scale.batches:
        for tree in scale.trees:
            problem = make_problem(batch, tree, scale.context, device)
            for name in SYSTEMS:
                rows.append({"batch": batch, "tree": tree, **measure(problem, name, scale)})
                print(describe(rows[-1]), flush=True)
    if options.json:
        write_json(options.json, {"context": scale.context, **heads, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
