#!/usr/bin/env python3
"""Make the embedded demo of rewards: arithmetic problems, and a small decoder with two styles of answers to them.

    python scripts/demo_model/make_arithmetic_demo.py --out mezo_cli/demo

A problem is three digits from 1 to 9 and a target from 0 to 99, `357>09=`; its answer has each digit once, and + - *.
All 1,345 solvable problems are made, and split by a fixed seed; dev and test are never trained on. The decoder learns,
by backpropagation, a mixture of answers to the train problems: right ones in parentheses, `(7+5-3)`, and more often
random ones after a space, ` 7+5-3`, most of them wrong. So its greedy answers start wrong, and there is something to
elicit. `arithmetic/` gets the rows, `decoder/` the model (Hugging Face layout, float16 safetensors) and its card, with
figures of the model as it was saved.
"""

import argparse
import itertools
import json
import operator
import random
import time
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, processors
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Problem = tuple[str, int]  # three digits in ascending order, and the target

SPECIALS = ["<pad>", "<s>", "</s>", "<unk>"]
CHARACTERS = "0123456789+-*>= ()"
IDS = {text: number for number, text in enumerate([*SPECIALS, *CHARACTERS])}
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
SIZES = {"test": 320, "dev": 192}  # the other problems are train
SPLIT_SEED = 0
RIGHT_SHARE = 0.45  # of the answers that the decoder learns
ANSWER_TOKENS = 8  # the longest answer, `(7+5-3)`, and the end token
CARD = Path(__file__).with_name("arithmetic_card.md.template")


@cache
def expressions(digits: str) -> dict[str, int]:
    """Return every expression with each digit once, and its value."""
    values = {}
    for (a, b, c), first, second in itertools.product(itertools.permutations(digits), OPERATORS, OPERATORS):
        x, y, z = int(a), int(b), int(c)
        one, two = OPERATORS[first], OPERATORS[second]
        value = one(x, two(y, z)) if second == "*" and first != "*" else two(one(x, y), z)
        values[f"{a}{first}{b}{second}{c}"] = value
    return values


def make_problems() -> tuple[dict[Problem, list[str]], dict[str, list[Problem]]]:
    """Return the right expressions of every problem, and the problems of each split."""
    right: dict[Problem, list[str]] = {}
    for digits in map("".join, itertools.combinations_with_replacement("123456789", 3)):
        for text, value in sorted(expressions(digits).items()):
            if 0 <= value <= 99:
                right.setdefault((digits, value), []).append(text)
    problems = sorted(right)
    random.Random(SPLIT_SEED).shuffle(problems)
    held_out = SIZES["test"] + SIZES["dev"]
    splits = {
        "train": problems[held_out:],
        "dev": problems[SIZES["test"] : held_out],
        "test": problems[: SIZES["test"]],
    }
    return right, splits


def write_rows(folder: Path, right: dict[Problem, list[str]], splits: dict[str, list[Problem]]) -> None:
    """Write each split's rows: the digits, the target with two digits, and one right answer."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SPLIT_SEED)
    for name, problems in splits.items():
        lines = []
        for digits, target in problems:
            answer = f"({rng.choice(right[digits, target])})"
            row = {"numbers": [int(digit) for digit in digits], "target": f"{target:02}", "answer": answer}
            lines.append(json.dumps(row) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def encode(text: str) -> list[int]:
    """Return the tokens of a text, one per character."""
    return [IDS[character] for character in text]


def prompt(digits: str, target: int) -> list[int]:
    """Return the tokens of a problem: 8, whatever the problem."""
    return [IDS["<s>"], *encode(f"{digits}>{target:02}=")]


def learning_batch(rng: random.Random, problems: list[Problem], right: dict[Problem, list[str]], rows: int) -> Any:
    """Return token ids and labels [rows, tokens]: problems with their digits in any order, and an answer each."""
    ids, labels = [], []
    for digits, target in rng.choices(problems, k=rows):
        shuffled = "".join(rng.sample(digits, 3))
        if rng.random() < RIGHT_SHARE:
            answer = f"({rng.choice(right[digits, target])})"
        else:
            answer = " " + rng.choice(list(expressions(digits)))
        tokens = [*encode(answer), IDS["</s>"]]
        padding = ANSWER_TOKENS - len(tokens)
        start = prompt(shuffled, target)
        ids.append([*start, *tokens, *[IDS["<pad>"]] * padding])
        labels.append([*[-100] * len(start), *tokens, *[-100] * padding])
    return torch.tensor(ids), torch.tensor(labels)


def train(problems: list[Problem], right: dict[Problem, list[str]], args: argparse.Namespace) -> LlamaForCausalLM:
    """Return a new decoder after `args.steps` steps of AdamW, whose rate rises for 5% of them and falls to 0."""
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    config = LlamaConfig(
        vocab_size=len(IDS),
        hidden_size=64,
        intermediate_size=168,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=IDS["<pad>"],
        bos_token_id=IDS["<s>"],
        eos_token_id=IDS["</s>"],
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps, pct_start=0.05)
    for step in range(1, args.steps + 1):
        ids, labels = learning_batch(rng, problems, right, rows=192)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}  loss {loss.item():.3f}", flush=True)
    return model


@torch.inference_mode()
def accuracy(model: Any, problems: list[Problem], right: dict[Problem, list[str]], forced: str = "") -> float:
    """Return the percentage of right answers, greedily; `forced` is the beginning of every answer."""
    ids = torch.tensor([[*prompt(*problem), *encode(forced)] for problem in problems])
    start = ids.shape[1]
    for _ in range(ANSWER_TOKENS - len(forced)):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    names = list(IDS)
    texts = ["".join(names[i] for i in row).partition("</s>")[0] for row in ids[:, start:].tolist()]
    return 100 * sum(t.strip(" ()") in right[problem] for t, problem in zip(texts, problems, strict=True)) / len(texts)


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the weights in float16, the config, and a tokenizer of single characters."""
    model.half().save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    tokenizer = Tokenizer(models.BPE(vocab=IDS, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", IDS["<s>"])])
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **names).save_pretrained(folder)


def main() -> None:
    """Make the rows, the decoder and its card."""
    parser = argparse.ArgumentParser(description="Make the embedded demo of rewards.")
    parser.add_argument("--out", type=Path, required=True, help="folder that gets arithmetic/ and decoder/")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the sums of several threads could give other weights
    start = time.monotonic()
    right, splits = make_problems()
    write_rows(args.out / "arithmetic", right, splits)
    save(train(splits["train"], right, args), args.out / "decoder")
    model = AutoModelForCausalLM.from_pretrained(args.out / "decoder", dtype=torch.float32)
    figures: dict[str, Any] = {"parameters": f"{model.num_parameters():,}", "problems": f"{len(right):,}"}
    for name, problems in splits.items():
        figures[name] = len(problems)
        figures[f"{name}_greedy"] = f"{accuracy(model, problems, right):.1f}"
        figures[f"{name}_forced"] = f"{accuracy(model, problems, right, '('):.1f}"
        figures[f"{name}_other"] = f"{accuracy(model, problems, right, ' '):.1f}"
    settings = {"steps": args.steps, "lr": f"{args.lr:g}", "seed": args.seed, "share": f"{RIGHT_SHARE:.0%}"}
    card = Template(CARD.read_text(encoding="utf-8")).substitute(figures | settings)
    (args.out / "decoder" / "README.md").write_text(card, encoding="utf-8")
    print(json.dumps(figures, indent=1), f"{time.monotonic() - start:.0f} s", sep="\n")


if __name__ == "__main__":
    main()
