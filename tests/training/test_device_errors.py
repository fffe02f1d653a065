"""Out of memory and failures of the device: one line that names them, whatever was running."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mezo_cli.config.schema import Example
from mezo_cli.models import loading
from mezo_cli.objectives.base import Objective
from mezo_cli.objectives.encoders import Mlm
from mezo_cli.optim.mezo import Mezo
from mezo_cli.runs import Run
from tests import tiny
from tests.command_line import Train, error_line, finished_runs, mezo, small
from tests.optim.test_mezo import ready

pytestmark = pytest.mark.usefixtures("eager_kernels")

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has ...")
CPU_FULL = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: 9 bytes"
)
BROKEN = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")


@pytest.fixture(scope="module")
def done(roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, words = tmp_path_factory.mktemp("done"), ["steps=2", "checkpoint=trajectory"]
    return finished_runs(folder, roberta, tiny.movie_folder(folder / "movies"), {"run": words}) / "run"


def raising(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(owner, name, fail)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FULL, "out of memory: CUDA out of memory; try a smaller model or a device with more memory (model.device)"),
        (CPU_FULL, "out of memory: DefaultCPUAllocator: can't allocate memory: 9 bytes; try a smaller model"),
        (BROKEN, "the device failed: CUDA error: an illegal memory access was encountered"),
        (MemoryError(), "out of memory: MemoryError; try a smaller model"),
    ],
)
@pytest.mark.parametrize("where", ["load", "first forward"])
def test_while_loading(
    roberta: Path,
    movies: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    said: str,
    where: str,
) -> None:
    owner, name = {"load": (loading, "_check_missing"), "first forward": (Mlm, "logits")}[where]
    raising(monkeypatch, owner, name, error)
    line = error_line(mezo("train", *small(roberta, movies, tmp_path / "run")))
    assert f"loading model.path={roberta}: {said}" in line
    assert "does not support" not in line
    assert "CUDA kernel errors" not in line
    assert not (tmp_path / "run").exists()


def test_before_the_first_step(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, Objective, "check_start", FULL)
    line = error_line(train(tmp_path / "run"))
    assert "before the first step: out of memory: CUDA out of memory; try a lower batch_size (now 8)" in line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FULL, "out of memory: CUDA out of memory; try a lower batch_size (now 8) or eval_batch_size (now 64)"),
        (BROKEN, "the device failed: CUDA"),
    ],
)
def test_in_a_step(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    raising(monkeypatch, Mezo, "step", error)
    result = train(tmp_path / "run")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert result.err.startswith(f"error: {said}")
    assert Run(tmp_path / "run").status() == "failed"


def test_in_eval_and_replay(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        raising(patch, Mezo, "apply_updates", CPU_FULL)
        line = error_line(mezo("replay", done, "--step", 2, "--out", tmp_path / "out"))
        assert f"replaying {done / 'trajectory.bin'}: out of memory: " in line
        assert not (tmp_path / "out").exists()
    raising(monkeypatch, Mlm, "logits", FULL)
    assert "loading model.path=" in error_line(mezo("eval", done, "--checkpoint", 0))
    monkeypatch.undo()
    monkeypatch.setenv("MEZO_EAGER", "1")
    raising(monkeypatch, Objective, "measure_all", FULL)
    line = error_line(mezo("eval", done, "--checkpoint", 0))
    assert "evaluating test: out of memory: CUDA out of memory; try again when" in line
    assert "eval_batch_size is 64" in line


def test_other_errors_stay_as_they_are(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, Mezo, "step", RuntimeError("a defect"))
    with pytest.raises(RuntimeError, match="a defect"):
        train(tmp_path / "run")


def test_a_loss_that_is_not_finite_is_on_the_device_of_the_logits(roberta: Path) -> None:
    """Or the other sign's loss, which is finite, could not be stacked with it on a GPU."""
    session = ready(roberta, "model.device=cpu")
    loss_fn = session.loss_of(session.encoder.encode_all([Example(("a",), 0)]))
    session.objective.logits = lambda batch: torch.tensor([[float("nan"), 0.0]], device="cpu")  # type: ignore[attr-defined]
    with torch.device("meta"):  # a tensor made with no device lands elsewhere, as on a machine with a GPU
        loss = loss_fn()
    assert loss.device.type == "cpu"
    assert bool(loss.isnan())
