"""Linear layers on a CPU: weights in the layout of oneDNN's kernels, and one product for layers of the same input.

torch multiplies float32 matrices with MKL, in the weights' own layout. Weights in oneDNN's layout take a third to a
half of the time for a few tokens on AMD processors, and a token's result does not depend on how many others are in
the product. oneDNN compiles a product anew for each number of tokens, which takes longer than the product itself, and
keeps some thousand of them; so the ever other numbers of steps with drafts are rounded up to few.

Where the operators are missing, or a layer's results are not those of torch, layers stay as they are.
"""

import logging
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from laserbatch.pipeline.decoding.attention.interface import relative_error
from laserbatch.pipeline.errors import first_line

logger = logging.getLogger(__name__)

# Names of layers that transformers' models call with one input, in this order.
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
LAYOUT_TOKENS = 16  # the layout is chosen for products of so many tokens; it serves any number
SIZES_PER_DOUBLING = 32  # numbers of tokens between one power of two and the next: 1 % is added in the mean
TOLERANCE = 1e-4  # relative error of a layer above which it stays as it is


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
        size = compiled_size(num_tokens)
        if size > num_tokens:
            inputs = F.pad(inputs, (0, 0, 0, size - num_tokens))
        results = torch.ops.mkldnn._linear_pointwise.default(inputs, self.weight, self.bias, "none", [], "")
        return results if size == num_tokens else results.narrow(-2, 0, num_tokens)


class PartOfLinear(nn.Module):
    """A layer whose weights lie in another's `OneDnnLinear`."""

    def __init__(self, relaid: OneDnnLinear, index: int) -> None:
        super().__init__()
        self._relaid = (relaid,)  # in a tuple, so that its weights are not registered twice
        self._index = index

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._relaid[0].part(inputs, self._index)


def compiled_size(num_tokens: int) -> int:
    """The number of tokens, rounded up, that a product is computed for."""
    step = max(1, (1 << num_tokens.bit_length() - 1) // SIZES_PER_DOUBLING)
    return -(-num_tokens // step) * step


def relayout_linear_layers(model: nn.Module) -> int:
    """Replace a model's float32 linear layers on a CPU for good; returns how many were. Tied embeddings stay."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return 0
    num_relaid = 0
    for module in list(model.modules()):
        linear = {name: child for name, child in module.named_children() if _can_be_relaid(child)}
        there = (names for names in SAME_INPUT if linear.keys() >= set(names))
        groups = [names for names in there if _is_group([linear[name] for name in names])]
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
    return module.weight.dtype == torch.float32 and module.weight.device.type == "cpu"


def _is_group(layers: list[nn.Linear]) -> bool:
    """Whether layers can be one product: all with a bias or none."""
    return len({(layer.in_features, layer.bias is None) for layer in layers}) == 1


@torch.no_grad()
def _relaid(layers: list[nn.Linear]) -> OneDnnLinear | None:
    """Layers as one; None where that does not work here."""
    inputs = torch.linspace(-1, 1, 2 * layers[0].in_features).view(1, 2, -1)
    expected = [layer(inputs) for layer in layers]
    try:
        relaid = OneDnnLinear(layers)
        found = [relaid.part(inputs, index) for index in range(len(layers))]
    except (RuntimeError, NotImplementedError) as error:
        logger.info("linear layers stay in torch's layout: %s", first_line(error))
        return None
    if all(relative_error(*pair) <= TOLERANCE for pair in zip(found, expected, strict=True)):
        return relaid
    logger.warning("linear layers in oneDNN's layout give other results here; they stay in torch's")
    return None
