"""Items of `gpu_phases.py` without texts: times of a step, of the GEMMs alone, and of one layer's attention.

The texts are random tokens and the drafts random trees of one size, so that every step of a row computes the same
number of tokens, at contexts of about 600. Texts do not end, and no timed step computes a prompt.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

import numpy as np
import torch
from attention import Scale, make_problem, measure
from common import Spread
from gpu_bench import Bench, fused_name, fused_of, is_fatal, memory_now, release_memory, set_fused
from roofline import Roofline
from widen import GEOMETRIES

from laserbatch.pipeline.decoding import acceptance as acceptance_module
from laserbatch.pipeline.decoding.drafters import Drafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model import cuda_graphs
from laserbatch.pipeline.decoding.sequence import GenerationFailure, GenerationRequest
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.decoding.step import Step, Stream
from laserbatch.pipeline.decoding.token_tree import TokenTree
from laserbatch.pipeline.decoding.verifiers import Greedy, Relaxed

PROMPT_TOKENS, SMOKE_PROMPT_TOKENS = 570, 20
NUM_WARM, NUM_TIMED, NUM_EAGER = 6, 30, 8
MAX_NEW_TOKENS = 160  # no text ends before its steps are timed
PREFILL_TOKENS = 8192
PROFILED = {(64, 0), (64, 8), (1, 0), (256, 0), (256, 4)}  # batch and draft tokens
EAGER = {(64, 0), (1, 0)}  # steps that are also timed without CUDA graphs
NUM_KERNELS = 40
GEMM_ROWS = (1, 32, 64, 256, 320, 576, 1088)
GEMM_USED_SHARE = 16  # as in roofline.py: the device multiplies zeros at a higher clock
BATCHES = {600: (1, 64, 256), 4000: (1, 64)}  # for the attention items, by context
TREES = (0, 8)
BLOCKS = (  # keys, rows, warps, stages
    (64, 64, 4, 3), (64, 64, 4, 5), (32, 64, 4, 7), (32, 64, 4, 3),
)  # fmt: skip


class DoesNotFit(Exception):
    """The KV cache does not hold a full batch."""


class FixedTrees(Drafter):
    """Drafts one fixed tree of random tokens on random branches."""

    def __init__(self, num_nodes: int, vocab_size: int) -> None:
        rng = np.random.default_rng(0)
        parents = np.array([rng.integers(-1, i) if i else -1 for i in range(num_nodes)], np.int32)
        tokens = rng.integers(8, vocab_size, num_nodes).astype(np.int32)
        self._tree = TokenTree(tokens, parents, np.zeros(num_nodes, np.float32), np.zeros(num_nodes, np.uint8))

    def draft(self, sequence) -> TokenTree:
        return self._tree


class StepClock:
    """Times at which the device gets a step's inputs and the host its verdicts; outside this span the device waits."""

    def __init__(self) -> None:
        self.began_s = self.ended_s = 0.0
        self.num_captures = self.num_replays = 0

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        """Watch an engine within the block."""
        undo: list[Callable[[], None]] = []

        def after(owner, name: str, note: Callable[[], None]) -> None:
            call = getattr(owner, name, None)
            if call is None:
                return
            had = name in vars(owner)

            def noted(*args, **kwargs):
                result = call(*args, **kwargs)
                note()
                return result

            setattr(owner, name, noted)
            undo.append(lambda: setattr(owner, name, call) if had else delattr(owner, name))

        if engine.runner.buffered is None:
            forward = engine.runner.forward

            def begun(*args, **kwargs):
                self._begin()
                return forward(*args, **kwargs)

            engine.runner.forward = begun
            undo.append(lambda: vars(engine.runner).pop("forward", None))  # Roofline may have restored it
        else:
            after(cuda_graphs.StepBuffers, "fill", self._begin)
            after(engine.runner.buffered, "_capture", self._count_capture)
            after(engine.runner.buffered, "_replay", self._count_replay)
        after(acceptance_module, "judge_rows", self._end)
        try:
            yield
        finally:
            for restore in reversed(undo):
                restore()

    def _begin(self) -> None:
        self.began_s = time.perf_counter()

    def _end(self) -> None:
        self.ended_s = time.perf_counter()

    def _count_capture(self) -> None:
        self.num_captures += 1

    def _count_replay(self) -> None:
        self.num_replays += 1


def random_requests(batch: int, num_tokens: int, vocab_size: int, max_new_tokens: int) -> list[GenerationRequest]:
    """`batch` requests with random prompts of `num_tokens` tokens, which share no prefix."""
    prompts = np.random.default_rng(1).integers(8, vocab_size, (batch, num_tokens)).astype(np.int32)
    return [GenerationRequest(str(number), prompt, None, None, max_new_tokens) for number, prompt in enumerate(prompts)]


def take_step(engine: Engine, stream: Stream) -> Step:
    """Take one step of the engine; raises the errors of the step."""
    failures = [admitted for admitted in stream.scheduler.admit() if isinstance(admitted, GenerationFailure)]
    step = engine.submit_step(stream)
    if step is None:
        raise DoesNotFit("a step finds no room")
    if step.error is not None:
        raise step.error
    failures += [outcome for _, outcome in engine.finish_step(step, stream) if isinstance(outcome, GenerationFailure)]
    if failures:
        raise RuntimeError(f"a text failed: {failures[0].reason}")
    return step


def fill_batch(engine: Engine, stream: Stream, num_prompt_tokens: int) -> None:
    """Take steps until all texts of a full batch have their prompts computed.

    Raises DoesNotFit if the cache is too small for the batch.
    """
    batch = engine.settings.batch_size
    for _ in range(3 * batch * num_prompt_tokens // engine.max_prefill_tokens + 60):
        take_step(engine, stream)
        live = stream.scheduler.live
        if len(live) == batch and all(sequence.num_output > 0 for sequence in live):
            return
    raise DoesNotFit(f"{len(stream.scheduler.live)} of {batch} texts are live: the cache holds no more")


def measure_steps(bench: Bench, item: str, batch: int, num_nodes: int, fused: bool) -> None:
    """Time steps of one batch size with drafts of one size."""
    is_smoke = bench.options.smoke
    model = bench.loaded.model
    fused_before, num_timed = fused_of(model), 3 if is_smoke else NUM_TIMED
    prompt_tokens = SMOKE_PROMPT_TOKENS if is_smoke else PROMPT_TOKENS
    if not fused and not any(fused_before.values()):
        print(f"{item}: left out, because the model has no fused layer", flush=True)
        return
    if not fused:
        set_fused(model, dict.fromkeys(fused_before))
    try:
        settings = {"max_draft_tokens": num_nodes, "min_acceptance": 0.0}
        engine = bench.engine(batch, replace(bench.loaded, end_ids=()), **settings)
        needed = batch * (prompt_tokens + MAX_NEW_TOKENS + num_nodes)
        if engine.cache.max_tokens < needed:
            raise DoesNotFit(f"{needed} tokens are needed, the cache holds {engine.cache.max_tokens}")
        engine.max_prefill_tokens = PREFILL_TOKENS
        requests = random_requests(batch, prompt_tokens, min(bench.loaded.vocab_size, 8000), MAX_NEW_TOKENS)
        drafter = FixedTrees(num_nodes, min(bench.loaded.vocab_size, 8000))
        stream = engine.open_stream(
            iter(requests), drafter, Relaxed() if num_nodes else Greedy(), Budget(num_nodes, 0.0)
        )
        try:
            _time_steps(bench, item, engine, stream, num_nodes, prompt_tokens, num_timed)
        finally:
            stream.scheduler.close()
    except DoesNotFit as reason:
        bench.rows.add("c", item, batch=batch, nodes=num_nodes, failed=f"does not fit: {reason}")
    finally:
        set_fused(model, fused_before)


def _time_steps(
    bench: Bench, item: str, engine: Engine, stream: Stream, num_nodes: int, prompt_tokens: int, num_timed: int
) -> None:
    batch = engine.settings.batch_size
    start_s = time.perf_counter()
    fill_batch(engine, stream, prompt_tokens)
    prefill_s = time.perf_counter() - start_s
    clock, least = StepClock(), Roofline.of_engine(engine, bench.rates)
    with clock.watching(engine):
        for _ in range(NUM_WARM):
            take_step(engine, stream)
        with least.watching(engine):
            wall, device, num_tokens = _timed(engine, stream, clock, num_timed)
        written = [sequence.num_output for sequence in stream.scheduler.live]
        row = {
            "batch": batch,
            "nodes": num_nodes,
            "fused": fused_name(engine.runner.model),
            "attention": "triton" if engine.runner.buffered is not None else "torch",
            "step_ms": Spread.of(wall),
            "device_ms": Spread.of(device),
            "host_share": 1 - sum(device) / sum(wall),
            "least_ms": 1e3 * least.seconds / num_timed,
            "roofline_share": 1e3 * least.seconds / sum(wall),
            "num_tokens": num_tokens,
            "context": prompt_tokens + float(np.mean(written)),
            "prefill_s": prefill_s,
            "captures": clock.num_captures,
            "replays": clock.num_replays,
            **memory_now(bench.device),
        }
        bench.rows.add("c", item, **row)
        buffered = engine.runner.buffered
        if (batch, num_nodes) in EAGER and buffered is not None and buffered._captures:
            with without_graphs(buffered):
                take_step(engine, stream)
                wall, _, _ = _timed(engine, stream, clock, NUM_EAGER)
            bench.rows.add("c", f"{item}, no graphs", batch=batch, nodes=num_nodes, step_ms=Spread.of(wall))
            for _ in range(2):  # for the profile: the first step is captured, the second replayed
                take_step(engine, stream)
    if bench.options.profile and ((batch, num_nodes) in PROFILED or bench.options.smoke):
        profile_step(bench, item, engine, stream)


@contextmanager
def without_graphs(buffered: cuda_graphs.BufferedForward) -> Iterator[None]:
    """Launch the operations of the block's steps one by one; drop captured graphs, which would be replayed."""
    buffered._captures = False
    buffered.drop_graphs()
    try:
        yield
    finally:
        buffered._captures = True


def _timed(engine: Engine, stream: Stream, clock: StepClock, num_steps: int) -> tuple[list[float], list[float], int]:
    """The milliseconds of each step, those of them in which the device computes, and the number of tokens of a step."""
    wall, device = [], []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        step = take_step(engine, stream)
        wall.append(1e3 * (time.perf_counter() - start_s))
        device.append(1e3 * max(0.0, clock.ended_s - clock.began_s))
    return wall, device, step.num_tokens


def profile_step(bench: Bench, item: str, engine: Engine, stream: Stream) -> None:
    """Write a row with the kernels of one step: the name, number of launches and total time of each."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_cuda = bench.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    try:
        for _ in range(2):  # the first starts the profiler up
            with profile(activities=activities) as profiler:
                start_s = time.perf_counter()
                take_step(engine, stream)
                wall_us = 1e6 * (time.perf_counter() - start_s)
        wanted = DeviceType.CUDA if on_cuda else DeviceType.CPU
        name = "self_device_time_total" if on_cuda else "self_cpu_time_total"
        events = [event for event in profiler.key_averages() if event.device_type == wanted]
        kernels = [(event.key[:120], event.count, float(getattr(event, name))) for event in events]
        kernels.sort(key=lambda kernel: -kernel[2])
        total_us = sum(us for _, _, us in kernels)
        totals = {"wall_us": wall_us, "total_us": total_us, "launches": sum(count for _, count, _ in kernels)}
        bench.rows.add("d", item, **totals, kernels=kernels[:NUM_KERNELS])
    except Exception as error:
        if is_fatal(error):
            raise
        bench.rows.add("d", item, failed=f"{type(error).__name__}: {error}"[:300])


def timed_ms(run: Callable[[], object], device: torch.device, num_times: int = 5) -> float:
    """The median milliseconds of a call, replayed from a graph on CUDA; on a CPU the time of one call."""
    run()
    if device.type != "cuda":
        start_s = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start_s)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_times)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return float(np.median([start.elapsed_time(end) for start, end in events]))


@torch.inference_mode()
def measure_gemms(bench: Bench, item: str) -> None:
    """Time the products with all layers' weights and with the head's, which every engine must compute.

    The weights of one layer are used for all layers: they are larger than the device's cache.
    """
    sizes, device = GEOMETRIES[bench.options.geometry], bench.device
    dtype, hidden = getattr(torch, bench.dtype), sizes.hidden_size
    heads, kv_heads = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
    units, vocab_size = sizes.intermediate_size, sizes.vocab_size or 32_000
    seven = [(heads, hidden), (kv_heads, hidden), (kv_heads, hidden), (hidden, heads)]
    seven += [(units, hidden), (units, hidden), (hidden, units)]
    four = [(heads + 2 * kv_heads, hidden), (hidden, heads), (2 * units, hidden), (hidden, units)]

    def weight(num_rows: int, num_columns: int) -> torch.Tensor:
        tensor = torch.zeros(num_rows, num_columns, dtype=dtype, device=device)
        tensor[:, : num_columns // GEMM_USED_SHARE].normal_()
        return tensor

    head = weight(vocab_size, hidden)
    for name, shapes in (("7", seven), ("4", four)):
        weights = [weight(*shape) for shape in shapes]
        for num_rows in GEMM_ROWS[:2] if bench.options.smoke else GEMM_ROWS:
            widths = (hidden, heads, units)
            inputs = {width: torch.randn(num_rows, width, dtype=dtype, device=device) for width in widths}

            def layers(weights=weights, inputs=inputs) -> None:
                for _ in range(sizes.num_layers):
                    for weight in weights:
                        torch.nn.functional.linear(inputs[weight.shape[1]], weight)

            def output(inputs=inputs) -> None:
                torch.nn.functional.linear(inputs[hidden], head)

            values = {"layers_ms": timed_ms(layers, device), "head_ms": timed_ms(output, device)}
            bench.rows.add("load", item, gemms_a_layer=name, rows=num_rows, **values)
        del weights
        release_memory(device)


def measure_attention(bench: Bench, item: str, context: int) -> None:
    """Time one layer's attention with the default block sizes and with others."""
    from laserbatch.pipeline.decoding.attention.triton_attention import Blocks

    names = ("keys", "rows", "num_warps", "num_stages")
    grid: list[dict] = [{}, *({"blocks": Blocks(**dict(zip(names, values, strict=True)))} for values in BLOCKS)]
    if bench.options.smoke:
        context, batches, grid = 20, (2,), grid[:2]
    else:
        batches = BATCHES[context]
    share = bench.options.compile_only
    if share:
        number, count = map(int, share.split("/"))
        grid = grid[number::count]
    release_memory(bench.device)
    scale = Scale(batches, TREES, 2 if bench.options.smoke else 20, context)
    for batch in batches:
        for tree in TREES:
            problem = make_problem(batch, tree, context, bench.device)
            for options in grid:
                if share:
                    _compile(problem, options)
                    continue
                blocks = options.get("blocks")
                row = measure(problem, "kernel", scale, **options)
                values = {"context": context, "batch": batch, "tree": tree, "blocks": blocks and asdict(blocks)}
                bench.rows.add("e", item, **values, **row)
                if is_fatal(RuntimeError(row.get("failed", ""))):
                    raise RuntimeError(row["failed"])
            del problem
            release_memory(bench.device)


def _compile(problem, options: dict) -> None:
    """Compile the kernel for this problem into Triton's cache on disk."""
    from attention import kernel_system

    try:
        kernel_system(problem, **options)()
    except Exception as error:  # the process that times the kernel reports it
        print(f"{options}: {error}"[:200], flush=True)
