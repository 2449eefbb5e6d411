"""The records of one worker, without Ray."""

import datetime
import json
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from parrots import parrot
from test_actors import planned

from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL, load_tokenizer
from laserbatch.pipeline.decoding.sequence import GenerationResult
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.distributed import worker
from laserbatch.pipeline.distributed.worker import ShardWorker, longest_first, sound_text
from laserbatch.pipeline.engines import own
from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.planning.plan import read_shard
from laserbatch.pipeline.sample.world import write_sample_world
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.manifest import tokenizer_hash
from laserbatch.retrieval_pools.step_cost import StepCost, StepPoint


def test_a_worker_that_was_warmed_up_writes_the_same_texts(tmp_path):
    write_sample_world(tmp_path / "tables", num_users=4, num_items=20)
    written = []
    for name in ("cold", "warm"):
        shards, spec = planned(tmp_path / "tables", tmp_path / name)
        cold_or_warm = ShardWorker(spec)
        if name == "warm":
            cold_or_warm.warm_up()
        cold_or_warm.run(shards[0])
        written.append(
            read_parquet(RunFolder(tmp_path / name).knowledge_folder("item")).drop_columns(["run_id"]).to_pylist()
        )
    assert written[0] == written[1] and len(written[0]) > 0


def test_a_chat_template_that_prints_today_prints_the_date_of_the_run_whatever_the_clock_says(tmp_path):
    write_sample_world(tmp_path / "tables", num_users=4, num_items=20)
    shards, spec = planned(tmp_path / "tables", tmp_path / "run")
    worker = ShardWorker(replace(spec, date=datetime.date(2025, 3, 1)))
    tokenizer = worker.engine.tokenizer
    tokenizer.chat_template = (
        "Today is {{ strftime_now('%Y-%m-%d') }}.{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    row = next(iter(read_shard(spec.run_dir / shards[0].path)))
    assert tokenizer.decode(worker.rendered("item", row).token_ids).startswith("Today is 2025-03-01.")
    worker.reconfigure(replace(spec, date=datetime.date(2025, 3, 2)))
    assert tokenizer.decode(worker.rendered("item", row).token_ids).startswith("Today is 2025-03-02.")


def test_a_text_whose_thoughts_do_not_end_is_quarantined_as_such(tmp_path):
    write_sample_world(tmp_path / "tables", num_users=4, num_items=20)
    shards, spec = planned(tmp_path / "tables", tmp_path / "run")
    folder = parrot(tmp_path / "m", ["<think>", *(f" so{n}" for n in range(60))])
    worker = ShardWorker(replace(spec, model_dir=folder))
    record, run = worker.run(shards[0]), RunFolder(tmp_path / "run")
    run.merge_quarantine("item", [record], [], pa.string())
    rows = run.read_quarantine("item").to_pylist()
    assert [row["reason"] for row in rows] == ["unclosed-thoughts"] * record.num_quarantined and len(rows) > 0
    assert "did not end within 48 tokens" in rows[0]["detail"] and rows[0]["text"].startswith("<think> so0")
    assert record.info.stats.num_thinking == len(rows) and record.info.stats.num_thought_tokens == 48 * len(rows)


def test_a_record_keeps_thoughts_among_its_tokens_and_not_in_its_text(tmp_path):
    write_sample_world(tmp_path / "tables", num_users=4, num_items=20)
    shards, spec = planned(tmp_path / "tables", tmp_path / "run")
    factors = enumerate(spec.templates["item"].factors, 1)
    lines = "\n".join(f"{number}. {name}: quiet and slow" for number, name in factors)
    script = ["<think>", "An item.", " I list.", "</think>", lines]
    ShardWorker(replace(spec, model_dir=parrot(tmp_path / "m", script))).run(shards[0])
    record = read_parquet(RunFolder(tmp_path / "run").knowledge_folder("item")).to_pylist()[0]
    assert record["text"] == lines
    tokenizer = load_tokenizer(tmp_path / "m")
    assert tokenizer.convert_ids_to_tokens(record["token_ids"]) == script
    assert record["num_tokens"] == len(record["token_sources"]) == len(script)


def test_an_answer_after_thoughts_has_the_form_of_its_template(tmp_path):
    write_sample_world(tmp_path / "tables", num_users=4, num_items=20)
    shards, spec = planned(tmp_path / "tables", tmp_path / "run")
    script = ["<think>", "An item.", "</think>", "Quiet", " and slow."]
    template = spec.templates["item"].model_copy(update={"parser": "free", "regex": "Genre: [a-z]{30,40}"})
    decoding = spec.decoding.model_copy(update={"thinking": "cut", "max_new_tokens": 96})
    spec = replace(spec, model_dir=parrot(tmp_path / "m", script), decoding=decoding, templates={"item": template})
    ShardWorker(spec).run(shards[0])
    records = read_parquet(RunFolder(tmp_path / "run").knowledge_folder("item")).to_pylist()
    assert records and all(re.fullmatch("Genre: [a-z]{30,40}", record["text"]) for record in records)
    tokenizer = load_tokenizer(tmp_path / "m")
    assert tokenizer.convert_ids_to_tokens(records[0]["token_ids"])[:3] == script[:3]


def test_texts_that_were_long_are_begun_first_and_unknown_ones_among_those_of_mean_length():
    lengths = {"a": 3, "b": None, "c": 9, "d": 5, "e": None, "f": 3}
    rows = {
        key: SimpleNamespace(previous_ids=None if length is None else np.zeros(length, np.int32))
        for key, length in lengths.items()
    }
    assert [key for key, _ in longest_first(rows)] == ["c", "b", "d", "e", "a", "f"]
    assert [key for key, _ in longest_first({key: rows[key] for key in "eb"})] == ["e", "b"]


@pytest.mark.parametrize("finish_reason", ["end_of_text", "length"])
def test_a_quoted_replacement_character_is_kept_and_a_broken_one_is_not(finish_reason):
    tokenizer = load_tokenizer(SAMPLE_MODEL)
    cut = tokenizer.encode("字", add_special_tokens=False)[:1]
    quoted, plain = (tokenizer.encode(text, add_special_tokens=False) for text in ("of \ufffd and", "of it and"))

    def text_of(token_ids: list[int], prompt_ids: list[int]) -> str:
        text = tokenizer.decode(token_ids)
        assert "\ufffd" in text
        return sound_text(tokenizer, SimpleNamespace(finish_reason=finish_reason, text=text), np.array(prompt_ids))

    assert text_of(quoted, quoted) == "of \ufffd and"
    with pytest.raises(RowError, match="undecodable"):
        text_of(plain + cut + plain, plain)
    if finish_reason == "length":
        assert text_of(plain + cut, plain) == "of it and"
    else:
        with pytest.raises(RowError, match="undecodable"):
            text_of(plain + cut, plain)
    with pytest.raises(RowError, match="undecodable: the output has a zero byte"):
        sound_text(tokenizer, SimpleNamespace(finish_reason=finish_reason, text="of\0it"), np.array(plain))


def recorded(forward, seen: list, feeds, trees):
    seen.append([len(feed.chain_ids) for feed in feeds] + trees.sizes.tolist())
    return forward(feeds, trees)


def test_a_shards_forwards_are_the_same_whatever_its_worker_wrote_before(tmp_path):
    """So rounding is the same, and with it every near-tie."""
    write_sample_world(tmp_path / "tables", num_users=4, num_items=20)
    sizes = []
    for name, numbers in (("alone", [2]), ("last", [0, 1, 2])):
        shards, spec = planned(tmp_path / "tables", tmp_path / name)
        worker = ShardWorker(spec)
        forward = worker.engine.engine.runner.forward
        for number in numbers:
            seen: list[list[int]] = []
            worker.engine.engine.runner.forward = partial(recorded, forward, seen)
            worker.run(shards[number])
        sizes.append(seen)
    assert sizes[0] == sizes[1] and len(sizes[0]) > 1


@pytest.mark.parametrize("usual, most", [(3, 1.0), (10, 1.0), (3, 0.1)])
def test_a_relaxed_text_that_ran_on_is_written_again_as_a_greedy_one(tmp_path, monkeypatch, usual, most):
    monkeypatch.setattr(worker, "MAX_SHARE_RUN_ON", most)
    write_sample_world(tmp_path / "tables", num_users=4, num_items=20)
    records = {}
    for name in ("relaxed", "greedy"):
        shards, spec = planned(tmp_path / "tables", tmp_path / name)
        texts = [PoolText(np.full(length, 7, np.int32)) for length in (1, usual)]
        pool = build_pool(
            texts, tmp_path / name / "pool", side="item", tokenizer_hash=tokenizer_hash(spec.model_dir), model_id="m"
        )
        decoding = spec.decoding.model_copy(
            update={"max_new_tokens": 10, "verifier": name, "top_k": 9999, "min_probability": 0.0}
        )
        spec = replace(spec, decoding=decoding, pool_dirs={"item": pool.folder}, pool_version="v")
        info = ShardWorker(spec).run(shards[0]).info
        records[name] = info.stats, read_parquet(RunFolder(tmp_path / name).knowledge_folder("item")).to_pylist()
    (stats, rows), (greedy_stats, greedy_rows) = records["relaxed"], records["greedy"]
    assert stats.num_texts == len(rows) == 4 and greedy_stats.num_rewritten == 0
    assert {row["finish_reason"] for row in rows} == {"length"}, "no text was cut, so nothing was tested"
    ran_on = usual < 10 and most == 1.0  # if all texts are cut, the limit is too short
    assert stats.num_rewritten == (4 if ran_on else 0)
    assert {json.loads(row["decoding_json"])["verifier"] for row in rows} == {"greedy" if ran_on else "relaxed"}
    assert ([row["text"] for row in rows] == [row["text"] for row in greedy_rows]) == ran_on


def test_a_sampled_text_that_ran_on_stays_as_the_model_s_own_texts_do(monkeypatch):
    sampling = {"verifier": "leviathan", "temperature": 1, "drafters": ["trained"]}
    decoding = DecodingSettings(**sampling, drafter_options={"trained": {"models": ["unused"]}})
    text = GenerationResult("0", np.zeros(9, np.int32), np.zeros(9, np.uint8), "", "length")
    stand_in = SimpleNamespace(
        spec=SimpleNamespace(decoding=decoding), _usual_tokens={"item": 3}, _generate=lambda *_: iter([text])
    )
    assert list(ShardWorker._outcomes(stand_in, "item", {}, None)) == [(text, "leviathan")]  # pyright: ignore


def test_a_shards_counts_of_graphs_are_its_own(tmp_path):
    write_sample_world(tmp_path / "tables", num_users=4, num_items=20)
    shards, spec = planned(tmp_path / "tables", tmp_path / "run")
    worker = ShardWorker(spec)
    assert worker.run(shards[0]).info.stats.graph_counts == {}, "there are none on a CPU"
    buffered = SimpleNamespace(num_captures=3, num_failed_captures=1, num_replays=0, num_eager_steps=5)
    runner, forward = worker.engine.engine.runner, worker.engine.engine.runner.forward

    def counted(*step):
        buffered.num_replays += 1
        runner.buffered = None
        output = forward(*step)
        runner.buffered = buffered
        return output

    runner.forward, runner.buffered = counted, buffered
    first, second = (worker.run(shards[1]).info.stats.graph_counts for _ in range(2))
    assert first == second == {"replays": first["replays"]} and first["replays"] > 1


def test_a_step_cost_is_measured_for_the_nights_batch_and_kept_by_one_worker(tmp_path, monkeypatch):
    write_sample_world(tmp_path / "tables", num_users=4, num_items=20)
    _, spec = planned(tmp_path / "tables", tmp_path / "run")
    steps = tuple(StepPoint(batch_size=4, num_tokens=number, seconds=1.0) for number in (4, 8))
    calls = []
    monkeypatch.setattr(own, "measure_step_cost", lambda *arguments: calls.append(arguments) or StepCost(steps=steps))
    worker = ShardWorker(spec)
    assert worker.engine.measured_step_cost(save=False).steps == steps and not spec.step_cost_dir.exists()
    assert worker.engine.cached_step_cost() is None
    assert worker.engine.measured_step_cost() == worker.engine.cached_step_cost()
    sizes = [arguments[-2:] for arguments in calls]
    assert sizes == [([1, spec.decoding.batch_size], None)] * 2, "the full batch comes last"
