"""One run of pretrain_demo_model.py: training, zero-shot evaluation, and checkpoints from which it goes on."""

import argparse
import csv
import dataclasses
import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pretrain_batches import Batch, Batches
from pretrain_model import TIED, multiplies_bf16, optimizers
from pretrain_text import BOS, EOS, MASK, PAD, fail
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from sklearn.metrics import roc_auc_score
from tokenizers import Tokenizer
from torch import Tensor, nn

# --- evaluation

Labelled = tuple[list[str], np.ndarray]  # sentences, and their labels, 0 or 1


def labelled(path: Path, rows: int, seed: int) -> Labelled:
    """Read `rows` random rows (0: all) of a tab-separated file with the columns sentence and label (0 or 1)."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read {path}: {getattr(error, 'strerror', None) or error}")
    for number, line in enumerate(lines, start=2):  # line 1 names the columns
        if line.get("label") not in ("0", "1") or not line.get("sentence"):
            fail(f"{path}, line {number}: the columns sentence and label (0 or 1) are needed")
    if rows and rows < len(lines):
        lines = [lines[i] for i in np.random.default_rng(seed).permutation(len(lines))[:rows]]
    labels = np.array([int(line["label"]) for line in lines])
    if len(set(labels)) < 2:
        fail(f"{path} must hold rows of both labels")
    return [line["sentence"] for line in lines], labels


def margins(model: Any, tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Return for each text the score of " great" less that of " terrible" in "{text} It was <mask>."."""
    body = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    before, after, terrible, great = (
        tokenizer.encode(text, add_special_tokens=False).ids for text in (" It was", ".", " terrible", " great")
    )
    longest = model.config.max_position_embeddings - 2 - len([BOS, *before, MASK, *after, EOS])
    rows = [[BOS, *ids[:longest], *before, MASK, *after, EOS] for ids in body]
    device = next(model.parameters()).device
    found = np.zeros(len(rows))
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for i in range(0, len(order), 100):
        part = order[i : i + 100]
        width = max(len(rows[k]) for k in part)
        ids = torch.tensor([rows[k] + [PAD] * (width - len(rows[k])) for k in part], device=device)
        with torch.no_grad():
            hidden = model.roberta(input_ids=ids, attention_mask=(ids != PAD).long()).last_hidden_state
            scores = model.lm_head(hidden[ids == MASK])
        found[part] = (scores[:, great[0]] - scores[:, terrible[0]]).cpu().numpy()
    return found


def quality(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return zero-shot accuracy, accuracy when the half with the higher scores is called positive, and AUC."""
    accuracy = float(np.mean((scores > 0) == labels))
    median = float(np.mean((scores > np.median(scores)) == labels))
    return {"accuracy": accuracy, "median": median, "auc": float(roc_auc_score(labels, scores))}


# --- training


def loss_of(model: Any, encoder: Any, batch: Batch, low: bool) -> Tensor:
    """Return the weighted mean cross-entropy of the batch."""
    device = next(model.parameters()).device
    ids = batch.ids.to(device)
    mask = (ids != PAD).long() if (batch.ids == PAD).any() else None
    with torch.autocast(device.type, torch.bfloat16, enabled=low):
        hidden = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        scores = model.lm_head(hidden[batch.masked.to(device)])  # only masked positions go through the head
    likely = scores.float().log_softmax(-1)[batch.place.to(device), batch.word.to(device)]
    weight = batch.weight.to(device)
    return -(weight * likely).sum() / weight.sum()


@dataclasses.dataclass
class State:
    """How far a run has come."""

    step: int = 0
    seen: int = 0  # tokens
    minutes: float = 0.0
    recent: list[float] = dataclasses.field(default_factory=list)  # losses since the last line
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # one entry per printed line

    def share(self, args: argparse.Namespace) -> float:
        """Return how much of `--steps` or `--minutes` is done, 1 for all."""
        return max(self.step / args.steps if args.steps else 0.0, self.minutes / args.minutes if args.minutes else 0.0)


class Run:
    """One training run: model, optimizers and progress, and their checkpoints under `out`/checkpoint."""

    def __init__(self, model: Any, tokenizer: Tokenizer, test: Labelled | None, args: argparse.Namespace):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model, self.tokenizer, self.args = model.to(self.device).train(), tokenizer, args
        self.methods = optimizers(model, args)
        self.peaks = [method.param_groups[0]["lr"] for method in self.methods]
        self.at = State()
        self.test = test

    def train(self, batches: Batches) -> None:
        """Train until `--steps` or `--minutes` is reached; rates rise over `--warmup` steps and fall to 0."""
        args, at = self.args, self.at
        encoder = torch.compile(self.model.roberta) if args.compile else self.model.roberta
        low = multiplies_bf16(self.device)
        print(f"training on {self.device}, {'bf16 autocast' if low else 'float32'}", flush=True)
        if not at.step:
            self.evaluate()
        now = saved = time.monotonic()
        with bar() as progress:
            task = progress.add_task("training", total=1.0)
            while (done := at.share(args)) < 1:
                at.step += 1
                self.step(batches(at.step), encoder, low, done)
                if at.step == 1 or at.step % args.log_every == 0:
                    self.log()
                if at.step % args.evaluate_every == 0:
                    self.evaluate()
                before, now = now, time.monotonic()
                at.minutes += (now - before) / 60
                if now - saved > 60 * args.checkpoint_minutes:
                    self.checkpoint()
                    saved = now
                progress.update(task, completed=at.share(args))
        self.evaluate()
        print(f"trained {at.step} steps on {at.seen:,} tokens in {at.minutes:.1f} min", flush=True)

    def step(self, batch: Batch, encoder: Any, low: bool, done: float) -> None:
        """Do one step at the rates that belong to `done`, the share of the run behind it."""
        for method, peak in zip(self.methods, self.peaks, strict=True):
            method.param_groups[0]["lr"] = peak * (1 - done) * min(1.0, self.at.step / max(self.args.warmup, 1))
        loss = loss_of(self.model, encoder, batch, low)
        loss.backward()
        if self.args.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        for method in self.methods:
            method.step()
            method.zero_grad()
        self.at.recent.append(loss.item())
        self.at.seen += batch.ids.numel()
        if not math.isfinite(self.at.recent[-1]):
            reason = f"the loss is {self.at.recent[-1]} at step {self.at.step}: lower --muon-lr, --adam-lr"
            print(f"error: {reason}", file=sys.stderr)
            sys.exit(1)

    def log(self) -> None:
        """Print and keep the mean loss since the last such line."""
        at = self.at
        loss = float(np.mean(at.recent))
        at.recent.clear()
        at.history.append({"step": at.step, "tokens": at.seen, "minutes": round(at.minutes, 2), "loss": round(loss, 4)})
        print(f"step {at.step}  loss {loss:.3f}  tokens {at.seen:,}  {at.minutes:.1f} min", flush=True)

    def evaluate(self) -> None:
        """Print and keep the zero-shot figures on the rows of `--evaluate`, if there are any."""
        if self.test is None:
            return
        at, (texts, labels) = self.at, self.test
        self.model.eval()
        found = quality(margins(self.model, self.tokenizer, texts), labels)
        self.model.train()
        at.history.append({"step": at.step, "tokens": at.seen} | {name: round(v, 4) for name, v in found.items()})
        figures = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
        print(f"step {at.step}  evaluated on {len(texts)} rows: {figures}", flush=True)

    def checkpoint(self) -> None:
        """Write all that the run needs to go on; the checkpoint before it stays until this one is whole."""
        folder = self.args.out / "checkpoint"
        new, old = folder.with_name("checkpoint.new"), folder.with_name("checkpoint.old")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        weights = {name: value.contiguous() for name, value in self.model.state_dict().items() if name not in TIED}
        save_file(weights, new / "model.safetensors")
        moments = {
            f"{i}.{key}.{name}": torch.as_tensor(value).contiguous()
            for i, method in enumerate(self.methods)
            for key, values in method.state_dict()["state"].items()
            for name, value in values.items()
        }
        save_file(moments, new / "optimizer.safetensors")
        self.tokenizer.save(str(new / "tokenizer.json"))
        state = {"arguments": remembered(self.args), "state": dataclasses.asdict(self.at)}
        (new / "state.json").write_text(json.dumps(state) + "\n")
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint of this run."""
        self.at = State(**json.loads((folder / "state.json").read_text())["state"])
        self.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)  # without the tied decoder
        moments = load_file(folder / "optimizer.safetensors")
        for i, method in enumerate(self.methods):
            whole = method.state_dict()
            for path, value in moments.items():
                number, key, name = path.split(".")
                if number == str(i):
                    whole["state"].setdefault(int(key), {})[name] = value
            method.load_state_dict(whole)
        print(f"continued from step {self.at.step}", flush=True)


def bar() -> Progress:
    """Return a bar with the time left, on stderr, shown on terminals only."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)


def remembered(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that a run cannot change when it goes on."""
    free = ("out", "minutes", "steps", "log_every", "evaluate", "evaluate_rows", "evaluate_every", "checkpoint_minutes")
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in free}


def checkpoint_of(args: argparse.Namespace) -> Path | None:
    """Return the checkpoint that `--out` holds, if any, and refuse one of another run."""
    for name in ("checkpoint", "checkpoint.old"):  # the second if the run was stopped between two renames
        folder = args.out / name
        if not (folder / "state.json").is_file():
            continue
        try:
            then = json.loads((folder / "state.json").read_text())["arguments"]
        except (OSError, ValueError, KeyError):
            fail(f"{folder} is damaged: remove {args.out} to start anew")
        for key, value in remembered(args).items():
            if then.get(key) != value:
                option = f"--{key.replace('_', '-')}" if key != "text" else "its text"
                fail(f"--out {args.out} holds an unfinished run whose {option} is {then.get(key)}, not {value}")
        return folder
    return None
