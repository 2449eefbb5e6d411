"""Published runs for readers elsewhere, on a folder and on an S3-compatible server (where one is installed)."""

import datetime
import json
import re
import shutil
import time
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pyarrow as pa
import pytest
from destinations import bucket, place, refusing_server  # noqa: F401 (fixtures)
from manifests import manifest_of
from pyarrow.fs import FileSystem

from laserbatch.jobs.commands.status import summary_rows, workspace_state
from laserbatch.jobs.console import ExitCode
from laserbatch.jobs.failures import exit_code_of
from laserbatch.jobs.settings import Settings, load_settings
from laserbatch.jobs.stages import run_night
from laserbatch.jobs.stages.inputs import require_delivery
from laserbatch.jobs.stages.publishing import deliver, forget_delivered, remove_delivered
from laserbatch.pipeline.errors import ConfigError, NotDelivered, NotReached, WorkspaceError
from laserbatch.pipeline.storage.delivery import PLACES, Destination, deliveries
from laserbatch.pipeline.storage.uris import ADVICE, failure, filesystem_of, naming_uri
from laserbatch.pipeline.storage.workspace import Workspace

OLD, NEW = "2025-03-01-aaaaaaaa", "2025-03-02-aaaaaaaa"
WANTED = {
    "knowledge/user/0.parquet", "knowledge/user/1.parquet", "features/user/00000.parquet", "quarantine/user.parquet",
    "manifest.json", "report.html", "_SUCCESS",
}  # fmt: skip


@pytest.fixture
def workspace(tmp_path):
    opened = Workspace.open(tmp_path / "here")
    for run_id in (OLD, NEW):
        folder = opened.run(run_id).root
        for name in (WANTED - {"_SUCCESS"}) | {"shards/user/0.json", "plan/user/0.parquet", "events.jsonl"}:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"{run_id} {name}")
        manifest_of(opened.run(run_id).manifest_path, datetime.date.fromisoformat(run_id[:10])).save()
        opened.run(run_id).finish()
    opened.publication.publish(OLD)
    return opened


def there(uri):
    """Every file at a place with its text."""
    import pyarrow.fs as pafs

    filesystem, root = filesystem_of(uri)
    infos = filesystem.get_file_info(pafs.FileSelector(root, recursive=True, allow_not_found=True))
    files = {info.path.removeprefix(f"{root}/"): info.path for info in infos if info.is_file}
    return {name: filesystem.open_input_stream(path).read().decode() for name, path in files.items()}


def seen(uri):
    """The run that readers at `uri` see, after a check that all its files are there."""
    files = there(uri)
    run_id = json.loads(files["published.json"])["run_id"]
    run = {name.removeprefix(f"runs/{run_id}/"): text for name, text in files.items() if f"/{run_id}/" in name}
    assert run.keys() == WANTED
    assert all(text == f"{run_id} {name}" for name, text in run.items() if name not in ("_SUCCESS", "manifest.json"))
    return run_id


def test_a_killed_delivery_shows_readers_the_run_before_and_goes_on(workspace, place, monkeypatch):  # noqa: F811
    deliver(workspace, place)
    assert seen(place) == OLD
    workspace.publication.publish(NEW)
    original_put, sent = Destination._put, []

    def killed(self, source, target):
        if len(sent) == 3:
            raise KeyboardInterrupt
        sent.append(target)
        original_put(self, source, target)

    monkeypatch.setattr(Destination, "_put", killed)
    with pytest.raises(KeyboardInterrupt):
        deliver(workspace, place)
    assert seen(place) == OLD
    monkeypatch.setattr(Destination, "_put", lambda self, *ends: sent.append(ends[1]) or original_put(self, *ends))
    deliver(workspace, place)
    assert seen(place) == NEW
    assert len(sent) == len(set(sent)) == len(WANTED)
    assert sent[-1].endswith("_SUCCESS")
    deliver(workspace, place)  # everything is there
    assert len(sent) == len(WANTED)


def test_a_file_that_somebody_deleted_or_changed_there_is_sent_again(workspace, place):  # noqa: F811
    deliver(workspace, place)
    filesystem, root = filesystem_of(place)
    file = f"{root}/runs/{OLD}/features/user/00000.parquet"
    filesystem.delete_file(file)
    deliver(workspace, place)
    assert seen(place) == OLD
    time.sleep(1.1)  # an S3 server tells only the second
    with filesystem.open_output_stream(file) as out:
        out.write(f"{OLD} features/user/00000.PARQUET".encode())
    deliver(workspace, place)
    assert seen(place) == OLD


def test_a_place_is_known_before_anything_is_sent_there(workspace, place, monkeypatch):  # noqa: F811
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Destination, "_put", killed)
    with pytest.raises(KeyboardInterrupt):
        deliver(workspace, f"{place}/")
    assert deliveries(workspace.root) == {place: {"run_id": None, "at": None}}


def test_a_damaged_file_of_places_is_refused_by_name(workspace, place):  # noqa: F811
    for record, wrong in (({"places": {}}, "places"), ({"s3://b/p": OLD}, "s3://b/p")):
        (workspace.root / PLACES).write_text(json.dumps(record))
        with pytest.raises(WorkspaceError, match=f"{PLACES}: '{wrong}' is not a URI with its last delivery; write "):
            deliver(workspace, place)
    (workspace.root / PLACES).write_text("{")
    with pytest.raises(WorkspaceError, match=f"{PLACES} is damaged.*write .*every place"):
        deliveries(workspace.root)


def test_readers_go_back_only_where_somebody_asks_or_a_run_was_taken_back(workspace, place, tmp_path):  # noqa: F811
    workspace.publication.publish(NEW)
    deliver(workspace, place)
    (workspace.root / "published.json").unlink()
    workspace.publication.publish(OLD)
    deliver(workspace, place)
    assert seen(place) == NEW
    now = datetime.datetime.now(datetime.UTC)
    (delivered,) = workspace_state(workspace, now)["delivered"]
    assert (delivered["to"], delivered["run_id"]) == (place, NEW)
    deliver(workspace, place, force=True)  # like `runs publish`, which writes no events
    assert seen(place) == deliveries(workspace.root)[place]["run_id"] == OLD
    assert f"{place}: {OLD}, sent at 20" in summary_rows(workspace_state(workspace, now))["delivered"]
    workspace.publication.publish(NEW)
    deliver(workspace, place)
    workspace.publication.roll_back()
    deliver(workspace, place)
    assert seen(place) == OLD


def test_who_is_forgotten_here_is_forgotten_there(workspace, place):  # noqa: F811
    for run_id in (OLD, NEW):
        workspace.publication.publish(run_id)
        deliver(workspace, place)
    Destination.at(place).copy(workspace.run(OLD))
    removed = workspace.run("2025-02-01-aaaaaaaa")
    workspace.run(OLD).root.rename(removed.root)
    Destination.at(place).copy(removed)
    removed.root.rename(workspace.run(OLD).root)  # only `uri` has `gone`: it was removed here by hand
    for run_id in (OLD, NEW):
        (workspace.run(run_id).root / "knowledge" / "user" / "0.parquet").write_text("without them")
    done = forget_delivered(workspace, place)
    assert done == {OLD: "sent again", NEW: "sent again", removed.run_id: "removed"}
    texts = [text for name, text in there(place).items() if name.endswith("knowledge/user/0.parquet")]
    assert texts == ["without them"] * 2
    assert not [name for name in there(place) if removed.run_id in name]


def test_what_cannot_be_delivered_says_that_it_is_published_here(workspace, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        NotDelivered, match=f"{OLD} is published here, but not delivered to .*runs publish {OLD} .*--config"
    ) as error:
        deliver(workspace, f"file://{tmp_path}/file/below")
    assert exit_code_of(error.value) == ExitCode.UNAVAILABLE  # so that a scheduler tries again


@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [(404, "NoSuchBucket", "Create the bucket"), (400, "ExpiredToken", "have expired"),
     (403, "InvalidAccessKeyId", "missing or wrong"), (403, "AccessDenied", "do not allow to list, read, write")],
)  # fmt: skip
def test_a_place_that_refuses_files_ends_a_night_before_its_texts_and_says_what_to_do(
    status, code, advice, workspace, monkeypatch
):
    with refusing_server(status, code) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "planted")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted")
        with pytest.raises(NotDelivered, match=f"no text was written.*s3://nights/p: .*{advice}"):
            run_night._require_place(workspace, "s3://nights/p")


def test_a_place_that_can_be_written_stays_as_it_is_and_a_service_that_is_away_is_only_a_warning(
    workspace, place, tmp_path, capsys, monkeypatch  # noqa: F811
):  # fmt: skip
    run_night._require_place(workspace, place)
    assert set(there(place)) == set() and not (tmp_path / "there").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotDelivered, match="below"):
        run_night._require_place(workspace, f"file://{tmp_path}/file/below")
    reply = OSError("AWS Error NETWORK_CONNECTION during HeadObject operation")
    for kind, usual, may_pass in ((NotDelivered, "Check the catalogue", True), (ConfigError, ADVICE, False)):
        away = mock.Mock(side_effect=failure(kind, place, reply, usual))
        monkeypatch.setattr(Destination, "require_writable", away)
        with nullcontext() if may_pass else pytest.raises(ConfigError, match="no text was written"):
            run_night._require_place(workspace, place)
    assert "WARNING: the night goes on" in capsys.readouterr().err


def test_publishing_without_the_destination_names_the_places_whose_readers_see_another_run(workspace, place, capsys):  # noqa: F811
    deliver(workspace, place)
    deliver(workspace, None, force=True)
    assert "WARNING" not in capsys.readouterr().err
    workspace.publication.publish(NEW)
    deliver(workspace, None, force=True)
    assert f"run {NEW} is not delivered to {place}, which has {OLD}, because" in capsys.readouterr().err
    deliver(workspace, f"{place}-of-another-configuration", force=True)
    assert f"run {NEW} is not delivered to {place}, which has {OLD}, because" in capsys.readouterr().err
    deliver(workspace, place, force=True)
    assert "WARNING" not in capsys.readouterr().err


def test_a_place_that_shares_files_with_the_workspace_is_refused(workspace, tmp_path):
    before = {path: path.read_bytes() for path in workspace.root.rglob("*") if path.is_file()}
    (tmp_path / "link").symlink_to(workspace.root)
    for folder in ("here", "here/runs", "link", "link/out"):
        for uri in (f"file://{tmp_path}/{folder}", f"delta:file://{tmp_path}/{folder}"):
            with pytest.raises(WorkspaceError, match="is inside the workspace"):
                deliver(workspace, uri)
            with pytest.raises(ConfigError, match="is inside the workspace"):
                require_delivery(Settings(workspace=workspace.root, deliver_to=uri))
    with pytest.raises(ConfigError, match="Unrecognized filesystem type"):
        require_delivery(Settings(workspace=workspace.root, deliver_to="ftp://host/folder"))
    require_delivery(Settings(workspace=workspace.root, deliver_to="s3://bucket/prefix"))
    assert {path: path.read_bytes() for path in workspace.root.rglob("*") if path.is_file()} == before


def test_a_place_of_another_workspace_stays_as_it_is(workspace, place, tmp_path):  # noqa: F811
    deliver(workspace, place)
    other = Workspace.open(tmp_path / "other")
    shutil.copytree(workspace.root / "runs", other.root / "runs")
    other.run(OLD).finish()  # an id depends only on the date and the settings
    before = there(place)
    for run_id in (NEW, OLD):
        other.publication.publish(run_id)
        for command in (partial(deliver, force=True), forget_delivered, partial(remove_delivered, run_ids=[OLD])):
            with pytest.raises(WorkspaceError, match=f"has run {OLD}, which is not of this workspace"):
                command(other, place)
        assert there(place) == before and deliveries(other.root) == {}
    shutil.rmtree(workspace.run(NEW).root)
    Destination.at(place).deliver(other.run(NEW))
    with pytest.raises(WorkspaceError, match=f"has run {NEW}, which is not of this workspace"):
        deliver(workspace, place, force=True)


def test_other_files_at_a_place_stay_there(workspace, tmp_path):
    kept = [tmp_path / "there" / "runs" / name for name in ("notes.txt", "mlflow/meta.yaml")]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    deliver(workspace, f"file://{tmp_path}/there")
    assert forget_delivered(workspace, f"file://{tmp_path}/there") == {OLD: "as it was"}
    assert all(path.exists() for path in kept)


def test_a_run_with_a_missing_file_is_not_delivered_and_stays_whole_there(workspace, place):  # noqa: F811
    run = workspace.run(OLD)
    run.shards("user").write("2", pa.table({"entity_id": ["u"]}))
    deliver(workspace, place)
    (run.root / "knowledge" / "user" / "2.parquet").unlink()
    for again in (deliver, forget_delivered):
        with pytest.raises(WorkspaceError, match=r"2\.parquet is missing; expected the texts of 1 users"):
            again(workspace, place)
    assert f"{OLD}/knowledge/user/2.parquet" in Destination.at(place)._files("runs")


@pytest.mark.parametrize(
    "uri", ["s3://AKIA:hidden@b/p", "s3://AKIA:hid/den@b", "s3://b/p?secret_key=hidden", "ftp://u:hidden@b"]
)
def test_a_uri_with_a_credential_is_refused_and_not_shown(uri, tmp_path):
    config = tmp_path / "c.yaml"
    for text in (f"deliver_to: '{uri}'", f"tables: {{path: '{uri}'}}"):
        config.write_text(text)
        with pytest.raises(ConfigError, match="standard chain") as error:
            load_settings(config)
        assert "hid" not in str(error.value) and "AKIA" not in str(error.value)


def test_what_is_no_uri_is_refused_with_those_that_are(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("deliver_to: /srv/lake")
    with pytest.raises(ConfigError, match=r"deliver_to: expected a URI: s3://.* delta:file:///folder \(found '/srv/l"):
        load_settings(config)


def test_where_runs_are_delivered_to_does_not_belong_to_them(tmp_path):
    assert Settings(deliver_to="s3://b/p").of_output() == Settings().of_output()


@pytest.mark.parametrize("uri", ["file:///lake/5% Käse & #1", "file:///lake/5%25%20K%C3%A4se%20&%20%231"])
def test_a_name_may_have_spaces_and_any_letters_encoded_or_not(uri):
    assert filesystem_of(uri)[1] == "/lake/5% Käse & #1"


def test_azure_without_credentials_is_a_service_that_is_not_reached():
    refused = pa.ArrowException(f"{'Unknown error: ' * 20}Failed to get token")
    azure = mock.Mock(**{"type_name": "abfs", "get_file_info.side_effect": refused})
    opening = mock.Mock(**{"from_uri.return_value": (azure, "container/prefix")})
    with (
        mock.patch("pyarrow.fs.FileSystem", opening),
        pytest.raises(NotReached, match=r"opened: Failed to get token\. The credentials are missing.* `az login`"),
    ):
        filesystem_of("abfss://container@account.dfs.core.windows.net/prefix?credential_kind=cli")
    with (
        pytest.raises(NotDelivered, match=r"abfs://container/x: Unknown error"),
        naming_uri("abfs://container/x", NotDelivered),
    ):
        raise pa.ArrowException("Unknown error")


def test_readers_on_azure_never_see_an_empty_pointer():
    azure = mock.MagicMock(type_name="abfs")
    Destination("abfss://box@account", azure, "box")._point_to({"run_id": OLD})
    azure.open_output_stream.assert_called_once_with("box/published.json.new")  # it empties what it opens
    azure.copy_file.assert_called_once_with("box/published.json.new", "box/published.json")


@pytest.mark.parametrize(
    ("message", "shown"),
    [("Upload failed. Azure Error: [ContainerNotFound] 404 x", r"x: Azure .* 404 x\. Create the bucket or container"),
     ("failed. Azure Error: [AuthorizationFailure] 403 x", r"\] 403 x\. The credentials are missing or wrong"),
     ("Unrecognized filesystem type in URI: az://box/x", "Azure's URIs are abfss://CONTAINER@ACCOUNT")],
)  # fmt: skip
def test_what_azure_refuses_says_what_to_do(message, shown):
    error = failure(NotDelivered, "x", OSError(message))
    assert re.search(shown, str(error)) and not getattr(error, "may_pass", True)


def test_a_service_of_google_that_cannot_be_reached_is_given_up_within_a_minute():
    opened = filesystem_of("gs://bucket/prefix")
    assert opened == FileSystem.from_uri("gs://bucket/prefix?retry_limit_seconds=60")
    assert opened != FileSystem.from_uri("gs://bucket/prefix")
