"""An Iceberg catalogue in a folder: the newest metadata file of a table is its current version."""

from pathlib import Path

import pyarrow.fs as pafs
from pyiceberg.catalog import AVAILABLE_CATALOGS, CatalogType
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.serializers import FromInputFile, ToOutputFile
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.table.update import update_table_metadata


class FolderCatalog(NoopCatalog):
    """Replaces pyiceberg's catalogue of type `in-memory`, which needs SQLAlchemy; `warehouse` is a path."""

    def create_namespace(self, namespace, properties=None) -> None:
        pass

    def create_table(
        self, identifier, schema, location=None, partition_spec=UNPARTITIONED_PARTITION_SPEC,
        sort_order=UNSORTED_SORT_ORDER, properties={},  # noqa: B006
    ) -> Table:  # fmt: skip
        converted = self._convert_schema_if_needed(schema)
        place = f"file://{self._folder(identifier)}"
        self._save(new_table_metadata(converted, partition_spec, sort_order, place, properties), 0)
        return self.load_table(identifier)

    def load_table(self, identifier) -> Table:
        paths = sorted(self._folder(identifier).glob("metadata/*.metadata.json"))
        if not paths:
            raise NoSuchTableError(f"{identifier} is not there")
        path = str(paths[-1])
        metadata = FromInputFile.table_metadata(PyArrowFile(path, path, pafs.LocalFileSystem()))
        return Table(identifier, metadata, path, PyArrowFileIO(), self)

    def commit_table(self, table, requirements, updates) -> CommitTableResponse:
        current = self.load_table(table.name())
        for requirement in requirements:
            requirement.validate(current.metadata)
        metadata = update_table_metadata(current.metadata, updates)
        number = int(Path(current.metadata_location).name.split("-")[0]) + 1
        return CommitTableResponse(metadata=metadata, metadata_location=self._save(metadata, number))

    def _folder(self, identifier) -> Path:
        return Path(self.properties["warehouse"]).joinpath(*identifier)

    def _save(self, metadata: TableMetadata, number: int) -> str:
        location = f"{metadata.location}/metadata/{number:05}-x.metadata.json"
        ToOutputFile.table_metadata(metadata, PyArrowFileIO().new_output(location))
        return location


AVAILABLE_CATALOGS[CatalogType.IN_MEMORY] = lambda name, properties: FolderCatalog(name, **properties)
