"""Matrix products on a CPU against torch's in float64, for each instruction set of this processor."""

import pytest
import torch

from laserbatch.pipeline.decoding.attention.amx import has_amx
from laserbatch.pipeline.decoding.attention.bfloat16 import as_array, as_tensor
from laserbatch.pipeline.decoding.model import cpu_product
from laserbatch.pipeline.decoding.model.cpu_product import PackedMatrix
from laserbatch.pipeline.processor import multiplies_bfloat16

SIZES = [(96, 64), (576, 960), (2048, 640), (1000, 100), (6, 5)]  # inputs, outputs


@pytest.fixture(params=["float32", "AVX512-BF16", "AMX"])
def dtype(request, monkeypatch) -> torch.dtype:
    if request.param == "float32":
        return torch.float32
    if not multiplies_bfloat16() or (request.param == "AMX" and not has_amx()):
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setattr(cpu_product, "has_amx", lambda: request.param == "AMX")
    return torch.bfloat16


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def product(matrix: PackedMatrix, *operands: torch.Tensor) -> torch.Tensor:
    return as_tensor(matrix.product(*(as_array(operand) for operand in operands)))


@pytest.mark.parametrize(("num_inputs", "num_outputs"), SIZES)
def test_a_product_is_exact_but_for_rounding(dtype, num_inputs, num_outputs):
    weight, bias = drawn(dtype, num_outputs, num_inputs), drawn(dtype, num_outputs)
    inputs, addend = drawn(dtype, 300, num_inputs), drawn(dtype, 300, num_outputs)
    exact = inputs.double() @ weight.double().T
    for has_bias in (False, True):
        matrix = PackedMatrix(weight, bias if has_bias else None)
        for has_addend in (False, True):
            expected = exact + has_bias * bias.double() + has_addend * addend.double()
            actual = product(matrix, inputs, *[addend] * has_addend)
            rounding = expected.abs() * torch.finfo(dtype).eps + exact.abs().max() * 1e-5
            assert ((actual.double() - expected).abs() <= rounding).all()


@pytest.mark.parametrize(("num_inputs", "num_outputs"), SIZES)
def test_a_token_has_the_same_bits_among_any_number_of_others(dtype, num_inputs, num_outputs):
    matrix = PackedMatrix(drawn(dtype, num_outputs, num_inputs), None)
    inputs, addend = drawn(dtype, 300, num_inputs), drawn(dtype, 300, num_outputs)
    together = product(matrix, inputs, addend)
    threads = torch.get_num_threads()
    try:
        for num_tokens in (1, 3, 16, 17, 40, 64, 65, 129, 299):
            torch.set_num_threads(1 + num_tokens % 2)
            for first in (0, 300 - num_tokens):
                part = slice(first, first + num_tokens)
                assert torch.equal(
                    product(matrix, inputs[part].contiguous(), addend[part].contiguous()), together[part]
                )
    finally:
        torch.set_num_threads(threads)


def test_what_is_not_finite_stays_with_its_token(dtype):
    matrix = PackedMatrix(drawn(dtype, 64, 96), None)
    inputs = drawn(dtype, 20, 96)
    finite = product(matrix, inputs)
    inputs[7, 3], inputs[9, 0] = float("nan"), float("inf")
    result = product(matrix, inputs)
    assert result[7].isnan().all() and not result[9].isfinite().any()
    others = [token for token in range(20) if token not in (7, 9)]
    assert torch.equal(result[others], finite[others])
