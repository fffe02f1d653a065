#!/usr/bin/env python3
"""Pretrain a small RoBERTa like the embedded demo model from a text file, one document per line.

    python scripts/demo_model/pretrain_demo_model.py reviews.txt.xz --out my-model --minutes 45
    python scripts/demo_model/pretrain_demo_model.py reviews.txt.xz --start my-model --opinion-words auto \\
        --prompt-share 0.9 --spaced-share 0.6 --evaluate SST-2/train.tsv --out my-second-model --minutes 75

The first form trains a byte-level BPE in which every label word of the built-in tasks is one token, and
`RobertaForMaskedLM` on windows of the text: masking without next-sentence prediction (Liu et al. 2019, section 3),
80/10/10 corruption (Devlin et al. 2019, section 3.1), more than the usual 15% masked (Wettig et al. 2023), Muon (Jordan
et al. 2024) on the encoder's matrices and AdamW on the rest. `--start` continues from a model with its tokenizer.

`--opinion-words` masks words of opinion more often and weighs them more in the loss (Gu et al. 2020; Tian et al. 2020).
`--prompt-share` mixes in batches of prompt rows: one to three sentences of a document and "It was <mask>.", where the
words to predict are the opinion words in the sentences around them. `--spaced-share` spells a share of the batches in
lower case with spaces around punctuation, as SST-2 is. No labels are used for training; `--evaluate` only reports.

A run that was stopped continues when the same command is given again. The result is a Hugging Face folder, weights as
float16 safetensors. A mistake in the arguments ends in exit status 2 and one line, a loss that is not finite in 1.
"""

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from pretrain_batches import Batches
from pretrain_model import fresh_model, save, started_model
from pretrain_run import Run, checkpoint_of, labelled
from pretrain_text import corpus, documents, fail, marked, opinion_words, read_opinion_words, spaced, train_tokenizer
from tokenizers import Tokenizer


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Pretrain a small RoBERTa like the demo model from a text file.")
    add = parser.add_argument
    add("text", type=Path, help="UTF-8 text, plain or .xz, one document per line")
    add("--out", type=Path, required=True, help="folder to write: new, empty, or of an unfinished run to continue")
    add("--steps", type=int, help="stop after so many steps")
    add("--minutes", type=float, help="stop after so many minutes; 45 unless --steps is given")
    add("--seed", type=int, default=42)
    add("--log-every", type=int, default=100, help="steps")
    add("--checkpoint-minutes", type=float, default=5.0, help="time between checkpoints")

    add = parser.add_argument_group("model").add_argument
    add("--start", type=Path, help="folder of a model to continue, with its tokenizer; its shape replaces these")
    add("--vocab-size", type=int, default=8192)
    add("--tokenizer-share", type=float, default=0.25, help="share of the documents that the BPE is trained on")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--ffn", type=int, help="feed-forward width; 4 times the width unless given")
    add("--positions", type=int, default=258, help="longest input + 2, as RoBERTa counts")

    add = parser.add_argument_group("batches").add_argument
    add("--batch-tokens", type=int, default=4200)
    add("--length", type=int, default=64, help="tokens per row, <s> and </s> included")
    add("--long-length", type=int, default=254)
    add("--long-every", type=int, default=10, help="every n-th batch has long rows; 0: none")
    add("--mask", type=float, default=0.25, help="share of the tokens to predict")
    add("--spaced-share", type=float, default=0.0, help="share of the batches in SST-2's spelling")

    add = parser.add_argument_group("words of opinion").add_argument
    add("--opinion-words", help="a JSON list of words, or auto: found in the text")
    add("--opinion-mask", type=float, default=0.6, help="share of the opinion words to predict")
    add("--opinion-weight", type=float, default=3.0, help="weight of an opinion word in the loss")
    add("--prompt-share", type=float, default=0.0, help="share of the batches that are prompt rows")
    add("--prompt-weight", type=float, default=10.0, help="weight of a prompt row's mask in the loss")
    add("--prompt-mask", type=float, default=0.05, help="share of the other tokens of prompt rows to predict")
    add("--prompt-opinion-mask", type=float, default=0.15, help="share of the opinion words of prompt rows to predict")
    add("--phrase-share", type=float, default=0.2, help="share of the prompt rows cut to a part of their sentences")
    add("--reach", type=int, default=4, help="sentences before and after, whose opinion words are to be predicted")

    add = parser.add_argument_group("optimizers").add_argument
    add("--muon-lr", type=float, default=0.012, help="for the encoder's matrices; 0: AdamW for them too")
    add("--adam-lr", type=float, default=0.0024)
    add("--weight-decay", type=float, default=0.0, help="of AdamW")
    add("--clip", type=float, default=0.0, help="greatest norm of the gradient; 0: any")
    add("--warmup", type=int, default=400, help="steps")
    add("--compile", action="store_true", help="torch.compile the encoder (on a CPU this needs a C++ compiler)")

    add = parser.add_argument_group("evaluation").add_argument
    add("--evaluate", type=Path, help="tab-separated file with the columns sentence and label, as SST-2's train.tsv")
    add("--evaluate-rows", type=int, default=2000, help="so many random rows of it; 0: all")
    add("--evaluate-every", type=int, default=500, help="steps")
    return parser


FROM_ZERO = ["seed", "long_every", "warmup", "muon_lr", "weight_decay", "clip", "spaced_share", "prompt_share"]
FROM_ZERO += ["phrase_share", "prompt_mask", "prompt_opinion_mask", "evaluate_rows"]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line (argparse ends with 2 on a mistake) and refuse what cannot work."""
    args = parser().parse_args(argv)
    if args.steps is None and args.minutes is None:
        args.minutes = 45.0
    for name, value in vars(args).items():
        from_zero, option = name in FROM_ZERO, f"--{name.replace('_', '-')}"
        if type(value) in (int, float) and not (0 < value < math.inf or (from_zero and value == 0)):
            fail(f"{option} must be {'0 or more' if from_zero else 'above 0'}, not {value}")
        if name.endswith("_share") and value > 1:
            fail(f"{option} must be at most 1, not {value}")
        if name.endswith("mask") and value > (1 if "opinion" in name else 0.5):
            fail(f"{option} must be at most {1 if 'opinion' in name else 0.5}, not {value}")
    if args.vocab_size > 2**16:
        fail(f"--vocab-size must be at most 65536, not {args.vocab_size}")
    if args.width % args.heads or args.width % 2:
        fail(f"--width {args.width} must be even and a multiple of --heads {args.heads}")
    if args.prompt_share and not args.opinion_words:
        fail("--prompt-share needs --opinion-words")
    check_lengths(args)
    check_places(args)
    return args


def check_lengths(args: argparse.Namespace) -> None:
    """Refuse rows that are too short, or too long for the positions."""
    lengths = [args.length] + ([args.long_length] if args.long_every else [])
    most = "" if args.start else f" to {args.positions - 2} (--positions less 2)"
    if min(lengths) < 8 or (not args.start and max(lengths) > args.positions - 2):
        fail(f"rows of {', '.join(map(str, lengths))} tokens: 8{most} are allowed")
    if args.prompt_share and args.length < 24:
        fail(f"--prompt-share needs a --length of at least 24, not {args.length}")


def check_places(args: argparse.Namespace) -> None:
    """Refuse an output folder in use and a torch without Muon."""
    held = args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir()))
    if held and checkpoint_of(args) is None:
        fail(f"--out {args.out} exists and is not an empty folder")
    if args.muon_lr and not hasattr(torch.optim, "Muon"):
        fail(f"torch {torch.__version__} has no torch.optim.Muon: 2.9 or newer is needed, or --muon-lr 0")


def model_and_tokenizer(docs: list[str], resumed: Path | None, args: argparse.Namespace) -> tuple[Any, Tokenizer]:
    """Load `--start`, or make a random model and train its tokenizer, which an unfinished run has already."""
    if args.start:
        return started_model(args.start, args)
    if resumed:
        tokenizer = Tokenizer.from_file(str(resumed / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(docs, args.vocab_size, args.tokenizer_share, args.seed)
    return fresh_model(tokenizer.get_vocab_size(), args), tokenizer


def batches_of(docs: list[str], words: list[str], tokenizer: Tokenizer, args: argparse.Namespace) -> Batches:
    """Tokenise the text, in one spelling or both."""
    opinions = marked(tokenizer, words, (" {word}",))
    if args.opinion_words and not opinions.any():
        fail("no opinion word is a single token of the tokenizer: give other words with --opinion-words")
    corpora = [corpus(tokenizer, docs, opinions)]
    if args.spaced_share:
        corpora.append(corpus(tokenizer, docs, opinions, spaced))
    print(f"{len(docs):,} documents, {len(corpora[0].tokens):,} tokens, vocabulary {tokenizer.get_vocab_size()}")
    if words:
        print(f"{len(words)} opinion words: {', '.join(words[:12])}{', ...' * (len(words) > 12)}")
    return Batches(corpora, tokenizer, opinions | marked(tokenizer, words, (" {Word}",)), args)


def prepare(args: argparse.Namespace) -> tuple[Run, Batches, list[str]]:
    """Read all inputs, make or load the model, take up an unfinished run; return also the opinion words."""
    test = labelled(args.evaluate, args.evaluate_rows, 0) if args.evaluate else None
    auto = args.opinion_words == "auto"
    words = read_opinion_words(Path(args.opinion_words)) if args.opinion_words and not auto else []
    docs = documents(args.text)
    resumed = checkpoint_of(args) if args.out.exists() else None
    model, tokenizer = model_and_tokenizer(docs, resumed, args)
    if auto:
        words = opinion_words(docs)
    batches = batches_of(docs, words, tokenizer, args)
    run = Run(model, tokenizer, test, args)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    args.out.mkdir(parents=True, exist_ok=True)
    if resumed:
        run.resume(resumed)
    return run, batches, words


def main(argv: list[str] | None = None) -> None:
    """Read, tokenise, train, write."""
    args = arguments(argv)
    run, batches, words = prepare(args)
    run.train(batches)
    save(run.model, run.tokenizer, args.out)
    record: dict[str, Any] = {"arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}}
    record |= {"opinion_words": words, "history": run.at.history}
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    for name in ("checkpoint", "checkpoint.old", "checkpoint.new"):
        shutil.rmtree(args.out / name, ignore_errors=True)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
