"""Times of a model's matrix products on a CPU: ours, oneDNN's and torch's, by the number of tokens.

    python benchmarks/cpu_products.py --quick --json cpu_products.json

The matrices have the shapes of SmolLM2-135M's. No cache holds all of them, so a step reads them from memory. Systems
take turns. oneDNN uses weights in its own layout (`torch.ops.mkldnn`); torch uses `F.linear`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from common import Figure, Spread, begin, benchmark_parser, finish, scale_of, table, turns

from laserbatch.pipeline.decoding.attention.amx import has_amx
from laserbatch.pipeline.decoding.attention.bfloat16 import as_array, as_tensor
from laserbatch.pipeline.decoding.attention.interface import relative_error
from laserbatch.pipeline.decoding.model.cpu_product import PackedMatrix
from laserbatch.pipeline.processor import multiplies_bfloat16

LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # numbers of outputs and inputs of a layer's products
FEW_TOKENS = 16  # number of tokens up to which a step should only take the time of reading its weights
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.01}


@dataclass(frozen=True)
class Scale:
    """The number of layers, the numbers of tokens, and repetitions of each."""

    num_layers: int
    tokens: tuple[int, ...]
    num_repetitions: int


FULL = Scale(30, (1, 4, 16, 32, 64, 144, 256), 30)
QUICK = Scale(30, (1, 16, 64, 144, 256), 15)
SMOKE = Scale(1, (1, 20), 2)


def systems_of(weights: list[torch.Tensor]) -> dict[str, Callable[[dict[int, torch.Tensor]], torch.Tensor]]:
    """The systems by name; each takes inputs by their width, computes all products and returns the last result."""
    ours = [PackedMatrix(weight, None) for weight in weights]
    relaid = [torch.ops.mkldnn._reorder_linear_weight(weight, FEW_TOKENS) for weight in weights]
    product: Any = torch.ops.mkldnn._linear_pointwise
    sizes = [weight.shape[1] for weight in weights]

    def all_ours(inputs: dict[int, torch.Tensor]) -> torch.Tensor:
        arrays = {size: as_array(tensor) for size, tensor in inputs.items()}
        return as_tensor([matrix.product(arrays[size]) for matrix, size in zip(ours, sizes, strict=True)][-1])

    def all_onednn(inputs: dict[int, torch.Tensor]) -> torch.Tensor:
        pairs = zip(relaid, sizes, strict=True)
        return [product(inputs[size], weight, None, "none", [], "") for weight, size in pairs][-1]

    def all_torch(inputs: dict[int, torch.Tensor]) -> torch.Tensor:
        return [F.linear(inputs[size], weight) for weight, size in zip(weights, sizes, strict=True)][-1]

    return {"ours": all_ours, "onednn": all_onednn, "torch": all_torch}


def measure(dtype: torch.dtype, scale: Scale) -> list[dict[str, Any]]:
    """Milliseconds of a step's products, by system and number of tokens."""
    name = str(dtype).removeprefix("torch.")
    generator = torch.Generator().manual_seed(0)
    shapes = LAYER * scale.num_layers
    weights = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    systems, rows = systems_of(weights), []
    for num_tokens in scale.tokens:
        inputs = {size: torch.randn(num_tokens, size, generator=generator).to(dtype) for _, size in set(LAYER)}
        results = {system: run(inputs) for system, run in systems.items()}
        assert relative_error(results["ours"], results["torch"]) < TOLERANCE[name]
        seconds: dict[str, list[float]] = {system: [] for system in systems}
        for order, _ in zip(turns(list(systems)), range(scale.num_repetitions), strict=False):
            for system in order:
                begun = time.perf_counter()
                systems[system](inputs)
                seconds[system].append(time.perf_counter() - begun)
        for system, values in seconds.items():
            ratios = [other / ours for other, ours in zip(values, seconds["ours"], strict=True)]
            rows.append(
                {"system": system, "dtype": name, "tokens": num_tokens,
                 "ms": Spread.of([1000 * value for value in values]), "time_over_ours": Spread.of(ratios)}
            )  # fmt: skip
    return rows


def main() -> None:
    arguments = benchmark_parser(__doc__, "threads").parse_args()
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    begin(arguments.threads)
    dtypes = [torch.float32, torch.bfloat16] if multiplies_bfloat16() else [torch.float32]
    rows = [row for dtype in dtypes for row in measure(dtype, scale)]
    figures = [
        Figure.at_least(f"{row['dtype']}, {row['tokens']} tokens: time of {row['system']}'s products over ours",
                        row["time_over_ours"].median, 1.0)
        for row in rows if row["system"] != "ours"
    ]  # fmt: skip
    columns = {
        "dtype": "{dtype}",
        "tokens": "{tokens}",
        "system": "{system}",
        "ms": "{ms}",
        "over ours": "{time_over_ours}",
    }
    finish(arguments.json, figures, [table(rows, columns)], {"amx": has_amx(), "rows": rows})


if __name__ == "__main__":
    main()
