"""The check before publication: every entity of a side is in its texts, in quarantine or postponed."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.retrieval_pools.ids import IdCodes

NUM_NAMED = 5  # ids that a message names
PLACES = ("fresh", "stale", "quarantined", "waiting", "without text")  # of an entity's rows in a run
MAX_COUNT = 9  # more records of one entity are no other fault


def require_every_entity(run: RunFolder, side: Side, entity_ids: pa.ChunkedArray) -> None:
    """Require for each entity one record that is not stale, or else one row in quarantine or in postponed.

    An entity with a stale record is in one of these too. A postponed entity has a stale record if `has_text` says so.
    `entity_ids` are those of the side's table as the run sees it, each once. Raises WorkspaceError, which names the
    first ids that break the rule.
    """
    known = IdCodes(entity_ids.type)
    for chunk in entity_ids.chunks:
        known.add(chunk)
    counts = {name: np.zeros(len(known), np.int8) for name in PLACES}
    unknown: dict[str, list[pa.Array]] = {name: [] for name in PLACES}
    for name, ids in _ids_by_place(run, side):
        rows = known.find(ids) if ids.type == known.kind else np.full(len(ids), -1)
        if (rows < 0).any():
            unknown[name].append(ids.filter(pa.array(rows < 0)))
        there, times = np.unique(rows[rows >= 0], return_counts=True)
        counts[name][there] = np.minimum(counts[name][there] + times, MAX_COUNT)
    num_fresh, num_stale, num_quarantined, num_waiting, num_without_text = counts.values()
    num_places = num_fresh + num_quarantined + num_waiting + num_without_text
    faults = {
        "neither in its knowledge nor in quarantine": (num_places == 0) | (num_waiting > num_stale),
        "there more than once": (num_places > 1) | (num_stale > 1),
        "there with an old text but neither in quarantine nor postponed": num_stale > num_quarantined + num_waiting,
    }
    violations = [(fault, known.values().filter(pa.array(is_so))) for fault, is_so in faults.items()]
    violations += [("not in the table", pa.chunked_array(parts)) for parts in unknown.values() if parts]
    problems = []
    for fault, violating_ids in violations:
        if len(violating_ids):
            named = ", ".join(map(str, violating_ids[:NUM_NAMED])) + (", ..." if len(violating_ids) > NUM_NAMED else "")
            problems.append(f"{len(violating_ids)} are {fault} ({named})")
    if problems:
        raise WorkspaceError(
            f"{run.root}: of {len(entity_ids)} {side}s {'; '.join(problems)}. Nothing is published. Run the same "
            "command again: what is lost is planned and written again, the rest stays. If this comes back, delete "
            "the folder."
        )


def _ids_by_place(run: RunFolder, side: Side) -> Iterator[tuple[str, pa.Array]]:
    """The ids that a run has of a side, a part at a time, each with one of `PLACES`."""
    for batch in run.iter_knowledge(side, ("entity_id", "is_stale")):
        yield "fresh", batch["entity_id"].filter(pc.invert(batch["is_stale"]))
        yield "stale", batch["entity_id"].filter(batch["is_stale"])
    postponed = run.read_postponed(side)
    for name, ids in (
        ("quarantined", run.read_quarantine(side, ["entity_id"])["entity_id"]),
        ("waiting", postponed.filter(postponed["has_text"])["entity_id"]),
        ("without text", postponed.filter(pc.invert(postponed["has_text"]))["entity_id"]),
    ):
        yield from ((name, chunk) for chunk in ids.chunks)
