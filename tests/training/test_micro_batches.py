"""Micro-batches: smaller forwards, the loss of the whole batch."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from mezo_cli.config.compose import build_config
from mezo_cli.errors import UserError
from mezo_cli.objectives.base import BatchLoss
from mezo_cli.perturb.noise import Direction
from mezo_cli.runs import Run
from mezo_cli.session.prepare import Prepared
from mezo_cli.training import micro_batch
from tests.command_line import Train, error_line, mezo, small
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
    assert "micro_batch_size=auto: doctor" in error_line(mezo("doctor", *words[:-1], "micro_batch_size=auto"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("free", "ranks", "chosen"), [(400, ["8"], 6), (10**6, ["8"], 8), (0, ["8"], 1), (400, ["6", "3"], 3)]
)
def test_auto_takes_the_most_rows_that_stay_below_what_is_free(
    free: int, ranks: list[str], chosen: int, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake process has 1,000 bytes and takes 60 per row of a forward; the run is one with the number given."""
    tried, take = [0], micro_batch.trial

    def trial(prepared: Prepared) -> Callable[[int], None]:
        take_rows = take(prepared)

        def counted(size: int) -> None:
            tried.append(size)
            take_rows(size)

        return counted

    monkeypatch.setattr(micro_batch, "trial", trial)
    monkeypatch.setattr(micro_batch, "reset_peak_memory", lambda: None)
    monkeypatch.setattr(micro_batch, "peak_memory", lambda device: 1000 + 60 * tried[-1])
    monkeypatch.setattr(micro_batch, "free_memory", lambda: free)
    if len(ranks) > 1:
        others = SimpleNamespace(size=len(ranks), split="", exchange=lambda size: ranks)
        monkeypatch.setattr(micro_batch, "current", lambda: others)
    words = ["steps=3", "batch_size=8", "eval_batch_size=8", "peft=lora"]
    auto = Run(tmp_path / "auto")
    assert train(auto.path, *words, "micro_batch_size=auto").code == 0
    assert yaml.safe_load((auto.path / "config.yaml").read_text())["micro_batch_size"] == chosen
    assert auto.info()["changes"][-1]["after"] == {"micro_batch_size": chosen}
    count = len(tried)
    assert mezo("resume", auto.path, "steps=4").code == 0
    assert len(tried) == count
    given = Run(tmp_path / "given")
    assert train(given.path, *words, "steps=4", f"micro_batch_size={chosen}").code == 0
    assert auto.trajectory.read_bytes() == given.trajectory.read_bytes()


def test_auto_halves_the_rows_that_a_device_has_no_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(room: int, size: int) -> None:
        if size > room:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def chosen(room: int) -> int | str | None:
        monkeypatch.setattr(micro_batch, "trial", lambda _: partial(take, room))
        config = build_config(["model=demo", "data=demo", "micro_batch_size=auto"])
        return micro_batch.with_chosen_micro_batch(config, SimpleNamespace(writes=False)).micro_batch_size  # type: ignore[arg-type]

    session = SimpleNamespace(loaded=SimpleNamespace(device=torch.device("cuda")), forward=SimpleNamespace())
    prepared = nullcontext(SimpleNamespace(session=session, rows={"train": range(30)}))
    monkeypatch.setattr(micro_batch, "prepare", lambda *_, **__: prepared)
    assert [chosen(room) for room in (100, 5)] == [30, 4]
    with pytest.raises(UserError, match="micro_batch_size=auto: one row: out of memory: CUDA out of memory"):
        chosen(0)
