"""What may import what: the structure that the README draws, stated."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pipeline", "retrieval_pools", "ctr", "jobs")
ALLOWED = {
    "jobs": {"jobs", "pipeline", "retrieval_pools", "ctr"},
    "pipeline": {"pipeline", "retrieval_pools"},
    "retrieval_pools": {"retrieval_pools"},
    "ctr": {"ctr"},
}
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Whole names; our own without the `laserbatch.` before them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {module.removeprefix("laserbatch.") for module in found}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    for module in imported_modules(path):
        top = module.split(".")[0]
        if top not in PACKAGES or top in ALLOWED[package]:
            continue
        assert (package == "ctr" and module.startswith("pipeline.encoding.schema")) or module == "pipeline.encoding", (
            f"{path} imports {module}"
        )


@pytest.mark.parametrize("package", [*PACKAGES, "pipeline.decoding", "jobs.report"])
def test_the_rooms_of_a_package_stand_on_one_another_without_a_circle(package):
    rooms = TopologicalSorter(rooms_used_by_room(package))
    rooms.prepare()  # raises CycleError, which names the rooms of a circle


def rooms_used_by_room(package: str) -> dict[str, set[str]]:
    """A room is a file or a folder directly in the package; a folder's face, which defines nothing, is none."""
    folder = ROOT / package.replace(".", "/")
    used: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        room = path.relative_to(folder).parts[0].removesuffix(".py")
        found = {module.removeprefix(f"{package}.") for module in imported_modules(path) if f"{package}." in module}
        named = {module.split(".")[0] for module in found}
        used.setdefault(room, set()).update(name for name in named if is_room(folder, name) and name != room)
    return used


def is_room(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").exists() or (folder / name).is_dir()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_ray_and_torch_stay_where_they_belong(path):
    relative = path.relative_to(ROOT)
    tops = {module.split(".")[0] for module in imported_modules(path)}
    if relative.parts[:2] != ("pipeline", "distributed"):
        assert "ray" not in tops
    if relative.parts[0] == "retrieval_pools" and relative.name != "lightgcn.py":
        assert "torch" not in tops


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled_and_no_remote_code_is_run(path):
    text = path.read_text(encoding="utf-8")
    assert not {"pickle", "dill", "joblib", "cloudpickle"} & {m.split(".")[0] for m in imported_modules(path)}
    assert "allow_pickle=True" not in text
    assert "trust_remote_code=True" not in text
