"""The warning where a low compute dtype drowns the signal."""

import logging
from pathlib import Path

import pytest
import torch

from mezo_cli import precision
from mezo_cli.session import Session
from tests.optim.test_mezo import SENTENCES, ready


def made(folder: Path, *words: str) -> Session:
    session = ready(folder, *words)
    session.params.keep_live(lambda: session.objective.logits(session.batch(session.inputs.encode_all(SENTENCES))))
    return session


def error(folder: Path, *words: str) -> float:
    session = made(folder, *words)
    return precision.error_of(session, session.batch(session.inputs.encode_all(SENTENCES)))


def test_float32_against_itself_has_no_error(roberta: Path) -> None:
    assert error(roberta) == 0.0


def test_rounding_drowns_a_small_eps_more_than_a_large_one(roberta: Path) -> None:
    small, large = (error(roberta, "model.compute_dtype=bfloat16", f"optimizer.eps={eps}") for eps in (1e-5, 3e-2))
    assert small > precision.DROWNED > large > 0


def test_theta_and_the_compute_dtype_stay(roberta: Path) -> None:
    session = made(roberta, "model.compute_dtype=bfloat16")
    before = {name: p.clone() for name, p in session.params.tensors.items()}
    precision.error_of(session, session.batch(session.inputs.encode_all(SENTENCES)))
    assert session.params.compute_dtype == torch.bfloat16
    assert all(torch.equal(before[name], p) for name, p in session.params.tensors.items())


@pytest.mark.parametrize(("eps", "level"), [(1e-5, logging.WARNING), (3e-2, logging.INFO)])
def test_a_run_is_warned(roberta: Path, eps: float, level: int, caplog: pytest.LogCaptureFixture) -> None:
    session = made(roberta, "model.compute_dtype=bfloat16", f"optimizer.eps={eps}")
    with caplog.at_level(logging.INFO, logger="mezo"):
        precision.warn(session, session.batch(session.inputs.encode_all(SENTENCES)))
    (record,) = caplog.records
    assert record.levelno == level
    assert ("drowns" in record.message) == (level == logging.WARNING)
