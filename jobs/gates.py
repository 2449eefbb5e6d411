"""Gates between a finished run and its readers: measures values, and judges whether they allow the publication.

Values are measured once and stored in the manifest. Limits are settings that do not belong to the run: after a limit
changes, the same command judges the same values again and generates nothing.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.jobs.formatting import counted, decimal, percent, ratio
from laserbatch.jobs.settings import GateSettings
from laserbatch.pipeline.encoding.schema import vectors_of
from laserbatch.pipeline.knowledge.records import knowledge_schema
from laserbatch.pipeline.planning.refresh import EVIDENCE
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.figures import AuditedText, AuditFigures, CtrFigures, GateFigures, SideFigures
from laserbatch.pipeline.storage.manifest import RunManifest
from laserbatch.pipeline.storage.parquet import iter_parquet, parquet_files
from laserbatch.pipeline.storage.run_folder import RunFolder

MIN_TEXTS_JUDGED = 32  # fewer texts decide nothing
MAX_TEXTS_JUDGED = 10_000  # gates read the tokens of at most this many texts a side, evenly spaced
MAX_ROW_GROUPS = 8  # gates read the vectors of these texts from at most this many row groups, evenly spaced
EMPTY_TOKENS = 3  # a text of fewer tokens counts as empty
TOO_FEW = "too few texts to judge"
MIN_PAIRS = 16  # fewer pairs of a text and its plain version decide nothing
NGRAM = 4  # tokens
MAX_SHARE_REPEATED = 0.5  # a text with a larger share of repeated n-grams counts as repetitive
NORM_ERROR = 0.01  # a vector counts as normalised if its length differs from 1 by at most this
MAX_SHARE_MISSING = 0.2  # share of the accepted tokens forecast by replays that may be missing
MIN_COVERAGE = 0.9  # number of a side's texts, as a share of their number in the run before
MAX_UNUSABLE_SHARE = 0.3  # share of the texts written tonight that cannot be parsed or are rejected
MAX_CUT_SHARE = 0.5  # share of tonight's texts that are empty or end at the token limit
MAX_REPETITIVE_SHARE = 0.1  # share of tonight's texts that mostly repeat themselves
MAX_LENGTH_FACTOR = 1.5  # between the mean lengths of rewritten texts and the previous texts of the same entities
MIN_COSINE = 0.3  # mean cosine between the vectors of rewritten texts and of these previous texts
# Audited texts against plain texts of the same prompts; for the last three, two standard errors are subtracted first.
MAX_AUDIT_LENGTH_FACTOR = 1.3
MIN_AUDIT_COSINE = 0.6
MAX_ADDED_REPETITION = 0.05  # added to the share of its n-grams that a text repeats
MAX_LOST_FIELDS = 0.05  # share of the requested fields
MAX_ADDED_NAMES = 0.5  # names per text that occur neither in its prompt nor in the catalogue
MIN_STEPS = 200  # fewer steps do not decide whether a forecast held
PROVENANCE = ("template", "model_id", "decoding_json")  # texts that differ in one of these are not comparable


@dataclass(frozen=True)
class _Gate:
    """The meaning of a gate's value, its limit, and what follows beyond the limit."""

    message: str  # the value in words; `{value}` is replaced by the result of `shown`
    limit: str | float | None  # the name of an option, or the limit itself; None: it is measured with the value
    consequence: str | None = None  # the option that decides what follows beyond the limit
    is_least: bool = False  # True: values below the limit are beyond it; False: values above
    only_warns: bool = False
    share: bool = True  # shown as a percentage


GATES = {
    "coverage": _Gate("the number of texts is {value} of the previous run's", MIN_COVERAGE, is_least=True),
    "quarantine": _Gate("{value} of the entities are in quarantine", "max_failed_share"),
    "unusable": _Gate("{value} of the written texts could not be used", MAX_UNUSABLE_SHARE),
    "cut": _Gate("{value} of the written texts are empty or cut at the token limit", MAX_CUT_SHARE),
    "repetition": _Gate("{value} of the written texts mostly repeat themselves", MAX_REPETITIVE_SHARE),
    "length": _Gate("the mean length of rewritten texts differs from the previous one by a factor of {value}",
                    MAX_LENGTH_FACTOR, share=False),
    "vector norm": _Gate("{value} of the vectors do not have length 1", 0.0),
    "vector drift": _Gate("vectors of rewritten texts have a mean cosine of {value} with the previous vectors",
                          MIN_COSINE, is_least=True, share=False),
    "audit": _Gate("", None),  # never has a value, only the reason why texts were not compared with plain ones
    "length beside plain": _Gate("the length of texts differs from that of plain texts by a factor of {value}",
                                 MAX_AUDIT_LENGTH_FACTOR, "audit", share=False),
    "cosine with plain": _Gate("vectors of texts have a mean cosine of {value} with those of plain texts",
                               MIN_AUDIT_COSINE, "audit", is_least=True, share=False),
    "added repetition": _Gate("texts repeat at least {value} more of themselves than plain texts",
                              MAX_ADDED_REPETITION, "audit"),
    "lost fields": _Gate("texts lack at least {value} of the requested fields that plain texts have",
                         MAX_LOST_FIELDS, "audit"),
    "added names": _Gate("texts have at least {value} more names without a source in prompt or catalogue than "
                         "plain texts", MAX_ADDED_NAMES, "audit", share=False),
    "speed": _Gate("the number of accepted draft tokens is {value} of the forecast", 1 - MAX_SHARE_MISSING,
                   is_least=True, only_warns=True),
    "AUC": _Gate("AUC with these texts is at most {value} above AUC with plain texts", None, "auc", is_least=True,
                 share=False),
}  # fmt: skip
VERDICTS = {"stop": "blocks", "warn": "warns", "ignore": "passes"}  # by the value of `gates.audit` or `gates.auc`


def judge(measured: Sequence[GateFigures], settings: GateSettings) -> list[GateFigures]:
    """Add limits and verdicts to the values: "passes", "warns" or "blocks"; a gate without a value passes."""
    judged = []
    for figures in measured:
        gate, value, verdict = GATES[figures.gate], figures.value, "passes"
        limit = getattr(settings, gate.limit) if isinstance(gate.limit, str) else gate.limit
        limit = figures.limit if limit is None else limit
        if value is not None and limit is not None and (value < limit if gate.is_least else value > limit):
            verdict = "blocks" if gate.consequence is None else VERDICTS[getattr(settings, gate.consequence)]
            if gate.only_warns or not figures.can_block:
                verdict = "warns"
        judged.append(replace(figures, limit=limit, verdict=verdict))
    return judged


def blocking(gates: Sequence[GateFigures]) -> list[GateFigures]:
    return [figures for figures in gates if figures.verdict == "blocks"]


def warning(gates: Sequence[GateFigures]) -> list[GateFigures]:
    """The gates that only warn although an option could let them block the publication."""
    return [figures for figures in gates if figures.verdict == "warns" and GATES[figures.gate].consequence is not None]


def has_option(figures: GateFigures) -> bool:
    """Whether an option sets the limit of a gate, or what follows beyond it."""
    gate = GATES[figures.gate]
    return isinstance(gate.limit, str) or gate.consequence is not None


def gate_sentence(figures: GateFigures) -> str:
    gate = GATES[figures.gate]
    where = "" if figures.side is None else f"{figures.side}s: "
    if figures.value is None:
        return f"{where}{figures.reason}"
    message = gate.message.format(value=shown(figures, figures.value))
    option = f"gates.{gate.limit}" if isinstance(gate.limit, str) else "the limit"
    note = f"; {figures.reason}" if figures.reason else ""
    note += f"; gates.{gate.consequence} decides what follows" if gate.consequence is not None else ""
    return f"{where}{message} ({option} is {shown(figures, figures.limit)}{note})"


def shown(figures: GateFigures, value: float | None) -> str:
    """A value or limit of a gate as text."""
    return percent(value, 1) if GATES[figures.gate].share else decimal(value, 3)


def accepted_share(side: SideFigures) -> float | None:
    """The acceptance length divided by its forecast; None with few steps or without a forecast."""
    if side.forecast_acceptance <= 0 or side.stats.num_steps < MIN_STEPS:
        return None
    return ratio(side.stats.acceptance_length, side.forecast_acceptance)


def measure(manifest: RunManifest, run: RunFolder, previous: RunFolder | None) -> list[GateFigures]:
    """Measure the values that the gates judge, from the manifest and a sample of tonight's texts of both sides."""
    before = None if previous is None else unless_damaged(previous.load_manifest)
    measured = [part for side in manifest.generation.sides for part in _of_side(side, manifest, run, before, previous)]
    return [*measured, *_audited(manifest.judgement.audit), _auc(manifest.judgement.ctr)]


def _audited(audit: AuditFigures | None) -> Iterator[GateFigures]:
    if audit is None or not audit.sides:
        yield GateFigures("audit", reason=(audit and audit.skipped) or "not compared with plain texts")
        return
    for side, comparison in audit.sides.items():
        if comparison.num_pairs < MIN_PAIRS:
            yield GateFigures("audit", side, reason="too few texts were compared with plain texts to judge")
            continue
        factor = max(comparison.length_ratio, 1 / max(comparison.length_ratio, 1e-9))
        values = {
            "length beside plain": factor,
            "cosine with plain": comparison.cosine,
            "added repetition": comparison.repetition.surely_worse,
            "lost fields": comparison.fields.surely_worse,
            "added names": comparison.names.surely_worse,
        }
        yield from (GateFigures(gate, side, value) for gate, value in values.items())
    yield from (GateFigures("audit", side, reason=reason) for side, reason in audit.skipped_sides.items())


def badness(pair: AuditedText) -> float:
    """The largest measure of a pair, each in units of its limit in the audit gates."""
    return max(
        abs(math.log(pair.length_ratio)) / math.log(MAX_AUDIT_LENGTH_FACTOR),
        (1 - pair.cosine) / (1 - MIN_AUDIT_COSINE),
        pair.added_repetition / MAX_ADDED_REPETITION,
        pair.lost_fields / MAX_LOST_FIELDS,
        len(pair.names) / MAX_ADDED_NAMES,
    )


def _auc(figures: CtrFigures) -> GateFigures:
    """The AUC gate, from the comparison with plain texts of this run, or of an earlier run that can be judged."""
    verdict = figures.equivalence.get("all")
    if verdict is None or verdict.high is None:
        why = figures.skipped or "no interval against plain texts (too few seeds or test rows)"
        return GateFigures("AUC", reason=why)
    note = "" if figures.judged_run_id is None else f"measured on {age_of_judged(figures)}"
    return GateFigures("AUC", value=verdict.high, limit=-verdict.margin, reason=note)


def age_of_judged(figures: CtrFigures) -> str:
    """The id and the age of the earlier run that was judged."""
    return f"run {figures.judged_run_id}, {counted(figures.judged_age_days, 'day')} older"


def _of_side(
    side: Side, manifest: RunManifest, run: RunFolder, before: RunManifest | None, previous: RunFolder | None
) -> Iterator[GateFigures]:
    def gate(name: str, value: float | None, why_not: str = TOO_FEW) -> GateFigures:
        return GateFigures(name, side, reason=why_not) if value is None else GateFigures(name, side, float(value))

    figures, features = manifest.generation.sides[side], manifest.features.get(side)
    earlier = None if before is None else before.features.get(side)
    num_before = 0 if earlier is None else earlier.num_rows
    num_texts = 0 if features is None else features.num_rows
    if before is not None and _least_evidence(manifest) > _least_evidence(before):  # a raised limit drops texts
        num_texts += figures.postponed.get(EVIDENCE, 0) - before.generation.sides[side].postponed.get(EVIDENCE, 0)
    coverage = num_texts / num_before if num_before >= MIN_TEXTS_JUDGED else None
    yield gate("coverage", coverage, "no previous run with enough texts")
    failed = figures.num_quarantined / max(figures.num_entities, 1)
    reasons = ", ".join(f"{reason} ({number})" for reason, number in figures.quarantine_reasons.items())
    yield GateFigures("quarantine", side, failed, reason=reasons)
    num_lost = sum(shard.num_quarantined for shard in figures.shards)
    num_written = num_lost + sum(shard.num_rows for shard in figures.shards)
    yield gate("unusable", num_lost / num_written if num_written >= MIN_TEXTS_JUDGED else None)
    texts = _sample(run, figures)
    enough = texts.num_rows >= MIN_TEXTS_JUDGED
    lengths = texts["num_tokens"].to_numpy()
    is_cut = pc.equal(texts["finish_reason"], "length").to_numpy().astype(bool) | (lengths < EMPTY_TOKENS)
    yield gate("cut", is_cut.mean() if enough else None)
    is_repetitive = repeated_shares(texts["token_ids"]) > MAX_SHARE_REPEATED
    yield gate("repetition", is_repetitive.mean() if enough else None)
    ids, vectors = _vectors(run, side, texts["entity_id"].combine_chunks(), MAX_ROW_GROUPS)
    norms = np.linalg.norm(vectors, axis=1)
    is_wrong = ~(np.abs(norms - 1) <= NORM_ERROR)  # NaN counts as wrong
    yield gate("vector norm", is_wrong.mean() if enough else None)
    same_encoder = features is not None and earlier is not None and features.encoder == earlier.encoder
    yield from _drift(side, texts, ids, vectors, previous, same_encoder)
    yield gate("speed", accepted_share(figures), "no forecast to compare with")


def _least_evidence(manifest: RunManifest) -> int:
    return manifest.origin.settings.get("refresh", {}).get("min_interactions", 0)


def _drift(
    side: Side, texts: pa.Table, ids: pa.Array, vectors: np.ndarray, previous: RunFolder | None, same_encoder: bool
) -> Iterator[GateFigures]:
    """Compare rewritten texts with the last texts of the same entities; only warns after a change of provenance."""
    names = ["entity_id", "num_tokens", *PROVENANCE]
    judged = texts["entity_id"].combine_chunks()
    parts = [texts.select(names)[:0]]
    are_enough = len(judged) >= MIN_TEXTS_JUDGED
    for batch in iter_parquet(previous.knowledge_folder(side), names) if previous and are_enough else ():
        if batch.schema.field("entity_id").type == judged.type:
            parts.append(pa.Table.from_batches([batch.filter(pc.is_in(batch["entity_id"], value_set=judged))]))
    last = pa.concat_tables(parts)
    if previous is None or last.num_rows < MIN_TEXTS_JUDGED:
        yield from (GateFigures(name, side, reason=TOO_FEW) for name in ("length", "vector drift"))
        return
    now = texts.take(pc.index_in(last["entity_id"], value_set=judged))
    alike = np.logical_and.reduce([pc.equal(now[name], last[name]).to_numpy() for name in PROVENANCE])
    is_comparable = bool(alike.mean() > 0.5)
    note = "" if is_comparable else "template, model or decoding options changed, so this gate only warns"
    ratio = float(now["num_tokens"].to_numpy().mean() / max(last["num_tokens"].to_numpy().mean(), 1e-9))
    factor = max(ratio, 1 / max(ratio, 1e-9))
    yield GateFigures("length", side, factor, reason=note, can_block=is_comparable)
    if not same_encoder:
        yield GateFigures("vector drift", side, reason="the previous vectors come from another encoder")
        return
    both = ids.filter(pc.is_in(ids, value_set=last["entity_id"].combine_chunks()))
    if len(both) < MIN_TEXTS_JUDGED:
        yield GateFigures("vector drift", side, reason=TOO_FEW)
        return
    earlier_ids, earlier = _vectors(previous, side, both)
    row_of = pc.index_in(earlier_ids, value_set=ids).to_numpy()
    cosine = float((vectors[row_of] * earlier).sum(axis=1).mean())
    yield GateFigures("vector drift", side, cosine, reason=note, can_block=is_comparable)


def _sample(run: RunFolder, figures: SideFigures) -> pa.Table:
    """Every n-th text that the run wrote, so that at most `MAX_TEXTS_JUDGED` texts are in memory."""
    names = ["entity_id", "num_tokens", "token_ids", "finish_reason", *PROVENANCE]
    stride = -(-sum(shard.num_rows for shard in figures.shards) // MAX_TEXTS_JUDGED)
    parts, first = [], 0
    for shard in figures.shards:
        for batch in iter_parquet(run.root / shard.file, names):
            parts.append(pa.Table.from_batches([batch]).take(np.arange(first, batch.num_rows, stride)))
            first = (first - batch.num_rows) % stride
    parts = parts or [knowledge_schema(pa.string()).empty_table().select(names)]
    return pa.concat_tables(parts).combine_chunks()


def _vectors(
    run: RunFolder, side: Side, entity_ids: pa.Array, max_groups: int | None = None
) -> tuple[pa.Array, np.ndarray]:
    """Ids and vectors, float32 (n, dim), of entities, in file order, from at most `max_groups` row groups."""
    key, ids, rows = f"{side}_id", [entity_ids[:0]], [np.zeros((0, 0), np.float32)]
    files = parquet_files(run.features_path(side)) if len(entity_ids) else []
    groups = [(path, number) for path in files for number, batch in enumerate(iter_parquet(path, [key]))
              if pc.any(pc.is_in(batch[key], value_set=entity_ids)).as_py()]  # fmt: skip
    stride = -(-len(groups) // (max_groups or max(len(groups), 1))) or 1
    for path, number in groups[::stride]:
        for batch in iter_parquet(path, [key, "vector"], [number]):
            selected = batch.filter(pc.is_in(batch[key], value_set=entity_ids))
            ids.append(selected[key])
            rows.append(vectors_of(selected))
    return pa.concat_arrays(ids), np.concatenate(rows[1:] or rows)


def repeated_shares(token_ids: pa.ChunkedArray) -> np.ndarray:
    """Each text's share of n-grams that repeat an earlier one of the text, float64[num_texts]; 0 without n-grams."""
    lists = token_ids.combine_chunks()
    flat, lengths = lists.flatten().to_numpy().astype(np.uint64), pc.list_value_length(lists).to_numpy()
    offsets = np.cumsum(lengths) - lengths
    num_ngrams = np.maximum(lengths - NGRAM + 1, 0)
    if not num_ngrams.sum():
        return np.zeros(len(lengths))
    text = np.repeat(np.arange(len(lengths)), num_ngrams)
    starts = np.arange(len(text)) - np.repeat(np.cumsum(num_ngrams) - num_ngrams, num_ngrams) + offsets[text]
    hashed = np.zeros(len(text), np.uint64)
    for place in range(NGRAM):
        hashed = (hashed ^ flat[starts + place]) * np.uint64(0x9E3779B97F4A7C15)
        hashed ^= hashed >> np.uint64(29)
    order = np.lexsort((hashed, text))
    is_first = np.ones(len(text), bool)
    is_first[1:] = (hashed[order][1:] != hashed[order][:-1]) | (text[order][1:] != text[order][:-1])
    num_distinct = np.bincount(text[order][is_first], minlength=len(lengths))
    return 1 - num_distinct / np.maximum(num_ngrams, 1) - (num_ngrams == 0)
