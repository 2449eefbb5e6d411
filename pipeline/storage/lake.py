"""Features of published runs as tables of Delta Lake (`delta:s3://bucket/prefix`) or Iceberg (`iceberg://catalog/name`).

Each delivery adds the features of a run to `item_features`, then to `user_features`, with one commit per table. Rows
name the run in `delivered_run_id`, and have an increasing number in `delivery`: readers take the run of the highest
number in `user_features`, and both tables have all its rows. Readers do not see rows before their commit.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from laserbatch.pipeline.errors import ConfigError, LaserbatchError, NotDelivered, WorkspaceError
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.delivery import Delivered
from laserbatch.pipeline.storage.parquet import ROW_GROUP_ROWS, iter_parquet, num_rows_of, parquet_files
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.uris import ADVICE, failure, without_credentials

DELTA, ICEBERG = "delta:", "iceberg://"
RUN, NUMBER = "delivered_run_id", "delivery"  # columns before those of a feature table
IN_ORDER: tuple[Side, Side] = ("item", "user")
FILE_BYTES, GROUP_ROWS = 128 << 20, 4 * ROW_GROUP_ROWS  # of a table's files; memory is some multiple of this
_DELTA_URI = re.compile(r"delta:[a-z0-9+]+://[^?#]+")  # the library would cut a name at these
_ICEBERG_URI = re.compile(r"iceberg://([\w.-]+)(?:/[\w-]+)+/?")


def is_lake(uri: str) -> bool:
    """Whether a URI names the tables of a lake, not a place for files."""
    return uri.startswith((DELTA, ICEBERG))


@dataclass(frozen=True)
class LakeTables:
    """The feature tables at a URI; make them with `LakeTables.at`. It has the methods of a `Destination`."""

    uri: str
    _known: dict[Side, dict[str, tuple[int, int]]] = field(default_factory=dict, compare=False)  # see `_delivered`

    @classmethod
    def at(cls, uri: str) -> "LakeTables":
        """The tables at a URI. Raises ConfigError if it is malformed, has a credential, or the library is missing."""
        without_credentials(uri)
        is_delta = uri.startswith(DELTA)
        if not (_DELTA_URI if is_delta else _ICEBERG_URI).fullmatch(uri):
            expected = "delta:s3://bucket/prefix or delta:file:///folder" if is_delta else "iceberg://CATALOG/NAMESPACE"
            raise ConfigError(f"deliver_to: found {uri}, expected {expected}")
        library, extra = ("deltalake", "delta") if is_delta else ("pyiceberg", "iceberg")
        if find_spec(library) is None:
            raise ConfigError(f"deliver_to: {uri} needs {library}; run `pip install 'laserbatch[{extra}]'`")
        return cls(uri)

    def published(self) -> dict:
        """`run_id` of the run that readers take; empty before the first delivery."""
        delivered = self._delivered("user") or self._delivered("item")  # items: of a workspace without users
        numbers = {number: run_id for run_id, (number, _) in delivered.items()}
        return {"run_id": numbers[max(numbers)]} if numbers else {}

    def runs(self) -> list[str]:
        return sorted({run_id for side in IN_ORDER for run_id in self._delivered(side)})

    def deliver(self, run: RunFolder) -> Delivered:
        """Add a finished run, which readers then take. A table that has all its rows under the highest number stays.

        Raises WorkspaceError if rows cannot be written, a table has other columns or vectors of another length, or the
        run has no rows for a table with earlier runs, which readers would go on using.
        """
        paths = []
        for side in IN_ORDER:
            delivered, files = self._delivered(side), _features(run, side)
            if (num_rows := sum(map(num_rows_of, files))) == 0:
                if delivered:
                    raise WorkspaceError(
                        f"{files[0]} has no rows, so the table {side}_features at {self.uri} would still show an "
                        "earlier run. Deliver to another place, or delete that table"
                    )
                continue
            highest = max((number for number, _ in delivered.values()), default=0)
            number, num_there = delivered.get(run.run_id, (0, 0))
            if number < highest or num_there != num_rows:
                self._write(run, side, highest + 1, is_new=number == 0)
                paths += files
        return _sent(paths)

    def copy(self, run: RunFolder) -> Delivered:
        """Write the rows of a run again if rows were removed from it here; readers still take the same run."""
        paths = []
        for side in IN_ORDER:
            number, num_rows = self._delivered(side).get(run.run_id, (0, 0))
            if number and num_rows != sum(map(num_rows_of, files := _features(run, side))):
                self._write(run, side, number, is_new=False)
                paths += files
        return _sent(paths)

    def remove(self, run_ids: Collection[str]) -> list[str]:
        """Delete the rows of some runs, those of users first; returns the runs that were there."""
        removed: set[str] = set()
        for side in reversed(IN_ORDER):
            if there := self._delivered(side).keys() & set(run_ids):
                with self._naming():
                    self._known.pop(side, None)
                    self._table(side).opened().delete(_of_runs(there))
                removed |= there
        return sorted(removed)

    def _delivered(self, side: Side) -> dict[str, tuple[int, int]]:
        """The delivery number and number of rows of each run in a side's table; cached until a commit of ours."""
        if side in self._known:
            return self._known[side]
        counts: Counter[tuple[str, int]] = Counter()
        with self._naming():
            table = self._table(side)
            for batch in table.rows([RUN, NUMBER]) if table.schema() is not None else ():
                by_run = pa.Table.from_batches([batch]).group_by([RUN, NUMBER]).aggregate([([], "count_all")])
                for row in by_run.to_pylist():
                    counts[row[RUN], row[NUMBER]] += row["count_all"]
        self._known[side] = {run_id: (number, num_rows) for (run_id, number), num_rows in counts.items()}
        return self._known[side]

    def _write(self, run: RunFolder, side: Side, number: int, is_new: bool) -> None:
        files = _features(run, side)
        features = pq.read_schema(files[0])
        schema, dim = _schema(features), features.field("vector").type.list_size

        def batches() -> Iterator[pa.RecordBatch]:
            for batch in chain.from_iterable(map(iter_parquet, files)):
                named = {RUN: pa.repeat(run.run_id, len(batch)), NUMBER: pa.repeat(number, len(batch))}
                columns = named | dict(zip(batch.schema.names, batch.columns, strict=True))
                yield pa.record_batch([columns[field.name].cast(field.type) for field in schema], schema=schema)

        with self._naming():
            self._known.pop(side, None)
            table = self._table(side)
            self._require_same(table, f"{side}_features", schema, dim)
            table.write(pa.RecordBatchReader.from_batches(schema, batches()), run.run_id, is_new)

    def _require_same(self, table: "_DeltaTable | _IcebergTable", name: str, schema: pa.Schema, dim: int) -> None:
        """Raise WorkspaceError if the table has other columns than `schema`, or vectors of another length."""
        there = table.schema()
        if there is None:
            return
        advice = f"Deliver to another place, or delete the table {name} there: the next delivery makes it again"
        kinds, expected = ({field.name: str(_plain(field.type)) for field in columns} for columns in (there, schema))
        if kinds != expected:
            differing = sorted(field for field in kinds | expected if kinds.get(field) != expected.get(field))
            found = (f"{field}: found {kinds.get(field)}, expected {expected.get(field)}" for field in differing)
            other = f"the table {name} has other columns than the features ({'; '.join(found)})"
            raise WorkspaceError(f"{self.uri}: {other}. {advice}")
        lengths = (len(vector) for batch in table.rows(["vector"]) for vector in batch["vector"])
        if (length := next(lengths, dim)) != dim:
            raise WorkspaceError(
                f"{self.uri}: vectors of the table {name} have {length} numbers, but those of the run have {dim}, "
                f"because it has another encoder (encoding.encoder). {advice}"
            )

    def _table(self, side: Side) -> "_DeltaTable | _IcebergTable":
        if self.uri.startswith(DELTA):
            return _DeltaTable(f"{self.uri.removeprefix(DELTA).rstrip('/')}/{side}_features")
        _, _, catalog, *namespace = self.uri.rstrip("/").split("/")
        return _IcebergTable(catalog, tuple(namespace), f"{side}_features")

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Turn errors of the table library in the block into NotDelivered, which names the URI."""
        try:
            yield
        except LaserbatchError:
            raise
        except Exception as error:  # each library has its own errors, and some derive from Exception alone
            iceberg = "Check the catalogue in .pyiceberg.yaml or PYICEBERG_CATALOG__*, and that it can be reached"
            usual = iceberg if self.uri.startswith(ICEBERG) else ADVICE
            raise failure(NotDelivered, f"{self.uri}: {type(error).__name__}", error, usual) from None


class _DeltaTable:
    """A table of Delta Lake at a URI. It need not exist yet; then it has no schema."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def opened(self) -> Any:
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        try:
            return DeltaTable(self._uri)
        except TableNotFoundError:
            return None

    def schema(self) -> pa.Schema | None:
        opened = self.opened()
        return None if opened is None else pa.schema(opened.schema().to_arrow())

    def rows(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        yield from pa.RecordBatchReader.from_stream(self.opened().scan(columns=list(columns)))

    def write(self, rows: pa.RecordBatchReader, run_id: str, is_new: bool) -> None:
        """Commit the rows of a run. They replace the run's rows in the table unless the run `is_new`."""
        from deltalake import WriterProperties, write_deltalake

        options: dict[str, Any] = {
            "partition_by": [RUN, NUMBER],
            "target_file_size": FILE_BYTES,
            "writer_properties": WriterProperties(max_row_group_size=GROUP_ROWS),
        }
        if is_new:
            write_deltalake(self._uri, rows, mode="append", **options)
        else:
            write_deltalake(self._uri, rows, mode="overwrite", predicate=_of_runs([run_id]), **options)


class _IcebergTable:
    """A table of an Iceberg catalogue, named in pyiceberg's configuration, with the methods of `_DeltaTable`."""

    def __init__(self, catalog: str, namespace: tuple[str, ...], name: str) -> None:
        from pyiceberg.catalog import load_catalog

        self._catalog, self._namespace, self._name = load_catalog(catalog), namespace, (*namespace, name)

    def opened(self) -> Any:
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            return self._catalog.load_table(self._name)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None

    def schema(self) -> pa.Schema | None:
        opened = self.opened()
        return None if opened is None else opened.schema().as_arrow()

    def rows(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        table = self.opened()
        scan = table.scan(selected_fields=tuple(columns))
        read = ArrowScan(table.metadata, table.io, scan.projection(), AlwaysTrue())
        for task in scan.plan_files():  # a file at a time: `scan` itself would read ahead all files into memory
            yield from read.to_record_batches([task])

    def write(self, rows: pa.RecordBatchReader, run_id: str, is_new: bool) -> None:
        table = self.opened()
        if table is None:
            # The bounds of each file have whole run ids: the files of a run are then replaced without reading them.
            properties = {
                f"write.metadata.metrics.column.{RUN}": "full",
                "write.target-file-size-bytes": str(FILE_BYTES),
            }
            self._catalog.create_namespace_if_not_exists(self._namespace)
            table = self._catalog.create_table(self._name, rows.schema, properties=properties)
        if is_new:
            table.append(rows)
        else:
            table.overwrite(rows, overwrite_filter=_of_runs([run_id]))


def _of_runs(run_ids: Collection[str]) -> str:
    """The condition for rows of some runs, in a syntax that both libraries accept."""
    quoted = ", ".join(f"'{run_id}'" for run_id in sorted(run_ids))
    return f"{RUN} IN ({quoted})"


def _features(run: RunFolder, side: Side) -> list[Path]:
    """The files of a side's features. Raises WorkspaceError if there are none."""
    path = run.features_path(side)
    files = parquet_files(path)
    if not files:
        again = f"`laserbatch nightly --date {run.date} --force` makes features"
        raise WorkspaceError(f"{path} is missing; expected the features of {side}s. {again}")
    return files


def _schema(features: pa.Schema) -> pa.Schema:
    """The columns of a table: the run, its number, and those of a feature file in types that both formats know."""
    of_run = [pa.field(RUN, pa.string(), nullable=False), pa.field(NUMBER, pa.int64(), nullable=False)]
    return pa.schema([*of_run, *(pa.field(field.name, _plain(field.type), field.nullable) for field in features)])


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type of a column in a table: lists without a fixed length, and strings of one type."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_type)
    if pa.types.is_large_string(kind):
        return pa.string()
    return kind


def _sent(paths: Sequence[Path]) -> Delivered:
    return Delivered(len(paths), sum(path.stat().st_size for path in paths))
