"""The stage that measures a run's features: CTR models with and without them, judged on later interactions."""

import datetime
import json
import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL, Signals
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from laserbatch.ctr.errors import NothingToJudge
from laserbatch.ctr.feature_set import FeatureSet, read_feature_set
from laserbatch.ctr.log import EntityTables
from laserbatch.ctr.settings import CtrSettings
from laserbatch.jobs.console import progress, say
from laserbatch.jobs.events import event_log
from laserbatch.pipeline.encoding.versions import feature_versions
from laserbatch.pipeline.errors import LaserbatchError
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.figures import CtrFigures
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.uris import is_uri
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.pipeline.tables.fetched import copy_of, remove_copies, use_copy
from laserbatch.pipeline.tables.streamed import open_tables

if TYPE_CHECKING:
    from laserbatch.jobs.stages.night import Night
    from laserbatch.pipeline.distributed.cluster import WorkerLayout

logger = logging.getLogger(__name__)

CHILD = [sys.executable, "-P", "-m", "laserbatch.jobs.stages.compare_ctr"]
FIGURES = TypeAdapter(CtrFigures)
MAX_RUNS_TRIED = 8  # at most this many runs, newest first, are searched for one that can be judged


def compare_night(night: "Night", cluster: "WorkerLayout | None" = None) -> CtrFigures:
    """The CTR comparison of a night, or the reason why it was skipped; a failure does not stop the night.

    A child process makes the comparison, so that the kernel can kill it alone if memory runs short; if this process has
    joined a `cluster`, a task of that cluster starts the child. If no interactions follow the date yet, as on the night
    itself, the newest earlier run of the same settings that can be judged is compared instead.
    """
    if not night.settings.night.train_ctr:
        return CtrFigures(skipped="night.train_ctr is false")
    of_night, has_plain = night.run, night.settings.night.compare_with_plain
    earlier = night.workspace.finished_runs(of_night.settings_hash, include_held=True)
    alike = [run for run in earlier if run.settings_hash == of_night.settings_hash and run.date < of_night.date]
    stand_ins = [run for run in reversed(alike) if run.plain.features_path("user").exists() == has_plain]
    path = night.settings.tables.required_path
    copy = copy_of(path)
    request = {
        "workspace": str(night.workspace.root.resolve()),
        "run_ids": [run.run_id for run in [of_night, *stand_ins][:MAX_RUNS_TRIED]],
        "tables": path if is_uri(path) else str(Path(path).resolve()),
        "keep_duplicates": night.settings.tables.keep_duplicates,
        "copy": None if copy is None else str(copy),  # the night's local copy of tables at a URI
        "verifier": night.settings.decoding.verifier,
        "settings": night.settings.ctr.model_dump(mode="json"),
    }
    if cluster is None or copy is not None:
        output = _compare(json.dumps(request))
    else:
        from laserbatch.pipeline.distributed.tasks import result_of, start_task  # loads Ray; the child does not

        say("the CTR comparison runs as a task of the cluster")
        try:
            output = result_of(start_task(cluster, int(cluster.num_gpus > 0), _compare, json.dumps(request)))
        except LaserbatchError as error:
            output = _skipped(f"the comparison failed: {error}")
    figures = FIGURES.validate_json(output)
    if figures.skipped:
        say(f"CTR models are not trained: {figures.skipped}")
    return figures


def _compare(request: str) -> str:
    """Run the comparison in a child process; return its figures as JSON."""
    # The process ends itself when its standard input does, so that it never outlives a killed night.
    with Popen(CHILD, stdin=PIPE, stdout=PIPE, text=True) as child:
        with suppress(BrokenPipeError):
            print(request, file=child.stdin, flush=True)
        assert child.stdout is not None  # a pipe
        output = child.stdout.read()
    if child.returncode == 0:
        return output.splitlines()[-1]
    why = f"exit code {child.returncode}; see the log"
    if child.returncode < 0:
        why = f"killed by {Signals(-child.returncode).name}"
        why += ", probably by the kernel because memory ran short" if child.returncode == -SIGKILL else ""
    return _skipped(f"the comparison failed: its process ended ({why})")


def _skipped(reason: str) -> str:
    return FIGURES.dump_json(CtrFigures(skipped=reason)).decode()


def judge_first(
    workspace: Workspace,
    run_ids: Sequence[str],
    tables_path: str,
    verifier: str,
    settings: CtrSettings,
    keep_duplicates: bool = False,
) -> CtrFigures:
    """Compare the first of some runs that can be judged; the result says why if none can."""
    reasons, night_date = [], RunFolder(Path(run_ids[0])).date
    try:
        tables = open_tables(tables_path, keep_duplicates)  # with interactions after the date, to judge models on
        for run in map(workspace.run, run_ids):
            date = datetime.date.fromisoformat(run.date)
            if (manifest := unless_damaged(run.load_manifest)) is not None:
                run.require_features(manifest.features, compare_bytes=True)
                run.plain.require_features(manifest.plain_features, compare_bytes=True)
            try:
                figures = compare_ctr(run.root, tables, date, verifier, settings, workspace.runs_up_to(run))
            except NothingToJudge as error:
                reasons.append(str(error))
                continue
            if not reasons:
                return figures
            say(f"{reasons[0]}: run {run.run_id} is judged instead")
            age = datetime.date.fromisoformat(night_date) - date
            return replace(figures, judged_run_id=run.run_id, judged_age_days=age.days)
    except LaserbatchError as error:
        reasons = [str(error)]
    except Exception as error:  # out of memory, or our own fault: the texts are not affected
        logger.exception("the CTR comparison failed")
        reasons = [f"the comparison failed: {type(error).__name__}: {error}"]
    return CtrFigures(skipped=reasons[0])


def compare_ctr(
    run_dir: Path,
    tables: EntityTables,
    as_of: datetime.date,
    verifier: str,
    settings: CtrSettings,
    history: Sequence[RunFolder] = (),
) -> CtrFigures:
    """Compare CTR models without knowledge, with the run's own, and, if the run has it, with plainly decoded knowledge.

    `tables` include interactions after the run's date; `verifier` names the variant with the run's own texts;
    `history` are the runs up to this one, whose features training rows see if `ctr.history` is asof.
    Raises CtrError if there are no features, and the errors of `train_ctr`.
    """
    from laserbatch.ctr.compare import CtrRow, train_ctr  # with torch and scikit-learn, which take seconds to load

    variants = run_variants(RunFolder(run_dir), verifier)
    num_trainings = len(variants) * len(settings.models) * settings.num_seeds
    with ExitStack() as opened, progress("train CTR models", num_trainings) as bar:
        joined = [name for name, features in variants.items() if settings.history == "asof" and features is not None]
        versions = {name: opened.enter_context(feature_versions(history, of_plain=name == "plain")) for name in joined}

        def on_fit(row: CtrRow) -> None:
            bar.advance(1, f"{row.model}, {row.variant}: AUC {row.auc:.4f}")

        return train_ctr(tables, variants, as_of, settings, on_fit, versions)


def run_variants(run: RunFolder, verifier: str) -> dict[str, FeatureSet | None]:
    """The feature sets that a run can compare, by name: none, plain (if it was decoded), and the run's own."""
    folders = {"plain": run.plain.features_path("user").parent, verifier: run.features_path("user").parent}
    sets = {name: read_feature_set(folder) for name, folder in folders.items() if name != "plain" or folder.is_dir()}
    return {"none": None, **sets}


def _answer() -> None:
    """The child process of `compare_night`: read a request as a line of JSON, and print the figures as another."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the kernel kills this process before the night
    request = json.loads(sys.stdin.readline())

    def end(exit_code: int) -> None:
        remove_copies()  # os._exit runs no clean-up, and the copies hold users' interactions
        os._exit(exit_code)

    threading.Thread(target=lambda: (sys.stdin.read(), end(1)), daemon=True).start()
    if request["copy"] is not None:
        use_copy(request["tables"], Path(request["copy"]))
    workspace, settings = Workspace.open(request["workspace"]), CtrSettings.model_validate(request["settings"])
    with event_log(workspace.run(request["run_ids"][0]).events_path):
        figures = judge_first(
            workspace, request["run_ids"], request["tables"], request["verifier"], settings, request["keep_duplicates"]
        )
    print(FIGURES.dump_json(figures).decode(), flush=True)
    end(0)  # the thread that reads standard input would block a normal exit


if __name__ == "__main__":
    _answer()
