"""Nights whose texts a server writes: its errors, its absence and its prices."""

import json
import re
import shutil
import time
from pathlib import Path

import pytest
from night_world import FIRST_DATE, SECOND_DATE, make_world, run_here, write_config, write_here
from small_server import KEY, MODEL, Fault, prompt_of, small_server, text_for

from laserbatch.jobs.commands.doctor import examine
from laserbatch.jobs.console import ExitCode
from laserbatch.jobs.events import read_events
from laserbatch.jobs.settings import load_settings
from laserbatch.pipeline.engines import endpoint_batches, endpoint_client
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.storage.run_folder import RunFolder

PRICES = {"input": 1.0, "output": 100.0, "cached": 0.5}
BRIEF = {"user_template": "brief_user", "item_template": "brief_item"}
OF_AN_ANSWER = (60 * PRICES["input"] + 40 * PRICES["cached"] + 10 * PRICES["output"]) / 1e6  # by the server's usage
OF_A_SHARD = 3 * 256 * PRICES["output"] / 1e6  # at most, without the 0.001 for its prompts


def configured(folder: Path, server, **options) -> str:
    """The path of a configuration whose texts the server writes."""
    endpoint = {"url": server.url, "model": MODEL, "api_key_env": "OUR_KEY", "give_up_after_s": 1.0}
    endpoint |= {"price_per_million_tokens": PRICES} | options
    decoding = {"engine": "endpoint", "endpoint": endpoint}
    night = {"shard_size": 3, "num_audited": 0}
    sections = {"night": night, "gates": {"max_failed_share": 0.5}, "metrics": {"textfile": str(folder / "night.prom")}}
    return str(write_config(folder, decoding=decoding, knowledge=BRIEF, **sections))


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patched, small_server() as started:
        patched.setattr(endpoint_client, "FIRST_DELAY_S", 0.01)
        patched.setenv("OUR_KEY", KEY)
        write_here(patched)
        started.key, started.fingerprint = KEY, "fp_1"
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("endpoint"), 8, 6)


def num_rows(run: RunFolder) -> int:
    """Rows of finished shards, quarantined ones included."""
    records = [record for side in SIDES for record in run.shards(side).finished().values()]
    return sum(record.num_rows + record.num_quarantined for record in records)


def test_a_night_goes_on_after_its_server_was_gone_and_after_its_money_had_run_out(folder, server, capfd):
    textfile = folder / "night.prom"
    nightly = ("-v", "nightly", "--config", configured(folder, server), "--date", FIRST_DATE, "--json")

    def storm_and_leave(body, number):
        if number < 3:
            return Fault(429, {"error": {"message": f"slow down, {KEY}"}}, {"retry-after": "0"})
        if number >= 7:  # a row of the second shard, whose first row is answered
            while server.answered.total() < 4:
                time.sleep(0.01)
            server.is_gone = True
        return None

    server.fault = storm_and_leave
    without_server = run_here(capfd, *nightly)
    assert without_server.returncode == ExitCode.UNAVAILABLE == 6, without_server.stderr
    assert "has answered nothing for" in without_server.stderr and "the same command continues" in without_server.stderr
    run, num_first = RunFolder(next((folder / "workspace" / "runs").iterdir())), server.answered.total()
    manifest, num_kept = run.load_manifest(), num_rows(run)
    label = f'{{workspace="{folder / "workspace"}"}}'
    assert f"\nlaserbatch_cost{label} {manifest.generation.endpoint.cost:.17g}\n" in textfile.read_text()
    assert manifest.status == "failed" and manifest.generation.endpoint.num_requests == num_first > num_kept == 3

    refused = next(iter({prompt_of(body) for body in server.bodies} - set(server.answered)))
    server.is_gone, server.fingerprint = False, "fp_2"
    server.fault = lambda body, number: Fault(400, {"error": {"message": "no"}}) if prompt_of(body) == refused else None
    most = num_first * OF_AN_ANSWER + OF_A_SHARD + OF_AN_ANSWER  # room for one shard more, and not for another one
    configured(folder, server, max_cost=most)
    stopped = run_here(capfd, *nightly)
    assert stopped.returncode == ExitCode.RUN_FAILED, stopped.stderr
    assert f"more than decoding.endpoint.max_cost {most:g} leaves" in json.loads(stopped.stdout)["error"]
    assert num_kept < num_rows(run) and run.load_manifest().generation.endpoint.cost < most

    configured(folder, server, max_cost=9.0)
    done = run_here(capfd, *nightly)
    assert done.returncode == 0, done.stderr
    printed, manifest = json.loads(done.stdout), run.load_manifest()
    assert printed["run_id"] == run.run_id == printed["published"]
    assert "WARNING: the server changed during the night" in done.stderr

    rows = [row for side in SIDES for batch in run.iter_knowledge(side, ["text"]) for row in batch.to_pylist()]
    assert {row["text"] for row in rows} == {text_for({"prompt": json.loads(prompt)}) for prompt in server.answered}
    done_shards = [event for event in read_events(run.events_path) if event["event"] == "shard_done"]
    figures = textfile.read_text()
    assert [event["reasons"] for event in done_shards if event["reasons"]] == [{"refused": 1}]
    assert f"\nlaserbatch_cost{label} {printed['cost']:.17g}\n" in figures
    assert re.search(r'^laserbatch_quarantined{.*side="\w+",reason="refused"} 1$', figures, re.MULTILINE)
    (bad,) = [row for side in SIDES for row in run.read_quarantine(side).to_pylist()]
    assert (bad["reason"], bad["detail"]) == ("refused", "HTTP 400: no")
    num_entities = sum(side.num_entities for side in manifest.generation.sides.values())
    assert len(rows) == len(server.answered) == num_entities - 1
    assert server.answered.total() == len(rows) + num_first - num_kept  # repeated: requests that were cut off

    endpoint = manifest.generation.endpoint
    assert endpoint.num_requests == server.answered.total() and endpoint.num_retries >= 3
    assert endpoint.cost == printed["cost"] == pytest.approx(server.answered.total() * OF_AN_ANSWER)
    assert set(endpoint.answered_by) == {f"{MODEL} (owned_by a test), fingerprint fp_{number}" for number in (1, 2)}
    report = run.report_path.read_text(encoding="utf-8")
    assert "The server changed during the night" in report and server.url in report
    assert not any(words in report for words in ("<h3>Cost</h3>", "Marked by the source", "characters drafted"))

    assert not any(KEY in night.stdout + night.stderr for night in (without_server, stopped, done))
    assert not [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def test_a_dry_run_predicts_money_from_the_night_before(folder, server, capfd):
    config = configured(folder, server, max_cost=1e-6)
    dry_run = run_here(capfd, "nightly", "--config", config, "--date", SECOND_DATE, "--json", "--dry-run", "--force")
    plan = json.loads(dry_run.stdout)
    of_answers = {side: plan[side]["predicted_tokens"] * PRICES["output"] / 1e6 for side in ("users", "items")}
    for side, cost in of_answers.items():
        assert cost < plan[side]["predicted_cost"] < 3 * cost  # prompts cost something, too
    assert plan["predicted_cost"] == pytest.approx(sum(plan[side]["predicted_cost"] for side in of_answers))
    assert "more than decoding.endpoint.max_cost 1e-06" in dry_run.stderr


def test_doctor_asks_the_server_and_try_shows_a_text_of_it(folder, server, capfd):
    server.fault = lambda body, number: None
    config = configured(folder, server, api="chat")
    checks = ("model.check_dtype", "model.check_model", "trial.check_answer")
    results = examine(load_settings(Path(config)), checks)
    assert {result.level for result in results} == {"ok"}
    assert results[-1].found.startswith("a short question was answered 'This")
    assert f"{server.url} answers, and serves {MODEL} (owned_by a test)" in [result.found for result in results]
    server.change = lambda answer: (
        answer | {"choices": [{"text": "", "message": {"content": ""}, "finish_reason": "stop"}]}
    )
    (empty,) = examine(load_settings(Path(config)), checks[-1:])[1:]
    assert (empty.level, empty.found) == ("warning", "a short question was answered with an empty text")
    server.change = lambda answer: answer
    away = examine(load_settings(Path(configured(folder, server, model="b"))), checks)
    assert [result.found for result in away if result.level == "fault"] == [
        f"{server.url} has no model 'b'; set decoding.endpoint.model to one that it has: {MODEL}"
    ]
    server.fault = lambda body, number: Fault(429, {}, {"retry-after": "40"})
    waiting = configured(folder, server, give_up_after_s=600.0)
    gone = examine(load_settings(Path(waiting)), checks)[-1]
    assert gone.level == "fault" and "asks to wait 40 seconds" in gone.found
    assert gone.hint == "This check waits for 30 seconds, a night for 600", "of what is configured, not of the check"
    server.fault = lambda body, number: None
    tried = run_here(capfd, "try", "--config", configured(folder, server, api="chat"), "--json")
    assert json.loads(tried.stdout)["text"] == text_for(server.bodies[-1]) and "messages" in server.bodies[-1]


def test_a_night_by_batches_is_the_night_by_requests(folder, server, capfd, tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint_batches, "FIRST_POLL_S", 0.01)
    server.fault, server.is_gone = lambda body, number: None, False
    make_world(tmp_path, 8, 6)
    texts = []
    for mode in ("batch", "requests"):
        config = configured(tmp_path, server, mode=mode)
        num_batches = len(server.batches)
        assert run_here(capfd, "nightly", "--config", config, "--date", FIRST_DATE).returncode == 0
        (run,) = (tmp_path / "workspace" / "runs").iterdir()
        columns = ["entity_id", "text"]
        batches = (batch for side in SIDES for batch in RunFolder(run).iter_knowledge(side, columns))
        texts.append([row for batch in batches for row in batch.to_pylist()])
        shutil.rmtree(tmp_path / "workspace")
        assert (len(server.batches) > num_batches) == (mode == "batch")
    assert texts[0] == texts[1] and len(texts[0]) > 6
