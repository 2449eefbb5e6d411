"""Train the sample model from scratch: `python benchmarks/train_sample.py --out models/sample`.

Training texts come from sample worlds with seeds of 999 and up; `laserbatch data sample` uses seed 0 and the demo 7.
`sample_exercises` makes the examples. Only answer tokens have a loss. World, tokenizer, order and initial weights are
seeded. A schedule that `--max-minutes` ends depends on the machine's speed, so the committed weights cannot be
reproduced bit for bit.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from entities import Entity, render_prompt, world_entities
from sample_exercises import (
    Example,
    batches,
    make_copy_example,
    make_example,
    make_lore_examples,
    shorten,
    template_of,
)
from sample_texts import WRITERS, write_item_text, write_user_text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.llama.modeling_llama import LlamaAttention

FIRST_TRAINING_SEED = 1_000
HELD_OUT_SEED = 0
USERS_PER_WORLD, ITEMS_PER_WORLD = 400, 600
SEED, NUM_THREADS, NUM_STEPS = 0, 2, 3_200
VOCABULARY, HIDDEN, HEAD, NUM_LAYERS = 3_072, 192, 64, 4
USER_TOKENS, ITEM_TOKENS, LORE_TOKENS = 2_048, 768, 512  # per step and batch: users, items, lore exercises
EMBEDDING_STD = 0.1
POSITION_GAIN, NOTE_GAIN, MATCH_GAIN, COPY_GAIN, NUM_SLOW = 3.0, 0.25, 2.5, 0.8, 18
LOSS_WEIGHTS = {"user": 1.0, "item": 0.5, "copy": 1.0, "lore": 1.0}
SPECIAL = ("<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Stage:
    """A part of the schedule: the model learns to look up on short histories, then to count on long ones."""

    until: float  # share of the schedule
    longest: int  # history
    copy_tokens: int  # of each step's batch of copying exercises


STAGES = (Stage(0.15, 4, 1_200), Stage(0.3, 8, 800), Stage(0.45, 14, 600), Stage(1.0, 40, 400))
RATE = 2e-3  # Muon's, for the matrices
DECAY_SHARE = 0.4  # last part of the schedule, in which the rate falls to 0
IGNORED = -100
FRAMEWORKS = tuple(WRITERS)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Train byte-level BPE on KAR's prompts and answers of one world."""
    rng = np.random.default_rng([SEED, 7])
    users, items = world_entities(FIRST_TRAINING_SEED - 1, 1_500, 1_500)
    # prompts are rendered with a byte tokenizer: only their text is needed
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    plain = wrap_tokenizer(_byte_tokenizer())
    texts = []
    for entity in users + items:
        texts.append(plain.decode(render_prompt(template_of(entity.side), entity, plain, 1_000_000).token_ids))
        history = entity.history[-24:]
        texts.append(write_user_text(entity, history, rng) if entity.side == "user" else write_item_text(entity, rng))
    tokenizer.train_from_iterator(texts, trainer)
    return wrap_tokenizer(tokenizer)


def _byte_tokenizer() -> Tokenizer:
    alphabet = list(SPECIAL) + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer with roles for its special tokens, and with the chat template."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|end|>",
        extra_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
    )  # fmt: skip
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_model(tokenizer) -> LlamaForCausalLM:
    """A model of the Llama architecture with about two million parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=HIDDEN * 5 // 2,
        num_hidden_layers=NUM_LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=HEAD,
        max_position_embeddings=2_048, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True, attention_bias=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        _initialise(model)
    return model


def _initialise(model: LlamaForCausalLM) -> None:
    """Initialise weights so that tokens are distinguishable and an induction head is in place.

    Copying from the prompt needs two layers that work together (Olsson et al., 2022), which short training does not
    find. So layer 0 has a head that attends to the previous token. Layer 1 has a head that attends to the token after
    an earlier occurrence of the current token, and raises its logit. All other weights are random.
    """
    size, head = HIDDEN, HEAD
    for name, parameter in model.named_parameters():
        if "embed" in name:
            torch.nn.init.normal_(parameter, std=EMBEDDING_STD)
        elif parameter.ndim == 2:
            small = name.endswith(("o_proj.weight", "down_proj.weight"))
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5 * (0.2 if small else 0.7))
    embeddings = model.model.embed_tokens.weight
    embeddings[:, 0] = 3 * EMBEDDING_STD  # shared by all tokens; the positional head uses it
    read = torch.nn.init.orthogonal_(torch.empty(size, size))
    read[:, 0] = 0.0
    before, follow = read[:head], read[head : 2 * head]  # (head, size): read the previous token; read the copied token
    write = torch.nn.init.orthogonal_(torch.empty(size, head))  # where layer 0 writes the previous token
    write[0] = 0.0

    half = head // 2
    angles = model.config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    first, second = [part for part in model.modules() if isinstance(part, LlamaAttention)][:2]
    wave = torch.zeros(head)
    wave[:10] = POSITION_GAIN  # the ten fastest rotations distinguish neighbours
    turned = torch.zeros(head)  # `wave` rotated by one position, so that it matches the previous token
    turned[:half] = wave[:half] * torch.cos(angles)
    turned[half:] = wave[:half] * torch.sin(angles)
    first.q_proj.weight[:head] = 0.0
    first.k_proj.weight[:head] = 0.0
    first.q_proj.weight[:head, 0] = wave
    first.k_proj.weight[:head, 0] = turned
    first.v_proj.weight[:head] = before
    first.o_proj.weight[:, :head] = write * NOTE_GAIN

    slow = torch.cat([torch.arange(half - NUM_SLOW, half), torch.arange(head - NUM_SLOW, head)])  # hardly rotate
    mix = torch.nn.init.orthogonal_(torch.empty(len(slow), head)) * MATCH_GAIN
    for projection, source in ((second.q_proj, before), (second.k_proj, write.T)):
        projection.weight[:head] = 0.0
        projection.weight[slow] = mix @ source
    second.v_proj.weight[:head] = follow
    second.o_proj.weight[:, :head] = follow.T * COPY_GAIN


def answer_loss(model: LlamaForCausalLM, batch: list[Example]) -> torch.Tensor:
    """Mean cross-entropy of answer tokens; logits are computed only for their positions."""
    longest = max(len(example) for example in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    labels = torch.full((len(batch), longest), IGNORED)
    for row, example in enumerate(batch):
        start, stop = len(example.prompt_ids), len(example)
        ids[row, :stop] = torch.from_numpy(np.concatenate([example.prompt_ids, example.answer_ids]).astype(np.int64))
        labels[row, start - 1 : stop - 1] = ids[row, start:stop]  # predicted one position earlier
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # right padding: no mask is needed
    answered = labels != IGNORED
    return F.cross_entropy(model.lm_head(hidden[answered]).float(), labels[answered])


def held_out_losses(model: LlamaForCausalLM, held_out: dict[str, list[Example]]) -> dict[str, float]:
    """Mean loss per answer token, by framework and side."""
    model.eval()
    losses = {}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for kind, examples in held_out.items():
            total = 0.0
            for start in range(0, len(examples), 8):
                batch = examples[start : start + 8]
                total += float(answer_loss(model, batch)) * sum(len(example.answer_ids) for example in batch)
            losses[kind] = round(total / sum(len(example.answer_ids) for example in examples), 4)
    model.train()
    return losses


def make_optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]  # steps scale it
    return optimizers


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write bf16 safetensors, configuration and tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to(torch.bfloat16) for name, value in model.state_dict().items()}
    saved = LlamaForCausalLM(model.config).bfloat16()
    saved.load_state_dict(weights)
    saved.generation_config.do_sample = False
    saved.save_pretrained(out)
    tokenizer.save_pretrained(out)


def batches_of_world(
    users: list[Entity],
    items: list[Entity],
    tokenizer: PreTrainedTokenizerBase,
    stage: Stage,
    rng: np.random.Generator,
) -> Iterator[dict[str, list[Example]]]:
    """Yield the batches of each step, one of every kind, until all users were used."""

    def of() -> str:
        return FRAMEWORKS[rng.integers(len(FRAMEWORKS))]

    user_examples = [make_example(shorten(user, stage.longest, rng), tokenizer, rng, of()) for user in users]
    copy_examples = [
        make_copy_example(shorten(user, stage.longest, rng), tokenizer, rng) for user in users if user.history
    ]
    copy_batches = batches(copy_examples, stage.copy_tokens, rng)
    lore_batches = batches(make_lore_examples(items, tokenizer), LORE_TOKENS, rng)
    item_examples = [make_example(item, tokenizer, rng, of()) for item in items]
    user_batches = batches(user_examples, USER_TOKENS, rng)
    item_batches = batches(item_examples, ITEM_TOKENS, rng)
    for kinds in zip(user_batches, *map(itertools.cycle, (item_batches, copy_batches, lore_batches)), strict=False):
        yield dict(zip(LOSS_WEIGHTS, kinds, strict=True))


def train_step(
    model: LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    step_batches: dict[str, list[Example]],
    scale: float,
) -> dict[str, float]:
    """Make one update from all kinds at once, at `scale` of the full rates; return the loss of each kind."""
    loss = {}
    for kind, batch in step_batches.items():
        with torch.autocast("cpu", torch.bfloat16):
            kind_loss = answer_loss(model, batch)
        (LOSS_WEIGHTS[kind] * kind_loss).backward()
        loss[kind] = round(float(kind_loss.detach()), 4)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scale
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss


def main() -> None:
    """Train and save; print steps, training loss, held-out loss and time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/sample"))
    parser.add_argument("--max-minutes", type=float, default=45.0, help="shorten the schedule to end by then")
    parser.add_argument("--start", type=Path, help="folder of weights and tokenizer to continue from")
    parser.add_argument("--first-world", type=int, default=FIRST_TRAINING_SEED, help="seed of the first world")
    parser.add_argument("--rate", type=float, default=RATE, help="the highest learning rate")
    arguments = parser.parse_args()
    torch.set_num_threads(NUM_THREADS)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    if arguments.start is None:
        tokenizer = train_tokenizer()
        model = make_model(tokenizer)
    else:
        tokenizer = AutoTokenizer.from_pretrained(arguments.start)
        model = LlamaForCausalLM.from_pretrained(arguments.start, dtype=torch.float32)
    num_parameters = sum(p.numel() for p in model.parameters())
    users, items = world_entities(HELD_OUT_SEED, 400, 300)
    held_out = {
        f"{framework}_{entities[0].side}": [make_example(entity, tokenizer, rng, framework) for entity in entities[:64]]
        for framework in FRAMEWORKS
        for entities in (users, items)
    }
    print(f"{num_parameters} parameters, vocabulary {len(tokenizer)}", flush=True)
    optimizers = make_optimizers(model, arguments.rate)
    step, world, num_tokens, started = 0, 0, 0, time.monotonic()
    progress = 0.0  # finished share of the schedule: by steps, or by time if that ends first
    while progress < 1.0:
        stage = next(stage for stage in STAGES if progress < stage.until)
        users, items = world_entities(arguments.first_world + world, USERS_PER_WORLD, ITEMS_PER_WORLD)
        world += 1
        world_batches = batches_of_world(users, items, tokenizer, stage, rng)
        # each step learns from both sides: a normalised update must not help one and harm the other
        for step_batches in world_batches:
            minutes = (time.monotonic() - started) / 60
            progress = max(step / NUM_STEPS, minutes / arguments.max_minutes)
            if progress >= 1.0:
                break
            # warm-up, constant, linear decay
            scale = min(1.0, (step + 1) / 50) * min(1.0, (1.0 - progress) / DECAY_SHARE)
            loss = train_step(model, optimizers, step_batches, scale)
            num_tokens += sum(len(example) for batch in step_batches.values() for example in batch)
            step += 1
            if step % 25 == 0:
                speed = num_tokens / (time.monotonic() - started)
                print(f"step {step} progress {progress:.3f} loss {loss} {speed:.0f} tokens/s", flush=True)
            if step % 200 == 0:
                print(f"step {step} held-out {held_out_losses(model, held_out)}", flush=True)
                save(model, tokenizer, arguments.out)
    losses = held_out_losses(model, held_out)
    save(model, tokenizer, arguments.out)
    summary = {
        "parameters": num_parameters, "steps": step, "tokens": num_tokens, "worlds": world, "held_out_loss": losses,
        "minutes": round((time.monotonic() - started) / 60, 1),
    }  # fmt: skip
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
