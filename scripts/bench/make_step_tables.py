"""Print a table of the step for each machine, from the records in docs/measurements/machines (bench_step.py --out).

python scripts/bench/make_step_tables.py
"""

from collections.abc import Iterator
from typing import Any

from machine_record import load_records
from step_works import floor_of


def median(values: dict[str, float] | None) -> str:
    """Return `1.18`, or nothing. The records have the spread of the rounds."""
    return "" if values is None else f"{values['median']:.2f}"


def spread(values: dict[str, float]) -> str:
    """Return `1.18 (1.10 to 1.30)`, or `1.18` if all rounds agree to these digits.

    Where there is a bootstrap interval of the median, it takes the place of the smallest and the largest.
    """
    ends = ("low", "high") if "low" in values else ("min", "max")
    least, most = (f"{values[name]:.2f}" for name in ends)
    return median(values) if least == most else f"{median(values)} ({least} to {most})"


def peak(result: dict[str, Any], name: str) -> str:
    """Return the peak memory of a work, over that of a plain forward."""
    peaks = result.get("peaks", {})
    return f"{peaks[name] / peaks[floor_of(name)]:.2f}" if name in peaks else ""


def result_lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the Markdown of one shape and batch."""
    rounds, threads = (
        f"{result[key]} {key.removesuffix('s') if result[key] == 1 else key}" for key in ("rounds", "threads")
    )
    limits = "".join(f"{limit}, " for limit in result.get("limits", []))
    load = " to ".join(map(str, result["load"]))
    commit = (result["commit"] or "unknown")[:7] + (", changed" if result["dirty"] else "")
    yield (
        f"RoBERTa-{result['shape']}'s shape, {result['batch'].replace('x', ' x ')}, {result['tokens']} tokens: "
        f"{rounds}, {threads}, {limits}{result['device']}, load {load}, "
        f"torch {result['versions']['torch']}, commit {commit}, {result['date']}."
    )
    yield ""
    yield "| | seconds | reference / this | this / floor | peak / floor |"
    yield "|---|---|---|---|---|"
    for row in result["rows"]:
        if row["name"].startswith("floor "):
            continue  # it is what the others are compared with
        cells = [
            row["name"],
            median(row["seconds"]),
            median(row["reference_over_this"]),
            spread(row["this_over_floor"]),
            peak(result, row["name"]),
        ]
        yield "| " + " | ".join(cells) + " |"


def has_set(machine: dict[str, Any], name: str) -> bool:
    """Return whether a CPU has instructions of a kind."""
    return any(one.startswith(name.lower().replace("-", "")) for one in machine["instruction_sets"])


def machine_lines(name: str, record: dict[str, Any]) -> Iterator[str]:
    """Yield the Markdown of one machine."""
    machine = record["machine"]
    device = f"{machine['gpu']}, " if machine["gpu"] else ""
    yield f"### {name}"
    sets = [name for name in ("AVX2", "AVX-512", "AMX") if has_set(machine, name)]
    where = f"{machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}"
    yield f"{device}{machine['cpu']}{f' ({sets[-1]})' if sets else ''}, {where}."
    for result in record["results"]:
        yield ""
        yield from result_lines(result)


def tables() -> str:
    """Return the Markdown of all machines."""
    parts = ["\n".join(machine_lines(name, record)) for name, record in load_records().items()]
    return "\n\n".join(parts)


def main() -> None:
    """Print the tables."""
    print(tables())


if __name__ == "__main__":
    main()
