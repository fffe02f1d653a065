"""The warning about a compute dtype that hides the signal of MeZO."""

import logging
from pathlib import Path

import pytest
import torch

from mezo_cli import models
from mezo_cli.config.compose import build_config
from mezo_cli.runs import Run
from mezo_cli.session.session import Session
from mezo_cli.training import precision
from tests.command_line import Train, mezo
from tests.optim.test_mezo import SENTENCES, ready


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
        (1e-5, logging.WARNING, "rounding hides the signal; optimizer.eps=0.003 would do, off by "),
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
