"""`laserbatch encode`: the texts of a run to vectors and cluster ids, one Parquet file a side.

Owns where the stage reads and writes; how texts become vectors is `pipeline.encoding`. Nothing but the knowledge files
decides the bytes of the feature files: encoding a run again writes them again as they were.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import typer

from jobs.console import progress as progress_bar
from jobs.console import say, summary
from pipeline.encoding.encoder import TextEncoder
from pipeline.encoding.features import KNOWLEDGE_COLUMNS, build_features
from pipeline.encoding.settings import EncodingSettings
from pipeline.errors import WorkspaceError
from pipeline.sides import SIDES, Side
from pipeline.storage.parquet import read_parquet, write_parquet
from pipeline.storage.run_folder import RunFolder


def encode(
    workspace: Path = typer.Option(Path("workspace"), "--workspace", "-w", help="The workspace folder."),
    run: str | None = typer.Option(None, help="A run id. Default: the published run."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Encode the texts of a run into feature tables, by the run's own settings.

    Example: `laserbatch encode --workspace workspace --run 2025-03-01-1a2b3c4d`
    """
    from jobs.night import open_run
    from jobs.settings import Settings
    from pipeline.storage.workspace import Workspace

    with Workspace.open(workspace, create=False).lock():
        night = open_run(Settings(workspace=workspace), run)
        encoded = encode_run(night.run.root, night.settings.encoding, previous=night.previous)
        sections = {"run": night.run.run_id, **encoded}
        if night.run.plain.knowledge_folder("user").is_dir():
            sections["plain"] = encode_run(night.run.plain.root, night.settings.encoding)
    summary(sections, as_json)


def encode_run(
    run_dir: Path,
    settings: EncodingSettings | None = None,
    progress: Callable[[str], None] = say,
    previous: RunFolder | None = None,
) -> dict[str, Any]:
    """Encode `knowledge/<side>/*.parquet` of a run into `features/<side>.parquet`, each written atomically.

    Parameters
    ----------
    run_dir : folder of a run, or its `plain` folder.
    settings : the encoder and its clustering.
    progress : is told what a person should know, a line at a time.
    previous : a finished run whose vectors are taken over for texts that were carried over from it, where the encoder
        is the same. They are bit for bit what encoding again would give.

    Returns
    -------
    dict
        The manifest's `features`: a side's file, rows, dim, clusters, encoder, and how many texts were cut.

    Raises
    ------
    ModelError
        The encoder is missing or not the expected one.
    WorkspaceError
        The run has no texts at all.
    """
    settings = settings or EncodingSettings()
    folder = RunFolder(Path(run_dir))
    sides = [side for side in SIDES if any(folder.knowledge_folder(side).glob("*.parquet"))]
    if not sides:
        raise WorkspaceError(f"{run_dir} holds no texts to encode; run `laserbatch generate` first")
    encoder = TextEncoder.load(settings)
    section: dict[str, Any] = {}
    for side in sides:
        knowledge = read_parquet(folder.knowledge_folder(side), columns=KNOWLEDGE_COLUMNS)
        known = _known_vectors(previous, side, encoder.encoder_id)
        keys = _keys(knowledge, "entity_id")
        new_rows = [row for row, key in enumerate(keys) if key not in known]
        with progress_bar(f"encode {side} texts", len(new_rows)) as bar:
            encoding = encoder.encode_counted(knowledge["text"].take(new_rows).to_pylist(), bar.advance)
        vectors = np.zeros((len(keys), encoder.dim), np.float32)
        vectors[new_rows] = encoding.vectors
        for row, key in enumerate(keys):
            if key in known:
                vectors[row] = known[key]
        features = build_features(knowledge, side, encoder, settings, vectors)
        written = write_parquet(features, folder.features_path(side))
        if encoding.num_truncated:
            progress(f"{encoding.num_truncated} {side} texts are longer than the encoder takes and lost their end")
        section[side] = {
            "file": written.path.relative_to(folder.root).as_posix(),
            "num_rows": written.num_rows,
            "sha256": written.sha256,
            "dim": encoder.dim,
            "num_clusters": len(features["cluster_id"].unique()),
            "num_encoded": len(new_rows),
            "num_truncated": encoding.num_truncated,
            "encoder": encoder.encoder_id,
        }
    return section


def _keys(table: pa.Table, id_column: str) -> list[tuple]:
    """What says that a row is of the same text: its entity, the run that generated it, and the prompt it answers."""
    return list(zip(*(table[name].to_pylist() for name in (id_column, "run_id", "fingerprint")), strict=True))


def _known_vectors(previous: RunFolder | None, side: Side, encoder_id: str) -> dict[tuple, np.ndarray]:
    """Vectors of a finished run by `_keys`; none when its encoder was another one."""
    if previous is None or not previous.features_path(side).exists():
        return {}
    if previous.load_manifest()["features"].get(side, {}).get("encoder") != encoder_id:
        return {}
    features = read_parquet(previous.features_path(side))
    flat = features["vector"].combine_chunks().flatten().to_numpy()
    return dict(zip(_keys(features, f"{side}_id"), flat.reshape(features.num_rows, -1), strict=True))
