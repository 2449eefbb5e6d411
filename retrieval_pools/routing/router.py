"""The binary router of LASER (section 3.2), which names the group that an entity drafts from, and its baselines.

A router is fitted when a pool is built, saved next to it, and used the next night. Every entity gets a group: an entity
with enough interactions that was in the fit its collaborative group, any other an attribute group. The caller removes
from the tables what must not be known yet.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.ids import rows_among
from laserbatch.retrieval_pools.routing.attributes import (
    AttributeColumn,
    AttributeGroups,
    choose_columns,
    distinct_attributes,
)
from laserbatch.retrieval_pools.routing.collaborative import (
    SIDES,
    CollaborativeGroups,
    default_num_groups,
    train_embeddings,
)
from laserbatch.retrieval_pools.routing.embeddings import EntityEmbeddings, id_column
from laserbatch.retrieval_pools.settings import RoutingSettings

ROUTER_FILE, COLLABORATIVE_FILE = "router.json", "collaborative.parquet"
FORMAT_VERSION = 4
GLOBAL_GROUP = "global"


@dataclass(frozen=True)
class Route:
    """The group of an entity's text, which its drafts prefer: a readable name, and the scheme that chose it."""

    group: str
    scheme: str  # "collaborative", "attribute", "random" or "global"; "none" without pools


@dataclass(frozen=True)
class Routes:
    """The routes of many entities, row by row: dictionary arrays of text."""

    groups: pa.DictionaryArray  # "" is no group
    schemes: pa.DictionaryArray

    @classmethod
    def nowhere(cls, num_rows: int) -> "Routes":
        """Routes without groups, for a run without pools."""
        return _routes(np.zeros(num_rows, np.int32), [Route("", "none")])

    def of(self, row: int) -> Route:
        return Route(self.groups[row].as_py(), self.schemes[row].as_py())

    def num_by_scheme(self) -> dict[str, int]:
        return {row["values"]: row["counts"] for row in self.schemes.value_counts().to_pylist()}


@dataclass(frozen=True)
class Router:
    """Names the group of every entity of one side. Made by `fit` or `load`; immutable."""

    side: str
    settings: RoutingSettings
    seed: int
    num_groups: int  # number of groups of the random scheme
    collaborative: CollaborativeGroups
    attributes: AttributeGroups

    @classmethod
    def fit(
        cls,
        side: str,
        entities: pa.Table,
        interactions: pa.Table,
        settings: RoutingSettings | None = None,
        seed: int = 0,
        embeddings: EntityEmbeddings | None = None,
        scratch: Path | None = None,
    ) -> "Router":
        """Group the entities of one side, "user" or "item"; the order of rows does not matter.

        Parameters
        ----------
        entities : `<side>_id` (string or integer, unique) and attribute columns; other columns are ignored.
        interactions : `user_id` and `item_id`, already cut at the as-of date; ids that `entities` lacks influence the
            embeddings.
        seed : the seed of the embeddings, of k-means and of the random scheme.
        embeddings : vectors of this side from your own recommender, or from a LightGCN trained once for both sides;
            None: the file that the settings name is read, or LightGCN is trained here.
        scratch : a folder for files without a name, for data that grows with interactions; None: it is in memory.

        Raises
        ------
        PoolError
            Unknown side, missing columns, ids of another kind, or an attribute that cannot be grouped by.
        """
        if side not in SIDES:
            raise PoolError(f"the side is {side!r}; expected one of {', '.join(SIDES)}")
        settings = settings or RoutingSettings()
        ids = id_column(entities, f"{side}_id", "entities")
        collaborative = CollaborativeGroups.none_of(ids)
        if settings.scheme in ("router", "collaborative"):
            collaborative = CollaborativeGroups.fit(side, ids, interactions, settings, seed, embeddings, scratch)
        names = settings.attributes_of(side) if settings.scheme in ("router", "attribute") else ()
        # Larger groups are split, smaller ones join their parent. Groups only weight texts, so sizes matter little.
        max_size = max(50, round(4 * entities.num_rows**0.5))
        attributes = AttributeGroups.fit(entities, choose_columns(entities, names), max_size, min_size=max_size // 10)
        num_groups = settings.num_groups or default_num_groups(len(ids))
        return cls(side, settings, seed, num_groups, collaborative, attributes)

    def routes(self, entities: pa.Table, num_interactions: np.ndarray) -> Routes:
        """The group of each row, by the entity's attributes and its interactions now; it need not have been in the fit.

        Missing, null or unknown attributes shorten the prefix that is matched.

        Parameters
        ----------
        entities : `<side>_id` and attribute columns.
        num_interactions : number of interactions of each entity, (num_rows,).
        """
        scheme, num_rows = self.settings.scheme, entities.num_rows
        ids = id_column(entities, f"{self.side}_id", "entities")
        if scheme == "global":
            return _routes(np.zeros(num_rows, np.int32), [Route(GLOBAL_GROUP, "global")])
        if scheme == "random":
            numbered = pa.array([random_group(key, self.num_groups, self.seed) for key in ids.to_pylist()], pa.string())
            numbered = numbered.dictionary_encode()
            names = numbered.dictionary.to_pylist()
            return _routes(numbered.indices.to_numpy(), [Route(name, "random") for name in names])
        place = np.full(num_rows, -1) if scheme == "attribute" else rows_among(ids, self.collaborative.ids)
        del ids
        is_warm = (place >= 0) & (num_interactions >= self.settings.min_interactions)
        numbers = self.collaborative.groups
        num_collaborative = int(numbers.max(initial=-1)) + 1
        group_routes = [Route(f"collaborative/{number}", "collaborative") for number in range(num_collaborative)]
        codes = np.full(num_rows, num_collaborative, np.int64)
        codes[is_warm] = numbers[place[is_warm]]
        if scheme == "collaborative":
            return _routes(codes, [*group_routes, Route(GLOBAL_GROUP, "global")])
        names = [column.name for column in self.attributes.columns if column.name in entities.column_names]
        cold = entities.select(names).filter(pa.array(~is_warm))
        alike, distinct = distinct_attributes(cold, self.attributes.columns)
        codes[~is_warm] += alike
        group_routes += [Route(self.attributes.group_of(values), "attribute") for values in distinct]
        return _routes(codes, group_routes)

    def save(self, folder: Path | str) -> None:
        """Write the router to `folder` (created if missing): Parquet and JSON files, `router.json` last."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        collaborative = pa.table({"entity_id": self.collaborative.ids, "group": self.collaborative.groups})
        pq.write_table(collaborative, folder / COLLABORATIVE_FILE, compression="zstd")
        self.attributes.save(folder)
        description = {
            "format_version": FORMAT_VERSION,
            "side": self.side,
            "seed": self.seed,
            "num_groups": self.num_groups,
            "settings": self.settings.model_dump(mode="json"),
            "columns": [asdict(column) for column in self.attributes.columns],
            "num_collaborative": collaborative.num_rows,
            "num_attribute_groups": len(self.attributes.num_entities),
        }
        (folder / ROUTER_FILE).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path | str) -> "Router":
        """Read the router that `save` wrote.

        Raises
        ------
        PoolError
            The folder holds no router, a router of another format, or a damaged one.
        """
        folder = Path(folder)
        again = "rebuild its pools with `laserbatch pools rebuild`, or with `--run RUN` if they are of an earlier run"
        try:
            description = json.loads((folder / ROUTER_FILE).read_text(encoding="utf-8"))
            saved = description["format_version"]
            if saved != FORMAT_VERSION:
                raise PoolError(f"router in {folder} has format {saved}; expected {FORMAT_VERSION}; {again}")
            columns = [AttributeColumn(**{**c, "edges": tuple(c["edges"])}) for c in description["columns"]]
            known = {name: of for name, of in description["settings"].items() if name in RoutingSettings.model_fields}
            settings = RoutingSettings.model_validate(known)
            attributes = AttributeGroups.load(columns, folder)
            table = pq.read_table(folder / COLLABORATIVE_FILE)
            ids, groups = id_column(table, "entity_id", COLLABORATIVE_FILE), table["group"].to_numpy()
            expected = description["num_collaborative"], description["num_attribute_groups"]
            if (len(ids), len(attributes.num_entities)) != expected:
                raise PoolError(f"router in {folder} is damaged: its tables do not match {ROUTER_FILE}; {again}")
            side, seed, num_groups = (description[name] for name in ("side", "seed", "num_groups"))
            return cls(side, settings, seed, num_groups, CollaborativeGroups(ids, groups), attributes)
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException, ValidationError) as error:
            raise PoolError(f"router in {folder} cannot be read ({error}); {again}") from error


def _routes(codes: np.ndarray, routes: list[Route]) -> Routes:
    """The routes of rows: `codes` has the place of each row's route in `routes`, which may hold equal ones."""

    def column(names: list[str]) -> pa.DictionaryArray:
        encoded = pa.array(names, pa.string()).dictionary_encode()
        indices = encoded.indices.to_numpy()[codes] if len(codes) else np.zeros(0, np.int32)
        return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), encoded.dictionary)

    return Routes(column([route.group for route in routes]), column([route.scheme for route in routes]))


def random_group(entity_id: str | int, num_groups: int, seed: int) -> str:
    """The group of an entity by a seeded hash of its id (LASER's RRP): the same in every process, also for new ids."""
    digest = hashlib.blake2b(f"{seed}:{entity_id}".encode(), digest_size=8).digest()
    return f"random/{int.from_bytes(digest, 'little') % num_groups}"


def fit_routers(
    users: pa.Table,
    items: pa.Table,
    interactions: pa.Table,
    settings: RoutingSettings | None = None,
    seed: int = 0,
    scratch: Path | None = None,
) -> dict[str, Router]:
    """The routers of both sides, equal to two calls of `Router.fit`, but LightGCN is trained once; same `scratch`."""
    settings = settings or RoutingSettings()
    embeddings: dict[str, EntityEmbeddings] = {}
    to_train = [side for side in SIDES if settings.embeddings_of(side) is None]
    if settings.scheme in ("router", "collaborative") and to_train:
        embeddings = train_embeddings(interactions, seed, scratch)
        embeddings = {side: embeddings[side] for side in to_train}
    return {
        side: Router.fit(side, entities, interactions, settings, seed, embeddings.pop(side, None), scratch)
        for side, entities in (("user", users), ("item", items))
    }
