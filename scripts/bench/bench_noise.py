"""Time the noise: ns per element of each operation, of torch's own generator and of a plain copy, interleaved.

    python scripts/bench/bench_noise.py [--threads 2] [--rounds 15] [--processor-time] [--json FILE]

The median and the best of the rounds are printed. On a shared machine compare only figures of one run, or take the time
of the processor (of all threads). The last table is one pass over the tensors of roberta-large: perturbed one tensor at
a time, updated all at once. `MEZO_SIMD` selects the instructions.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from mezo_cli.perturb.noise import Direction, Noise, make_noise
from mezo_cli.perturb.noise.spans import Segment, Span, tiles_of

SHAPES = ((1024, 1024), (1024, 4096), (50265, 1024))
KINDS = ("gaussian", "rademacher")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Z = Direction(seed=1, step=2)


def roberta_large() -> list[tuple[str, int]]:
    """Return (name, number of elements) of the trainable tensors: 355 million in 394 tensors."""
    hidden, inner = 1024, 4096
    sizes = [("words", 50265 * hidden), ("positions", 514 * hidden), ("types", hidden)]
    sizes += [("norm.weight", hidden), ("norm.bias", hidden), ("head.dense", hidden * hidden), ("head.bias", hidden)]
    sizes += [("head.norm.weight", hidden), ("head.norm.bias", hidden), ("decoder.bias", 50265)]
    for i in range(24):
        for part in ("query", "key", "value", "output"):
            sizes += [(f"{i}.{part}.weight", hidden * hidden), (f"{i}.{part}.bias", hidden)]
        sizes += [(f"{i}.up.weight", hidden * inner), (f"{i}.up.bias", inner)]
        sizes += [(f"{i}.down.weight", inner * hidden), (f"{i}.down.bias", hidden)]
        sizes += [(f"{i}.norm{j}.{what}", hidden) for j in (1, 2) for what in ("weight", "bias")]
    return sizes


clock = time.perf_counter


def interleaved(work: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Run every piece of work once per round, after two rounds of warm-up; return the seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds + 2):
        for name, run in work.items():
            begin = clock()
            run()
            if turn >= 2:
                seconds[name].append(clock() - begin)
    return seconds


def lay_out(tensors: list[tuple[str, int]], noise: Noise) -> list[Span]:
    """Return a span per tensor, in one segment of flat storage."""
    total = sum(tiles_of(size, noise.tile) for _, size in tensors)
    segment = Segment(torch.randn(total * noise.tile), [(name, (size,)) for name, size in tensors], noise.tile)
    ends = segment.ends.tolist()
    return [Span(segment, first, last) for first, last in zip([0, *ends[:-1]], ends, strict=True)]


def single(shape: tuple[int, int], rounds: int) -> dict[str, list[float]]:
    """Time every operation on one matrix."""
    theta = torch.randn(shape)
    outs = {name: torch.empty(shape, dtype=dtype) for name, dtype in DTYPES.items()}
    work: dict[str, Callable[[], object]] = {
        "copy fp32": lambda: outs["fp32"].copy_(theta),
        "copy bf16": lambda: outs["bf16"].copy_(theta),
        "torch normal_": lambda: outs["fp32"].normal_(),
    }
    for kind in KINDS:
        noise = make_noise(kind)
        (span,) = lay_out([("w", theta.numel())], noise)
        for short, dtype in DTYPES.items():
            out = torch.empty(span.numel, dtype=dtype)
            work[f"{kind} perturb {short}"] = lambda n=noise, s=span, o=out: n.perturb(Z, s, 1e-3, o)  # type: ignore[misc]
        update = lambda n, s, terms, decay: n.update_(s, s.theta, terms, [decay] * len(terms))  # noqa: E731
        one, many = [(Z, 1e-9)], [(Direction(1, step), 1e-9) for step in range(16)]
        work[f"{kind} update"] = partial(update, noise, span, one, 1.0)
        work[f"{kind} update, decay"] = partial(update, noise, span, one, 0.999999)
        work[f"{kind} 16 updates"] = partial(update, noise, span, many, 1.0)
    return interleaved(work, rounds)


def whole_model(rounds: int) -> dict[str, list[float]]:
    """Time one pass over roberta-large; perturbed weights go to one scratch buffer."""
    spans = {kind: lay_out(roberta_large(), make_noise(kind)) for kind in KINDS}
    largest = max(span.numel for of_kind in spans.values() for span in of_kind)
    scratch = {name: torch.empty(largest, dtype=dtype) for name, dtype in DTYPES.items()}

    def copy(out: Tensor) -> None:
        for span in spans["gaussian"]:
            out[: span.numel].copy_(span.theta)

    def normal() -> None:
        for span in spans["gaussian"]:
            scratch["fp32"][: span.numel].normal_()

    def perturb(kind: str, out: Tensor) -> None:
        noise = make_noise(kind)
        for span in spans[kind]:
            noise.perturb(Z, span, 1e-3, out[: span.numel])

    def update(kind: str) -> None:
        whole = spans[kind][0].segment.whole
        make_noise(kind).update_(whole, whole.theta, [(Z, 1e-9)], [1.0])

    work: dict[str, Callable[[], object]] = {"torch normal_": normal}
    for short, out in scratch.items():
        work[f"copy {short}"] = lambda o=out: copy(o)  # type: ignore[misc]
    for kind in KINDS:
        for short, out in scratch.items():
            work[f"{kind} perturb {short}"] = lambda k=kind, o=out: perturb(k, o)  # type: ignore[misc]
        work[f"{kind} update"] = lambda k=kind: update(k)  # type: ignore[misc]
    return interleaved(work, rounds)


def table(title: str, seconds: dict[str, list[float]], scale: float, unit: str) -> dict[str, dict[str, float]]:
    """Print one table and return it."""
    print(f"\n{title}\n{'':28}{'median ' + unit:>18}{'best ' + unit:>18}")
    rows = {name: {"median": median(s) * scale, "best": min(s) * scale} for name, s in seconds.items()}
    for name, row in rows.items():
        print(f"{name:28}{row['median']:18.3f}{row['best']:18.3f}")
    return rows


def main() -> None:
    """Print the tables; write them to --json."""
    global clock
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("single", "model"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.processor_time else time.perf_counter
    print(f"torch {torch.__version__}, {args.threads} threads, {args.rounds} rounds")
    result: dict[str, dict[str, dict[str, float]]] = {}
    if args.only != "model":
        for shape in SHAPES:
            title = f"{shape[0]} x {shape[1]}, ns per element"
            result[title] = table(title, single(shape, args.rounds), 1e9 / (shape[0] * shape[1]), "ns")
    if args.only != "single":
        title = "one pass over roberta-large (355M), seconds"
        result[title] = table(title, whole_model(args.rounds), 1.0, "s")
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "tables": result}, indent=1))


if __name__ == "__main__":
    main()
