"""The allowed imports between packages, as drawn in the README."""

import ast
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pipeline", "retrieval_pools", "ctr", "jobs", "research")
ALLOWED = {
    "research": {"research", "jobs", "pipeline", "retrieval_pools", "ctr"},
    "jobs": {"jobs", "pipeline", "retrieval_pools", "ctr"},
    "pipeline": {"pipeline", "retrieval_pools"},
    "retrieval_pools": {"retrieval_pools"},
    "ctr": {"ctr"},
}
FILES = {path.relative_to(ROOT): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Full names of imported modules; our own without `laserbatch.`."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(module.removeprefix("laserbatch.") for module in modules)


def tops(path: Path) -> set[str]:
    return {module.split(".")[0] for module in imported_modules(path)}


def test_imports_point_one_way():
    for name, path in FILES.items():
        package = name.parts[0]
        foreign = {module for module in imported_modules(path) if module.split(".")[0] in PACKAGES}
        foreign = {module for module in foreign if module.split(".")[0] not in ALLOWED[package]}
        if package == "ctr":  # schema and checksums of files, figures of a comparison, the base of errors, LightGCN
            allowed = (
                "pipeline.encoding.schema.",
                "pipeline.storage.figures.",
                "retrieval_pools.atomic.",
                "retrieval_pools.errors.",
                "retrieval_pools.routing.lightgcn.",
            )
            foreign = {module for module in foreign if not f"{module}.".startswith(allowed)}
            foreign -= {"pipeline.encoding", "pipeline.storage"}
        assert not foreign, f"{name} imports {sorted(foreign)}"
        assert "pandas" not in tops(path), f"{name} imports pandas, which nights do without"


def test_editors_find_each_installed_folder_by_its_link():
    (folders,) = re.findall(r"^FOLDERS = (.*)$", (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)
    links = {path.name: path.readlink() for path in (ROOT / ".typing" / "laserbatch").iterdir()}
    assert links == {name: Path("../..") / name for name in ast.literal_eval(folders)}


def test_only_research_and_its_tests_and_benchmarks_import_research():
    """Nights run completely without it: plug-ins are found by their entry points."""
    for path in [*FILES.values(), *(ROOT / "tests").rglob("*.py")]:
        parts = path.relative_to(ROOT).parts
        if parts[0] != "research" and parts[:2] not in (("tests", "research"), ("tests", "benchmarks")):
            assert "research" not in {module.split(".")[0] for module in imported_modules(path)}, path


def test_nothing_that_is_installed_imports_tests_or_benchmarks():
    for name, path in FILES.items():
        assert not {"tests", "benchmarks"} & tops(path), name


def test_tests_of_the_product_import_no_benchmark():
    """They import only plain references from that folder: entities as objects, and the texts of the sample world."""
    names = {"benchmarks", *(path.stem for path in (ROOT / "benchmarks").glob("*.py"))}
    names -= {*PACKAGES, "entities", "sample_exercises", "sample_lore"}
    for path in (ROOT / "tests").rglob("*.py"):
        if path.relative_to(ROOT).parts[1] != "benchmarks":
            assert not names & tops(path), path


@pytest.mark.parametrize("package", [*PACKAGES, "pipeline.decoding", "jobs.report", "jobs.stages", "jobs.commands"])
def test_the_rooms_of_a_package_stand_on_one_another_without_a_circle(package):
    rooms = TopologicalSorter(rooms_used_by_room(package))
    rooms.prepare()  # raises CycleError, which names a cycle of rooms


def test_no_files_import_each_other_in_a_circle():
    """Imports inside functions count, too."""
    modules = {".".join(name.with_suffix("").parts) for name in FILES}
    files = TopologicalSorter(
        {".".join(name.with_suffix("").parts): imported_modules(path) & modules for name, path in FILES.items()}
    )
    files.prepare()


def rooms_used_by_room(package: str) -> dict[str, set[str]]:
    """The rooms that each room imports: files or folders of the package, except faces, which define nothing."""
    folder = ROOT / package.replace(".", "/")
    used: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        room = path.relative_to(folder).parts[0].removesuffix(".py")
        imported = {module.removeprefix(f"{package}.") for module in imported_modules(path) if f"{package}." in module}
        named = {module.split(".")[0] for module in imported}
        used.setdefault(room, set()).update(name for name in named if is_room(folder, name) and name != room)
    return used


def is_room(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").exists() or (folder / name).is_dir()


def test_ray_and_torch_stay_where_they_belong():
    for name, path in FILES.items():
        if name.parts[:2] != ("pipeline", "distributed"):
            assert "ray" not in tops(path), name
        if name.parts[0] == "retrieval_pools" and name.name != "lightgcn.py":
            assert "torch" not in tops(path), name


def test_pools_import_little_and_integrations_are_imported_by_their_engines_alone():
    """Larger packages are imported where they are needed: to fit routers and calibrations, or if installed."""
    needed = {
        "numpy",
        "numba",
        "llvmlite",
        "pyarrow",
        "pygtrie",
        "pydantic",
        "typing_extensions",
        "laserbatch",
        *PACKAGES,
        *sys.stdlib_module_names,
    }
    for name, path in FILES.items():
        integrations = {module for module in imported_modules(path) if "integrations" in module.split(".")}
        assert not integrations or "integrations" in name.parts or name.parts[1] == "engines", name
        if name.parts[0] == "retrieval_pools" and name.name != "lightgcn.py":
            assert tops_at_import(path) <= needed, name


def tops_at_import(path: Path) -> set[str]:
    """The top-level packages that are imported with a module, and not later in a function."""
    waiting, tops = [ast.parse(path.read_text(encoding="utf-8"))], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            tops |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            tops.add((node.module or "").split(".")[0])
        elif not isinstance(node, ast.FunctionDef):
            waiting += ast.iter_child_nodes(node)
    return tops


def test_the_engine_is_imported_without_ray_tables_or_knowledge():
    reached, waiting = set(), {"pipeline.decoding.engine"}
    while waiting:
        module = waiting.pop()
        path = ROOT / f"{module.replace('.', '/')}.py"
        if module not in reached and path.is_file():
            reached.add(module)
            assert "ray" not in tops(path), module
            waiting |= imported_modules(path)
    rooms = {module.split(".")[1] for module in reached if module.startswith("pipeline.")}
    assert rooms.isdisjoint({"distributed", "tables", "knowledge", "sample", "planning"}), sorted(rooms)


def test_files_and_modules_that_pages_and_docstrings_name_are_there():
    """Except for examples that the reader of a page writes, and for figures that an earlier commit measured."""
    examples = ("drafters/bigrams.py", "test_bigrams.py", "prompts/shelf.py")
    pages = [ROOT / name for name in ("pyproject.toml", "Makefile", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    pages += [ROOT / "benchmarks" / "README.md"]
    pages += [*(ROOT / "docs").rglob("*.md"), *FILES.values()]
    others = [path for name in ("benchmarks", "tests", "docs") for path in (ROOT / name).rglob("*.py")]
    known = [f"/{path.relative_to(ROOT)}" for path in (*FILES.values(), *others)]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"[\w/]+/\w+\.py\b", text):
            assert any(path.endswith(f"/{name.lstrip('/')}") for path in known) or name.endswith(examples), (page, name)
        for name in re.findall(r"\blaserbatch\.(\w+(?:\.\w+)+)|\b((?:pipeline|retrieval_pools)(?:\.\w+)+)", text):
            name = name[0] or name[1]
            parts = name.split(".")  # of a module, or of a name in it
            paths = [ROOT.joinpath(*parts[:num]) for num in range(2, len(parts) + 1)]
            assert any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths), (page, name)


def test_who_catches_whatever_comes_raises_it_again_or_says_why_not():
    for name, path in FILES.items():
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            is_broad = isinstance(node, ast.ExceptHandler) and (
                node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException")
            )
            if is_broad and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                comment = lines[node.lineno - 1] + lines[node.lineno]
                assert " # " in comment, f"{name}, line {node.lineno}: no reason beside it"


def test_no_two_files_of_tests_have_one_name():
    """pytest imports test files by name alone."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
