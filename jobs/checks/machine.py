"""Checks whether a night can run on this machine: software, GPUs, disk, and the files that the configuration names.

It writes only temporary files, in the workspace's folder and at `deliver_to`. It knows nothing of the model.
"""

import fcntl
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from tempfile import NamedTemporaryFile

from packaging.requirements import Requirement

from laserbatch.jobs.checks.model import check_prompts
from laserbatch.jobs.checks.result import CheckResult
from laserbatch.jobs.extensions import extension
from laserbatch.jobs.settings import Settings
from laserbatch.jobs.stages.inputs import check_inputs, require_engine
from laserbatch.jobs.stages.publishing import require_place
from laserbatch.pipeline import gpus
from laserbatch.pipeline.decoding.model.folder import tokenizer_folder
from laserbatch.pipeline.encoding.identity import find_encoder
from laserbatch.pipeline.engine_choice import small_batch
from laserbatch.pipeline.errors import first_line
from laserbatch.pipeline.storage.atomic import size_bytes
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.manifest import tokenizer_hash
from laserbatch.retrieval_pools.index.store import PoolStore
from laserbatch.retrieval_pools.routing.router import Router

MIN_FREE_BYTES = 2 * 10**9  # with less free disk a night is likely to fill it
MIN_FREE_SHARE = 0.9  # free share of a GPU's memory; with less, another process uses it and vLLM may not start
MAX_IMPORT_S = 180.0


def check_versions(settings: Settings) -> Iterator[CheckResult]:
    for line in requires("laserbatch") or []:
        package = Requirement(line)
        if package.marker is not None and not package.marker.evaluate({"extra": ""}):
            continue
        hint = "Install what constraints.txt names: `pip install -c constraints.txt laserbatch`"
        try:
            installed = version(package.name)
        except PackageNotFoundError:
            installed = "not installed"
        if installed == "not installed" or not package.specifier.contains(installed, prereleases=True):
            yield CheckResult("versions", "fault", f"{package.name} is {installed}; {package} is expected", hint)
    versions = ", ".join(f"{name} {version(name)}" for name in ("laserbatch", "torch", "transformers", "ray"))
    yield CheckResult("versions", "ok", f"Python {platform.python_version()}, {versions}")


def check_gpu(settings: Settings) -> Iterator[CheckResult]:
    device_file = next((path for path in gpus.GPU_DRIVERS if Path(path).exists()), None)
    if device_file is None:
        writers = "the CPU cores" if settings.cluster.ray_address is None else "the nodes of the Ray cluster"
        yield CheckResult("GPU", "ok", f"no GPU driver is here: {writers} write the texts")
        return
    import torch

    built = torch.version.cuda or torch.version.hip or "no GPU"
    versions = f"driver {gpus.driver_version() or f'at {device_file}'}, torch {torch.__version__} built for {built}"
    number = gpus.num_gpus()
    if not number:
        hint = "Install a torch build for this driver (`nvidia-smi` names its CUDA), or unset CUDA_VISIBLE_DEVICES"
        yield CheckResult("GPU", "fault", f"{versions}: torch sees no GPU", hint)
        return
    yield CheckResult("GPU", "ok", versions)
    for device in range(number):
        try:
            name, free_bytes, total_bytes = gpus.try_gpu(device)
        except RuntimeError as error:
            hint = "Look at `nvidia-smi`; leave this GPU out of CUDA_VISIBLE_DEVICES, or install a torch build for it"
            yield CheckResult("GPU", "fault", f"GPU {device} cannot compute: {first_line(error)}", hint)
            continue
        description = f"{name}, {free_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB free"
        hint = "Another process uses the rest (`nvidia-smi` names it): end it, or set CUDA_VISIBLE_DEVICES"
        is_shared = free_bytes < MIN_FREE_SHARE * total_bytes
        yield CheckResult("GPU", "warning" if is_shared else "ok", description, hint if is_shared else None)


def check_kernels(settings: Settings) -> Iterator[CheckResult]:
    """Check which attention kernel laserbatch's engine uses on a GPU."""
    decoding = settings.decoding
    if decoding.engine != "laserbatch" or not gpus.num_gpus():
        return
    import torch

    from laserbatch.pipeline.decoding.model.cuda_graphs import kernel_for

    try:
        kernel = kernel_for(decoding.attention, torch.device("cuda"))
    except (ImportError, OSError, RuntimeError) as error:
        hint = "Install the Triton that this torch requires, or remove Triton: torch's attention works, but slower"
        yield CheckResult("attention", "fault", f"Triton cannot be imported: {first_line(error)}", hint)
        return
    if kernel is None:
        hint = "Install Triton where it runs: its kernel needs no padding, and runs small steps as CUDA graphs"
        yield CheckResult("attention", "warning", "torch's, over padded masks (Triton is not installed)", hint)
    elif not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        text = "Triton needs a C compiler, and there is none: attention will be torch's, over padded masks"
        yield CheckResult("attention", "warning", text, "Install gcc, or name a compiler in CC")
    else:
        yield CheckResult("attention", "ok", "Triton's kernel, small steps as CUDA graphs")


def check_batch(settings: Settings) -> Iterator[CheckResult]:
    decoding = settings.decoding
    if decoding.engine != "endpoint" and gpus.num_gpus() and (problem := small_batch(decoding.batch_size)):
        yield CheckResult("batch", "warning", problem, "Set decoding.batch_size: 128, or less if memory runs out")


def check_engine(settings: Settings) -> Iterator[CheckResult]:
    require_engine(settings)
    if settings.decoding.engine != "vllm":
        return
    # In a child process: on a CPU vLLM crashes if numba was loaded before.
    importing = [sys.executable, "-c", "import vllm; print(vllm.__version__)"]
    try:
        imported = subprocess.run(importing, capture_output=True, text=True, timeout=MAX_IMPORT_S, check=False)
    except subprocess.TimeoutExpired:
        yield CheckResult("engine", "warning", f"importing vLLM takes more than {MAX_IMPORT_S:.0f} seconds")
        return
    if imported.returncode:
        reason = (imported.stderr.strip() or f"exit code {imported.returncode}").splitlines()[-1]
        hint = "Install it with the torch that it requires, in a separate environment (docs/vllm.md)"
        yield CheckResult("engine", "fault", f"vLLM is installed, but cannot be imported: {reason}", hint)
    else:
        text = f"vLLM {imported.stdout.split()[-1]} can be imported: it writes the texts, and verifies greedily"
        yield CheckResult("engine", "ok", text)


def check_workspace(settings: Settings) -> Iterator[CheckResult]:
    folder = settings.workspace
    if folder.exists() and any(folder.iterdir()):
        Workspace.open(folder, create=False)  # raises if it holds something else
    while not folder.exists():
        folder = folder.parent
    free, inodes = shutil.disk_usage(folder).free, os.statvfs(folder)
    used = max((size_bytes(run.root) for run in Workspace(settings.workspace).runs()[-1:]), default=0)
    level, hint = "ok", None
    if free < max(MIN_FREE_BYTES, 2 * used) or (inodes.f_files and inodes.f_favail < 10_000):
        level = "fault" if free < MIN_FREE_BYTES / 20 else "warning"
        hint = "Make room: `laserbatch runs gc` removes old runs, `laserbatch pools gc` old pools"
    yield CheckResult("disk", level, f"{free / 1e9:.1f} GB are free at {folder}", hint)
    try:
        with NamedTemporaryFile(dir=folder, prefix=".doctor-", suffix=".tmp") as probe:
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fsync(probe.fileno())
            os.rename(probe.name, moved := f"{probe.name}.moved.tmp")
            os.rename(moved, probe.name)
    except OSError as error:
        hint = "Put the workspace on a local disk or NFS 4, in a folder that this user may write to"
        what = f"files in {folder} cannot be written, locked or renamed ({error.strerror})"
        yield CheckResult("workspace", "fault", what, hint)
    else:
        yield CheckResult("workspace", "ok", f"files in {folder} can be written, locked and renamed")


def check_encoder(settings: Settings) -> Iterator[CheckResult]:
    folder, digest = find_encoder(settings.encoding)
    yield CheckResult("encoder", "ok", f"{folder} ({digest[:8]})")


def check_pools(settings: Settings) -> Iterator[CheckResult]:
    store = PoolStore(settings.workspace / "pools")
    current = store.current_version()
    if current is None:
        is_served = settings.decoding.engine == "endpoint"
        use = "laserbatch drafts nothing" if is_served else "drafts come from each text's own prompt and output"
        yield CheckResult("pools", "ok", f"none yet: {use}")
        return
    expected = tokenizer_hash(tokenizer_folder(settings.model_dir, settings.decoding.adapter))
    for side in store.verify(current):
        try:
            store.open(current, side, expected)
            Router.load(store.folder(current) / "router" / side)
        except PoolError as error:
            hint = "The next night drafts from older pools that fit, or from none, and builds new ones"
            yield CheckResult("pools", "warning", str(error), hint)
            return
    yield CheckResult("pools", "ok", f"{current}, every file has its checksum")


def check_tables(settings: Settings) -> Iterator[CheckResult]:
    path = settings.tables.required_path
    findings = check_inputs(path, settings)
    if faults := [finding for finding in findings if not finding.is_warning]:
        problems = "; ".join(map(str, faults[:3]))
        yield CheckResult("tables", "fault", problems, f"`laserbatch data check {path}` names them all")
    else:
        left_out = "".join(f"; {finding.found}" for finding in findings if finding.kind == "left-out")
        yield CheckResult("tables", "ok", f"{path} has no fault{left_out}")
        yield from check_prompts(settings)


def check_delivery(settings: Settings) -> Iterator[CheckResult]:
    if settings.deliver_to is not None:
        require_place(Workspace(settings.workspace), settings.deliver_to)
        yield CheckResult("delivery", "ok", f"runs can be delivered to {settings.deliver_to}")


def check_extensions(settings: Settings) -> Iterator[CheckResult]:
    for name, options in settings.extensions.items():
        yield CheckResult(name, "ok", extension(name).check(options))


def check_ray(settings: Settings) -> Iterator[CheckResult]:
    from laserbatch.pipeline.distributed.cluster import ray_cluster
    from laserbatch.pipeline.distributed.spec import worker_bytes

    decoding = settings.decoding
    needed = partial(worker_bytes, settings.model_dir, decoding, settings.knowledge.max_prompt_tokens)
    with ray_cluster(settings.cluster, gpus_a_worker=decoding.gpus_a_worker, worker_bytes=needed) as layout:
        where = settings.cluster.ray_address or "a local Ray"
        yield CheckResult("Ray", "ok", f"{where}: room for {layout.num_workers} workers of {layout.need} each")
