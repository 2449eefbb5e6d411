"""A run's texts as a pool takes them: in the order of the entity table, each with its group and its age.

The order is the table's because it is the same every night: what has not changed then stands where it stood, and is not
sorted again. Token ids are read in batches and lie in a file meanwhile; in memory are ids, places and dates.
"""

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.knowledge.entities import Entity, iter_entities
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.tables.read import Tables
from laserbatch.retrieval_pools.index.arrays import ArrayWriter, map_array
from laserbatch.retrieval_pools.index.texts import PoolText
from laserbatch.retrieval_pools.routing.router import Route

TOKENS_NAME = "texts.npy"
_DATE_LENGTH = len("2025-03-01")  # what a run's id begins with


@dataclass(frozen=True)
class RunTexts:
    """The texts of one side of a run.

    Attributes
    ----------
    entity_ids : whose they are.
    starts : int64[num_texts + 1], where each begins in `tokens`, int32 mapped.
    run_dates : datetime64[D][num_texts], the date of the run that wrote each; NaT where that is not recorded.
    model_id : that wrote the first.
    """

    entity_ids: pa.ChunkedArray
    starts: np.ndarray
    tokens: np.ndarray
    run_dates: np.ndarray
    model_id: str

    def __len__(self) -> int:
        return len(self.entity_ids)

    def of_entities(self, entity_ids: list) -> dict[str | int, np.ndarray]:
        """int32[n] token ids by entity, for those that have a text."""
        wanted = pa.array(entity_ids, self.entity_ids.type)
        rows = pc.index_in(wanted, value_set=self.entity_ids).to_pylist()
        return {
            entity_id: self.tokens[self.starts[row] : self.starts[row + 1]]
            for entity_id, row in zip(entity_ids, rows, strict=True)
            if row is not None
        }

    def pool_texts(
        self, tables: Tables, side: Side, date: datetime.date, route: Callable[[Entity], Route]
    ) -> Iterator[PoolText]:
        """One after another, those of entities that the tables no longer have left out.

        Parameters
        ----------
        date : ages are counted to it.
        route : an entity's group.
        """
        table = tables.users if side == "user" else tables.items
        row_of = pc.index_in(table[f"{side}_id"], value_set=self.entity_ids)
        rows = pc.fill_null(row_of, -1).to_numpy()
        ages = (np.datetime64(date) - self.run_dates).astype(float)  # days; NaN for NaT
        ages = np.where(np.isnan(ages), 0.0, np.maximum(ages, 0.0))
        for row, entity in zip(rows.tolist(), iter_entities(tables, side, with_history=False), strict=True):
            if row >= 0:
                its_own = slice(self.starts[row], self.starts[row + 1])
                yield PoolText(self.tokens[its_own], route(entity).group, entity.entity_id, float(ages[row]))


def read_run_texts(run: RunFolder, side: Side, scratch: Path) -> RunTexts | None:
    """The texts of a side; None when there are none.

    Parameters
    ----------
    scratch : a folder for files that must stay while the texts are used.
    """
    ids, lengths, dates, model_id = [], [], [], None
    with ArrayWriter(scratch / TOKENS_NAME, np.int32) as tokens:
        for batch in run.iter_knowledge(side, ("entity_id", "model_id", "run_id", "token_ids")):
            if not batch.num_rows:
                continue
            model_id = model_id or batch["model_id"][0].as_py()
            ids.append(batch["entity_id"])
            lengths.append(pc.list_value_length(batch["token_ids"]).to_numpy(zero_copy_only=False))
            dates.append(_dates(batch["run_id"]))
            tokens.write(batch["token_ids"].flatten().to_numpy())
    if model_id is None:
        return None
    starts = np.concatenate([[0], np.cumsum(np.concatenate(lengths), dtype=np.int64)])
    return RunTexts(pa.chunked_array(ids), starts, map_array(scratch / TOKENS_NAME), np.concatenate(dates), model_id)


def _dates(run_ids: pa.Array) -> np.ndarray:
    distinct = run_ids.dictionary_encode()
    known = []
    for run_id in distinct.dictionary.to_pylist():
        try:
            known.append(np.datetime64(datetime.date.fromisoformat(run_id[:_DATE_LENGTH])))
        except ValueError:
            known.append(np.datetime64("NaT", "D"))
    return np.array(known, "datetime64[D]")[distinct.indices.to_numpy()]
