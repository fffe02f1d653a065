"""Batches of a run: how rows are drawn, weighted losses, a budget of forwards, and micro-batches."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from mezo_cli.config.compose import build_config
from mezo_cli.data.sampling import BalancedSampler, BatchSampler, ReplacementSampler
from mezo_cli.errors import UserError
from mezo_cli.objectives.base import BatchLoss
from mezo_cli.perturb.noise import Direction
from mezo_cli.runs import Run
from mezo_cli.session.opening import Prepared
from mezo_cli.session.session import Session
from mezo_cli.training import auto
from tests.command_line import Train, error_line, mezo, small
from tests.optim.test_mezo import SENTENCES, ready

pytestmark = pytest.mark.usefixtures("eager_kernels")


def test_every_epoch_takes_every_row_once_and_epochs_differ() -> None:
    sampler = BatchSampler(10, 4, 42)
    rows = [i for step in range(10) for i in sampler.batch(step)]
    epochs = [rows[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_batch_depends_on_its_step_and_the_seed_alone() -> None:
    fresh = [BatchSampler(10, 4, 42).batch(step) for step in range(9)]
    sampler = BatchSampler(10, 4, 42)
    assert [sampler.batch(step) for step in range(9)] == fresh
    assert [sampler.batch(step) for step in reversed(range(9))] == fresh[::-1]
    assert [BatchSampler(10, 4, 43).batch(step) for step in range(9)] != fresh
    assert sorted(BatchSampler(5, 64, 42).batch(3)) == list(range(5))  # no more rows than there are


LABELS = [0] * 12 + [1] * 6 + [2] * 6


def drawn(sampler: BalancedSampler, step: int) -> list[int]:
    return [LABELS[row] for row in sampler.batch(step)]


def test_a_balanced_batch_has_as_many_rows_of_each_label_and_the_remainder_rotates() -> None:
    sampler = BalancedSampler(LABELS, 7, 42)
    counts = [[drawn(sampler, step).count(label) for label in range(3)] for step in range(3)]
    assert all(sorted(count) == [2, 2, 3] for count in counts)
    assert np.sum(counts, axis=0).tolist() == [7, 7, 7]


def test_balanced_batches_take_every_row_of_a_label_once_per_epoch_and_need_no_state() -> None:
    sampler = BalancedSampler(LABELS, 6, 42)
    rows = [row for step in range(12) for row in sampler.batch(step)]
    for label in range(3):
        own = [row for row in rows if LABELS[row] == label]
        size = LABELS.count(label)
        epochs = [own[start : start + size] for start in range(0, 24, size)]
        assert all(sorted(epoch) == sorted(set(own)) for epoch in epochs)
        assert epochs[0] != epochs[1]
    assert [BalancedSampler(LABELS, 6, 42).batch(step) for step in (5, 0)] == [sampler.batch(5), sampler.batch(0)]


@pytest.mark.parametrize("size", [6, 7])
def test_weighted_losses_estimate_the_mean_over_all_rows(size: int) -> None:
    sampler, losses = BalancedSampler(LABELS, size, 1), np.array([3.0, 5.0, 9.0])[LABELS]
    for step in range(5):
        batch = sampler.batch(step)
        weights = sampler.weights(batch)
        assert weights is not None
        assert np.mean(losses[batch] * weights) == pytest.approx(losses.mean())
    assert BalancedSampler(LABELS, size, 1, weighted=False).weights(batch) is None
    assert BalancedSampler([0, 1, 2] * 5, 6, 3).weights([0, 1, 2, 3, 4, 5]) is None


def test_rows_drawn_by_themselves_repeat() -> None:
    sampler = ReplacementSampler(10, 8, 42)
    batches = [sampler.batch(step) for step in range(9)]
    assert batches == [ReplacementSampler(10, 8, 42).batch(step) for step in range(9)]
    assert any(len(set(batch)) < 8 for batch in batches)
    assert {row for batch in batches for row in batch} == set(range(10))


def imbalanced(folder: Path, counts: tuple[int, int] = (3, 9)) -> Path:
    """Write train, dev and test files with so many rows of each label."""
    folder.mkdir()
    names = [name for name, n in zip(("negative", "positive"), counts, strict=True) for _ in range(n)]
    for split in ("train", "dev", "test"):
        rows = [json.dumps({"sentence": f"a bad good {'great ' * i}", "label": name}) for i, name in enumerate(names)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.mark.parametrize("micro", ["null", "2"])
def test_a_weighted_loss_is_the_weighted_mean_of_the_rows(micro: str, roberta: Path) -> None:
    session = ready(roberta, f"micro_batch_size={micro}")
    rows = session.encoder.encode_all(SENTENCES)
    weights = [0.5 + i for i in range(len(rows))]
    with torch.no_grad():
        loss = session.loss_of(rows, weights)
        expected = session.loss_of(rows).rows() * torch.tensor(weights)
        torch.testing.assert_close(loss(), expected.mean(), rtol=1e-12, atol=0)
        torch.testing.assert_close(loss.rows(), expected)


@pytest.fixture
def steps_taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """The labels and weights of each step of the runs of a test."""
    taken: list[tuple[Any, Any]] = []
    step = Session.step

    def recording(self: Session, rows: Any, number: int, weights: Any = None) -> Any:
        taken.append(([row.label for row in rows], weights))
        return step(self, rows, number, weights)

    monkeypatch.setattr(Session, "step", recording)
    return taken


def test_a_resumed_run_has_the_same_batches(roberta: Path, tmp_path: Path, steps_taken: list[tuple[Any, Any]]) -> None:
    data, batches = imbalanced(tmp_path / "data"), ["data.batches=balanced", "batch_size=4", "steps=4"]
    assert mezo("train", *small(roberta, data, tmp_path / "whole", *batches)).code == 0
    assert all(sorted(labels) == [0, 0, 1, 1] for labels, _ in steps_taken)
    assert all(sorted(weights) == [0.5, 0.5, 1.5, 1.5] for _, weights in steps_taken)
    part = small(roberta, data, tmp_path / "part", *batches[:2], "steps=2")
    assert mezo("train", *part).code == 0
    assert mezo("resume", str(tmp_path / "part"), "steps=4").code == 0
    assert Run(tmp_path / "part").trajectory.read_bytes()[-32:] == Run(tmp_path / "whole").trajectory.read_bytes()[-32:]


def test_what_balanced_batches_cannot_do_is_one_line(roberta: Path, tmp_path: Path) -> None:
    balanced, data = ["data.batches=balanced", "batch_size=4"], imbalanced(tmp_path / "data")
    line = error_line(mezo("train", *small(roberta, data, tmp_path / "a", *balanced, "objective.loss=accuracy")))
    assert "objective.loss=accuracy" in line
    assert "data.weights=none" in line
    line = error_line(mezo("train", *small(roberta, imbalanced(tmp_path / "one", (0, 8)), tmp_path / "b", *balanced)))
    assert "negative" in line
    assert "data.batches=balanced" in line


def test_the_steps_of_a_budget_take_the_batches_of_the_forwards_before_them(
    roberta: Path, movies: Path, tmp_path: Path, steps_taken: list[tuple[Any, Any]]
) -> None:
    words = [word for word in small(roberta, movies, tmp_path / "n") if not word.startswith(("steps", "eval_every"))]
    words = [*words, "hydra.run.dir=" + str(tmp_path / "n"), "forwards=12", "batch_size=3"]
    assert mezo("train", *words).code == 0
    single = [labels for labels, _ in steps_taken]
    steps_taken.clear()
    assert mezo("train", *words, "optimizer.samples=2", f"hydra.run.dir={tmp_path / 'two'}").code == 0
    assert [labels for labels, _ in steps_taken] == single[::2]
    assert Run(tmp_path / "two").read_summary()["forwards"] == 12
    assert "forwards=12" in error_line(mezo("resume", str(tmp_path / "two"), "steps=9"))


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
    tried, take = [0], auto.trial

    def trial(prepared: Prepared) -> Callable[[int], None]:
        take_rows = take(prepared)

        def counted(size: int) -> None:
            tried.append(size)
            take_rows(size)

        return counted

    monkeypatch.setattr(auto, "trial", trial)
    monkeypatch.setattr(auto, "reset_peak_memory", lambda: None)
    monkeypatch.setattr(auto, "peak_memory", lambda device: 1000 + 60 * tried[-1])
    monkeypatch.setattr(auto, "free_memory", lambda: free)
    if len(ranks) > 1:
        others = SimpleNamespace(size=len(ranks), split="", exchange=lambda size: ranks)
        monkeypatch.setattr(auto, "current", SimpleNamespace(get=lambda: others))
    words = ["steps=3", "batch_size=8", "eval_batch_size=8", "peft=lora"]
    found = Run(tmp_path / "auto")
    assert train(found.path, *words, "micro_batch_size=auto").code == 0
    assert yaml.safe_load((found.path / "config.yaml").read_text())["micro_batch_size"] == chosen
    assert found.info()["changes"][-1]["after"] == {"micro_batch_size": chosen}
    count = len(tried)
    assert mezo("resume", found.path, "steps=4").code == 0
    assert len(tried) == count
    given = Run(tmp_path / "given")
    assert train(given.path, *words, "steps=4", f"micro_batch_size={chosen}").code == 0
    assert found.trajectory.read_bytes() == given.trajectory.read_bytes()


def test_auto_halves_the_rows_that_a_device_has_no_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(room: int, size: int) -> None:
        if size > room:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def chosen(room: int) -> int | str | None:
        monkeypatch.setattr(auto, "trial", lambda _: partial(take, room))
        config = build_config(["model=demo", "data=demo", "micro_batch_size=auto"])
        return auto.with_chosen_micro_batch(config, SimpleNamespace(writes=False)).micro_batch_size  # type: ignore[arg-type]

    session = SimpleNamespace(loaded=SimpleNamespace(device=torch.device("cuda")), forward=SimpleNamespace())
    prepared = nullcontext(SimpleNamespace(session=session, rows={"train": range(30)}))
    monkeypatch.setattr(auto, "prepare", lambda *_, **__: prepared)
    assert [chosen(room) for room in (100, 5)] == [30, 4]
    with pytest.raises(UserError, match="micro_batch_size=auto: one row: out of memory: CUDA out of memory"):
        chosen(0)
