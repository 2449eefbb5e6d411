"""`laserbatch pools`: versions and groups are listed, a query is a tree that a person can read."""

import datetime
import io
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from laserbatch.jobs.commands.pools import app
from laserbatch.jobs.commands.pools_view import draft_nodes, draft_tree, visible
from laserbatch.jobs.stages.night import current_pools, describe_pools
from laserbatch.pipeline.decoding.model.folder import tokenizer_hash
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.manifest import PoolsUsed
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.retrieval_pools.draft import draft
from laserbatch.retrieval_pools.drafting.estimate import NUM_PLACES, NUM_TOKEN_KINDS
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.calibration_record import Calibration, Reliability, SourceCurve
from laserbatch.retrieval_pools.index.store import PoolStore
from laserbatch.retrieval_pools.routing.router import Router
from laserbatch.retrieval_pools.settings import PoolSettings, RoutingSettings
from laserbatch.retrieval_pools.sources import NUM_SOURCES

VERSIONS = ("2025-03-01-aaaa", "2025-03-02-bbbb")
TEXTS = {"drama": ["a quiet film", "a quiet book"], "war": ["a loud film"]}


def byte_tokenizer() -> Tokenizer:
    """One token a byte."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: k for k, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with a model's tokenizer, a workspace with two pool versions of items, and their configuration."""
    root = tmp_path_factory.mktemp("world")
    model = root / "model"
    model.mkdir()
    tokenizer = byte_tokenizer()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "model.safetensors").touch()
    store = PoolStore(Workspace.open(root / "workspace").pools_folder)
    for version in VERSIONS:
        with store.publish(version) as folder:
            rows = [
                PoolText(np.array(tokenizer.encode(text).ids, np.int32), group)
                for group, texts in TEXTS.items()
                for text in texts
            ]
            build_pool(rows, folder / "item", side="item", tokenizer_hash=tokenizer_hash(model), model_id="m")
    (root / "config.yaml").write_text("decoding:\n  model: model\nworkspace: workspace\n")
    return root


def called(world: Path, *arguments: str) -> str:
    """Standard output of a command that must end well."""
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
    assert f"*  {VERSIONS[1]}" in called(world, "list")


def test_damaged_version_is_listed_with_what_to_do(world, tmp_path):
    shutil.copytree(world / "workspace", tmp_path / "workspace")
    (tmp_path / "workspace" / "pools" / VERSIONS[0] / "item" / "order.npy").unlink()
    arguments = ["list", "--workspace", str(tmp_path / "workspace")]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "damaged" in result.stdout and VERSIONS[1] in result.stdout
    assert "laserbatch pools rebuild" in result.stderr


def test_show_gives_groups_and_verifies(world):
    text = called(world, "show", VERSIONS[0], "--verify")
    assert "drama" in text and "war" in text
    assert json.loads(called(world, "show", "--json"))["version"] == VERSIONS[1]


def test_show_gives_the_entities_that_an_ngram_needs(world):
    header, row = called(world, "show").splitlines()[:2]
    assert header.index("min support") < row.index(" 1  side") < header.index("model")


def test_a_run_does_not_draft_from_pools_of_a_lower_min_support(tmp_path, capsys):
    store = PoolStore(tmp_path)
    date, routing = datetime.date(2025, 3, 1), RoutingSettings(scheme="global")
    items, interactions = pa.table({"item_id": ["a"]}), pa.table({"user_id": ["u"], "item_id": ["a"]})
    assert current_pools(store, 1, date, routing) is None
    with store.publish("2025-02-28-aa") as folder:
        rows = [PoolText(np.array([1, 2], np.int32))]
        limited = PoolSettings(min_support=2)
        build_pool(rows, folder / "item", side="item", tokenizer_hash="t", model_id="m", settings=limited)
        Router.fit("item", items, interactions, routing).save(folder / "router" / "item")
    for min_support in (1, 2):
        assert describe_pools(current_pools(store, min_support, date, routing)).item.num_texts == 1
    assert describe_pools(current_pools(store, 3, date, routing)) == PoolsUsed()
    assert "lower pools.min_support than 3" in " ".join(capsys.readouterr().err.split())


def test_query_drafts_the_text_that_follows(world):
    data = json.loads(called(world, "query", "a qui", "--json", "--max-nodes", "4"))
    assert [node["piece"] for node in data["nodes"]][:3] == ["e", "t", " "]
    assert data["nodes"][0]["source"] == "pool"
    assert data["nodes"][0]["parent"] == -1
    assert data["expected_num_accepted"] == pytest.approx(sum(node["acceptance"] for node in data["nodes"]))
    assert json.loads(called(world, "query", "", "--json"))["nodes"][0]["piece"] == "a"


def test_query_shows_calibrated_estimates_and_what_they_rest_on(world, tmp_path):
    assert "not calibrated" in called(world, "query", "a qui")
    counts = json.loads(called(world, "query", "a qui", "--json", "--max-nodes", "1"))
    assert counts["num_calibration_texts"] == 0
    shutil.copytree(world, tmp_path / "calibrated")
    manifest = tmp_path / "calibrated" / "workspace" / "pools" / VERSIONS[1] / "item" / "manifest.json"
    data = json.loads(manifest.read_text())
    data["calibration"] = halving_calibration().model_dump(mode="json")
    manifest.write_text(json.dumps(data))
    found = json.loads(called(tmp_path / "calibrated", "query", "a qui", "--json", "--max-nodes", "1"))
    assert found["num_calibration_texts"] == 70
    believed = counts["nodes"][0]["acceptance"]
    assert found["nodes"][0]["acceptance"] == pytest.approx(believed / (2 - believed), rel=0.02)
    assert "3 item texts of pools 2025-03-02-bbbb, calibrated on 70 texts" in called(
        tmp_path / "calibrated", "query", "a qui"
    )


def halving_calibration() -> Calibration:
    """Replays that found the odds of every source half of what they seemed."""
    sources = [
        SourceCurve(
            source=source,
            offset=-math.log(2),
            low=1,
            high=1,
            of_tokens=(0,) * NUM_TOKEN_KINDS,
            of_places=(0,) * NUM_PLACES,
        )
        for source in range(NUM_SOURCES)
    ]
    held = Reliability(num_texts=35, num_nodes=0, max_nodes=16, min_acceptance=0.07,
                       expected_calibration_error=0.0)  # fmt: skip
    return Calibration(
        pool_escape=1.0,
        num_texts=70,
        num_tokens=700,
        sources=sources,
        reliability=held,
    )


def test_query_prefers_the_group(world):
    first = {
        group: json.loads(called(world, "query", "a ", "--group", group, "--json"))["nodes"][0]["piece"]
        for group in TEXTS
    }
    assert first == {"drama": "q", "war": "l"}


def test_query_is_drawn_as_a_tree_with_visible_spaces(world):
    text = called(world, "query", "a quiet", "--max-nodes", "6")
    assert "…a·quiet" in text
    assert "├──" in text and "└──" in text
    assert "expected to be accepted" in text
    assert "nothing" in called(world, "query", "zzz")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("query", "a", "--group", "sport"), "no group 'sport'; it has 2: 'drama', 'war'"),
        (("query", "a", "--side", "user"), "have none of the user side"),
        (("query", "a", "--version", "v9"), "there are no pools 'v9'"),
        (("use", "v9"), "there are no pools 'v9'"),
        (("show", "v9"), "there are no pools 'v9'"),
    ],
)
def test_what_is_not_there_is_named(world, arguments, message):
    with pytest.raises(PoolError, match=message):
        called(world, *arguments)


def test_use_switches_the_current_version(world):
    called(world, "use", VERSIONS[0])
    assert json.loads(called(world, "query", "a", "--json"))["version"] == VERSIONS[0]
    called(world, "use", VERSIONS[1])


def test_other_tokenizer_is_refused(world, tmp_path):
    other = tmp_path / "model"
    other.mkdir()
    for path in (world / "model").iterdir():
        (other / path.name).write_bytes(path.read_bytes() + b" " * (path.name == "tokenizer.json"))
    config = tmp_path / "config.yaml"
    config.write_text(f"decoding:\n  model: model\nworkspace: {world / 'workspace'}\n")
    with pytest.raises(PoolError, match="laserbatch pools rebuild"):
        CliRunner().invoke(app, ["query", "a", "--config", str(config)], catch_exceptions=False)


def test_workspace_without_pools_says_how_to_get_them(tmp_path):
    Workspace.open(tmp_path / "w")
    arguments = ["--workspace", str(tmp_path / "w")]
    assert CliRunner().invoke(app, ["list", *arguments], catch_exceptions=False).exit_code == 0
    for command in (["show"], ["query", "a"]):
        with pytest.raises(PoolError, match="no pools in"):
            CliRunner().invoke(app, [*command, *arguments], catch_exceptions=False)
    with pytest.raises(WorkspaceError):
        CliRunner().invoke(app, ["list", "--workspace", str(tmp_path / "nowhere")], catch_exceptions=False)


def test_wrong_side_is_wrong_usage(world):
    result = CliRunner().invoke(app, ["query", "a", "--side", "book", "--config", str(world / "config.yaml")])
    assert result.exit_code == 2


def test_every_command_shows_an_example():
    for command in ("rebuild", "list", "show", "query", "use", "gc"):
        assert "laserbatch pools" in CliRunner().invoke(app, [command, "--help"]).output


def test_text_of_a_pool_cannot_control_the_terminal(tmp_path):
    class Escapes:
        def decode(self, token_ids, **_):
            return "".join("\x1b[31m[red]x" for _ in token_ids)

        def convert_ids_to_tokens(self, token_id):
            return str(token_id)

    rows = [PoolText(np.array([1, 2], np.int32))]
    pool = build_pool(rows, tmp_path / "p", side="item", tokenizer_hash="t", model_id="m")
    context = np.array([1], np.int32)
    nodes = draft_nodes(Escapes(), context, draft(pool, context, 0))
    console = Console(file=io.StringIO(), width=100)
    console.print(draft_tree(nodes, "\x1b[2J[b]a[/b]\n", "v"))
    drawn = console.file.getvalue()
    assert "\x1b" not in drawn
    assert "[b]a[/b]⏎" in drawn
    assert visible("a b\t\x07") == "a·b⇥\\x07"
