"""What run.json and summary.json hold, of which no value is of another type."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from mezo_cli.config.schema import Config
from mezo_cli.errors import UserError, shorten

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


def check_types(kind: type[Stored], path: Path, values: Mapping[str, Any]) -> None:
    """Refuse a file that holds a value that no run writes there."""
    try:
        kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key, value = ".".join(map(str, first["loc"])), shorten(repr(first["input"]), 80)
        raise UserError(f"{path} is damaged: {key}: {first['msg']}, not {value}") from error


class Contents(NamedTuple):
    """run.json, the config, the status, and of a finished run summary.json; else that is empty."""

    info: dict[str, Any]
    config: Config
    status: str
    summary: dict[str, Any]
