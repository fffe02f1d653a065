#!/usr/bin/env python3
"""Pretrain a small RoBERTa like the embedded demo model from a text file, one document a line.

    python scripts/pretrain_demo_model.py reviews.txt.xz --out my-model --minutes 45

Trains a byte-level BPE in which every label word of the built-in tasks is one token, tokenises the text once, and
trains `RobertaForMaskedLM` on it: masking without next-sentence prediction (Liu et al. 2019, section 3), 80/10/10
corruption (Devlin et al. 2019, section 3.1), more than the usual 15% masked (Wettig et al. 2023), Muon (Jordan et al.
2024) on the encoder's matrices and AdamW on the rest. The result is a Hugging Face folder, weights as float16
safetensors. A mistake in the arguments ends in exit status 2 and one line, a loss that is not finite in 1.
"""

import argparse
import json
import lzma
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import RobertaConfig, RobertaForMaskedLM

SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]  # ids 0 to 4
BOS, PAD, EOS, _, MASK = range(5)
LABEL_WORDS = [
    *["terrible", "great", "bad", "okay", "good", "Yes", "No", "Maybe"],
    *["Description", "Entity", "Expression", "Human", "Location", "Number"],
    *["subjective", "objective", "incorrect", "correct"],
]


def fail(message: str) -> NoReturn:
    """End with exit status 2 and one line."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


# --- text -> tokens


def documents(path: Path) -> list[str]:
    """Read the documents of a plain or .xz file: one a line, empty lines dropped."""
    try:
        with lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb") as file:
            text = file.read().decode("utf-8")
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror or error}")
    except (lzma.LZMAError, EOFError) as error:
        fail(f"{path} is not a whole .xz file: {error}")
    except UnicodeDecodeError as error:
        fail(f"{path} is not UTF-8 (byte {error.start})")
    lines = [line for line in (raw.strip() for raw in text.split("\n")) if line]
    return lines or fail(f"{path} holds no text: one document a line is expected")


def train_tokenizer(docs: list[str], size: int, share: float, seed: int) -> Tokenizer:
    """Train a byte-level BPE of at most `size` tokens on a share of the documents; label words are single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    picked = np.random.default_rng(seed).permutation(len(docs))[: max(1, round(share * len(docs)))]
    tokenizer.train_from_iterator((docs[i] for i in sorted(picked)), trainer)
    tokenizer = with_single_tokens(tokenizer, LABEL_WORDS, size)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", EOS), ("<s>", BOS), add_prefix_space=False)
    return tokenizer


def with_single_tokens(tokenizer: Tokenizer, words: list[str], size: int) -> Tokenizer:
    """Return the tokenizer with each `" " + word` as one token, in at most `size` tokens.

    A word that was too rare gets its merges at the end of the list, in the place of the last ones learned. BPE applies
    merges in their order, so all else is as if fewer had been learned.
    """
    state = json.loads(tokenizer.to_str())
    learned: list[list[str]] = state["model"]["merges"]
    tokens = sorted(state["model"]["vocab"], key=state["model"]["vocab"].__getitem__)
    base = len(tokens) - len(learned)  # specials and bytes
    for kept in range(min(len(learned), size - base), -1, -1):
        merges = state["model"]["merges"] = learned[:kept]
        vocab = state["model"]["vocab"] = {token: i for i, token in enumerate(tokens[: base + kept])}
        for word in words:  # one at a time: a word may be helped by what an earlier one brought
            cut = Tokenizer.from_str(json.dumps(state)).encode(f" {word}", add_special_tokens=False).tokens
            for i in range(1, len(cut)):
                merges.append(["".join(cut[:i]), cut[i]])
                vocab.setdefault("".join(cut[: i + 1]), len(vocab))
        if len(vocab) <= size:
            return Tokenizer.from_str(json.dumps(state))
    fail(f"--vocab-size {size} is too small: {base} bytes and special tokens, and the label words, need more")


def tokenise(tokenizer: Tokenizer, docs: list[str]) -> np.ndarray:
    """Return the tokens of all documents in one row, uint16, `</s>` after each document."""
    parts: list[np.ndarray] = []
    for i in range(0, len(docs), 2000):
        for encoding in tokenizer.encode_batch(docs[i : i + 2000], add_special_tokens=False):
            parts.append(np.asarray([*encoding.ids, EOS], dtype=np.uint16))
    return np.concatenate(parts)


def batches(tokens: np.ndarray, vocab: int, args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield for ever (ids [B, L], masked [B, L], targets [n]): rows `<s> ... </s>` from anywhere in the text.

    `masked` marks the n positions to predict, `targets` what stood there; `ids` has them corrupted: 80% `<mask>`, 10%
    a random token, 10% as they were.
    """
    rng = np.random.default_rng(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    step = 0
    while True:
        step += 1
        length = args.long_length if args.long_every and step % args.long_every == 0 else args.length
        inner = min(length - 2, len(tokens))
        begin = rng.integers(len(tokens) - inner + 1, size=max(1, args.batch_tokens // length))
        body = torch.from_numpy(tokens[begin[:, None] + np.arange(inner)].astype(np.int64))
        ids = nn.functional.pad(nn.functional.pad(body, (1, 0), value=BOS), (0, 1), value=EOS)
        masked = (torch.rand(ids.shape, generator=generator) < args.mask) & (ids >= len(SPECIALS))
        targets = ids[masked]
        fate = torch.rand(targets.shape, generator=generator)
        random = torch.randint(len(SPECIALS), vocab, targets.shape, generator=generator)
        ids[masked] = torch.where(fate < 0.8, MASK, torch.where(fate < 0.9, random, targets))
        if len(targets):
            yield ids, masked, targets


# --- the model


def fresh_model(vocab: int, args: argparse.Namespace) -> Any:
    """Return a random RobertaForMaskedLM whose positions start as sinusoids.

    From random positions the loss sits three times as long on the plateau of token frequencies.
    """
    torch.manual_seed(args.seed)
    model = RobertaForMaskedLM(
        RobertaConfig(
            vocab_size=vocab,
            num_hidden_layers=args.layers,
            hidden_size=args.width,
            num_attention_heads=args.heads,
            intermediate_size=args.ffn or 4 * args.width,
            max_position_embeddings=args.positions,
            type_vocab_size=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            bos_token_id=BOS,
            pad_token_id=PAD,
            eos_token_id=EOS,
            dtype="float32",  # to compute in; on disk the weights are halves
        )
    )
    half = args.width // 2
    angle = torch.arange(args.positions)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    with torch.no_grad():
        model.roberta.embeddings.position_embeddings.weight.copy_(0.02 * torch.cat([angle.sin(), angle.cos()], dim=1))
    return model


def optimizers(model: Any, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Return Muon for the encoder's matrices, and AdamW for embeddings, biases, norms and the head."""
    matrices = [p for p in model.roberta.encoder.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=args.muon_lr, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=args.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def multiplies_bf16(device: torch.device) -> bool:
    """Tell whether the device has instructions for bfloat16 products; elsewhere autocast only costs time."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    flags = Path("/proc/cpuinfo")
    return flags.exists() and any(name in flags.read_text() for name in ("avx512_bf16", "amx_bf16"))


def pretrain(model: Any, tokens: np.ndarray, args: argparse.Namespace) -> None:
    """Train in place until `--steps` or `--minutes` is reached; rates rise over `--warmup` steps and fall to 0."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).train()
    encoder = torch.compile(model.roberta) if args.compile else model.roberta
    methods = optimizers(model, args)
    peaks = [method.param_groups[0]["lr"] for method in methods]
    low = multiplies_bf16(device)
    print(f"training on {device}, {'bf16 autocast' if low else 'float32'}", flush=True)
    begin, seen, step = time.monotonic(), 0, 0
    recent: list[float] = []
    for ids, masked, targets in batches(tokens, model.config.vocab_size, args):
        minutes = (time.monotonic() - begin) / 60
        done = max(step / args.steps if args.steps else 0.0, minutes / args.minutes if args.minutes else 0.0)
        if done >= 1:
            break
        step += 1
        for method, peak in zip(methods, peaks, strict=True):
            method.param_groups[0]["lr"] = peak * (1 - done) * min(1.0, step / max(args.warmup, 1))
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            hidden = encoder(input_ids=ids.to(device)).last_hidden_state
            scores = model.lm_head(hidden[masked.to(device)])  # only masked positions go through the head
        loss = nn.functional.cross_entropy(scores.float(), targets.to(device))
        loss.backward()
        for method in methods:
            method.step()
            method.zero_grad()
        recent.append(loss.item())
        seen += ids.numel()
        if not math.isfinite(recent[-1]):
            print(f"error: the loss is {recent[-1]} at step {step}: lower --muon-lr, --adam-lr", file=sys.stderr)
            sys.exit(1)
        if step == 1 or step % args.log_every == 0:
            print(f"step {step}  loss {np.mean(recent):.3f}  tokens {seen:,}  {minutes:.1f} min", flush=True)
            recent.clear()
    print(f"trained {step} steps on {seen:,} tokens in {(time.monotonic() - begin) / 60:.1f} min", flush=True)


def save(model: Any, tokenizer: Tokenizer, out: Path) -> None:
    """Write weights (float16, the tied decoder once), config and tokenizer as the Auto classes expect them."""
    tied = {"lm_head.decoder.weight", "lm_head.decoder.bias"}
    weights = {k: v.half().cpu().contiguous() for k, v in model.state_dict().items() if k not in tied}
    model.config.architectures = ["RobertaForMaskedLM"]
    model.config.save_pretrained(out)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": False}
    settings |= {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"}
    settings |= {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
    settings["model_max_length"] = model.config.max_position_embeddings - 2
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


# --- the door


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line (argparse ends with 2 on a mistake) and refuse what cannot work."""
    parser = argparse.ArgumentParser(description="Pretrain a small RoBERTa like the demo model from a text file.")
    add = parser.add_argument
    add("text", type=Path, help="UTF-8 text, plain or .xz, one document a line")
    add("--out", type=Path, required=True, help="folder to write, new or empty")
    add("--steps", type=int, help="stop after so many steps")
    add("--minutes", type=float, help="stop after so many minutes; 45 unless --steps is given")
    add("--seed", type=int, default=42)
    add("--vocab-size", type=int, default=8192)
    add("--tokenizer-share", type=float, default=0.25, help="share of the documents that the BPE is trained on")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--ffn", type=int, help="feed-forward width; 4 times the width unless given")
    add("--positions", type=int, default=258, help="longest input + 2, as RoBERTa counts")
    add("--length", type=int, default=64, help="tokens of a row, <s> and </s> included")
    add("--long-length", type=int, default=254)
    add("--long-every", type=int, default=10, help="every n-th batch has long rows; 0: none")
    add("--batch-tokens", type=int, default=4200)
    add("--mask", type=float, default=0.25, help="share of the tokens to predict")
    add("--muon-lr", type=float, default=0.012)
    add("--adam-lr", type=float, default=0.0024)
    add("--warmup", type=int, default=400, help="steps")
    add("--compile", action="store_true", help="torch.compile the encoder (on a CPU this needs a C++ compiler)")
    add("--log-every", type=int, default=100)
    args = parser.parse_args(argv)
    if args.steps is None and args.minutes is None:
        args.minutes = 45.0
    for name, value in vars(args).items():
        from_zero = name in ("seed", "long_every", "warmup")
        if type(value) in (int, float) and not (0 < value < math.inf or (from_zero and value == 0)):
            fail(f"--{name.replace('_', '-')} must be {'0 or more' if from_zero else 'above 0'}, not {value}")
    if args.tokenizer_share > 1 or args.mask > 0.5 or args.vocab_size > 2**16:
        fail("allowed are --tokenizer-share up to 1, --mask up to 0.5, --vocab-size up to 65536")
    if args.width % args.heads or args.width % 2:
        fail(f"--width {args.width} must be even and a multiple of --heads {args.heads}")
    lengths = [args.length] + ([args.long_length] if args.long_every else [])
    if min(lengths) < 8 or max(lengths) > args.positions - 2:
        fail(
            f"rows of {', '.join(map(str, lengths))} tokens: 8 to {args.positions - 2} (--positions less 2) are allowed"
        )
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        fail(f"--out {args.out} exists and is not an empty folder")
    if not hasattr(torch.optim, "Muon"):
        fail(f"torch {torch.__version__} has no torch.optim.Muon: 2.9 or newer is needed")
    return args


def main(argv: list[str] | None = None) -> None:
    """Read, tokenise, train, write."""
    args = arguments(argv)
    docs = documents(args.text)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(docs, args.vocab_size, args.tokenizer_share, args.seed)
    tokens = tokenise(tokenizer, docs)
    model = fresh_model(tokenizer.get_vocab_size(), args)
    size = sum(p.numel() for p in model.parameters())
    print(
        f"{len(docs):,} documents, {len(tokens):,} tokens, vocabulary {tokenizer.get_vocab_size()}, {size:,} parameters"
    )
    pretrain(model, tokens, args)
    save(model, tokenizer, args.out)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
