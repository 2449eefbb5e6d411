"""A small world and a configuration for whole nights in tests, with the bundled model."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import in_process
import pytest
import yaml

from laserbatch.jobs.cli import main
from laserbatch.jobs.stages.workers import NightWorkers
from laserbatch.pipeline.distributed.cluster import WorkerLayout
from laserbatch.pipeline.distributed.settings import ClusterSettings
from laserbatch.pipeline.sample.world import write_sample_world

FIRST_DATE, SECOND_DATE = "2025-02-28", "2025-03-01"
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def write_config(folder: Path, name: str = "laserbatch.yaml", **sections) -> Path:
    """Write a configuration over `folder/tables` for quick nights; `sections` override it.

    It has a tiny encoder: the one that ships takes longer to load than such a night takes. `test_nightly.py` uses that.
    """
    shutil.copytree(_small_encoder().name, folder / "encoder", dirs_exist_ok=True)
    settings = {
        "workspace": "workspace",
        "tables": {"path": "tables"},
        # A fixed budget: a chosen one would depend on the current speed of this machine.
        "decoding": {
            "max_new_tokens": 256,
            "batch_size": 8,
            "max_draft_tokens": 16,
            "min_acceptance": 0.07,
        },
        "night": {"shard_size": 8, "train_ctr": False},
        "gates": {"max_failed_share": 0.2},
        "ctr": {"models": ["gbdt"], "num_seeds": 1},
        "encoding": {"num_clusters": 4, "encoder": "encoder"},
    }
    for section, values in sections.items():
        settings[section] = settings.get(section, {}) | values if isinstance(values, dict) else values
    path = folder / name
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def write_encoder(folder: Path, seed: int = 0) -> None:
    """A BERT of one layer that reads letters."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    pieces = [*LETTERS, *(f"##{letter}" for letter in LETTERS), *".,:;!?-|()'"]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]))
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=128).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BertModel(BertConfig(vocab_size=5 + len(pieces), max_position_embeddings=128, **sizes))
    model.save_pretrained(folder)


@cache
def _small_encoder() -> tempfile.TemporaryDirectory:
    """A tiny encoder to copy, in a folder that is removed at the end of this process."""
    folder = tempfile.TemporaryDirectory()
    write_encoder(Path(folder.name))
    return folder


def make_world(folder: Path, num_users: int = 24, num_items: int = 24) -> Path:
    """The sample world at its smallest, in `folder/tables`."""
    write_sample_world(folder / "tables", num_users=num_users, num_items=num_items)
    return folder


@contextmanager
def local_ray(num_workers: int | None = None) -> Iterator[WorkerLayout]:
    """A local Ray, even if the environment names a cluster.

    A thread starts it, as in a night: if the main thread starts one Ray of a process and another thread a later one,
    two tasks of the later one may get the same id, which ends the process.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_ADDRESS", "127.0.0.1:1")
        with NightWorkers(ClusterSettings(num_workers=num_workers)) as workers:
            yield workers.cluster()


HERE = (sys.executable, "-c", "from laserbatch.jobs.cli import main; main()")


def start(*arguments: str, laserbatch: Sequence[str | Path] = HERE) -> subprocess.Popen:
    """`laserbatch ARGUMENTS` as a process of its own, as a scheduler would run it."""
    command = [*laserbatch, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def write_here(patched: pytest.MonkeyPatch) -> None:
    """Write texts in this process instead of in Ray's actors, which would import Python and torch each night.

    A model is loaded once for all nights, as in a process that stays alive.
    """
    from laserbatch.pipeline.engines import own

    in_process.write_here(patched.setattr)
    patched.setattr(own, "load_model", _loaded)


def _loaded(folder: Path, dtype: str, device: str, adapter: Path | None):
    """`load_model`, cached by its files."""
    paths = [path for part in (folder, adapter) if part is not None for path in sorted(Path(part).glob("*"))]
    files = tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in paths)
    return _loaded_once(files, folder, dtype, device, adapter)


@lru_cache(maxsize=4)
def _loaded_once(files: tuple, *arguments):
    from laserbatch.pipeline.decoding.model.load import load_model

    return load_model(*arguments)


@dataclass(frozen=True)
class Done:
    """The result of a command."""

    returncode: int
    stdout: str
    stderr: str


def run_here(capfd, *arguments: str) -> Done:
    """`laserbatch ARGUMENTS` in this process: the same entry, without starting Python and torch again."""
    capfd.readouterr()
    code = command_here(*arguments)
    out, err = capfd.readouterr()
    return Done(code, out, err)


def command_here(*arguments: str) -> int:
    """Run `laserbatch ARGUMENTS` in this process and return its exit code."""
    argv, sys.argv = sys.argv, ["laserbatch", *arguments]
    try:
        main()
        return 0
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv = argv
