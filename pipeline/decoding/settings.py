"""Options of decoding: which model, how texts are drafted and verified, and how much runs at once."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from laserbatch.pipeline.decoding.endpoint_settings import EndpointSettings
from laserbatch.pipeline.decoding.plugins import RULES, TEXT_SOURCES, drafter_plugin, verifier_plugin
from laserbatch.pipeline.plugins import validated_options
from laserbatch.pipeline.validation import Strict

# Arguments of vllm.LLM that other options set, or that would load or run code or files that nobody has reviewed.
OURS_IN_VLLM = {
    "model", "tokenizer", "dtype", "max_num_seqs", "speculative_config", "generation_config", "load_format", "seed",
    "trust_remote_code", "disable_log_stats", "hf_overrides", "worker_cls", "model_impl",
}  # fmt: skip


class DecodingSettings(Strict):
    """How texts are drafted, verified and written."""

    engine: Literal["laserbatch", "vllm", "endpoint"] = Field(
        default="laserbatch",
        description="This engine writes texts. vllm: vLLM, which must be installed, with pools of laserbatch and "
        "greedy verification. endpoint: a server with OpenAI's API, without drafts.",
    )
    vllm: dict[str, Any] = Field(
        default={},
        description="With engine vllm, these are more arguments of vllm.LLM, such as {tensor_parallel_size: 2}.",
    )
    endpoint: EndpointSettings | None = Field(
        default=None,
        description="With engine endpoint, this is the server: {url: http://localhost:8000/v1, model: NAME}; "
        "docs/endpoint.md has its other options.",
    )
    model: str = Field(
        default="sample",
        description="This folder holds the model: safetensors weights, configuration and tokenizer. sample: the "
        "bundled model.",
    )
    adapter: str | None = Field(
        default=None,
        description="The LoRA adapter in this folder (PEFT, safetensors) is merged into the model; this needs the "
        "extra `lora`. With engine vllm, vLLM applies it unmerged. null: no adapter.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="The model computes in this type. auto: on a GPU the type of the weights; on a CPU bfloat16 if "
        "they are stored in 16 bits and the processor multiplies bfloat16, otherwise float32.",
    )
    batch_size: int = Field(
        default=16, ge=1, description="One worker writes this many texts at once. Use 64 to 256 on a GPU."
    )
    max_new_tokens: int = Field(
        default=512, ge=1,
        description="A text ends after this many tokens at the latest. Raise it if the report shows many cut texts.",
    )  # fmt: skip
    thinking: Literal["off", "cut"] = Field(
        default="off",
        description="off: the chat template is asked for an answer without thoughts, if it has a switch for that "
        "(enable_thinking, thinking). cut: a reasoning model thinks first, for which max_new_tokens must leave room. "
        "Thoughts are cut from texts either way.",
    )
    verifier: str = Field(
        default="relaxed",
        description="This rule says which drafted tokens are accepted. greedy: the model's most likely token, so the "
        "text equals that of plain decoding; relaxed: a token among the top_k and above min_probability "
        "(LASER, Eq. 8); top_k, probability: one of the two conditions alone. laserbatch.research adds typical, aasd, "
        "fly, and for samples leviathan, specinfer, k_seq, rsd.",
    )
    top_k: int = Field(
        default=2, ge=1,
        description="The verifiers top_k and relaxed accept a token among this many most probable ones. A higher "
        "number accepts more drafts and moves texts further from plain ones.",
    )  # fmt: skip
    min_probability: float = Field(
        default=0.2, ge=0.0, lt=1.0,
        description="The verifiers relaxed and probability accept a token only above this probability. A lower value "
        "accepts more drafts and moves texts further from plain ones.",
    )  # fmt: skip
    temperature: float = Field(
        default=0.0, ge=0.0,
        description="Texts are sampled at this temperature; at 0 each token is the most likely one. With verifier "
        "greedy, drafts do not change which text is sampled for an entity and a prompt.",
    )  # fmt: skip
    guided: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: answers take the form that their template asks for, such as JSON or numbered lines, because "
        "tokens that would leave it are never written. off: the model writes any text, and one that cannot be parsed "
        "goes to quarantine.",
    )
    drafters: tuple[str, ...] = Field(
        default=TEXT_SOURCES,
        description="Drafts come from these texts: the entity's previous text, its prompt, its output so far, and the "
        "pool. Packages add drafters of other kinds (laserbatch.research: trained, aligned, lookahead). With none "
        "decoding is plain.",
    )
    drafter_options: dict[str, SerializeAsAny[Strict]] = Field(
        default={},
        description="The options of drafters that packages add, by drafter, such as {trained: {head: DIR}}.",
    )
    max_draft_tokens: int | None = Field(
        default=None, ge=0, le=64,
        description="A draft tree has at most this many tokens; 0 decodes plainly. null: the number that is fastest "
        "by the measured cost of a step and the pool's calibration.",
    )  # fmt: skip
    min_acceptance: float | None = Field(
        default=None, ge=0.0, le=1.0,
        description="A token is not drafted if the estimated probability that its path is accepted is lower than "
        "this. It does not apply to tokens that a model draws for a verifier of samples (leviathan, specinfer, k_seq, "
        "rsd). null: the value that is fastest, chosen together with max_draft_tokens.",
    )  # fmt: skip
    step_cost: Path | None = Field(
        default=None,
        description="This YAML or JSON file holds the measured cost of steps, by which the draft budget is chosen. "
        "null: the first run measures it and keeps it in the workspace.",
    )
    # "triton": one kernel over ragged sequences, in CUDA graphs; "torch": compiled loops on a CPU, or padded masks;
    # "auto": triton on CUDA if it is installed, and torch otherwise or, with a warning, if the kernel fails or differs.
    attention: Literal["auto", "torch", "triton"] = "auto"
    max_cache_tokens: int | None = Field(
        default=None, ge=1,
        description="The KV cache of a worker holds at most this many tokens; lower it if memory runs short. null: "
        "what fits into half of the free memory on a CPU, into most of it on CUDA.",
    )  # fmt: skip

    @field_validator("thinking", "guided", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare `off` as false

    @model_validator(mode="before")
    @classmethod
    def _greedy_in_other_engines(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("engine") in ("vllm", "endpoint"):
            undrafted = {"drafters": ()} if values["engine"] == "endpoint" else {}
            values = {"verifier": "greedy"} | undrafted | values
        return values

    @model_validator(mode="after")
    def _fits_engine(self) -> "DecodingSettings":
        if self.engine != "endpoint" and self.endpoint is not None:
            raise ValueError(f"endpoint is not used by engine {self.engine}: set `engine: endpoint`, or remove it")
        if self.engine == "endpoint" and self.endpoint is None:
            raise ValueError("engine endpoint needs a server: set `endpoint: {url: ..., model: ...}`")
        if self.engine != "vllm" and self.vllm:
            raise ValueError(f"vllm is not used by engine {self.engine}: set `engine: vllm`, or remove it")
        verifier = self.verifier != "greedy" and f"verifier {self.verifier}"
        temperature = self.temperature and f"temperature {self.temperature:g}"
        drafters, plugins = ", ".join(self.drafters), ", ".join(self.plugin_drafters)
        unfit = {
            "endpoint": {
                "set `verifier: greedy`, because nothing is drafted": verifier,
                "set `temperature: 0`, because texts of a server are not sampled": temperature,
                "load it into the server, and name it in endpoint.model": self.adapter and f"adapter {self.adapter}",
                "leave them out, because a server drafts by itself": drafters and f"drafters {drafters}",
            },
            "vllm": {
                "set `verifier: greedy`, because vLLM has no other": verifier,
                "set `temperature: 0`, because texts of vLLM are not sampled": temperature,
                "leave them out, because vLLM drafts only from texts": plugins and f"drafters {plugins}",
                "leave them out, because other options of `decoding` set them": ", ".join(
                    sorted(f"vllm.{key}" for key in self.vllm.keys() & OURS_IN_VLLM)
                ),
            },
        }
        for advice, problem in unfit.get(self.engine, {}).items():
            if problem:
                raise ValueError(f"{problem} with engine {self.engine}: {advice}")
        return self

    @property
    def borrows_tokenizer(self) -> bool:
        """Whether a server gets messages and no folder has its tokenizer: the bundled one then bounds prompts."""
        return self.model == "sample" and self.endpoint is not None and self.endpoint.api == "chat"

    @property
    def model_key(self) -> str:
        return "decoding.model" if self.endpoint is None else "decoding.endpoint.model"

    def provenance(self) -> dict[str, Any]:
        """The options on which a text depends, for its fingerprint and its record.

        Engine, batch size, threads and draft budget are left out: they change the speed, not which texts may result.
        """
        names = {"verifier", "top_k", "min_probability", "max_new_tokens", "dtype"}
        if self.temperature:  # left out at 0, so that older fingerprints of unsampled texts stay valid
            names |= {"temperature"}
        endpoint = {} if self.endpoint is None else self.endpoint.provenance()
        return self.model_dump(mode="json", include=names) | endpoint

    @property
    def chat_options(self) -> dict[str, Any]:
        """Variables for chat templates: a template reads the one that is its switch and ignores the other."""
        return dict.fromkeys(("enable_thinking", "thinking"), self.thinking == "cut")

    @property
    def gpus_a_worker(self) -> int:
        """The number of GPUs that one worker's model is spread over; 0 if a server elsewhere has the model."""
        if self.engine == "endpoint":
            return 0
        return int(self.vllm.get("tensor_parallel_size", 1)) * int(self.vllm.get("pipeline_parallel_size", 1))

    @property
    def plugin_drafters(self) -> tuple[str, ...]:
        """The drafters that other packages provide, in the order of `drafters`."""
        return tuple(name for name in self.drafters if name not in TEXT_SOURCES)

    @property
    def text_sources(self) -> tuple[str, ...]:
        """The built-in drafters among `drafters`; replays of a pool tell their gain."""
        return tuple(name for name in self.drafters if name in TEXT_SOURCES)

    @property
    def verifier_samples(self) -> bool:
        """Whether the verifier draws samples, for which drafts must stay as they were drawn."""
        return self.verifier not in RULES and verifier_plugin(self.verifier).samples

    @property
    def chooses_by_step(self) -> bool:
        """Whether each step chooses how much it verifies: no text depends on that, and nothing is configured."""
        is_open = self.max_draft_tokens is None and self.min_acceptance is None and self.step_cost is None
        return is_open and self.verifier == "greedy" and self.engine != "vllm"

    @property
    def is_relaxed(self) -> bool:
        """Whether the verifier accepts tokens that the model without drafts would neither write nor sample."""
        return self.verifier != "greedy" and not self.verifier_samples

    def options_of(self, drafter: str) -> Any:
        """The options of a drafter that another package provides."""
        return self.drafter_options.get(drafter) or drafter_plugin(drafter).Options()

    @field_validator("verifier")
    @classmethod
    def _is_a_rule(cls, name: str) -> str:
        if name not in RULES:
            verifier_plugin(name)
        return name

    @field_validator("drafters")
    @classmethod
    def _are_drafters(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in TEXT_SOURCES:
                drafter_plugin(name)
        if len(set(names)) < len(names):
            raise ValueError("names a drafter twice; keep one of them")
        return names

    @field_validator("drafter_options", mode="before")
    @classmethod
    def _validated_by_plugins(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        return {name: validated_options(drafter_plugin(name).Options, value, name) for name, value in raw.items()}

    @model_validator(mode="after")
    def _goes_with_plugins(self) -> "DecodingSettings":
        for name in self.drafter_options.keys() - set(self.drafters):
            raise ValueError(f"drafter_options has {name}, which is not among drafters: add it there, or remove it")
        for name in self.plugin_drafters:
            drafter_plugin(name).check(self.options_of(name), self)
        if self.verifier not in RULES:
            verifier_plugin(self.verifier).check(self)
        if self.verifier_samples and not self.temperature:
            raise ValueError(f"verifier {self.verifier} samples: set a temperature above 0, or `verifier: greedy`")
        if self.temperature and self.is_relaxed:
            raise ValueError(
                f"temperature {self.temperature:g} samples, and verifier {self.verifier} would distort samples: set "
                "`verifier: greedy`, which accepts drafted samples, or `temperature: 0`"
            )
        return self


@dataclass(frozen=True)
class Budget:
    """Limits of the drafts that are verified: the largest tree, and the least estimated acceptance of a node's path."""

    max_draft_tokens: int = 16
    min_acceptance: float = 0.07
    is_by_step: bool = False  # each step verifies what pays at its number of sequences (`StepBudget`)

    @classmethod
    def of(cls, settings: DecodingSettings) -> "Budget":
        """The numbers of the settings; where these are None, fixed defaults (for vLLM those of a chain): nothing is
        measured here."""
        usual = cls(8, 0.05) if settings.engine == "vllm" else cls()
        return usual.with_overrides(settings.max_draft_tokens, settings.min_acceptance)

    def with_overrides(self, max_draft_tokens: int | None, min_acceptance: float | None) -> "Budget":
        """A copy in which the numbers that are not None replace its own."""
        overrides = {"max_draft_tokens": max_draft_tokens, "min_acceptance": min_acceptance}
        return replace(self, **{name: value for name, value in overrides.items() if value is not None})

    @property
    def min_log_acceptance(self) -> float:
        return math.log(self.min_acceptance) if self.min_acceptance > 0 else -math.inf
