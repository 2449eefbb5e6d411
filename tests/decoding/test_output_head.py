"""Logits of a model that is split into body and head, against those of the model itself."""

import numpy as np
import pytest
import torch
from tiny_models import ARCHITECTURES, IN_USE, tiny_model

from laserbatch.pipeline.decoding.batch import Feed
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.model.load import prepare_model
from laserbatch.pipeline.decoding.model.output_head import HiddenRows, OutputHead
from laserbatch.pipeline.decoding.model.runner import ModelRunner
from laserbatch.pipeline.errors import ModelError

CPU = torch.device("cpu")


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *IN_USE])
def test_models_come_apart_and_give_the_same_logits(architecture):
    model = tiny_model(architecture)
    ids = torch.arange(3, 20)[None]
    head = OutputHead(model)
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits[0]
        hidden = head.hidden_of(ids)
        torch.testing.assert_close(head.logits_of(hidden), expected)
        torch.testing.assert_close(head.logits_of(hidden[4:6]), expected[4:6])
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits[0], expected)  # the model is unchanged


def test_a_model_that_adds_to_its_bodys_result_outside_of_its_head_is_refused():
    class Shifted(type(tiny_model())):
        def forward(self, input_ids=None, position_ids=None, **arguments):
            output = super().forward(input_ids=input_ids, position_ids=position_ids, **arguments)
            if input_ids is not None:
                output.logits = output.logits + input_ids[..., None]
            return output

    model = tiny_model()
    model.__class__ = Shifted
    with pytest.raises(ModelError, match="other logits packed"):
        prepare_model(model)


def test_rows_of_a_step_are_computed_as_they_are_asked_for():
    model = tiny_model()
    plain = tiny_model()
    prepare_model(model)
    runner = ModelRunner(model, KVCache(2), CPU)
    texts = [np.arange(size, dtype=np.int32) for size in (7, 4)]
    feeds = [Feed(runner.cache.acquire(text, 32).row, text) for text in texts]
    output = runner.forward(feeds)
    expected = torch.stack([plain(input_ids=torch.from_numpy(text)[None].long()).logits[0, -1] for text in texts])
    torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output.rows.of(np.array([1])), output.logits[1:])
    every = HiddenRows(runner.head, output.rows.hidden, np.arange(11))
    torch.testing.assert_close(every.of(np.arange(11))[[6, 10]], output.logits)
