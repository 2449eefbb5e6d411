import pytest

from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.knowledge.parsers import parse_knowledge
from laserbatch.pipeline.knowledge.templates import load_template

USER, ITEM = load_template("kar_user"), load_template("kar_item")


@pytest.mark.parametrize(
    "text",
    [
        "1. Genre: mostly Mystery.\n2. Theme: the sea; more.",
        "Sure, here it is:\n\n1. **Genre**: mostly Mystery.\n\n2. **Theme:** the sea; more.",
        "1) Genre - mostly Mystery.\n2) Theme – the sea; more.",
        "**1. Genre:** mostly Mystery.\n**2. Theme:** the sea;\nmore.",
        "### 1. Genre\nmostly Mystery.\n### 2. Theme\nthe sea; more.",
        "- (1) Genre: mostly Mystery.\n- (2) Theme: the sea; more.",
        "1. Genre: mostly Mystery. 2. Theme: the sea; more.",
        "1. mostly Mystery.\n2. the sea; more.",
    ],
)
def test_numbered_aspects_in_the_forms_that_models_write(text):
    fields = parse_knowledge(USER, text)
    assert {name: " ".join(value.split()) for name, value in fields.items()} == {
        "Genre": "mostly Mystery.",
        "Theme": "the sea; more.",
    }


def test_a_repeated_aspect_is_joined_and_an_unknown_number_named():
    assert parse_knowledge(USER, "1. Genre: a\n2. Genre: b") == {"Genre": "a b"}
    assert parse_knowledge(USER, "12. something") == {"aspect 12": "something"}


@pytest.mark.parametrize("text", ["", "  \n", "A person with taste.", "1.\n2. "])
def test_no_numbered_aspect_is_a_row_error(text):
    with pytest.raises(RowError, match=r"^unparsable: "):
        parse_knowledge(USER, text)


def test_free_texts_are_kept_whole():
    assert parse_knowledge(ITEM, " A tale.\n") == {"text": "A tale."}
    with pytest.raises(RowError, match="empty"):
        parse_knowledge(ITEM, "\n")
