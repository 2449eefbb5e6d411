"""The stage that says what a run's features are worth: CTR models without and with them, judged on what came after."""

import datetime
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from laserbatch.ctr.errors import CtrError, NothingToJudge
from laserbatch.ctr.feature_set import FeatureSet, read_feature_set
from laserbatch.ctr.log import EntityTables
from laserbatch.ctr.settings import CtrSettings
from laserbatch.jobs.console import progress, say
from laserbatch.jobs.stages.feature_versions import TEXTS, earlier_runs, feature_versions
from laserbatch.jobs.stages.night import Night
from laserbatch.pipeline.storage.manifest import CtrFigures
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.tables.read import open_tables

logger = logging.getLogger(__name__)

MOST_TRIED = 8  # runs, the newest first, that one is looked for among which can be judged


def compare_night(night: Night) -> CtrFigures:
    """The comparison of a night, or why there is none: whatever it fails with, it does not stop the night.

    Where nothing follows the date yet, as on the night itself, the newest earlier run of the same settings that can be
    judged stands for it.
    """
    if not night.settings.night.train_ctr:
        return CtrFigures(skipped="night.train_ctr is false")
    reasons = []
    try:
        tables = open_tables(night.settings.tables.path)  # models are judged on what came after the date
        for run in [night.run, *_stand_ins(night)][:MOST_TRIED]:
            date = datetime.date.fromisoformat(run.date)
            try:
                history, verifier = earlier_runs(night.workspace, run), night.settings.decoding.verifier
                figures = compare_ctr(run.root, tables, date, verifier, night.settings.ctr, history)
            except NothingToJudge as error:
                reasons.append(str(error))
                continue
            if run.run_id == night.run.run_id:
                return figures
            say(f"{reasons[0]}: run {run.run_id} is judged in its place")
            return replace(figures, judged_run_id=run.run_id, judged_age_days=(night.date - date).days)
    except CtrError as error:
        reasons = [str(error)]
    except Exception as error:  # out of memory, or our own fault: what was generated is as good as before
        logger.exception("the CTR comparison failed")
        reasons = [f"the comparison failed: {type(error).__name__}: {error}"]
    say(f"CTR models are not trained: {reasons[0]}")
    return CtrFigures(skipped=reasons[0])


def _stand_ins(night: Night) -> list[RunFolder]:
    """Runs of the same settings and earlier dates, the newest first, of a date the last edition; held ones too."""
    found = [
        run
        for run in night.workspace.runs()
        if run.settings_hash == night.run.settings_hash
        and run.date < night.run.date
        and (run.is_finished or run.is_held)
        and run.plain.features_path("user").exists() == night.settings.night.compare_with_plain
    ]
    return sorted(found, key=lambda run: (run.date, len(run.run_id), run.run_id), reverse=True)


def compare_ctr(
    run_dir: Path,
    tables: EntityTables,
    as_of: datetime.date,
    verifier: str,
    settings: CtrSettings | None = None,
    history: Sequence[RunFolder] = (),
) -> CtrFigures:
    """Compare CTR models without knowledge, with plainly decoded knowledge where the run has it, and with the run's.

    `tables` have what came after the run's date; `verifier` is the name of the run's own texts beside plain ones;
    `history` are the runs, this one the last, whose features training rows see where `ctr.history` is asof.
    Raises CtrError where there are no features, or as `train_ctr` does.
    """
    from laserbatch.ctr.compare import CtrRow, train_ctr  # with torch and scikit-learn, which take seconds to load

    settings = settings or CtrSettings()
    variants = run_variants(RunFolder(Path(run_dir)), verifier)
    num_trainings = len(variants) * len(settings.models) * settings.num_seeds
    with ExitStack() as opened, progress("train CTR models", num_trainings) as bar:
        versions = {
            name: opened.enter_context(feature_versions(history, TEXTS["plain" if name == "plain" else "own"]))
            for name, features in variants.items()
            if settings.history == "asof" and features is not None
        }

        def on_fit(row: CtrRow) -> None:
            bar.advance(1, f"{row.model}, {row.variant}: AUC {row.auc:.4f}")

        return train_ctr(tables, variants, as_of, settings, on_fit, versions)


def run_variants(run: RunFolder, verifier: str) -> dict[str, FeatureSet | None]:
    """The variants of knowledge that a run can compare: none, plain (where it was decoded), and its own."""
    folders = {"plain": run.plain.features_path("user").parent, verifier: run.features_path("user").parent}
    found = {name: read_feature_set(folder) for name, folder in folders.items() if name != "plain" or folder.is_dir()}
    return {"none": None, **found}
