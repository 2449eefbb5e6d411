"""Linear layers on a CPU: weights in the layout of our products, and one product for layers that share an input.

torch multiplies float32 matrices with MKL, in the weights' own layout, and rearranges bfloat16 weights for each
product, which takes longer than the product. A layer whose results differ from torch's stays as it is.
"""

import logging
from typing import TypeGuard

import torch
from torch import nn

from laserbatch.pipeline.decoding.attention.bfloat16 import as_array, as_tensor
from laserbatch.pipeline.decoding.attention.interface import relative_error
from laserbatch.pipeline.processor import multiplies_bfloat16

logger = logging.getLogger(__name__)

# Names of layers that transformers' models call with one input, in this order.
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Relative error of a layer above which it stays as it is.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}


class JoinedLinear(nn.Module):
    """Linear layers that share an input, as one product."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        from laserbatch.pipeline.decoding.model.cpu_product import PackedMatrix  # numba takes a while to import

        super().__init__()
        weight = torch.cat([layer.weight.detach() for layer in layers])
        bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
        self.out_features = [layer.out_features for layer in layers]
        self.matrix = PackedMatrix(weight, bias)
        self.weight = nn.Parameter(self.matrix.packed, requires_grad=False)  # so that the model's parameters include it
        # The newest input and its parts, in a list: setting a module's attribute takes longer than a small product.
        self._newest: list = [None, ()]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The first layer's results: (..., out_features[0]) for inputs (..., in_features)."""
        if len(self.out_features) == 1:
            return self._product(inputs)
        return self.part(inputs, 0)

    def part(self, inputs: torch.Tensor, index: int) -> torch.Tensor:
        """One layer's results; the product with an input is computed once for all layers."""
        newest = self._newest
        if inputs is not newest[0]:
            newest[:] = inputs, self._product(inputs).split_with_sizes(self.out_features, -1)
        result = newest[1][index]
        if index == len(self.out_features) - 1:
            newest[:] = None, ()  # do not keep activations in memory
        return result

    def _product(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = as_array(inputs.detach().reshape(-1, inputs.shape[-1]).contiguous())
        return as_tensor(self.matrix.product(tokens)).view(*inputs.shape[:-1], -1)


class PartOfLinear(nn.Module):
    """A layer whose weights are a part of a `JoinedLinear`."""

    def __init__(self, relaid: JoinedLinear, index: int) -> None:
        super().__init__()
        self._relaid = (relaid,)  # in a tuple, so that its weights are not registered twice
        self._index = index

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._relaid[0].part(inputs, self._index)


def relayout_linear_layers(model: nn.Module) -> int:
    """Replace a model's linear layers on a CPU for good; return the number replaced. Tied embeddings stay.

    Layers in float32 are replaced, and layers in bfloat16 if the processor multiplies it.
    """
    num_relaid = 0
    for module in list(model.modules()):
        linear = {name: child for name, child in module.named_children() if _can_be_relaid(child)}
        kind_of = {name: (layer.in_features, layer.bias is None) for name, layer in linear.items()}
        candidates = (names for names in SAME_INPUT if linear.keys() >= set(names))
        groups = [names for names in candidates if len({kind_of[name] for name in names}) == 1]  # can be one product
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
    """Whether a module is a plain linear layer without hooks, on a CPU and of a type that our products take."""
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return False
    if module.weight.device.type != "cpu":
        return False
    is_paired = module.weight.dtype == torch.bfloat16 and module.in_features % 2 == 0
    return module.weight.dtype == torch.float32 or (is_paired and multiplies_bfloat16())


@torch.no_grad()
def _relaid(layers: list[nn.Linear]) -> JoinedLinear | None:
    """Join layers with the same input; None if the product gives other results on this processor."""
    dtype = layers[0].weight.dtype
    inputs = torch.linspace(-1, 1, 2 * layers[0].in_features, dtype=dtype).view(1, 2, -1)
    expected = [layer(inputs) for layer in layers]
    relaid = JoinedLinear(layers)
    results = [relaid.part(inputs, index) for index in range(len(layers))]
    if all(relative_error(*pair) <= TOLERANCE[dtype] for pair in zip(results, expected, strict=True)):
        return relaid
    logger.warning("linear layers keep torch's products: ours give other results on this processor")
    return None
