"""Tries the configured model: whether its texts end, how fast it writes, and whether its texts have the right form.

The model is loaded and answers a short question. `check_model_here` also lets it write texts of the templates: one
alone for some seconds, then a batch for at most a minute. Nothing is kept.
"""

import datetime
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from laserbatch.jobs.checks.result import CheckResult
from laserbatch.jobs.formatting import counted, format_counts, percent, rate, seconds
from laserbatch.jobs.settings import SAMPLE_MODEL, Settings
from laserbatch.pipeline.decoding.device_memory import num_stored_values
from laserbatch.pipeline.decoding.drafters import NoDrafter
from laserbatch.pipeline.decoding.model.folder import find_weights
from laserbatch.pipeline.decoding.model.known_models import KNOWN_KINDS
from laserbatch.pipeline.decoding.sequence import GenerationFailure, GenerationRequest, GenerationResult
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.decoding.verifiers import verifier_from
from laserbatch.pipeline.distributed.worker import parsed_answer
from laserbatch.pipeline.engines.answers import UNCLOSED_THOUGHTS
from laserbatch.pipeline.engines.engine import TextEngine
from laserbatch.pipeline.engines.own import OwnEngine
from laserbatch.pipeline.errors import EndpointGone, ModelError, RowError
from laserbatch.pipeline.gpus import num_gpus
from laserbatch.pipeline.knowledge.chat_format import encode_chat
from laserbatch.pipeline.knowledge.forms import guiding_grammar
from laserbatch.pipeline.knowledge.histories import labels_of
from laserbatch.pipeline.knowledge.prompts import RenderedPrompt, Shown, render_shown
from laserbatch.pipeline.knowledge.questions import SideQuestions
from laserbatch.pipeline.knowledge.templates import PromptTemplate
from laserbatch.pipeline.sample.world import write_sample_world
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.scratch import ScratchFolder
from laserbatch.pipeline.tables.read import Tables, read_tables

QUESTION = "Name one colour. Answer with one word."
MAX_ANSWER_TOKENS = 64
MAX_TRIED_BYTES = 8 * 10**9  # maximum size of weights on a CPU: a larger model takes minutes for a short text
NUM_TEXTS = 16  # texts in the batch, half of them of each side
SPEED_S = 4.0  # the speed of a text alone is measured for this long
ENDPOINT_S = 30.0  # a server must answer within this time
TEXTS_S = 60.0  # time limit of a text alone, and of the batch


class Task(NamedTuple):
    """An entity and its prompt, rendered from a template."""

    template: PromptTemplate
    shown: Shown
    prompt: RenderedPrompt

    def request(self, place: int, decoding: DecodingSettings) -> GenerationRequest:
        """The request that a night would send; its id is its place among the tasks."""
        grammar, most = guiding_grammar(self.template, decoding), decoding.max_new_tokens
        return GenerationRequest(str(place), self.prompt.token_ids, max_new_tokens=most, grammar=grammar)


@dataclass
class Measured:
    """The texts that ended in time, by the place of their prompt.

    `prompts_s`: seconds until every text had its first token; `tokens_per_s`: the speed from then until the first text
    ended, of all texts together. Both are None if the time was too short to measure them.
    """

    texts: dict[int, GenerationResult | GenerationFailure] = field(default_factory=dict)
    prompts_s: float | None = None
    tokens_per_s: float | None = None


def check_answer(settings: Settings) -> Iterator[CheckResult]:
    """Check whether the model ends a short answer, and with which token; with a server, first whether it answers."""
    if settings.decoding.engine == "endpoint":
        yield from _endpoint(settings)
    elif settings.decoding.model != SAMPLE_MODEL:
        engine = yield from _loaded(settings)
        if engine is not None:
            yield _answer(engine, settings)


def _endpoint(settings: Settings) -> Iterator[CheckResult]:
    from laserbatch.pipeline.engines.endpoint import EndpointEngine  # needs a client that is an extra

    decoding, server = settings.decoding, settings.decoding.endpoint
    assert server is not None
    limits = {name: min(getattr(server, name), ENDPOINT_S) for name in ("timeout_s", "give_up_after_s")}
    quickly = server.model_copy(update=limits | {"mode": "requests"})
    with ScratchFolder("doctor") as scratch:
        of_server = decoding.model_copy(update={"endpoint": quickly})
        try:
            engine = EndpointEngine(settings.model_dir, of_server, Path(scratch))
            yield CheckResult("endpoint", "ok", f"{server.url} answers, and serves {engine.server}")
            yield _answer(engine, settings)
        except EndpointGone as error:
            hint = f"This check waits for {quickly.give_up_after_s:g} seconds, a night for {server.give_up_after_s:g}"
            yield CheckResult("answer", "fault", str(error), hint)


def check_model_here(settings: Settings) -> Iterator[CheckResult]:
    """Check the model's layers, its speed, the form of its texts, and the hours that texts of the tables take."""
    engine = yield from _loaded(settings)
    if engine is None:
        return
    yield _layers(engine)
    yield _answer(engine, settings)
    with ScratchFolder("doctor") as scratch:
        path = settings.tables.path
        if path is None:
            write_sample_world(path := Path(scratch), num_users=NUM_TEXTS, num_items=2 * NUM_TEXTS)
        tables = read_tables(path, keep_duplicates=settings.tables.keep_duplicates)
        tasks = _tasks(engine, settings, tables)
    if not tasks:
        text = f"no sampled entity of {path} has a prompt, so nothing was measured"
        yield CheckResult("speed", "warning", text, "`laserbatch doctor` without --model says why")
        return
    decoding = _plain(settings)
    requests = [task.request(place, decoding) for place, task in enumerate(tasks)]
    alone = _write(engine, decoding, requests[:1], SPEED_S)
    together = _write(engine, decoding, requests)
    yield _speed(settings, {1: alone, len(tasks): together})
    yield from _forms(engine, settings, tasks, together)
    if settings.tables.path is not None:
        yield _hours(settings, tables, len(tasks), together)


def _loaded(settings: Settings) -> Generator[CheckResult, None, OwnEngine | None]:
    """Load the model for plain decoding; return None, after a finding that says why, if it is not tried here."""
    folder = settings.model_dir
    is_large = not num_gpus() and 4 * num_stored_values(find_weights(folder)) > MAX_TRIED_BYTES
    if is_large or settings.cluster.ray_address is not None or settings.decoding.gpus_a_worker > 1:
        yield CheckResult("answer", "ok", "no text was tried here: `laserbatch try` writes one")
        return None
    try:
        return OwnEngine(folder, _plain(settings), "auto", torch.get_num_threads(), 1, 1, {}, folder)
    except ModelError as error:
        if settings.decoding.engine == "laserbatch":
            raise
        text = f"no text was tried here, since laserbatch's engine cannot load the model: {error}"
        yield CheckResult("answer", "ok", text)


def _plain(settings: Settings) -> DecodingSettings:
    plain = {"engine": "laserbatch", "vllm": {}, "endpoint": None, "verifier": "greedy", "drafters": (),
             "drafter_options": {}, "max_draft_tokens": 0, "batch_size": NUM_TEXTS, "temperature": 0.0}  # fmt: skip
    return settings.decoding.model_copy(update=plain)


def _layers(engine: OwnEngine) -> CheckResult:
    model = engine.engine.loaded.model
    is_fused = any(getattr(model, name, None) is not None for name in ("fused", "cuda_layers"))
    kinds = f"fused layers support only unquantised models of {', '.join(KNOWN_KINDS)}"
    by = "computed by fused layers" if is_fused else f"computed by transformers' layers, which are slower: {kinds}"
    return CheckResult("architecture", "ok", f"{type(model).__name__}, {by}")


def _answer(engine: TextEngine, settings: Settings) -> CheckResult:
    options = settings.template("item").chat_options
    prompt = encode_chat(engine.tokenizer, QUESTION, None, options, datetime.datetime.now(datetime.UTC).date())
    messages = (("user", QUESTION),)
    request = GenerationRequest("answer", prompt, max_new_tokens=MAX_ANSWER_TOKENS, messages=messages)
    (answer,) = engine.generate("item", [request], _plain(settings))
    if isinstance(answer, GenerationFailure):
        return CheckResult("answer", "warning", f"a short question could not be answered: {answer.reason}")
    if not answer.text.strip() and answer.finish_reason != UNCLOSED_THOUGHTS:
        hint = "A night rejects empty texts: check that the model is instruction-tuned and gets its chat format"
        return CheckResult("answer", "warning", "a short question was answered with an empty text", hint)
    length = counted(len(answer.token_ids), "token")
    shown = f"a short question was answered {answer.text.strip()[:60]!r}, in {length}, "
    shown += f"after {answer.num_thought_tokens} of thoughts, " if answer.num_thought_tokens else ""
    if answer.finish_reason == UNCLOSED_THOUGHTS:
        hint = "Raise decoding.max_new_tokens, or set decoding.thinking: off"
        text = f"thoughts before a short answer did not end in {length}; texts lack them"
        return CheckResult("answer", "warning", text, hint)
    if answer.role_mark:
        hint = "Add the token that ends the model's turns to eos_token_id in its generation_config.json"
        invented = f", and {counted(answer.num_invented, 'token')} that came after it" if answer.num_invented else ""
        shown += f"ended at {answer.role_mark!r}, a role mark or end token that its configuration does not name"
        return CheckResult("answer", "warning", f"{shown}{invented}: texts are cut there", hint)
    if answer.finish_reason == "length":
        hint = "Use an instruction-tuned model, and check that eos_token_id in its generation_config.json names the "
        hint += "token that ends its turns"
        return CheckResult("answer", "warning", f"{shown}and no end token came: texts may run on to their limit", hint)
    ended = "by itself" if answer.end_id is None else f"with {engine.tokenizer.decode([answer.end_id])!r}"
    return CheckResult("answer", "ok", f"{shown}and ended {ended}")


def _tasks(engine: OwnEngine, settings: Settings, tables: Tables) -> list[Task]:
    """Prompts that alternate between users and items, beginning with a user, sampled from their whole tables."""
    labels, most = labels_of(tables.interactions, settings.knowledge.words.events), settings.knowledge.max_prompt_tokens
    sides: dict[Side, list[Task]] = {side: [] for side in SIDES}
    for side, tasks in sides.items():
        template = settings.template(side, labels)
        for shown in SideQuestions(tables, side, template, "").sampled(NUM_TEXTS):
            with suppress(RowError):  # an entity without a prompt is left out
                tasks.append(Task(template, shown, render_shown(template, shown, engine.tokenizer, most)))
    return [task for pair in zip_longest(*sides.values()) for task in pair if task is not None][:NUM_TEXTS]


def _speed(settings: Settings, measured: Mapping[int, Measured]) -> CheckResult:
    speeds = [f"{rate(speed.tokens_per_s)} tokens/s at batch {size}"
              for size, speed in measured.items() if speed.tokens_per_s]  # fmt: skip
    if not speeds:
        text = f"{TEXTS_S:.0f} seconds were too short for the prompts"
        return CheckResult("speed", "warning", text, "Take a smaller model, or a GPU")
    of = settings.tables.path or "the sample world"
    return CheckResult("speed", "ok", f"{' and '.join(speeds)} in plain decoding, with prompts of {of}")


def _forms(engine: OwnEngine, settings: Settings, tasks: Sequence[Task], measured: Measured) -> Iterator[CheckResult]:
    """Yield a finding per side: the number of texts that a night would accept, and why it would refuse the others."""
    from laserbatch.jobs.gates import MAX_UNUSABLE_SHARE
    from laserbatch.jobs.stages.generate import max_share_failed

    limits = (
        f"A night stops if more than {percent(max_share_failed(settings))} of a side's first texts are rejected. It is "
        f"not published if more than {percent(MAX_UNUSABLE_SHARE)} of a side's texts are, or "
        f"{percent(settings.gates.max_failed_share)} of its entities are in quarantine"
    )
    for side in SIDES:
        reasons, num_valid = Counter[str](), 0
        places = [place for place, task in enumerate(tasks) if task.template.side == side]
        for task, text in ((tasks[place], measured.texts.get(place)) for place in places):
            try:
                if isinstance(text, GenerationFailure):
                    raise RowError(text.reason)
                if text is not None:
                    parsed_answer(engine.tokenizer, task.template, task.shown, task.prompt, text)
                    num_valid += 1
            except RowError as error:
                reasons[error.reason.split(":")[0]] += 1
        num_tried = len(places)
        num_ended = num_valid + reasons.total()
        name, in_time = settings.template(side).identity, f"ended within {TEXTS_S:.0f} seconds"
        if not num_ended:
            hint = "`laserbatch try` writes a whole text, however long it takes"
            yield CheckResult("form", "warning", f"{name}: none of {num_tried} {side} texts {in_time}", hint)
            continue
        refused = format_counts(dict(reasons.most_common()))
        message = f"{name}: {num_valid} of {num_ended} {side} texts have the requested form"
        message += f"; rejected: {refused}" * bool(refused)
        message += f"; {num_tried - num_ended} more had not {in_time}" * (num_ended < num_tried)
        is_poor = num_valid < (1 - MAX_UNUSABLE_SHARE) * num_ended
        advice = ". Take a larger model, or a template that asks for less, such as those of kar" * is_poor
        hint = f"{limits}{advice}" if refused else None
        yield CheckResult("form", "warning" if is_poor else "ok", message, hint)


def _hours(settings: Settings, tables: Tables, batch_size: int, measured: Measured) -> CheckResult:
    """Estimate the hours of a first night of plain decoding, from the speed and lengths of the texts just written."""
    if not measured.prompts_s or not measured.tokens_per_s:
        return CheckResult("hours", "warning", "unknown, because the speed is unknown")
    lengths = [len(text.written[0]) for text in measured.texts.values() if isinstance(text, GenerationResult)]
    length = float(np.mean(lengths)) if lengths else settings.decoding.max_new_tokens
    num_users, num_items = tables.users.num_rows, tables.items.num_rows
    total_s = (num_users + num_items) * (measured.prompts_s / batch_size + length / measured.tokens_per_s)
    each = f"{counted(length, 'token')} each" if lengths else f"at most {length} tokens each (decoding.max_new_tokens)"
    message = f"a first night writes {counted(num_users, 'user')} and {counted(num_items, 'item')}, {each}: about "
    message += f"{seconds(total_s)} on this machine at batch {batch_size}, without drafts"
    return CheckResult("hours", "ok", message)


def _write(
    engine: OwnEngine, decoding: DecodingSettings, requests: Sequence[GenerationRequest], speed_s: float | None = None
) -> Measured:
    """Write a text for each request in one batch; a request's id is its place. Unfinished texts are dropped at the end.

    The end comes after `TEXTS_S`, or once the speed has been measured for `speed_s` seconds, unless that is None.
    """
    decoder, measured = engine.engine, Measured()
    decoder.reset_prefix_cache()
    stream = decoder.open_stream(requests, NoDrafter(), verifier_from(decoding), Budget(0, 0.0))
    began_s = now_s = time.perf_counter()
    num_at_first = 0
    try:
        while now_s - began_s < TEXTS_S:
            measured.texts |= {int(failure.request_id): failure for failure in stream.scheduler.admit()}
            live = stream.scheduler.live
            if not live:
                break
            num_tokens = sum(sequence.num_output for sequence in live)
            if measured.prompts_s is None and len(live) + len(measured.texts) == len(requests):
                if all(sequence.num_steps for sequence in live):
                    measured.prompts_s, num_at_first = now_s - began_s, num_tokens
            elif measured.prompts_s is not None and not measured.texts:
                writing_s = now_s - began_s - measured.prompts_s
                measured.tokens_per_s = (num_tokens - num_at_first) / writing_s
                if speed_s is not None and writing_s >= speed_s:
                    break
            for sequence, outcome in decoder.finish_step(decoder.submit_step(stream), stream):
                place = int(sequence.request.request_id)
                measured.texts[place] = engine.result(sequence, outcome)
            now_s = time.perf_counter()
    finally:
        stream.scheduler.close()
    return measured
