"""The check before publication: every entity of a side is in its texts, in quarantine or postponed."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.mapped import mapped_column
from laserbatch.pipeline.storage.parquet import large_type
from laserbatch.pipeline.storage.run_folder import RunFolder

NUM_NAMED = 5  # ids that a message names
MAX_COUNT = 9  # more records of one entity are no other fault


def require_every_entity(run: RunFolder, side: Side, entity_ids: pa.ChunkedArray) -> None:
    """Require for each entity one record that is not stale, or else one row in quarantine or in postponed.

    An entity with a stale record is in one of these too. A postponed entity has a stale record if `has_text` says so.
    `entity_ids` are those of the side's table as the run sees it, each once. Raises WorkspaceError, which names the
    first ids that break the rule.
    """
    postponed, quarantined = run.read_postponed(side), run.read_quarantine(side, ["entity_id"])
    ids = {
        "fresh": mapped_column(_ids_in_knowledge(run, side, is_stale=False), run.root),
        "stale": mapped_column(_ids_in_knowledge(run, side, is_stale=True), run.root),
        "quarantined": quarantined["entity_id"],
        "waiting": postponed.filter(postponed["has_text"])["entity_id"],
        "unasked": postponed.filter(pc.invert(postponed["has_text"]))["entity_id"],
    }
    entity_ids = entity_ids.cast(large_type(entity_ids.type))
    rows = {}
    for name, part in ids.items():
        ids[name] = part.cast(entity_ids.type if not len(part) else large_type(part.type))
        rows[name] = pc.index_in(ids[name], value_set=entity_ids)
    num_fresh, num_stale, num_quarantined, num_waiting, num_without_text = (
        np.minimum(np.bincount(part.drop_null().to_numpy(), minlength=len(entity_ids)), MAX_COUNT).astype(np.int8)
        for part in rows.values()
    )
    num_places = num_fresh + num_quarantined + num_waiting + num_without_text
    faults = {
        "neither in its knowledge nor in quarantine": (num_places == 0) | (num_waiting > num_stale),
        "there more than once": (num_places > 1) | (num_stale > 1),
        "there with an old text but neither in quarantine nor postponed": num_stale > num_quarantined + num_waiting,
    }
    violations = [(fault, entity_ids.filter(pa.array(is_so))) for fault, is_so in faults.items()]
    violations += [("not in the table", ids[name].filter(part.is_null())) for name, part in rows.items()]
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


def _ids_in_knowledge(run: RunFolder, side: Side, is_stale: bool) -> Iterator[pa.Array]:
    """The ids of the records that are stale, or of those that are not."""
    for batch in run.iter_knowledge(side, ("entity_id", "is_stale")):
        yield batch["entity_id"].filter(batch["is_stale"] if is_stale else pc.invert(batch["is_stale"]))
