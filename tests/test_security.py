"""Forbidden for all data: running code, leaving folders, controlling terminals, files readable by others."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from laserbatch.jobs.console import say, summary
from laserbatch.pipeline import validation
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.knowledge.templates import load_template
from laserbatch.pipeline.planning.plan import load_plan
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.store import PoolStore

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("pipeline", "retrieval_pools", "ctr", "jobs", "models")
SOURCES = [path for name in ROOMS for path in sorted((ROOT / name).rglob("*.py"))]
PICKLES = {"pickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
UNPICKLE_NOTHING = {"from joblib import cpu_count"}
NEVER_CALLED = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
UNSAFE_OPTIONS = ("shell", "allow_pickle", "trust_remote_code")
OUTSIDE = ("../x", "/etc/passwd", "a/../../x", "..")


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def dangers(path: Path) -> list[str]:
    """The parts of a source file that unpickle, run code from data, or start a shell."""
    nodes = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            is_pickle = PICKLES & {name.split(".")[0] for name in names}
            nodes += [node] if is_pickle and ast.unparse(node) not in UNPICKLE_NOTHING else []
        if not isinstance(node, ast.Call):
            continue
        arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        is_safe_yaml = called(node) == "yaml.load" and ast.unparse(node.args[1]) == "_UniqueKeys"
        asks_for_it = any(
            arguments.get(name, "False") != "False" for name in ("shell", "allow_pickle", "trust_remote_code")
        )
        is_loaded = called(node) == "torch.load" and arguments.get("weights_only") != "True"
        is_hub = called(node).endswith(".from_pretrained") and "torch" in called(node)
        is_called = called(node) in NEVER_CALLED and not is_safe_yaml
        nodes += [node] if is_called or asks_for_it or is_loaded or is_hub else []
    return [f"{path.relative_to(ROOT)}, line {node.lineno}: {ast.unparse(node)}" for node in nodes]


def test_nothing_is_unpickled_no_code_of_data_is_run_and_no_shell_is_started():
    assert not [danger for path in SOURCES for danger in dangers(path)]


def test_yaml_is_read_as_plain_values():
    assert issubclass(validation._UniqueKeys, yaml.SafeLoader)


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_from_data_lead_nowhere_else(tmp_path, name):
    workspace = Workspace.open(tmp_path / "workspace")
    with pytest.raises(WorkspaceError):
        workspace.run(name)
    (workspace.root / "published.json").write_text(json.dumps({"run_id": name}))
    with pytest.raises(WorkspaceError):
        workspace.publication.run()
    with pytest.raises(PoolError):
        PoolStore(tmp_path / "pools").folder(name)
    with pytest.raises(Exception, match="template"):
        load_template(name, tmp_path)


@pytest.mark.parametrize("path", OUTSIDE[:3])
def test_paths_that_a_run_wrote_down_and_somebody_changed_are_not_followed(tmp_path, path):
    run = RunFolder(tmp_path / "run")
    (run.root / "plan").mkdir(parents=True)
    (run.root / "shards" / "user").mkdir(parents=True)
    shard = {"name": "0", "side": "user", "group": "", "num_rows": 1, "path": path, "sha256": "", "is_isolated": False}
    plan = {"side": "user", "num_entities": 1, "num_carried_over": 0, "num_unpromptable": 0, "routes": {}}
    plan["shards"] = [shard]
    (run.root / "plan" / "user.json").write_text(json.dumps(plan))
    assert load_plan(run.root, "user") is None
    record = {"name": "00000", "file": path, "num_rows": 1, "sha256": ""}
    (run.root / "shards" / "user" / "00000.json").write_text(json.dumps(record))
    assert run.shards("user").finished() == {}


def test_a_terminal_obeys_nothing_that_data_say(capfd):
    hostile = "\x1b]0;owned\x07\x1b[2J[bold]\x9b31m\x00"
    say(hostile)
    summary({hostile: hostile, "inner": {hostile: [hostile]}}, as_json=False)
    shown = "".join(capfd.readouterr())
    assert not {"\x1b", "\x07", "\x9b", "\x00"} & set(shown) and shown.count("[bold]") == 5


def test_files_are_for_nobody_else_to_change_whatever_the_umask(tmp_path):
    code = (
        "import os; os.umask(0)\nfrom laserbatch.jobs.cli import main\n"
        "import sys; sys.argv = ['laserbatch', 'data', 'sample', sys.argv[1], '--num-users', '2']\nmain()"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "world"], check=True, capture_output=True, timeout=120)
    made = [path for path in (tmp_path / "world").rglob("*")]
    assert made and not [path for path in made if os.stat(path).st_mode & 0o002]
