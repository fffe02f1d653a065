#!/usr/bin/env python3
"""Compare methods at equal forwards: each tuned on seeds of its own, tested on others (docs/measurements/bench.md).

    python scripts/bench/compare_methods.py bench_runs/demo-reward
    python scripts/bench/compare_methods.py bench_runs/demo-reward --json
    python scripts/bench/compare_methods.py bench_runs/demo-reward --out runs.csv
    python scripts/bench/compare_methods.py --rates docs/measurements/bench-demo-reward.csv

Runs with the same `forwards`, rows, model and objective are one bench. A method is a group of runs; the seeds with the
most points of its grid are those that it was tuned on. The point with the best dev score there is chosen, and only the
other seeds count for it. Test scores never decide.
"""

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mezo_cli.console import format_duration, make_console
from mezo_cli.report.entries import Entry, read_runs
from mezo_cli.report.groups import Group, group_runs, mean_score
from mezo_cli.report.settings import Point, format_mean, leave_out, shown_value
from mezo_cli.report.tables import Comparison, csv_text, make_table, show
from mezo_cli.runs.atomic import check_output, write_output
from mezo_cli.runs.contents import format_score

REFERENCE = "mezo"
LABELS = ("MeZO", "null (random signs)")  # of the two methods whose every lr `--rates` compares
OF_METHODS = ("optimizer.", "data.batches", "data.weights", "steps")  # settings in which the methods of a bench differ
SCORES = ("dev_best", "dev_last", "gain_at_last", "dev_loss", "test", "seconds")  # of a test seed
SHARES = (0.5, 0.8, 0.95)  # of the reference's gain
COLUMNS = ("method", "lr", "trials", "seeds", "dev best", "dev last", "gain at last", "dev loss", "test", "vs MeZO")
NOTES = (
    "calls: passes over the batch with one weight set; evaluations are not counted",
    "test is taken once, at the step with the best dev score; mean and population std (ddof 0) over the test seeds",
    "vs MeZO: the mean of the paired differences on test to tuned MeZO, and half of their 95% t interval; gain at last:"
    " of dev at the last step to dev before training likewise",
    "to 50, 80, 95%: the median over the seeds of the calls after which an evaluation on dev first has that share of"
    " tuned MeZO's mean gain over the untrained model; in parentheses the seeds that got there, unless all did",
)


@dataclass(frozen=True)
class Method:
    """A method in a bench: all its runs, in `group`."""

    group: Group

    @cached_property
    def tuning_seeds(self) -> frozenset[int]:
        """The data seeds with the most points of the grid; none if no seed has two."""
        points = Counter(seed for seed, _ in {(run.data_seed, run.point) for run in self.group.runs})
        most = max(points.values(), default=0)
        return frozenset(seed for seed, count in points.items() if count == most > 1)

    @cached_property
    def tuning(self) -> list[Entry]:
        """The runs that the point was chosen by."""
        return [run for run in self.group.runs if run.data_seed in self.tuning_seeds]

    @cached_property
    def point(self) -> Point | None:
        """The chosen point of the grid; None before a tuning run has finished."""
        cells: dict[Point, list[Entry]] = defaultdict(list)
        for run in self.group.runs:
            if run.finished and (run.data_seed in self.tuning_seeds or len(self.group.points) == 1):
                cells[run.point].append(run)

        def rank(point: Point) -> tuple[Any, ...]:
            scores = {name: mean_score(cells[point], "dev", name) for name in (self.group.metric, "loss")}
            return (*self.group.config.rank(scores, self.group.metric), point)

        return min(cells, key=rank, default=None)

    @property
    def lr(self) -> float | None:
        """The chosen learning rate."""
        return None if self.point is None else float(dict(self.point)["optimizer.lr"])

    @property
    def at_end(self) -> bool:
        """Whether the chosen learning rate is at an end of those that were tried, and any of them gains on dev."""
        rates = [entry.config.optimizer.lr for entry in self.tuning]
        gains = any(entry.finished and not entry.picked_start for entry in self.tuning)
        return gains and self.lr in (min(rates), max(rates))

    @cached_property
    def tests(self) -> dict[int, Entry]:
        """The finished run of each test seed at the chosen point."""
        runs = [run for run in self.group.runs if run.finished and run.data_seed not in self.tuning_seeds]
        return {run.data_seed: run for run in runs if run.point == self.point}

    @cached_property
    def gains(self) -> dict[int, pd.Series]:
        """Test seed -> by how much each evaluation on dev (by step) is better than that before training."""
        order = self.group.config.order_of(self.group.metric)
        evaluations = {seed: pd.DataFrame(run.dev).set_index("step") for seed, run in self.tests.items()}
        scores = {seed: lines[self.tests[seed].metric] for seed, lines in evaluations.items()}
        return {seed: order * (values - values.iloc[0]) for seed, values in scores.items()}

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The numbers of each test seed."""
        rows = {
            seed: (
                run.score("dev"),
                run.dev[-1][run.metric],
                self.gains[seed].iloc[-1],
                run.score("dev", "loss"),
                run.score("test"),
                run.summary["seconds"],
            )
            for seed, run in self.tests.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index", columns=list(SCORES)).astype(float)

    def calls_to(self, gain: float) -> list[float | None]:
        """Return for each test seed the calls after which its gain on dev is first this one; None if it never is."""
        steps = {seed: values.index[values >= gain] for seed, values in self.gains.items()}
        configs = {seed: run.config for seed, run in self.tests.items()}
        return [configs[seed].passes(min(reached)) if len(reached) else None for seed, reached in steps.items()]


@dataclass(frozen=True)
class Bench:
    """The methods that are compared, and the one of them that is tuned MeZO; None if it is not there."""

    title: str
    methods: Sequence[Method]
    reference: Method | None

    @property
    def gain(self) -> float | None:
        """Tuned MeZO's mean gain on dev over the untrained model; None without its runs."""
        if self.reference is None or not self.reference.tests:
            return None
        return float(np.mean([gains.max() for gains in self.reference.gains.values()]))


def read_benches(entries: Iterable[Entry]) -> list[Bench]:
    """Return the benches among some runs: those with `forwards`, by what their methods have in common."""
    members: dict[str, list[Method]] = defaultdict(list)
    for group in group_runs(entry for entry in entries if entry.config.forwards is not None):
        common = leave_out(group.settings, OF_METHODS)
        members[json.dumps(common, sort_keys=True, default=str)].append(Method(group))
    return [_bench(methods) for methods in members.values()]


def _bench(methods: Sequence[Method]) -> Bench:
    group = methods[0].group
    shots = "all rows" if group.shots is None else f"k={group.shots}"
    title = (
        f"{group.task}, {group.model}, {group.objective}, {shots}: {group.metric} at {group.config.forwards:,} calls"
    )
    known = (one for one in methods if one.group.config.optimizer.name == REFERENCE and not one.group.unusual)
    return Bench(title, methods, next((one for one in known if one.group.config.data.batches == "shuffled"), None))


# --- the tables ---


def forwards_view(entries: Sequence[Entry]) -> Comparison:
    """Return a table per bench, one row per method; for CSV one record per run."""
    benches = read_benches(entries)
    if not benches:
        raise SystemExit("no run here has forwards=N (docs/measurements/bench.md)")
    tables, notes, document = [], list(NOTES), []
    for bench in benches:
        records = [_record(bench, one) for one in bench.methods]
        rows = [_row(record, bench.methods[0].group.metric) for record in records]
        tables.append(make_table(bench.title, [_untrained_row(bench), *rows]))
        notes += _bench_notes(bench)
        document.append({"bench": bench.title, "gain": bench.gain, "methods": records})
    methods = [(bench, one) for bench in benches for one in bench.methods]
    runs = [_run_record(bench, one, run) for bench, one in methods for run in one.group.runs]
    return Comparison(tables, notes, runs, {"benches": document, "runs": runs})


def _untrained_row(bench: Bench) -> dict[str, str | None]:
    """Return the row of the model before training, over the test seeds of MeZO, or of all methods without it."""
    methods = bench.methods if bench.reference is None else [bench.reference]
    runs = [run for one in methods for run in one.tests.values()]
    metric = bench.methods[0].group.metric
    dev = [run.dev[0][metric] for run in runs]
    test = [line[metric] for run in runs for line in run.metrics[1] if line["split"] == "test_before"]
    means = {
        name: format_mean(metric, float(np.mean(values)) if values else None)
        for name, values in (("dev best", dev), ("test", test))
    }
    return {**dict.fromkeys(COLUMNS), "method": "before training", **means}


def _record(bench: Bench, method: Method) -> dict[str, Any]:
    """Return what a method came to, as plain values: fractions, losses, calls."""
    scores, differences = method.scores, []
    if bench.reference is not None and bench.reference is not method:
        differences = list((scores["test"] - bench.reference.scores["test"]).dropna())
    gain = bench.gain if bench.gain is not None and bench.gain > 0 else None
    reached = {share: None if gain is None else method.calls_to(share * gain) for share in SHARES}
    return {
        "method": method.group.label,
        "lr": method.lr,
        "at_end_of_grid": method.at_end,
        "trials": len(method.tuning),
        "tuning_calls": sum(entry.config.passes(entry.steps_done) for entry in method.tuning),
        "seeds": list(method.tests),
        **{name: _mean(scores[name]) for name in SCORES},
        "gain_at_last_half": half_width(list(scores["gain_at_last"])),
        "test_std": float(scores["test"].std(ddof=0)) if scores["test"].count() > 1 else None,
        "difference": _mean(differences),
        "difference_half": half_width(differences),
        **{f"to_{100 * share:.0f}": numbers for share, numbers in reached.items()},
    }


def _row(record: Mapping[str, Any], metric: str) -> dict[str, str]:
    """Return the row of a method, of its record."""
    shown = {
        "method": record["method"],
        "lr": "-" if record["lr"] is None else f"{record['lr']:.3g}" + " at an end" * record["at_end_of_grid"],
        "trials": str(record["trials"]),
        "seeds": str(len(record["seeds"])),
    }
    if not record["seeds"]:
        return shown | {"tuning calls": f"{record['tuning_calls']:,}"}
    return shown | {
        "dev best": format_mean(metric, record["dev_best"]),
        "dev last": format_mean(metric, record["dev_last"]),
        "gain at last": _with_half(metric, record["gain_at_last"], record["gain_at_last_half"]),
        "dev loss": f"{record['dev_loss']:.4f}",
        "test": format_mean(metric, record["test"], record["test_std"]),
        "vs MeZO": _with_half(metric, record["difference"], record["difference_half"]),
        **{f"to {100 * share:.0f}%": _reached(record[f"to_{100 * share:.0f}"]) for share in SHARES},
        "time": format_duration(record["seconds"]),
        "tuning calls": f"{record['tuning_calls']:,}",
    }


def _reached(numbers: Sequence[float | None] | None) -> str:
    """Return the median of calls, and how many seeds got there unless all did."""
    if not numbers:
        return "-"
    known = [number for number in numbers if number is not None]
    median = float(np.median([math.inf if number is None else number for number in numbers]))
    text = "never" if math.isinf(median) else f"{median:,.0f}"
    return text if len(known) == len(numbers) else f"{text} ({len(known)} of {len(numbers)})"


def _with_half(metric: str, value: float | None, half: float | None) -> str:
    if value is None:
        return "-"
    shown = f"{'+' if value >= 0 else ''}{format_score(metric, value)}"
    return shown if half is None else f"{shown} ± {format_score(metric, half)}"


def _bench_notes(bench: Bench) -> list[str]:
    """Return what a reader has to know of a bench: ends of grids, unequal tuning, missing runs."""
    notes, trials = [], {len(one.tuning) for one in bench.methods}
    task = bench.methods[0].group.task
    if bench.reference is None:
        notes.append(f"{task}: there is no MeZO with shuffled batches and its usual settings to compare with")
    elif bench.gain is not None and bench.gain <= 0:
        notes.append(f"{task}: tuned MeZO gains nothing on dev, so there are no shares of its gain")
    ends = [one.group.label for one in bench.methods if one.at_end]
    if ends:
        text = "extend the grids of all methods by one value at each end"
        notes.append(f"{task}: the best lr is at an end of the grid of {', '.join(ends)}: {text}")
    if len(trials) > 1:
        counts = ", ".join(f"{one.group.label} {len(one.tuning)}" for one in bench.methods)
        notes.append(f"{task}: the methods were not tuned by as many runs: {counts}")
    for one in bench.methods:
        if not one.tests:
            notes.append(f"{task}: {one.group.label}: not tested on any seed yet")
        notes += [f"{task}: {entry.location} {entry.trouble()}" for entry in one.group.entries if not entry.finished]
    return notes


def _run_record(bench: Bench, method: Method, entry: Entry) -> dict[str, Any]:
    """Return the record of a run of a method."""
    metric, last = method.group.metric, entry.dev[-1:]
    phase = "tune" if entry.data_seed in method.tuning_seeds else "test" if entry.point == method.point else "other"
    return {
        "bench": bench.title,
        "method": method.group.label,
        "phase": phase,
        "seed": entry.data_seed,
        "point": method.group.points[entry.point],
        "status": entry.status,
        "calls": entry.config.passes(entry.steps_done),
        "best_step": (entry.summary.get("best") or {}).get("step"),
        "dev_best": shown_value(metric, entry.score("dev")),
        "dev_last": shown_value(metric, last[0][metric] if last else None),
        "dev_loss": entry.score("dev", "loss"),
        "test": shown_value(metric, entry.score("test")),
        "seconds": entry.summary.get("seconds"),
        "run": entry.location,
    }


def rates_table(runs: pd.DataFrame) -> list[dict[str, str]]:
    """Return MeZO and its null at every lr, over the seeds that both have there, of the records that `--out` wrote."""
    kept = runs[runs.method.isin(LABELS) & (runs.status == "finished")].drop_duplicates(["method", "point", "seed"])
    rows = []
    for point, own in kept.groupby("point"):
        test, dev = (own.pivot(index="seed", columns="method", values=name) for name in ("test", "dev_last"))
        if set(LABELS) > set(test.columns) or (paired := test.dropna()).empty:
            continue
        differences = list(paired[LABELS[0]] - paired[LABELS[1]])
        row = {"lr": str(point).removeprefix("lr="), "seeds": str(len(paired))}
        row |= {f"{label}, test": f"{paired[label].mean():.3f} ({paired[label].std(ddof=0):.3f})" for label in LABELS}
        row |= {f"{LABELS[1]}, dev last": f"{dev.loc[paired.index, LABELS[1]].mean():.3f}"}
        half = half_width(differences)
        rows.append(row | {"MeZO - null": f"{np.mean(differences):+.3f}" + (f" ± {half:.3f}" if half else "")})
    return sorted(rows, key=lambda row: float(row["lr"]))


# --- over seeds ---


def half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the 95% interval of Student's t for the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit  # scipy takes long to import

    return float(stdtrit(len(values) - 1, 0.975) * np.std(values, ddof=1) / len(values) ** 0.5)


def _mean(values: Iterable[float]) -> float | None:
    known = pd.Series(values, dtype=float).dropna()
    return None if known.empty else float(known.mean())


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description="Compare methods at equal forwards.")
    parser.add_argument("folders", nargs="*", type=Path, help="Where the runs are.")
    parser.add_argument("--rates", type=Path, help="A file of --out: compare MeZO and its null at every lr in it.")
    parser.add_argument("--json", action="store_true", help="Print one JSON document instead.")
    parser.add_argument("--out", type=Path, help="Write a .csv file instead.")
    args = parser.parse_args()
    if args.rates is not None:
        table = make_table("MeZO and its null at every lr, paired by seed", rates_table(pd.read_csv(args.rates)))
        return show(Comparison([table], [], [], {}), make_console())
    entries, warnings = read_runs(args.folders)
    print("\n".join(warnings), end="\n" * bool(warnings), file=sys.stderr)
    view = forwards_view(entries)
    if args.out is not None:
        check_output(args.out)
        write_output(args.out, csv_text(view.records))
    elif args.json:
        print(json.dumps(view.document, indent=2))
    else:
        show(view, make_console())


if __name__ == "__main__":
    main()
