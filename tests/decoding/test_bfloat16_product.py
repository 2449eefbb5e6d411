"""Products with bfloat16 matrices against torch's in float32, by each kind of instruction that this processor has."""

import pytest
import torch

from laserbatch.pipeline.decoding.attention.bfloat16 import as_array, as_tensor
from laserbatch.pipeline.decoding.model import bfloat16_product
from laserbatch.pipeline.decoding.model.bfloat16_product import Bfloat16Matrix, has_amx
from laserbatch.pipeline.decoding.model.huge_pages import CHUNK, HugePages
from laserbatch.pipeline.processor import multiplies_bfloat16

if not multiplies_bfloat16():
    pytest.skip("this processor does not multiply bfloat16", allow_module_level=True)

SIZES = [(96, 64), (576, 960), (2048, 640), (1000, 100), (7, 5)]  # inputs, outputs


@pytest.fixture(params=["AMX", "AVX512-BF16"])
def instructions(request, monkeypatch):
    if request.param == "AMX" and not has_amx():
        pytest.skip("this processor has no AMX")
    monkeypatch.setattr(bfloat16_product, "has_amx", lambda: request.param == "AMX")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def product(matrix: Bfloat16Matrix, *operands: torch.Tensor) -> torch.Tensor:
    return as_tensor(matrix.product(*(as_array(operand) for operand in operands)))


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SIZES)
def test_a_product_is_that_of_float32_rounded_once(num_inputs, num_outputs):
    weight, bias = drawn(num_outputs, num_inputs), drawn(num_outputs)
    inputs, addend = drawn(300, num_inputs), drawn(300, num_outputs)
    exact = inputs.double() @ weight.double().T
    for has_bias in (False, True):
        matrix = Bfloat16Matrix(weight, bias if has_bias else None, HugePages())
        for has_addend in (False, True):
            expected = exact + has_bias * bias.double() + has_addend * addend.double()
            actual = product(matrix, inputs, *[addend] * has_addend)
            rounding = expected.abs() * 2**-8 + exact.abs().max() * 1e-5
            assert ((actual.double() - expected).abs() <= rounding).all()


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SIZES)
def test_a_token_has_the_same_bits_among_any_number_of_others(num_inputs, num_outputs):
    matrix = Bfloat16Matrix(drawn(num_outputs, num_inputs), None, HugePages())
    inputs, addend = drawn(300, num_inputs), drawn(300, num_outputs)
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


@pytest.mark.usefixtures("instructions")
def test_what_is_not_finite_stays_with_its_token():
    matrix = Bfloat16Matrix(drawn(64, 96), None, HugePages())
    inputs = drawn(20, 96)
    finite = product(matrix, inputs)
    inputs[7, 3], inputs[9, 0] = float("nan"), float("inf")
    result = product(matrix, inputs)
    assert result[7].isnan().all() and not result[9].isfinite().any()
    others = [token for token in range(20) if token not in (7, 9)]
    assert torch.equal(result[others], finite[others])


def test_arrays_of_huge_pages_lie_apart_and_stay():
    memory = HugePages()
    arrays = [memory.empty(size) for size in (5, 1000, CHUNK, 64)]
    for number, array in enumerate(arrays):
        array[:] = number
    del memory
    assert all((array == number).all() and array.ctypes.data % 64 == 0 for number, array in enumerate(arrays))
