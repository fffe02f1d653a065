"""What will be run: one run, or the jobs of a sweep, whose cost is added up."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mezo_cli.config.schema import Config
from mezo_cli.report.settings import flatten, matches

# What the cost of a step, of an evaluation or of a checkpoint depends on.
COSTLY = (
    "task.",
    "objective.",
    "model.",
    "peft.",
    "optimizer.name",
    "optimizer.noise",
    "optimizer.window",
    "data.",
    "init",
    "batch_size",
    "micro_batch_size",
    "eval_batch_size",
)
FREE = ("data.seed", "objective.loss", "model.name")


@dataclass(frozen=True)
class Jobs:
    """What will be run.

    Attributes:
        configs: the config of each job; the first one is examined.
        directory: of the run or of the sweep.
        is_sweep: whether `-m` was given.
        is_adaptive: a sweeper proposes the jobs as it goes, so that their number is not known.
        first: the overrides by which the first job differs from the others; empty if there is one job.
    """

    configs: Sequence[Config]
    directory: Path
    is_sweep: bool = False
    is_adaptive: bool = False
    first: str = ""

    @property
    def config(self) -> Config:
        """The config that is examined."""
        return self.configs[0]

    def differing_settings(self) -> list[str]:
        """Return the keys in which jobs differ from the first one and on which the cost of a step depends."""
        first = flatten(self.config)
        keys: dict[str, None] = {}
        for config in self.configs[1:]:
            own = flatten(config)
            keys |= {key: None for key in own | first if own.get(key) != first.get(key)}
        return [key for key in keys if key not in FREE and matches(key, COSTLY)]
