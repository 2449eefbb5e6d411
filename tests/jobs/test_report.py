"""The report is one self-contained page that shows the night's result, escapes data, and names missing parts."""

import copy
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from manifest_fixture import manifest_of, night_manifest, night_of

from laserbatch.jobs.commands.nightly import night_counts, nights_table
from laserbatch.jobs.report.blocks import Table
from laserbatch.jobs.report.page import render_page, sections_of
from laserbatch.jobs.report.sides import SIDE_LABELS, sides_of
from laserbatch.pipeline.decoding.plugins import RULES
from laserbatch.pipeline.plugins import installed

SECTIONS = ("work", "gates", "speed", "drafts", "ctr", "audit", "samples", "provenance")
VOID_TAGS = {"meta", "link", "br", "img", "hr", "input"}


class Outline(HTMLParser):
    """The tags, anchors and text of a page; fails if a tag is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.texts))


def rendered(manifest: dict) -> str:
    return render_page(manifest_of(manifest))


def outline(manifest: dict) -> Outline:
    parsed = Outline()
    parsed.feed(rendered(manifest))
    assert not parsed.open
    anchors = [attributes.get("id") for tag, attributes in parsed.tags if tag == "section"]
    assert anchors == list(SECTIONS)
    return parsed


def blocks_of(manifest: dict, anchor: str) -> list:
    typed = manifest_of(manifest)
    return next(section.blocks for section in sections_of(typed, sides_of(typed)) if section.anchor == anchor)


@pytest.fixture
def manifest() -> dict:
    return night_manifest()


def test_headline_states_the_result_of_the_night(manifest):
    assert "412 of 700 entities rewritten at 5.0 tokens per step, 3.3× plain; AUC is not" in outline(manifest).text


def test_the_speed_of_a_few_texts_is_compared_with_nothing(manifest):
    for side in manifest["sides"].values():
        side["stats"]["num_texts"] = 1
    text = outline(manifest).text
    assert "entities rewritten at 5.0 tokens per step; AUC is not worse" in text and "too few texts to compare" in text


def test_a_night_on_vllm_says_so(manifest):
    manifest["settings"].setdefault("decoding", {})["engine"] = "vllm"
    assert "by vLLM, which verifies greedily" in outline(manifest).text


@pytest.mark.parametrize("rule", [*RULES, *installed("verifiers")])
def test_every_rule_says_what_it_accepts_and_whether_texts_depend_on_drafts(manifest, rule):
    manifest["settings"]["decoding"]["verifier"] = rule
    said = re.search(rf"The rule {rule} (accepts|judges) [^.]*drafts( change no text)?\.", outline(manifest).text)
    assert said, rule


def test_every_chart_says_its_values_to_those_who_do_not_see_it(manifest):
    titles = [
        attributes["title"] for tag, attributes in outline(manifest).tags if tag == "span" and "title" in attributes
    ]
    assert any(title.startswith("own previous text ") and title.endswith(" %") for title in titles)


def test_tables_say_which_definition_they_use(manifest):
    text = outline(manifest).text
    assert "Acceptance length: mean accepted draft tokens per step, the bonus token not counted" in text
    assert "Tokens per step: acceptance length + 1" in text
    assert "AUC ± its standard deviation over seeds" in text


def test_numbers_carry_units_and_separators(manifest):
    text = outline(manifest).text
    for shown in (
        "40,109",
        "26.8 s",
        "1 min 26 s",
        "0.31 s",
        "5.24 M",
        "num_rows: 18432",
        "0.7249 ± 0.0010",
        "+0.0137",
        "by 2 workers, 1 thread each",
    ):
        assert shown in text, shown


def test_sample_spans_are_marked_by_source_and_explained(manifest):
    html = rendered(manifest)
    assert '<span class="from-prompt" title="prompt">Ilse Varnholt</span>' in html
    for source in ("pool", "previous", "prompt", "output"):
        assert f".from-{source} " in html
    assert "own previous text" in html


HOSTILE = "<script>alert(1)</script>\"'&"


def test_data_are_escaped_wherever_they_come_from(manifest):
    manifest["run_id"] = manifest["failure"] = manifest["laserbatch_version"] = manifest["settings_hash"] = HOSTILE
    manifest["status"] = "failed"
    manifest["model"]["id"] = manifest["settings"]["seed"] = manifest["machine"]["platform"] = HOSTILE
    manifest["settings"]["decoding"]["verifier"] = manifest["ctr"]["rows"][0]["model"] = manifest["ctr"]["rows"][0][
        "variant"
    ] = HOSTILE
    manifest["stages"][HOSTILE] = 1.0
    manifest["inputs"]["users"]["path"] = HOSTILE
    user = manifest["sides"]["user"]
    user["quarantine_reasons"] = {HOSTILE: 1}
    user["routes"][HOSTILE] = 3
    user["stats"]["accepted_by_source"][HOSTILE] = user["stats"]["finish_reasons"][HOSTILE] = 3
    user["samples"] = [
        {
            "entity_id": HOSTILE,
            "group": HOSTILE,
            "prompt": HOSTILE,
            "text": HOSTILE,
            "tokens_per_step": 2.0,
            "spans": [{"text": HOSTILE, "source": HOSTILE}],
        }
    ]
    manifest["pools"]["user"]["groups"][HOSTILE] = {"num_texts": 1, "num_tokens": 10**6}
    manifest["pools"]["user"]["version"] = HOSTILE
    html = rendered(manifest)
    assert "<script" not in html.lower()
    assert html.count("&lt;script&gt;") > 15
    parsed = Outline()
    parsed.feed(html)
    assert not parsed.open and "script" not in {tag for tag, _ in parsed.tags}


def test_a_night_without_ctr_says_so_and_why(manifest):
    manifest["ctr"] = {"skipped": "no interactions after 2025-03-01", "rows": []}
    text = outline(manifest).text
    assert "No CTR model was trained: no interactions after 2025-03-01." in text
    assert "3.3× plain." in text  # the headline ends with this
    assert "wall time" in text
    del manifest["ctr"]
    assert "No CTR model was trained in this run." in outline(manifest).text


def test_first_night_without_pools_or_anything_to_compare_with(manifest):
    manifest["previous_night"], manifest["plain"], manifest["pools"] = None, {}, {"version": None}
    text = outline(manifest).text
    assert "412 of 700 entities written at 5.0 tokens per step; AUC is not worse with" in text
    assert "There is no previous night with written texts" in text
    assert "Nothing was decoded plainly in this run" in text
    assert "Users and Items had no pool to draft from" in text
    assert "nothing to compare with" in text


def test_a_side_without_a_pool_and_a_pool_without_calibration_are_named(manifest):
    assert "not calibrated" not in outline(manifest).text and "no pool was built" not in outline(manifest).text
    del manifest["pools_built"]["item"]
    manifest["pools_built"]["user"]["is_calibrated"] = False
    text = outline(manifest).text
    assert "Items: no pool was built, because the run has no text of its model's tokenizer." in text
    assert "Users: the new pool is not calibrated, because too few texts could be replayed" in text


def test_copies_of_interactions_that_were_left_out_are_counted(manifest):
    assert "exact copies" not in outline(manifest).text
    manifest["inputs"]["interactions"]["num_copies"] = 1200
    assert "Interactions left out as exact copies of another one: 1,200." in outline(manifest).text


def test_a_log_that_has_stopped_is_warned_of(manifest):
    age = {"date": "2025-03-01", "newest": "2025-02-20", "age_days": 9, "usual_gap_days": 5.0}
    for gap, is_warned in ((5.0, False), (1.0, True)):
        manifest["inputs"]["interactions"]["age"] = age | {"usual_gap_days": gap}
        assert ("The newest interaction known on 2025-03-01 is from 2025-02-20" in outline(manifest).text) == is_warned


def test_an_empty_side_is_named(manifest):
    nothing = dict.fromkeys((key for key in manifest["sides"]["item"] if key.startswith("num_")), 0)
    empty = {"quarantine_reasons": {}, "routes": {}, "shards": [], "stats": {}, "samples": []}
    manifest["sides"]["item"] |= nothing | empty
    text = outline(manifest).text
    assert "Items: there were no entities." in text
    assert "236 of 400 entities" in text


def test_one_side_alone(manifest):
    for part in ("sides", "plain", "pools", "pools_built", "features"):
        del manifest[part]["item"]
    tables = [
        block for block in [*blocks_of(manifest, "work"), *blocks_of(manifest, "speed")] if isinstance(block, Table)
    ]
    assert {row["Side"] for table in tables for row in table.rows if "Side" in row} == {"Users"}


def test_a_night_in_which_nothing_had_changed(manifest):
    for side in manifest["sides"].values():
        side |= {
            "num_generated": 0,
            "num_quarantined": 0,
            "num_carried_over": side["num_entities"],
            "quarantine_reasons": {},
        }
        side |= {"samples": [], "shards": []}
        side["stats"] = {}
    text = outline(manifest).text
    assert "all 700 entities were unchanged and kept their text" in text
    for sentence in (
        "No text was generated tonight, so there is no speed to show.",
        "No acceptance to show: no text was generated tonight.",
        "No sample texts were kept in this run.",
        "No row went to quarantine.",
    ):
        assert sentence in text


def test_a_failed_run_says_so_and_why_first(manifest):
    reason = "239 of 300 users failed: unparsable (239)"
    manifest["failure"] = reason  # of an earlier attempt
    assert reason not in outline(manifest).text
    manifest["status"] = "failed"
    text = outline(manifest).text
    assert text.index("This run failed and published nothing: 412 of 700 entities") < text.index(reason)
    assert text.index(reason) < text.index("entities written")


def test_a_night_that_was_stopped_at_its_first_texts_says_why_and_nothing_else(manifest):
    html = rendered(manifest | {"status": "failed", "failure": "27 of the first 32 users failed", "sides": {}})
    assert "This run failed and published nothing" in html and "27 of the first 32 users failed" in html
    assert re.findall(r'<section id="(\w+)"', html) == ["provenance"] and "quarantine" not in html


def test_texts_that_end_at_their_limit_are_warned_of(manifest):
    assert "max_new_tokens, or" not in outline(manifest).text
    manifest["sides"]["user"]["stats"]["finish_reasons"] = {"end_of_text": 36, "length": 200}
    assert "Users: 84.7 % of the texts were cut at the token limit" in outline(manifest).text
    (counts,) = night_counts(night_of(manifest["sides"]["user"])).values()
    assert "raise decoding.max_new_tokens" in counts["warning"]


def test_the_demos_table_has_plain_decoding_of_the_same_texts_below_each_night(manifest):
    for side in SIDE_LABELS:
        manifest["plain"][side]["stats_of_tonight"] = copy.deepcopy(manifest["plain"][side]["stats"])
    night = manifest_of(manifest)
    rows = nights_table([SimpleNamespace(manifest=night, date=night.date)]).rows
    assert [(row["night"], row["entities"], row["tokens/s"]) for row in rows if row["side"] == "user"] == [
        ("2025-03-01", "400", "1,496"), ("2025-03-01 plain, these texts", "–", "412"),
    ]  # fmt: skip


def test_what_was_not_measured_is_a_dash(manifest):
    for row in manifest["ctr"]["rows"]:
        row["auc_cold"] = row["auc_cold_std"] = row["auc_std"] = None
    manifest["ctr"]["rows"][0]["auc"] = None
    manifest["sides"]["user"]["stats"]["wall_s"] = 0.0
    manifest["sides"]["item"]["samples"][0]["tokens_per_step"] = None
    text = outline(manifest).text
    assert "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", text.lower())


def test_a_run_that_has_only_begun_makes_a_page():
    begun = {key: night_manifest()[key] for key in ("run_id", "date", "settings_hash", "laserbatch_version")}
    text = outline(begun | {"settings": {}, "machine": {}}).text
    assert "This run is not finished: there was no entity to write about." in text
    assert "No side was finished in this run." in text
    assert "Inputs: not recorded." in text


OPTIONAL = ("inputs", "pools", "model", "workers", "sides", "plain", "features", "ctr", "pools_built", "stages")


@pytest.mark.parametrize("key", [*OPTIONAL, "audit", "previous_night"])
def test_any_stage_may_have_left_nothing(manifest, key):
    del manifest[key]
    outline(manifest)
