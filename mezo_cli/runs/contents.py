"""What the files of a run hold: the types of the values of run.json and summary.json, and the scores of evaluations."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from mezo_cli.config.registry import METRICS
from mezo_cli.config.schema import Config
from mezo_cli.errors import UserError, shorten

MARK = "@0"  # beside the score of a run whose training did not help: it is the score of step 0
NOTE = f"{MARK}: step 0 was picked, the model before training: none was better on dev"
# Fields of a record that show rows of the data, or what the model made of them.
TEXTS = ("columns", "prompt", "completion", "completions", "golds", "candidates", "prediction", "right")
OTHERS = ("step", "seconds", "rows", "row", "drift", "keep_log_prob", "keep_kl")  # numbers that are no metrics

# ruff: noqa: UP013  # parts of the files, a line each
Count = Annotated[int, Field(ge=0)]
Spent = TypedDict("Spent", {"forwards": Count})  # before the first step, by the probe or the race of rates
Stop = TypedDict("Stop", {"by": str, "step": Count})
Weights = TypedDict("Weights", {"step": Count, "sha256": str})
Trainable = TypedDict("Trainable", {"count": Count, "share": float, "names": list[str]})
Reward = TypedDict("Reward", {"name": str, "in_process": bool})
Change = TypedDict("Change", {"config_sha256": str})
Pruned = TypedDict("Pruned", {"bytes": Count, "checkpoints": dict[str, Count]})
Picked = TypedDict("Picked", {"step": Count})


class Stored(BaseModel):
    """Values of a file of a run. A key that is not declared is read by nothing here: a plug-in's, or for a reader."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class RunInfo(Stored):
    """run.json. What is missing is not known yet, or was not said when the run was exported."""

    format: int
    status: Literal["running", "finished", "failed", "interrupted", "pruned"]  # pruned: ended by `mezo tune`
    argv: list[str] | None = None
    pid: int | None = None
    host: str | None = None
    start: str | None = None
    end: str | None = None
    error: str | None = None
    versions: dict[str, str] | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None
    config_sha256: str | None = None
    own_reward: bool | None = None
    race: Spent | None = None
    probe: Spent | None = None
    data_fingerprint: str | None = None
    keep_sha256: str | None = None
    rows: dict[str, Count | None] | None = None
    prompt: str | None = None
    scored_by: str | None = None
    label_words: list[str] | None = None
    device: str | None = None
    arithmetic: list[dict[str, str | int]] | None = None  # and from which step on
    trainable: Trainable | None = None
    model_revision: str | None = None
    data_revision: str | None = None
    reward: Reward | None = None
    weights_fingerprint: str | None = None
    noise_kernels: str | None = None
    verdict: str | None = None
    stopped: Stop | None = None
    weights: dict[str, Weights] | None = None  # of the steps `best` and `last`
    logged_as: dict[str, str] | None = None
    changes: list[Change] | None = None
    pruned: Pruned | None = None
    ends: dict[str, str] | None = None  # of a finished run: file -> checksum of its size and end


class Scores(Stored):
    """Scores of a split, or the difference of two, with their 95% intervals."""

    loss: float | None = None
    intervals: dict[str, Annotated[list[float], Field(min_length=2, max_length=2)]] | None = None


class Summary(Stored):
    """summary.json, of a finished run."""

    steps: Count
    best: Picked
    forwards: Count | None = None
    backwards: Count | None = None
    seconds: float | None = None
    verdict: str | None = None
    verdict_reason: str | None = None
    dev: Scores | None = None
    train: Scores | None = None
    test: Scores | None = None
    test_before: Scores | None = None
    difference: dict[str, Scores] | None = None
    baselines: dict[str, dict[str, Any]] | None = None
    peak_memory_bytes: Count | None = None
    reward: str | None = None


def check_types(kind: type[Stored], path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a file; one that no run writes there is refused."""
    try:
        kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key, value = ".".join(map(str, first["loc"])), shorten(repr(first["input"]), 80)
        raise UserError(f"{path} is damaged: {key}: {first['msg']}, not {value}") from error
    return values


class Contents(NamedTuple):
    """run.json, the config, the status, and of a finished run summary.json; else that is empty."""

    info: dict[str, Any]
    config: Config
    status: str
    summary: dict[str, Any]


# --- scores, as metrics.jsonl and summary.json have them ---


def picked_start(summary: Mapping[str, Any]) -> bool:
    """Return whether a run took steps and its best evaluation is nevertheless that of step 0.

    Args:
        summary: summary.json, of any version; empty for a run that has not finished.
    """
    return bool(summary.get("steps")) and (summary.get("best") or {}).get("step") == 0


def metrics_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics and the loss among the fields of an evaluation."""
    numbers = {name: value for name, value in values.items() if isinstance(value, (int, float)) and name not in OTHERS}
    return {name: float(value) for name, value in numbers.items() if not isinstance(value, bool)}


def without_texts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's record without texts: its label, what was predicted, probabilities and figures."""
    return {name: value for name, value in record.items() if name not in TEXTS}


@cache
def is_fraction(metric: str) -> bool:
    """Return whether a metric is shown in percent: those of labels are; a reward has a scale of its own."""
    return metric in METRICS.names


def scale(metric: str) -> int:
    """Return by what a metric's values are multiplied to be shown."""
    return 100 if is_fraction(metric) else 1


def format_score(metric: str, value: float, sign: str = "") -> str:
    """Return a score in percent, with the `sign` behind it, or as it is; a loss with four digits."""
    if metric == "loss":
        return f"{value:.4f}" if abs(value) >= 0.00005 else "0.0000"  # never -0.0000
    return f"{100 * value + 0:.1f}{sign}" if is_fraction(metric) else f"{value + 0:.4g}"  # + 0: -0.0 is 0


def format_difference(metric: str, scores: Mapping[str, Any]) -> str:
    """Return a difference of scores with its interval: `+12.3 points (95% interval +6.2 to +18.2)`."""
    digits = 1 if is_fraction(metric) else 4 if metric == "loss" else 3
    numbers = (scores[metric], *scores["intervals"][metric])
    value, low, high = (f"{scale(metric) * number:+.{digits}f}" for number in numbers)
    return f"{value}{' points' if is_fraction(metric) else ''} (95% interval {low} to {high})"
