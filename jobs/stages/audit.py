"""The stage that compares texts of the night with plainly decoded texts of the same prompts.

A sample of tonight's texts is decoded plainly too, unless the night decodes all of them plainly. The size of the sample
bounds the cost. The plain texts are deleted after the comparison; the manifest keeps figures and the worst few pairs.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.jobs.gates import MIN_PAIRS, badness, repeated_shares
from laserbatch.jobs.stages.generate import generate_plain_sample
from laserbatch.jobs.stages.night import Night
from laserbatch.jobs.stages.workers import NightWorkers
from laserbatch.pipeline.knowledge.names import names_in, texts_of, unfounded
from laserbatch.pipeline.knowledge.questions import shown_of_row
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.atomic import remove_folder
from laserbatch.pipeline.storage.figures import AuditedMean, AuditedText, AuditFigures, SideAudit
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from laserbatch.pipeline.encoding.encoder import TextEncoder

MIN_TEXTS_PER_AUDITED = 10  # at most one text in this many is decoded again
NUM_CASES = 3  # pairs of a side that the report shows
COLUMNS = ["entity_id", "text", "token_ids", "fields_json"]
OFF = "The comparison with plain texts is off: night.num_audited is 0."
LOSSLESS = "Nothing to compare: the verifier accepts only plain decoding's tokens, or no drafts were used tonight."
SAMPLED = "Nothing to compare: the verifier samples, so its texts differ from plain samples of the model by chance."
TOO_FEW = (
    "Too few texts to compare with plain texts were written tonight. Without night.compare_with_plain a side needs "
    f"{MIN_PAIRS * MIN_TEXTS_PER_AUDITED} or more, and night.num_audited must be {MIN_PAIRS} or more."
)
PLAIN_FAILED = (
    "Nothing to compare: plain decoding of the sampled prompts was tried, and each of its texts failed or was rejected."
)


def needs_audited_texts(night: Night) -> bool:
    """Whether the audit needs a sample of tonight's texts to be decoded plainly."""
    is_open = night.manifest.judgement.audit is None and _why_not(night) is None
    return is_open and not night.settings.night.compare_with_plain and bool(_sample_sizes(night))


def generate_audited(night: Night, workers: NightWorkers) -> None:
    """Decode a sample of tonight's texts plainly into `audit/` of the run."""
    rows: dict[Side, pa.Table] = {side: sample.planned for side, sample in _samples(night).items()}
    generate_plain_sample(night, workers, _audit_folder(night), rows)


def audit_texts(night: Night, load_encoder: "Callable[[], TextEncoder]") -> AuditFigures:
    """Compare the sampled texts with plain ones; both are encoded here, by the encoder of features."""
    reason = _why_not(night)
    samples = {} if reason else _samples(night)
    encoder = cache(load_encoder)
    audited: dict[Side, SideAudit | None] = {
        side: _audit(night, side, sample, encoder) for side, sample in samples.items()
    }
    sides: dict[Side, SideAudit] = {side: figures for side, figures in audited.items() if figures is not None}
    if not sides:
        return AuditFigures(reason or (PLAIN_FAILED if samples else TOO_FEW))
    others: list[Side] = [side for side in night.manifest.generation.sides if side not in sides]
    return AuditFigures(None, sides, {side: PLAIN_FAILED if side in samples else TOO_FEW for side in others})


def remove_audited_texts(night: Night) -> None:
    """Remove `audit/` of the run; the manifest keeps the figures of the comparison."""
    if _audit_folder(night).root.is_dir():
        remove_folder(_audit_folder(night).root)


def _why_not(night: Night) -> str | None:
    settings, stats = night.settings, [figures.stats for figures in night.manifest.generation.sides.values()]
    if not settings.night.num_audited:
        return OFF
    if settings.decoding.verifier_samples:
        return SAMPLED
    is_plain = settings.decoding.verifier == "greedy" or not any(side.has_guesses for side in stats)
    is_written = any(side.num_texts for side in stats)
    return LOSSLESS if is_plain and is_written and not settings.night.compare_with_plain else None


def _audit_folder(night: Night) -> RunFolder:
    return RunFolder(night.run.root / "audit")


@dataclass(frozen=True)
class _Sample:
    """Texts of a side that were written tonight, and the plan's rows of the same entities, in the same order."""

    texts: pa.Table  # `COLUMNS`
    planned: pa.Table


def _sample_sizes(night: Night) -> dict[Side, int]:
    """The number of texts to compare on each side; sides with too few texts of tonight are left out."""
    settings = night.settings.night
    share, fewest = (1, 1) if settings.compare_with_plain else (MIN_TEXTS_PER_AUDITED, MIN_PAIRS)
    sides = night.manifest.generation.sides.items()
    written: dict[Side, int] = {side: sum(shard.num_rows for shard in figures.shards) for side, figures in sides}
    most = settings.num_audited
    return {side: size for side, number in written.items() if (size := min(most, number // share)) >= fewest}


def _samples(night: Night) -> dict[Side, _Sample]:
    """Sample texts evenly from the shards of each side; every attempt samples the same texts."""
    samples = {}
    for side, size in _sample_sizes(night).items():
        figures = night.manifest.generation.sides[side]
        ends = np.cumsum([0, *(shard.num_rows for shard in figures.shards)])
        num_texts = int(ends[-1])
        first = int(hashlib.sha256(f"{night.date} {side}".encode()).hexdigest(), 16) % num_texts
        places = (np.arange(size) * num_texts + first) // size  # below num_texts, and no two are the same
        texts, planned = [], []
        for shard, start, end in zip(figures.shards, ends[:-1], ends[1:], strict=True):
            rows = places[(places >= start) & (places < end)] - start
            if len(rows):
                texts.append(read_parquet(night.run.root / shard.file, COLUMNS).take(rows))
                of_shard = read_parquet(night.run.root / "plan" / side / f"{shard.name}.parquet")
                planned.append(_rows_of(of_shard, texts[-1]["entity_id"]))
        samples[side] = _Sample(pa.concat_tables(texts).combine_chunks(), pa.concat_tables(planned).combine_chunks())
    return samples


def _rows_of(table: pa.Table, ids: pa.ChunkedArray) -> pa.Table:
    return table.take(pc.index_in(ids, value_set=table["entity_id"].combine_chunks()))


@dataclass(frozen=True)
class _Measured:
    """Measures of texts, one value per text in each array."""

    num_tokens: np.ndarray
    repetition: np.ndarray
    fields: np.ndarray  # the share of the template's fields that the text has
    names: list[set[str]]  # names without a source, from `_unfounded`

    @classmethod
    def of(cls, texts: pa.Table, names: list[set[str]], num_fields: int) -> "_Measured":
        lengths = pc.list_value_length(texts["token_ids"]).to_numpy()
        num_present = [len(json.loads(fields)) for fields in texts["fields_json"].to_pylist()]
        # A template without fields has one, the free text itself.
        fields = np.minimum(np.array(num_present, np.float64) / max(num_fields, 1), 1)
        return cls(lengths, repeated_shares(texts["token_ids"]), fields, names)


def _audit(night: Night, side: Side, sample: _Sample, load_encoder: "Callable[[], TextEncoder]") -> SideAudit | None:
    """Compare a side's texts; None if no sampled text has a plain counterpart, since plain decoding may fail."""
    folder = night.run.plain if night.settings.night.compare_with_plain else _audit_folder(night)
    ids, parts = sample.texts["entity_id"].combine_chunks(), [sample.texts[:0]]
    for batch in folder.iter_knowledge(side, [*COLUMNS, "is_stale"]):
        is_sampled = pc.and_not(pc.is_in(batch["entity_id"], value_set=ids), batch["is_stale"])
        parts.append(pa.Table.from_batches([batch.filter(is_sampled)]).select(COLUMNS))
    plain = pa.concat_tables(parts).combine_chunks()
    if not plain.num_rows:
        return None
    drafted = _rows_of(sample.texts, plain["entity_id"])
    planned = _rows_of(sample.planned, plain["entity_id"])
    template, both = night.template(side), (drafted, plain)
    texts = drafted["text"].to_pylist() + plain["text"].to_pylist()
    names = _unfounded(night, side, planned, [texts[: len(drafted)], texts[len(drafted) :]])
    num_fields = len(template.factors or template.fields)
    ours, theirs = (_Measured.of(*part, num_fields) for part in zip(both, names, strict=True))
    of_own, of_plain = np.split(load_encoder().encode(texts, lambda num_texts: None).vectors, 2)
    cosines = (of_own * of_plain).sum(axis=1, dtype=np.float64)
    pairs = [
        AuditedText(
            entity_id=entity_id,
            text=texts[row],
            plain_text=texts[len(drafted) + row],
            length_ratio=float(max(ours.num_tokens[row], 1) / max(theirs.num_tokens[row], 1)),
            cosine=float(cosines[row]),
            added_repetition=float(ours.repetition[row] - theirs.repetition[row]),
            lost_fields=float(theirs.fields[row] - ours.fields[row]),
            names=sorted(ours.names[row] - theirs.names[row]),
        )
        for row, entity_id in enumerate(drafted["entity_id"].to_pylist())
    ]
    differing = [pair for pair in pairs if pair.text != pair.plain_text]
    return SideAudit(
        num_pairs=len(pairs),
        num_identical=len(pairs) - len(differing),
        length_ratio=float(ours.num_tokens.sum() / max(theirs.num_tokens.sum(), 1)),
        cosine=float(cosines.mean()),
        repetition=_mean(ours.repetition, theirs.repetition),
        fields=_mean(ours.fields, theirs.fields, worse=-1),
        names=_mean(np.array([*map(len, ours.names)], float), np.array([*map(len, theirs.names)], float)),
        cases=sorted(differing, key=badness, reverse=True)[:NUM_CASES],
    )


def _unfounded(night: Night, side: Side, planned: pa.Table, texts: list[list[str]]) -> list[list[set[str]]]:
    """The names in each text that occur neither in its prompt nor in the table of items.

    `planned` has the planned row of each text; both lists of `texts` have its order.
    """
    rendered = [night.render(side, shown_of_row(row)) for row in planned.drop_columns(["previous_ids"]).to_pylist()]
    prompts = [pa.array([night.tokenizer.decode(prompt.token_ids.tolist())]) for prompt in rendered]
    not_in_prompt = [
        [unfounded(names_in(text), [prompt]) for text, prompt in zip(part, prompts, strict=True)] for part in texts
    ]
    nowhere = unfounded(set().union(*(names for part in not_in_prompt for names in part)), texts_of(night.tables.items))
    return [[names & nowhere for names in part] for part in not_in_prompt]


def _mean(drafted: np.ndarray, plain: np.ndarray, worse: int = 1) -> AuditedMean:
    """Both means, and the excess of `drafted` (its shortfall if `worse` is -1) beyond two standard errors."""
    added = worse * (drafted - plain)
    error = added.std(ddof=1) / math.sqrt(len(added)) if len(added) > 1 else math.inf
    return AuditedMean(float(drafted.mean()), float(plain.mean()), float(max(added.mean() - 2 * error, 0)))
