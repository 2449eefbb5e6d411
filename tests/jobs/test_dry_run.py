"""`nightly --dry-run`: the plan of a night by reason and its expected cost, without writing anything."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from night_world import run_here
from test_forget import WHO, contents, first_planted_world, folder, lived  # noqa: F401


def planned(capfd, folder, date, *options):  # noqa: F811
    config = str(folder / "laserbatch.yaml")
    done = run_here(capfd, "nightly", "--config", config, "--date", date, "--dry-run", "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_dry_run_tells_what_is_finished_and_what_would_go_on(lived, capfd):  # noqa: F811
    before = contents(lived / "workspace")
    assert planned(capfd, lived, "2025-03-02")["state"] == "finished already"
    assert planned(capfd, lived, "2025-03-02", "--force")["users"]["reasons"]["forced"] > 0
    gone_on = planned(capfd, lived, "2025-03-03")
    assert gone_on["state"] == "would go on" and gone_on["users"]["num_shards_done"] == 1
    assert gone_on["users"]["num_to_write"] == 0 and gone_on["predicted_hours"] == 0
    assert contents(lived / "workspace") == before


def test_a_dry_run_of_a_killed_night_names_no_pools_that_are_gone(folder, capfd):  # noqa: F811
    drafted_from = planned(capfd, folder, "2025-03-03")["drafted_from"]
    assert drafted_from is not None
    shutil.rmtree(folder / "workspace" / "pools" / drafted_from)
    assert planned(capfd, folder, "2025-03-03")["drafted_from"] is None


def test_a_dry_run_tells_who_would_be_written_and_why_and_writes_nothing(folder, capfd):  # noqa: F811
    settings = yaml.safe_load((folder / "laserbatch.yaml").read_text())
    (folder / "laserbatch.yaml").write_text(yaml.safe_dump(settings | {"cluster": {"price_per_hour": 3600}}))
    before = contents(folder / "workspace")
    world = first_planted_world()
    world.users["u9"] = {"mood": "calm", "created_at": "2025-03-04"}
    world.events.append(("u0", "i2", "2025-03-04", 5.0))
    world.items["i0"]["category"] = ["Stage"]
    world.write(folder / "tables")
    plan = planned(capfd, folder, "2025-03-04")
    assert plan["state"] == "would begin" and plan["built_on"].startswith("2025-03-02")
    assert plan["users"]["reasons"] == {"history": 2, "new": 1}  # the last text of the planted person had failed
    assert plan["items"]["reasons"] == {"attributes": 1}
    assert (plan["users"]["num_carried_over"], plan["users"]["num_to_write"], plan["users"]["num_entities"]) == (
        3,
        3,
        6,
    )
    assert plan["users"]["predicted_tokens"] == 3  # every planted text has one token by its record
    assert plan["predicted_cost"] == pytest.approx(3600 * plan["predicted_hours"]) and plan["predicted_hours"] > 0
    assert contents(folder / "workspace") == before
    (folder / "laserbatch.yaml").write_text(yaml.safe_dump(settings | {"knowledge": {"max_prompt_tokens": 16}}))
    empty = planned(capfd, folder, "2025-03-04", "--workspace", str(folder / "none"))
    assert empty["users"]["refused_prompts"] == {"too-long": 6} == {"too-long": empty["users"]["num_to_write"]}
    assert (
        empty["users"]["reasons"] == {"new": 6} and empty["predicted_hours"] is None and not (folder / "none").exists()
    )
    assert WHO not in json.dumps(plan)


def test_a_column_that_changed_for_most_is_named_and_the_order_of_columns_says_nothing(folder, capfd):  # noqa: F811
    path = folder / "tables" / "items.parquet"
    items = pq.read_table(path)
    changed = {
        "another order": (items.select(items.column_names[::-1]), None),
        "a new column": (items.append_column("price", pa.array([1.5, 2.0, 3.0])), {"price": "is new (3 of 3 items)"}),
        "a new name": (
            items.rename_columns(["genre" if name == "category" else name for name in items.column_names]),
            {"genre": "was called category (3 of 3 items)"},
        ),
        "a column less": (items.drop_columns(["category"]), {"category": "is gone (3 of 3 items)"}),
    }
    for table, expected in changed.values():
        pq.write_table(table, path)
        done = run_here(capfd, "nightly", "--config", str(folder / "laserbatch.yaml"), "--date", "2025-03-04",
                        "--dry-run", "--json")  # fmt: skip
        of_items = json.loads(done.stdout)["items"]
        assert (of_items["num_to_write"], of_items.get("changed_columns")) == (3 if expected else 0, expected)
        for name, what in (expected or {}).items():
            assert f"WARNING: items: {name} {what}" in done.stderr
            assert ("`exclude`" in done.stderr) != ("by mistake, restore it" in done.stderr) == ("is gone" in what)


def test_another_template_is_named_and_attributes_without_a_plan_are_not_known(folder, capfd):  # noqa: F811
    for path in (folder / "workspace" / "runs").glob("*/manifest.json"):
        manifest = json.loads(path.read_text())
        manifest["prompts"]["item"]["template"] = "brief_item@0"
        path.write_text(json.dumps(manifest))
    done = run_here(capfd, "nightly", "--config", str(folder / "laserbatch.yaml"), "--date", "2025-03-04", "--dry-run")
    assert "item prompts use the template brief_item@1; those of 2025-03-02" in done.stderr
    for plan in (folder / "workspace" / "runs").glob("*/plan/item"):
        shutil.rmtree(plan)
    items = pq.read_table(folder / "tables" / "items.parquet")
    pq.write_table(items.append_column("price", pa.array([1.5, 2.0, 3.0])), folder / "tables" / "items.parquet")
    done = run_here(capfd, "nightly", "--config", str(folder / "laserbatch.yaml"), "--date", "2025-03-04", "--dry-run")
    assert "items: how their attributes changed is unknown" in done.stderr and done.returncode == 0
