"""Tiny random models of several architectures, a byte tokenizer, and drafters that are good, bad and absurd."""

import copy

import numpy as np
import torch
from packs import chain_tree
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from laserbatch.pipeline.decoding.drafters import Drafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.load import prepare_model
from laserbatch.pipeline.decoding.sequence import GenerationRequest
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.token_tree import EMPTY_TREE, TokenTree
from laserbatch.retrieval_pools.sources import SOURCE_POOL, SOURCE_PREVIOUS, SOURCE_PROMPT

VOCAB = 96
END_IDS = [5, 17, 23, 31, 40, 52, 66, 77]
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": END_IDS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
ARCHITECTURES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "mistral": {"sliding_window": 9},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
    },
    "phi3": {},
    "gpt_neox": {},
    "gemma2": {"head_dim": 8, "sliding_window": 9, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
}

BOTH = ["sliding_attention", "full_attention"]
MLA = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
       "v_head_dim": 12, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Further architectures in use; windows, if any, are shorter than the texts.
IN_USE = {
    "olmo2": {},
    "olmo3": {"sliding_window": 9, "layer_types": BOTH},
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 0.7},
    "starcoder2": {"sliding_window": 9},
    "cohere2": {"sliding_window": 9, "layer_types": BOTH, "head_dim": 8},
    "gemma3n_text": {
        "head_dim": 8, "sliding_window": 9, "num_hidden_layers": 4, "layer_types": BOTH * 2, "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "laurel_rank": 4,
        "altup_num_inputs": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
    },
    "gemma4_text": {
        "head_dim": 8, "global_head_dim": 16, "sliding_window": 9, "num_hidden_layers": 4, "layer_types": BOTH * 2,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
    },
    "smollm3": {"use_sliding_window": True, "sliding_window": 9, "layer_types": BOTH, "no_rope_layers": [1, 0]},
    "phi": {},
    "mixtral": {"num_local_experts": 4, "sliding_window": 9},
    "qwen2_moe": EXPERTS | {
        "shared_expert_intermediate_size": 24, "use_sliding_window": True, "sliding_window": 9, "layer_types": BOTH,
    },
    "qwen3_moe": EXPERTS | {"head_dim": 8, "use_sliding_window": True, "sliding_window": 9},
    "deepseek_v2": MLA | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "deepseek_v3": MLA | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "glm4": {"head_dim": 8},
    "nemotron": {"head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "gpt_oss": {
        "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None, "sliding_window": 9,
    },
    "llama4_text": {
        "head_dim": 8, "layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0], "intermediate_size_mlp": 48,
        "num_local_experts": 4, "attn_temperature_tuning": False,
    },
    "exaone4": {"sliding_window": 9, "sliding_window_pattern": 2, "layer_types": BOTH},
}  # fmt: skip


def tiny_model(architecture: str = "llama", seed: int = 0, **changes):
    """A random model with eager attention, whose logits are spread out so that near-ties are unlikely."""
    own = (ARCHITECTURES | IN_USE).get(architecture, {})
    config = AutoConfig.for_model(architecture, **(COMMON | own | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = END_IDS
    return model


@torch.no_grad()
def perturb_constants(model, seed: int = 0) -> None:
    """Make constant parameters (zeros or ones) random, so that leaving one out changes texts."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.min() == parameter.max():
            parameter.add_(0.3 * torch.randn_like(parameter))


def plain_texts(model, prompts: list[np.ndarray], max_new_tokens: int) -> list[list[int]]:
    """Greedy texts by `transformers.generate`, one prompt at a time, without the end token."""
    texts = []
    for prompt in prompts:
        ids = torch.from_numpy(prompt.astype(np.int64))[None].to(model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
        )
        text = out[0, len(prompt) :].tolist()
        ends = [i for i, token in enumerate(text) if token in END_IDS]
        texts.append(text[: ends[0]] if ends else text)
    return texts


def tiny_engine(model, tokenizer=None, max_prefill_tokens: int | None = None, **settings) -> Engine:
    """An engine over a copy of a model."""
    engine = Engine(prepare_model(copy.deepcopy(model), tokenizer), DecodingSettings(**settings))
    engine.max_prefill_tokens = max_prefill_tokens or engine.max_prefill_tokens
    return engine


def tiny_prompts(count: int = 9, seed: int = 0) -> list[np.ndarray]:
    """Prompts of 1 to 40 tokens; every third begins with the same 20 tokens."""
    rng = np.random.default_rng(seed)
    template = rng.integers(18, VOCAB, 20)
    prompts = []
    for i in range(count):
        own = rng.integers(18, VOCAB, int(rng.integers(1, 21)))
        prompts.append((np.concatenate((template, own)) if i % 3 == 0 else own).astype(np.int32))
    return prompts


def requests_for(prompts, max_new_tokens: int = 24, previous=None) -> list[GenerationRequest]:
    return [
        GenerationRequest(str(i), prompt, None if previous is None else previous[i], None, max_new_tokens)
        for i, prompt in enumerate(prompts)
    ]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 byte tokens and one end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


class NonsenseDrafter(Drafter):
    """Drafts random trees, with tokens outside the vocabulary too; they depend on the context alone."""

    def __init__(self, num_nodes: int = 11) -> None:
        self.num_nodes = num_nodes

    def draft(self, sequence) -> TokenTree:
        rng = np.random.default_rng(int(sequence.context.sum()) * 1000 + len(sequence.context))
        n = int(rng.integers(0, self.num_nodes + 1))
        parents = np.array([rng.integers(-1, i) if i else -1 for i in range(n)], np.int32)
        tokens = rng.integers(-2, VOCAB + 3, n).astype(np.int32)
        log_acceptance = -rng.random(n).astype(np.float32)
        return TokenTree(tokens, parents, log_acceptance, np.full(n, SOURCE_POOL, np.uint8))


class OracleDrafter(Drafter):
    """Drafts the true text among wrong branches, sometimes with a wrong token."""

    def __init__(self, texts: list[list[int]], depth: int = 6) -> None:
        self.texts = texts
        self.depth = depth

    def draft(self, sequence) -> TokenTree:
        text = self.texts[int(sequence.request.request_id)]
        at = sequence.num_output
        good = list(text[at : at + self.depth])
        if not good:
            return EMPTY_TREE
        if at % 3 == 0:
            good[-1] = (good[-1] + 1) % VOCAB
        wrong = [(good[0] + 1) % VOCAB, (good[0] + 2) % VOCAB]
        tokens = [wrong[0], good[0], wrong[1], *good[1:], wrong[1]]
        parents = [-1, -1, 0]
        last = 1
        for _ in good[1:]:
            parents.append(last)
            last = len(parents) - 1
        parents.append(1)  # a sibling of the second good token
        n = len(tokens)
        source = np.full(n, SOURCE_PREVIOUS, np.uint8)
        return TokenTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.zeros(n, np.float32), source)


class PromptLookupDrafter(Drafter):
    """Drafts the tokens that followed earlier occurrences of the last token."""

    def draft(self, sequence) -> TokenTree:
        context = sequence.context
        places = np.flatnonzero(context[:-1] == context[-1])
        return EMPTY_TREE if len(places) == 0 else chain_tree(context[places[-1] + 1 :][:5], SOURCE_PROMPT)
