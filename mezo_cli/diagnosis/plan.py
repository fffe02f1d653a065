"""The plan whose cost is estimated: one run, or the jobs of a sweep."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mezo_cli.config.schema import Config
from mezo_cli.report.settings import flatten

# What the cost of a step or of an evaluation depends on. Jobs that differ in it are not measured one by one.
COSTLY = (
    "task.",
    "objective.",
    "model.",
    "peft.",
    "optimizer.name",
    "optimizer.noise",
    "optimizer.window",
    "data.",
    "batch_size",
    "micro_batch_size",
    "eval_batch_size",
)
FREE = ("data.seed", "objective.loss", "model.name")


@dataclass(frozen=True)
class Plan:
    """What will be run.

    Attributes:
        jobs: the config of each job; the first one is examined.
        directory: of the run or of the sweep.
        is_sweep: whether `-m` was given.
        is_adaptive: a sweeper proposes the jobs as it goes, so that their number is not known.
        first: the overrides by which the first job differs from the others; empty if there is one job.
    """

    jobs: Sequence[Config]
    directory: Path
    is_sweep: bool = False
    is_adaptive: bool = False
    first: str = ""

    @property
    def config(self) -> Config:
        """The config that is examined."""
        return self.jobs[0]

    def differing_settings(self) -> list[str]:
        """Return the keys in which jobs differ from the first one and on which the cost of a step depends."""
        first = flatten(self.config)
        found: dict[str, None] = {}
        for job in self.jobs[1:]:
            own = flatten(job)
            found |= {key: None for key in (own | first) if own.get(key) != first.get(key) and _is_costly(key)}
        return list(found)


def _is_costly(key: str) -> bool:
    return key not in FREE and any(key == name or (name.endswith(".") and key.startswith(name)) for name in COSTLY)
