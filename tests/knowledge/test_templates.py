import re

import pyarrow as pa
import pytest

from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.knowledge.histories import how_interacted
from laserbatch.pipeline.knowledge.templates import SHIPPED_TEMPLATES, KnowledgeSettings, load_template

MINIMAL = "name: mine\nversion: 2\nframework: kar\nside: item\nparser: free\ninstruction: Describe.\n"


def test_shipped_templates_load():
    names = {path.stem for path in SHIPPED_TEMPLATES.glob("*.yaml")}
    assert {"kar_user", "kar_item"} <= names
    for name in names:
        template = load_template(name)
        assert template.identity == f"{name}@{template.version}"


def test_a_folder_of_ones_own_comes_first(tmp_path):
    (tmp_path / "mine.yaml").write_text(MINIMAL)
    (tmp_path / "kar_item.yaml").write_text(MINIMAL.replace("mine", "kar_item"))
    assert load_template("mine", tmp_path).version == 2
    assert load_template("kar_item", str(tmp_path)).version == 2
    assert load_template("kar_user", tmp_path).side == "user"
    with pytest.raises(ConfigError, match="templates are: kar_item, kar_user, mine"):
        load_template("yours", tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MINIMAL + "instrucion: x\n", r"instrucion: no such key; did you mean 'instruction'\?$"),
        (MINIMAL.replace("version: 2\n", ""), "version"),
        (MINIMAL + "history: {}\n", "history"),
        (MINIMAL + "attributes:\n", r"attributes: expected keys .*found nothing"),
        (MINIMAL.replace("free", "aspects"), "needs `factors`"),
        (MINIMAL.replace("2", "two"), r"version: .*\(found 'two'\)"),
        (MINIMAL + "attributes: {line: '{nonsense}'}\n", "nonsense"),
        (MINIMAL + "attributes: {line: '{value'}\n", "format string"),
        (MINIMAL.replace("mine", "other"), "calls itself"),
        ("a: [", "not YAML"),
        (
            MINIMAL.replace("Describe.", "Describe the {itm}."),
            r"line 6: instruction: has \{itm\}; fields are",
        ),
        (MINIMAL + 'request: |-\n  As {"a": 1}\n', r"line 7: request: .*a brace that is meant is doubled"),
        (MINIMAL.replace("Describe.", "Describe it {"), "line 6: instruction: is not a format string"),
        (MINIMAL.replace("Describe.", "Describe. <|im_end|>"), r"line 6: .*<\|im_end\|>, a control token"),
        (MINIMAL.replace("free", "json"), "needs `fields`"),
        (MINIMAL.replace("free", "jsn"), "line 5: parser"),
        (MINIMAL + "attributes:\n  line: '{nonsense}'\n", "line 8: attributes.line"),
        (MINIMAL.replace("free", "json") + "fields: {a: text}\nencode: [b]\n", "`encode` has 'b', which is none of a"),
        (MINIMAL + "parser_path: x\n", "parser_path is no key"),
    ],
)
def test_a_wrong_template_is_refused_by_name(tmp_path, text, said):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_template("mine", tmp_path)
    assert "pydantic" not in str(caught.value)


def test_prompts_speak_of_your_users_and_items_and_of_what_was_done():
    words = {"user": "listener", "item": "song", "items": "songs"}
    for name in sorted(path.stem for path in SHIPPED_TEMPLATES.glob("*.yaml")):
        side = name.rpartition("_")[2]
        knowledge = KnowledgeSettings(words=words, **{f"{side}_template": name})
        told = knowledge.template(side, "clicked").model_dump_json(exclude={"name", "factors"})
        assert "song" in told and not re.search(r"titles|person|\b[Rr]ated\b", told), name
    told = KnowledgeSettings(words=words | {"interacted": "skipped"}).template("user", "clicked")
    assert "songs that the listener skipped" in told.instruction and told.history.heading == "Skipped songs:"


@pytest.mark.parametrize(
    ("ratings", "said"),
    [(None, "picked"), ([1.0, 0.0], "picked"), ([1.0, None], "picked"), ([1, 5], "rated from 1 to 5"),
     ([0, 10], "rated"), ([], "rated from 1 to 5")],
)  # fmt: skip
def test_what_was_done_is_said_by_the_ratings_that_there_are(ratings, said):
    columns = {} if ratings is None else {"rating": pa.array(ratings, pa.float64())}
    assert how_interacted(pa.table({"user_id": pa.nulls(len(ratings or ()))} | columns)) == said
