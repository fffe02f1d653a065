"""Micro-batches: smaller forwards, the loss of the whole batch."""

from pathlib import Path

import pytest
import torch

from mezo_cli.objectives.base import BatchLoss
from mezo_cli.perturb.noise import Direction
from tests.command_line import error_line, mezo, small
from tests.optim.test_mezo import SENTENCES, ready


@pytest.mark.sample(2)
@pytest.mark.parametrize("loss", ["cross_entropy", "accuracy", "f1"])
@pytest.mark.parametrize("objective", ["mlm", "cls"])
def test_the_loss_is_that_of_the_whole_batch(objective: str, loss: str, roberta: Path) -> None:
    words = [f"objective={objective}", f"objective.loss={loss}"]
    session = ready(roberta, *words, "micro_batch_size=2")
    rows = session.encoder.encode_all(SENTENCES)
    forwards = []
    session.objective.logits = counted(session.objective.logits, forwards)  # type: ignore[method-assign]
    with torch.no_grad():
        for both in (False, True):
            context = session.forward.perturbed(Direction(1, 0), 1e-2) if both else torch.no_grad()
            with context:
                split, whole = (
                    session.loss_of(rows)(),
                    BatchLoss(session.objective, [session.objective.collate(rows)])(),
                )
            assert split.shape == whole.shape
            torch.testing.assert_close(split, whole, rtol=1e-6, atol=1e-7)
    assert max(forwards) == len(rows)
    assert sorted(forwards)[:2] == [1, 1] if len(rows) % 2 else [2, 2]


def counted(logits, rows):  # type: ignore[no-untyped-def]
    """Return `logits` with the number of rows of each call added to `rows`."""

    def counting(batch):  # type: ignore[no-untyped-def]
        rows.append(len(batch.labels))
        return logits(batch)

    return counting


def test_evaluations_go_through_the_model_in_micro_batches(roberta: Path) -> None:
    scores, forwards = [], list[int]()
    for more in ([], ["micro_batch_size=3"]):
        session = ready(roberta, "eval_batch_size=8", *more)
        rows = session.encoder.encode_all(SENTENCES * 4)
        forwards.clear()
        session.objective.logits = counted(session.objective.logits, forwards)  # type: ignore[method-assign]
        scores.append(session.objective.evaluate(rows).values)
        assert (max(forwards), sum(forwards)) == (3 if more else 8, len(rows))
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_gradient_is_that_of_the_whole_batch(name: str, roberta: Path) -> None:
    results, weights = [], []
    own = ["optimizer.adam_eps=1e-4"] if name == "adamw" else []  # Adam makes whole steps of rounding
    for more in ([], ["micro_batch_size=2"]):
        session = ready(roberta, f"optimizer={name}", "optimizer.lr=1e-3", "optimizer.dropout=0", *own, *more)
        rows = session.encoder.encode_all(SENTENCES)
        with torch.no_grad():
            session.exclude_unreachable(rows[0])
            of_rows = [0.5, 2.0, *[1.0] * (len(rows) - 2)]
            results.append([session.step(rows, step, of_rows if step else None) for step in range(3)])
        weights.append(torch.cat([p.detach().flatten() for p in session.params.tensors.values()]))
    for split, whole in zip(*results, strict=True):
        assert split.scalars() == pytest.approx(whole.scalars(), rel=1e-5)
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-5)


def test_it_is_refused_for_a_loss_from_counts(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = small(roberta, movies, tmp_path / "run", "micro_batch_size=2")
    line = error_line(mezo("train", *words, "optimizer=adamw", "objective=choice", "objective.loss=lm"))
    assert "micro_batch_size=2: optimizer=adamw takes the gradient of objective.loss=lm" in line
    assert "micro_batch_size=0: " in error_line(mezo("train", *words, "micro_batch_size=0"))
    assert not (tmp_path / "run").exists()
