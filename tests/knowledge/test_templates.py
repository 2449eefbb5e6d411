import re

import pyarrow as pa
import pytest

from laserbatch.jobs.settings import Settings
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.knowledge.domains import domain_of, domains
from laserbatch.pipeline.knowledge.histories import labels_of
from laserbatch.pipeline.knowledge.templates import SHIPPED_TEMPLATES, KnowledgeSettings, Labels, load_template

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
    with pytest.raises(ConfigError, match=r"templates are: .*kar_item, kar_user, mine"):
        load_template("yours", tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "instrucion: x\n", r"instrucion: no such key; did you mean 'instruction'\?$"),
        (MINIMAL.replace("version: 2\n", ""), "version"),
        (MINIMAL + "history: {}\n", "history"),
        (MINIMAL + "attributes:\n", r"attributes: expected keys .*found nothing"),
        (MINIMAL.replace("free", "aspects"), "needs their names in `factors`"),
        (MINIMAL.replace("2", "two"), r"version: .*\(found 'two'\)"),
        (MINIMAL.replace("mine", "other"), "has the name"),
        ("a: [", "not YAML"),
        (
            MINIMAL.replace("Describe.", "Describe the {itm}."),
            r"line 6: instruction: has \{itm\}; expected fields are",
        ),
        (MINIMAL + 'request: |-\n  As {"a": 1}\n', r"line 7: request: .*for literal braces"),
        (MINIMAL.replace("Describe.", "Describe {item:d}."), r"line 6: instruction: is not .*code 'd'.*; leave"),
        (MINIMAL.replace("Describe.", "Describe {item:{user}}."), "line 6: instruction: is not a format string"),
        (MINIMAL + "attributes: {line: '{value!x}'}\n", "attributes.line: is not a format string"),
        (
            MINIMAL.replace("side: item", "side: user") + "history: {max_events: off}\n",
            r"history\.max_events: expected a number \(found False",
        ),
        (MINIMAL + "json_schema: {const: 2025-01-01}\n", r"line 7: json_schema\.const: .*not a valid JSON value"),
        (MINIMAL + "attributes: {columns: []}\n", "prompts show nothing of the item: name columns"),
        (MINIMAL + "attributes: {columns: title}\n", r"; attributes\.columns: expected a list, .*\(found 'title'\)"),
        (MINIMAL.replace("Describe.", "Describe it {"), "line 6: instruction: is not a format string"),
        (MINIMAL.replace("Describe.", "Describe. <|im_end|>"), r"line 6: .*<\|im_end\|>, a control token"),
        (MINIMAL.replace("free", "json"), "needs `fields`"),
        (MINIMAL.replace("free", "jsn"), "line 5: parser"),
        (MINIMAL + "attributes:\n  line: '{nonsense}'\n", "line 8: attributes.line"),
        (MINIMAL.replace("free", "json") + "fields: {a: text}\nencode: [b]\n", "'b', but parser `json` gives a$"),
        (MINIMAL + "encode: [summary]\n", "`encode` has 'summary', but parser `free` gives text$"),
        (MINIMAL + "encode: [text, Text]\n", "line 7: encode: has names that are equal apart from case: text, Text"),
        (MINIMAL.replace("free", "json") + "fields: {a: text, 'A ': list}\n", "line 7: fields: has names that are eq"),
        (MINIMAL.replace("free", "attributes") + "factors: [Mood, mood]\n", "line 7: factors: has names that are"),
        (MINIMAL.replace("free", "attributes") + "factors: [Mood, '']\n", r"factors\.1: expected a word"),
        (MINIMAL.replace("free", "aspects") + 'factors: ["Mood\\nTone"]\n', r"factors\.0: expected .*in one line"),
        (MINIMAL + "attributes: {line: '- {label}'}\n", r"line 7: attributes\.line: has no \{value\}, so"),
        (
            MINIMAL.replace("side: item", "side: user") + "history: {line_unrated: '{number}.'}\n",
            r"history\.line_unrated: has no \{title\} or \{attributes\}, so prompts",
        ),
        (MINIMAL + "parser_path: x\n", "parser_path is not a key"),
        (
            MINIMAL.replace("Describe.", '""') + "attributes: {heading: 'Item:'}\n",
            "the prompt asks nothing: `system`, .*no words",
        ),
    ],
)
def test_a_wrong_template_is_refused_by_name(tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_template("mine", tmp_path)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize("question", ["system: Describe it.", "attributes: {line: 'Describe the book {value}.'}"])
def test_a_question_may_stand_in_the_system_message_or_around_an_attribute(tmp_path, question):
    (tmp_path / "mine.yaml").write_text(MINIMAL.replace("instruction: Describe.", f"instruction: ''\n{question}"))
    assert load_template("mine", tmp_path).instruction == ""


def test_prompts_speak_of_your_users_and_items_and_of_what_was_done():
    words = {"user": "listener", "item": "song", "items": "songs"}
    for name in sorted(path.stem for path in SHIPPED_TEMPLATES.glob("*.yaml")):
        side = name.rpartition("_")[2]
        knowledge = KnowledgeSettings(words=words, **{f"{side}_template": name})
        template = knowledge.template(side, Labels("clicked", "none")).model_dump_json(exclude={"name", "factors"})
        assert "song" in template and not re.search(r"titles|person|\b[Rr]ated\b", template), name
    template = KnowledgeSettings(words=words | {"interacted": "skipped"}).template("user", Labels("clicked", "none"))
    assert "songs that the listener skipped" in template.instruction and template.history.heading == "Skipped songs:"


@pytest.mark.parametrize(
    ("columns", "interacted", "kind"),
    [
        ({}, "picked", "none"),
        ({"rating": [1.0, 0.0]}, "picked or passed over", "words"),
        ({"rating": [1.0, None]}, "picked", "none"),
        ({"rating": [0.25, 0.75]}, "rated", "numbers"),
        ({"rating": [1, 5]}, "rated from 1 to 5", "numbers"),
        ({"rating": [0, 10]}, "rated", "numbers"),
        ({"rating": []}, "rated from 1 to 5", "numbers"),
        ({"event": ["view", "purchase", None]}, "bought or viewed", "words"),
        ({"event": ["play", "play"]}, "played", "none"),
        ({"event": ["play", "", "  "]}, "played", "none"),
        ({"event": ["play", "play"], "rating": [1, 5]}, "rated from 1 to 5", "numbers"),
        ({"event": ["play", "play"], "rating": [0, 1]}, "played or passed over", "words"),
        ({"event": ["put_back", "Add-To-Cart", "tried on"]}, "put into the cart, put back or put on", "words"),
        ({"event": list("abcde")}, "picked", "words"),
        ({"event": [None, None]}, "picked", "none"),
    ],
)
def test_what_was_done_is_said_by_the_events_or_ratings_that_there_are(columns, interacted, kind):
    kinds = {"rating": pa.float64(), "event": pa.string()}
    columns = {name: pa.array(values, kinds[name]) for name, values in columns.items()}
    labels = labels_of(pa.table({"timestamp": pa.nulls(max(map(len, columns.values()), default=0))} | columns),
                      {"tried on": "put on"})  # fmt: skip
    assert (labels.interacted, labels.kind) == (interacted, kind)


@pytest.mark.parametrize("name", [path.stem for path in sorted(SHIPPED_TEMPLATES.glob("*_user.yaml"))])
def test_clicks_and_events_are_words_in_every_shipped_prompt(name):
    knowledge = KnowledgeSettings(user_template=name)
    lines = knowledge.template("user", Labels("clicked or viewed", "words")).history
    assert "rating" not in lines.line.replace("{rating}", "")  # the word would be wrong for clicks
    assert not lines.ratings
    zero_or_one = knowledge.template("user", Labels("picked or passed over", "words", "picked")).history
    assert zero_or_one.line == lines.line and zero_or_one.ratings == {0: "passed over", 1: "picked"}
    assert knowledge.template("user", Labels("viewed", "none")).history.line == lines.line_unrated
    template = knowledge.template("user", Labels("clicked or viewed", "words")).model_dump_json(exclude={"history"})
    assert "clicked or viewed" in template and not re.search("rated|Rating|Genre", template)


def test_a_template_without_a_line_for_events_has_their_words_in_place_of_numbers(tmp_path):
    text = MINIMAL.replace("side: item", "side: user") + "history: {line: '{rating}: {title}', ratings: {0: skipped}}\n"
    (tmp_path / "mine.yaml").write_text(text)
    knowledge = KnowledgeSettings(template_dir=tmp_path, user_template="mine", words={"interacted": "clicked"})
    lines = knowledge.template("user", Labels("picked or passed over", "words", "picked")).history
    assert lines.line == "{rating}: {title}" and lines.ratings == {0: "skipped", 1: "clicked"}


def test_factors_are_a_team_s_own():
    knowledge = KnowledgeSettings(user_factors=["Field", "Pay"], item_factors=["field", "pay", "place"],
                                  words={"user": "applicant", "item": "job", "collection": "online board",
                                         "enjoy": "want"})  # fmt: skip
    user, item = (knowledge.template(side) for side in ("user", "item"))
    assert user.factors == ("Field", "Pay") and user.instruction.endswith("factors: 1. Field 2. Pay")
    assert "Below are an applicant's details" in user.instruction
    assert "one job of an online board" in item.instruction
    assert item.instruction.endswith("its field, pay and place, and who would want it.")
    trawl = knowledge.model_copy(update={"user_template": "trawl_user", "item_template": "rlmrec_item"})
    assert trawl.template("user").factors == user.factors and trawl.template("item").factors == ()


@pytest.mark.parametrize("factors", [["Pay", "pay "], [" "]])
def test_factors_that_are_blank_or_alike_are_refused(factors):
    with pytest.raises(ValueError, match=r"item_factors(?s:.*)(has names that are equal|expected a word)"):
        KnowledgeSettings(item_factors=factors)


def test_a_template_of_one_s_own_keeps_its_factors(tmp_path):
    text = (SHIPPED_TEMPLATES / "kar_user.yaml").read_text().replace("[Kinds, ", "[Colours, ")
    (tmp_path / "kar_user.yaml").write_text(text)
    own = Settings.model_validate({"knowledge": {"template_dir": str(tmp_path), "user_factors": ["Pay"]}})
    assert own.effective_knowledge.template("user").factors[0] == "Colours"  # with the bundled model, too


def test_the_bundled_model_is_asked_in_the_words_that_it_was_trained_on():
    item, user = (Settings().effective_knowledge.template(side).instruction for side in ("item", "user"))
    assert item == (
        "Below is one title of a library. Describe it in a short text: its genre, theme, mood, era and creator, and "
        "who would enjoy it."
    )
    assert user == (
        "Below are a person's details and the titles that the person rated from 1 to 5, oldest first. Explain the "
        "person's preferences, one numbered line for each of these factors: 1. Genre 2. Theme 3. Mood 4. Era 5. "
        "Creators 6. Rating habit 7. Dislikes 8. Summary"
    )
    other = Settings.model_validate({"decoding": {"model": "qwen"}}).effective_knowledge.template("item").instruction
    assert "library" not in other and "genre" not in other
    own = Settings.model_validate({"knowledge": {"item_factors": ["taste"], "words": {"item": "cake"}}})
    instruction = own.effective_knowledge.template("item").instruction
    assert "one cake of a library" in instruction and "its taste, and" in instruction


def test_domains_are_known_by_names_of_items():
    assert all(domain_of([name]) == domains()[domain] for name, domain in
               [("song_id", "songs"), ("jobs.parquet", "jobs"), ("sku", "shop"), ("movieId", "films")])  # fmt: skip
    assert domain_of(["title", "thing"]) is None
    assert domain_of(["articles", "article_id"]) is None  # of a newspaper, or of a shop


@pytest.mark.parametrize("name", [path.stem for path in sorted(SHIPPED_TEMPLATES.glob("*.yaml"))])
def test_what_ships_asks_for_no_column_that_tables_may_lack(name):
    template = load_template(name)
    assert template.attributes.missing(["title"]) == []
    assert template.history is None or template.history.missing(["title"]) == []
