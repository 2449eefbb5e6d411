"""Options of decoding: which model, how texts are drafted and verified, and how much runs at once."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from laserbatch.pipeline.validation import Strict

# Arguments of vllm.LLM that options decide, or that would run or load what nobody has looked at.
OURS_IN_VLLM = {
    "model", "tokenizer", "dtype", "max_num_seqs", "speculative_config", "generation_config", "load_format", "seed",
    "trust_remote_code", "disable_log_stats", "hf_overrides", "worker_cls", "model_impl",
}  # fmt: skip
DraftSource = Literal["previous", "prompt", "output", "pool", "aligned", "lookahead"]
TEXT_SOURCES = ("previous", "prompt", "output", "pool")
SAMPLING_RULES = ("leviathan", "specinfer", "k_seq", "rsd")


class DecodingSettings(Strict):
    """How texts are drafted, verified and written."""

    engine: Literal["laserbatch", "vllm"] = Field(
        "laserbatch",
        description="This engine computes texts. vllm: vLLM, which must be installed, with pools of laserbatch and "
        "greedy verification.",
    )
    vllm: dict[str, Any] = Field(
        {}, description="With engine vllm, these are more arguments of vllm.LLM, such as {tensor_parallel_size: 2}."
    )
    model: str = Field(
        "sample",
        description="This folder holds the model: safetensors weights, configuration and tokenizer. sample: the "
        "bundled model.",
    )
    adapter: str | None = Field(
        None,
        description="The LoRA adapter in this folder (PEFT, safetensors) is merged into the model; this needs the "
        "extra `lora`. null: no adapter.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="The model computes in this type. auto: float32 on a CPU; on CUDA, or if the weights are "
        "quantised, the type of the weights.",
    )
    batch_size: int = Field(16, ge=1, description="One worker writes this many texts at once. Use 64 to 256 on a GPU.")
    max_new_tokens: int = Field(
        512,
        ge=1,
        description="A text ends after this many tokens at the latest. Raise it if the report shows many cut texts.",
    )
    verifier: Literal[
        "greedy", "top_k", "probability", "relaxed", "typical", "aasd", "fly", "leviathan", "specinfer", "k_seq", "rsd"
    ] = Field(
        "relaxed",
        description="This rule says which drafted tokens are accepted. greedy: the model's most likely token, so the "
        "text equals that of plain decoding; relaxed: a token among the top_k and above min_probability "
        "(LASER, Eq. 8); top_k, probability: one of the two conditions alone. typical (Medusa) accepts "
        "less probable tokens where the model is unsure, aasd only more probable ones; fly accepts any "
        "token if the next six drafted tokens are the model's most likely ones. With a temperature, "
        "samples of draft_models are verified by leviathan (one chain), specinfer or k_seq (SpecTr; "
        "several chains) or rsd (a tree without replacement).",
    )
    top_k: int = Field(
        2,
        ge=1,
        description="The verifiers top_k and relaxed accept a token among this many most probable ones. A higher "
        "number accepts more drafts and moves texts further from plain ones.",
    )
    min_probability: float = Field(
        0.1,
        ge=0.0,
        lt=1.0,
        description="The verifiers relaxed and probability accept a token only above this probability; typical lowers"
        " it and aasd raises it where the model is unsure. A lower value accepts more drafts and moves "
        "texts further from plain ones.",
    )
    temperature: float = Field(
        0.0,
        ge=0.0,
        description="Texts are sampled at this temperature; at 0 each token is the most likely one. With verifier "
        "greedy, drafts do not change which text is sampled for an entity and a prompt; with leviathan, "
        "specinfer, k_seq or rsd they do, and the text is still a sample of the model.",
    )
    drafters: tuple[DraftSource, ...] = Field(
        TEXT_SOURCES,
        description="Drafts come from these texts. aligned: the prompt with the model's alternatives to its tokens "
        "(AASD); lookahead: n-grams that the model generates ahead. With none, and no draft_models or "
        "draft_head, decoding is plain.",
    )
    draft_models: tuple[Path, ...] = Field(
        (), description="The small models in these folders draft too; they need the tokenizer of the model."
    )
    draft_head: Path | None = Field(
        None, description="The head in this folder drafts too; `laserbatch drafter train` trains one for the model."
    )
    draft_width: int = Field(
        1, ge=1, le=64, description="draft_models and draft_head draft this many alternative tokens at each depth."
    )
    draft_length: int = Field(
        5,
        ge=1,
        le=64,
        description="draft_models and draft_head draft this many tokens ahead; each costs one forward pass of the "
        "draft model.",
    )
    draft_branching: tuple[int, ...] = Field(
        (),
        description="With verifier rsd, a draft has this many tokens after each node of depth 0, 1, ... (RSD-C), in "
        "place of draft_width and draft_length.",
    )
    max_draft_tokens: int | None = Field(
        None,
        ge=0,
        le=64,
        description="A draft tree has at most this many tokens; 0 decodes plainly. null: the number that is fastest "
        "by the measured cost of a step and the pool's calibration.",
    )
    min_acceptance: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        description="A token is not drafted if the estimated probability that its path is accepted is lower than "
        "this. null: the value that is fastest, chosen together with max_draft_tokens.",
    )
    step_cost: Path | None = Field(
        None,
        description="This YAML or JSON file holds the measured cost of steps, by which the draft budget is chosen. "
        "null: the first run measures it and keeps it in the workspace.",
    )
    # "triton": one kernel over ragged sequences, in CUDA graphs; "torch": padded masks; "auto": triton on CUDA if it is
    # installed, else torch. A kernel that fails or differs in its first runs is given up with a warning.
    attention: Literal["auto", "torch", "triton"] = "auto"
    max_cache_tokens: int | None = Field(
        None,
        ge=1,
        description="The KV cache of a worker holds at most this many tokens; lower it if memory runs short. null: "
        "what fits into half of the free memory on a CPU, into most of it on CUDA.",
    )

    @model_validator(mode="before")
    @classmethod
    def _greedy_in_vllm(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("engine") == "vllm":
            given = {"verifier": "greedy"} | given
        return given

    @model_validator(mode="after")
    def _fits_vllm(self) -> "DecodingSettings":
        if self.engine != "vllm":
            if self.vllm:
                raise ValueError("vllm has arguments for an engine that is not used: say `engine: vllm`, or {}")
            return self
        taken = sorted(self.vllm.keys() & OURS_IN_VLLM)
        for problem, advice in (
            (
                self.verifier != "greedy" and f"verifier {self.verifier}",
                "say `verifier: greedy`, vLLM has no other",
            ),
            (self.temperature and f"temperature {self.temperature:g}", "texts of vLLM are not sampled: say 0"),
            (self.adapter and f"adapter {self.adapter}", "merge it into the model first"),
            ((self.draft_models or self.draft_head) and "draft_models, draft_head", "vLLM drafts from pools here"),
            (taken and f"vllm.{', vllm.'.join(taken)}", "options of this section say it"),
        ):
            if problem:
                raise ValueError(f"{problem} with engine vllm: {advice}")
        return self

    def provenance(self) -> dict[str, Any]:
        """What decides a text: part of its fingerprint and of its record.

        Engine, batch size, threads and the draft budget are left out: they change how fast a text comes, not which may.
        """
        names = {"verifier", "top_k", "min_probability", "max_new_tokens", "dtype"}
        if self.temperature:  # of texts that are not sampled fingerprints stay as they were
            names |= {"temperature"}
        return self.model_dump(mode="json", include=names)

    @property
    def gpus_a_worker(self) -> int:
        """That an engine's model is spread over."""
        return int(self.vllm.get("tensor_parallel_size", 1)) * int(self.vllm.get("pipeline_parallel_size", 1))

    @property
    def drafts_from_texts_alone(self) -> bool:
        """So that a pool's replays say what a budget gains."""
        return not self.draft_models and self.draft_head is None and set(self.drafters) <= set(TEXT_SOURCES)

    @model_validator(mode="after")
    def _samples_exactly(self) -> "DecodingSettings":
        rule = f"verifier {self.verifier}"
        if self.verifier in SAMPLING_RULES:
            if not self.temperature:
                raise ValueError(f"{rule} samples: say a temperature above 0, or `verifier: greedy`")
            num_models = len(self.draft_models) + (self.draft_head is not None)
            if num_models == 0:
                raise ValueError(f"{rule} judges what a small model or a head draws: name one, or say `greedy`")
            if num_models > 1 and (self.verifier != "specinfer" or self.draft_head is not None):
                raise ValueError(f"{rule} judges what one model draws, {num_models} are named")
        elif self.temperature and self.verifier != "greedy":
            raise ValueError(
                f"temperature {self.temperature:g} samples, which {rule} would distort: say "
                "`verifier: greedy`, which accepts drafted samples, or `temperature: 0`"
            )
        if self.draft_branching and self.verifier != "rsd":
            raise ValueError(f"draft_branching is of verifier rsd, not of {self.verifier}: say draft_width")
        return self


@dataclass(frozen=True)
class Budget:
    """How much of a draft is verified: the largest tree, and the least estimated acceptance of a token's path."""

    max_draft_tokens: int = 16
    min_acceptance: float = 0.07

    @classmethod
    def of(cls, settings: DecodingSettings) -> "Budget":
        """The settings' own numbers; where they leave the choice, those of the class, in vLLM of a chain: nothing is
        measured here."""
        usual = cls(8, 0.05) if settings.engine == "vllm" else cls()
        return usual.with_given(settings.max_draft_tokens, settings.min_acceptance)

    def with_given(self, max_draft_tokens: int | None, min_acceptance: float | None) -> "Budget":
        """The same with numbers that somebody gave in place of its own."""
        given = {"max_draft_tokens": max_draft_tokens, "min_acceptance": min_acceptance}
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    @property
    def min_log_acceptance(self) -> float:
        return math.log(self.min_acceptance) if self.min_acceptance > 0 else -math.inf
