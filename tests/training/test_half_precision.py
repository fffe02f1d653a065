"""Runs with theta in half precision: their files, resume, replay and checkpoint=trajectory end bitwise identical."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from mezo_cli.config.stored import read_config
from mezo_cli.runs import Run, trajectory
from mezo_cli.session.opening import opened
from tests import tiny
from tests.command_line import mezo, small

RUNS = {
    "mezo": ["model.dtype=bfloat16", "optimizer.weight_decay=0.1"],
    "momentum": ["model.dtype=float16", "optimizer=mezo_momentum", "optimizer.lr=1e-3"],
    "float16": ["model.dtype=float16", "model.compute_dtype=float16"],
    "lora": ["model.dtype=bfloat16", "model.compute_dtype=bfloat16", "peft=lora", "optimizer.samples=2"],
}
WEIGHTS = {"lora": "adapter_model.safetensors"}

pytestmark = pytest.mark.usefixtures("eager_kernels")


@pytest.fixture(scope="module")
def train(roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs, one per mode, made on first use."""
    home = tmp_path_factory.mktemp("half")
    data = tiny.movie_folder(home / "movies")

    def run(mode: str) -> Path:
        if not (home / mode).exists():
            ended = mezo("train", *small(roberta, data, home / mode, *RUNS[mode]))
            assert ended.code == 0, ended
        return home / mode

    return run


def weights(folder: Path, mode: str) -> bytes:
    return (folder / WEIGHTS.get(mode, "model.safetensors")).read_bytes()


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["mezo", "momentum", "float16", "lora"])
def test_checkpoints_and_replays_have_thetas_bits(mode: str, train: Callable[[str], Path], tmp_path: Path) -> None:
    run, dtype = train(mode), RUNS[mode][0].partition("=")[2]
    header = trajectory.read(run / "trajectory.bin").header
    assert (header.dtype, header.rounding) == (dtype, "stochastic")
    last = run / "checkpoints" / "last"
    stored = safetensors.torch.load(weights(last, mode))
    assert {str(tensor.dtype) for tensor in stored.values()} == {f"torch.{dtype}"}
    if mode != "lora":
        assert json.loads((last / "config.json").read_text())["dtype"] == dtype
    ended = mezo("replay", run, "--step", "6", "--out", tmp_path / "replayed")
    assert ended.code == 0, ended
    assert weights(tmp_path / "replayed", mode) == weights(last, mode)
    start = opened(read_config(run / "config.yaml"), Run(run), 0).params.tensors
    end = opened(read_config(run / "config.yaml"), Run(run), 6).params.tensors
    moved = [bool((end[name] != p).any()) for name, p in start.items()]
    assert sum(moved) > len(moved) / 2


def test_a_model_of_more_than_one_dtype_is_stored_in_one(train: Callable[[str], Path]) -> None:
    """peft makes the tensors of an adapter in float32."""
    run = train("lora")
    session = opened(read_config(run / "config.yaml"), Run(run), 0)
    assert {p.dtype for p in session.loaded.model.parameters()} == {torch.bfloat16}
