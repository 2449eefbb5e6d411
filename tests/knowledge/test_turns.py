"""Role marks of real models' chat templates, shortened; and the part of an answer that begins another turn."""

import pytest
from small_tokenizers import byte_level, wrap
from tokenizers import AddedToken

from laserbatch.pipeline.knowledge.turns import chat_marks

EACH = "{% for m in messages %}"
DONE = "{% endfor %}{% if add_generation_prompt %}"
NO_SYSTEM = "{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
# Name -> special tokens, template, tokens that end a text, labels that are cut from plain text.
TEMPLATES = {
    "chatml": (
        ["<|im_start|>", "<|im_end|>"],
        EACH + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n" + DONE + "<|im_start|>assistant\n{% endif %}",
        {"<|im_start|>", "<|im_end|>"}, [],
    ),
    "chatml of plain text": (
        [],
        EACH + "<|imx_start|>{{ m.role }}\n{{ m.content }}<|imx_end|>\n"
        + DONE + "<|imx_start|>assistant\n{% endif %}",
        set(), ["<|imx_end|>\n<|imx_start|>user", "<|imx_start|>"],
    ),
    "llama 2": (
        [],
        EACH + NO_SYSTEM + "{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]{% else %} "
        "{{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
        {"<s>", "</s>"}, ["[INST] And", "[/INST]"],
    ),
    "mistral v3": (
        ["[INST]", "[/INST]"],
        "{{ bos_token }}" + EACH + NO_SYSTEM + "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %} "
        "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
        {"<s>", "</s>", "[INST]", "[/INST]"}, [],
    ),
    "llama 3": (
        ["<|bos|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|bos|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul\n\n<|eot_id|>" + EACH
        + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
        + DONE + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        {"<|bos|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}, [],
    ),
    "gemma": (
        ["<start_of_turn>", "<end_of_turn>"],
        "{{ bos_token }}" + EACH + NO_SYSTEM + "<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        + DONE + "<start_of_turn>model\n{% endif %}",
        {"<s>", "<start_of_turn>", "<end_of_turn>"}, [],
    ),
    "phi": (
        ["<|user|>", "<|assistant|>", "<|end|>"],
        EACH + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n" + DONE + "<|assistant|>\n{% endif %}",
        {"<|user|>", "<|assistant|>", "<|end|>"}, ["<|system|>"],
    ),
    "zephyr": (
        [],
        EACH + "<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n" + DONE + "<|assistant|>\n{% endif %}",
        {"</s>"}, ["\n<|user|>\nAnd", "<|assistant|>"],
    ),
    "vicuna": (
        [],
        "{{ bos_token }}A chat between a curious user and an assistant. " + EACH + "{% if m.role == 'user' %}USER: "
        "{{ m.content }} {% elif m.role == 'assistant' %}ASSISTANT: {{ m.content }}{{ eos_token }}{% else %}"
        "{{ m.content }} {% endif %}" + DONE + "ASSISTANT:{% endif %}",
        {"<s>", "</s>"}, [" USER: And", "\nASSISTANT: More"],
    ),
    "openchat": (
        ["<|end_of_turn|>"],
        EACH + "GPT4 Correct {{ m.role | title }}: {{ m.content }}<|end_of_turn|>"
        + DONE + "GPT4 Correct Assistant:{% endif %}",
        {"<|end_of_turn|>"}, ["GPT4 Correct User: And"],
    ),
    "alpaca, one turn": (
        [],
        "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}Below is it.\n\n### Instruction:\n"
        "{{ messages[0].content }}\n\n### Response:\n",
        set(), ["\n\n### Instruction:\nAnd", "\n### Response:\nMore"],
    ),
    "command": (
        ["<|U|>", "<|C|>", "<|T|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"],
        EACH + "<|T|>{% if m.role == 'assistant' %}<|C|><|START_RESPONSE|>{{ m.content }}"
        "<|END_RESPONSE|>{% else %}<|U|>{{ m.content }}{% endif %}" + DONE + "<|T|><|C|>{% endif %}",
        {"<|U|>", "<|C|>", "<|T|>", "<|END_RESPONSE|>"}, [],
    ),
    "deepseek": (
        ["<｜User｜>", "<｜Assistant｜>"],
        EACH + "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}<｜Assistant｜>"
        "{{ m.content }}{{ eos_token }}{% else %}{{ m.content }}{% endif %}" + DONE + "<｜Assistant｜>{% endif %}",
        {"<｜User｜>", "<｜Assistant｜>", "</s>"}, [],
    ),
    "role tags": (
        [],
        EACH + "<role>{{ 'HUMAN' if m.role == 'user' else m.role | upper }}</role>{{ m.content }}"
        + DONE + "<role>ASSISTANT</role>{% endif %}",
        set(), ["<role>HUMAN</role>"],
    ),
    "phi-2": (
        [],
        EACH + "{{ 'Instruct' if m.role == 'user' else 'Output' }}: {{ m.content }}\n" + DONE + "Output:{% endif %}",
        set(), ["\nInstruct: And", "\nOutput: More"],
    ),
    "gpt-oss": (
        ["<|start|>", "<|message|>", "<|channel|>", "<|end|>"],
        EACH + "<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
        "{{ m.content }}<|end|>" + DONE + "<|start|>assistant{% endif %}",
        set(), ["<|end|><|start|>user"],
    ),
    "qwen 3": (
        ["<think>", "</think>"],
        EACH + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content }}<|im_end|>\n" + DONE + "<|im_start|>assistant\n<think>\n{% endif %}",
        {"<|im_start|>", "<|im_end|>"}, [],
    ),
    "gemma 4": (
        ["<|turn>", "<turn|>", "<|channel>", "<channel|>"],
        "{{ bos_token }}" + EACH + "<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n" + DONE
        + "<|turn>model\n<|channel>thought\n<channel|>{% endif %}",
        {"<s>", "<|turn>", "<turn|>"}, [],
    ),
    "apriel": (
        ["<|begin_user|>", "<|begin_assistant|>", "<|end|>"],
        EACH + "<|begin_{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}\n<|end|>{% endif %}\n" + DONE
        + "<|begin_assistant|>\nHere are my reasoning steps:\n{% endif %}",
        {"<|begin_user|>", "<|begin_assistant|>", "<|end|>"}, [],
    ),
    "kimi k3": (
        ["<|open|>", "<|sep|>", "<|close|>", "<|end_of_msg|>"],
        EACH + '<|open|>message role="{{ m.role }}"<|sep|>'
        + "{% if m.role == 'assistant' %}<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>{% endif %}"
        + "{{ m.content }}{% if m.role == 'assistant' %}<|close|>response<|sep|>{% endif %}<|close|>message<|sep|>"
        + "<|end_of_msg|>" + DONE + '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>{% endif %}',
        {"<|end_of_msg|>"}, ["<|close|>response<|sep|>"],
    ),
    "contents alone": ([], EACH + "{{ m.content }}\n{% endfor %}", set(), []),
    "none": ([], None, set(), []),
}  # fmt: skip


def tokenizer_of(name: str):
    special, template, _, _ = TEMPLATES[name]
    tokenizer = wrap(byte_level(), template)
    tokenizer.add_tokens([AddedToken(text, special=True) for text in special], special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_role_marks_of_a_template(name):
    (_, _, end_tokens, labels), tokenizer = TEMPLATES[name], tokenizer_of(name)
    marks = chat_marks(tokenizer)
    known = set() if name == "gpt-oss" else {"<pad>", "</s>", "<|im_end|>"}  # end tokens of all these tokenizers
    assert set(marks.end_tokens.values()) == end_tokens | known
    assert list(marks.end_tokens) == tokenizer.convert_tokens_to_ids(list(marks.end_tokens.values()))
    for label in labels:
        assert marks.turn_in(f"The film is tense.{label}").start() <= len("The film is tense.\n\n"), label
    for text in ("A user: one who looks. He said <b>no</b> [1] to it.\nGenre: crime\n# Heat\nUsers: all",
                 "ASSISTANT: So the user: it\nresponse: is", "  Output: a film"):  # fmt: skip
        assert marks.turn_in(text) is None, text


def test_a_label_within_a_line_is_one_where_no_prose_has_it():
    for name, text, mark in (
        ("vicuna", "A film USER: And", " USER:"),
        ("openchat", "A film GPT4 Correct User: And", " GPT4 Correct User:"),
        ("alpaca, one turn", "A film ### Instruction: And", " ### Instruction:"),
        ("phi-2", "A film. Instruct: And", " Instruct:"),
    ):
        assert chat_marks(tokenizer_of(name)).turn_in(text).group() == mark
    assert chat_marks(tokenizer_of("phi-2")).turn_in("A film, Output: one; its Instruct: it") is None
