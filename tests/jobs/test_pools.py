"""`laserbatch pools`: listing and choosing versions, listing groups."""

import datetime
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from laserbatch.jobs.commands.pools import app
from laserbatch.jobs.stages.night import current_pools, describe_pools
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.figures import PoolsUsed
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.store import PoolStore
from laserbatch.retrieval_pools.routing.router import Router
from laserbatch.retrieval_pools.settings import PoolSettings, RoutingSettings

VERSIONS = ("2025-03-01-aaaa", "2025-03-02-bbbb")
TEXTS = {"drama": ["a quiet film", "a quiet book"], "war": ["a loud film"]}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A workspace with two pool versions of items, and its configuration."""
    root = tmp_path_factory.mktemp("world")
    store = PoolStore(Workspace.open(root / "workspace").pools_folder)
    for version in VERSIONS:
        with store.publish(version) as folder:
            rows = [
                PoolText(np.frombuffer(text.encode(), np.uint8).astype(np.int32), group)
                for group, texts in TEXTS.items()
                for text in texts
            ]
            build_pool(rows, folder / "item", side="item", tokenizer_hash="t", model_id="m")
    (root / "config.yaml").write_text("workspace: workspace\n")
    return root


def called(world: Path, *arguments: str) -> str:
    """The standard output of a command that must succeed."""
    result = CliRunner().invoke(app, [*arguments, "--config", str(world / "config.yaml")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_list_names_versions_and_the_current_one(world):
    data = json.loads(called(world, "list", "--json"))
    assert [(row["version"], row["is_current"]) for row in data["versions"]] == [
        (VERSIONS[0], False),
        (VERSIONS[1], True),
    ]
    assert data["versions"][0]["pools"]["item"]["num_texts"] == 3
    assert {"drama", "war"} <= data["versions"][1]["pools"]["item"]["groups"].keys()
    assert f"*  {VERSIONS[1]}" in called(world, "list")


def test_list_gives_the_entities_that_an_ngram_needs(world):
    header, row = called(world, "list").splitlines()[1:3]
    assert header.index("min support") < row.index(" 1  side") < header.index("model")


def test_damaged_version_is_listed_with_what_to_do(world, tmp_path):
    shutil.copytree(world / "workspace", tmp_path / "workspace")
    (tmp_path / "workspace" / "pools" / VERSIONS[0] / "item" / "order.npy").unlink()
    arguments = ["list", "--workspace", str(tmp_path / "workspace")]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "damaged" in result.stdout and VERSIONS[1] in result.stdout
    assert "laserbatch pools rebuild" in result.stderr
    manifest = tmp_path / "workspace" / "pools" / VERSIONS[0] / "item" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format_version": 1}))
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "other format" in result.stdout and "damaged" not in result.stdout
    assert "is a pool of format 1; this version expects" in result.stderr and "pools rebuild`" in result.stderr


def test_a_version_without_pools_is_listed_and_a_damaged_choice_is_named(world, tmp_path):
    pools = shutil.copytree(world / "workspace", tmp_path / "workspace") / "pools"
    for version in VERSIONS:
        shutil.rmtree(pools / version)
        (pools / version / "router").mkdir(parents=True)
    (pools / "CURRENT").write_bytes(b"\xff\x00")
    result = CliRunner().invoke(app, ["list", "--workspace", str(tmp_path / "workspace")], catch_exceptions=False)
    assert result.exit_code == 0 and result.stdout.count("no pool") == len(VERSIONS)
    assert f"{pools / 'CURRENT'} names the pools" in result.stderr and "pools use VERSION" in result.stderr


def test_a_run_does_not_draft_from_pools_of_a_lower_min_support(tmp_path, capsys):
    store = PoolStore(tmp_path)
    date, routing = datetime.date(2025, 3, 1), RoutingSettings(scheme="global")
    items, interactions = pa.table({"item_id": ["a"]}), pa.table({"user_id": ["u"], "item_id": ["a"]})
    assert current_pools(store, 1, date) is None
    with store.publish("2025-02-28-aa") as folder:
        rows = [PoolText(np.array([1, 2], np.int32))]
        limited = PoolSettings(min_support=2)
        build_pool(rows, folder / "item", side="item", tokenizer_hash="t", model_id="m", settings=limited)
        Router.fit("item", items, interactions, routing).save(folder / "router" / "item")
    for min_support in (1, 2):
        assert describe_pools(current_pools(store, min_support, date)).item.num_texts == 1
    assert describe_pools(current_pools(store, 3, date)) == PoolsUsed()
    assert "lower pools.min_support than 3" in " ".join(capsys.readouterr().err.split())
    with store.publish("2025-03-01-bb") as folder:
        build_pool(rows, folder / "item", side="item", tokenizer_hash="other", model_id="m")
        Router.fit("item", items, interactions, routing).save(folder / "router" / "item")
    finished = {"2025-02-28-aa", "2025-03-01-bb"}
    for tokenizer, expected in (("other", "2025-03-01-bb"), ("t", "2025-02-28-aa"), ("third", None)):
        chosen = current_pools(store, 1, date, others=finished, tokenizer=tokenizer)
        assert (chosen and chosen.version) == expected
    assert "drafting from the pools 2025-02-28-aa, the newest that fit" in " ".join(capsys.readouterr().err.split())
    assert current_pools(store, 1, date, tokenizer="t") is None


def test_use_switches_the_current_version(world):
    called(world, "use", VERSIONS[0])
    assert json.loads(called(world, "list", "--json"))["versions"][0]["is_current"]
    called(world, "use", VERSIONS[1])


def test_workspace_without_pools_says_how_to_get_them(tmp_path):
    Workspace.open(tmp_path / "w")
    arguments = ["--workspace", str(tmp_path / "w")]
    assert CliRunner().invoke(app, ["list", *arguments], catch_exceptions=False).exit_code == 0
    with pytest.raises(WorkspaceError):
        CliRunner().invoke(app, ["list", "--workspace", str(tmp_path / "nowhere")], catch_exceptions=False)
