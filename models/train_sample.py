"""Train the sample model from nothing: `python models/train_sample.py --out models/sample`.

This script owns the sample model: its tokenizer, its architecture, what it is trained on and how. Training texts
come from sample worlds of other seeds than the one that `laserbatch data sample` and the demo use (seed 0), rendered
by the same code as production prompts; answers come from `sample_texts`. Loss on answer tokens only.
World, tokenizer, order and initial weights are seeded. A schedule that ends by `--max-minutes` depends on the
machine's speed, so the committed weights are not reproduced bit for bit.
"""

import argparse
import itertools
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from models.sample_texts import POSITIVE_RATING, write_item_text, write_user_text
from pipeline.knowledge.entities import Entity, iter_entities
from pipeline.knowledge.prompts import load_template, render_prompt
from pipeline.tables.read import read_tables
from pipeline.tables.sample_lore import THEMES, title_themes
from pipeline.tables.sample_world import LAST_DATE, write_sample_world

FIRST_TRAINING_SEED = 1_000
HELD_OUT_SEED = 0  # the demo's world
USERS_PER_WORLD, ITEMS_PER_WORLD = 400, 600
EMBEDDING_STD = 0.1
POSITION_GAIN, NOTE_GAIN, MATCH_GAIN, COPY_GAIN, NUM_SLOW = 3.0, 0.25, 2.5, 0.8, 18
LORE_TITLES = 6  # in one exercise
ITEM_WEIGHT = 0.5  # of the items' loss against the users'
SPECIAL = ("<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAX_PROMPT_TOKENS = 1_024


@dataclass(frozen=True)
class Stage:
    """A part of the schedule: looking things up is learned on short histories, then counting on long ones."""

    until: float  # share of the schedule
    longest: int  # history
    copy_tokens: int  # of each step's batch of copying exercises


FROM_NOTHING = (Stage(0.15, 4, 1_200), Stage(0.3, 8, 800), Stage(0.45, 14, 600), Stage(1.0, 40, 400))
CONTINUED = (Stage(1.0, 40, 400),)
IGNORED = -100


@dataclass(frozen=True)
class Example:
    """One prompt and its answer, end token included."""

    prompt_ids: np.ndarray  # int32[n]
    answer_ids: np.ndarray  # int32[m]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


def world_entities(seed: int, num_users: int, num_items: int) -> tuple[list[Entity], list[Entity]]:
    """Users and items of a sample world, as known at the end of its last day."""
    with tempfile.TemporaryDirectory() as folder:
        write_sample_world(folder, num_users=num_users, num_items=num_items, future_days=0, seed=seed)
        tables = read_tables(folder, LAST_DATE)
        return list(iter_entities(tables, "user")), list(iter_entities(tables, "item"))


def shorten(entity: Entity, longest: int, rng: np.random.Generator) -> Entity:
    """Now and then drop part of a history, so that every length is seen; never more than `longest` events."""
    keep = min(len(entity.history), longest)
    if rng.random() < 0.4:
        keep = int(rng.integers(keep + 1))
    return replace(entity, history=entity.history[len(entity.history) - keep :])


def make_example(entity: Entity, tokenizer: PreTrainedTokenizerBase, rng: np.random.Generator) -> Example:
    """Prompt and answer of one entity, the prompt rendered as in production."""
    template = load_template(f"kar_{entity.side}")
    rendered = render_prompt(template, entity, tokenizer, MAX_PROMPT_TOKENS)
    if entity.side == "user":
        text = write_user_text(entity, entity.history[len(entity.history) - rendered.num_history :], rng)
    else:
        text = write_item_text(entity, rng)
    answer = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return Example(rendered.token_ids, np.array(answer, np.int32))


def make_copy_example(entity: Entity, tokenizer: PreTrainedTokenizerBase, rng: np.random.Generator) -> Example:
    """An exercise: copy all history lines of the prompt, or those of liked titles. Dense practice in looking up.

    The prompt ends with what is asked for, else such a list would be an answer to the prompt itself.
    """
    template = load_template("kar_user")
    rendered = render_prompt(template, entity, tokenizer, MAX_PROMPT_TOKENS)
    shown = entity.history[len(entity.history) - rendered.num_history :]
    lines = rendered.text.split(template.history.heading + "\n")[1].split("<|assistant|>")[0].split("\n")
    heading = "All titles:"
    if rng.random() < 0.5:
        heading = "Liked titles:"
        lines = [line for line, event in zip(lines, shown, strict=False) if event.rating >= POSITIVE_RATING]
    asked = tokenizer(heading, add_special_tokens=False)["input_ids"]
    answer = tokenizer("\n".join(["", *lines]), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    prompt_ids = np.concatenate([rendered.token_ids, np.array(asked, np.int32)])
    return Example(prompt_ids, np.array(answer, np.int32))


def make_lore_example(items: list[Entity], tokenizer: PreTrainedTokenizerBase) -> Example:
    """An exercise: say of each title what it is about. Dense practice in the lore, of which an answer needs little."""
    titles = [str(item.attributes["title"]) for item in items]
    content = "\n".join(["What are these titles about?", *titles])
    prompt = [{"role": "user", "content": content}]
    prompt_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    lines = []
    for title in titles:
        lore = title_themes(title)
        lines.append(f"{title}: about {THEMES[lore.main].name}, with {THEMES[lore.undertone].name}")
    answer = tokenizer("\n".join(lines), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return Example(np.array(prompt_ids, np.int32), np.array(answer, np.int32))


def train_tokenizer(vocab_size: int, seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over prompts and answers of one world."""
    rng = np.random.default_rng([seed, 7])
    users, items = world_entities(FIRST_TRAINING_SEED - 1, 1_500, 1_500)
    # characters stand for tokens here: prompts are needed as text only
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    plain = wrap_tokenizer(_byte_tokenizer())
    texts = []
    for entity in users + items:
        texts.append(render_prompt(load_template(f"kar_{entity.side}"), entity, plain, 1_000_000).text)
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
    """The same tokenizer with roles for its special tokens and the chat template."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|end|>",
        extra_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
    )  # fmt: skip
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_model(vocab_size: int, tokenizer: PreTrainedTokenizerBase, arguments: argparse.Namespace) -> LlamaForCausalLM:
    """About three million parameters, Llama architecture."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=arguments.hidden, intermediate_size=arguments.hidden * 5 // 2,
        num_hidden_layers=arguments.layers, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=2_048, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True, attention_bias=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        _initialise(model)
    return model


def _initialise(model: LlamaForCausalLM) -> None:
    """Start with tokens that can be told apart, and with an induction head in place.

    Copying from the prompt needs two layers to agree (Olsson et al., 2022), which short training does not find by
    itself. Here layer 0 has a head that looks at the token before, and layer 1 one that looks at what followed an
    earlier occurrence of the present token and raises its logit. Everything else starts at random.
    """
    config = model.config
    size, head = config.hidden_size, config.head_dim
    for name, parameter in model.named_parameters():
        if "embed" in name:
            torch.nn.init.normal_(parameter, std=EMBEDDING_STD)
        elif parameter.ndim == 2:
            small = name.endswith(("o_proj.weight", "down_proj.weight"))
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5 * (0.2 if small else 0.7))
    embeddings = model.model.embed_tokens.weight
    embeddings[:, 0] = 3 * EMBEDDING_STD  # what all tokens share: the handle of the positional head
    read = torch.nn.init.orthogonal_(torch.empty(size, size))
    read[:, 0] = 0.0
    before, follow = read[:head], read[head : 2 * head]  # (head, size): what a token passes on, what it reads
    write = torch.nn.init.orthogonal_(torch.empty(size, head))  # where layer 0 notes the token before
    write[0] = 0.0

    half = head // 2
    angles = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    wave = torch.zeros(head)
    wave[:10] = POSITION_GAIN  # the ten fastest rotations tell neighbours apart
    turned = torch.zeros(head)  # `wave` rotated by one position, so that the match is with the token before
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


def batches(pool: list[Example], tokens_per_batch: int, rng: np.random.Generator) -> list[list[Example]]:
    """Batches of examples of like length, in random order."""
    order = rng.permutation(len(pool))
    shuffled = sorted((pool[index] for index in order), key=len)
    made, current = [], []
    for example in shuffled:
        if current and (len(current) + 1) * len(example) > tokens_per_batch:
            made.append(current)
            current = []
        current.append(example)
    made.append(current)
    return [made[index] for index in rng.permutation(len(made))]


def answer_loss(model: LlamaForCausalLM, batch: list[Example]) -> torch.Tensor:
    """Mean cross-entropy of answer tokens; logits are made for those positions alone."""
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


def held_out_loss(model: LlamaForCausalLM, examples: list[Example]) -> float:
    """Mean loss per answer token."""
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for start in range(0, len(examples), 8):
            batch = examples[start : start + 8]
            num = sum(len(example.answer_ids) for example in batch)
            total, count = total + float(answer_loss(model, batch)) * num, count + num
    model.train()
    return total / count


def make_optimizers(model: LlamaForCausalLM, rate: float, embedding_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate * embedding_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write bf16 safetensors, configuration and tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to(torch.bfloat16) for name, value in model.state_dict().items()}
    kept = LlamaForCausalLM(model.config).to(torch.bfloat16)
    kept.load_state_dict(weights)
    kept.generation_config.do_sample = False
    kept.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Train and save; the log tells time, steps, training and held-out loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/sample"))
    parser.add_argument("--start-from", type=Path, help="a folder that this script wrote: go on from it")
    parser.add_argument("--first-world", type=int, default=FIRST_TRAINING_SEED, help="seed of the first training world")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3_200)
    parser.add_argument("--rate", type=float, default=2e-3, help="Muon's; larger ones saturate attention")
    parser.add_argument("--decay-share", type=float, default=0.4, help="the last part, in which the rate falls to 0")
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=3_072)
    parser.add_argument("--batch-tokens", type=int, default=2_048)
    parser.add_argument("--item-tokens", type=int, default=768, help="of each step's batch of items")
    parser.add_argument("--lore-tokens", type=int, default=512, help="of each step's batch of lore exercises")
    parser.add_argument("--embedding-rate", type=float, default=1.0, help="of the embeddings, to that of the matrices")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-minutes", type=float, default=45.0, help="the schedule is shortened to end by then")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)

    if arguments.start_from is None:
        stages = FROM_NOTHING
        tokenizer = train_tokenizer(arguments.vocab, arguments.seed)
        model = make_model(len(tokenizer), tokenizer, arguments)
    else:
        stages = CONTINUED
        tokenizer = AutoTokenizer.from_pretrained(arguments.start_from)
        model = LlamaForCausalLM.from_pretrained(arguments.start_from, dtype=torch.float32).train()
    num_parameters = sum(p.numel() for p in model.parameters())
    users, items = world_entities(HELD_OUT_SEED, 400, 300)
    held_out = {
        "user": [make_example(user, tokenizer, rng) for user in users[:64]],
        "item": [make_example(item, tokenizer, rng) for item in items[:64]],
    }
    lengths = {side: float(np.mean([len(e.answer_ids) for e in examples])) for side, examples in held_out.items()}
    prompts = {side: float(np.mean([len(e.prompt_ids) for e in examples])) for side, examples in held_out.items()}
    print(f"{num_parameters} parameters, vocabulary {len(tokenizer)}, answers {lengths}, prompts {prompts}", flush=True)

    optimizers = make_optimizers(model, arguments.rate, arguments.embedding_rate)
    step, world, num_tokens, started = 0, 0, 0, time.monotonic()
    progress = 0.0  # share of the schedule that is done: by steps, or by time where that ends first
    while progress < 1.0:
        stage = next(stage for stage in stages if progress < stage.until)
        users, items = world_entities(arguments.first_world + world, USERS_PER_WORLD, ITEMS_PER_WORLD)
        world += 1
        user_examples = [make_example(shorten(user, stage.longest, rng), tokenizer, rng) for user in users]
        copy_examples = [
            make_copy_example(shorten(user, stage.longest, rng), tokenizer, rng) for user in users if user.history
        ]
        copy_batches = batches(copy_examples, stage.copy_tokens, rng)
        lore_examples = [
            make_lore_example(items[start : start + LORE_TITLES], tokenizer)
            for start in range(0, len(items), LORE_TITLES)
        ]
        lore_batches = batches(lore_examples, arguments.lore_tokens, rng)
        item_examples = [make_example(item, tokenizer, rng) for item in items]
        user_batches = batches(user_examples, arguments.batch_tokens, rng)
        item_batches = batches(item_examples, arguments.item_tokens, rng)
        # each step learns from both sides: an update that is normalised must not serve one and spoil the other
        for user_batch, item_batch, copy_batch, lore_batch in zip(
            user_batches, itertools.cycle(item_batches), itertools.cycle(copy_batches), itertools.cycle(lore_batches)
        ):
            minutes = (time.monotonic() - started) / 60
            progress = max(step / arguments.steps, minutes / arguments.max_minutes)
            if progress >= 1.0:
                break
            # warm-up, constant, linear decay
            scale = min(1.0, (step + 1) / 50) * min(1.0, (1.0 - progress) / arguments.decay_share)
            for optimizer, ratio in zip(optimizers, (1.0, arguments.embedding_rate), strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = arguments.rate * ratio * scale
            loss = {}
            for side, batch, weight in (
                ("user", user_batch, 1.0),
                ("item", item_batch, ITEM_WEIGHT),
                ("copy", copy_batch, 1.0),
                ("lore", lore_batch, 1.0),
            ):
                with torch.autocast("cpu", torch.bfloat16):
                    side_loss = answer_loss(model, batch)
                (weight * side_loss).backward()
                loss[side] = round(float(side_loss.detach()), 4)
                num_tokens += sum(len(example) for example in batch)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 25 == 0:
                speed = num_tokens / (time.monotonic() - started)
                print(f"step {step} progress {progress:.3f} loss {loss} {speed:.0f} tokens/s", flush=True)
            if step % 200 == 0:
                losses = {side: round(held_out_loss(model, examples), 4) for side, examples in held_out.items()}
                print(f"step {step} held-out {losses}", flush=True)
                save(model, tokenizer, arguments.out)
    losses = {side: round(held_out_loss(model, examples), 4) for side, examples in held_out.items()}
    save(model, tokenizer, arguments.out)
    summary = {
        "parameters": num_parameters, "steps": step, "tokens": num_tokens, "worlds": world, "held_out_loss": losses,
        "minutes": round((time.monotonic() - started) / 60, 1),
    }  # fmt: skip
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
