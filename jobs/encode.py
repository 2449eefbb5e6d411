"""The stage that encodes: texts of a run to vectors and cluster ids, one Parquet file a side.

Encoding a run again writes the same bytes.
"""

from pathlib import Path

from laserbatch.jobs.console import progress, say
from laserbatch.pipeline.encoding.encoder import TextEncoder
from laserbatch.pipeline.encoding.features import KNOWLEDGE_COLUMNS, SideFeatures, build_features
from laserbatch.pipeline.encoding.settings import EncodingSettings
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.manifest import FeatureFigures
from laserbatch.pipeline.storage.parquet import read_parquet, write_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder


def encode_run(
    run_dir: Path, settings: EncodingSettings | None = None, previous: RunFolder | None = None
) -> dict[Side, FeatureFigures]:
    """Encode `knowledge/<side>/*.parquet` of a run into `features/<side>.parquet` and its centroids, atomically.

    A side without a text has a file without a row. Raises ModelError where the encoder is missing or not the expected
    one, WorkspaceError where the run has no texts at all.

    Parameters
    ----------
    run_dir : folder of a run, or its `plain` folder.
    previous : a finished run whose centroids, and vectors of texts that were carried over from it, are taken over
        where the encoder is the same.
    """
    settings = settings or EncodingSettings()
    folder = RunFolder(Path(run_dir))
    sides = [side for side in SIDES if any(folder.knowledge_folder(side).glob("*.parquet"))]
    if not sides:
        raise WorkspaceError(f"{run_dir} holds no texts to encode; run `laserbatch generate` first")
    encoder = TextEncoder.load(settings)
    figures: dict[Side, FeatureFigures] = {}
    for side in sides:
        knowledge = read_parquet(folder.knowledge_folder(side), columns=KNOWLEDGE_COLUMNS)
        with progress(f"encode {side} texts", knowledge.num_rows) as bar:
            earlier = _earlier(previous, side, encoder.encoder_id)
            features = build_features(knowledge, side, encoder, settings, earlier, bar.advance)
            bar.advance(knowledge.num_rows - features.num_encoded)
        written = write_parquet(features.table, folder.features_path(side))
        centroids = write_parquet(features.centroids, folder.centroids_path(side))
        if features.num_truncated:
            say(f"{features.num_truncated} {side} texts are longer than the encoder takes and lost their end")
        figures[side] = FeatureFigures(
            file=written.path.relative_to(folder.root).as_posix(),
            num_rows=written.num_rows,
            sha256=written.sha256,
            dim=encoder.dim,
            centroids=centroids.path.relative_to(folder.root).as_posix(),
            num_clusters=len(features.table["cluster_id"].unique()),
            num_encoded=features.num_encoded,
            num_truncated=features.num_truncated,
            encoder=encoder.encoder_id,
        )
    return figures


def _earlier(previous: RunFolder | None, side: Side, encoder_id: str) -> SideFeatures | None:
    """Features of a finished run; None when its encoder was another one, or they cannot be read."""
    if previous is None or not previous.centroids_path(side).exists():
        return None
    try:
        before = previous.load_manifest().features.get(side)
        if before is None or before.encoder != encoder_id:
            return None
        return SideFeatures(read_parquet(previous.features_path(side)), read_parquet(previous.centroids_path(side)))
    except WorkspaceError as error:
        say(f"{side} texts are all encoded again: {error}")
        return None
