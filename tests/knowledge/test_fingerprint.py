from dataclasses import replace

import numpy as np

from laserbatch.pipeline.knowledge.prompts import RenderedPrompt, fingerprint, load_template

RENDERED = RenderedPrompt(np.array([1, 2, 3], np.int32), "abc", 0, 0)
TEMPLATE = load_template("kar_user")
DECODING = {"verifier": "relaxed", "top_k": 2}


def test_the_same_input_has_the_same_fingerprint_whatever_the_order_of_settings():
    first = fingerprint(RENDERED, TEMPLATE, "m", DECODING)
    again = replace(RENDERED, token_ids=RENDERED.token_ids.copy(), text="other words for people")
    assert first == fingerprint(again, TEMPLATE, "m", dict(reversed(DECODING.items())))
    assert len(first) == 32 and int(first, 16) >= 0


def test_prompt_version_model_and_decoding_each_change_it():
    longer = replace(RENDERED, token_ids=np.array([1, 2, 3, 4], np.int32))
    newer = TEMPLATE.model_copy(update={"version": TEMPLATE.version + 1})
    fingerprints = {
        fingerprint(RENDERED, TEMPLATE, "m", DECODING),
        fingerprint(longer, TEMPLATE, "m", DECODING),
        fingerprint(RENDERED, newer, "m", DECODING),
        fingerprint(RENDERED, TEMPLATE, "n", DECODING),
        fingerprint(RENDERED, TEMPLATE, "m", DECODING | {"top_k": 3}),
    }
    assert len(fingerprints) == 5
