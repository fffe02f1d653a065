"""The warning about a compute dtype that hides the signal of MeZO."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mezo_cli import models
from mezo_cli.config.compose import build_config
from mezo_cli.config.stored import read_config
from mezo_cli.models import resolved
from mezo_cli.runs import Run
from mezo_cli.session.session import Session
from mezo_cli.training import precision
from tests.command_line import error_line, mezo, small
from tests.optim.test_mezo import SENTENCES, ready


def made(folder: Path, *words: str) -> Session:
    session = ready(folder, *words)
    batch = session.objective.collate(session.encoder.encode_all(SENTENCES))
    session.forward.select_reachable(lambda: session.objective.logits(batch))
    return session


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("mps", "float16")])
def test_null_is_the_weights_dtype_on_a_gpu_and_float32_on_a_cpu(
    device: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    config = build_config(["task=sst2", "model=demo", "model.dtype=float16", f"model.device={device}"])
    assert resolved(config.model).compute_dtype == dtype
    given = build_config(["task=sst2", "model=demo", "model.dtype=float16", "model.compute_dtype=bfloat16"])
    assert resolved(given.model).compute_dtype == "bfloat16"


def test_what_null_stood_for_is_stored_and_kept_on_another_device(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it had begun on a GPU: every later command computes in float16."""
    with monkeypatch.context() as patch:
        patch.setattr(models, "resolved", lambda model: model.replace(compute_dtype="float16"))
        words = ["model.dtype=float16", "max_seconds=1e-9", "steps=3"]
        assert mezo("train", *small(roberta, movies, tmp_path / "run", *words)).code == 130
    assert read_config(tmp_path / "run" / "config.yaml").model.compute_dtype == "float16"
    assert mezo("resume", tmp_path / "run", "max_seconds=null").code == 0
    info = Run(tmp_path / "run").info()
    change = info["changes"][0]
    assert (change["before"], change["after"]) == ({"model.compute_dtype": None}, {"model.compute_dtype": "float16"})
    assert [one["dtype"] for one in info["arithmetic"]] == ["float16"]
    assert "forwards in float16: training" in (tmp_path / "run" / "train.log").read_text()
    assert mezo("verify", tmp_path / "run").code == 0
    assert "| dtype | float16, computed in float16 |" in exported_card(tmp_path)


def exported_card(tmp_path: Path) -> str:
    assert mezo("export", tmp_path / "run", "--out", tmp_path / "out").code == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
    return (tmp_path / "out" / "README.md").read_text()


def test_a_loss_beyond_float16_names_the_dtypes_that_have_the_range(
    roberta: Path, movies: Path, tmp_path: Path
) -> None:
    """The states are 1e30 times their size: bfloat16 has them."""
    file = roberta / "model.safetensors"
    (tmp_path / "big").mkdir()
    shutil.copytree(roberta, tmp_path / "big", dirs_exist_ok=True)
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("layer.0.intermediate.dense.weight"))
    save_file(tensors | {name: tensors[name] * 1e9}, tmp_path / "big" / file.name, {"format": "pt"})
    ended = {}
    for dtype in ("float16", "bfloat16"):
        words = ["steps=1", f"model.compute_dtype={dtype}", "optimizer.lr=0"]
        ended[dtype] = mezo("train", *small(tmp_path / "big", movies, tmp_path / dtype, *words))
    assert ended["bfloat16"].code == 0
    wanted = "not finite before the first step; float16 ends at 65,504: model.compute_dtype=bfloat16 or float32 has"
    assert wanted in error_line(ended["float16"])


def test_theta_and_the_compute_dtype_stay(roberta: Path) -> None:
    session = made(roberta, "model.compute_dtype=bfloat16")
    before = {name: p.clone() for name, p in session.params.tensors.items()}
    precision.check(session, session.loss_of(session.encoder.encode_all(SENTENCES)))
    assert session.forward.compute_dtype == torch.bfloat16
    assert all(torch.equal(before[name], p) for name, p in session.params.tensors.items())


@pytest.mark.parametrize(
    ("eps", "level", "said"),
    [
        (1e-5, logging.WARNING, "rounding hides the signal; optimizer.eps=0.003 would do, off by "),
        (3e-2, logging.INFO, "bfloat16: projected gradients are off by "),
    ],
)
def test_a_run_is_warned_and_told_the_eps_that_would_do(
    roberta: Path,
    eps: float,
    level: int,
    said: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
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
