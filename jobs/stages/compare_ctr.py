"""The stage that says what a run's features are worth: CTR models without and with them, judged on what came after."""

import datetime
from pathlib import Path

from laserbatch.ctr.dataset import EntityTables
from laserbatch.ctr.feature_set import FeatureSet, read_feature_set
from laserbatch.ctr.settings import CtrSettings
from laserbatch.jobs.console import progress
from laserbatch.pipeline.storage.manifest import CtrFigures
from laserbatch.pipeline.storage.run_folder import RunFolder


def compare_ctr(
    run_dir: Path, tables: EntityTables, as_of: datetime.date, verifier: str, settings: CtrSettings | None = None
) -> CtrFigures:
    """Compare CTR models without knowledge, with plainly decoded knowledge where the run has it, and with the run's.

    `tables` have what came after the run's date; `verifier` is the name of the run's own texts beside plain ones.
    Raises CtrError where there are no features, or as `train_ctr` does.
    """
    from laserbatch.ctr.compare import CtrRow, train_ctr  # with torch and scikit-learn, which take seconds to load

    settings = settings or CtrSettings()
    variants = run_variants(RunFolder(Path(run_dir)), verifier)
    num_trainings = len(variants) * len(settings.models) * settings.num_seeds
    with progress("train CTR models", num_trainings) as bar:

        def on_fit(row: CtrRow) -> None:
            bar.advance(1, f"{row.model}, {row.variant}: AUC {row.auc:.4f}")

        return train_ctr(tables, variants, as_of, settings, on_fit)


def run_variants(run: RunFolder, verifier: str) -> dict[str, FeatureSet | None]:
    """The variants of knowledge that a run can compare: none, plain (where it was decoded), and its own."""
    folders = {"plain": run.plain.features_path("user").parent, verifier: run.features_path("user").parent}
    found = {name: read_feature_set(folder) for name, folder in folders.items() if name != "plain" or folder.is_dir()}
    return {"none": None, **found}
