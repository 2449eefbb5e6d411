"""A server as an engine, over real connections: proper answers become texts; wrong ones are refused or retried."""

import asyncio
import gc
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from functools import partial

import numpy as np
import pytest
from small_server import KEY, MODEL, Fault, small_server, text_for

from laserbatch.pipeline.decoding.endpoint_settings import EndpointSettings
from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL, served_identity, with_rows
from laserbatch.pipeline.decoding.sequence import GenerationFailure, GenerationRequest, GenerationResult
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.engines import endpoint_batches, endpoint_client
from laserbatch.pipeline.engines.endpoint import EndpointEngine
from laserbatch.pipeline.engines.spending import Spending
from laserbatch.pipeline.errors import ConfigError, EndpointGone, ModelError, RunFailed
from laserbatch.pipeline.knowledge.prompts import changed_parts
from laserbatch.pipeline.knowledge.templates import load_template
from laserbatch.pipeline.planning.planner import shared_fingerprint

PRICES = {"input": 10, "output": 100, "cached": 5}
LARK = 'start: "1. " /[a-z]+/'
SCHEMA = {"type": "object", "properties": {"about": {"type": "string"}}, "required": ["about"]}
JSON_FORM = "start: %json " + json.dumps({"x-guidance": {"whitespace_flexible": False}} | SCHEMA)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(endpoint_client, "FIRST_DELAY_S", 0.01)
    with small_server() as started:
        yield started


@pytest.fixture
def engine_of(server, tmp_path):
    """A function that makes engines for the server, with changed options."""

    def made(batch_size=16, **options):
        options = {"url": server.url, "model": MODEL, "give_up_after_s": 20.0} | options
        decoding = DecodingSettings(engine="endpoint", batch_size=batch_size, endpoint=options)
        return EndpointEngine(SAMPLE_MODEL, decoding, tmp_path)

    return made


def request(number, **fields):
    messages = (("system", "Be brief."), ("user", f"About {number}?"))
    prompt_ids = np.array([1, 5, number + 6], np.int32)
    return GenerationRequest(str(number), prompt_ids, max_new_tokens=32, messages=messages, **fields)


def written(engine, requests):
    results = list(engine.generate("user", iter(requests), DecodingSettings()))
    assert sorted(result.request_id for result in results) == sorted(result.request_id for result in requests)
    return {int(result.request_id): result for result in results}


def reason_of(engine, **fields):
    (failure,) = written(engine, [request(0, **fields)]).values()
    assert isinstance(failure, GenerationFailure), failure
    return failure.reason


def test_prompts_go_out_as_token_ids_and_every_text_comes_back_once(server, engine_of):
    engine, requests = engine_of(), [request(number) for number in range(40)]
    texts = written(engine, requests)
    assert {tuple(body["prompt"]) for body in server.bodies} == {(1, 5, number + 6) for number in range(40)}
    assert all(body["temperature"] == 0 and body["max_tokens"] == 32 for body in server.bodies)
    for number, text in texts.items():
        assert isinstance(text, GenerationResult) and text.text == text_for({"prompt": [1, 5, number + 6]})
        assert engine.tokenizer.decode(text.token_ids.tolist()) == text.text
        assert (text.finish_reason, text.end_id, text.num_steps) == ("end_of_text", None, 0)
        assert len(text.sources) == len(text.token_ids) and text.num_drafted == 0
    assert "authorization" not in {name.lower() for headers in server.headers for name in headers}


def test_no_more_requests_are_open_than_the_batch_has_texts(server, engine_of):
    server.delay_s = 0.02
    written(engine_of(batch_size=3), [request(number) for number in range(12)])
    assert server.max_open == 3


def test_servers_that_take_tokens_are_told_the_end_tokens_and_their_tokens_are_kept(server, engine_of):
    server.card = {"id": MODEL, "owned_by": "vllm", "root": "/models/a", "max_model_len": 16}
    engine = engine_of()
    end_id = engine.tokenizer.eos_token_id
    ids = engine.tokenizer("a quiet shelf", add_special_tokens=False)["input_ids"]
    server.change = lambda answer: answer | {"choices": [answer["choices"][0] | {"token_ids": [*ids, end_id]}]}
    (text,) = written(engine, [request(0)]).values()
    assert text.token_ids.tolist() == ids and text.end_id == end_id and text.text == "a quiet shelf"
    (body,) = server.bodies
    assert end_id in body["stop_token_ids"] and body["return_token_ids"] and body["max_tokens"] == 13
    long = GenerationRequest("0", np.ones(16, np.int32))
    (failed,) = engine.generate("user", [long], DecodingSettings())
    assert failed.reason.startswith("too-long: the prompt has 16 tokens, and the server's context has 16")


def test_chat_servers_get_messages_and_their_answers_become_tokens(server, engine_of):
    engine = engine_of(api="chat")
    (text,) = written(engine, [request(0)]).values()
    (body,) = server.bodies
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "About 0?"},
    ]
    assert "prompt" not in body and text.text == text_for(body) and len(text.token_ids) > 5


def test_without_the_models_tokenizer_nothing_of_the_bundled_one_is_asked_of_a_server(server, engine_of):
    server.card = {"id": MODEL, "owned_by": "vllm", "max_model_len": 5}  # fewer than the bundled tokenizer counts
    server.change = lambda answer: answer | {"choices": [answer["choices"][0] | {"token_ids": [10**6]}]}
    engine = engine_of(api="chat")
    (text,) = written(engine, [request(0)]).values()
    (body,) = server.bodies
    assert {"stop_token_ids", "return_token_ids", "repetition_penalty"}.isdisjoint(body)
    assert text.text == text_for(body) == engine.tokenizer.decode(text.token_ids)
    assert engine.model.id.startswith(f"{MODEL}-") and engine.model.id != engine_of().model.id


def test_answers_are_held_to_their_form_as_the_server_takes_it(server, engine_of):
    engine = engine_of()
    assert isinstance(written(engine, [request(0, grammar=JSON_FORM)])[0], GenerationResult)
    assert server.bodies[-1]["response_format"]["json_schema"]["schema"] == SCHEMA
    with pytest.raises(ConfigError, match=r"set decoding\.guided: off"):
        written(engine, [request(0, grammar=LARK)])
    server.card = {"id": MODEL, "owned_by": "vllm"}
    written(engine, [request(0, grammar=LARK)])
    assert server.bodies[-1]["structured_outputs"] == {"grammar": LARK}
    server.fault = lambda body, number: Fault(400, {"error": {"message": "no grammars here"}})
    assert reason_of(engine, grammar=LARK).endswith("no grammars here; if it refuses the form of answers, set "
                                                    "decoding.guided: off")  # fmt: skip


def test_fields_are_added_to_requests_and_taken_from_them(server, engine_of):
    written(engine_of(extra_body={"service_tier": "flex", "temperature": None}), [request(0)])
    assert server.bodies[0]["service_tier"] == "flex" and "temperature" not in server.bodies[0]


CHOICE = {"index": 0, "finish_reason": "stop", "text": "fine"}
WRONG = {
    "malformed": (Fault(body='{"choices": [{"te'), "malformed-answer: the answer is not a JSON object"),
    "a page of a proxy": (Fault(body="<html>hello</html>", headers={"content-type": "text/html"}), "malformed-answer"),
    "a list": (Fault(body=[1]), "malformed-answer: the answer is not a JSON object"),
    "no choices": (Fault(body={}), "malformed-answer: the answer has no choices"),
    "empty choices": (Fault(body={"choices": []}), "malformed-answer: the answer has 0 choices"),
    "two choices": (Fault(body={"choices": [CHOICE, CHOICE]}), "malformed-answer: the answer has 2 choices"),
    "a choice that is text": (Fault(body={"choices": ["fine"]}), "malformed-answer"),
    "half of a character": (
        Fault(body={"choices": [CHOICE | {"text": "a\ud800b"}]}),
        "malformed-answer: the text has half",
    ),
    "nested too deep": (Fault(body='{"a":' * 100_000 + "1" + "}" * 100_000), "malformed-answer: the answer is not"),
    "tokens of no tokenizer": (
        Fault(body={"choices": [CHOICE | {"token_ids": [2**20]}]}),
        r"malformed-answer: the answer has token id 1048576, .* has \d+ tokens: the server has another model",
    ),
    "bytes that are no UTF-8": (
        Fault(body=b'{"choices": [{"finish_reason": "stop", "text": "caf\xe9"}]}'),
        "malformed-answer: the answer is not UTF-8 at character 51",
    ),
    "an error as HTTP 200": (
        Fault(body={"error": {"message": "no\nquota", "code": "9" * 5000}}),
        "refused: HTTP 400: no quota",
    ),
    "a stream": (Fault(body='data: {"choices": []}\n\n'), "malformed-answer: the answer is not a JSON object"),
    "no content": (Fault(body=""), "malformed-answer: the answer is not a JSON object"),
    "no text": (Fault(body={"choices": [CHOICE | {"text": None}]}), "malformed-answer: the answer has no text"),
    "filtered": (Fault(body={"choices": [CHOICE | {"finish_reason": "content_filter"}]}), "not-finished: .*filter"),
    "unfinished": (Fault(body={"choices": [CHOICE | {"finish_reason": None}]}), "not-finished"),
    "refused": (Fault(400, {"error": {"message": "too many\nwords"}}), "refused: HTTP 400: too many words"),
    "too large": (Fault(413, "go away"), "refused: HTTP 413: go away"),
    "unreadable": (Fault(422, ""), "refused: HTTP 422: no message"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_row_with_a_wrong_answer_has_the_servers_reason_and_the_others_their_texts(server, engine_of, name):
    fault, reason = WRONG[name]
    server.fault = lambda body, number: fault if body["prompt"][2] == 6 else None
    results = written(engine_of(), [request(number) for number in range(4)])
    assert isinstance(results[0], GenerationFailure)
    assert re.match(reason, results[0].reason), results[0].reason
    assert all(isinstance(results[number], GenerationResult) for number in (1, 2, 3))
    assert len(server.bodies) == 4  # no request is repeated


def test_odd_numbers_beside_a_text_are_passed_over(server, engine_of):
    logprobs = '"logprobs": {"token_logprobs": [NaN]}'
    usage = '"usage": {"prompt_tokens": NaN, "completion_tokens": -1e999}'
    body = f'{{"choices": [{{"index": 7, "finish_reason": "stop", "text": "fine", {logprobs}}}], {usage}}}'
    server.fault = lambda body_, number: Fault(body=body)
    assert written(engine_of(), [request(0)])[0].text == "fine"
    spent = Spending.of(engine_of()._run_dir)
    assert (spent.num_prompt_tokens, spent.num_completion_tokens) == (3, 32)  # the same counts as without usage


def test_an_answer_that_repeats_the_key_leaves_it_in_no_file_or_reason(server, engine_of, monkeypatch, tmp_path):
    monkeypatch.setenv("OUR_KEY", KEY)
    server.key, server.fingerprint = KEY, f"fp-{KEY}"
    server.card = {"id": MODEL, "owned_by": KEY}
    engine = engine_of(api_key_env="OUR_KEY")
    server.fault = lambda body, number: Fault(body="y" * 75 + KEY) if number == 1 else None
    results = written(engine, [request(0), request(1)]).values()
    (reason,) = [result.reason for result in results if isinstance(result, GenerationFailure)]
    files = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "fp-[key]" in files and KEY[:5] not in files + reason


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirects_end_the_work_and_are_not_followed(server, engine_of, status):
    with small_server() as other:
        server.fault = lambda body, number: Fault(status, "", {"location": f"{other.url}/completions"})
        with pytest.raises(ConfigError, match=rf"another URL \(HTTP {status}\).*set decoding\.endpoint\.url"):
            written(engine_of(), [request(0)])
        assert not other.bodies


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here, which makes a certificate")
def test_a_certificate_that_is_not_accepted_ends_the_work_at_once(engine_of, tmp_path):
    names = [str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "1"]
    subprocess.run([*command, "-keyout", names[0], "-out", names[1]], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(names[1], names[0])
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            while True:
                try:
                    connection, _ = listening.accept()
                    context.wrap_socket(connection, server_side=True).close()
                except ssl.SSLError:
                    connection.close()
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(ConfigError, match=r"certificate is not accepted \(self.signed.*SSL_CERT_FILE"):
            engine_of(url=f"https://127.0.0.1:{listening.getsockname()[1]}/v1")


def test_a_refusal_of_the_model_is_no_text(server, engine_of):
    message = {"role": "assistant", "content": None, "refusal": "I cannot"}
    server.change = lambda answer: {"choices": [{"message": message, "finish_reason": "stop"}]}
    assert reason_of(engine_of(api="chat")) == "refused: the model refuses to answer"


def test_blank_lines_after_thoughts_that_the_server_cut_are_no_part_of_the_answer(server, engine_of):
    message = {"role": "assistant", "content": "\n\nA quiet choice.", "reasoning_content": "Well."}
    server.change = lambda answer: {"choices": [{"message": message, "finish_reason": "stop"}]}
    assert written(engine_of(api="chat"), [request(0)])[0].text == "A quiet choice."


PASSING = {
    "a storm of 429": Fault(429, {"error": {"message": "slow down"}}, {"retry-after": "0"}),
    "500": Fault(500, "oops"),
    "503 without a body": Fault(503, ""),
    "503 as HTTP 200": Fault(200, {"error": {"message": "upstream is down", "code": 503}}),
    "a cut connection": Fault(200, {"choices": [CHOICE]}, is_cut=True),
    "a slow answer": Fault(200, {"choices": [CHOICE]}, delay_s=2.0),
}


@pytest.mark.parametrize("name", PASSING)
def test_what_passes_is_asked_again_until_it_is_answered(server, engine_of, name):
    server.fault = lambda body, number: PASSING[name] if number < 6 else None
    engine = engine_of(timeout_s=1 if PASSING[name].delay_s else 30)  # a busy machine is slow without a fault
    results = written(engine, [request(number) for number in range(3)])
    assert [results[number].text for number in range(3)] == [text_for({"prompt": [1, 5, n + 6]}) for n in range(3)]
    assert Spending.of(engine._run_dir).num_retries == 6 and set(server.answered.values()) == {1}


def test_the_time_that_a_server_asks_for_is_waited_by_all(server, engine_of):
    server.fault = lambda body, number: Fault(429, {}, {"retry-after": "0.4"}) if number == 0 else None
    engine, began_s = engine_of(batch_size=1), time.monotonic()
    written(engine, [request(0)])
    assert 0.4 <= time.monotonic() - began_s < 5


def test_a_row_that_fails_by_itself_goes_to_quarantine(server, engine_of, monkeypatch):
    monkeypatch.setattr(endpoint_client, "MAX_DELAY_S", 0.1)
    boom, cut = Fault(500, {"error": {"message": "boom"}}), Fault(body={"choices": [CHOICE]}, is_cut=True)
    server.fault = lambda body, number: {6: boom, 7: cut}.get(body["prompt"][2])
    server.delay_s = 0.2  # meanwhile others are answered
    results = written(engine_of(batch_size=4), [request(number) for number in range(30)])
    assert results[0].reason == "server-error: 8 times: HTTP 500: boom"
    assert results[1].reason.startswith("server-error: ") and results[1].reason.endswith(": the connection fails")
    assert all(isinstance(results[number], GenerationResult) for number in range(2, 30))


def test_rows_that_were_open_when_a_server_went_away_are_not_blamed(server, engine_of):
    def fault(body, number):
        server.is_gone = number >= 6
        return Fault(503, "overloaded") if number < 3 else None

    server.fault = fault
    with pytest.raises(EndpointGone):
        written(engine_of(give_up_after_s=3), [request(number) for number in range(12)])


def test_a_server_that_is_gone_ends_the_work(server, engine_of, caplog):
    engine = engine_of(give_up_after_s=0.3)
    server.is_gone = True
    with pytest.raises(EndpointGone, match=r"has answered nothing for \d+ seconds \(the connection fails"):
        written(engine, [request(number) for number in range(8)])
    gc.collect()  # asyncio would report unretrieved exceptions
    assert not [record for record in caplog.records if record.name == "asyncio"]
    with pytest.raises(EndpointGone):
        engine_of(give_up_after_s=0.1)
    server.is_gone = False
    server.fault = lambda body, number: Fault(429, {}, {"retry-after": "3600"})
    with pytest.raises(EndpointGone, match="it asks to wait 3600 seconds"):
        written(engine_of(), [request(0)])
    server.fault = lambda body, number: None
    assert isinstance(written(engine, [request(0)])[0], GenerationResult)  # the engine works again


def test_a_prompt_that_crashes_the_server_is_found_and_the_others_are_written(server, engine_of, monkeypatch):
    monkeypatch.setattr(endpoint_client, "POLL_S", 0.05)
    crashes = []

    def fault(body, number):
        time.sleep(0.05)  # meanwhile other requests are open
        if body["prompt"][2] == 8 and not server.is_gone:
            crashes.append(number)
            server.is_gone = True
            threading.Timer(0.5, setattr, (server, "is_gone", False)).start()

    server.fault = fault
    results = written(engine_of(batch_size=4, give_up_after_s=1.5), [request(number) for number in range(9)])
    assert results.pop(2).reason == "server-crash: the server was gone 4 times after this prompt" and len(crashes) == 4
    assert all(isinstance(result, GenerationResult) for result in results.values())


def test_a_server_that_answers_nothing_is_given_up_before_a_longer_timeout(server, engine_of):
    engine, began_s = engine_of(give_up_after_s=1.0, timeout_s=60.0), time.monotonic()
    server.fault = lambda body, number: Fault(delay_s=20.0)
    with pytest.raises(EndpointGone, match=r"has answered nothing for 1 seconds \(no answer in time"):
        written(engine, [request(0)])
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("fault", [Fault(504, "too slow"), Fault(500, "boom"), Fault(is_cut=True, body="x" * 10)])
def test_a_row_that_alone_is_never_answered_fails_by_itself(server, engine_of, fault):
    server.fault = lambda body, number: fault if body["prompt"] == [1, 5, 6] else None
    results = written(engine_of(give_up_after_s=0.5), [request(number) for number in range(4)])
    assert results[0].reason.startswith("server-error: ")
    assert all(isinstance(results[number], GenerationResult) for number in (1, 2, 3))


def test_waits_end_when_the_server_is_given_up(server, engine_of, monkeypatch):
    engine = engine_of(give_up_after_s=1.0)
    monkeypatch.setattr(endpoint_client, "FIRST_DELAY_S", 30.0)
    server.is_gone, began_s = True, time.monotonic()
    with pytest.raises(EndpointGone, match="has answered nothing for 1 seconds"):
        written(engine, [request(0)])
    assert time.monotonic() - began_s < 5


def test_a_wrong_key_model_or_path_ends_the_work_and_no_message_has_the_key(server, engine_of, monkeypatch):
    monkeypatch.setenv("OUR_KEY", KEY)
    server.key = f"{KEY}-other"
    with pytest.raises(
        ConfigError, match=r"refuses the key in OUR_KEY \(HTTP 401: incorrect key: Bearer \[key\]"
    ) as raised:
        written(engine_of(api_key_env="OUR_KEY"), [request(0)])
    assert KEY not in str(raised.value) and raised.value.__cause__ is None
    with pytest.raises(ConfigError, match=r"refuses requests without a key; set decoding\.endpoint\.api_key_env"):
        written(engine_of(), [request(0)])
    server.key = KEY
    assert isinstance(written(engine_of(api_key_env="OUR_KEY"), [request(0)])[0], GenerationResult)
    with pytest.raises(ConfigError, match=f"has no model 'large'; set .* to one that it has: {MODEL}"):
        engine_of(model="large")
    server.card = None  # the server lists no models
    with pytest.raises(ConfigError, match=r"or no model 'large' .*the model large does not exist"):
        written(engine_of(model="large", api_key_env="OUR_KEY"), [request(0)])
    for no_header in (f"{KEY}\n{KEY}", f"{KEY} –"):
        monkeypatch.setenv("OUR_KEY", no_header)
        with pytest.raises(ConfigError, match=r"variable OUR_KEY .*holds no valid key: .*copy the key again") as raised:
            engine_of(api_key_env="OUR_KEY")
        assert KEY not in str(raised.value)
    monkeypatch.delenv("OUR_KEY")
    with pytest.raises(ConfigError, match=r"variable OUR_KEY .* is not set"):
        engine_of(api_key_env="OUR_KEY")


@pytest.mark.parametrize(
    "place", ["host:port", "$HOST", "host:99999", "a host", "host/v1\n", "a..host", "me:a secret@a host"]
)
def test_a_url_that_no_request_can_be_sent_to_is_refused_without_its_password(place):
    with pytest.raises(ValueError, match=r"expected, for example, http://localhost|url has a user name") as raised:
        EndpointSettings(url=f"http://{place}", model=MODEL)
    assert "url has" in raised.value.errors()[0]["msg"] and raised.value.errors()[0]["loc"] == ()


def test_tokens_are_counted_by_the_server_over_all_attempts(server, engine_of, tmp_path):
    written(engine_of(price_per_million_tokens=PRICES), [request(0), request(1)])
    server.change = lambda answer: answer | {"usage": None}
    engine = engine_of(price_per_million_tokens=PRICES)
    written(engine, [request(2)])
    spent = Spending.of(tmp_path)
    assert (spent.num_requests, spent.num_prompt_tokens, spent.num_cached_tokens) == (3, 203, 80)
    assert spent.num_completion_tokens == 20 + 32  # without usage an answer counts as its limit
    assert spent.cost(engine._settings.price_per_million_tokens) == pytest.approx((123 * 10 + 80 * 5 + 52 * 100) / 1e6)
    spent.add({"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 1_000}}, 9, 9, MODEL)
    assert (spent.num_prompt_tokens, spent.num_cached_tokens) == (210, 87)  # cached tokens are limited to the prompt's


def test_nothing_is_sent_that_may_cost_more_than_allowed(server, engine_of):
    limited = engine_of(price_per_million_tokens=PRICES, max_cost=0.01)
    assert len(written(limited, [request(number) for number in range(3)])) == 3  # at most 0.00969; they cost 0.0054
    num_sent = len(server.bodies)
    with pytest.raises(RunFailed, match=r"has cost 0.0054, and its next shard of 2 texts may cost 0.00646"):
        written(limited, [request(3), request(4)])
    longer = engine_of(price_per_million_tokens=PRICES, max_cost=0.01, extra_body={"max_completion_tokens": 64})
    with pytest.raises(RunFailed, match=r"its next shard of 1 texts may cost 0.00643"):
        written(longer, [request(3)])
    assert len(server.bodies) == num_sent


def test_a_server_that_changes_is_reported(server, engine_of, tmp_path):
    server.fingerprint = "fp_1"
    engine = engine_of()
    written(engine, [request(0)])
    assert Spending.of(tmp_path).figures(engine._settings).changes is None
    server.card = {"id": MODEL, "owned_by": "a test", "root": "/models/other"}
    server.fingerprint = "fp_2"
    written(engine, [request(1)])
    figures = Spending.of(tmp_path).figures(engine._settings)
    assert figures.answered_by == {
        f"{MODEL} (owned_by a test), fingerprint fp_1": 1,
        f"{MODEL} (owned_by a test, root /models/other), fingerprint fp_2": 1,
    }
    assert figures.changes is not None and "the server changed during the night" in figures.changes


def test_requests_keep_to_the_limits_of_a_minute(server, engine_of):
    began_s = time.monotonic()
    written(engine_of(requests_per_minute=600), [request(number) for number in range(4)])  # 0.1 s each
    written(engine_of(tokens_per_minute=60 * 350), [request(number) for number in range(4)])  # 35 tokens: 0.1 s each
    assert time.monotonic() - began_s >= 0.6


def test_a_worker_that_waits_shows_that_it_lives(server, engine_of, monkeypatch):
    monkeypatch.setattr("laserbatch.pipeline.engines.endpoint.TICK_S", 0.05)
    server.delay_s = 0.5
    engine = engine_of()
    written(engine, [request(0)])
    assert engine.progress()[0] > 3


def test_the_folder_of_a_tokenizer_is_enough_and_weights_in_it_name_the_model(server, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for path in (*SAMPLE_MODEL.glob("tokenizer*"), *SAMPLE_MODEL.glob("*.jinja")):
        shutil.copy(path, folder)
    endpoint = {"url": server.url, "model": MODEL}
    decoding = DecodingSettings.model_validate({"engine": "endpoint", "endpoint": endpoint})
    engine = EndpointEngine(folder, decoding, tmp_path)
    assert isinstance(written(engine, [request(0)])[0], GenerationResult)
    named = decoding.model_copy(update={"endpoint": decoding.endpoint.model_copy(update={"model": "other"})})
    assert engine.model.id.startswith(f"{MODEL}-") and served_identity(folder, named) != engine.model.id
    template = load_template("kar_item")
    own_settings, of_server = DecodingSettings(verifier="greedy"), partial(shared_fingerprint, template, 1024, decoding)
    assert of_server(SAMPLE_MODEL) == shared_fingerprint(template, 1024, own_settings, SAMPLE_MODEL)
    fingerprints = of_server(folder), shared_fingerprint(template, 1024, named, folder)
    assert changed_parts(*(f"{shared}-0-0" for shared in fingerprints)) == ("model",)
    with pytest.raises(ModelError, match="has no tokenizer"):
        EndpointEngine(tmp_path, decoding, tmp_path)


def test_tokens_without_rows_in_the_model_are_not_sent_as_end_tokens(tmp_path):
    assert with_rows(tmp_path, (7, 3)) == [3, 7]
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    assert with_rows(tmp_path, (7, 3)) == [3]


@pytest.fixture
def batches_of(engine_of, monkeypatch):
    monkeypatch.setattr(endpoint_batches, "FIRST_POLL_S", 0.01)
    return partial(engine_of, mode="batch")


def test_a_batch_gives_the_texts_of_single_requests(server, engine_of, batches_of, monkeypatch):
    for api in ("completions", "chat"):
        single = written(engine_of(api=api), [request(number) for number in range(7)])
        monkeypatch.setattr(endpoint_batches, "MAX_REQUESTS", 3)
        server.bodies.clear()
        engine = batches_of(api=api, price_per_million_tokens=PRICES)
        batched = written(engine, [request(number) for number in range(7)])
        assert {number: text.text for number, text in batched.items()} == {n: text.text for n, text in single.items()}
        assert not server.bodies  # no single requests were sent
    sent = list(server.batches.values())
    assert len(sent) == 6 and {batch["endpoint"] for batch in sent} == {"/v1/completions", "/v1/chat/completions"}
    assert engine._spending.num_completion_tokens and all(batch["completion_window"] == "24h" for batch in sent)


def test_requests_of_a_batch_fail_alone(server, batches_of):
    refusal = Fault(400, {"error": {"message": "too rude"}})
    server.fault = lambda body, number: refusal if number == 1 else None
    outcomes = written(batches_of(), [request(number) for number in range(3)])
    assert isinstance(outcomes[1], GenerationFailure) and outcomes[1].reason == "refused: HTTP 400: too rude"
    assert all(isinstance(outcomes[number], GenerationResult) for number in (0, 2))
    server.batch_end = {"status": "expired"}
    server.fault = lambda body, number: Fault(500, {}) if number else None
    outcomes = written(batches_of(), [request(number) for number in range(10, 12)])
    assert isinstance(outcomes[10], GenerationResult) and isinstance(outcomes[11], GenerationFailure)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_batch_that_was_sent_is_waited_for_and_not_sent_again(server, batches_of, tmp_path, is_recorded):
    server.num_polls = 10**9
    engine = batches_of()

    async def interrupted():
        await asyncio.wait_for(engine._batch_outcomes([request(1)]), 1.0)

    with pytest.raises(TimeoutError):
        engine._loop.run_until_complete(interrupted())
    assert len(server.batches) == 1
    if not is_recorded:  # as if the process had died before it recorded the id
        shutil.rmtree(tmp_path / "batches")
    server.num_polls = next(iter(server.batches.values()))["num_polls"] + 2
    assert isinstance(written(batches_of(), [request(1)])[1], GenerationResult)
    assert len(server.batches) == 1


def test_another_run_asks_again_what_an_expired_batch_left_open(server, batches_of, tmp_path):
    server.fault, server.batch_end = lambda body, number: Fault(500, {}), {"status": "expired"}
    engine = batches_of()
    assert isinstance(written(engine, [request(1)])[1], GenerationFailure)
    server.fault, server.batch_end = lambda body, number: None, {"status": "completed"}
    engine._run_dir = tmp_path / "another"
    engine._run_dir.mkdir()
    assert isinstance(written(engine, [request(1)])[1], GenerationResult)
    assert len(server.batches) == 2


def test_what_stops_a_batch_ends_the_run(server, batches_of, tmp_path):
    server.batch_end = {"status": "failed", "errors": {"data": [{"message": "line 1 is too long"}]}}
    with pytest.raises(RunFailed, match="refused the batch batch-0: line 1 is too long"):
        written(batches_of(), [request(1)])
    server.batch_end = {"status": "completed"}
    assert isinstance(written(batches_of(), [request(1)])[1], GenerationResult)
    server.batches.clear()
    with pytest.raises(RunFailed, match="does not know the batch batch-1 any more; the same command sends"):
        written(batches_of(), [request(1)])


def test_the_previous_text_is_sent_as_prediction_where_that_is_asked_for(server, engine_of):
    engine = engine_of(api="chat", prediction=True)
    previous_ids = np.array(engine.tokenizer("A quiet choice.", add_special_tokens=False)["input_ids"], np.int32)
    written(engine, [request(1, previous_ids=previous_ids), request(2)])
    sent = {body["messages"][1]["content"]: body.get("prediction") for body in server.bodies}
    assert sent == {"About 1?": {"type": "content", "content": "A quiet choice."}, "About 2?": None}
    with pytest.raises(ValueError, match="prediction needs `api: chat`"):
        engine_of(prediction=True)
