"""The stage that encodes a run's texts into its feature tables."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from laserbatch.jobs.console import progress, say
from laserbatch.pipeline.distributed.cluster import WorkerLayout
from laserbatch.pipeline.distributed.encoding import ClusterEncoder
from laserbatch.pipeline.encoding.features import VECTORS_FOLDER, EarlierFeatures, FeatureWriter
from laserbatch.pipeline.encoding.identity import encoder_identity, with_dtype
from laserbatch.pipeline.encoding.settings import EncodingSettings
from laserbatch.pipeline.encoding.text_parts import LocalEncoder, PartsEncoder
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.figures import FeatureFigures
from laserbatch.pipeline.storage.parquet import num_rows_of, parquet_files
from laserbatch.pipeline.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from laserbatch.pipeline.encoding.encoder import TextEncoder


def encode_run(
    run_dir: Path,
    settings: EncodingSettings = EncodingSettings(),
    previous: RunFolder | None = None,
    codes_of: RunFolder | None = None,
    fields: Mapping[Side, Sequence[str]] | None = None,
    start_cluster: Callable[[], WorkerLayout] | None = None,
) -> dict[Side, FeatureFigures]:
    """Encode `knowledge/<side>/*.parquet` of a run into `features/<side>/*.parquet` and centroids, atomically.

    A repeated call writes the same bytes; a side without a text gets a file without rows. Raises ModelError if the
    encoder is missing or not the expected one, WorkspaceError if the run has no files of texts.

    Parameters
    ----------
    run_dir : folder of a run, or its `plain` folder.
    previous : a finished run; its codebook, and its vectors of texts that were carried over, are reused if the encoder
        is the same.
    codes_of : the run whose plain texts are encoded: their codes come from its codebook.
    fields : by side, the parts of answers that are encoded; None: whole texts.
    start_cluster : called if there are enough texts for tasks of a cluster to encode them, in `settings.dtype`, which
        must then not be `auto`; None: this process encodes them.
    """
    folder = RunFolder(Path(run_dir))
    sides: list[Side] = [side for side in SIDES if any(folder.knowledge_folder(side).glob("*.parquet"))]
    if not sides:
        raise WorkspaceError(f"{run_dir} holds no texts to encode")
    encoder_id = encoder_identity(settings)

    here = LocalEncoder(lambda: load_encoder(settings))
    on_cluster = None if start_cluster is None else ClusterEncoder(settings, start_cluster)

    def choose(num_texts: int) -> PartsEncoder:
        return here if on_cluster is None or not on_cluster.is_worth(num_texts) else on_cluster

    figures: dict[Side, FeatureFigures] = {}
    for side in sides:
        num_rows = sum(map(num_rows_of, parquet_files(folder.knowledge_folder(side))))
        with progress(f"encode {side} texts", num_rows) as bar:
            parts = tuple((fields or {}).get(side, ()))
            earlier = _earlier(previous, side, encoder_id, settings.max_text_tokens, parts)
            features = FeatureWriter(folder, side, choose, encoder_id, settings, parts, bar.advance)
            try:
                figures[side] = features.write(earlier, codes_of)
            except WorkspaceError as error:
                if earlier is None:
                    raise
                what = f"all {side} texts are encoded again, and their cluster ids are not comparable with earlier ones"
                say(f"{what}: {error}")
                figures[side] = features.write(None, codes_of)
            bar.advance(num_rows - figures[side].num_encoded)
        if num_truncated := figures[side].num_truncated:
            say(f"{num_truncated} {side} texts are longer than the encoder's limit and were cut")
    shutil.rmtree(folder.root / VECTORS_FOLDER, ignore_errors=True)
    return figures


def load_encoder(settings: EncodingSettings) -> "TextEncoder":
    from laserbatch.pipeline.encoding.encoder import TextEncoder  # torch and the model take seconds to load

    return TextEncoder.load(settings)


def same_dtype(settings: EncodingSettings, previous: RunFolder | None) -> EncodingSettings:
    """The settings, with the dtype of the previous run's vectors; see `with_dtype`."""
    manifest = None if previous is None else unless_damaged(previous.load_manifest)
    encoders = [figures.encoder for figures in manifest.features.values()] if manifest else []
    return with_dtype(settings, encoders[0] if encoders else None)


def _earlier(
    previous: RunFolder | None, side: Side, encoder_id: str, max_text_tokens: int, fields: tuple[str, ...]
) -> EarlierFeatures | None:
    """A finished run's features; None if it has none, or if their fields, text limit or encoder differ."""
    manifest = None if previous is None else unless_damaged(previous.load_manifest)
    before = None if manifest is None else manifest.features.get(side)
    if previous is None or manifest is None or before is None:
        return None
    cut_at = manifest.origin.settings.get("encoding", {}).get("max_text_tokens", max_text_tokens)
    is_same = before.encoder == encoder_id and cut_at == max_text_tokens and before.fields in (None, fields)
    return EarlierFeatures(previous, side, before) if is_same else None
