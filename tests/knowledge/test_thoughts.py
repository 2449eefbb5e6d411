"""Thoughts before an answer, by the marks of models in use."""

import pytest
from small_tokenizers import CHATML, byte_level, wrap
from tokenizers import AddedToken

from laserbatch.pipeline.knowledge.thoughts import opens_thoughts, without_thoughts

PAIRS = [
    ("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"), ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"), ("<thought>", "</thought>"), ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"), ("<|channel>thought\n", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ("Here is my thought process:", "Here is my response:"), ("<|start_think|>", "<|end_think|>"),
    ("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>"),
]  # fmt: skip


def tokenizer_with(*tokens: str, template: str = CHATML.replace("<think>\n\n</think>\n", "")):
    tokenizer = wrap(byte_level(), template)
    tokenizer.add_tokens([AddedToken(token, special=False) for token in tokens])
    return tokenizer


OTHER = tokenizer_with()


def cut(text: str, tokenizer=OTHER, is_open: bool = False, prompt: str = "") -> tuple[str, bool]:
    answer = without_thoughts(tokenizer, text, is_open, lambda mark: mark in prompt)
    return "".join(text[slice(*span)] for span in answer.spans), answer.open_at is not None


@pytest.mark.parametrize(("begins", "ends"), PAIRS)
def test_thoughts_at_the_beginning_are_cut_whatever_model_wrote_them(begins, ends):
    assert cut(f"\n{begins} It asks for a film. {ends}\n\nA tense film.") == ("A tense film.", False)
    assert cut(f"{begins} It asks")[1], "they do not end"
    assert cut(f"A film {begins} it {ends} it")[0] == f"A film {begins} it {ends} it", "no mark of this model"
    prompt = f"Answer with {begins} first."
    assert cut(f"{begins}it{ends}yes", prompt=prompt) == (f"{begins}it{ends}yes", False), "the prompt asks for it"


@pytest.mark.parametrize(("begins", "ends"), PAIRS)
def test_thoughts_of_a_models_own_marks_are_cut_wherever_they_stand(begins, ends):
    template = f"{{% set mark = '{begins.strip()}' %}}" + CHATML
    for own in (tokenizer_with(template=template), tokenizer_with(begins.strip(), ends)):
        assert cut(f"A film. {begins}why?{ends} Tense.", own) == ("A film. Tense.", False)
        assert cut(f"It asks.{ends}\nA film.", own) == ("A film.", False), "the prompt opened them"
        assert cut(f"It asks.{ends}\nA film.", own, is_open=True) == ("A film.", False)
        assert cut(f"{begins}a{begins}b{ends}A film.", own) == ("A film.", False)
        assert cut(f"A film.{begins}It asks", own)[1] and cut("It asks", own, is_open=True)[1]
        assert opens_thoughts(own, f"<|im_start|>assistant\n{begins}\n")
        assert not opens_thoughts(own, f"<|im_start|>assistant\n{begins}\n\n{ends}\n\n")
    assert not opens_thoughts(OTHER, f"assistant\n{begins}\n")


def test_a_text_without_thoughts_is_kept_as_it_is():
    for text in (
        "",
        " \n",
        "A <b>tense</b> film </think> of [1] <thinkers>",
        "He thinks: <reasons>",
        "<answer>A</answer>",
    ):
        assert without_thoughts(OTHER, text, False, lambda mark: False).spans == ((0, len(text)),)


def test_the_wrapping_of_an_answer_goes_with_the_thoughts_unless_the_prompt_asks_for_it():
    text = "<reasoning>So.</reasoning>\n<answer>\nA film.\n</answer>\nDone"
    assert cut(text) == ("A film.", False)
    assert cut(text, prompt="Give <answer>.")[0].startswith("<answer>")
    assert (
        cut("<|begin_of_thought|>So.<|end_of_thought|><|begin_of_solution|>A film.<|end_of_solution|>")[0] == "A film."
    )
