"""Requests sent by a provider's batch API: a file of requests, answered within a day, often at half the price.

A batch is identified by the SHA-256 of its run and file, which is kept with its id in the run's folder and in the
batch's metadata. So a night that was killed waits for the batch that it has sent, and neither sends nor pays for a
batch twice; a later run sends requests without an answer again.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from laserbatch.pipeline.engines.endpoint_client import EndpointClient, NoSuchPath, require_utf8
from laserbatch.pipeline.errors import RowError, RunFailed
from laserbatch.pipeline.storage.atomic import read_json, write_json

logger = logging.getLogger(__name__)

MAX_REQUESTS, MAX_BYTES = 50_000, 190_000_000  # of a batch: OpenAI takes this many, and files of 200 MB
FIRST_POLL_S, MAX_POLL_S = 1.0, 60.0  # between polls of a batch; doubled each time
FOLDER, METADATA_KEY = "batches", "laserbatch"
ENDED = {"completed", "expired", "cancelled", "failed"}


class EndpointBatches:
    """The batches of a run; `path` is the path of the API that answers requests, such as "/v1/chat/completions"."""

    def __init__(self, client: EndpointClient, path: str, run_dir: Path) -> None:
        self._client, self._path, self._folder = client, path, run_dir / FOLDER

    async def answers(self, bodies: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any] | RowError]:
        """The answer to each request, by its id, or the reason why it has none.

        Raises RunFailed: the provider refuses a batch as a whole.
        """
        lines = [
            json.dumps({"custom_id": request_id, "method": "POST", "url": self._path, "body": body}).encode()
            for request_id, body in bodies.items()
        ]
        answers_by_id: dict[str, dict[str, Any] | RowError] = {}
        for answers in await asyncio.gather(*(self._answers_of(part) for part in _parts(lines))):
            answers_by_id |= answers
        nothing = RowError("no-answer: the batch ended without an answer to this request")
        return {request_id: answers_by_id.get(request_id, nothing) for request_id in bodies}

    async def _answers_of(self, lines: list[bytes]) -> dict[str, dict[str, Any] | RowError]:
        content = b"\n".join(lines) + b"\n"
        digest = hashlib.sha256(f"{self._folder.parent.name} {self._path}\n".encode() + content).hexdigest()
        record = self._folder / f"{digest}.json"
        if record.exists():
            batch_id = str(read_json(record)["id"])
            logger.info("waiting for the batch %s that was sent before", batch_id)
        else:
            batch_id = await self._sent_before(digest) or await self._send(content, digest)
            record.parent.mkdir(exist_ok=True)
            write_json({"id": batch_id}, record)
        try:
            batch = await self._ended(batch_id)
        except NoSuchPath:
            record.unlink()
            again = "the same command sends its requests again, and they are paid for again"
            raise RunFailed(f"the provider does not know the batch {batch_id} any more; {again}") from None
        if batch["status"] == "failed":
            record.unlink(missing_ok=True)
            errors = batch.get("errors")
            reasons = errors.get("data") if isinstance(errors, Mapping) else None
            messages = "; ".join(
                str(reason.get("message")) for reason in (reasons or [])[:3] if isinstance(reason, Mapping)
            )
            raise RunFailed(f"the provider refused the batch {batch_id}: {messages or 'it gave no reason'}")
        answers: dict[str, dict[str, Any] | RowError] = {}
        for name in ("output_file_id", "error_file_id"):
            if isinstance(batch.get(name), str):
                text = await self._client.text(f"/files/{batch[name]}/content")
                answers |= dict(_answer(line) for line in text.split("\n") if line.strip())
        return answers

    async def _sent_before(self, digest: str) -> str | None:
        """The id of a batch whose sender died before it recorded the id; None if there is none, or no list."""
        try:
            listed = (await self._client.get("/batches?limit=100")).get("data")
        except (NoSuchPath, RowError):
            return None
        for batch in listed if isinstance(listed, list) else ():
            metadata = batch.get("metadata") or {} if isinstance(batch, Mapping) else {}
            if metadata.get(METADATA_KEY) == digest and batch.get("status") not in {"cancelled", "failed"}:
                return str(batch["id"])
        return None

    async def _send(self, content: bytes, digest: str) -> str:
        try:
            sent = await self._client.upload("/files", {"purpose": "batch"}, (f"{digest[:16]}.jsonl", content))
            fields = {"input_file_id": sent.get("id"), "endpoint": self._path, "completion_window": "24h"}
            batch = await self._client.post("/batches", fields | {"metadata": {METADATA_KEY: digest}}, 0)
        except RowError as error:
            raise RunFailed(f"the provider did not accept a batch: {error.reason}") from None
        if not isinstance(batch.get("id"), str):
            raise RunFailed("the provider did not accept a batch: its answer to /batches has no id")
        logger.info("sent %d requests as the batch %s", content.count(b"\n"), batch["id"])
        return batch["id"]

    async def _ended(self, batch_id: str) -> dict[str, Any]:
        delay_s = FIRST_POLL_S
        while (batch := await self._client.get(f"/batches/{batch_id}")).get("status") not in ENDED:
            await asyncio.sleep(delay_s)
            delay_s = min(MAX_POLL_S, 2 * delay_s)
        return batch


def _parts(lines: list[bytes]) -> Iterator[list[bytes]]:
    """Divide lines, in order, into parts of as many lines as a batch takes."""
    part: list[bytes] = []
    num_bytes = 0
    for line in lines:
        if part and (len(part) == MAX_REQUESTS or num_bytes + len(line) + 1 > MAX_BYTES):
            yield part
            part, num_bytes = [], 0
        part.append(line)
        num_bytes += len(line) + 1
    if part:
        yield part


def _answer(line: str) -> tuple[str, dict[str, Any] | RowError]:
    """The request's id and its answer, from a line of a batch's files."""
    try:
        answer = json.loads(line)
        request_id, response, error = answer["custom_id"], answer.get("response") or {}, answer.get("error") or {}
        status, body = response.get("status_code"), response.get("body")
    except (ValueError, KeyError, AttributeError, TypeError):
        return "", RowError("malformed-answer: a line of the batch is not a JSON object with a custom_id")
    try:
        require_utf8(line)
    except RowError as error:
        return str(request_id), error
    if status == 200 and isinstance(body, dict):
        return str(request_id), body
    message = error.get("message") or (body.get("error") or {} if isinstance(body, dict) else {}).get("message")
    return str(request_id), RowError(f"refused: HTTP {status}: {str(message)[:300]}")
