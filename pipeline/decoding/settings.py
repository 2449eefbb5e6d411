"""Options of decoding: which model, how texts are drafted and verified, and how much runs at once."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

DraftSource = Literal["previous", "prompt", "output", "pool"]


class DecodingSettings(BaseModel):
    """The `decoding` section of a configuration.

    `model` is a folder with safetensors weights, configuration and tokenizer, or "sample" for the bundled model.
    `dtype` "auto" is float32 on a CPU and the weights' own type on CUDA. `top_k` and `min_probability` belong to the
    verifier (LASER, Eq. 8); `min_acceptance` to drafting: a node whose estimated path acceptance is lower is not
    drafted. `max_cache_tokens` bounds the KV cache (None: no bound on a CPU, most of the free memory on CUDA).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = "sample"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    batch_size: int = Field(16, ge=1)
    max_new_tokens: int = Field(512, ge=1)
    stop_strings: tuple[str, ...] = ()
    verifier: Literal["greedy", "top_k", "probability", "relaxed"] = "relaxed"
    top_k: int = Field(2, ge=1)
    min_probability: float = Field(0.1, ge=0.0, lt=1.0)
    drafters: tuple[DraftSource, ...] = ("previous", "prompt", "output", "pool")
    max_draft_tokens: int = Field(16, ge=0, le=64)
    min_acceptance: float = Field(0.02, ge=0.0, le=1.0)
    max_prefill_tokens: int = Field(2048, ge=1)
    max_cache_tokens: int | None = Field(None, ge=1)
    num_threads: int | None = Field(None, ge=1)
