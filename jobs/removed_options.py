"""Options that older configurations name and this version does not have: what each is now.

A removed option is refused with its sentence, because a night that ignored it would silently do something else.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_WARN = "to let such a night be published, publish it by name with `laserbatch runs publish`"
_AUDIT = "it is fixed at {}; gates.audit (stop, warn, ignore) says what follows beyond it"
REMOVED = {
    "seed": "it is fixed at 0",
    "ctr.positive_rating": "use ctr.label, such as `rating >= 4`",
    "ctr.seed": "it is fixed at 0",
    "ctr.negatives_per_positive": "it is fixed at 4",
    "ctr.negatives_by": "negatives are sampled uniformly",
    "ctr.validation_share": "it is fixed at 0.3",
    "ctr.cold_max_interactions": "it is fixed at 5",
    "ctr.min_id_interactions": "it is fixed at 3",
    "ctr.max_history": "it is fixed at 20",
    "ctr.embedding_dim": "it is fixed at 8",
    "ctr.hidden_sizes": "it is fixed at [64, 32]",
    "ctr.vector_dim": "it is fixed at 32",
    "ctr.dropout": "it is fixed at 0.3",
    "ctr.dcnv2_structure": "it is fixed at parallel",
    "ctr.dcnv2_rank": "the cross layers have full matrices",
    "ctr.learning_rate": "it is fixed at 0.003",
    "ctr.weight_decay": "it is fixed at 0.001",
    "ctr.max_epochs": "it is fixed at 15",
    "ctr.patience": "it is fixed at 2",
    "ctr.confidence": "it is fixed at 0.95",
    "gates.max_unusable_share": f"it is fixed at 0.3; {_WARN}",
    "gates.max_cut_share": f"it is fixed at 0.5; {_WARN}",
    "gates.max_repetitive_share": f"it is fixed at 0.1; {_WARN}",
    "gates.max_length_factor": f"it is fixed at 1.5; {_WARN}",
    "gates.min_cosine": f"it is fixed at 0.3; {_WARN}",
    "gates.max_audit_length_factor": _AUDIT.format("1.3"),
    "gates.min_audit_cosine": _AUDIT.format("0.6"),
    "gates.max_added_repetition": _AUDIT.format("0.05"),
    "gates.max_lost_fields": _AUDIT.format("0.05"),
    "gates.max_added_names": _AUDIT.format("0.5"),
    "pools.group_weight": "it is fixed at 3; pools.scope: group drafts from the entity's own group alone",
    "pools.calibration_texts": "it is fixed at 400",
    "pool_building.keep_versions": "it is fixed at 3; `laserbatch pools gc --keep` takes another number",
    "pool_building.memory_mb": "it is fixed at 512 MiB",
    "routing.min_interactions": "it is fixed at 5",
    "routing.num_groups": "it is half the square root of the number of entities",
    "encoding.device": "it is CUDA if there is a GPU, else the CPU",
    "encoding.max_text_tokens": "it is fixed at 512, or the encoder's own limit",
    "encoding.max_batch_tokens": "it is fixed at 2,048 on a CPU and 65,536 on a GPU",
    "encoding.dtype": "it is bfloat16 if the processor multiplies it natively, else float32",
    "encoding.seed": "it is fixed at 0; another encoding.num_clusters fits all clusters anew",
    "decoding.attention": "it is Triton's kernel on CUDA if it is installed and works, else torch's",
    "decoding.draft_models": "it is decoding.drafter_options.trained.models, with `trained` among decoding.drafters",
    "decoding.draft_head": "it is decoding.drafter_options.trained.head, with `trained` among decoding.drafters",
    "decoding.draft_width": "it is decoding.drafter_options.trained.width",
    "decoding.draft_length": "it is decoding.drafter_options.trained.length",
    "decoding.draft_branching": "it is decoding.drafter_options.trained.branching",
    "drafter_training": "nights train no drafters; `laserbatch drafter train` makes one",
    "recommending": "the same keys are in extensions.recommending",
    "refresh.min_drift": "use refresh.min_new_interactions",
    "refresh.max_hours": "use refresh.max_tokens, hours times the tokens a second of the last report",
    "night.num_report_samples": "it is fixed at 3",
    "cluster.max_shard_attempts": "it is fixed at 2",
    "cluster.threads_per_worker": "use cluster.num_workers, among which the cores of each node are divided",
    "metrics.push_gateway": "use metrics.textfile, and push the file after the night, with `curl --data-binary @FILE`",
}


def removed_options(data: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each option of a configuration that is gone."""
    for option, now in REMOVED.items():
        section, _, key = option.rpartition(".")
        holder = data.get(section) if section else data
        if isinstance(holder, Mapping) and key in holder:
            yield f"{option}: this option is gone: {now}. Delete the line"
