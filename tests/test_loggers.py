"""Further places for the scalars: TensorBoard and Weights & Biases, by packages that stand in for them."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from mezo_cli import config, loggers
from mezo_cli.runs import Run
from mezo_cli.schema import LoggerConfig
from tests.door import mezo, refused, small


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


def test_it_is_closed_when_the_run_fails(
    tensorboard: type[Writer], roberta: Path, movies: Path, tmp_path: Path
) -> None:
    words = small(roberta, movies, tmp_path / "run", "logger=tensorboard", "optimizer.lr=1e30")
    assert mezo("train", *words).code == 1
    assert tensorboard.made[0].closed


def test_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Theirs:
        def log(self, scalars: dict[str, float], step: int) -> None:
            seen.append((scalars, step))

        def finish(self) -> None:
            seen.append("finished")

    def init(**words: Any) -> Theirs:
        seen.append(words)
        return Theirs()

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    logger = loggers.make(LoggerConfig("wandb", "films"), tmp_path)
    logger.log(3, {"train/loss": 0.5})
    logger.close()
    assert seen == [
        {"project": "films", "dir": str(tmp_path), "name": tmp_path.name},
        ({"train/loss": 0.5}, 3),
        "finished",
    ]


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_is_named_before_training(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch, roberta: Path, movies: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    line = refused(mezo("train", *small(roberta, movies, tmp_path / "run", f"logger={name}")))
    assert f"logger={name} needs a package: pip install {name}" in line
    assert Run(tmp_path / "run").metrics() == []


def test_every_choice_of_conf_has_its_class() -> None:
    assert set(config.choices()["logger"]) == {"none", *loggers.LOGGERS}
