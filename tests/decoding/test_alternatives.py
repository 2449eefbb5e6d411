"""What is recorded as the target's runner-up is what a plain forward over the finished text says."""

import numpy as np
import pytest
import torch
from tiny_models import (
    END_IDS,
    NonsenseDrafter,
    OracleDrafter,
    byte_tokenizer,
    plain_texts,
    requests_for,
    tiny_engine,
    tiny_model,
    tiny_prompts,
)

from laserbatch.pipeline.decoding.alternatives import MIN_PROBABILITY, NO_ALTERNATIVE, runners_up
from laserbatch.pipeline.decoding.verifiers import Greedy, Relaxed

MODEL = tiny_model(initializer_range=0.16)
PROMPTS = tiny_prompts(12)


def runners_up_plainly(model, prompt, text) -> list[int]:
    """Of each token of a finished text, by one forward over prompt and text and sorting every row."""
    ids = torch.tensor([[*prompt.tolist(), *text]])
    with torch.no_grad():
        probabilities = torch.softmax(model(input_ids=ids).logits[0].float(), -1).numpy()
    found = []
    for place, token in enumerate(text):
        row = probabilities[len(prompt) + place - 1]
        best = next(t for t in np.argsort(-row, kind="stable").tolist() if t != token)
        found.append(best if row[best] >= MIN_PROBABILITY and best not in END_IDS else NO_ALTERNATIVE)
    return found


@pytest.mark.parametrize("batch_size, prefill", [(1, 2048), (5, 2048), (3, 7)])
@pytest.mark.parametrize("rule", [Greedy(), Relaxed(20, 0.01)])
def test_alternatives_equal_those_of_a_plain_forward(batch_size, prefill, rule):
    texts = plain_texts(MODEL, PROMPTS, 24)
    engine = tiny_engine(MODEL, batch_size=batch_size, max_prefill_tokens=prefill, record_alternatives=True)
    num_recorded = num_not_choice = 0
    for drafter in (None, OracleDrafter(texts), NonsenseDrafter(40)):
        for result in engine.generate(requests_for(PROMPTS, 24), drafter, rule):
            number = int(result.request_id)
            expected = runners_up_plainly(MODEL, PROMPTS[number], result.token_ids.tolist())
            assert result.alternative_ids.dtype == np.int32
            assert result.alternative_ids.tolist() == expected
            num_recorded += sum(token >= 0 for token in expected)
            num_not_choice += result.token_ids.tolist() != texts[number]
    assert num_recorded > 20, "the random model is too sure to test with"
    assert (num_not_choice > 0) == isinstance(rule, Relaxed)


def test_texts_are_the_same_and_nothing_is_kept_when_off():
    texts = plain_texts(MODEL, PROMPTS, 24)
    for records in (False, True):
        engine = tiny_engine(MODEL, batch_size=4, record_alternatives=records)
        for result in engine.generate(requests_for(PROMPTS, 24), OracleDrafter(texts), Greedy()):
            assert result.token_ids.tolist() == texts[int(result.request_id)]
            assert (result.alternative_ids is not None) == records


def test_alternatives_are_cut_with_the_text_at_a_stop_string():
    model = tiny_model(vocab_size=257, eos_token_id=256, seed=3, initializer_range=0.1)
    model.generation_config.eos_token_id = 256
    tokenizer = byte_tokenizer()
    whole = {
        r.request_id: r
        for r in tiny_engine(model, tokenizer, record_alternatives=True).generate(requests_for(PROMPTS, 20))
    }
    name = max(whole, key=lambda i: len(whole[i].text))
    engine = tiny_engine(model, tokenizer, stop_strings=(whole[name].text[5:7],), record_alternatives=True)
    oracle = OracleDrafter([whole[str(i)].token_ids.tolist() for i in range(len(PROMPTS))])
    cut = {r.request_id: r for r in engine.generate(requests_for(PROMPTS, 20), oracle, Greedy())}[name]
    assert cut.finish_reason == "stop"
    assert cut.alternative_ids.tolist() == whole[name].alternative_ids.tolist()[: len(cut.token_ids)]


def test_the_choice_is_the_alternative_to_another_accepted_token():
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 4 + [[0.93, 0.03, 0.02, 0.02]])
    is_end = np.array([False, False, True, False])
    rows, written = np.arange(5), np.array([0, 1, 2, 3, 0])
    assert runners_up(torch.log(probabilities), rows, written, is_end).tolist() == [1, 0, 0, 0, NO_ALTERNATIVE]


def test_an_end_token_is_no_alternative():
    logits = torch.log(torch.tensor([[0.5, 0.4, 0.1]]))
    is_end = np.array([False, True, False])
    assert runners_up(logits, np.array([0]), np.array([0]), is_end).tolist() == [NO_ALTERNATIVE]
