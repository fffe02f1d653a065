"""What a check reports: findings, each with a verdict, a sentence with its figures, and advice. And its time limit."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic_core import to_jsonable_python

OK, NOTE, DOUBT, UNKNOWN = "ok", "note", "doubt", "unknown"


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    name: str  # stable, for programs that read the JSON: `zero_shot_balance`
    verdict: str  # `OK`, `NOTE`, `DOUBT` or `UNKNOWN`: not measured, or too little of it to tell
    text: str  # the verdict in words, then the figures behind it; `figures` are the same as data
    figures: dict[str, Any] = field(default_factory=dict)
    advice: str = ""  # what to do; every doubt has one
    table: Sequence[Sequence[str]] = ()  # rows of cells, the first one the header; empty without a table


@dataclass
class Section:
    """The findings of one check."""

    title: str
    findings: list[Finding] = field(default_factory=list)

    def add(
        self, verdict: str, name: str, text: str, advice: str = "", table: Sequence[Sequence[str]] = (), **figures: Any
    ) -> None:
        """Add a finding; what is `OK` needs no advice, and gets none."""
        self.findings.append(Finding(name, verdict, text, figures, "" if verdict == OK else advice, table))

    def judge(self, name: str, doubtful: bool, text: str, advice: str, **figures: Any) -> None:
        """Add a doubt with its advice if `doubtful`, else the same sentence as a finding that is right."""
        self.add(DOUBT if doubtful else OK, name, text, advice, **figures)

    def record(self) -> dict[str, Any]:
        """Return the section as plain values; tables are for people, their numbers are in the figures."""
        findings = [{k: v for k, v in asdict(finding).items() if k != "table"} for finding in self.findings]
        return dict(to_jsonable_python({"check": self.title, "findings": findings}, inf_nan_mode="null"))


class Deadline:
    """A time limit of some seconds from now on, and limits for parts of it. `clock` returns seconds; of a test."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end - self._clock())

    def allows(self, seconds: float) -> bool:
        """Return whether work that takes so long would end in time; never once the time is up."""
        return self.left > 0 and self.left >= seconds

    def part(self, fraction: float) -> "Deadline":
        """Return a deadline for a fraction of the time that is left."""
        return Deadline(fraction * self.left, self._clock)


def percent(fraction: float) -> str:
    """Return a fraction as text: 88%, 0.3%, under 0.01%; a huge one as `over 1000%`."""
    if not fraction <= 10:
        return "over 1000%"
    if 0 < fraction < 1e-4:
        return "under 0.01%"
    return f"{100 * fraction:.0f}%" if fraction >= 0.1 or fraction == 0 else f"{100 * fraction:.2g}%"


def short(number: float) -> str:
    """Return a number with two digits: 0.0035, 790, 1.2e+06."""
    return f"{float(f'{number:.2g}'):g}"


def count(n: int, what: str) -> str:
    """Return a number with its noun: `1 direction`, `32 directions`."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"
