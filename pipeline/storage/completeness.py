"""Before a run is published: every entity of its tables is in its knowledge or in quarantine, and nothing else is."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.run_folder import RunFolder

NUM_NAMED = 5  # of the ids that a message tells


def require_every_entity(folder: RunFolder, side: Side, entity_ids: pa.ChunkedArray) -> None:
    """Each entity has a record that is not stale, or else a row in quarantine, once; who has a stale one has both.

    `entity_ids` are those of the side's table as the run sees it, each once. Raises WorkspaceError, which names the
    first ids, where it is not so.
    """
    parts: dict[str, list[pa.Array]] = {"fresh": [], "stale": []}
    for batch in folder.iter_knowledge(side, ("entity_id", "is_stale")):
        parts["fresh"].append(batch["entity_id"].filter(pc.invert(batch["is_stale"])))
        parts["stale"].append(batch["entity_id"].filter(batch["is_stale"]))
    ids = {name: pa.chunked_array(chunks, entity_ids.type) for name, chunks in parts.items()}
    ids["quarantined"] = folder.read_quarantine(side, ["entity_id"])["entity_id"]
    rows = {name: pc.index_in(part, value_set=entity_ids) for name, part in ids.items()}
    num_fresh, num_stale, num_quarantined = (
        np.bincount(part.drop_null().to_numpy(), minlength=len(entity_ids)) for part in rows.values()
    )
    faults = {
        "neither in its knowledge nor in quarantine": num_fresh + num_quarantined == 0,
        "there more than once": (num_fresh + num_quarantined > 1) | (num_stale > 1),
        "there with an old text but not in quarantine": num_stale > num_quarantined,
    }
    found = [
        _told(int(is_so.sum()), [entity_ids[int(row)] for row in np.flatnonzero(is_so)[:NUM_NAMED]], fault)
        for fault, is_so in faults.items()
        if is_so.any()
    ]
    for name, part in rows.items():
        if part.null_count:
            found.append(_told(part.null_count, ids[name].filter(part.is_null())[:NUM_NAMED], "not in the table"))
    if found:
        raise WorkspaceError(
            f"{folder.root}: of {len(entity_ids)} {side}s {'; '.join(found)}. Nothing is published. Run the same "
            "command again: what is lost is planned and written again, the rest stays. If this comes back, delete the "
            "folder."
        )


def _told(number: int, ids: object, fault: str) -> str:
    named = ", ".join(str(key) for key in ids)
    return f"{number} are {fault} ({named}{', ...' if number > NUM_NAMED else ''})"
