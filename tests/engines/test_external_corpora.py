"""External corpora of an SGLang server, over real connections: accepting servers, and refusals."""

import pytest
from small_server import KEY, MODEL, Fault, small_server

from laserbatch.pipeline.decoding.endpoint_settings import EndpointSettings
from laserbatch.pipeline.engines.external_corpora import BUDGET, MAX_TOKENS, CorpusError, ExternalCorpora

INFO = {"speculative_algorithm": "NGRAM", BUDGET: 2, MAX_TOKENS: 1000}
ADD, REMOVE = "/add_external_corpus", "/remove_external_corpus"


@pytest.fixture
def server():
    with small_server() as started:
        started.card, started.info = {"id": MODEL, "owned_by": "sglang"}, dict(INFO)
        yield started


@pytest.fixture
def corpora(server, monkeypatch):
    monkeypatch.setenv("OUR_KEY", KEY)
    server.key = KEY
    return ExternalCorpora(EndpointSettings(url=server.url, model=MODEL, api_key_env="OUR_KEY"))


def test_a_corpus_replaces_the_one_with_its_id_and_goes_when_it_is_removed(server, corpora):
    server.corpora["ours"] = ["of a process that was killed"]
    assert corpora.replace("ours", ["a quiet shelf", "a warm one"]) == 8
    assert server.corpora == {"ours": ["a quiet shelf", "a warm one"]}
    corpora.remove("ours")
    corpora.remove("ours")
    assert not server.corpora


def test_the_room_is_what_other_corpora_leave(server, corpora):
    assert corpora.room("ours") == 1000
    server.corpora |= {"ours": ["one two"], "another's": ["one two three"]}
    assert corpora.room("ours") == 1000 - 4
    server.corpora["a third"] = ["one"]
    with pytest.raises(CorpusError, match=f"the server has 2 other corpora, and {BUDGET} is 2"):
        corpora.room("ours")


OTHERS = {
    "another algorithm": INFO | {"speculative_algorithm": "LASERBATCH"},
    "no algorithm": INFO | {"speculative_algorithm": None},
    "no budget": INFO | {BUDGET: 0},
    "an older version": {"speculative_algorithm": "NGRAM"},
    "a router without the route": None,
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_server_that_takes_no_corpora_is_asked_nothing_more(server, corpora, name):
    server.info = OTHERS[name]
    assert corpora.room("ours") is None
    assert [path for path, _, _ in server.root_requests] == ["/server_info"]


def test_other_servers_are_not_asked_for_what_sglang_has(server, corpora):
    server.card = {"id": MODEL, "owned_by": "vllm"}
    assert corpora.room("ours") is None and not server.root_requests


REFUSALS = {
    "refused": (Fault(400, {"success": False, "message": "out of\nmemory"}), "refused: HTTP 400: out of memory$"),
    "broken": (Fault(500, "boom"), "server-error: HTTP 500: boom$"),
    "without the route": (Fault(404, {"detail": "Not Found"}), "HTTP 404"),
    "with an administrator's key": (
        Fault(401, {"error": f"Unauthorized {KEY}"}),
        r"refuses the key in OUR_KEY .*\[key\]",
    ),
    "no JSON": (Fault(200, "fine"), "malformed-answer"),
    "no count": (Fault(200, {}), "does not say how many tokens it loaded"),
    "cut": (Fault(200, {"success": True}, is_cut=True), "server-error: the connection fails$"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_one_error_after_one_request(server, corpora, name):
    fault, reason = REFUSALS[name]
    server.root_fault = lambda path: fault if path == ADD else None
    with pytest.raises(CorpusError, match=reason) as error:
        corpora.replace("ours", ["a quiet shelf"])
    assert [path for path, _, _ in server.root_requests] == [REMOVE, ADD] and KEY not in str(error.value)


def test_a_server_that_is_gone_is_one_error(server, corpora):
    server.is_gone = True
    with pytest.raises(CorpusError, match="server-error: the connection fails"):
        corpora.room("ours")
