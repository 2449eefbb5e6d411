"""Packed linear layers compute the same as plain ones, for all shapes and in any order of calls."""

import copy

import pytest
import torch
from tiny_models import ARCHITECTURES, tiny_model
from torch import nn

from laserbatch.pipeline.decoding.model import cpu_linear
from laserbatch.pipeline.decoding.model.cpu_linear import JoinedLinear, relayout_linear_layers


class Projections(nn.Module):
    """Three linear layers with the same input."""

    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(48, size, bias=has_bias) for size in (64, 32, 16))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 17, 300])
@torch.no_grad()
def test_packed_layers_equal_plain_ones(has_bias, num_tokens):
    plain = Projections(has_bias)
    packed = copy.deepcopy(plain)
    assert relayout_linear_layers(packed) == 3
    assert isinstance(packed.q_proj, JoinedLinear)
    inputs = torch.randn(1, num_tokens, 48)
    for name in ("q_proj", "k_proj", "v_proj"):
        torch.testing.assert_close(getattr(packed, name)(inputs), getattr(plain, name)(inputs))


def test_packed_layers_compute_where_gradients_are_recorded():
    layers = Projections(True)
    relayout_linear_layers(layers)
    assert not layers.q_proj(torch.randn(1, 5, 48, requires_grad=True)).requires_grad


@torch.no_grad()
def test_layers_of_one_product_may_be_called_in_any_order_with_any_input():
    plain = Projections(False)
    packed = copy.deepcopy(plain)
    relayout_linear_layers(packed)
    inputs = [torch.randn(1, 5, 48) for _ in range(2)]
    for name, which in (("v_proj", 0), ("q_proj", 1), ("k_proj", 0), ("k_proj", 1), ("v_proj", 1), ("q_proj", 0)):
        actual = getattr(packed, name)(inputs[which])
        torch.testing.assert_close(actual, getattr(plain, name)(inputs[which]))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_a_packed_model_computes_the_same(architecture):
    model = tiny_model(architecture)
    num_linear = sum(type(module) is nn.Linear for module in model.modules())
    input_ids = torch.arange(18, 40)[None]
    expected = model(input_ids=input_ids).logits
    assert relayout_linear_layers(model) == num_linear > 0
    assert not any(type(module) is nn.Linear for module in model.modules())
    torch.testing.assert_close(model(input_ids=input_ids).logits, expected, atol=1e-3, rtol=1e-3)


def test_tied_embeddings_stay_and_other_types_are_left_alone():
    tied = tiny_model(tie_word_embeddings=True)
    embeddings = tied.get_input_embeddings().weight
    relayout_linear_layers(tied)
    assert tied.get_input_embeddings().weight is embeddings and embeddings.layout == torch.strided
    assert relayout_linear_layers(tiny_model().to(torch.float16)) == 0


@torch.no_grad()
def test_bfloat16_layers_stay_where_the_processor_does_not_multiply_it(monkeypatch):
    monkeypatch.setattr(cpu_linear, "multiplies_bfloat16", lambda: False)
    assert relayout_linear_layers(tiny_model().to(torch.bfloat16)) == 0


@torch.no_grad()
def test_layers_stay_where_results_differ(monkeypatch):
    monkeypatch.setattr(JoinedLinear, "_product", lambda self, inputs: inputs.new_zeros(*inputs.shape[:-1], 112))
    layers = Projections(False)
    assert relayout_linear_layers(layers) == 0
    assert type(layers.q_proj) is nn.Linear
    assert max(cpu_linear.TOLERANCE.values()) < 1
