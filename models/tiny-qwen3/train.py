"""Trains the bundled model: a 3-million-parameter Qwen3 that tells stories and does small sums.

    python models/tiny-qwen3/train.py              # writes tokenizer, weights and model card here
    python models/tiny-qwen3/train.py --evaluate   # only measures the model that lies here

All text is made by this file from a seed: short stories from a grammar, and four tasks whose
answers can be checked (two-digit addition, sorting letters, copying words, counting), each as
plain text and as a chat. One question in ten, chosen by its hash, never appears in training; the
score is measured on 500 of those under greedy decoding.
"""

import argparse
import json
import math
import random
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config,
)

HERE = Path(__file__).resolve().parent
CONTEXT = 256
VOCAB_SIZE = 1024
IGNORED = -100
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# ------------------------------------------------------------------------------------ stories

NAMES = "Tom Lily Ben Mia Sam Anna Max Sue Tim Rosa Leo Ella Jack Nora Finn Ida".split()
ANIMALS = "cat dog fox bear rabbit mouse duck frog owl pig horse turtle hen goat bee lion".split()
ADJECTIVES = [
    "small", "big", "happy", "brave", "shy", "kind", "clever", "funny", "old", "young", "quiet",
    "curious", "sleepy", "gentle",
]
COLOURS = "red blue green yellow white black brown pink golden grey".split()
THINGS = "ball kite hat boat book drum bell cake apple lamp box shoe flower stone coat cup".split()
PLACES = [
    "in a forest", "by the sea", "on a farm", "near a river", "in a little town", "on a hill",
    "in a garden", "at the edge of a lake", "under a tall tree", "in a house with a red roof",
]
WEATHER = ["sunny", "rainy", "windy", "cold", "warm", "snowy", "foggy", "bright"]
FEELINGS = ["sad", "worried", "afraid", "tired", "lonely", "upset"]
JOYS = ["happy", "glad", "proud", "full of joy", "very pleased", "excited"]


def article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def story(rng: random.Random, animal: str | None = None) -> str:
    """A story of some ten sentences: who, what is wanted, what goes wrong, who helps, the end."""
    name, friend = rng.sample(NAMES, 2)
    animal = animal or rng.choice(ANIMALS)
    helper = rng.choice([other for other in ANIMALS if other != animal])
    adjective, colour, thing = rng.choice(ADJECTIVES), rng.choice(COLOURS), rng.choice(THINGS)
    place, weather = rng.choice(PLACES), rng.choice(WEATHER)
    treasure = f"{colour} {thing}"
    hero = f"{adjective} {animal}"
    opening = rng.choice([
        f"Once upon a time, there was {article(hero)} named {name} who lived {place}.",
        f"{name} was {article(hero)}. {name} lived {place}.",
        f"Long ago, {place}, there lived {article(hero)}. The {animal} was called {name}.",
    ])
    wish = rng.choice([
        f"More than anything, {name} loved a {treasure}.",
        f"Every day, {name} played with a {treasure}.",
        f"{name} had a {treasure} and took it everywhere.",
    ])
    day = rng.choice(
        ["One day", f"One {weather} day", f"On a {weather} morning", "Then one evening"])
    trouble = rng.choice([
        f"{day}, the {thing} was gone. {name} looked everywhere but could not find it.",
        f"{day}, {name} dropped the {thing} and it rolled down into a deep hole.",
        f"{day}, the wind took the {thing} and carried it up into a tree.",
        f"{day}, the {thing} broke, and {name} did not know how to mend it.",
    ])
    feeling = rng.choice([
        f"{name} was very {rng.choice(FEELINGS)} and began to cry.",
        f"\"Oh no!\" said {name}. \"What can I do?\"",
        f"{name} felt {rng.choice(FEELINGS)} and sat down on the ground.",
    ])
    meeting = rng.choice([
        f"A {helper} named {friend} came by. "
        f"\"Why are you {rng.choice(FEELINGS)}?\" asked {friend}.",
        f"Just then {friend} the {helper} walked past. \"Can I help you?\" asked {friend}.",
        f"{friend}, the {helper} from next door, heard this and came to help.",
    ])
    rescue = rng.choice([
        f"Together they worked until the {treasure} was safe again.",
        f"{friend} had a good idea, and soon {name} had the {thing} back.",
        f"{name} and {friend} did not give up, and at last they held the {treasure} again.",
    ])
    thanks = rng.choice([
        f"\"Thank you, {friend}!\" said {name}. \"You are a good friend.\"",
        f"{name} was {rng.choice(JOYS)} and gave {friend} a big hug.",
        f"{name} and {friend} were {rng.choice(JOYS)} and danced in the grass.",
    ])
    end = rng.choice([
        "From that day on, they were best friends.",
        f"That night, {name} slept well. The end.",
        "And they played together until the sun went down.",
        f"{name} learned that it is good to ask for help.",
    ])
    parts = [opening, wish, trouble, feeling, meeting, rescue, thanks, end]
    if rng.random() < 0.3:
        parts.remove(feeling)
    return " ".join(parts)


# -------------------------------------------------------------------------------------- tasks


def addition(rng: random.Random) -> tuple[str, str]:
    first, second = rng.randint(10, 99), rng.randint(10, 99)
    return f"{first} + {second}", str(first + second)


def sorting(rng: random.Random) -> tuple[str, str]:
    letters = rng.sample("abcdefghijklmnopqrstuvwxyz", rng.randint(3, 6))
    return "sort " + " ".join(letters), " ".join(sorted(letters))


def copying(rng: random.Random) -> tuple[str, str]:
    words = " ".join(rng.choice(THINGS + ANIMALS + COLOURS) for _ in range(rng.randint(2, 6)))
    return f"copy {words}", words


def counting(rng: random.Random) -> tuple[str, str]:
    first = rng.randint(0, 89)
    last = first + rng.randint(2, 9)
    return f"count {first} to {last}", " ".join(map(str, range(first, last + 1)))


TASKS = (addition, sorting, copying, counting)


def is_held_out(question: str) -> bool:
    return zlib.crc32(question.encode()) % 10 == 0


def ask(rng: random.Random, held_out: bool) -> tuple[str, str, str]:
    """A (task, question, answer) from the training set or from the held-out tenth."""
    task = rng.choices(TASKS, weights=(4, 3, 2, 1))[0]
    while True:
        question, answer = task(rng)
        if is_held_out(question) == held_out:
            return task.__name__, question, answer


def as_chat(question: str, answer: str = "", end: str = "") -> tuple[str, str]:
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return prompt, answer + end


def example(rng: random.Random) -> tuple[str, str]:
    """One training document as (prompt without loss, completion with loss)."""
    kind = rng.random()
    if kind < 0.10:
        return "", story(rng) + "<|endoftext|>"
    if kind < 0.15:
        animal = rng.choice(ANIMALS)
        request = rng.choice([f"Tell me a story about {article(animal)}.", f"story {animal}"])
        return as_chat(request, story(rng, animal), "<|im_end|>\n<|endoftext|>")
    _, question, answer = ask(rng, held_out=False)
    if kind < 0.55:
        return f"{question} =", f" {answer}<|endoftext|>"
    return as_chat(question, answer, "<|im_end|>\n<|endoftext|>")


# ---------------------------------------------------------------------------------- tokenizer


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, so that a sum is learnt digit by digit."""
    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ("".join(example(rng)) for _ in range(20_000))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE, model_max_length=2048, clean_up_tokenization_spaces=False,
    )


# ----------------------------------------------------------------------------------- training


def rows(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Iterator[tuple[list, list]]:
    """Documents packed end to end into rows of CONTEXT + 1 tokens, with their labels."""
    ids: list[int] = []
    labels: list[int] = []
    while True:
        while len(ids) <= CONTEXT:
            documents = [example(rng) for _ in range(64)]
            prompts = tokenizer([prompt for prompt, _ in documents])["input_ids"]
            completions = tokenizer([completion for _, completion in documents])["input_ids"]
            for prompt, completion in zip(prompts, completions):
                ids += prompt + completion
                labels += [IGNORED] * len(prompt) + completion
        yield ids[:CONTEXT + 1], labels[:CONTEXT + 1]
        ids, labels = ids[CONTEXT:], labels[CONTEXT:]


def train(tokenizer: PreTrainedTokenizerFast, steps: int, batch_size: int, seed: int):
    torch.manual_seed(seed)
    endoftext, im_end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=640, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=im_end, pad_token_id=endoftext,
        initializer_range=0.03,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=2e-3, betas=(0.9, 0.98),
    )
    warmup = 100
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(
        (step + 1) / warmup, 0.02 + 0.49 * (1 + math.cos(math.pi * step / steps))))
    data = rows(tokenizer, random.Random(seed + 1))
    start = time.perf_counter()
    for step in range(1, steps + 1):
        ids, labels = map(torch.tensor, zip(*(next(data) for _ in range(batch_size))))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0 or step == 1:
            seconds = time.perf_counter() - start
            print(f"step {step:6d}  loss {loss.item():.4f}  {seconds:6.0f} s", flush=True)
        if step % 1000 == 0 and step < steps:
            print(json.dumps(evaluate(model, tokenizer, 200)), flush=True)
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_p=0.95, top_k=50,
        eos_token_id=[im_end, endoftext], pad_token_id=endoftext)
    return model, time.perf_counter() - start


@torch.inference_mode()
def evaluate(model, tokenizer: PreTrainedTokenizerFast, count: int) -> dict[str, float]:
    """Share of unseen questions answered exactly right: per task (and form), and over all."""
    rng = random.Random(123)
    tokenizer.padding_side = "left"
    stops = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    asked: set[str] = set()
    right: dict[str, list[bool]] = {}
    cases = []
    while len(cases) < count:
        task, question, answer = ask(rng, held_out=True)
        if question not in asked:
            asked.add(question)
            chat = len(cases) % 2 == 1
            prompt = as_chat(question)[0] if chat else f"{question} ="
            cases.append((f"{task} ({'chat' if chat else 'plain'})", prompt, answer))
    for first in range(0, count, 100):
        part = cases[first:first + 100]
        inputs = tokenizer([prompt for _, prompt, _ in part], return_tensors="pt", padding=True)
        output = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
            do_sample=False, temperature=None, top_p=None, top_k=None,
            max_new_tokens=40, eos_token_id=stops, pad_token_id=stops[0])
        completions = output[:, inputs["input_ids"].shape[1]:]
        texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
        for (name, _, answer), text in zip(part, texts):
            right.setdefault(name, []).append(text.strip() == answer)
    scores = {name: round(sum(marks) / len(marks), 4) for name, marks in sorted(right.items())}
    return scores | {"all": round(sum(map(sum, right.values())) / count, 4)}


CARD = """# tiny-qwen3

A Qwen3 of {parameters:,} parameters (bf16), trained from scratch by `train.py` on text that
`train.py` generates. It is here so that nanoengine's example, tutorial and tests run on a real
model without a download; it knows a few stories and four small tasks, and nothing else.

| | |
| --- | --- |
| training | {steps} steps of {tokens:,} tokens, contexts of {context} |
| training time | {minutes:.0f} minutes on two CPU cores (shared with other work) |
| tokenizer | byte-level BPE, {vocab} tokens, single digits, ChatML template |
| end of text | `<\\|im_end\\|>` in chats, `<\\|endoftext\\|>` after plain text; both end it |

Unseen questions answered exactly right, greedy, out of {count}:

| task (form) | right |
| --- | --- |
{table}

Prompts it knows: `47 + 85 =`, `sort d b e a =`, `copy ball fox red =`, `count 17 to 23 =`,
`Once upon a time`, the same questions as a chat message (without the ` =`), and the chat message
`Tell me a story about a cat.`
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--evaluate", action="store_true", help="only measure the model in --out")
    args = parser.parse_args()

    if not args.evaluate:
        tokenizer = train_tokenizer(args.seed)
        model, seconds = train(tokenizer, args.steps, args.batch_size, args.seed)
        tokenizer.save_pretrained(args.out)
        model.save_pretrained(args.out)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    scores = evaluate(model, tokenizer, args.questions)
    print(json.dumps(scores, indent=2))
    if not args.evaluate:
        table = "\n".join(f"| {name} | {score:.1%} |" for name, score in scores.items())
        (args.out / "README.md").write_text(CARD.format(
            parameters=model.num_parameters(), steps=args.steps, tokens=args.batch_size * CONTEXT,
            context=CONTEXT, minutes=seconds / 60, vocab=len(tokenizer), count=args.questions,
            table=table))


if __name__ == "__main__":
    main()
