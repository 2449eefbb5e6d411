"""Nights with an SGLang server that drafts from external corpora; a small server imitates SGLang's."""

import os
import re
import signal
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from night_world import FIRST_DATE, SECOND_DATE, command_here, make_world, run_here, write_here
from small_server import KEY, MODEL, Fault, small_server
from test_endpoint_night import OF_A_SHARD, OF_AN_ANSWER, configured

from laserbatch.jobs.console import ExitCode
from laserbatch.jobs.stages.external_corpus import chosen_texts
from laserbatch.pipeline.engines import endpoint_client
from laserbatch.pipeline.engines.external_corpora import MAX_TOKENS
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.storage.figures import ExternalCorpusFigures
from laserbatch.pipeline.storage.run_folder import RunFolder

INFO = {
    "speculative_algorithm": "NGRAM",
    "speculative_ngram_external_sam_budget": 3,
    "speculative_ngram_external_corpus_max_tokens": 10_000_000,
}
ADD, REMOVE = "/add_external_corpus", "/remove_external_corpus"


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patched, small_server() as started:
        patched.setattr(endpoint_client, "FIRST_DELAY_S", 0.01)
        patched.setenv("OUR_KEY", KEY)
        write_here(patched)
        started.key = KEY
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory, server):
    """A world after its first night, which had no texts to upload."""
    folder = make_world(tmp_path_factory.mktemp("corpus"), 8, 6)
    server.card, server.info = {"id": MODEL, "owned_by": "sglang"}, dict(INFO)
    assert command_here("nightly", "--config", configured(folder, server), "--date", FIRST_DATE) == 0
    assert not server.root_requests
    return folder


@pytest.fixture
def night(folder, server, capfd):
    """A function that rewrites all texts of the second date; returns the command's result, its run and its manifest."""
    server.info, server.fault, server.root_fault = dict(INFO), lambda body, number: None, lambda path: None
    server.corpora.clear()

    def done(*arguments, min_support=1, **options):
        server.root_requests.clear()
        config = configured(folder, server, **options)
        Path(config).write_text(Path(config).read_text() + f"pools: {{min_support: {min_support}}}\n")
        left = run_here(capfd, "nightly", "--config", config, "--date", SECOND_DATE, *(arguments or ("--force",)))
        manifests = (folder / "workspace" / "runs").glob("*/manifest.json")
        run = RunFolder(max(manifests, key=lambda path: path.stat().st_mtime_ns).parent)
        return left, run, run.load_manifest()

    yield done
    server.is_gone = False


def texts_of(run):
    return [row["text"] for side in SIDES for batch in run.iter_knowledge(side, ["text"]) for row in batch.to_pylist()]


def paths_of(server):
    return [path for path, _, _ in server.root_requests]


def test_the_texts_of_the_night_before_are_on_the_server_while_it_writes(folder, server, night):
    (first,) = map(RunFolder, (folder / "workspace" / "runs").iterdir())
    num_before = server.answered.total()
    left, run, manifest = night()
    assert left.returncode == 0, left.stderr
    assert paths_of(server) == ["/server_info", "/list_external_corpora", REMOVE, ADD, REMOVE]
    (_, body, num_at_add), (_, removed, num_at_end) = server.root_requests[-2:]
    assert num_at_add == num_before < num_at_end == server.answered.total()
    assert sorted(body["documents"]) == sorted(texts_of(first)) and removed == {"corpus_id": body["corpus_id"]}
    assert not server.corpora
    figures = manifest.generation.external_corpus
    assert (figures.num_texts, figures.num_left_out, figures.problem) == (len(texts_of(first)), 0, "")
    assert figures.num_tokens == sum(len(text.split()) + 1 for text in texts_of(first))
    assert f"It drafted from {figures.num_texts} texts of the night before" in run.report_path.read_text()
    assert not [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def test_a_night_that_ends_early_removes_its_corpus_and_the_next_attempt_has_it_again(server, night):
    left, run, manifest = night(max_cost=OF_A_SHARD + 2 * OF_AN_ANSWER)
    assert left.returncode == ExitCode.RUN_FAILED and paths_of(server)[-2:] == [ADD, REMOVE]
    assert not server.corpora and manifest.generation.external_corpus.num_texts
    left, again, manifest = night("--json")
    assert left.returncode == 0 and again.run_id == run.run_id, left.stderr
    assert paths_of(server)[-3:] == [REMOVE, ADD, REMOVE] and not server.corpora
    assert not manifest.generation.external_corpus.problem


def test_the_corpus_of_a_night_that_was_killed_is_replaced_by_the_next_attempt(folder, server, night):
    is_killed = threading.Event()

    def kill(body, number):
        os.kill(pid, signal.SIGKILL)
        is_killed.set()

    server.fault = kill
    config = configured(folder, server)
    pid = os.fork()
    if not pid:  # like the command in a separate process, without importing everything again
        with suppress(BaseException):
            command_here("nightly", "--config", config, "--date", SECOND_DATE, "--force")
        os._exit(0)
    assert is_killed.wait(120) and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    (left_over,) = server.corpora
    server.fault = lambda body, number: None
    left, _, manifest = night("--json")
    assert left.returncode == 0 and "continuing run" in left.stderr
    assert [body.get("corpus_id") for _, body, _ in server.root_requests] == [None, None, *[left_over] * 3]
    assert not server.corpora and manifest.generation.external_corpus.num_texts


def test_a_corpus_that_cannot_be_removed_is_named(server, night):
    def leave(body, number):
        server.is_gone = True

    server.fault = leave
    left, _, manifest = night()
    assert left.returncode == ExitCode.UNAVAILABLE
    assert re.search(r"WARNING: the corpus laserbatch-\w+ may still be on the server: server-error", left.stderr)
    assert "may still be on the server" in manifest.generation.external_corpus.problem


def test_a_refused_corpus_is_a_warning(server, night):
    refusal = Fault(400, {"success": False, "message": f"out of\nmemory, {KEY}"})
    server.root_fault = lambda path: refusal if path == ADD else None
    left, run, manifest = night()
    assert left.returncode == 0, left.stderr
    problem = "the server drafts from no earlier texts: refused: HTTP 400: out of memory, [key]"
    assert manifest.generation.external_corpus == ExternalCorpusFigures(0, 0, 0, problem)
    assert f"WARNING: {problem}" in left.stderr and KEY not in left.stderr
    assert paths_of(server)[-1] == REMOVE and problem in run.report_path.read_text()


def test_what_the_server_has_no_room_for_is_left_out_and_counted(server, night):
    server.corpora["another's"] = ["a few words of others"]
    server.info[MAX_TOKENS] = 6 + 200
    left, _, manifest = night()
    figures = manifest.generation.external_corpus
    assert left.returncode == 0 and figures.num_texts and figures.num_left_out and figures.num_tokens <= 200
    assert list(server.corpora) == ["another's"]


def test_nothing_is_uploaded_where_drafts_must_be_shared_by_several_entities(server, night):
    left, _, manifest = night(min_support=5)
    problem = "nothing was uploaded: a corpus cannot respect pools.min_support 5"
    assert left.returncode == 0 and manifest.generation.external_corpus.problem == problem
    assert ADD not in paths_of(server)


def test_chosen_texts_are_all_or_a_sample_that_fits():
    lengths = np.array([5, 0, 3, 9, 4])
    assert chosen_texts(lengths, 25, 0).tolist() == [0, 2, 3, 4]
    for seed in range(20):
        chosen = chosen_texts(lengths, 14, seed)
        assert len(chosen) and (lengths[chosen] + 1).sum() <= 14 and chosen.tolist() == sorted(chosen)
    assert len({tuple(chosen_texts(lengths, 14, seed)) for seed in range(20)}) > 1
    assert not len(chosen_texts(np.empty(0, np.int64), 9, 0))
