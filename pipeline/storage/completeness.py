"""The check before publication: every entity of a side is in its texts, in quarantine or postponed."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.run_folder import RunFolder

NUM_NAMED = 5  # ids that a message names


def require_every_entity(run: RunFolder, side: Side, entity_ids: pa.ChunkedArray) -> None:
    """Require for each entity one record that is not stale, or else one row in quarantine or in postponed.

    An entity with a stale record is in one of these too. A postponed entity has a stale record if `has_text` says so.
    `entity_ids` are those of the side's table as the run sees it, each once. Raises WorkspaceError, which names the
    first ids that break the rule.
    """
    parts: dict[str, list[pa.Array]] = {"fresh": [], "stale": []}
    for batch in run.iter_knowledge(side, ("entity_id", "is_stale")):
        parts["fresh"].append(batch["entity_id"].filter(pc.invert(batch["is_stale"])))
        parts["stale"].append(batch["entity_id"].filter(batch["is_stale"]))
    ids = {name: pa.chunked_array(chunks, entity_ids.type) for name, chunks in parts.items()}
    ids["quarantined"] = run.read_quarantine(side, ["entity_id"])["entity_id"]
    postponed = run.read_postponed(side)
    ids["waiting"] = postponed.filter(postponed["has_text"])["entity_id"]
    ids["unasked"] = postponed.filter(pc.invert(postponed["has_text"]))["entity_id"]
    ids = {name: part.cast(entity_ids.type) if not len(part) else part for name, part in ids.items()}
    rows = {name: pc.index_in(part, value_set=entity_ids) for name, part in ids.items()}
    num_fresh, num_stale, num_quarantined, num_waiting, num_without_text = (
        np.bincount(part.drop_null().to_numpy(), minlength=len(entity_ids)) for part in rows.values()
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
