"""Knowledge records to feature rows: vectors and cluster ids beside the ids they belong to.

Only the generated text is encoded. A history in front of it would push the knowledge out of the encoder's limit, and
would bring the history into the features by another door.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.encoding.clusters import cluster_vectors
from pipeline.encoding.encoder import TextEncoder
from pipeline.encoding.schema import feature_schema
from pipeline.encoding.settings import EncodingSettings

KNOWLEDGE_COLUMNS = ["entity_id", "text", "run_id", "fingerprint"]  # all that is read of a knowledge record


def build_features(
    knowledge: pa.Table,
    side: str,
    encoder: TextEncoder,
    settings: EncodingSettings | None = None,
    vectors: np.ndarray | None = None,
) -> pa.Table:
    """The feature table of one side.

    Parameters
    ----------
    knowledge : knowledge records of the side; `entity_id`, `text`, `run_id` and `fingerprint` are read.
    side : "user" or "item".
    encoder : what encodes the texts.
    settings : number of clusters and seed.
    vectors : float32 (num_rows, dim), the texts' vectors where they are known already.

    Returns
    -------
    Table of `schema.feature_schema`, in the order of the ids, so that shard order does not show.
    """
    settings = settings or EncodingSettings()
    order = pc.sort_indices(knowledge["entity_id"])
    rows = knowledge.select(KNOWLEDGE_COLUMNS).take(order)
    vectors = encoder.encode(rows["text"].to_pylist()) if vectors is None else vectors[order.to_numpy()]
    cluster_ids = cluster_vectors(vectors, settings.num_clusters, settings.seed)
    schema = feature_schema(side, knowledge.schema.field("entity_id").type, encoder.dim)
    flat = pa.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
    columns = [
        rows["entity_id"].combine_chunks(),
        pa.FixedSizeListArray.from_arrays(flat, encoder.dim),
        pa.array(cluster_ids, pa.int32()),
        rows["run_id"].combine_chunks(),
        rows["fingerprint"].combine_chunks(),
    ]
    return pa.Table.from_arrays(columns, schema=schema)
