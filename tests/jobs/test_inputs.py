"""What a run starts from: checked before anything is written, recorded, and the same when it goes on."""

import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from laserbatch.jobs.settings import load_settings
from laserbatch.jobs.stages.inputs import check_inputs
from laserbatch.jobs.stages.night import open_night
from laserbatch.pipeline.errors import ConfigError, TableError
from laserbatch.pipeline.sample.world import write_sample_world

DATE = datetime.date(2025, 3, 1)


@pytest.fixture
def world(tmp_path):
    """Tables, and a configuration beside them."""
    write_sample_world(tmp_path / "tables", num_users=20, num_items=24)
    config = "workspace: workspace\ntables: {path: tables}\n"
    (tmp_path / "laserbatch.yaml").write_text(config)
    return tmp_path


def opened(world):
    return open_night(load_settings(world / "laserbatch.yaml"), DATE)


TEMPLATE = "name: mine\nversion: 1\nframework: kar\nside: item\nparser: free\ninstruction: Describe.\nattributes: "


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ("{columns: [title, categry]}", r"mine, attributes: the items table has no attribute 'categry'.*'category'\?$"),
        ("{exclude: [creatr]}", "'creatr'"),
        ("{labels: {eras: age}}", "'eras'"),
        ("{labels: {eras: age}, optional: [eras]}", None),
        ("{columns: [title, era]}", None),
    ],
)
def test_a_column_that_a_template_names_and_no_table_has_is_refused(world, attributes, said):
    (world / "mine.yaml").write_text(TEMPLATE + attributes)
    config = world / "mine.config.yaml"
    config.write_text((world / "laserbatch.yaml").read_text() + "knowledge: {item_template: mine, template_dir: .}\n")
    settings = load_settings(config)
    if said is None:
        assert check_inputs(settings.tables.path, settings) == []
        return
    with pytest.raises(ConfigError, match=said):
        check_inputs(settings.tables.path, settings)


def test_a_night_says_the_warnings_and_opens(world, capsys):
    items = pq.read_table(world / "tables" / "items.parquet")
    titles = pa.array(["", None, *items["title"].to_pylist()[2:]])
    items = items.set_column(items.column_names.index("title"), "title", titles)
    pq.write_table(items, world / "tables" / "items.parquet")
    with pytest.raises(TableError, match=r"items\.title .* the title is empty"):
        opened(world)  # more than a 20th
    with (world / "laserbatch.yaml").open("a") as config:
        config.write("gates: {max_failed_share: 0.1}\n")
    opened(world)
    assert "warning: items.title (items.parquet, 2 rows, first row 0): the title is empty" in capsys.readouterr().err
