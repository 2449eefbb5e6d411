"""The benchmark of products measures every system, and refuses results that differ."""

import cpu_products
import pytest
import torch

from laserbatch.pipeline.decoding.model.cpu_product import PackedMatrix


def test_every_system_is_measured_at_every_number_of_tokens():
    rows = cpu_products.measure(torch.float32, cpu_products.SMOKE)
    assert {(row["system"], row["tokens"]) for row in rows} == {
        (system, tokens) for system in ("ours", "onednn", "torch") for tokens in cpu_products.SMOKE.tokens
    }
    assert all(row["ms"].min > 0 for row in rows)


def test_a_wrong_product_is_not_timed(monkeypatch):
    product = PackedMatrix.product
    monkeypatch.setattr(PackedMatrix, "product", lambda self, inputs: 1.1 * product(self, inputs))
    with pytest.raises(AssertionError):
        cpu_products.measure(torch.float32, cpu_products.SMOKE)
