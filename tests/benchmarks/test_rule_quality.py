"""Which answers count as kept; `guided.py`, `drift.py` and `rule_auc.py` count them in the same way."""

import numpy as np
from rule_quality import is_kept

from laserbatch.pipeline.decoding.sequence import GenerationResult
from laserbatch.pipeline.knowledge.templates import KnowledgeSettings


def test_a_sound_answer_is_kept_and_one_that_repeats_its_prompt_is_not():
    prompt, text = np.arange(100, 300, dtype=np.int32), "A quiet story about the sea, for readers of calm books."

    def answer(token_ids: np.ndarray) -> GenerationResult:
        return GenerationResult(
            "0", token_ids.astype(np.int32), np.zeros(len(token_ids), np.uint8), text, "end_of_text"
        )

    template = KnowledgeSettings(item_template="brief_item").template("item")
    assert is_kept(template, answer(np.arange(20)), prompt)
    assert not is_kept(template, answer(prompt), prompt)
