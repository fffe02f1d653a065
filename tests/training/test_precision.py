"""The warning about a compute dtype that hides the signal of MeZO."""

import logging
from pathlib import Path

import pytest
import torch

from mezo_cli.session.session import Session
from mezo_cli.training import precision
from tests.optim.test_mezo import SENTENCES, ready


def made(folder: Path, *words: str) -> Session:
    session = ready(folder, *words)
    batch = session.objective.collate(session.encoder.encode_all(SENTENCES))
    session.forward.select_reachable(lambda: session.objective.logits(batch))
    return session


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
    roberta: Path, eps: float, level: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    session = made(roberta, "model.compute_dtype=bfloat16", f"optimizer.eps={eps}")
    with caplog.at_level(logging.INFO, logger="mezo"):
        precision.check(session, session.loss_of(session.encoder.encode_all(SENTENCES)))
    (record,) = caplog.records
    assert record.levelno == level
    assert said in record.message
