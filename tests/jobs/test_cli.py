"""The command line as a user meets it: help, examples, and one clear line for each kind of bad input."""

import datetime
import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from night_world import make_world, run_here, write_config, write_here
from rich.console import Console

from laserbatch.jobs import console, failures
from laserbatch.jobs.cli import COMMANDS as LAZY_COMMANDS
from laserbatch.jobs.cli import exit_code_of
from laserbatch.jobs.commands import nightly as night_commands
from laserbatch.jobs.commands import pools
from laserbatch.jobs.console import ExitCode, progress
from laserbatch.jobs.settings import Settings, load_settings
from laserbatch.pipeline.errors import ClusterFailed, ConfigError, EndpointGone, RunFailed, TableError, WorkspaceBusy
from laserbatch.pipeline.sides import SIDES
from laserbatch.retrieval_pools.errors import PoolError


def commands(group, path=()):
    for name, command in group.items():
        if hasattr(command, "commands"):
            yield from commands(command.commands, (*path, name))
        else:
            yield " ".join((*path, name)), command


TOP_LEVEL = {name: lazy.load(name) for name, lazy in LAZY_COMMANDS.items()}
COMMANDS = dict(commands(TOP_LEVEL))


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_the_line_of_a_command_is_the_first_of_its_help(name):
    assert " ".join(TOP_LEVEL[name].help.split("\n\n")[0].split()) == LAZY_COMMANDS[name].short_help


def test_help_and_completion_do_not_wait_for_torch():
    heavy = "torch", "transformers", "ray", "pyarrow", "sklearn", "numba"
    code = f"import sys, laserbatch.jobs.cli; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("drafter train small --out", "file"),
        ("recommender train --out", "file"),
        ("ctr predict model pairs.parquet --out", "folder"),
        ("features asof log.parquet", "folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_any_work(command, kind, tmp_path, capfd, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    for code, place, message in (
        (2, tmp_path / kind, f"is a {'file' if kind == 'file' else 'directory'}."),
        (3, tmp_path / "file" / "x" / "y", f"y cannot be written: {tmp_path / 'file'} is a file, not a folder. Give"),
        (3, tmp_path / "new" / "x", f"x cannot be written: {tmp_path} may not be written"),
    ):
        done = run_here(capfd, *command.split(), str(place))
        assert done.returncode == code and message in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_documented_options(name):
    command = COMMANDS[name]
    assert re.search(rf"Example: `?laserbatch {name}", command.help), f"{name} shows no example"
    assert command.rich_markup_mode == "markdown", f"the help of {name} shows backticks and breaks lines as the source"
    for parameter in command.params:
        assert isinstance(parameter, click.Argument) or getattr(parameter, "help", None), f"{name}: {parameter.name}"


NO_WORKSPACE = "config", "data", "init", "demo", "model"


@pytest.mark.parametrize("name", [name for name in COMMANDS if name.split()[0] not in NO_WORKSPACE])
def test_every_command_takes_a_configuration_and_a_workspace(name):
    assert {"--config", "--workspace"} <= {option for parameter in COMMANDS[name].params for option in parameter.opts}


def test_errors_have_their_documented_exit_codes():
    assert exit_code_of(TableError("x")) is ExitCode.BAD_INPUT
    assert exit_code_of(PoolError("x")) is ExitCode.BAD_INPUT
    assert exit_code_of(WorkspaceBusy("x")) is ExitCode.BUSY
    assert exit_code_of(RunFailed("x")) is ExitCode.RUN_FAILED
    assert exit_code_of(ClusterFailed("x")) is exit_code_of(EndpointGone("x")) is ExitCode.UNAVAILABLE
    assert exit_code_of(PermissionError(errno.EACCES, "x", "file")) is ExitCode.BAD_INPUT
    assert exit_code_of(ConnectionError("x")) is exit_code_of(ZeroDivisionError("x")) is ExitCode.UNEXPECTED


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def run(capfd):
    return lambda *arguments: run_here(capfd, *arguments)


@pytest.fixture
def nightly(run):
    return lambda config, date="2025-02-28": run("nightly", "--config", str(config), "--date", date)


@pytest.fixture
def failing(run, monkeypatch):
    """A function that runs a command in which the given error is raised."""

    def raised(error: BaseException):
        def open_workspace(*_):
            raise error

        monkeypatch.setattr(pools, "open_workspace", open_workspace)
        return run("pools", "list", "--json")

    return raised


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (TableError("users, row 3"), 3, "users, row 3"),
        (
            OSError(errno.ENOSPC, "full", "/a/b"),
            3,
            "/a/b: No space left on device. Make room, then give the same command again",
        ),
        (
            OSError(errno.EMFILE, "many"),
            3,
            "a file: Too many open files. Raise the limit of open files (`ulimit -n 4096`)",
        ),
        (
            OSError(errno.EROFS, "no", "/a/b"),
            3,
            "/a/b: Read-only file system. Check the path, and that it may be written",
        ),
        (NotADirectoryError(errno.ENOTDIR, "no", "/a/b"), 3, "/a/b: Not a directory. Check the path"),
        (ZeroDivisionError("of what\nand why"), 1, "unexpected ZeroDivisionError: of what (test_cli.py, line "),
        (KeyboardInterrupt(), 130, "interrupted; the same command continues a run or a training"),
    ],
)
def test_a_failure_is_one_line_and_with_json_one_object(failing, error, code, line):
    done = failing(error)
    assert done.returncode == code
    assert line in done.stderr and len(done.stderr.splitlines()) == 1
    printed = json.loads(done.stdout)
    assert printed == {"error": done.stderr.removeprefix("laserbatch: ").strip(), "exit_code": code} | {
        "kind": type(error).__name__
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_tells_its_failure_in_one_object(name, run, tmp_path):
    (tmp_path / "file").touch()
    nowhere, arguments = str(tmp_path / "file" / "below"), ["--json"]
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "argument":
            arguments += [{"kind": "small"}.get(parameter.name, nowhere)] if parameter.required else []
        elif parameter.name in ("config", "folder", "workspace"):
            arguments += [parameter.opts[0], nowhere]
        elif parameter.required:
            arguments += [parameter.opts[0], "2025-03-01"]
    done = run(*name.split(), *arguments)
    printed = json.loads(done.stdout)
    assert (done.returncode, printed["exit_code"]) == (3, 3), done.stderr
    assert done.stderr.strip().endswith(printed["error"]) and printed["kind"]


@pytest.mark.parametrize("option", ["--num-users", "--num-items"])
def test_a_demo_of_nobody_or_too_few_items_is_wrong_usage_and_writes_nothing(run, option, tmp_path):
    done = run("demo", "--folder", str(tmp_path / "demo"), option, "0")
    assert done.returncode == 2 and option in done.stderr and not (tmp_path / "demo").exists()


def test_wrong_usage_is_an_object_with_json_too(run):
    done = run("pools", "list", "--colour", "--json")
    assert (done.returncode, json.loads(done.stdout)["exit_code"]) == (2, 2)
    assert "--colour" in json.loads(done.stdout)["error"]


def test_tracebacks_are_shown_when_asked_for(run, tmp_path):
    workspace = str(tmp_path / "none")
    assert "Traceback" not in run("pools", "list", "-w", workspace).stderr
    assert "Traceback" in run("-v", "pools", "list", "-w", workspace).stderr


def test_what_only_an_engineer_reads_is_told_when_asked_for():
    code = """
import logging, sys
from laserbatch.jobs.cli import main
from laserbatch.jobs.console import logger
for words in ([], ["-v"]):
    sys.argv = ["laserbatch", *words, "status", "--nothing"]
    try:
        main()
    except SystemExit:
        logger.getChild("ctr.compare").info("an AUC")
        logger.getChild("ctr.compare").warning("a fault")
"""
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.splitlines()
    said = [line.split(": ")[1] for line in lines if ".ctr.compare" in line]
    assert said == ["a fault", "an AUC", "a fault"], "without -v, and with it"


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-c", "from laserbatch.jobs.cli import main; main()", "--version"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_version_is_told(run):
    assert re.fullmatch(r"laserbatch \d+\.\d+\.\S+\n", run("--version").stdout)


def test_a_configuration_that_is_a_folder_is_refused(run, tmp_path):
    done = run("pools", "list", "--config", str(tmp_path))
    assert (done.returncode, len(done.stderr.splitlines())) == (3, 1)
    assert "cannot be read (Is a directory)" in done.stderr


@pytest.mark.parametrize("command", ["nightly --date", "nightly --dry-run --date", "recommend --date", "backfill"])
def test_a_date_after_tomorrow_is_refused_without_force(tmp_path, run, command):
    config = write_config(tmp_path, tables={"path": "nowhere"})

    def done_for(num_days: int, *options: str):
        date = str(datetime.date.today() + datetime.timedelta(days=num_days))
        dates = ["--from", "2025-03-01", "--to", date] if command == "backfill" else [date]
        done = run(*command.split(), *dates, "--config", str(config), *options)
        assert done.returncode == 3
        return date, done.stderr

    date, output = done_for(2)
    assert f"the date {date} is after tomorrow (today is {datetime.date.today()} by this machine's clock)" in output
    assert "--force" in output and not (tmp_path / "workspace").exists()
    for _, output in (done_for(1), done_for(2, "--force")):  # accepted, so the command ends at the next fault
        assert "after tomorrow" not in output and "laserbatch: " in output


def test_a_workspace_below_a_file_is_refused(world, nightly):
    (world / "file").write_text("")
    done = nightly(write_config(world, "below.yaml", workspace="file/workspace"))
    assert done.returncode == 3
    assert (
        done.stderr
        == f"laserbatch: {world}/file/workspace: Not a directory. Check the path, and that it may be written\n"
    )


def test_demo_replaces_no_tables_but_its_own(tmp_path, run):
    before = {path: path.read_bytes() for path in (make_world(tmp_path) / "tables").iterdir()}
    done = run("demo", "--folder", str(tmp_path))
    assert done.returncode == 3 and "does not hold this demo's tables" in done.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "tables").iterdir()} == before


def test_demo_leaves_its_configuration_and_replaces_no_other(tmp_path, run, monkeypatch):
    settings_of_nights = []

    def run_night(settings, date):
        settings_of_nights.append(settings)
        raise ConfigError("a night was asked for")

    monkeypatch.setattr(night_commands, "run_night", run_night)
    arguments = "demo", "--folder", str(tmp_path), "--num-users", "5", "--num-items", "20"
    for _ in range(2):
        assert "a night was asked for" in run(*arguments).stderr
    written = load_settings(tmp_path / "laserbatch.yaml")
    assert written.tables.path == tmp_path / "tables" and written.workspace == tmp_path / "workspace"
    assert all(written.decoding == settings.decoding for settings in settings_of_nights)
    (tmp_path / "laserbatch.yaml").write_text("seed: 1\n")
    done = run(*arguments)
    assert done.returncode == 3 and "is not this demo's configuration" in done.stderr
    assert (tmp_path / "laserbatch.yaml").read_text() == "seed: 1\n"


def test_init_replaces_nothing_unasked_and_sends_to_the_check_where_there_are_faults(tmp_path, run):
    tables, out = make_world(tmp_path) / "tables", tmp_path / "night.yaml"
    printed = json.loads(run("init", str(tables), "--out", str(out), "--json").stdout)
    assert printed["num_faults"] == 0 and printed["next"][0].startswith("laserbatch doctor")
    assert load_settings(out).tables.path == tables and load_settings(out).decoding == Settings().decoding
    again = run("init", str(tables), "--out", str(out))
    assert again.returncode == 3 and "--overwrite" in again.stderr
    users = pq.read_table(tables / "users.parquet")
    pq.write_table(pa.concat_tables([users, users.slice(0, 1)]), tables / "users.parquet")
    printed = json.loads(run("init", str(tables), "--out", str(out), "--overwrite", "--json").stdout)
    assert printed["num_faults"] > 0 and printed["next"][0] == f"laserbatch data check {tables} --config {out}"


def test_init_guesses_a_mapping_that_imports(tmp_path, run):
    source = tmp_path / "exports"
    source.mkdir()
    (source / "members.csv").write_text("member_id,city\n1,Oslo\n2,Rome\n")
    (source / "products.csv").write_text("sku,product_name,category\na,Lamp,Home > Light\nb,Chair,Home > Seat\n")
    orders = ("member_id,sku,ordered_at,stars", "1,a,2024-05-01T10:00:00Z,5", "2,b,2024-05-02T11:00:00Z,3")
    (source / "orders.csv").write_text("\n".join(orders) + "\n")
    done = run("init", str(source), "--out", str(tmp_path / "night.yaml"))
    assert done.returncode == 0, done.stderr
    mapping = yaml.safe_load((tmp_path / "mapping.yaml").read_text())
    assert mapping["items"]["attributes"]["category"] == {"column": "category", "separator": " > "}
    assert load_settings(tmp_path / "night.yaml").knowledge.paths == ("category",)
    imported = run("data", "import", str(source), str(tmp_path / "tables"), "--mapping", str(tmp_path / "mapping.yaml"))
    assert imported.returncode == 0, imported.stderr
    items = pq.read_table(tmp_path / "tables" / "items.parquet")
    assert items["category"].to_pylist() == [["Home", "Light"], ["Home", "Seat"]]


def test_try_shows_one_entity_and_writes_nothing(world, run, monkeypatch):
    write_here(monkeypatch)
    config = write_config(world)
    done = run("try", "--config", str(config), "--item", "i0000000", "--json")
    assert done.returncode == 0, done.stderr
    tried = json.loads(done.stdout)
    assert "".join(span["text"] for span in tried["spans"]) == tried["text"]
    assert tried["stats"]["num_tokens"] > 0 and tried["fields"]
    assert not (world / "workspace").exists()


def test_try_of_vllm_is_by_our_engine_and_says_so(world, run, monkeypatch):
    write_here(monkeypatch)
    config = write_config(world, "vllm.yaml", decoding={"engine": "vllm"})
    done = run("try", "--config", str(config), "--item", "i0000000", "--json")
    assert done.returncode == 0 and "laserbatch's engine writes this text" in done.stderr, done.stderr
    assert json.loads(done.stdout)["text"]


def test_try_names_an_unknown_entity(world, run):
    done = run("try", "--config", str(write_config(world)), "--user", "nobody")
    assert done.returncode == 3
    assert "no user_id 'nobody'" in done.stderr


def test_try_says_of_an_entity_that_it_was_created_after_the_date(world, run):
    users = pq.read_table(world / "tables" / "users.parquet")
    newest = users.sort_by([("created_at", "descending")])["user_id"][0].as_py()
    done = run("try", "--config", str(write_config(world)), "--user", newest, "--date", "2000-01-01")
    assert done.returncode == 3
    assert f"user {newest} is not known yet at the end of that day: its created_at is 20" in done.stderr


def test_sigterm_ends_as_such_though_ray_has_made_another_interrupt_of_it(monkeypatch):
    assert exit_code_of(KeyboardInterrupt()) == ExitCode.INTERRUPTED
    monkeypatch.setattr(failures, "_is_terminated", False)
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.update({number: handler}))
    handlers = {}
    failures.end_at_sigterm()
    with pytest.raises(failures.Terminated):
        handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert exit_code_of(KeyboardInterrupt()) == ExitCode.TERMINATED


def test_the_configuration_of_the_current_folder_counts_unless_another_is_named(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name in ("laserbatch", "other"):
        (tmp_path / f"{name}.yaml").write_text(f"workspace: of_{name}")
    for options, named in ((), "of_laserbatch"), (("--config", "other.yaml"), "of_other"):
        assert f"{tmp_path / named} " in run_here(capfd, "runs", "list", *options).stderr


def test_demo_with_a_model_asks_it_for_short_texts_and_compares_nothing(tmp_path, monkeypatch):
    settings_of_nights = []

    def run_night(settings, date):
        settings_of_nights.append((settings, date))
        if len(settings_of_nights) == 2:
            raise ConfigError("two nights were asked for")

    monkeypatch.setattr(night_commands, "run_night", run_night)
    with pytest.raises(ConfigError, match="two nights"):
        night_commands.demo(tmp_path / "demo", num_users=5, num_items=20, model_dir=tmp_path / "model", as_json=True)
    (first, before), (second, after) = settings_of_nights
    assert (after - before).days == 1
    for settings in (first, second):
        assert settings.model_dir == tmp_path / "model"
        assert [settings.template(side).identity for side in SIDES] == ["brief_user@1", "brief_item@1"]
        assert not settings.night.compare_with_plain and not settings.night.train_ctr


def test_the_last_line_of_a_count_is_printed_once(capfd, monkeypatch):
    monkeypatch.setattr(console, "PLAIN_LINE_EVERY_S", 0.0)
    with progress("encode", 2) as bar:
        bar.advance()
        bar.advance()
    with progress("plan", 2) as bar:
        bar.advance()
    counts = [line.split("  ")[0] for line in capfd.readouterr().err.splitlines()]
    assert counts == ["encode: 0/2", "encode: 1/2", "encode: 2/2", "plan: 0/2", "plan: 1/2"]


def test_the_time_left_does_not_count_what_came_before_the_first_step(capfd, monkeypatch):
    monkeypatch.setattr(console, "PLAIN_LINE_EVERY_S", 0.0)
    with progress("generate", 3) as bar:
        task = bar._terminal.tasks[0]
        task.start_time -= 3600.0  # an hour was spent on loading and measuring
        bar.begin(2.0)
        bar.advance()
    assert re.search(r"generate: 1/3  2 s  0\.50?/s, (4\.\d+|4) s left", capfd.readouterr().err)


def test_a_part_of_a_summary_without_entries_says_so(capsys, monkeypatch):
    monkeypatch.setattr(console, "stdout", Console(width=80))
    console.summary({"removed": {}, "pools": {"num_texts": 2}, "predicted_hours": 5e-6}, as_json=False)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["removed", "–"],
        ["pools"],
        ["texts", "2"],
        ["predicted", "hours", "0.02", "s"],
    ]
