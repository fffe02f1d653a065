"""Scores, losses, metrics and intervals: scikit-learn's and published values; a bias that was put in is found again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Example
from mezo_cli.objectives import METRICS
from mezo_cli.objectives.scoring import (
    accuracy_loss,
    best_threshold,
    cross_entropy,
    f1_loss,
    fit_bias,
    interval,
    mean_of,
    paired_difference,
    remove_bias,
    wilson,
)
from mezo_cli.perturb.noise import Direction
from mezo_cli.session.opening import opened


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("rows", [6, 500])  # 6: some labels are missing
def test_the_metrics_are_those_of_scikit_learn(count: int, rows: int) -> None:
    generator = np.random.default_rng(rows)
    for _ in range(10):
        labels, predicted = generator.integers(count, size=(2, rows))
        f1 = {"average": "binary"} if count == 2 else {"average": "macro", "labels": range(count)}
        expected = {
            "accuracy": accuracy_score(labels, predicted),
            "f1": f1_score(labels, predicted, zero_division=0.0, **f1),
            "matthews": matthews_corrcoef(labels, predicted),
        }
        assert {name: METRICS.load(name)(np.eye(count)[predicted], labels) for name in METRICS.names} == expected
        loss = f1_loss(torch.eye(count)[predicted], torch.from_numpy(labels))
        assert 1 - float(loss) == pytest.approx(expected["f1"])


@pytest.mark.parametrize("name", METRICS.names)
def test_samples_of_the_rows_have_the_metric_of_their_rows(name: str) -> None:
    generator = np.random.default_rng(0)
    scores, labels = generator.normal(size=(8, 3)), generator.integers(3, size=8)
    samples = generator.integers(8, size=(20, 8))
    metric = METRICS.load(name)
    assert np.array_equal(
        metric.samples(scores, labels)(samples), [metric(scores[rows], labels[rows]) for rows in samples]
    )


ROWS = [Example((text,), i % 2) for i, text in enumerate(("good", "a bad one", "okay okay"))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("peft", ["none", "head"])
def test_the_layer_over_the_labels_is_computed_in_float32(
    peft: str, dtype: torch.dtype, roberta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEZO_EAGER", "1")
    words = [f"model.path={roberta}", "model.name=tiny", "objective=cls", f"peft={peft}"]
    session = opened(build_config([*words, f"model.compute_dtype={str(dtype)[6:]}", "data=demo", "steps=3"]))
    batch = session.objective.collate(session.encoder.encode_all(ROWS))
    layer, _ = session.objective.output_layer()
    seen: list[Any] = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    with torch.no_grad():
        logits = session.objective.logits(batch)
        assert seen[0].dtype == dtype
        expected = seen[0].float() @ layer.weight.T + layer.bias
        torch.testing.assert_close(logits, expected.view(len(ROWS), 2), rtol=1e-6, atol=1e-7)
        assert not torch.equal(logits, logits.to(dtype).float())
        with session.forward.perturbed(Direction(3, 0), 0.1):
            both = session.objective.logits(batch)
        assert both.shape == (2, len(ROWS), 2)
        assert (both[0] != both[1]).all()


def test_losses_are_those_of_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(3001, 3, generator=generator), torch.randint(3, (3001,), generator=generator)
    assert cross_entropy(logits, labels).item() == F.cross_entropy(logits.double(), labels).item()
    right = int((logits.argmax(-1) == labels).sum())
    assert accuracy_loss(logits, labels).item() == 1 - right / 3001
    binary, truth = logits[:, :2], labels.clamp(max=1)
    predicted = binary.argmax(-1)
    hits, both = int((predicted & truth).sum()), int(predicted.sum() + truth.sum())
    assert f1_loss(binary, truth).item() == 1 - 2 * hits / both


@pytest.mark.parametrize(
    ("right", "rows", "published"),
    [  # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_wilsons_interval_is_the_published_one(right: int, rows: int, published: tuple[float, float]) -> None:
    assert wilson(right, rows) == pytest.approx(published, abs=5e-5)
    assert wilson(rows - right, rows) == pytest.approx((1 - published[1], 1 - published[0]), abs=5e-5)


@pytest.mark.parametrize(
    ("both", "first", "second", "neither", "published"),
    [
        (59, 6, 16, 80, (-0.1186, -0.0046)),  # Cavo 2012, by R's contingencytables (Fagerland et al., chapter 8)
        (1, 1, 7, 12, (-0.507, -0.026)),  # Bentur 2009, there
        (14, 5, 0, 22, (0.011, 0.226)),  # Altman et al., Statistics with confidence, table 6.2
    ],
)
def test_the_interval_of_a_paired_difference_is_the_published_one(
    both: int, first: int, second: int, neither: int, published: tuple[float, float]
) -> None:
    after = np.repeat([True, True, False, False], [both, first, second, neither])
    before = np.repeat([True, False, True, False], [both, first, second, neither])
    assert paired_difference(before, after) == pytest.approx(published, abs=6e-4 if published[0] != -0.1186 else 5e-5)
    low, high = paired_difference(after, before)
    assert (-high, -low) == pytest.approx(published, abs=6e-4)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_rows_that_are_all_alike_have_an_interval_too(share: float) -> None:
    rows = np.full(16, bool(share))
    low, high = paired_difference(rows, rows)
    assert -0.3 < low < 0 < high < 0.3


def test_the_bootstrap_of_a_mean_is_its_standard_error_and_the_same_every_time() -> None:
    values = np.random.default_rng(1).normal(2.0, 1.0, 3000)  # several chunks
    low, high = interval(3000, mean_of(values))
    assert high - low == pytest.approx(2 * 1.96 * values.std() / np.sqrt(3000), rel=0.08)
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.003)
    assert [low, high] == interval(3000, mean_of(values))
    assert interval(3000, mean_of(values + 1.0), mean_of(values)) == pytest.approx([1.0, 1.0])


def right(scores: np.ndarray, labels: np.ndarray) -> float:
    return float((scores.argmax(axis=1) == labels).mean())


def biased(rows: int, bias: list[float], shares: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return scores whose likelihood is the softmax of the scores less `bias`, and labels."""
    generator, count = np.random.default_rng(3), len(bias)
    labels = generator.choice(count, size=rows, p=shares)
    scores = generator.normal(size=(rows, count)) + 2.0 * np.eye(count)[labels]
    return scores + np.array(bias), labels


@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.8, 0.2]])
def test_the_bias_between_two_labels_is_removed(shares: list[float]) -> None:
    scores, labels = biased(4000, [0.0, 5.0], shares)
    unbiased = scores - [0.0, 5.0]
    assert right(scores, labels) < right(unbiased, labels) - 0.2
    found = remove_bias(scores, labels)
    assert list(found) == ["label_shares", "best_threshold"]
    for bias in found.values():
        assert right(scores + bias, labels) > right(unbiased, labels) - 0.02
    predicted = (scores + found["label_shares"]).argmax(axis=1)
    assert np.mean(predicted == 1) == pytest.approx(np.mean(labels == 1), abs=1e-3)
    assert right(scores + found["best_threshold"], labels) >= right(scores + found["label_shares"], labels)


@pytest.mark.parametrize(
    ("margins", "labels", "wanted"),
    [
        ([0.1, 0.4, 0.5, 0.9], [0, 1, 0, 1], 0.25),  # as good as 0.7: the lowest
        ([0.5, 0.5, 0.5], [0, 1, 1], -0.5),  # equal margins cannot be parted
        ([1.0, 2.0], [0, 0], 3.0),
        ([2.0, 1.0], [1, 1], 0.0),
    ],
)
def test_the_best_threshold(margins: list[float], labels: list[int], wanted: float) -> None:
    found = best_threshold(np.array(margins), np.array(labels))
    assert found == pytest.approx(wanted)
    tried = [np.mean((np.array(margins) > at) == np.array(labels)) for at in np.linspace(-2, 4, 200)]
    assert np.mean((np.array(margins) > found) == np.array(labels)) == max(tried)


def test_the_bias_of_three_labels_is_fitted() -> None:
    scores, labels = biased(4000, [0.0, 4.0, -2.0], [0.3, 0.3, 0.4])
    unbiased = scores - [0.0, 4.0, -2.0]
    (bias,) = remove_bias(scores, labels).values()
    assert right(scores, labels) < 0.6
    assert right(scores + bias, labels) > right(unbiased, labels) - 0.01
    assert abs(bias.sum()) < 1e-3  # the L2 term takes the mean away
    mean = np.exp(scores + bias - (scores + bias).max(axis=1, keepdims=True))
    mean = (mean / mean.sum(axis=1, keepdims=True)).mean(axis=0)  # maximum likelihood: mean probabilities are shares
    assert mean == pytest.approx(np.bincount(labels) / 4000, abs=2 * 1e-3 * np.abs(bias).max() + 1e-4)


def test_a_label_without_rows_is_bounded() -> None:
    bias = fit_bias(np.zeros((20, 3)), np.arange(20) % 2)
    assert -20 < bias[2] < bias[0] == pytest.approx(bias[1])
