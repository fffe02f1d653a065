"""Open a reward, score batches of completions with it, and say in one line which row a mistake is in."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mezo_cli.errors import RunFailed, UserError
from mezo_cli.rewards import functions
from mezo_cli.rewards.functions import REWARD, RewardError, Scores
from mezo_cli.rewards.process import Worker
from mezo_cli.rewards.spec import KEY, RewardSpec

NO_REWARD = {REWARD: 0.0}  # of a row whose reward failed, with reward_errors=zero


@dataclass(frozen=True)
class RewardBatch:
    """The rewards of a batch.

    Attributes:
        values: float64 [n], what is optimized.
        parts: float64 [n] by name: the parts of a mixture without their weights, the other entries of a function's
            dict, and of a shuffled reward what it would be for the right rows.
        errors: rows that count 0 because their reward failed.
    """

    values: np.ndarray
    parts: dict[str, np.ndarray]
    errors: int


@dataclass(frozen=True)
class Batch:
    """Completions and what they are scored against, one entry per completion.

    Attributes:
        completions: the texts.
        rows: every column of each row.
        golds: the gold answers of each row.
        seeds: of (seed, step, row, sample).
        locations: the row's file and line, or its split and number: the same for all samples of a row.
    """

    completions: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    golds: Sequence[Sequence[str]]
    seeds: Sequence[int]
    locations: Sequence[str]

    def scored(self) -> dict[str, Any]:
        """Return what the functions of rewards get."""
        return {name: getattr(self, name) for name in ("completions", "rows", "golds", "seeds")}

    def take(self, i: int) -> "Batch":
        """Return the completion `i` as a batch."""
        return Batch(*([getattr(self, name)[i]] for name in self.__dataclass_fields__))

    def shuffled(self) -> "Batch":
        """Return the batch with every completion beside another row: a function of the seeds and the locations.

        The rows of the batch are put in the order of a hash of their seeds, and each is replaced by the next. Rewards
        that were permuted after they were computed would keep their mean, and with it the loss: that is no control.
        """
        first = {location: i for i, location in reversed(list(enumerate(self.locations)))}  # of its samples
        order = sorted(first.values(), key=lambda i: hashlib.sha256(str(self.seeds[i]).encode()).digest())
        following = {self.locations[i]: j for i, j in zip(order, [*order[1:], *order[:1]], strict=True)}
        others = [following[location] for location in self.locations]
        rows, golds = [self.rows[j] for j in others], [self.golds[j] for j in others]
        return Batch(self.completions, rows, golds, self.seeds, self.locations)


class Reward:
    """A reward that is open. It is closed at the end of a `with` block, which kills its worker.

    Args:
        spec: what it is.
        timeout: seconds for a batch.
        on_error: what a row counts whose reward fails: `stop` ends the run, `zero` counts 0.

    Raises:
        UserError: when it cannot be loaded, or takes other arguments.
    """

    def __init__(self, spec: RewardSpec, timeout: float, on_error: Literal["stop", "zero"]) -> None:
        self.spec, self._on_error = spec, on_error
        self._worker: Worker | None = None
        self._functions: list[functions.Function] = []
        try:
            if spec.in_process:
                self._functions = [functions.prepare(part.name, part.target) for part in spec.parts]
            else:
                parts = [
                    {"name": part.name, "target": part.target, "settings": part.settings, "sha256": spec.sha256}
                    for part in spec.parts
                ]
                self._worker = Worker(parts, timeout)
                self._worker.start()
        except RewardError as error:
            raise UserError(f"{KEY}={spec.describe()}: {error}") from error

    def __enter__(self) -> "Reward":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the worker."""
        if self._worker is not None:
            self._worker.close()

    def check(
        self,
        rows: Sequence[Mapping[str, Any]],
        golds: Sequence[Sequence[str]],
        seeds: Sequence[int],
        locations: Sequence[str],
    ) -> bool:
        """Call the reward twice on the gold answers of some rows, and return whether it gave the same numbers.

        Raises:
            UserError: when it fails, with reward_errors=zero when it fails on every row.
        """
        texts = [answers[0] if answers else "" for answers in golds]
        batch = Batch(texts, rows, golds, seeds, locations)
        try:
            first, second = self._row_scores(batch), self._row_scores(batch)
        except RunFailed as error:
            raise UserError(str(error)) from error
        if all(isinstance(scores, str) for scores in first):
            raise UserError(self._line(locations[0], str(first[0])))
        return first == second

    def score(
        self,
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        golds: Sequence[Sequence[str]],
        seeds: Sequence[int],
        locations: Sequence[str],
    ) -> RewardBatch:
        """Return the rewards of completions; `Batch` says what the arguments are.

        Raises:
            RunFailed: with reward_errors=stop, for the first row whose reward fails; when a worker that was killed
                cannot be started again.
        """
        batch = Batch(completions, rows, golds, seeds, locations)
        right = self._score(batch)
        if not self.spec.shuffled:
            return right
        other = self._score(batch.shuffled())
        name = self.spec.parts[0].name
        return RewardBatch(other.values, {name: right.values, **right.parts}, right.errors + other.errors)

    def _score(self, batch: Batch) -> RewardBatch:
        """Return the rewards of a batch for its own rows."""
        all_scores = self._row_scores(batch)
        names = list(next((scores for scores in all_scores if not isinstance(scores, str)), NO_REWARD))
        values, errors = {name: np.zeros(len(all_scores)) for name in names}, 0
        for i, scores in enumerate(all_scores):
            if not isinstance(scores, str) and set(scores) != set(names):
                scores = f"returned the parts {sorted(scores)}, and {sorted(names)} for another row"
            if isinstance(scores, str):
                if self._on_error == "stop":
                    raise RunFailed(self._line(batch.locations[i], scores))
                errors += 1
                continue
            for name in names:
                values[name][i] = scores[name]
        return RewardBatch(values.pop(REWARD), values, errors)

    def _row_scores(self, batch: Batch) -> list[Scores]:
        """Return what each row got. After a failure of the batch, its rows are tried one by one."""
        try:
            return self._call(batch)
        except RewardError as error:
            failure = str(error)
        if len(batch.completions) == 1:
            return [failure]
        all_scores: list[Scores] = []
        for i, location in enumerate(batch.locations):
            (scores,) = self._row_scores(batch.take(i))
            if isinstance(scores, str) and self._on_error == "stop":
                raise RunFailed(self._line(location, scores))
            all_scores.append(scores)
        if self._on_error == "stop":
            rows = f"{batch.locations[0]} to {batch.locations[-1]}, {len(all_scores)} completions together"
            raise RunFailed(self._line(rows, failure))
        return all_scores

    def _call(self, batch: Batch) -> list[Scores]:
        """Call the reward on a batch.

        Raises:
            RewardError: when the call fails.
            RunFailed: when the worker cannot be started again.
        """
        if self._worker is None:
            by_part = functions.score(self._functions, **batch.scored())
        else:
            try:
                self._worker.start()
            except RewardError as error:
                raise RunFailed(f"{KEY}={self.spec.describe()}: {error}") from error
            by_part = self._worker.score(**batch.scored())
        return [self._sum(scores) for scores in zip(*by_part, strict=True)]

    def _sum(self, by_part: Sequence[Scores]) -> Scores:
        """Return the scores of a row: those of a reward that stands by itself, or the weighted sum of a mixture."""
        if len(by_part) == 1 and self.spec.parts[0].weight == 1:
            return by_part[0]
        total, numbers = 0.0, dict[str, float]()
        for part, scores in zip(self.spec.parts, by_part, strict=True):
            if isinstance(scores, str):
                return f"{part.name}: {scores}"
            total += part.weight * scores[REWARD]
            numbers |= {part.name if key == REWARD else f"{part.name}.{key}": value for key, value in scores.items()}
        return {**numbers, REWARD: total}

    def _line(self, place: str, failure: str) -> str:
        return f"{place}: {KEY}={self.spec.describe()}: {failure}"


def open_reward(spec: RewardSpec, *, timeout: float = 10.0, on_error: Literal["stop", "zero"] = "stop") -> Reward:
    """Return a reward that is ready to score: its worker runs, or its callable has the right parameters.

    Args:
        spec: what it is.
        timeout: seconds for a batch (`objective.reward_timeout`); a callable has none.
        on_error: `objective.reward_errors`.

    Raises:
        UserError: when it cannot be imported within 60 s, or takes other arguments.
    """
    return Reward(spec, timeout, on_error)
