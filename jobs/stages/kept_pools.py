"""What of last night's pools holds for tonight's: routers while little has changed, all files where nothing has.

A router that is kept knows the entities of its fit: those that came later have the groups of their attributes.
"""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.jobs.stages.night import Night
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.atomic import read_json
from laserbatch.pipeline.storage.manifest import PoolBuilt, RunManifest
from laserbatch.pipeline.tables.schema import TABLE_NAMES
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.routing.embeddings import id_column
from laserbatch.retrieval_pools.routing.router import Router

FIT_NAME = "fit.json"
MOST_DRIFT = 0.05  # of the rows that routers were fitted on, and of the entities that they have groups of


def describe_fit(night: Night) -> dict[str, Any]:
    """What routers fitted now would come from: the numbers of rows, and what must not differ at all."""
    tables, routing = night.tables, night.settings.routing
    num_rows = {name: getattr(tables, name).num_rows for name in TABLE_NAMES}
    return {
        "num_rows": num_rows,
        "routing": routing.model_dump(mode="json"),
        "seed": night.settings.seed,
        "columns": {side: str(tables.entities(side).schema.remove_metadata()) for side in SIDES},
        "embeddings": {key: told["sha256"] for key, told in night.manifest.inputs.items() if key not in TABLE_NAMES},
    }


def kept_routers(night: Night, version: str, now: dict[str, Any]) -> tuple[dict[Side, Router], dict[str, Any]] | None:
    """The routers of a version, and what they were fitted on; None where they are to be fitted again.

    That is where settings, columns or own embeddings differ, where more than `MOST_DRIFT` of the rows of a table have
    come or gone since the fit, or of the entities that have a collaborative group have gone.
    """
    folder = night.pools.folder(version) / "router"
    try:
        fit = read_json(folder / FIT_NAME)
        routers = {side: Router.load(folder / side) for side in SIDES}
    except (WorkspaceError, PoolError, OSError):
        return None
    then = fit["num_rows"]
    if {**fit, "num_rows": None} != {**now, "num_rows": None} or then.keys() != now["num_rows"].keys():
        return None
    if any(abs(now["num_rows"][name] - count) > MOST_DRIFT * count for name, count in then.items()):
        return None
    if not all(_knows(router, night.tables.entities(side)) for side, router in routers.items()):
        return None
    return routers, fit


def _knows(router: Router, entities: pa.Table) -> bool:
    known, ids = router.collaborative.ids, id_column(entities, f"{router.side}_id", "entities")
    if not len(known):
        return True
    return known.type == ids.type and pc.mean(pc.is_in(known, value_set=ids)).as_py() >= 1 - MOST_DRIFT


def unchanged_pools(night: Night, version: str) -> dict[Side, PoolBuilt]:
    """The pools of a version where tonight's would be the same, file by file; none where they may not.

    They are of the run before with the same settings, all of whose texts are carried over, of the same tables.
    """
    previous = night.previous
    if previous is None or previous.run_id != version or previous.settings_hash != night.run.settings_hash:
        return {}
    if not night.pools.folder(version).is_dir():
        return {}
    before = previous.load_manifest()
    is_same = all(_known(before, name) == _known(night.manifest, name) is not None for name in TABLE_NAMES)
    for side in SIDES:
        then, now = before.sides.get(side), night.manifest.sides.get(side)
        if then is None or now is None or now.num_generated:
            return {}
        is_same &= then.num_entities == now.num_entities
    is_same &= before.inputs.keys() == set(TABLE_NAMES) == night.manifest.inputs.keys()
    return before.pools_built if is_same else {}


def _known(manifest: RunManifest, table: str) -> str | None:
    return manifest.inputs.get(table, {}).get("known_sha256")
