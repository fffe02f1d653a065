"""Open a reward, score batches of completions with it, and say in one line which row a mistake is in."""

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mezo_cli.config.base import without_folder
from mezo_cli.config.registry import REWARDS
from mezo_cli.errors import RunFailed, UserError, join
from mezo_cli.rewards.spec import RewardSpec
from mezo_cli.rewards.worker import BY_NAME, REWARD, Batch, Function, RewardError, Scores, Worker, score

OF_ROW = ("rows", "prompts", "golds")  # of a batch: what belongs to a row, whatever was said


@dataclass(frozen=True)
class RewardBatch:
    """The rewards of a batch, and their parts.

    Parts are those of a mixture without weights, other entries of a function's dict, what a shuffled reward shuffles.
    """

    values: np.ndarray  # float64 [n], what is optimized
    parts: dict[str, np.ndarray]  # float64 [n] by name
    errors: int  # rows that count 0 because their reward failed


class Reward(AbstractContextManager["Reward"]):
    """A reward that is open: its worker runs. It is closed at the end of a `with` block, which kills its worker.

    `timeout` and `on_error` are `objective.reward_timeout`, which a callable has not, and `objective.reward_errors`.
    """

    def __init__(self, spec: RewardSpec, *, timeout: float = 10.0, on_error: Literal["stop", "zero"] = "stop") -> None:
        self.spec, self._on_error, self._title = spec, on_error, f"{REWARDS.key}={spec.describe()}"
        self._worker: Worker | None = None
        self._names: tuple[str, ...] = ()  # of what it returns for a row: all rows have the same
        self._columns: dict[str, None] = {}  # an ordered set: those of all rows so far
        try:
            if spec.in_process:
                self._functions = [Function(part.target) for part in spec.parts]
                self.needed = [name for one in self._functions for name in one.needed]
            else:
                self._worker = Worker([(part.target, part.settings, spec.sha256) for part in spec.parts], timeout)
                self._worker.start()
                self.needed = self._worker.needed
        except RewardError as error:
            raise UserError(f"{self._title}: {error}") from error

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.close()

    def check_columns(self, columns: Iterable[str]) -> None:
        """Check that the data have the columns that parameters name, beside those seen before; UserError if not."""
        self._columns |= dict.fromkeys(columns)
        for name in self.needed:
            if name not in self._columns:
                there = f"{BY_NAME}; the columns are: {join(self._columns) or 'none'}"
                raise UserError(f"{self._title}: takes '{name}', which is no column; {there}")

    def check(self, batch: Batch, columns: Iterable[str] = ()) -> bool:
        """Call the reward twice on the gold answers of some rows, and return whether it gave the same numbers."""
        self.check_columns(columns)  # of all rows
        batch = {**batch, "completions": [answers[0] if answers else "" for answers in batch["golds"]]}
        try:
            first, second = (self._row_scores(batch) for _ in range(2))
        except RunFailed as error:
            raise UserError(str(error)) from error
        errors = [scores for scores in first if isinstance(scores, str)]
        if errors and (self._on_error == "stop" or len(errors) == len(first)):
            raise UserError(f"{batch['locations'][first.index(errors[0])]}: {self._title}: {errors[0]}")
        return first == second

    def score(self, batch: Batch) -> RewardBatch:
        """Return the rewards of completions, [n].

        A batch has `completions`; of each one's row all columns (`rows`), `prompts`, `golds` and `locations`, its file
        and line or its split and number; and `seed`, that of (seed, step, row, sample).
        """
        self.check_columns(column for row in batch["rows"] for column in row)
        batch = {**batch, "seed": [int(seed) for seed in batch["seed"]]}
        right, locations = self._score(batch), batch["locations"]
        if not self.spec.shuffled:
            return right
        # Rewards that were permuted after they were computed would keep their mean, and with it the loss. So rows are
        # permuted: in the order of a hash of their first samples' seeds, each is replaced by the next.
        first = {location: i for i, location in reversed(list(enumerate(locations)))}
        order = sorted(first.values(), key=lambda i: hashlib.sha256(str(batch["seed"][i]).encode()).digest())
        following = {locations[i]: j for i, j in zip(order, [*order[1:], *order[:1]], strict=True)}
        shuffled = {name: [batch[name][following[location]] for location in locations] for name in OF_ROW}
        other = self._score(batch | shuffled)
        name = without_folder(self.spec.parts[0].name)
        return RewardBatch(other.values, {name: right.values, **right.parts}, other.errors)

    def _score(self, batch: Batch) -> RewardBatch:
        all_scores, errors = self._row_scores(batch), 0
        values = {name: np.zeros(len(all_scores)) for name in self._names or (REWARD,)}
        for i, scores in enumerate(all_scores):
            if isinstance(scores, str):
                if self._on_error == "stop":
                    raise RunFailed(f"{batch['locations'][i]}: {self._title}: {scores}")
                errors += 1
            else:
                for name, of_rows in values.items():
                    of_rows[i] = scores[name]
        return RewardBatch(values.pop(REWARD), values, errors)

    def _row_scores(self, batch: Batch) -> list[Scores]:
        try:
            return [self._sum(scores) for scores in zip(*self._call(batch), strict=True)]
        except RewardError as error:
            failure, locations = str(error), batch["locations"]
        if len(locations) == 1:
            return [failure]
        all_scores: list[Scores] = []  # of the rows one by one
        for i, place in enumerate(locations):
            all_scores += self._row_scores({name: [of_rows[i]] for name, of_rows in batch.items()})
            if isinstance(all_scores[-1], str) and self._on_error == "stop":
                raise RunFailed(f"{place}: {self._title}: {all_scores[-1]}")
        if self._on_error == "stop":
            together = f"{locations[0]} to {locations[-1]}, {len(locations)} completions together"
            raise RunFailed(f"{together}: {self._title}: {failure}")
        return all_scores

    def _call(self, batch: Batch) -> list[list[Scores]]:
        if self._worker is None:
            return score(self._functions, batch, [*self._columns])
        try:
            self._worker.start()
        except RewardError as error:
            raise RunFailed(f"{self._title}: {error}") from error
        return self._worker.score(batch, [*self._columns])

    def _sum(self, by_part: Sequence[Scores]) -> Scores:
        """Return a row's scores, of one reward or the weighted sum of a mixture; or what is wrong with them."""
        if len(by_part) == 1 and self.spec.parts[0].weight == 1:
            numbers = by_part[0]
            if isinstance(numbers, str):
                return numbers
        else:
            numbers, total = {}, 0.0
            for part, scores in zip(self.spec.parts, by_part, strict=True):
                if isinstance(scores, str):
                    return f"{part.name}: {scores}"
                total += part.weight * scores[REWARD]
                numbers |= {part.name if key == REWARD else f"{part.name}.{key}": v for key, v in scores.items()}
            numbers |= {REWARD: total}
        self._names = self._names or tuple(numbers)
        if numbers.keys() == {*self._names}:
            return numbers
        return f"returned the parts {sorted(numbers)}, and {sorted(self._names)} for the rows before"
