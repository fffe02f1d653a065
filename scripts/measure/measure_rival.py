#!/usr/bin/env python3
"""Measure backpropagation at the memory of MeZO's step, and what each learns in the same time.

    python scripts/measure/measure_rival.py memory --data GLUE/SST-2 --smollm2 SMOLLM2
    python scripts/measure/measure_rival.py seconds        # as the memory allows: a quiet machine
    python scripts/measure/measure_rival.py learn --jobs 12 [model.device=cuda ...]
    python scripts/measure/measure_rival.py table

For docs/measurements/rival.md. Memory and seconds are those of child processes of three steps each, as in
`mezo doctor`: 16 rows, cut to 32 tokens. Each rival gets the largest micro_batch_size whose peak is at most MeZO's; its
steps are those that fit in MeZO's seconds. Each stage writes into `--out`, and the next one reads it.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from measure_storage import make_folder
from sklearn.metrics import roc_auc_score

from mezo_cli.config.compose import build_config
from mezo_cli.diagnosis.findings import Deadline
from mezo_cli.diagnosis.rival import _measured
from mezo_cli.report.frame import read_runs
from mezo_cli.runs import Run
from mezo_cli.runs.jsonl import read_object

TUNE, TEST = (1,), (13, 21, 42, 87, 100)  # seeds
MEZO_STEPS = {"demo": 1000, "smollm2": 100, "roberta-large": 0}
ADAMW = ["optimizer=adamw"]
CHECKPOINTED = ["model.checkpoint_activations=true"]
# Name -> overrides, and the rates that are tried per model: as many for each.
METHODS: dict[str, tuple[list[str], dict[str, list[float]]]] = {
    "MeZO, all": ([], {"demo": [1.7e-5, 5e-5, 1.5e-4, 4.5e-4, 1.4e-3], "smollm2": [1.5e-5, 4.5e-5, 1.4e-4]}),
    "MeZO, LoRA": (["peft=lora"], {"demo": [1e-3, 3e-3, 1e-2, 3e-2, 9e-2], "smollm2": [1e-3, 3e-3, 9e-3]}),
    "AdamW, all": (ADAMW, {"demo": [3e-6, 1e-5, 3e-5, 1e-4, 3e-4], "smollm2": [3e-6, 1e-5, 3e-5]}),
    "AdamW, LoRA": ([*ADAMW, "peft=lora"], {"demo": [3e-5, 1e-4, 3e-4, 1e-3, 3e-3], "smollm2": [3e-4, 1e-3, 3e-3]}),
    "AdamW, head": ([*ADAMW, "peft=head"], {"demo": [3e-5, 1e-4, 3e-4, 1e-3, 3e-3], "smollm2": [3e-5, 1e-4, 3e-4]}),
}
MODELS = {"demo": "demo", "smollm2": "smollm2-135m", "roberta-large": "roberta-large"}


def words_of(args: argparse.Namespace, model: str, method: str) -> list[str]:
    """Return the overrides of a method's runs on a model, without rate, seed and steps."""
    words = ["task=sst2", f"model={MODELS[model]}", "data=files", f"data.dir={args.data}", "data.shots=512"]
    words += [f"objective={'lm' if model == 'smollm2' else 'mlm'}", "task.max_length=32", "batch_size=16"]
    if model != "smollm2":
        words.append('task.template="It was {mask}. {sentence}"')  # a cut leaves the mask
    if model != "demo":
        folder = args.smollm2 if model == "smollm2" else make_folder(args.out, "roberta-large", "float32")
        words.append(f"model.path={folder}")
    return [*words, *METHODS[method][0]]


def sizes_of(method: str) -> list[tuple[int, list[str]]]:
    """Return the micro-batches that are tried, the ends first, without and with checkpointed activations."""
    if method.startswith("MeZO"):
        return [(16, [])]
    ways = [[]] if "head" in method else [[], CHECKPOINTED]
    return [(size, [f"micro_batch_size={size}", *way]) for size in (16, 1, 8, 4, 2) for way in ways]


def measure(args: argparse.Namespace, model: str, method: str, words: list[str]) -> dict[str, float] | str:
    """Return peak and seconds of a step of a run, or why there are none."""
    small = args.out / "rows"  # reading all of train.tsv takes more memory than a step of a small model
    for name in () if small.exists() else ("train.tsv", "dev.tsv"):
        small.mkdir(exist_ok=True)
        lines = (Path(args.data) / name).read_text(encoding="utf-8").splitlines()[:400]
        (small / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = [*words, f"data.dir={small}", "data.shots=32", "steps=100", "optimizer.lr=1e-6"]
    config = build_config([*words_of(args, model, method), *words])
    found = _measured(config, Deadline(600))
    return found if isinstance(found, str) else dict(found)


def memory(args: argparse.Namespace) -> None:
    """Find for each model M and the largest micro-batch of each rival that fits in it."""
    out = args.out / "memory.json"
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}  # it goes on where it was stopped
    for model in MODELS.keys() - found.keys():
        most = None
        for method in METHODS:
            tried: list[dict[str, Any]] = []
            for size, words in sizes_of(method):
                known = max((one["size"] for one in tried if one["peak"] <= (most or 0)), default=0)
                if size not in (16, 1) and (known == 0 or known > size):
                    continue  # not even one row fits, or more rows do
                result = measure(args, model, method, words)
                if isinstance(result, str):
                    tried.append({"words": words, "size": size, "why": result, "peak": float("inf")})
                else:
                    tried.append({"words": words, "size": size, "peak": result["peak_bytes"]})
                print(model, method, tried[-1], flush=True)
            most = most or tried[0]["peak"]
            fitting = [one for one in tried if one["peak"] <= most]
            chosen = max(fitting or tried[:1], key=lambda one: one["size"])  # what does not fit need not be slow
            least = min(one["peak"] for one in tried)
            found.setdefault(model, {})[method] = {"chosen": chosen, "least": least, "tried": tried}
        out.write_text(json.dumps(found, indent=2))


def seconds(args: argparse.Namespace) -> None:
    """Time a step of each method in turns, and fix the steps of the runs: those that fit in MeZO's seconds."""
    found: dict[str, Any] = {}
    chosen = json.loads((args.out / "memory.json").read_text())
    for model, methods in chosen.items():
        times: dict[str, list[float]] = {}
        for number in range(args.rounds):
            for method, result in methods.items():
                measured = measure(args, model, method, result["chosen"]["words"])
                if not isinstance(measured, str):
                    times.setdefault(method, []).append(measured["seconds"])
            print(model, number, {method: values[-1] for method, values in times.items()}, flush=True)
        base = times["MeZO, all"]
        for method, values in times.items():
            ratio = statistics.median(a / b for a, b in zip(values, base, strict=True))
            steps = 4 * round(MEZO_STEPS[model] / ratio / 4)
            found.setdefault(model, {})[method] = {"seconds": values, "ratio": ratio, "steps": steps}
        (args.out / "seconds.json").write_text(json.dumps(found, indent=2))


def learn(args: argparse.Namespace) -> None:
    """Tune each method on a seed of its own by its dev loss, then test it on five others."""
    plan, chosen = (json.loads((args.out / f"{name}.json").read_text()) for name in ("seconds", "memory"))
    cases = [(model, method) for model in plan if model != "roberta-large" for method in plan[model]]
    run = ThreadPoolExecutor(args.jobs).map

    def command(case: tuple[str, str, str, float, int]) -> list[str]:
        model, method, phase, rate, seed = case
        steps = plan[model][method]["steps"]
        folder = args.out / "runs" / model / method.replace(", ", "-") / f"{phase}-{rate:g}-{seed}"
        words = [*words_of(args, model, method), *chosen[model][method]["chosen"]["words"], *args.words]
        words += ["data.eval_limit=256"] if model == "smollm2" else []  # they take 25 s each
        every = steps // (2 if model == "smollm2" else 4)
        words += [f"optimizer.lr={rate:g}", f"seed={seed}", f"steps={steps}", f"eval_every={every}"]
        return ["train", "-q", *words, "metric=loss", "stop_on_divergence=false", f"hydra.run.dir={folder}"]

    def go(case: tuple[str, str, str, float, int]) -> None:
        words = command(case)
        if not (Path(words[-1].partition("=")[2]) / "summary.json").exists():
            done = subprocess.run(
                [sys.executable, "-m", "mezo_cli", *words], capture_output=True, text=True, check=False
            )
            print(words[-1], done.returncode, done.stderr[-300:] if done.returncode else "", flush=True)

    most = {model: methods["MeZO, all"]["chosen"]["peak"] for model, methods in chosen.items()}
    fitting = [one for one in cases if "MeZO" in one[1] or chosen[one[0]][one[1]]["least"] <= most[one[0]]]
    for some in (fitting, [one for one in cases if one[0] == "demo" and one not in fitting]):
        grids = [(*one, "tune", rate, seed) for one in some for rate in METHODS[one[1]][1][one[0]] for seed in TUNE]
        list(run(go, grids))
        list(run(go, [(*one, "test", best_rate(args, *one)[0], seed) for one in some for seed in TEST]))


def best_rate(args: argparse.Namespace, model: str, method: str) -> tuple[float, bool]:
    """Return the rate with the lowest mean dev loss of the tuning runs, and whether it is at an end of the grid."""
    losses: dict[float, list[float]] = {}
    for path in (args.out / "runs" / model / method.replace(", ", "-")).glob("tune-*/summary.json"):
        rate = yaml.safe_load(path.with_name("config.yaml").read_text())["optimizer"]["lr"]
        losses.setdefault(rate, []).append(json.loads(path.read_text())["dev"]["loss"])
    whole = {rate: statistics.mean(values) for rate, values in losses.items() if len(values) == len(TUNE)}
    best = min(whole, key=lambda rate: whole[rate])
    return best, best in (min(whole), max(whole))


def interval(values: list[float]) -> str:
    """Return the mean and half of the 95% t interval."""
    from scipy.stats import t

    half = t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.3f} ± {half:.3f}"


def table(args: argparse.Namespace) -> None:
    """Print the tables of the page."""
    limits, plan = (json.loads((args.out / f"{name}.json").read_text()) for name in ("memory", "seconds"))
    for model, methods in limits.items():
        most = methods["MeZO, all"]["chosen"]["peak"]
        print(f"\n{model}: M = {most / 1e6:,.0f} MB")
        print("| method | largest that fits | its peak, MB | plain, 16 rows, MB | s per step | steps |")
        print("|---|---|---|---|---|---|")
        for method, result in methods.items():
            chosen, timed = result["chosen"], plan.get(model, {}).get(method)
            size = f"{chosen['size']} rows" + ", checkpointed" * (CHECKPOINTED[0] in chosen["words"])
            if result["least"] > most and not method.startswith("MeZO"):
                size = f"does not fit: {result['least'] / most:.2f} M at the least"
            peak = result["least"] if "does not fit" in size else chosen["peak"]
            cells = [method, size, f"{peak / 1e6:,.0f}", f"{result['tried'][0]['peak'] / 1e6:,.0f}"]
            cells += [interval(timed["seconds"]), str(timed["steps"])] if timed else ["", ""]
            print(f"| {' | '.join(cells)} |")
    print("\n| model | method | lr | steps | dev loss | test AUC | test accuracy |\n|---|---|---|---|---|---|---|")
    for model, methods in plan.items():
        for method in methods:
            folder, scores = args.out / "runs" / model / method.replace(", ", "-"), []
            entries, _ = read_runs(sorted(folder.glob("test-*")))
            if not entries:
                continue
            if method == "MeZO, all":
                print(f"| {model} | before training | | | {' | '.join(untrained(entries))} |")
            for entry in entries:
                scores.append((entry.score("dev", "loss"), auc(entry.run), entry.score("test", "accuracy")))
            rate, at_end = best_rate(args, model, method)
            cells = [interval([float(value) for value in column]) for column in zip(*scores, strict=True)]
            end = " (at an end of its grid)" * at_end
            print(f"| {model} | {method} | {rate:g}{end} | {methods[method]['steps']} | {' | '.join(cells)} |")


def untrained(entries: Sequence[Any]) -> list[str]:
    """Return the figures of the untrained model on the rows of these runs, and its accuracy at a moved threshold."""
    scores = []
    for run in (entry.run for entry in entries):
        summary, stored = run.read_summary(), read_object(run.path / "untrained.json")
        margins = [high - low for low, high in stored["rows"]["test"]]
        moved = max(summary["baselines"].values(), key=lambda one: float(one["dev"]["accuracy"]))["test"]["accuracy"]
        before = run.evaluations("dev")[0]["loss"]
        scores.append((before, auc(run, margins), summary["test_before"]["accuracy"], moved))
    *cells, moved = (interval([float(value) for value in column]) for column in zip(*scores, strict=True))
    return [*cells[:2], f"{cells[2]}; {moved} at a moved threshold"]


def auc(run: Run, margins: Sequence[float] | None = None) -> float:
    """Return the area under the ROC curve of the second label's probability in test, or of other scores of its rows."""
    rows = run.predictions() or []
    name = list(rows[0]["probabilities"])[1]
    scores = [row["probabilities"][name] for row in rows] if margins is None else margins
    return float(roc_auc_score([row["label"] == name for row in rows], scores))


def main() -> None:
    """Run a stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    stages = {one.__name__: one for one in (memory, seconds, learn, table)}
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--data", help="a folder with SST-2's train.tsv and dev.tsv")
    parser.add_argument("--smollm2", help="the folder of scripts/fetch_smollm2.py")
    parser.add_argument("--out", type=Path, default=Path("outputs/rival"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="overrides for every run of `learn`")
    args = parser.parse_intermixed_args()
    args.out.mkdir(parents=True, exist_ok=True)
    stages[args.stage](args)


if __name__ == "__main__":
    main()
