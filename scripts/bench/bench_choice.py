"""Time a step of objective choice with each prompt computed once, against each candidate alone, in turns.

    python scripts/bench/bench_choice.py                            the two cases of docs/measurements/step.md
    python scripts/bench/bench_choice.py --prompt 200 --candidates 4 --length 5 --batch 8 --rounds 9
    python scripts/bench/bench_choice.py --device cuda --shape opt-1.3b --dtype bfloat16

A random OPT computes the losses of theta + eps z and theta - eps z. `alone` has a row per candidate, each with the
prompt, in batches of `--batch` rows: by the same code, packed too. The largest difference of the log-probabilities is
printed. Peaks are of processes of their own, one forward each, `alone` with one candidate per forward: all that the
process takes, and what it takes beyond the loaded model. Compare ratios, not seconds. Linux only.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mezo_cli.process.environment import LIBRARY_DEFAULTS
from mezo_cli.process.memory import peak_memory, reset_peak_memory

os.environ |= LIBRARY_DEFAULTS | os.environ  # as the command line does, before torch is imported

import torch
from tokenizers import Tokenizer, models
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from mezo_cli.config.compose import build_config
from mezo_cli.perturb.noise import Direction
from mezo_cli.session.opening import opened
from mezo_cli.session.session import Session
from mezo_cli.tasks.choice import ChoiceRow

# On one CPU thread its own time is taken, which other processes disturb less.
CLOCK = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
SHAPES = {
    "tiny": (64, 2, 2),
    "small": (256, 6, 4),
    "opt-125m": (768, 12, 12),
    "opt-1.3b": (2048, 24, 32),
}  # width, layers, heads
CASES = [(200, 4, 5, 8), (300, 30, 30, 1)]  # tokens of a prompt, candidates, tokens of each, rows
TASK = ["task=sst2", "data=demo", "objective=choice", "task.choice.prompt='{sentence}'"]
TASK += ["task.choice.candidates=[' terrible',' great']"]


def make_folder(folder: Path, shape: str) -> Path:
    """Save a random OPT with a tokenizer of one word per token."""
    width, layers, heads = SHAPES[shape]
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": width, "word_embed_proj_dim": width, "ffn_dim": 4 * width}
    OPTForCausalLM(OPTConfig(num_hidden_layers=layers, num_attention_heads=heads, **sizes)).save_pretrained(folder)
    words = models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="<unk>").save_pretrained(folder)
    return folder


def make_session(args: argparse.Namespace, folder: Path) -> Session:
    """Load the model."""
    given = [f"model.path={folder}", f"model.name={args.shape}", f"model.device={args.device}", *TASK]
    return opened(build_config([*given, f"model.dtype={args.dtype}", f"model.compute_dtype={args.compute}"]))


def make_rows(prompt: int, candidates: int, length: int, rows: int) -> list[ChoiceRow]:
    """Return rows of random tokens."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(10, 50_000, (rows, prompt + candidates * length), generator=generator).tolist()
    texts, counts = ("",) * candidates, (length,) * candidates
    return [
        ChoiceRow(ids[:prompt], tuple(zip(*[iter(ids[prompt:])] * length, strict=True)), counts, texts, (0,))
        for ids in drawn
    ]


def split(rows: Sequence[ChoiceRow]) -> list[ChoiceRow]:
    """Return a row for each candidate."""
    return [
        replace(row, candidates=(ids,), scored=(count,), texts=("",))
        for row in rows
        for ids, count in zip(row.candidates, row.scored, strict=True)
    ]


def losses(session: Session, rows: Sequence[ChoiceRow], size: int) -> tuple[float, torch.Tensor]:
    """Return the seconds of a step's two losses in batches of `size` rows, and the scores of all candidates."""
    batches = [session.objective.collate(rows[start : start + size]) for start in range(0, len(rows), size)]
    device, scores = session.loaded.device, list[torch.Tensor]()
    objective: Any = session.objective
    start = CLOCK()
    with torch.no_grad(), session.forward.perturbed(Direction(1, 0), 1e-3):
        for batch in batches:
            if objective.fits_paired_forward(batch):
                scores.append(objective.scores(batch))
            else:
                scores.append(session.forward.forward_per_sign(partial(objective.scores, batch)).flatten(0, 1))
        together = torch.cat([part.flatten(1) for part in scores], dim=1).cpu()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return CLOCK() - start, together


def measure_peak(args: argparse.Namespace, folder: Path, case: Sequence[int], alone: bool) -> dict[str, float]:
    """Return the peak of a process that computes the losses: all, and what is beyond the loaded model, in MB."""
    session, rows = make_session(args, folder), make_rows(*case)
    losses(session, split(rows)[:1], 1)  # kernels are compiled
    device = session.loaded.device
    reset_peak_memory()
    before = peak_memory(device)
    losses(session, split(rows) if alone else rows, 1)
    return {"all": peak_memory(device) / 1e6, "beyond": (peak_memory(device) - before) / 1e6}


def peaks(args: argparse.Namespace, folder: Path, case: Sequence[int]) -> dict[str, dict[str, float]]:
    """Measure both in processes of their own."""
    found = {}
    for name in ("shared", "alone"):
        command = [sys.executable, __file__, *sys.argv[1:], "--peak", name, "--folder", str(folder)]
        sizes = zip(("--prompt", "--candidates", "--length", "--batch"), map(str, case), strict=True)
        said = subprocess.run(
            [*command, *(word for pair in sizes for word in pair)], stdout=subprocess.PIPE, check=True
        )
        found[name] = json.loads(said.stdout)
    return found


def run_case(args: argparse.Namespace, folder: Path, session: Session, case: Sequence[int]) -> dict[str, Any]:
    """Measure one case and print it."""
    rows, size = make_rows(*case), case[-1]
    works = {"shared": (rows, size), "alone": (split(rows), size)}
    scores = {name: losses(session, *work)[1] for name, work in works.items()}
    taken = [{name: losses(session, *work)[0] for name, work in works.items()} for _ in range(args.rounds)]
    ratios = sorted(one["alone"] / one["shared"] for one in taken)
    prompt, candidates, length, _ = case
    peak = peaks(args, folder, case)
    result = {
        "prompt": prompt,
        "candidates": candidates,
        "length": length,
        "batch": size,
        "seconds": {name: statistics.median(one[name] for one in taken) for name in works},
        "ratio": [ratios[0], statistics.median(ratios), ratios[-1]],
        "tokens_ratio": candidates * (prompt + length) / (prompt + candidates * length),
        "difference": float((scores["shared"] - scores["alone"]).abs().max()),
        "peak_mb": peak,
        "peak_ratio": peak["shared"]["all"] / peak["alone"]["all"],
    }
    print(json.dumps(result))
    return result


def main() -> None:
    """Measure and print a line of JSON per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small", choices=list(SHAPES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compute", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    for name in ("--prompt", "--candidates", "--length", "--batch"):
        parser.add_argument(name, type=int, help="all four: one case")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    own = (args.prompt, args.candidates, args.length, args.batch)
    if args.peak:
        print(json.dumps(measure_peak(args, args.folder, own, args.peak == "alone")))
        return
    with tempfile.TemporaryDirectory() as home:
        folder = make_folder(Path(home), args.shape)
        session = make_session(args, folder)
        for case in CASES if args.prompt is None else [own]:
            run_case(args, folder, session, case)


if __name__ == "__main__":
    main()
