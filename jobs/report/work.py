"""The sections about work and cost, gates, sample texts, and inputs."""

from collections.abc import Mapping
from functools import partial

import yaml

from laserbatch.jobs.formatting import count, decimal, percent, ratio, seconds
from laserbatch.jobs.gates import gate_sentence, shown
from laserbatch.jobs.report.blocks import TONIGHT, Block, Folded, Note, Sample, Section, Series, Table, stacked_shares
from laserbatch.jobs.report.sides import SIDE_LABELS, SideReport
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.storage.figures import EndpointFigures, ExternalCorpusFigures, SampleText, WorkerFigures
from laserbatch.pipeline.storage.manifest import RunManifest

OUTCOMES = (
    ("num_generated", "generated", TONIGHT),
    ("num_carried_over", "carried over", "#a9cbe8"),
    ("num_waiting", "waiting", "#d7dde4"),
    ("num_without_text", "without a text", "#8d99a6"),
    ("num_quarantined", "quarantined", "#e69f00"),
)
WRITING = ("generate", "generate plain", "generate audited")  # stages in which workers write
DESCRIBED = ("inputs", "model", "features", "machine", "settings")


def work_section(manifest: RunManifest, sides: list[SideReport]) -> Section:
    busy = [side for side in sides if side.figures.num_entities]
    blocks: list[Block] = [Note(f"{side.label}: there were no entities.") for side in sides if side not in busy]
    if not sides:
        blocks.append(Note("No side was finished in this run."))
    if num_copies := manifest.origin.inputs.get("interactions", {}).get("num_copies"):
        blocks.append(Note(f"Interactions left out as exact copies of another one: {count(num_copies)}."))
    if busy:
        series = [Series(name, [getattr(side.figures, key) for side in busy], colour) for key, name, colour in OUTCOMES]
        measured, caption = "share of the side's entities", ""
        for side in busy:
            counts = ", ".join(f"{count(getattr(side.figures, key))} {name}" for key, name, _ in OUTCOMES)
            caption += f"{side.label}: {counts} of {count(side.figures.num_entities)}. "
        caption += "Carried over: prompt, template, model and decoding options are the same as for the last text."
        labels = [side.label for side in busy]
        blocks.append(stacked_shares("Entities by outcome", labels, series, measured, caption))
    if manifest.stages:
        rows = [{"Stage": name, "Wall time": seconds(wall_s)} for name, wall_s in manifest.stages.items()]
        caption = "In the order of the run; the times of all attempts at the run are added up."
        blocks.append(Table("Time by stage", rows, ("Stage",), caption))
    else:
        blocks.append(Note("No stage was timed."))
    generation = manifest.generation
    if generation.endpoint is not None:  # the only worker waits for the server, so its hours cost nothing
        blocks.append(_endpoint(generation.endpoint, generation.external_corpus))
    elif generation.workers is not None and manifest.stages and busy:
        blocks.append(_cost(generation.workers, manifest.stages, busy))
    reasons = []
    for side in sides:
        for why, number in sorted(side.figures.quarantine_reasons.items(), key=lambda item: (-item[1], item[0])):
            share = percent(ratio(number, side.figures.num_entities))
            reasons.append({"Side": side.label, "Reason": why, "Rows": count(number), "Share of the side": share})
    caption = "These entities got no new text tonight; the run's quarantine folder has each row with its reason."
    if reasons:
        blocks.append(Table("Quarantined rows by reason", reasons, ("Side", "Reason"), caption))
    else:
        blocks.append(Note("No row went to quarantine."))
    return Section("work", "What was done and skipped", blocks)


def gates_section(manifest: RunManifest) -> Section:
    if not manifest.judgement.gates:
        return Section("gates", "Gates", [Note("This run was not judged.")])
    judged = [gate for gate in manifest.judgement.gates if gate.value is not None]
    judged.sort(key=lambda gate: (*SIDES, None).index(gate.side))
    rows = []
    for gate in judged:
        row = {
            "Side": "Both" if gate.side is None else SIDE_LABELS[gate.side],
            "Gate": gate.gate,
            "Value": shown(gate, gate.value),
            "Limit": shown(gate, gate.limit),
        }
        rows.append(row | {"Verdict": gate.verdict, "Meaning": gate_sentence(gate)})
    caption = "If a gate blocks, the run is not published and the next night does not build on it."
    strong = [number for number, gate in enumerate(judged) if gate.verdict != "passes"]
    table = Table("Values judged before publication", rows, ("Side", "Gate", "Verdict", "Meaning"), caption, strong)
    reasons: dict[str, list[str]] = {}
    for gate in manifest.judgement.gates:
        if gate.value is None:
            reasons.setdefault(gate_sentence(gate), []).append(gate.gate)
    not_judged = "; ".join(f"{', '.join(gates)} ({reason})" for reason, gates in reasons.items())
    return Section("gates", "Gates", [table, Note(f"Not judged: {not_judged}.")] if not_judged else [table])


def _cost(workers: WorkerFigures, stages: Mapping[str, float], sides: list[SideReport]) -> Table:
    """Worker-hours, and money if there is a price, of the night, per million entities and per million written texts."""
    hours = workers.num_billed * sum(stages.get(name, 0.0) for name in WRITING) / 3600
    price = workers.price_per_hour
    money = None if price is None else price * sum(stages.values()) / 3600
    kind = "GPU-hours" if workers.device == "cuda" else "Worker-hours"
    rows = [{"Per": "night", kind: decimal(hours, 3), "Money": decimal(money)}]
    for name, figure in (("million entities", "num_entities"), ("million written texts", "num_generated")):
        number = sum(getattr(side.figures, figure) for side in sides)
        shown_hours, shown_money = ratio(1e6 * hours, number), None if money is None else ratio(1e6 * money, number)
        rows.append({"Per": name, kind: decimal(shown_hours, 1), "Money": decimal(shown_money)})
    caption = "Hours: all workers, while texts were written. "
    caption += "Set cluster.price_per_hour to see money." if money is None else "Money: the cluster, for all stages."
    return Table("Cost", rows, ("Per",), caption)


def _endpoint(server: EndpointFigures, corpus: ExternalCorpusFigures | None) -> Table:
    """The requests, tokens and cost of the server, over all attempts at the run."""
    row = {
        "Server": server.url,
        "Answers": count(server.num_requests),
        "Retries": count(server.num_retries),
        "Prompt tokens": count(server.num_prompt_tokens),
        "Cached prompt tokens": count(server.num_cached_tokens),
        "Answer tokens": count(server.num_completion_tokens),
        "Money": decimal(server.cost, 4),
    }
    names = "; ".join(server.answered_by) or "nothing, because it sent no answer"
    caption = f"Counted by the server, which names itself {names}. "
    caption += "Set decoding.endpoint.price_per_million_tokens to see money. " if server.cost is None else ""
    if corpus is not None:
        size = f"{count(corpus.num_texts)} texts of the night before ({count(corpus.num_tokens)} tokens)"
        caption += f"It drafted from {size}; {count(corpus.num_left_out)} texts were left out. {corpus.problem}"
    return Table("Answers of the server", [row], ("Server",), caption)


def samples_section(sides: list[SideReport]) -> Section:
    samples = [_sample(side, sample) for side in sides for sample in side.figures.samples]
    return Section("samples", "Sample texts", samples or [Note("No sample texts were kept in this run.")])


def _sample(side: SideReport, sample: SampleText) -> Sample:
    facts = [f"pool group {sample.group}" if sample.group else "no pool group"]
    if sample.tokens_per_step:  # a server does not report steps
        drafted = sum(len(span.text) for span in sample.spans if span.source != "target")
        facts.append(f"{decimal(sample.tokens_per_step)} tokens per step")
        facts.append(f"{percent(ratio(drafted, len(sample.text)))} of its characters drafted")
    return Sample(f"{side.name.capitalize()} {sample.entity_id}", " · ".join(facts), sample)


def provenance_section(manifest: RunManifest) -> Section:
    values = manifest.as_json()
    dump = partial(yaml.safe_dump, sort_keys=False, allow_unicode=True, width=10**6)
    blocks: list[Block] = [
        Folded(key.capitalize(), dump(values[key])) if values[key] else Note(f"{key.capitalize()}: not recorded.")
        for key in DESCRIBED
    ]
    return Section("provenance", "Inputs, settings, machine", blocks, f"Settings hash {manifest.origin.settings_hash}.")
