"""Time one MeZO step, the published step and plain forwards, interleaved in one process, on the same batch.

    python scripts/bench/bench_step.py                                   16 rows of 32 tokens, RoBERTa-large's shape
    python scripts/bench/bench_step.py --batches 16x32 64x32 --memory    another batch; peaks, each in its own process
    python scripts/bench/bench_step.py --only "ours fp32 gaussian" --rounds 5
    python scripts/bench/bench_step.py --out docs/measurements/machines/NAME.json    for make_step_tables.py

step_works.py says what is timed. Every round times every work once. Compare ratios, not seconds: the table has their
median over the rounds, with the smallest and the largest, and of five rounds or more a 95% interval of the median by
bootstrap over the rounds. The file that is written also names CPU, GPU and instruction sets, and which of these the
environment switched off; results of other shapes and batches that it has already are kept. No round is begun that would
end after `--minutes`. Without AVX-512, on a machine that has it:

    MEZO_SIMD=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 python ...
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from mezo_cli.process.environment import LIBRARY_DEFAULTS

os.environ |= LIBRARY_DEFAULTS | os.environ  # as the command line does, before torch is imported

import numpy as np
import torch
from machine_record import FOLDER, describe, limits, merge, write
from step_works import (
    COMPUTE,
    FLOORS,
    NAMES,
    SHAPES,
    STEPS,
    Ours,
    Work,
    floor_of,
    make_works,
    new_model,
    padded,
    plain_forwards,
    steps_per_call,
)

from mezo_cli.console import format_duration
from mezo_cli.process import versions

Report = Callable[[str], None]
ROUNDS_FOR_INTERVAL = 5


def timed(work: Work) -> float:
    """Return the seconds that `work` takes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def selected(only: list[str] | None) -> list[str]:
    """Return the works to time, in order: all, or those asked for with the plain forwards that they are compared to."""
    if not only:
        return NAMES
    wanted = {*only, *(floor_of(name) for name in only)}
    return [name for name in NAMES if name in wanted]


def time_rounds(works: dict[str, Work], rounds: int, until: float, say: Report) -> list[dict[str, float]]:
    """Time every work once per round, in turn, after a round that compiles and allocates.

    Args:
        works: name -> work.
        rounds: how many rounds.
        until: no round after the first is begun that would end after this time (`time.monotonic`).
        say: gets a line for each work.

    Returns:
        name -> seconds per step, for each round.
    """
    found: list[dict[str, float]] = []
    longest = 0.0
    for number in range(rounds + 1):
        start = time.monotonic()
        if number > 1 and start + longest > until:
            say(f"stopped after {number - 1} of {rounds} rounds: the next would end after --minutes")
            break
        taken = {}
        for done, (name, work) in enumerate(works.items()):
            taken[name] = timed(work)
            passed = time.monotonic() - start
            left = (rounds - number) * max(longest, passed) + max(0, longest - passed)
            which = f"round {number} of {rounds}" if number else "warm-up"
            rest = f", {format_duration(left)} left" if number else ""
            say(f"{which}, {done + 1} of {len(works)}: {name} {taken[name] / steps_per_call(name):.3f} s{rest}")
        passed = time.monotonic() - start
        longest = max(longest, passed) if number > 1 else passed  # the warm-up, which compiles, until a round is done
        if number:
            found.append({name: seconds / steps_per_call(name) for name, seconds in taken.items()})
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Return the smallest, the median and the largest of some values, to four digits; of five or more also an interval.

    `low` and `high` are the 95% percentile interval of the median over 10,000 bootstrap samples of the values.
    """
    found = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    if len(values) >= ROUNDS_FOR_INTERVAL:
        medians = np.median(np.random.RandomState(0).choice(values, (10_000, len(values))), axis=1)
        found["low"], found["high"] = np.percentile(medians, [2.5, 97.5]).tolist()
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def summary(taken: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Return a row per work: seconds, and the rounds' ratios to the published step and to the plain forwards."""
    rows = []
    for name in taken[0]:
        against = "reference" in taken[0]
        rows.append(
            {
                "name": name,
                "seconds": spread([t[name] for t in taken]),
                "reference_over_this": spread([t["reference"] / t[name] for t in taken]) if against else None,
                "this_over_floor": spread([t[name] / t[floor_of(name)] for t in taken]),
            }
        )
    return rows


def measure(shape: str, spec: str, args: argparse.Namespace, until: float) -> dict[str, Any]:
    """Time the works of one shape and batch; return what the record says about it."""
    device = torch.device(args.device)
    batch = padded(spec, device)
    name = f"{shape} {spec}"
    print(f"{name}: building models", file=sys.stderr, flush=True)
    works = make_works(shape, batch, selected(args.only))
    load = [os.getloadavg()[0]]
    taken = time_rounds(works, args.rounds, until, lambda line: print(f"{name}: {line}", file=sys.stderr, flush=True))
    return {
        "shape": shape,
        "batch": spec,
        "tokens": sum(len(row.input_ids) for row in batch.rows),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "limits": limits(),
        "load": [round(value, 1) for value in [*load, os.getloadavg()[0]]],  # before and after, this process included
        **dict(zip(("commit", "dirty"), versions.git_state(), strict=True)),
        "versions": versions.installed(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", "scripts/bench/bench_step.py", *sys.argv[1:]]),
        "rounds": len(taken),
        "rows": summary(taken),
    }


# --- memory ---


def memory(field: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS (resident) or VmHWM (its peak)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peak_of(shape: str, spec: str, what: str, device: torch.device) -> int:
    """Return the peak memory of `what` in bytes, less what the imported libraries take; loading is left out.

    A small step runs first, so that the compiler, its output and its libraries count as imported.
    """
    kind, name, *noise = what.removesuffix(" lora").split()
    dtype = COMPUTE[name]
    small = padded("2x8", device)
    Ours(new_model("tiny", device), small, noise[0] if noise else "gaussian", dtype).step()
    before = memory("VmRSS")
    batch = padded(spec, device)
    model = new_model(shape, device, what.endswith("lora"))
    work = (
        partial(plain_forwards, model, batch, dtype, 1) if kind == "floor" else Ours(model, batch, noise[0], dtype).step
    )
    if device.type == "cuda":
        work()
        torch.cuda.reset_peak_memory_stats()
    else:
        work()  # compiling takes memory, once
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again at what is resident now
    for _ in range(3):
        work()
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else memory("VmHWM") - before


def measure_peaks(shape: str, spec: str, args: argparse.Namespace) -> dict[str, int]:
    """Measure the peak of each work that is a step or its plain forwards, in a new process."""
    found = {}
    names = [name for name in selected(args.only) if name in FLOORS + STEPS]
    for done, name in enumerate(names):
        command = [sys.executable, __file__, "--peak", name, "--shapes", shape, "--batches", spec]
        command += ["--device", args.device]
        found[name] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
        line = f"{shape} {spec}: memory, {done + 1} of {len(names)}: {name} {found[name] / 1e9:.2f} GB"
        print(line, file=sys.stderr, flush=True)
    return found


# --- the command ---


def cell(values: dict[str, float] | None, digits: int) -> str:
    """Return the text of a spread: `1.18 (1.10-1.30)`, with the interval of the median where there is one."""
    if values is None:
        return ""
    shown = {name: f"{value:.{digits}f}" for name, value in values.items()}
    interval = f" [{shown['low']}-{shown['high']}]" if "low" in shown else ""
    return f"{shown['median']} ({shown['min']}-{shown['max']}){interval}"


def show(result: dict[str, Any]) -> None:
    """Print one table."""
    title = f"RoBERTa-{result['shape']} shape, batch {result['batch']} ({result['tokens']} tokens)"
    print(f"\n{title}, median (min-max) [95% of the median]")
    print(f"{'':26}{'seconds':>36}{'reference / this':>36}{'this / floor':>36}{'peak GB':>9}{'/ floor':>9}")
    peaks = result.get("peaks", {})
    for row in result["rows"]:
        peak, used = peaks.get(row["name"]), ""
        if peak is not None:
            used = f"{peak / 1e9:9.2f}{peak / peaks[floor_of(row['name'])]:9.2f}"
        ratios = f"{cell(row['reference_over_this'], 2):>36}{cell(row['this_over_floor'], 2):>36}"
        print(f"{row['name']:26}{cell(row['seconds'], 3):>36}{ratios}{used}", flush=True)


def main() -> None:
    """Measure, print the tables and write them to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["large"], choices=SHAPES)
    parser.add_argument("--batches", nargs="+", default=["16x32"], help="16x32, 64x32, 16xsst2, 16xrte, ...")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=20.0, help="of timing, for all shapes and batches together")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory", action="store_true", help="measure peak memory too")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_step.json"), help=f"{FOLDER.name}/NAME.json")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
    device = torch.device(args.device)
    if args.peak:
        print(peak_of(args.shapes[0], args.batches[0], args.peak, device))
        return
    machine = describe(device)
    try:
        merge(args.out, machine, [])  # before the minutes are spent
    except ValueError as error:
        parser.error(str(error))
    print(f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores: {' '.join(machine['instruction_sets'])}")
    until = time.monotonic() + 60 * args.minutes
    for shape in args.shapes:
        for spec in args.batches:
            result = measure(shape, spec, args, until)
            if args.memory:
                result["peaks"] = measure_peaks(shape, spec, args)
            show(result)
            write(args.out, merge(args.out, machine, [result]))  # a bench that is stopped keeps what it has
    print(f"\nwrote {args.out}")


if __name__ == "__main__":
    main()
