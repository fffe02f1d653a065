"""TensorBoard and Weights & Biases receive what metrics.jsonl has; stand-ins take the place of their packages."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.config.choices import find_choices
from mezo_cli.runs import Run
from mezo_cli.training import loggers
from tests.command_line import error_line, mezo, small


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZO_EAGER", "1")


class Writer:
    """Stands for TensorBoard's SummaryWriter."""

    made: list["Writer"]

    def __init__(self, folder: str) -> None:
        self.folder, self.scalars, self.closed = folder, [], False  # type: ignore[var-annotated]
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> type[Writer]:
    Writer.made = []
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return Writer


def test_tensorboard_gets_what_metrics_get(
    tensorboard: type[Writer], roberta: Path, movies: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert mezo("train", *small(roberta, movies, run, "logger=tensorboard")).code == 0
    (writer,) = tensorboard.made
    assert writer.folder == str(run / "tensorboard")
    assert writer.closed
    wanted = []
    for line in Run(run).metrics():
        if line["kind"] == "train":
            names = ("loss", "loss_plus", "loss_minus", "projected_grad", "lr", "seconds")
            wanted += [(f"train/{name}", line[name], line["step"]) for name in names]
        elif line["split"] == "dev":
            wanted += [(f"dev/{name}", line[name], line["step"]) for name in ("accuracy", "loss")]
    assert sorted(writer.scalars) == sorted(wanted)


def test_a_logger_is_closed_when_the_run_fails(
    tensorboard: type[Writer], roberta: Path, movies: Path, tmp_path: Path
) -> None:
    words = small(roberta, movies, tmp_path / "run", "logger=tensorboard", "optimizer.lr=1e30")
    assert mezo("train", *words).code == 1
    assert tensorboard.made[0].closed


class FakeWandb(types.ModuleType):
    """Stands for wandb's module: it keeps runs as W&B's server would."""

    class Run:
        def __init__(self, **settings: Any) -> None:
            self.settings, self.finished = settings, False
            self.history: dict[int, dict[str, float]] = {}

        def log(self, data: dict[str, Any], step: int | None = None) -> None:
            assert not self.finished
            assert step is not None
            assert step >= max(self.history, default=0), "W&B drops a step that is lower than the one before it"
            self.history.setdefault(step, {}).update(data)

        def finish(self, exit_code: int | None = None) -> None:
            self.finished = True

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[FakeWandb.Run] = []

    def init(self, **settings: Any) -> "FakeWandb.Run":
        self.runs.append(FakeWandb.Run(**settings))
        return self.runs[-1]


def test_wandb_gets_what_metrics_get(
    monkeypatch: pytest.MonkeyPatch, roberta: Path, movies: Path, tmp_path: Path
) -> None:
    wandb, run = FakeWandb(), tmp_path / "run"
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    result = mezo("train", *small(roberta, movies, run, "logger=wandb", "logger.project=films"))
    assert result.code == 0, result
    (theirs,) = wandb.runs
    assert (theirs.settings["project"], theirs.settings["name"]) == ("films", "run")
    assert Path(theirs.settings["dir"]) == run
    assert theirs.finished
    wanted: dict[int, dict[str, float]] = {}
    for line in Run(run).metrics():
        prefix = "train" if line["kind"] == "train" else line["split"]
        if (line["kind"], prefix) not in (("eval", "train"), ("eval", "test")):
            scalars = {key: value for key, value in line.items() if isinstance(value, float)}
            dropped = {"seconds"} if prefix == "dev" else set()
            wanted.setdefault(line["step"], {}).update(
                {f"{prefix}/{key}": value for key, value in scalars.items() if key not in dropped}
            )
    assert theirs.history == wanted


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_is_named_before_training(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch, roberta: Path, movies: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    line = error_line(mezo("train", *small(roberta, movies, tmp_path / "run", f"logger={name}")))
    assert f"logger={name} needs a package: pip install {name}" in line
    assert Run(tmp_path / "run").metrics() == []


def test_every_logger_has_a_config_file() -> None:
    assert set(find_choices()["logger"]) == set(loggers.LOGGERS.names)
