"""Linear layers on a CPU: weights in the layout of oneDNN's kernels, and one product for layers of the same input.

torch multiplies float32 matrices with MKL, in the weights' own layout. Weights in oneDNN's layout take a third to a
half of the time for a few tokens on AMD processors, and a token's result does not depend on how many others are in
the product. In bfloat16 torch lays weights out anew for each product, which takes longer than the product. oneDNN
compiles a product anew for each number of tokens, which takes longer than the product itself, and keeps some thousand
of them; so the ever other numbers of steps with drafts are rounded up to few.

A bfloat16 product of few tokens adds in another order than one of many. A text must not depend on how many others are
written beside it, so products are computed only for numbers of tokens that give the same bits (`_sizes_of_same_bits`).

Where the operators are missing, or a layer's results are not those of torch, layers stay as they are.
"""

import logging
from functools import cache
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from laserbatch.pipeline.decoding.attention.interface import relative_error
from laserbatch.pipeline.errors import first_line
from laserbatch.pipeline.processor import multiplies_bfloat16

logger = logging.getLogger(__name__)

# Names of layers that transformers' models call with one input, in this order.
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
LAYOUT_TOKENS = 16  # the layout is chosen for products of so many tokens; it serves any number
SIZES_PER_DOUBLING = 32  # numbers of tokens between one power of two and the next: 1 % is added in the mean
# Relative error of a layer above which it stays as it is.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}
# Numbers of tokens that a bfloat16 product may be computed for, where they give the bits of REFERENCE_TOKENS.
BFLOAT16_SIZES = (1, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 256)
REFERENCE_TOKENS = 64

_OPERATOR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_product: Any = getattr(_OPERATOR, "default", None)
_product_plus: Any = getattr(_OPERATOR, "binary", None)


class OneDnnLinear(nn.Module):
    """Linear layers of one input, as one product over weights in oneDNN's layout, which has no data to read."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        weights = [layer.weight.detach() for layer in layers]
        relaid = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights), LAYOUT_TOKENS)
        self.weight = nn.Parameter(relaid, requires_grad=False)
        bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.out_features = [layer.out_features for layer in layers]
        in_features, threads = layers[0].in_features, torch.get_num_threads()
        # None: any number of tokens.
        self.sizes = None
        if relaid.dtype == torch.bfloat16:
            self.sizes = _sizes_of_same_bits(sum(self.out_features), in_features, bias is not None, threads)
        # The newest input and its parts, in a list: setting a module's attribute takes longer than a small product.
        self._newest: list = [None, ()]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The first layer's results: (..., out_features[0]) of inputs (..., in_features)."""
        if len(self.out_features) == 1:
            return self._product(inputs)
        return self.part(inputs, 0)

    def part(self, inputs: torch.Tensor, index: int) -> torch.Tensor:
        """One layer's results; those of the same input are computed once, for all layers."""
        newest = self._newest
        if inputs is not newest[0]:
            newest[:] = inputs, self._product(inputs).split_with_sizes(self.out_features, -1)
        result = newest[1][index]
        if index == len(self.out_features) - 1:
            newest[:] = None, ()  # activations are not to be kept
        return result

    def _product(self, inputs: torch.Tensor) -> torch.Tensor:
        num_tokens = inputs.shape[-2]
        size = padded_size(num_tokens, self.sizes)
        if size > num_tokens:
            inputs = F.pad(inputs, (0, 0, 0, size - num_tokens))
        results = product(inputs, self.weight, self.bias, self.sizes)
        return results if size == num_tokens else results.narrow(-2, 0, num_tokens)


def product(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sizes: tuple[int, ...] | None
) -> torch.Tensor:
    """Result (..., num_tokens, out_features) of inputs (..., num_tokens, in_features), padded by `padded_size`."""
    if sizes is None or inputs.shape[-2] <= sizes[-1]:
        return _product(inputs, weight, bias, "none", [], "")
    parts = inputs.split(sizes[-1], -2)
    return torch.cat([_product(part, weight, bias, "none", [], "") for part in parts], -2)


def product_plus(
    inputs: torch.Tensor,
    addend: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sizes: tuple[int, ...] | None,
) -> torch.Tensor:
    """The product plus `addend` (num_tokens, out_features), rounded once."""
    if sizes is None or len(inputs) <= sizes[-1]:
        return _product_plus(inputs, addend, weight, bias, "add")
    parts = zip(inputs.split(sizes[-1]), addend.split(sizes[-1]), strict=True)
    return torch.cat([_product_plus(part, addend_part, weight, bias, "add") for part, addend_part in parts])


class PartOfLinear(nn.Module):
    """A layer whose weights lie in another's `OneDnnLinear`."""

    def __init__(self, relaid: OneDnnLinear, index: int) -> None:
        super().__init__()
        self._relaid = (relaid,)  # in a tuple, so that its weights are not registered twice
        self._index = index

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._relaid[0].part(inputs, self._index)


def padded_size(num_tokens: int, sizes: tuple[int, ...] | None) -> int:
    """The number of tokens, rounded up, that products are computed for; of `sizes` the largest is repeated."""
    if sizes is None:
        step = max(1, (1 << num_tokens.bit_length() - 1) // SIZES_PER_DOUBLING)
        return -(-num_tokens // step) * step
    whole = (num_tokens - 1) // sizes[-1] * sizes[-1]
    return whole + next(size for size in sizes if size >= num_tokens - whole)


@cache
def _sizes_of_same_bits(out_features: int, in_features: int, has_bias: bool, num_threads: int) -> tuple[int, ...]:
    """Ascending numbers of tokens of a bfloat16 product that give a token the same bits as among REFERENCE_TOKENS.

    Tried with sums that cancel: what remains of them is rounding error, which another order of adding changes in three
    of four results. `num_threads` is torch's: products may be divided otherwise among others.
    """
    half = in_features // 2
    drawn = torch.Generator().manual_seed(0)
    rows = torch.randn(min(64, out_features), half, generator=drawn)
    weight = torch.cat((rows, -rows, rows.new_zeros(len(rows), in_features % 2)), 1)
    tokens = torch.randn(BFLOAT16_SIZES[-1], half, generator=drawn)
    inputs = torch.cat((tokens, tokens, tokens.new_zeros(len(tokens), in_features % 2)), 1)
    shuffled = torch.randperm(in_features, generator=drawn)
    weight = weight[:, shuffled].bfloat16().repeat(-(-out_features // len(rows)), 1)[:out_features].contiguous()
    inputs = inputs[:, shuffled].bfloat16()
    relaid = torch.ops.mkldnn._reorder_linear_weight(weight, LAYOUT_TOKENS)
    bias = torch.zeros(out_features, dtype=torch.bfloat16) if has_bias else None

    def product_of(part: torch.Tensor) -> torch.Tensor:
        return _product(part, relaid, bias, "none", [], "")

    expected = torch.cat([product_of(part) for part in inputs.split(REFERENCE_TOKENS)])
    return tuple(size for size in BFLOAT16_SIZES if torch.equal(product_of(inputs[:size]), expected[:size]))


def relayout_linear_layers(model: nn.Module) -> int:
    """Replace a model's linear layers on a CPU for good; returns how many were. Tied embeddings stay.

    Layers in float32, and those in bfloat16 where the processor multiplies it.
    """
    if not torch.backends.mkldnn.is_available() or _OPERATOR is None:
        return 0
    num_relaid = 0
    for module in list(model.modules()):
        linear = {name: child for name, child in module.named_children() if _can_be_relaid(child)}
        candidates = (names for names in SAME_INPUT if linear.keys() >= set(names))
        groups = [names for names in candidates if _is_group([linear[name] for name in names])]
        groups += [(name,) for name in linear if not any(name in names for names in groups)]
        for names in groups:
            layers = [linear[name] for name in names]
            relaid = _relaid(layers)
            if relaid is None:
                return num_relaid
            for index, name in enumerate(names):
                setattr(module, name, PartOfLinear(relaid, index) if index else relaid)
            num_relaid += len(names)
    return num_relaid


def _can_be_relaid(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a plain linear layer, watched by nobody."""
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return False
    if module.weight.device.type != "cpu":
        return False
    return module.weight.dtype == torch.float32 or (module.weight.dtype == torch.bfloat16 and multiplies_bfloat16())


def _is_group(layers: list[nn.Linear]) -> bool:
    """Whether layers can be one product: all with a bias or none."""
    return len({(layer.in_features, layer.bias is None) for layer in layers}) == 1


@torch.no_grad()
def _relaid(layers: list[nn.Linear]) -> OneDnnLinear | None:
    """Join layers with the same input; None if oneDNN fails here or gives other results."""
    dtype = layers[0].weight.dtype
    inputs = torch.linspace(-1, 1, 2 * layers[0].in_features, dtype=dtype).view(1, 2, -1)
    expected = [layer(inputs) for layer in layers]
    try:
        relaid = OneDnnLinear(layers)
        results = [relaid.part(inputs, index) for index in range(len(layers))]
    except (RuntimeError, NotImplementedError) as error:
        logger.info("linear layers stay in torch's layout: %s", first_line(error))
        return None
    if all(relative_error(*pair) <= TOLERANCE[dtype] for pair in zip(results, expected, strict=True)):
        return relaid
    logger.warning("linear layers in oneDNN's layout give other results here; they stay in torch's")
    return None
