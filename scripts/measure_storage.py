"""Measure memory and time of a model whose weights are stored in two bytes, against float32.

    python scripts/measure_storage.py load --shape roberta-large     peak of anonymous memory while a model is loaded
    python scripts/measure_storage.py step --shape roberta-large     peak and time of a step, each storage in turn
    python scripts/measure_storage.py step --shape opt-1.3b --storage bfloat16 --compute bfloat16
    python scripts/measure_storage.py run --shape roberta-large --rows 4 --tokens 128 --steps 10
                                                                     peak of all of a run, as its summary.json has it

The weights are random, in a folder that is made under `--folder` and used again. Batches have `--rows` rows of
`--tokens` tokens. `load` samples RssAnon of /proc/self/status every millisecond in a process of its own, until the
weights are in their final storage, and compares it with the size of the stored model: what the weights take in the
dtype of `model.dtype`. The peak of `step` is VmHWM less what the imported libraries take, as in bench_step.py, also in
processes of their own; times are of one process, in turn. `run` is `mezo train` with an evaluation in the middle and at
the end, `--rows` rows each, without checkpoints; VmRSS is sampled. For a CPU without AVX-512 set
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2. Linux only.
"""

import argparse
import importlib
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import safetensors.torch
import torch
import transformers
from process_memory import memory, reset_peak

from mezo_cli import models
from mezo_cli.commands.execute import execute
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Config, TokenizedExample
from mezo_cli.config.stored import to_yaml
from mezo_cli.console import make_console
from mezo_cli.objectives import OBJECTIVES
from mezo_cli.optim.settings import zeroth_order
from mezo_cli.perturb.noise import make_noise
from mezo_cli.perturb.params import Params
from mezo_cli.runs import Run
from mezo_cli.system import trim_malloc
from mezo_cli.training.setup import Session, prepare

DEMO = Path(models.__file__).parents[1] / "demo"
SHAPES: dict[str, tuple[str, Any]] = {  # objective, config of transformers
    "roberta-base": ("mlm", lambda: roberta(768, 12)),
    "roberta-large": ("mlm", lambda: roberta(1024, 24)),
    "opt-125m": ("lm", lambda: opt(768, 12, 12)),
    "opt-1.3b": ("lm", lambda: opt(2048, 24, 32)),
}


def roberta(width: int, layers: int) -> Any:
    """Return the config of a RoBERTa."""
    return transformers.RobertaConfig(
        vocab_size=50265,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        max_position_embeddings=514,
        type_vocab_size=1,
        architectures=["RobertaForMaskedLM"],
    )


def opt(width: int, layers: int, heads: int) -> Any:
    """Return the config of an OPT."""
    return transformers.OPTConfig(
        hidden_size=width,
        word_embed_proj_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        ffn_dim=4 * width,
        architectures=["OPTForCausalLM"],
    )


def make_folder(home: Path, shape: str, dtype: str) -> Path:
    """Write a checkpoint with random weights in that dtype, and the demo's tokenizer, if it is not there yet."""
    folder = home / f"{shape}-{dtype}"
    if (folder / "tokenizer.json").exists():
        return folder
    objective, make = SHAPES[shape]
    settings = make()
    kind = transformers.AutoModelForMaskedLM if objective == "mlm" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        empty = kind.from_config(settings)
    tensors, seen = {}, set()
    for name, p in empty.named_parameters():
        if id(p) not in seen and "lm_head.decoder" not in name:
            seen.add(id(p))
            spread = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            tensors[name] = torch.empty(p.shape).normal_(spread, 0.02).to(getattr(torch, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    settings.save_pretrained(folder)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for file in (DEMO / "model").glob("*token*"):
        shutil.copyfile(file, folder / file.name)
    return folder


def config_of(folder: Path, shape: str, storage: str, compute: str, *more: str) -> Config:
    """Return the config of a run, with more settings."""
    words = [f"model.path={folder}", f"model.name={shape}", "model.device=cpu", f"objective={SHAPES[shape][0]}"]
    words += [f"model.dtype={storage}", f"model.compute_dtype={compute}", "data=demo", "steps=100", "optimizer.lr=1e-6"]
    return build_config([*words, *more])


class Sampler:
    """Samples a field of /proc/self/status in a thread of its own; `peak` is the highest value in bytes."""

    def __init__(self, field: str = "RssAnon") -> None:
        self.field, self.peak, self._done = field, 0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.001):
            self.peak = max(self.peak, memory(self.field))


def load_peak(config: Config) -> dict[str, float]:
    """Load a model, and return the peak meanwhile and what it leaves, in bytes."""
    kind = OBJECTIVES.load(config.objective.name).model_kind
    import_everything(config)
    trim_malloc()
    before = memory("RssAnon")
    with Sampler() as sampler:
        loaded = models.load(config.model, kind, config.task.labels, 0)
        Params(
            loaded.model, make_noise(zeroth_order(config.optimizer).noise)
        )  # moves the trainable tensors to flat storage
    stored = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    return {"stored": stored, "peak": sampler.peak - before, "after": memory("RssAnon") - before}


def import_everything(config: Config) -> None:
    """Load the demo's model, so that what loading imports and allocates once is not counted."""
    demo = build_config(["model=demo", "data=demo", f"model.dtype={config.model.dtype}"])
    models.load(demo.model, OBJECTIVES.load("mlm").model_kind, demo.task.labels, 0)


class Steps:
    """A session that takes steps on one batch.

    Args:
        config: of the run.
        rows, tokens: the size of the batch.
        trains: check the model's scores as the start of a run does.
    """

    def __init__(self, config: Config, rows: int, tokens: int, trains: bool = False) -> None:
        self.session: Session = prepare(config, trains=trains)
        generator = torch.Generator().manual_seed(0)
        vocabulary = min(len(self.session.encoder.tokenizer), 5000)
        texts = torch.randint(10, vocabulary, (rows, tokens), generator=generator).tolist()
        mask, masked = self.session.encoder.tokenizer.mask_token_id, config.objective.name == "mlm"
        self.rows = [
            TokenizedExample([*text[:-1], mask] if masked else text, [0] * tokens, tokens - 1, i % 2)
            for i, text in enumerate(texts)
        ]
        self.session.exclude_unreachable(self.rows[0])
        self.done = 0

    @torch.no_grad()
    def step(self) -> float:
        """Take a step; return its seconds."""
        start = time.perf_counter()
        self.session.step(self.rows, self.done)
        self.done += 1
        trim_malloc()
        return time.perf_counter() - start


def step_peak(config: Config, rows: int, tokens: int, steps: int) -> dict[str, Any]:
    """Return the peak of a process that takes steps, less what the libraries take, in bytes; and all of VmHWM."""
    demo = build_config(["model=demo", "data=demo", f"model.dtype={config.model.dtype}"])
    Steps(demo, 2, 8).step()  # the compiler and its libraries count as imported
    before = memory("VmRSS")
    work = Steps(config, rows, tokens)
    start_up, seconds = memory("VmHWM"), [work.step()]
    reset_peak()
    seconds += [work.step() for _ in range(steps)]
    count = sum(p.numel() for p in work.session.loaded.model.parameters())
    return {
        "parameters": count,
        "peak": memory("VmHWM") - before,
        "start_up": start_up - before,
        "process": memory("VmHWM"),
        "seconds": seconds,
    }


def run_peak(config: Config, out: Path, steps: int) -> dict[str, Any]:
    """Train as `mezo train` does. Return VmRSS after the imports, at most in steps 2 to `steps`, and the run's peak."""
    importlib.import_module("transformers.models.roberta.modeling_roberta")
    imports, in_steps, take = memory("VmRSS"), 0, Session.step

    def step(session: Session, rows: Any, number: int) -> Any:
        nonlocal in_steps
        with Sampler("VmRSS") as sampler:
            result = take(session, rows, number)
        in_steps = max(in_steps, sampler.peak, memory("VmRSS")) if number else 0
        return result

    with patch.object(Session, "step", step):
        execute(Run.create(out, to_yaml(config), sys.argv), config, make_console())
    peak = json.loads((out / "summary.json").read_text(encoding="utf-8"))["peak_memory_bytes"]
    return {"imports": imports, "steps": in_steps, "peak": peak}


def write_rows(folder: Path, rows: int, tokens: int) -> Path:
    """Write train, dev and test of `rows` rows that are longer than `tokens` tokens: the task cuts them."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "dev", "test"):
        lines = [f"{' '.join(['a film'] * tokens)} {number},{number % 2}" for number in range(rows)]
        (folder / f"{split}.csv").write_text("\n".join(["sentence,label", *lines, ""]), encoding="utf-8")
    return folder


def in_process(words: list[str]) -> dict[str, Any]:
    """Run this script with `words` and return the JSON of its last line."""
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure_load(args: argparse.Namespace) -> None:
    """Print the peak of loading, for each dtype of the file and of the storage."""
    print("| file | stored as | stored model | peak / stored | after loading / stored |\n|---|---|---|---|---|")
    for file in ("float32", "bfloat16"):
        make_folder(args.folder, args.shape, file)
        for storage in args.storage.split(","):
            words = [
                "load",
                "--one",
                "--shape",
                args.shape,
                "--storage",
                storage,
                "--compute",
                "float32",
                "--file",
                file,
            ]
            found = in_process([*words, "--folder", str(args.folder)])
            stored = found["stored"]
            ratios = f"{found['peak'] / stored:.3f} | {found['after'] / stored:.3f}"
            print(f"| {file} | {storage} | {stored / 1e9:.2f} GB | {ratios} |", flush=True)


def measure_run(args: argparse.Namespace) -> None:
    """Print the peak of a run for each storage."""
    print("| stored as | imports GB | peak GB | peak beyond imports | / float32 | peak / largest of steps 2 on |")
    print("|---|---|---|---|---|---|")
    base = 0
    for storage in args.storage.split(","):
        words = ["run", "--one", "--storage", storage, "--compute", "float32"]
        words += [f"--{key}={getattr(args, key)}" for key in ("shape", "file", "rows", "tokens", "steps", "folder")]
        found = in_process(words)
        beyond = found["peak"] - found["imports"]
        base = base or beyond
        cells = f"{found['imports'] / 1e9:.2f} | {found['peak'] / 1e9:.2f} | {beyond / 1e9:.2f} | {beyond / base:.2f}"
        print(f"| {storage} | {cells} | {found['peak'] / found['steps']:.2f} |", flush=True)


def measure_step(args: argparse.Namespace) -> None:
    """Print peak and time of a step for each storage and compute dtype."""
    pairs = [(storage, compute) for storage in args.storage.split(",") for compute in args.compute.split(",")]
    folder = make_folder(args.folder, args.shape, args.file)
    size = ["--rows", str(args.rows), "--tokens", str(args.tokens), "--folder", str(args.folder), "--file", args.file]
    size += ["--steps", str(args.steps)]
    peaks = {
        (storage, compute): in_process(
            ["step", "--one", "--shape", args.shape, "--storage", storage, "--compute", compute, *size]
        )
        for storage, compute in ([] if args.times_only else pairs)
    }
    times: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
    if args.rounds:
        work = {pair: Steps(config_of(folder, args.shape, *pair), args.rows, args.tokens) for pair in pairs}
        for number in range(args.rounds + 1):
            for pair, steps in work.items():
                seconds = steps.step()
                times[pair] += [seconds] if number else []  # the first step makes buffers
    print(f"\n{args.shape}, {args.rows} x {args.tokens} tokens, {torch.get_num_threads()} thread(s)")
    print("| stored as | computed in | peak GB | peak / float32 | start-up GB | s per step | / float32 |")
    print("|---|---|---|---|---|---|---|")
    base = pairs[0]
    for pair in pairs:
        mine = times[pair] or peaks[pair]["seconds"][1:]
        ratio = statistics.median(a / b for a, b in zip(mine, times[base] or peaks[base]["seconds"][1:], strict=True))
        cells = "| |"
        if peaks:
            peak = peaks[pair]["peak"]
            cells = f"{peak / 1e9:.2f} | {peak / peaks[base]['peak']:.2f} | {peaks[pair]['start_up'] / 1e9:.2f}"
        print(f"| {' | '.join(pair)} | {cells} | {statistics.median(mine):.2f} | {ratio:.2f} |", flush=True)


def main() -> None:
    """Measure, or with --one measure one case and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("load", "step", "run"))
    parser.add_argument("--shape", default="roberta-large", choices=SHAPES)
    parser.add_argument("--storage", default="float32,bfloat16,float16")
    parser.add_argument("--compute", default="float32,bfloat16")
    parser.add_argument("--file", default="float32", help="dtype of the checkpoint's file")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3, help="over which the peak is taken, after a first one")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument(
        "--rounds", type=int, default=3, help="0: times are those of the processes that measure the peak"
    )
    parser.add_argument("--times-only", action="store_true", help="leave the peaks out")
    parser.add_argument("--folder", type=Path, default=Path("outputs/storage"))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.one:
        {"load": measure_load, "step": measure_step, "run": measure_run}[args.what](args)
        return
    folder, case = make_folder(args.folder, args.shape, args.file), (args.shape, args.storage, args.compute)
    if args.what == "run":
        out, sizes = args.folder / "run", [f"{key}={args.rows}" for key in ("batch_size", "eval_batch_size")]
        data = ["data=files", f"data.dir={write_rows(args.folder / 'rows', args.rows, args.tokens)}"]
        words = [*data, *sizes, f"task.first_limit={args.tokens - 6}", f"steps={args.steps}", "checkpoint=trajectory"]
        shutil.rmtree(out, ignore_errors=True)
        found = run_peak(config_of(folder, *case, *words, f"eval_every={args.steps // 2}"), out, args.steps)
    elif args.what == "load":
        found = load_peak(config_of(folder, *case))
    else:
        found = step_peak(config_of(folder, *case), args.rows, args.tokens, args.steps)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
