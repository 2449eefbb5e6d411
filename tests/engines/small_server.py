"""A small server with OpenAI's API, which answers properly or, if a test asks for it, wrongly.

An answer depends on the prompt alone, so that a repeated request gets the same text.
"""

import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL, KEY = "small", "sk-very-secret-4711"
WORDS = ["calm", "warm", "quiet", "bright", "gentle", "clever", "lively", "serious"]


@dataclass
class Fault:
    """A wrong answer: status, body, headers, a delay in seconds, or a connection that is cut."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    is_cut: bool = False


@dataclass
class SmallServer:
    """The requests that the server received, and its answers; tests change it while it runs."""

    url: str = ""
    card: dict[str, Any] | None = field(default_factory=lambda: {"id": MODEL, "owned_by": "a test"})
    fault: Callable[[dict[str, Any], int], Fault | None] = lambda body, number: None  # by body and request number
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda answer: answer
    fingerprint: str | None = None
    key: str | None = None
    delay_s: float = 0.0
    is_gone: bool = False  # connections are closed without an answer
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of text requests
    headers: list[dict[str, str]] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)  # prompt -> number of answers
    files: dict[str, str] = field(default_factory=dict)
    batches: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_polls: int = 2  # polls of a batch until it ends
    batch_end: dict[str, Any] = field(default_factory=lambda: {"status": "completed"})
    info: dict[str, Any] | None = None  # `/server_info`: with it, the server has SGLang's routes besides `/v1`
    corpora: dict[str, list[str]] = field(default_factory=dict)
    root_fault: Callable[[str], Fault | None] = lambda path: None
    root_requests: list[tuple[str, dict[str, Any], int]] = field(default_factory=list)  # path, body, texts before it
    num_open: int = 0
    max_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, body: dict[str, Any], is_chat: bool) -> dict[str, Any]:
        """A correct answer."""
        text = text_for(body)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 40}}
        response = {"id": "1", "choices": [choice], "usage": usage, "model": MODEL}
        return self.change(response | ({"system_fingerprint": self.fingerprint} if self.fingerprint else {}))

    def answer_at_root(self, path: str, body: dict[str, Any]) -> Fault:
        """The answer of SGLang 0.5.23 to a path outside `/v1`, with words as tokens."""
        if self.info is None or not path.startswith(("/add_", "/remove_", "/list_", "/server_info")):
            return Fault(404, {"detail": "Not Found"})
        if path == "/server_info":
            return Fault(body=self.info)
        if self.info["speculative_algorithm"] != "NGRAM":
            return Fault(400, {"success": False, "message": "Ngram speculative decoding is not enabled."})
        sizes = {name: sum(len(text.split()) + 1 for text in texts) for name, texts in self.corpora.items()}
        if path == "/list_external_corpora":
            return Fault(body={"success": True, "corpus_token_counts": sizes, "message": ""})
        name = body["corpus_id"]
        if path == "/remove_external_corpus":
            self.corpora.pop(name, None)
            return Fault(body={"success": True, "message": f"Removed corpus '{name}'."})
        if name in self.corpora:
            message = f"External corpus '{name}' already exists. Remove it before adding a new corpus with the same id."
            return Fault(400, {"success": False, "corpus_id": "", "message": message, "loaded_token_count": 0})
        self.corpora[name] = body["documents"]
        num_tokens = sum(len(text.split()) + 1 for text in body["documents"])
        message = f"Loaded corpus '{name}' with {num_tokens} tokens."
        return Fault(body={"success": True, "corpus_id": name, "message": message, "loaded_token_count": num_tokens})

    def batch(self, batch_id: str) -> dict[str, Any]:
        """The current state of a batch, which ends at the poll number `num_polls`."""
        batch = self.batches[batch_id]
        batch["num_polls"] += 1
        if batch["num_polls"] == self.num_polls:
            batch |= self.batch_end
            outputs = {"output_file_id": [], "error_file_id": []}
            for number, line in enumerate(self.files[batch["input_file_id"]].splitlines()):
                request = json.loads(line)
                fault = self.fault(request["body"], number)
                answer = self.answer(request["body"], request["url"].endswith("/chat/completions"))
                status, body = (200, answer) if fault is None else (fault.status, fault.body)
                self.answered[prompt_of(request["body"])] += 1
                response = {"status_code": status, "body": body}
                to = outputs["output_file_id" if status == 200 else "error_file_id"]
                to.append(json.dumps({"custom_id": request["custom_id"], "response": response, "error": None}))
            if batch["status"] != "failed":
                for name, lines in outputs.items():
                    self.files[f"{batch_id}-{name}"] = "\n".join(reversed(lines))
                    batch[name] = f"{batch_id}-{name}"
        return batch


def text_for(body: dict[str, Any]) -> str:
    """The server's text for a prompt."""
    number = zlib.crc32(prompt_of(body).encode())
    first, second = WORDS[number % 8], WORDS[number // 8 % 8]
    return f"This is a {first} and {second} choice for people who look for something with heart, in shelf {number}."


def prompt_of(body: dict[str, Any]) -> str:
    return json.dumps(body.get("prompt") or body.get("messages"))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: SmallServer

    def do_GET(self) -> None:
        if self.state.is_gone:
            self.close_connection = True
        elif not self.path.startswith("/v1/"):
            self._answer_at_root({})
        elif "/files/" in self.path:
            self._send(200, self.state.files[self.path.split("/")[-2]])
        elif self.path.startswith("/v1/batches?"):
            self._send(200, {"data": list(self.state.batches.values())})
        elif "/batches/" in self.path:
            known = self.path.split("/")[-1] in self.state.batches
            self._send(200 if known else 404, self.state.batch(self.path.split("/")[-1]) if known else {})
        elif self.state.card is None:
            self._send(404, {"error": {"message": "no such path"}})
        else:
            self._send(200, {"object": "list", "data": [self.state.card]})

    def do_POST(self) -> None:
        state, content = self.state, self.rfile.read(int(self.headers["content-length"]))
        if self.path.endswith("/files"):
            lines = [line for line in content.decode().splitlines() if line.startswith("{")]
            state.files[f"file-{len(state.files)}"] = "\n".join(lines)
            return self._send(200, {"id": f"file-{len(state.files) - 1}"})
        body = json.loads(content)
        if not self.path.startswith("/v1/"):
            return self._answer_at_root(body)
        if self.path.endswith("/batches"):
            batch = {"id": f"batch-{len(state.batches)}", "status": "in_progress", "num_polls": 0} | body
            state.batches[batch["id"]] = batch
            return self._send(200, batch)
        with state.lock:
            number = len(state.bodies)
            state.bodies.append(body)
            state.headers.append(dict(self.headers))
            state.num_open += 1
            state.max_open = max(state.max_open, state.num_open)
        try:
            fault = self._refusal(body) or state.fault(body, number)
            time.sleep(state.delay_s if fault is None else fault.delay_s)
        finally:
            with state.lock:
                state.num_open -= 1
        if state.is_gone:
            self.close_connection = True
        elif fault is None:
            state.answered[prompt_of(body)] += 1
            self._send(200, state.answer(body, self.path.endswith("/chat/completions")))
        else:
            self._send(fault.status, fault.body, fault.headers, fault.is_cut)

    def _answer_at_root(self, body: dict[str, Any]) -> None:
        state, authorization = self.state, self.headers.get("authorization")
        if state.is_gone:
            self.close_connection = True
            return
        state.root_requests.append((self.path, body, state.answered.total()))
        if state.key is not None and authorization != f"Bearer {state.key}":
            answer = Fault(401, {"error": f"Unauthorized {authorization}"})
        else:
            answer = state.root_fault(self.path) or state.answer_at_root(self.path, body)
        self._send(answer.status, answer.body, answer.headers, answer.is_cut)

    def _refusal(self, body: dict[str, Any]) -> Fault | None:
        authorization = self.headers.get("authorization")
        if self.state.key is not None and authorization != f"Bearer {self.state.key}":
            return Fault(401, {"error": {"message": f"incorrect key: {authorization}"}})  # some servers repeat the key
        if body["model"] != MODEL:
            return Fault(404, {"error": {"message": f"the model {body['model']} does not exist"}})
        return None

    def _send(self, status: int, body: Any, headers: dict[str, str] | None = None, is_cut: bool = False) -> None:
        text = body if isinstance(body, (str, bytes)) else json.dumps(body)
        data = text.encode() if isinstance(text, str) else text
        try:
            self.send_response(status)
            for name, value in {"content-type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if is_cut else data)
            self.close_connection = self.close_connection or is_cut
        except OSError:
            self.close_connection = True  # the client has stopped waiting

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def small_server() -> Iterator[SmallServer]:
    """Run the server on a free port of this machine for the duration of the block."""
    state = SmallServer()
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads, server.block_on_close = True, False
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
