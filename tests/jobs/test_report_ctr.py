"""The CTR comparison in the report: its table and its headline."""

import pytest
from manifest_fixture import ctr_row, equivalence, manifest_of, night_manifest

from laserbatch.jobs.report.ctr_table import ALL_MODELS, ctr_rows, ctr_table, own_gains
from laserbatch.jobs.report.page import headline, key_figures
from laserbatch.jobs.report.sides import sides_of


def sentence(manifest: dict) -> str:
    typed = manifest_of(manifest)
    return headline(typed, sides_of(typed)).striptags()


def table_of(manifest: dict):
    return ctr_table(manifest_of(manifest).judgement.ctr)


def test_rows_are_ordered_by_model_then_from_no_knowledge_to_the_runs_own():
    rows = [ctr_row("DIN", variant, 0.7, 0.6, 0.6, 0.001) for variant in ("top_k", "none", "plain")]
    figures = manifest_of(night_manifest() | {"ctr": {"rows": rows}}).judgement.ctr
    assert [row.variant for row in ctr_rows(figures)] == ["none", "plain", "top_k"]
    assert ctr_table(figures).strong_rows == [2]


def test_gain_is_the_difference_of_mean_auc():
    gain = own_gains(manifest_of(night_manifest()).judgement.ctr)[0]
    assert gain.auc == pytest.approx(0.7249 - 0.7112) and gain.is_shown
    rows = [row for row in night_manifest()["ctr"]["rows"] if row["variant"] != "none"]
    assert own_gains(manifest_of(night_manifest() | {"ctr": {"rows": rows}}).judgement.ctr) == []


def test_verdicts_are_those_of_the_ctr_package():
    equivalence = manifest_of(night_manifest()).judgement.ctr.equivalence
    assert {model: item.verdict for model, item in equivalence.items()} == {
        "DIN": "equivalent", "DCNv2": "undecided", "LightGBM": "equivalent", ALL_MODELS: "equivalent",
    }  # fmt: skip
    rows = table_of(night_manifest()).rows
    assert [row["Verdict"] for row in rows if row["Knowledge"] == "relaxed"] == [
        "as good", "undecided", "as good", "as good",
    ]  # fmt: skip


def test_table_shows_spread_gain_and_interval():
    row = table_of(night_manifest()).rows[3]
    assert list(row.values())[:3] == ["DIN", "relaxed", "0.7249 ± 0.0010"]
    assert row["AUC vs none"] == "+0.0137"
    assert row["AUC vs plain"] == "−0.0002 [−0.0009, +0.0005]"


def test_caption_says_how_it_was_judged():
    caption = table_of(night_manifest()).caption
    assert "95 % interval" in caption and "±0.0020" in caption and "new users and new seeds" in caption


def test_a_loss_with_one_model_reaches_the_headline():
    manifest = night_manifest()
    manifest["ctr"]["equivalence"] = equivalence({"DIN": [-0.02, -0.021, -0.019], "DCNv2": [0.0, 0.0001, 0.0]})
    assert sentence(manifest).endswith("AUC is worse with DIN")


def test_a_wide_spread_makes_no_claim():
    manifest = night_manifest()
    manifest["ctr"]["equivalence"] = equivalence({"DIN": [-0.02, 0.0194, 0.0]})
    assert sentence(manifest).endswith("; whether AUC is worse is undecided")


def test_only_models_that_were_shown_unharmed_are_called_so():
    manifest = night_manifest()
    assert sentence(manifest).endswith("; AUC is not worse with DIN and LightGBM, undecided with DCNv2")
    verdicts = manifest["ctr"]["equivalence"]
    for model in ("DIN", "DCNv2", "LightGBM"):
        verdicts[model]["verdict"] = "undecided"
    assert verdicts["all"]["verdict"] == "equivalent" and "not worse" not in sentence(manifest)


def test_a_night_without_drafts_claims_nothing_of_drafting():
    manifest = night_manifest()
    for side in manifest["sides"].values():
        side["num_carried_over"] = side["stats"]["num_drafted"] = 0
    assert "AUC" not in sentence(manifest)


def without_plain_texts() -> dict:
    manifest = night_manifest()
    manifest["ctr"]["rows"] = [row for row in manifest["ctr"]["rows"] if row["variant"] != "plain"]
    return manifest | {"ctr": manifest["ctr"] | {"equivalence": {}}}


@pytest.mark.parametrize("changes", [{"num_seeds": 1}, {"auc_std": 0.02}])
def test_a_gain_that_was_not_shown_is_not_claimed(changes):
    manifest = without_plain_texts()
    manifest["ctr"]["rows"][2] |= changes
    assert "AUC" not in sentence(manifest)
    card = key_figures(manifest_of(manifest), sides_of(manifest_of(manifest)))[-1]
    assert card.value == "not shown" and "not above the spread of seeds" in card.notes[0]


def test_without_plain_texts_the_gain_over_no_knowledge_is_stated():
    manifest = without_plain_texts()
    card = key_figures(manifest_of(manifest), sides_of(manifest_of(manifest)))[-1]
    assert (card.value, card.notes) == ("+0.0136", ["median of 3 models"])
    assert "No verdict" in table_of(manifest).caption


def test_one_seed_has_a_difference_and_no_interval():
    manifest = night_manifest()
    for row in manifest["ctr"]["rows"]:
        row |= {"num_seeds": 1, "auc_std": None, "logloss_std": None, "auc_cold_std": None}
    manifest["ctr"]["equivalence"] = equivalence({"DIN": [-0.0002]})
    row = table_of(manifest).rows[3]
    assert (row["AUC"], row["AUC vs plain"], row["Verdict"]) == ("0.7249", "−0.0002", "undecided")
