"""Logits of a model taken apart into body and head, against those of the model itself."""

import numpy as np
import pytest
import torch
from tiny_models import ARCHITECTURES, VOCAB, tiny_model
from torch import nn

from laserbatch.pipeline.decoding.batch import Feed
from laserbatch.pipeline.decoding.memory.kv_cache import KVCache
from laserbatch.pipeline.decoding.model.load import prepare_model
from laserbatch.pipeline.decoding.model.output_head import HeldLogits, OutputHead, has_output_head
from laserbatch.pipeline.decoding.model.runner import ModelRunner

CPU = torch.device("cpu")


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "mixtral"])
def test_known_models_come_apart_and_give_the_same_logits(architecture):
    model = tiny_model(architecture)
    assert has_output_head(model, VOCAB)
    ids = torch.arange(3, 20)[None]
    head = OutputHead(model)
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits[0]
        hidden = head.hidden_of(ids)
        torch.testing.assert_close(head.logits_of(hidden), expected)
        torch.testing.assert_close(head.logits_of(hidden[4:6]), expected[4:6])
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits[0], expected)  # it is as it was
    assert prepare_model(model).splits_head


def test_a_model_that_adds_to_its_bodys_result_outside_of_its_head_does_not_come_apart():
    class Shifted(type(tiny_model())):
        def forward(self, input_ids=None, **arguments):
            output = super().forward(input_ids=input_ids, **arguments)
            if input_ids is not None:
                output.logits = output.logits + input_ids[..., None]
            return output

    model = tiny_model()
    model.__class__ = Shifted
    assert not has_output_head(model, VOCAB)


def test_a_model_without_a_body_does_not_come_apart():
    assert not has_output_head(nn.Linear(2, 2), VOCAB)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_rows_of_a_step_equal_those_of_a_step_with_logits(architecture):
    model = tiny_model(architecture)
    prepare_model(model)
    outputs = []
    for splits_head in (False, True):
        runner = ModelRunner(model, KVCache(2), CPU, splits_head=splits_head)
        rows = [runner.cache.acquire(np.arange(5, dtype=np.int32), 32).row for _ in range(2)]
        feeds = [Feed(row, np.arange(size, dtype=np.int32)) for row, size in zip(rows, (7, 4), strict=True)]
        outputs.append(runner.forward(feeds))
        runner.cache.commit(rows, outputs[-1].batch.sizes, outputs[-1].batch.slot_mapping)
        outputs.append(runner.forward([Feed(row, np.array([9], np.int32)) for row in rows]))
    for whole, split in (outputs[::2], outputs[1::2]):
        assert split.rows.num_rows == whole.rows.num_rows
        torch.testing.assert_close(split.logits, whole.logits)
    torch.testing.assert_close(outputs[3].rows.of(np.array([1])), outputs[1].logits[1:])


def test_held_logits_are_given_back_or_chosen_from():
    logits = torch.arange(6.0).view(3, 2)
    rows = HeldLogits(logits)
    assert rows.num_rows == 3 and rows.of(np.arange(3)) is logits
    assert rows.of(np.array([2, 0])).tolist() == [[4.0, 5.0], [0.0, 1.0]]
