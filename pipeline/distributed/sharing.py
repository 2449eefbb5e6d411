"""How many workers share a GPU: two, where the memory suffices, so that one computes while the other's host works.

On an H200 two workers wrote a night with drafts in 0.80 of the time of one (docs/gpu.md).
"""

from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.gpus import min_free_bytes

MAX_SHARE = 0.45  # of what is free on a GPU, that each of two workers may need
ASK_TIMEOUT_S = 60.0


def worker_bytes(folder: Path, decoding: DecodingSettings, max_prompt_tokens: int) -> int | None:
    """Memory of a GPU that a worker needs for a whole batch: weights as they are stored, and the longest texts' cache.

    None where it is not known, and where another engine or a drafter with a model takes what it wants.
    """
    if decoding.engine != "laserbatch" or decoding.plugin_drafters:
        return None
    import torch  # it takes seconds to load
    from transformers import AutoConfig

    from laserbatch.pipeline.decoding.device_memory import cache_bytes_per_token
    from laserbatch.pipeline.decoding.model.folder import find_weights

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        num_bytes = sum(file.stat().st_size for file in find_weights(folder))
        dtype = torch.float32 if decoding.dtype == "float32" else torch.bfloat16
        num_tokens = decoding.batch_size * (max_prompt_tokens + decoding.max_new_tokens)
        return num_bytes + num_tokens * cache_bytes_per_token(config, dtype)
    except Exception:  # whoever loads the model says what hinders it
        return None


def workers_a_gpu(needed_bytes: int | None, free_bytes: int | None) -> int:
    """Workers that share a GPU with so much free memory."""
    return 2 if needed_bytes and free_bytes and needed_bytes <= MAX_SHARE * free_bytes else 1


def cluster_free_bytes() -> int | None:
    """Free bytes of the fullest GPU of the cluster's nodes; None if a node does not report it."""
    ask = ray.remote(num_cpus=0, max_retries=0)(min_free_bytes)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    calls = [ask.options(scheduling_strategy=strategy).remote() for strategy in strategies]
    try:
        answers = ray.get(calls, timeout=ASK_TIMEOUT_S)
    except RayError:
        return None
    free = [num_bytes for num_bytes in answers if num_bytes is not None]
    return min(free) if free and len(free) == len(answers) else None
