"""The library's interface: its page, its requirements, many threads, and refused input."""

import re
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from drafts import draft
from test_query import ids, pool_of

import laserbatch.retrieval_pools.library as library
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.store import PoolStore
from laserbatch.retrieval_pools.library import DraftBudget, OpenPool, PoolError, open_pool

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "pools-library.md"
NEEDED = {"numpy", "numba", "llvmlite", "pyarrow", "pygtrie", "pydantic"}  # llvmlite is a part of numba
OF_PYDANTIC = {"pydantic_core", "typing_extensions", "typing_inspection", "annotated_types"}
BARE = f"""
import re, sys

class Bare:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names or top.startswith("_") or top in {NEEDED | OF_PYDANTIC | {"laserbatch"}}:
            if not re.match(r"laserbatch\\.(?!retrieval_pools)", name):
                return None
        raise ModuleNotFoundError("not in a bare environment: " + name, name=name)

for name in [name for name in sys.modules if name.split(".")[0] == "torch"]:
    del sys.modules[name]
sys.meta_path.insert(0, Bare())
"""


def run_bare(code: str, folder: Path) -> str:
    """The output of a Python that can import only the standard library, the pools and their requirements."""
    ran = subprocess.run([sys.executable, "-c", BARE + code], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_page_can_be_run_as_it_stands_with_nothing_else_installed(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    run_bare("\n".join(blocks), tmp_path)


def test_the_page_has_every_name():
    page = PAGE.read_text(encoding="utf-8")
    methods = {f"OpenPool.{name}" for name in vars(OpenPool) if not name.startswith("_")}
    headings = " ".join(re.findall(r"^## (.*)$", page, re.MULTILINE))
    missing = {name for name in methods | set(library.__all__) if not re.search(rf"\b{name}\b", headings)}
    assert missing <= {"OpenPool"}


def test_every_module_is_imported_in_a_bare_environment(tmp_path):
    names = [
        ".".join(("laserbatch", *path.relative_to(ROOT).with_suffix("").parts))
        for path in sorted((ROOT / "retrieval_pools").rglob("*.py"))
        if path.name not in ("__init__.py", "lightgcn.py")
    ]
    run_bare(f"import importlib\nfor name in {names}: importlib.import_module(name)", tmp_path)


def test_the_pools_are_installed_alone_with_what_they_import_and_no_more(tmp_path):
    folder = shutil.copytree(ROOT / "laserbatch-pools", tmp_path / "laserbatch-pools", symlinks=True)
    pools = tmp_path / "retrieval_pools"
    shutil.copytree(ROOT / "retrieval_pools", pools, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "docs/pools-library.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    build = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", tmp_path]
    subprocess.run(build, cwd=folder, check=True, capture_output=True)
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as wheel:
        files = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (metadata,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("/METADATA"))
    there = (path for path in pools.rglob("*") if path.is_file())
    assert files == {f"laserbatch/{path.relative_to(tmp_path)}" for path in there}
    assert {*re.findall(r"^Requires-Dist: (\w+)[^;\n]*$", metadata, re.MULTILINE)} == NEEDED - {"llvmlite"}


def test_texts_of_an_engine_are_drafted_as_their_contexts_are(tmp_path):
    rng = np.random.default_rng(0)
    pool = pool_of(tmp_path / "p", [rng.integers(0, 9, 30).tolist() for _ in range(60)], groups=["a", "b"] * 30)
    pools = OpenPool(pool)
    prompt, output = [1, 2, 3], []
    pools.start("x", prompt, [3, 4, 5], "a")
    for _ in range(40):
        (tree,) = pools.draft(["x"], DraftBudget(12, 0.01, "tree"))
        expected = draft(pool, ids(prompt + output), 3, ids([3, 4, 5]), "a", max_nodes=12, min_acceptance=0.01)
        assert tree._rows.tolist() == expected._rows.tolist()
        step = rng.integers(0, 9, rng.integers(1, 5)).tolist()
        pools.accept("x", step)
        output += step
    assert pools.finish("x").tolist() == output


def test_many_threads_write_side_by_side(tmp_path):
    rng = np.random.default_rng(0)
    pool = pool_of(tmp_path / "p", [rng.integers(0, 9, 40).tolist() for _ in range(100)])

    def write(pools, name):
        pools.start(name, [name % 7, 1])
        for _ in range(50):
            (chain,) = pools.draft([name], DraftBudget(5))
            pools.accept(name, [*chain.token_ids[:2], name % 9])
        return pools.finish(name).tolist()

    alone = {name: write(OpenPool(pool), name) for name in range(16)}
    shared, drafts = OpenPool(pool), {}
    threads = [threading.Thread(target=lambda name=name: drafts.update({name: write(shared, name)})) for name in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drafts == alone and len(shared) == 0


@pytest.mark.parametrize("mark", [-2, np.iinfo(np.int32).min])
def test_an_id_below_0_is_never_drafted(mark):
    pools = OpenPool(None)
    pools.start("a", [7, 8, mark, 9], previous_ids=[8, mark, 9])
    pools.accept("a", [7, 8])
    for form in ("chain", "tree"):
        assert mark not in pools.draft(["a"], DraftBudget(16, 0.0, form))[0].token_ids
    pools.accept("a", [mark, 9])
    assert len(pools.draft(["a"])) == 1


def test_a_damaged_file_is_named_before_anything_is_drafted(tmp_path):
    with PoolStore(tmp_path).publish("v1") as folder:
        build_pool(
            [PoolText(np.arange(9, dtype=np.int32))], folder / "user", side="user", tokenizer_hash="t", model_id="m"
        )
    assert open_pool(tmp_path, "user").version == "v1"
    for name in ("tokens.npy", "order.npy", "starts.npy", "group_codes.npy", "manifest.json"):
        path = tmp_path / "v1" / "user" / name
        content = path.read_bytes()
        for damaged in (content[:-1] + bytes([content[-1] ^ 1]), content[: len(content) // 2], b""):
            path.write_bytes(damaged)
            with pytest.raises(PoolError, match=f"{path} is damaged"):
                open_pool(tmp_path, "user")
        path.write_bytes(content)
    shutil.rmtree(tmp_path / "v1" / "user")
    with pytest.raises(PoolError, match=r"v1/user/manifest.json is missing"):
        open_pool(tmp_path, "user")


def test_what_cannot_be_is_refused(tmp_path):
    pools = OpenPool(None)
    pools.start("a", [1, 2])
    with pytest.raises(ValueError, match="'a' was started already"):
        pools.start("a", [1])
    with pytest.raises(ValueError, match="one row of integers"):
        pools.start("b", [0.5])
    with pytest.raises(ValueError, match="one row of integers"):
        pools.accept("a", [[1]])
    for start in (lambda: pools.start("b", [1, 2**32 + 1]), lambda: pools.accept("a", np.array([1, 2**32 + 1]))):
        with pytest.raises(ValueError, match=r"token id number 1 \(from 0\) of 2 is 4294967297; expected an int32"):
            start()
    with pytest.raises(ValueError, match="the group is 5; expected the string"):
        pools.start("b", [1], group=5)
    for call in (lambda: pools.draft(["b"]), lambda: pools.accept("b", [1]), lambda: pools.finish("b")):
        with pytest.raises(KeyError):
            call()
    with pytest.raises(PoolError, match="has no router"):
        pools.route({"user_id": "u"})
    with pytest.raises(PoolError, match="no pools in"):
        open_pool(tmp_path, "user")
    for wrong in ({"max_tokens": 65}, {"max_tokens": 3.0}, {"min_acceptance": 1.5}, {"form": "bush"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DraftBudget(**wrong)
