"""`laserbatch doctor`: whether a night can run here, looked at in seconds, and how to fix what hinders it.

Nothing is written but a file in the workspace's folder that is taken away again. Of a model that fits this machine one
short text is written, so that it shows whether its texts end; the bundled model's do.
"""

import datetime
import fcntl
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Literal

import typer
from packaging.requirements import Requirement
from rich.text import Text

from laserbatch.jobs.console import ExitCode, stdout, summary, visible
from laserbatch.jobs.extensions import extension
from laserbatch.jobs.settings import CONFIG, JSON, SAMPLE_MODEL, WORKSPACE, Settings, load_settings
from laserbatch.pipeline.errors import LaserbatchError, ModelError, first_line
from laserbatch.pipeline.storage.atomic import size_bytes
from laserbatch.retrieval_pools.errors import PoolError

logger = logging.getLogger("laserbatch")

MIN_FREE_BYTES = 2 * 10**9  # with less free disk a night is likely to fill it
MIN_FREE_SHARE = 0.9  # of a GPU's memory; below it another process uses the GPU, and vLLM by default does not start
MAX_IMPORT_S = 180.0
QUESTION = "Name one colour. Answer with one word."
MAX_ANSWER_TOKENS = 64
MAX_TRIED_BYTES = 8 * 10**9  # of weights on a CPU: a larger model takes minutes for a short text
STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}


@dataclass(frozen=True)
class CheckResult:
    """What a check found, and a hint how to fix a warning or a fault."""

    about: str
    level: Literal["ok", "warning", "fault"]
    found: str
    hint: str | None = None


Check = Callable[[Settings], Iterator[CheckResult]]


def doctor(
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    with_ray: bool = typer.Option(True, "--ray/--no-ray", help="Start or join Ray, which takes some seconds."),
    as_json: bool = JSON,
) -> None:
    """Check whether a night can run here, from versions and GPU to model, disk and tables; print how to fix faults.

    Your own model, if it fits this machine, answers one short question, which shows whether its texts end.
    Exit code 0: a night can run; 3: it cannot.

    Example: `laserbatch doctor --config laserbatch.yaml`
    """
    settings = load_settings(config, {"workspace": workspace})
    findings = examine(settings, [*CHECKS, check_ray] if with_ray else CHECKS)
    num_faults = sum(finding.level == "fault" for finding in findings)
    if as_json:
        summary({"num_faults": num_faults, "findings": [asdict(finding) for finding in findings]}, as_json=True)
    else:
        for finding in findings:
            line = f"{finding.about}: {finding.found}" + (f". {finding.hint}" if finding.hint else "")
            stdout.print(Text(f"{finding.level:<8}", STYLES[finding.level]) + Text(visible(line)), soft_wrap=True)
    if num_faults:
        raise typer.Exit(ExitCode.BAD_INPUT)


def examine(settings: Settings, checks: list[Check]) -> list[CheckResult]:
    """Findings of all checks; one that meets an error has found it, and the others go on."""
    findings: list[CheckResult] = []
    for check in checks:
        about = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            findings += check(settings)
        except LaserbatchError as error:  # their messages say what to do
            if str(error) not in (finding.found for finding in findings):
                findings.append(CheckResult(about, "fault", str(error)))
        except OSError as error:
            hint = "Check that path, and that it may be read and written"
            findings.append(CheckResult(about, "fault", f"{type(error).__name__}: {error}", hint))
        except Exception as error:  # a library's, or our own fault: the other checks are of use all the same
            logger.debug("the check of %s failed", about, exc_info=True)
            hint = None if isinstance(error, RuntimeError) else "`laserbatch -v doctor` shows the traceback"
            findings.append(CheckResult(about, "fault", f"{type(error).__name__}: {error}", hint))
    return findings


def check_versions(settings: Settings) -> Iterator[CheckResult]:
    for line in requires("laserbatch") or []:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        hint = "Install what constraints.txt names: `pip install -c constraints.txt laserbatch`"
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            yield CheckResult("versions", "fault", f"{wanted.name} is not installed; {wanted} is expected", hint)
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            yield CheckResult("versions", "fault", f"{wanted.name} is {found}; {wanted} is expected", hint)
    versions = ", ".join(f"{name} {version(name)}" for name in ("laserbatch", "torch", "transformers", "ray"))
    yield CheckResult("versions", "ok", f"Python {platform.python_version()}, {versions}")


def check_gpu(settings: Settings) -> Iterator[CheckResult]:
    from laserbatch.pipeline.gpus import GPU_DRIVERS, driver_version, num_gpus, try_gpu

    device_file = next((path for path in GPU_DRIVERS if Path(path).exists()), None)
    if device_file is None:
        writers = "the CPU" if settings.cluster.ray_address is None else "the nodes of the Ray cluster"
        yield CheckResult("GPU", "ok", f"no driver of one is here: texts are written by {writers}")
        return
    import torch

    built = torch.version.cuda or torch.version.hip or "no GPU"
    versions = f"driver {driver_version() or f'at {device_file}'}, torch {torch.__version__} built for {built}"
    number = num_gpus()
    if not number:
        hint = "Install the torch build that the driver takes (`nvidia-smi` names it), or unset CUDA_VISIBLE_DEVICES"
        yield CheckResult("GPU", "fault", f"{versions}: torch sees no GPU", hint)
        return
    yield CheckResult("GPU", "ok", versions)
    for device in range(number):
        try:
            gpu = try_gpu(device)
        except RuntimeError as error:
            hint = "Look at `nvidia-smi`; leave this GPU out of CUDA_VISIBLE_DEVICES, or install a torch build for it"
            yield CheckResult("GPU", "fault", f"GPU {device} cannot compute: {first_line(error)}", hint)
            continue
        found = f"{gpu.name}, {gpu.free_bytes / 1e9:.1f} of {gpu.total_bytes / 1e9:.1f} GB free"
        if gpu.free_bytes < MIN_FREE_SHARE * gpu.total_bytes:
            hint = "Another process uses the rest (`nvidia-smi` names it): end it, or set CUDA_VISIBLE_DEVICES"
            yield CheckResult("GPU", "warning", found, hint)
        else:
            yield CheckResult("GPU", "ok", found)


def check_kernels(settings: Settings) -> Iterator[CheckResult]:
    """With which attention laserbatch's engine computes on a GPU."""
    from laserbatch.pipeline.gpus import num_gpus

    decoding = settings.decoding
    if decoding.engine != "laserbatch" or not num_gpus():
        return
    import torch

    from laserbatch.pipeline.decoding.model.cuda_graphs import kernel_for

    try:
        kernel = kernel_for(decoding.attention, torch.device("cuda"))
    except (ImportError, OSError, RuntimeError) as error:
        hint = "Install the Triton that this torch names, or remove Triton: torch's own attention is slower"
        yield CheckResult("attention", "fault", f"Triton cannot be imported: {first_line(error)}", hint)
        return
    if kernel is None:
        hint = "Use Triton where it runs: its kernel takes no padding, and small steps are CUDA graphs"
        yield CheckResult("attention", "warning", "torch's, over padded masks (Triton is not installed)", hint)
    elif not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        found = "Triton needs a C compiler, and there is none: attention will be torch's, over padded masks"
        yield CheckResult("attention", "warning", found, "Install gcc, or name a compiler in CC")
    else:
        yield CheckResult("attention", "ok", "Triton's kernel, small steps as CUDA graphs")


def check_dtype(settings: Settings) -> Iterator[CheckResult]:
    """In which type the model computes here, and why."""
    from laserbatch.pipeline.decoding.model.compute_type import choose_dtype
    from laserbatch.pipeline.decoding.model.folder import quantization_of, read_config, stored_dtype
    from laserbatch.pipeline.gpus import num_gpus

    decoding, has_gpu = settings.decoding, num_gpus() > 0
    stored, quantization = stored_dtype(settings.model_dir), quantization_of(read_config(settings.model_dir))
    try:
        choice = choose_dtype(decoding.dtype, "cuda" if has_gpu else "cpu", stored, quantization)
    except ModelError as error:
        yield CheckResult("dtype", "fault", str(error))
        return
    dtype = stored if choice.name == "auto" else choice.name
    found, hint = f"{dtype}: {choice.reason}", None
    if has_gpu:
        import torch

        if dtype == "float32":
            found += "; it takes twice the memory of bfloat16"
            hint = "Set decoding.dtype: bfloat16, unless texts have to be those of a CPU"
        elif dtype == "bfloat16" and torch.cuda.get_device_capability() < (8, 0):
            found += "; this GPU has no fast products for it"
            hint = "Use a GPU of compute capability 8.0 or above, or decoding.dtype: float32"
    elif decoding.dtype == "float32" and choose_dtype("auto", "cpu", stored, quantization).name == "bfloat16":
        found += "; bfloat16 is faster on this processor"
        hint = "Set decoding.dtype: auto"
    yield CheckResult("dtype", "warning" if hint else "ok", found, hint)


def check_engine(settings: Settings) -> Iterator[CheckResult]:
    from laserbatch.jobs.stages.inputs import require_engine

    require_engine(settings)
    if settings.decoding.engine != "vllm":
        return
    # In a process of its own: on a CPU vLLM crashes where numba has been loaded before.
    importing = [sys.executable, "-c", "import vllm; print(vllm.__version__)"]
    try:
        imported = subprocess.run(importing, capture_output=True, text=True, timeout=MAX_IMPORT_S, check=False)
    except subprocess.TimeoutExpired:
        yield CheckResult("engine", "warning", f"importing vLLM takes more than {MAX_IMPORT_S:.0f} seconds")
        return
    if imported.returncode:
        reason = (imported.stderr.strip() or f"exit code {imported.returncode}").splitlines()[-1]
        hint = "Install it with the torch that it names, in an environment of its own (docs/vllm.md)"
        yield CheckResult("engine", "fault", f"vLLM is installed and cannot be imported: {reason}", hint)
    else:
        found = f"vLLM {imported.stdout.split()[-1]} imports: texts are written with it, and verified greedily"
        yield CheckResult("engine", "ok", found)


def fitting_engine(settings: Settings, num_values: int, file_bytes: int) -> CheckResult:
    """Which engine fits the configured model and this machine; a warning where another one is configured."""
    import torch

    from laserbatch.pipeline.decoding.model.folder import is_mixture_of_experts, quantization_of, read_config
    from laserbatch.pipeline.engine_choice import choose_engine, vllm_advice
    from laserbatch.pipeline.gpus import num_gpus

    decoding, config, number = settings.decoding, read_config(settings.model_dir), num_gpus()
    if not number and settings.cluster.ray_address is not None:
        found = "not known here: run `laserbatch doctor` on a node of the Ray cluster that writes texts"
        return CheckResult("fitting engine", "ok", found)
    quantization = quantization_of(config)
    bytes_per_value = {"float32": 4, "bfloat16": 2}.get(decoding.dtype)
    own_options = [
        f"decoding.{name}" for name in ("temperature", "adapter", "plugin_drafters") if getattr(decoding, name)
    ]
    choice = choose_engine(
        num_parameters=num_values,
        weights_bytes=num_values * bytes_per_value if bytes_per_value and not quantization else file_bytes,
        quantization=quantization,
        is_mixture_of_experts=is_mixture_of_experts(config),
        verifier=decoding.verifier,
        device_bytes=min((torch.cuda.get_device_properties(i).total_memory for i in range(number)), default=0),
        num_gpus=number,
        own_options=own_options,
    )
    name = {"laserbatch": "laserbatch's own engine", "vllm": "vLLM"}[choice.engine]
    found = f"{name} fits this model and machine: {choice.reason}"
    if decoding.engine == choice.engine and decoding.gpus_a_worker >= choice.tensor_parallel_size:
        return CheckResult("fitting engine", "ok", found)
    hint = "set decoding.engine: laserbatch"
    if choice.engine == "vllm":
        hint = "" if decoding.engine == "vllm" or find_spec("vllm") else "install vLLM and "
        hint += vllm_advice(choice.tensor_parallel_size, own_options)
        hint += "" if decoding.verifier == "greedy" else "; it verifies greedily"
    return CheckResult("fitting engine", "warning", found, hint[0].upper() + hint[1:])


def check_memory_and_model(settings: Settings) -> Iterator[CheckResult]:
    from laserbatch.jobs.stages.inputs import NEEDS_A_MODEL, needs_a_model
    from laserbatch.pipeline.decoding.device_memory import host_memory, num_stored_values
    from laserbatch.pipeline.decoding.model.compute_type import choose_dtype
    from laserbatch.pipeline.decoding.model.folder import (
        find_weights,
        load_tokenizer,
        quantization_of,
        read_config,
        require_described_weights,
        require_token_rows,
        stored_dtype,
    )
    from laserbatch.pipeline.distributed.cluster import Node, worker_layout
    from laserbatch.pipeline.distributed.settings import usable_cores
    from laserbatch.pipeline.gpus import num_gpus

    folder = settings.model_dir
    weights = find_weights(folder)
    num_values = num_stored_values(weights)
    num_bytes = sum(path.stat().st_size for path in weights)
    files = f"{folder}: {len(weights)} safetensors files, {num_values / 1e6:,.1f} M values"
    try:
        num_rows = require_described_weights(folder)
    except ModelError as error:
        yield CheckResult("model", "fault", str(error))
        return
    compared = "" if num_rows else "; tensors were not compared with config.json (unknown to transformers, or packed)"
    yield CheckResult("model", "ok", files + compared)
    if settings.tables.path is not None and needs_a_model(settings):
        yield CheckResult("model", "warning", NEEDS_A_MODEL)
    tokenizer = load_tokenizer(folder, settings.decoding.adapter)
    try:
        warning = require_token_rows(folder, tokenizer, num_rows) if num_rows else None
    except ModelError as error:
        yield CheckResult("model", "fault", str(error))
        return
    if warning:
        yield CheckResult("model", "warning", warning)
    if tokenizer.chat_template is None:
        hint = "Most models that are made to answer have one: take the -Instruct model, or copy its chat_template"
        yield CheckResult("model", "warning", "its tokenizer has no chat template: prompts go in as plain text", hint)
    yield fitting_engine(settings, num_values, num_bytes)
    memory = host_memory()
    if num_gpus():
        return  # each GPU holds the weights of one worker, which refuses what does not fit it
    num_workers = worker_layout(settings.cluster, [Node(usable_cores())]).num_workers
    try:
        choice = choose_dtype(
            settings.decoding.dtype, "cpu", stored_dtype(folder), quantization_of(read_config(folder))
        )
    except ModelError:
        return  # `check_dtype` has said it
    needed = num_workers * max(num_bytes, {"float32": 4, "bfloat16": 2, "auto": 0}[choice.name] * num_values)
    message = f"{memory.free_bytes / 1e9:.1f} of {memory.total_bytes / 1e9:.1f} GB free; the weights of {num_workers} "
    message += f"workers take {needed / 1e9:.1f} GB"
    hint = "Take a smaller model, or lower cluster.num_workers" if needed > 0.8 * memory.free_bytes else None
    yield CheckResult("memory", "fault" if needed > memory.free_bytes else "warning" if hint else "ok", message, hint)


def check_answer(settings: Settings) -> Iterator[CheckResult]:
    """Whether the model ends a short answer, and with which token."""
    import torch

    from laserbatch.pipeline.decoding.device_memory import num_stored_values
    from laserbatch.pipeline.decoding.model.folder import find_weights
    from laserbatch.pipeline.decoding.sequence import GenerationFailure, GenerationRequest
    from laserbatch.pipeline.engines.answers import UNCLOSED_THOUGHTS
    from laserbatch.pipeline.engines.own import OwnEngine
    from laserbatch.pipeline.gpus import num_gpus
    from laserbatch.pipeline.knowledge.chat_format import encode_chat

    if settings.decoding.model == SAMPLE_MODEL:
        return
    folder = settings.model_dir
    is_large = not num_gpus() and 4 * num_stored_values(find_weights(folder)) > MAX_TRIED_BYTES
    if is_large or settings.cluster.ray_address is not None or settings.decoding.gpus_a_worker > 1:
        yield CheckResult("answer", "ok", "no text was tried here: `laserbatch try` writes one")
        return
    plain = {"engine": "laserbatch", "vllm": {}, "verifier": "greedy", "drafters": (), "drafter_options": {},
             "max_draft_tokens": 0, "batch_size": 1, "temperature": 0.0}  # fmt: skip
    decoding = settings.decoding.model_copy(update=plain)
    try:
        engine = OwnEngine(folder, decoding, "auto", torch.get_num_threads(), 1, 1, {}, folder)
    except ModelError as error:
        if settings.decoding.engine == "laserbatch":
            raise
        yield CheckResult(
            "answer", "ok", f"no text was tried here, since laserbatch's engine cannot load the model: {error}"
        )
        return
    options = settings.effective_knowledge.template("item").chat_options
    prompt = encode_chat(engine.tokenizer, QUESTION, None, options, datetime.datetime.now(datetime.UTC).date())
    request = GenerationRequest("answer", prompt, max_new_tokens=MAX_ANSWER_TOKENS)
    (answer,) = engine.generate("item", [request], decoding)
    if isinstance(answer, GenerationFailure):
        yield CheckResult("answer", "warning", f"a short question could not be answered: {answer.reason}")
        return
    shown = f"a short question was answered {answer.text.strip()[:60]!r}, in {len(answer.token_ids)} tokens, "
    shown += f"after {answer.num_thought_tokens} of thoughts, " if answer.num_thought_tokens else ""
    if answer.finish_reason == UNCLOSED_THOUGHTS:
        hint = "Leave them room in decoding.max_new_tokens, or turn them off by the template's chat_options"
        found = (
            f"{len(answer.token_ids)} tokens did not end the thoughts before a short answer; they are cut from texts"
        )
        yield CheckResult("answer", "warning", found, hint)
    elif answer.role_mark:
        hint = "Add the token that ends the model's turns to eos_token_id in its generation_config.json"
        invented = f", and {answer.num_invented} tokens that came after it" if answer.num_invented else ""
        shown += f"ended at {answer.role_mark!r}, a role mark or end token that its configuration does not name"
        yield CheckResult("answer", "warning", f"{shown}{invented}: texts are cut there", hint)
    elif answer.end_id is None:
        hint = (
            "Take a model that was tuned to answer; of one that was, see that eos_token_id in generation_config.json "
            "names the token that ends its turns"
        )
        yield CheckResult("answer", "warning", f"{shown}and no end token came: texts may run on to their limit", hint)
    else:
        yield CheckResult("answer", "ok", f"{shown}and ended with {engine.tokenizer.decode([answer.end_id])!r}")


def check_workspace(settings: Settings) -> Iterator[CheckResult]:
    from laserbatch.pipeline.storage.workspace import Workspace

    folder = settings.workspace
    if folder.exists() and any(folder.iterdir()):
        Workspace.open(folder, create=False)  # raises where it holds something else
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    inodes = os.statvfs(folder)
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
        what = f"{folder} cannot be written, locked or renamed in ({error.strerror})"
        yield CheckResult("workspace", "fault", what, hint)
    else:
        yield CheckResult("workspace", "ok", f"{folder} can be written, locked and renamed in")


def check_encoder(settings: Settings) -> Iterator[CheckResult]:
    from laserbatch.pipeline.encoding.identity import find_encoder

    folder, digest = find_encoder(settings.encoding)
    yield CheckResult("encoder", "ok", f"{folder} ({digest[:8]})")


def check_pools(settings: Settings) -> Iterator[CheckResult]:
    from laserbatch.pipeline.decoding.model.folder import tokenizer_folder
    from laserbatch.retrieval_pools.index.manifest import tokenizer_hash
    from laserbatch.retrieval_pools.index.store import PoolStore

    store = PoolStore(settings.workspace / "pools")
    current = store.current_version()
    if current is None:
        yield CheckResult("pools", "ok", "none yet: the first night drafts from each text's own prompt and output")
        return
    expected = tokenizer_hash(tokenizer_folder(settings.model_dir, settings.decoding.adapter))
    for side in store.verify(current):
        try:
            store.open(current, side, expected)
        except PoolError as error:
            hint = "The next night builds new ones, drafting less; or set decoding.model back"
            yield CheckResult("pools", "warning", str(error), hint)
            return
    yield CheckResult("pools", "ok", f"{current}, every byte as it was written")


def check_tables(settings: Settings) -> Iterator[CheckResult]:
    from laserbatch.jobs.stages.inputs import check_inputs

    if settings.tables.path is None:
        yield CheckResult(
            "tables", "fault", "tables.path is not set", "`laserbatch init TABLES` writes a configuration"
        )
        return
    findings = check_inputs(settings.tables.path, settings)
    faults = [finding for finding in findings if not finding.is_warning]
    if faults:
        problems = "; ".join(map(str, faults[:3]))
        yield CheckResult("tables", "fault", problems, f"`laserbatch data check {settings.tables.path}` names them all")
    else:
        left_out = "".join(f"; {finding.found}" for finding in findings if finding.kind == "left-out")
        yield CheckResult("tables", "ok", f"{settings.tables.path} has no fault{left_out}")


def check_extensions(settings: Settings) -> Iterator[CheckResult]:
    for name, options in settings.extensions.items():
        yield CheckResult(name, "ok", extension(name).check(options))


def check_ray(settings: Settings) -> Iterator[CheckResult]:
    from laserbatch.pipeline.distributed.cluster import ray_cluster

    with ray_cluster(settings.cluster, gpus_a_worker=settings.decoding.gpus_a_worker) as layout:
        where = settings.cluster.ray_address or "a local Ray"
        yield CheckResult("Ray", "ok", f"{where}: room for {layout.num_workers} workers of {layout.need} each")


CHECKS: list[Check] = [
    check_versions,
    check_gpu,
    check_kernels,
    check_dtype,
    check_engine,
    check_memory_and_model,
    check_answer,
    check_workspace,
    check_encoder,
    check_pools,
    check_tables,
    check_extensions,
]
