"""Feature tables in the layouts of other libraries: Merlin (Parquet with its schema), FuxiCTR and RecBole.

All have the vectors and both codes. Each is written one row group at a time to a folder that will be moved to `place`,
whose last part is the data set's name; its `settings.yaml` has the configuration for the other library.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import yaml

from laserbatch.pipeline.encoding.schema import LEVELS, vectors_of
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.atomic import write_text
from laserbatch.pipeline.storage.parquet import write_parquet

MISSING_FOR_PANDAS = {
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
    "NULL", "NaN", "None", "n/a", "nan", "null",
}  # fmt: skip


@dataclass(frozen=True)
class SideExport:
    """One side's features, to be exported to another library."""

    side: str
    schema: pa.Schema  # of the feature table
    batches: Iterable[pa.RecordBatch]  # all or some of its rows, which are read once

    @property
    def id_name(self) -> str:
        return f"{self.side}_id"

    @property
    def dim(self) -> int:
        return self.schema.field("vector").type.list_size

    @property
    def has_integer_ids(self) -> bool:
        return pa.types.is_integer(self.schema.field(self.id_name).type)


def write_merlin(sides: Sequence[SideExport], folder: Path, place: Path) -> None:
    """Write `<side>/features.parquet` with all columns, and `schema.pbtxt`, in the layout of Merlin.

    TorchRec and other readers of Parquet can use the same files.
    """
    for export in sides:
        write_parquet(export.batches, folder / export.side / "features.parquet", export.schema)
        shape = f"value_count {{ min: {export.dim} max: {export.dim} }}"
        features = [
            _feature(export.id_name, "INT" if export.has_integer_ids else "BYTES", "", ["id", export.id_name]),
            _feature("vector", "FLOAT", shape, ["embedding", export.side]),
        ]
        is_code = "int_domain { is_categorical: true }"
        features += [_feature(name, "INT", is_code, ["categorical", export.side]) for name in LEVELS]
        write_text("".join(features), folder / export.side / "schema.pbtxt")


def _feature(name: str, kind: str, shape: str, tags: list[str]) -> str:
    """A feature of TensorFlow Metadata's schema, as protobuf text."""
    annotations = " ".join(f'tag: "{tag}"' for tag in tags)
    return f'feature {{\n  name: "{name}"\n  type: {kind}\n  {shape}\n  annotation {{ {annotations} }}\n}}\n'


def write_fuxictr(sides: Sequence[SideExport], folder: Path, place: Path) -> None:
    """Write `<side>_id.parquet` with `key` and `value`, FuxiCTR's `pretrained_emb`, and feature columns that name it.

    It also has the codes, as `<side>_cluster_id` and `<side>_residual_id`, to be joined to the training rows.
    """

    def column(name: str, kind: str, **more: object) -> dict[str, object]:
        return {"name": name, "active": True, "dtype": kind, "type": "categorical", **more}

    columns = []
    for export in sides:
        name = f"{export.id_name}.parquet"
        codes = [f"{export.side}_{level}" for level in LEVELS]
        pairs = (batch.select([export.id_name, "vector", *LEVELS]) for batch in export.batches)
        fields = {"key": export.schema.field(export.id_name).type, "value": export.schema.field("vector").type}
        schema = pa.schema(fields | dict.fromkeys(codes, pa.int32()))
        write_parquet((batch.rename_columns(schema.names) for batch in pairs), folder / name, schema)
        pretrained = {"pretrained_emb": str(place / name), "pretrain_dim": export.dim, "pretrain_usage": "concat"}
        kind = "int" if export.has_integer_ids else "str"
        columns += [column(export.id_name, kind, **pretrained, freeze_emb=True), *(column(of, "int") for of in codes)]
    _write_settings({"feature_cols": columns}, folder)


def write_recbole(sides: Sequence[SideExport], folder: Path, place: Path) -> None:
    """Write `<dataset>.<side>emb`, atomic files of RecBole, and the settings that load them as weights of the ids.

    Raises WorkspaceError on an id that RecBole would read as another one: it reads these files with pandas, which
    removes quotes and takes some words for missing values.
    """
    settings: dict[str, Any] = {"additional_feat_suffix": [], "preload_weight": {}}
    settings["load_col"] = {"inter": ["user_id", "item_id"]}  # RecBole's default, which loads none of our files
    for export in sides:
        id_name, vector_name, suffix = f"{export.side}_emb_id", f"{export.side}_emb", f"{export.side}emb"
        columns = [f"{id_name}:token", f"{vector_name}:float_seq"]
        columns += [f"{export.side}_{level}:token" for level in LEVELS]
        with (folder / f"{place.name}.{suffix}").open("w", encoding="utf-8") as file:
            file.write("\t".join(columns) + "\n")
            for batch in export.batches:
                vectors = vectors_of(batch)
                codes = (batch[level].to_pylist() for level in LEVELS)
                ids = batch[export.id_name].to_pylist()
                for entity_id, vector, *entity_codes in zip(ids, vectors, *codes, strict=True):
                    text = str(entity_id)
                    if set("\t\r\n") & set(text) or text.startswith('"') or text in MISSING_FOR_PANDAS:
                        raise WorkspaceError(
                            f"the id of {export.side} {entity_id!r} cannot be written to RecBole's files: it is empty, "
                            "has a tab, a line end or a quote at its start, or is a word for a missing value such as "
                            "NA. Export to another format."
                        )
                    file.write("\t".join([text, " ".join(map(str, vector)), *map(str, entity_codes)]) + "\n")
        settings["additional_feat_suffix"].append(suffix)
        settings["preload_weight"][id_name] = vector_name
        settings["load_col"][suffix] = [id_name, vector_name]
        settings[f"alias_of_{export.side}_id"] = [id_name]
    _write_settings(settings, folder)


def _write_settings(settings: dict[str, Any], folder: Path) -> None:
    write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), folder / "settings.yaml")


FormatName = Literal["merlin", "fuxictr", "recbole"]
FORMATS: dict[FormatName, Callable[[Sequence[SideExport], Path, Path], None]] = {
    "merlin": write_merlin,
    "fuxictr": write_fuxictr,
    "recbole": write_recbole,
}
