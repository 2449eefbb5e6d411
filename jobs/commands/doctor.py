"""`laserbatch doctor`: whether a night can run here, looked at in seconds, and how to mend what hinders it.

Nothing is written but a file in the workspace's folder that is taken away again; no model is loaded.
"""

import fcntl
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Literal

import typer
from packaging.requirements import Requirement
from rich.text import Text

from laserbatch.jobs.console import ExitCode, stdout, summary, visible
from laserbatch.jobs.settings import CONFIG, JSON, WORKSPACE, Settings, load_settings
from laserbatch.pipeline.errors import PipelineError
from laserbatch.pipeline.storage.atomic import size_bytes
from laserbatch.retrieval_pools.errors import PoolError

LEAST_FREE_BYTES = 2 * 10**9  # of a disk, below which a night is likely to fill it
STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and where something is wrong how to mend it."""

    about: str
    level: Literal["ok", "warning", "fault"]
    found: str
    mend: str | None = None


Check = Callable[[Settings], Iterator[Finding]]


def doctor(
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    with_ray: bool = typer.Option(True, "--ray/--no-ray", help="Start or join Ray, which takes some seconds."),
    as_json: bool = JSON,
) -> None:
    """Check whether a night can run here, from versions and GPU to model, disk and tables; say how to mend it.

    Exit code 0: nothing hinders a night; 3: something does. Loads no model.

    Example: `laserbatch doctor --config laserbatch.yaml`
    """
    settings = load_settings(config, {"workspace": workspace})
    findings = examine(settings, [*CHECKS, check_ray] if with_ray else CHECKS)
    num_faults = sum(finding.level == "fault" for finding in findings)
    if as_json:
        summary({"num_faults": num_faults, "findings": [asdict(finding) for finding in findings]}, as_json=True)
    else:
        for finding in findings:
            told = f"{finding.about}: {finding.found}" + (f". {finding.mend}" if finding.mend else "")
            stdout.print(Text(f"{finding.level:<8}", STYLES[finding.level]) + Text(visible(told)), soft_wrap=True)
    if num_faults:
        raise typer.Exit(ExitCode.BAD_INPUT)


def examine(settings: Settings, checks: list[Check]) -> list[Finding]:
    """Findings of all checks; one that meets an error has found it, and the others go on."""
    findings: list[Finding] = []
    for check in checks:
        about = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            findings += check(settings)
        except (PipelineError, PoolError) as error:  # their messages say what to do
            findings.append(Finding(about, "fault", str(error)))
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            findings.append(Finding(about, "fault", told, "Check that path, and that it may be read and written"))
    return findings


def check_versions(settings: Settings) -> Iterator[Finding]:
    for line in requires("laserbatch") or []:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        mend = "Install what constraints.txt names: `pip install -c constraints.txt laserbatch`"
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            yield Finding("versions", "fault", f"{wanted.name} is not installed; {wanted} is expected", mend)
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            yield Finding("versions", "fault", f"{wanted.name} is {found}; {wanted} is expected", mend)
    told = ", ".join(f"{name} {version(name)}" for name in ("laserbatch", "torch", "transformers", "ray"))
    yield Finding("versions", "ok", f"Python {platform.python_version()}, {told}")


def check_gpu(settings: Settings) -> Iterator[Finding]:
    from laserbatch.pipeline.gpus import GPU_DRIVERS, num_gpus

    driver = next((path for path in GPU_DRIVERS if Path(path).exists()), None)
    if driver is None:
        yield Finding("GPU", "ok", "no driver of one is here: texts are written by the CPU")
        return
    import torch

    number = num_gpus()
    if not number:
        built = torch.version.cuda or torch.version.hip or "no GPU"
        told = f"a driver is here ({driver}), but torch {torch.__version__} (built for {built}) sees no GPU"
        mend = "Install the torch build that the driver takes (`nvidia-smi` names it), or unset CUDA_VISIBLE_DEVICES"
        yield Finding("GPU", "fault", told, mend)
        return
    for device in range(number):
        free, whole = torch.cuda.mem_get_info(device)
        level = "ok" if free > 0.5 * whole else "warning"
        mend = None if level == "ok" else "Another program holds the rest: end it, or set CUDA_VISIBLE_DEVICES"
        name = torch.cuda.get_device_name(device)
        yield Finding("GPU", level, f"{name}, {free / 1e9:.1f} of {whole / 1e9:.1f} GB free", mend)


def check_engine(settings: Settings) -> Iterator[Finding]:
    from laserbatch.jobs.stages.inputs import require_engine

    require_engine(settings)
    if settings.decoding.engine == "vllm":
        yield Finding("engine", "ok", "vLLM is installed: texts are written with it, and verified greedily")


def check_memory_and_model(settings: Settings) -> Iterator[Finding]:
    from laserbatch.jobs.stages.inputs import NEEDS_A_MODEL, needs_a_model
    from laserbatch.pipeline.decoding.device_memory import host_memory, num_stored_values
    from laserbatch.pipeline.decoding.model.folder import find_weights, load_tokenizer
    from laserbatch.pipeline.distributed.cluster import Node, worker_layout
    from laserbatch.pipeline.distributed.settings import usable_cores
    from laserbatch.pipeline.gpus import num_gpus

    folder = settings.model_dir
    weights = find_weights(folder)
    num_values = num_stored_values(weights)
    num_bytes = sum(path.stat().st_size for path in weights)
    yield Finding("model", "ok", f"{folder}: {len(weights)} safetensors files, {num_values / 1e6:,.1f} M values")
    if settings.tables.path is not None and needs_a_model(settings):
        yield Finding("model", "warning", NEEDS_A_MODEL)
    if load_tokenizer(folder).chat_template is None:
        mend = "Most models that are made to answer have one: take the -Instruct model, or copy its chat_template"
        yield Finding("model", "warning", "its tokenizer has no chat template: prompts go in as plain text", mend)
    memory = host_memory()
    if num_gpus():
        return  # each GPU holds the weights of one worker, which refuses what does not fit it
    num_workers = worker_layout(settings.cluster, [Node(usable_cores())]).num_workers
    needed = num_workers * max(num_bytes, 4 * num_values if settings.decoding.dtype != "bfloat16" else 2 * num_values)
    told = f"{memory.free_bytes / 1e9:.1f} of {memory.total_bytes / 1e9:.1f} GB free; the weights of {num_workers} "
    told += f"workers take {needed / 1e9:.1f} GB"
    mend = "Take a smaller model, or lower cluster.num_workers" if needed > 0.8 * memory.free_bytes else None
    yield Finding("memory", "fault" if needed > memory.free_bytes else "warning" if mend else "ok", told, mend)


def check_workspace(settings: Settings) -> Iterator[Finding]:
    from laserbatch.pipeline.storage.workspace import Workspace

    folder = settings.workspace
    if folder.exists() and any(folder.iterdir()):
        Workspace.open(folder, create=False)  # raises where it holds something else
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    inodes = os.statvfs(folder)
    used = max((size_bytes(run.root) for run in Workspace(settings.workspace).runs()[-1:]), default=0)
    level, mend = "ok", None
    if free < max(LEAST_FREE_BYTES, 2 * used) or (inodes.f_files and inodes.f_favail < 10_000):
        level = "fault" if free < LEAST_FREE_BYTES / 20 else "warning"
        mend = "Make room: `laserbatch runs gc` removes old runs, `laserbatch pools gc` old pools"
    yield Finding("disk", level, f"{free / 1e9:.1f} GB are free at {folder}", mend)
    try:
        with NamedTemporaryFile(dir=folder, prefix=".doctor-", suffix=".tmp") as probe:
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fsync(probe.fileno())
            os.rename(probe.name, moved := f"{probe.name}.moved.tmp")
            os.rename(moved, probe.name)
    except OSError as error:
        mend = "Put the workspace on a local disk or NFS 4, in a folder that this user may write to"
        what = f"{folder} cannot be written, locked or renamed in ({error.strerror})"
        yield Finding("workspace", "fault", what, mend)
    else:
        yield Finding("workspace", "ok", f"{folder} can be written, locked and renamed in")


def check_encoder(settings: Settings) -> Iterator[Finding]:
    from laserbatch.pipeline.encoding.identity import find_encoder

    folder, digest = find_encoder(settings.encoding)
    yield Finding("encoder", "ok", f"{folder} ({digest[:8]})")


def check_pools(settings: Settings) -> Iterator[Finding]:
    from laserbatch.retrieval_pools.index.manifest import tokenizer_hash
    from laserbatch.retrieval_pools.index.store import PoolStore

    store = PoolStore(settings.workspace / "pools")
    current = store.current_version()
    if current is None:
        yield Finding("pools", "ok", "none yet: the first night drafts from each text's own prompt and output")
        return
    expected = tokenizer_hash(settings.model_dir)
    for side in store.verify(current):
        try:
            store.open(current, side, expected)
        except PoolError as error:
            mend = "The next night builds new ones, drafting less; or set decoding.model back"
            yield Finding("pools", "warning", str(error), mend)
            return
    yield Finding("pools", "ok", f"{current}, every byte as it was written")


def check_tables(settings: Settings) -> Iterator[Finding]:
    from laserbatch.jobs.stages.inputs import check_inputs

    if settings.tables.path is None:
        yield Finding("tables", "fault", "tables.path is not set", "`laserbatch init TABLES` writes a configuration")
        return
    faults = [finding for finding in check_inputs(settings.tables.path, settings) if not finding.is_warning]
    if faults:
        told = "; ".join(map(str, faults[:3]))
        yield Finding("tables", "fault", told, f"`laserbatch data check {settings.tables.path}` names them all")
    else:
        yield Finding("tables", "ok", f"{settings.tables.path} has no fault")


def check_recommender(settings: Settings) -> Iterator[Finding]:
    if settings.recommending.model is None:
        return
    from laserbatch.jobs.stages.listed import known_models

    target, codes = known_models(settings.recommending)
    yield Finding("recommender", "ok", f"{target.model_id}, with codes of {len(codes)} items")


def check_ray(settings: Settings) -> Iterator[Finding]:
    from laserbatch.pipeline.distributed.cluster import ray_cluster

    with ray_cluster(settings.cluster, gpus_a_worker=settings.decoding.gpus_a_worker) as layout:
        where = settings.cluster.ray_address or "a local Ray"
        yield Finding("Ray", "ok", f"{where}: room for {layout.num_workers} workers of {layout.need} each")


CHECKS: list[Check] = [
    check_versions,
    check_gpu,
    check_engine,
    check_memory_and_model,
    check_workspace,
    check_encoder,
    check_pools,
    check_tables,
    check_recommender,
]
