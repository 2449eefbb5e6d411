"""Trees for SGLang's n-gram worker: by themselves, and with SGLang's classes where it is installed.

The module of its worker imports GPU kernels; only these are replaced, in a separate process.
"""

import importlib.util
import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from test_query import ids

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.manifest import tokenizer_hash
from laserbatch.retrieval_pools.index.store import PoolStore
from laserbatch.retrieval_pools.integrations import sglang
from laserbatch.retrieval_pools.integrations.vllm import SETTINGS_VARIABLE
from laserbatch.retrieval_pools.routing.route_table import write_routes

has_sglang = importlib.util.find_spec("sglang") is not None


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model folder, a pool of its tokenizer in which 1, 2 has two continuations, and its settings and routes."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with PoolStore(tmp_path / "pools").publish("v1") as folder:
        rows = [PoolText(ids([1, 2, 3, 4, 5, 6]), "a")] * 4 + [PoolText(ids([1, 2, 7, 8, 9]), "b")] * 4
        names = {"tokenizer_hash": tokenizer_hash(tmp_path / "model"), "model_id": "m"}
        build_pool(rows, folder / "user", side="user", **names)
    write_routes(tmp_path / "routes.parquet", [(ids([50, 51]), "b", ids([30, 31, 32, 33]))])
    settings = {"pools": "pools", "side": "user", "routes": "routes.parquet", "min_acceptance": 0.01}
    (tmp_path / "drafts.json").write_text(json.dumps(settings))
    monkeypatch.setenv(SETTINGS_VARIABLE, str(tmp_path / "drafts.json"))
    return tmp_path / "model"


def batch(*texts, accepted=None):
    """A batch of SGLang's scheduler: prompt and output of each text, and the tokens accepted in the last step."""
    reqs = [
        SimpleNamespace(rid=f"r{k}", origin_input_ids_unpadded=prompt, output_ids=output)
        for k, (prompt, output) in enumerate(texts)
    ]
    spec_info = None
    if accepted is not None:
        padded = np.zeros((len(accepted), 6), np.int64)
        for row, tokens in enumerate(accepted):
            padded[row, : len(tokens)] = tokens
        spec_info = SimpleNamespace(
            accept_tokens=padded.ravel(), accept_lens=np.array([len(tokens) for tokens in accepted])
        )
    return SimpleNamespace(reqs=reqs, spec_info=spec_info, grammar_needs_sync=lambda: False)


def paths(tokens, is_above, size=6):
    """The tokens on the path from the root to each node, as a set for each tree."""
    paths_of_trees = []
    for row, mask in zip(tokens.reshape(-1, size), is_above.reshape(-1, size, size), strict=True):
        assert (np.triu(mask, 1) == 0).all() and mask[:, 0].all() and mask.diagonal().all()
        paths_of_trees.append({tuple(row[above].tolist()) for above in mask})
    return paths_of_trees


def test_a_tree_has_all_ways_on_and_is_filled_up_below_its_root(model):
    trees = sglang.PoolTrees(str(model), 6)
    (tree_paths,) = paths(*trees.draft(sglang.written_of(batch(([40], [1, 2])), 6, False)))
    assert {(2,), (2, 3), (2, 3, 4), (2, 7), (2, 7, 8)} <= tree_paths
    (tree_paths,) = paths(*trees.draft(sglang.written_of(batch(([40], [1, 2, 7, 8, 9])), 6, False)))
    assert (9, sglang.PADDING) in tree_paths, "of a text that ended nothing follows"
    assert trees.num_failed == 0


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_routes_give_the_previous_text_and_steps_follow_it(model, is_overlapped):
    trees = sglang.PoolTrees(str(model), 6)
    begun = batch(([50, 51], []), ([60], [1, 2]), accepted=[[30], []])
    own, other = paths(*trees.draft(sglang.written_of(begun, 6, is_overlapped)))
    assert ((30, 31, 32, 33) if is_overlapped else (51, 30, 31, 32)) in own
    assert (2, 3) in other
    later = batch(([50, 51], [30]), ([60], [1, 2]), accepted=[[31, 32], [7]])
    own, other = paths(*trees.draft(sglang.written_of(later, 6, is_overlapped)))
    assert ((32, 33) if is_overlapped else (30, 31)) in own
    assert ((7, 8) if is_overlapped else (2, 3)) in other
    trees.erase_match_state(["r0", "never seen"])
    trees.reset()
    assert len(trees._pool_of) == 0 and trees.num_failed == 0


def test_a_text_that_is_begun_again_and_a_draft_that_fails_stop_no_batch(model):
    trees = sglang.PoolTrees(str(model), 6)
    trees.draft(sglang.written_of(batch(([60], [1, 2, 3])), 6, False))
    (tree_paths,) = paths(*trees.draft(sglang.written_of(batch(([60], [1, 2])), 6, False)))
    assert (2, 3) in tree_paths
    trees._opened[0][0].draft = None  # provokes an error of our own
    tokens, is_above = trees.draft(sglang.written_of(batch(([60], [1, 2])), 6, False))
    assert trees.num_failed == 1 and tokens.tolist() == [2, 0, 0, 0, 0, 0]
    paths(tokens, is_above)


def test_what_is_wrong_is_said_before_a_model_loads(model, tmp_path, monkeypatch, caplog):
    arguments = SimpleNamespace(tokenizer_path=None, model_path=str(model))
    sglang.require_pools(arguments)
    assert not caplog.text
    settings = json.loads((tmp_path / "drafts.json").read_text())
    (tmp_path / "drafts.json").write_text(json.dumps(settings | {"step_cost": "cost.json"}))
    with pytest.raises(PoolError, match="not a step cost"):
        sglang.require_pools(arguments)
    assert "cost.json is not used: with SGLang all trees have one size" in caplog.text
    (tmp_path / "drafts.json").write_text(json.dumps(settings))
    (model / "tokenizer.json").write_text('{"another": 1}')
    with pytest.raises(PoolError, match="tokenizer"):
        sglang.require_pools(arguments)
    monkeypatch.setenv(SETTINGS_VARIABLE, str(tmp_path / "gone.json"))
    with pytest.raises(PoolError, match="does not say what to draft from"):
        sglang.require_pools(arguments)


def module(name, **contents):
    stub = ModuleType(name)
    vars(stub).update(contents)
    return stub


class Renamed:
    """Speculative algorithms of a version without n-grams."""


class Reserved:
    """Speculative algorithms of a version that registers a name once, and with other arguments."""

    NGRAM = "NGRAM"

    @classmethod
    def register(cls, name):
        raise ValueError(f"{name} is registered already")


@pytest.mark.parametrize("algorithms", [None, Renamed, Reserved])
def test_another_sglang_is_left_as_it_is_with_a_warning(monkeypatch, caplog, algorithms):
    of = "sglang.srt.speculative"
    names = ["sglang", "sglang.srt", of, f"{of}.spec_info", f"{of}.spec_registry"]
    contents = {
        f"{of}.spec_info": {"SpeculativeAlgorithm": algorithms},
        f"{of}.spec_registry": {"CustomSpecAlgo": object},
    }
    for name in names:
        monkeypatch.setitem(sys.modules, name, module(name, **contents.get(name, {})) if algorithms else None)
    sglang.register.cache_clear()
    for _ in range(2):
        sglang.register()
    sglang.register.cache_clear()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "LASERBATCH is not available: this SGLang cannot add algorithms as 0.5.23 can" in message


IN_SGLANG = """
import importlib.abc, importlib.machinery, json, sys
from unittest.mock import MagicMock
import numpy as np

class Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("sgl_kernel", "torchvision", "flashinfer"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__version__ = [], spec, "9.9.9"
        return module
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Kernels())
from sglang.srt.speculative import ngram_worker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from laserbatch.retrieval_pools.integrations import sglang
from test_sglang import batch

sglang.register()
algorithm = SpeculativeAlgorithm.from_string("LASERBATCH")
assert algorithm.is_ngram() and algorithm.is_speculative() and not algorithm.is_eagle()
assert not algorithm.has_draft_kv() and algorithm.supports_overlap
worker_class = algorithm.factory(None)
assert issubclass(worker_class, ngram_worker.NGRAMWorker)
worker = object.__new__(worker_class)  # its own memory is a GPU's
worker.draft_token_num, worker.enable_overlap = 6, False
worker.ngram_corpus = sglang.PoolTrees(sys.argv[1], 6)
asked = batch(([40], [1, 2]), ([40], [1, 2, 7, 8, 9]))
tokens, mask = worker._prepare_draft_tokens(asked)
worker._update_ngram_corpus(asked)
next_token, next_sibling = ngram_worker._derive_tree_links(mask, 2, 6)
print(json.dumps([tokens.tolist(), next_token.tolist(), next_sibling.tolist()]))
"""


@pytest.mark.skipif(not has_sglang, reason="SGLang is not installed here")
def test_sglangs_own_worker_takes_the_trees(model):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", IN_SGLANG, str(model)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    tokens, children, siblings = json.loads(ran.stdout.splitlines()[-1])
    tokens = np.array(tokens).reshape(2, 6)
    first = tokens[0, children[0][0]], tokens[0, siblings[0][children[0][0]]]
    assert set(map(int, first)) == {3, 7}, "both ways on stand below the root"
    assert tokens[1, 0] == 9 and children[1][0] == 1
