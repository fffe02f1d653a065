"""Runs in half precision and what null stands for: bits of files and replays, and the warning of a hidden signal."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from mezo_cli import models
from mezo_cli.config.compose import build_config
from mezo_cli.config.stored import read_config
from mezo_cli.runs import Run, trajectory
from mezo_cli.session.opening import opened
from mezo_cli.session.session import Session
from mezo_cli.training import precision
from tests import tiny
from tests.command_line import Train, mezo, ok, small
from tests.optim.test_mezo import SENTENCES, ready

pytestmark = pytest.mark.usefixtures("eager_kernels")


def made(folder: Path, *words: str) -> Session:
    session = ready(folder, *words)
    batch = session.objective.collate(session.encoder.encode_all(SENTENCES))
    session.forward.select_reachable(lambda: session.objective.logits(batch))
    return session


def test_null_is_the_weights_dtype_on_a_gpu_and_float32_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    model = build_config(["task=sst2", "model=demo", "model.dtype=float16", "model.device=cpu"]).model
    assert models.resolved(model).compute_dtype == "float32"
    assert models.resolved(model.replace(device="mps")).compute_dtype == "float16"
    assert models.resolved(model.replace(device="mps", compute_dtype="bfloat16")).compute_dtype == "bfloat16"


def test_what_null_stood_for_is_kept_elsewhere(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had begun on a GPU: every later command computes in float16."""
    run, words = tmp_path / "run", ["model.dtype=float16", "max_seconds=1e-9", "steps=3"]
    with monkeypatch.context() as patch:
        patch.setattr(models, "resolved", lambda model: model.replace(compute_dtype="float16"))
        assert train(run, *words).code == 130
    assert mezo("resume", run, "max_seconds=null").code == 0
    info = Run(run).info()
    assert info["changes"][0]["before"] == {"model.compute_dtype": None}
    assert [one["dtype"] for one in info["arithmetic"]] == ["float16"]
    assert "forwards in float16: training" in (run / "train.log").read_text()
    assert mezo("verify", run).code == 0
    assert mezo("export", run, "--out", tmp_path / "out").code == 0
    assert "| dtype | float16, computed in float16 |" in (tmp_path / "out" / "README.md").read_text()
    assert '"dtype": "float16"' in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize(
    ("eps", "level", "said"),
    [
        (1e-5, logging.WARNING, "rounding makes them noisy; optimizer.eps=0.003 would do, off by "),
        (3e-2, logging.INFO, "bfloat16: projected gradients are off by "),
    ],
)
def test_a_run_is_warned_and_told_the_eps_that_would_do(
    roberta: Path, eps: float, level: int, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = made(roberta, "model.compute_dtype=bfloat16", f"optimizer.eps={eps}")
    for fast in (False, True):
        monkeypatch.setattr(precision, "has_fast_float16", lambda device, fast=fast: fast)
        with caplog.at_level(logging.INFO, logger="mezo"):
            precision.check(session, session.loss_of(session.encoder.encode_all(SENTENCES)))
        record = caplog.records[-1]
        assert record.levelno == level
        assert said in record.message
        assert ("; model.compute_dtype=float16 by " in record.message) == fast


RUNS = {
    "mezo": ["model.dtype=bfloat16", "optimizer.weight_decay=0.1"],
    "momentum": ["model.dtype=float16", "optimizer=mezo_momentum", "optimizer.lr=1e-3"],
    "float16": ["model.dtype=float16", "model.compute_dtype=float16"],
    "lora": ["model.dtype=bfloat16", "model.compute_dtype=bfloat16", "peft=lora", "optimizer.samples=2"],
}
WEIGHTS = {"lora": "adapter_model.safetensors"}


@pytest.fixture(scope="module")
def half(roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs, one per mode, made on first use."""
    home = tmp_path_factory.mktemp("half")
    data = tiny.movie_folder(home / "movies")

    def run(mode: str) -> Path:
        if not (home / mode).exists():
            ok("train", *small(roberta, data, home / mode, *RUNS[mode]))
        return home / mode

    return run


def weights(folder: Path, mode: str) -> bytes:
    return (folder / WEIGHTS.get(mode, "model.safetensors")).read_bytes()


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["mezo", "momentum", "float16", "lora"])
def test_checkpoints_and_replays_have_thetas_bits(mode: str, half: Callable[[str], Path], tmp_path: Path) -> None:
    run, dtype = half(mode), RUNS[mode][0].partition("=")[2]
    header = trajectory.read(run / "trajectory.bin").header
    assert (header.dtype, header.rounding) == (dtype, "stochastic")
    last = run / "checkpoints" / "last"
    stored = safetensors.torch.load(weights(last, mode))
    assert {str(tensor.dtype) for tensor in stored.values()} == {f"torch.{dtype}"}
    if mode != "lora":
        assert json.loads((last / "config.json").read_text())["dtype"] == dtype
    ok("replay", run, "--step", "6", "--out", tmp_path / "replayed")
    assert weights(tmp_path / "replayed", mode) == weights(last, mode)
    start = opened(read_config(run / "config.yaml"), Run(run), 0).params.tensors
    end = opened(read_config(run / "config.yaml"), Run(run), 6).params.tensors
    moved = [bool((end[name] != p).any()) for name, p in start.items()]
    assert sum(moved) > len(moved) / 2


def test_a_model_of_more_than_one_dtype_is_stored_in_one(half: Callable[[str], Path]) -> None:
    """peft makes the tensors of an adapter in float32."""
    run = half("lora")
    session = opened(read_config(run / "config.yaml"), Run(run), 0)
    assert {p.dtype for p in session.loaded.model.parameters()} == {torch.bfloat16}
