"""Linear probing: scikit-learn's own probabilities out of the model, a start that is kept, and MeZO on top of it."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from torch import nn
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from mezo_cli.config.schema import Example
from mezo_cli.config.stored import read_config
from mezo_cli.errors import UserError
from mezo_cli.objectives.collate import collate
from mezo_cli.runs import Run
from mezo_cli.session.opening import opened
from mezo_cli.training import linear_probe as probing
from tests import tiny
from tests.command_line import Train, mezo, ok, small
from tests.optim.test_mezo import outputs_of

pytestmark = pytest.mark.usefixtures("eager_kernels")

NAMES = ["negative", "positive"]
TEXTS = [Example((row["sentence"],), int(row["label"] == "positive")) for row in tiny.movie_rows(24)]  # train's
STOCK = {"mlm": AutoModelForMaskedLM, "cls": AutoModelForSequenceClassification}


def rows(n: int, labels: int, width: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of overlapping classes."""
    rng = np.random.default_rng(seed)
    right = np.arange(n) % labels
    return rng.normal(size=(n, width)) + 0.8 * np.eye(labels, width)[right], right


def probabilities(weight: torch.Tensor, bias: torch.Tensor | None, x: np.ndarray) -> torch.Tensor:
    scores = torch.from_numpy(x).float() @ weight.T
    return (scores if bias is None else scores + bias).softmax(-1)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("labels", [2, 3, 6])
def test_the_rows_give_scikit_learns_probabilities(labels: int, intercept: bool) -> None:
    x, right = rows(90, labels)
    weight, bias, record = probing.fit(x, right, [str(i) for i in range(labels)], 0.5, intercept=intercept)
    theirs = LogisticRegression(C=0.5, max_iter=5000, fit_intercept=intercept).fit(x, right)
    assert weight.shape == (labels, x.shape[1])
    assert (bias is not None) == intercept
    seen, _ = rows(40, labels, seed=1)
    np.testing.assert_allclose(probabilities(weight, bias, seen), theirs.predict_proba(seen), atol=1e-6)
    accuracy = theirs.score(x, right)
    assert record == {"C": 0.5, "folds": 0, "validated": {}, "train_accuracy": accuracy, "converged": True}


@pytest.mark.parametrize(("labels", "seed"), [(2, 0), (2, 1), (3, 2)])
def test_c_is_chosen_as_the_papers_code_does(labels: int, seed: int) -> None:
    x, right = rows(60, labels, seed=seed)
    weight, bias, record = probing.fit(x, right, [str(i) for i in range(labels)], None)
    # scikit-learn 1.8 deprecated the old shapes of its attributes, and older versions do not know the new ones.
    new = {"l1_ratios": (0,), "use_legacy_attributes": False}
    known = inspect.signature(LogisticRegressionCV).parameters
    ours = new if new.keys() <= known.keys() else {}
    theirs = LogisticRegressionCV(cv=5, scoring="accuracy", max_iter=5000, **ours).fit(x, right)
    assert pytest.approx(theirs.C_) == record["C"]
    assert record["validated"][f"{record['C']:.4g}"] == max(record["validated"].values())
    np.testing.assert_allclose(probabilities(weight, bias, x), theirs.predict_proba(x), atol=1e-3)


def test_few_rows_make_fewer_folds_and_one_row_none() -> None:
    x, right = rows(6, 2)
    assert probing.fit(x, right, NAMES, None)[2]["folds"] == 3
    alone = probing.fit(x[:3], right[:3], NAMES, None)[2]
    assert (alone["C"], alone["folds"], alone["validated"]) == (1.0, 0, {})


def test_a_label_without_rows_and_features_that_are_none_are_reported() -> None:
    x, right = rows(6, 2)
    with pytest.raises(UserError, match="train has no row labelled maybe, never; every label needs some"):
        probing.fit(x, right, [*NAMES, "maybe", "never"], None)
    with pytest.raises(UserError, match="not finite"):
        probing.fit(x * np.nan, right, NAMES, None)


def stock_features(model: Any, layer: nn.Module, batch: Any) -> torch.Tensor:
    """What enters a layer in the model's own padded forward, at the mask where there is one."""
    seen: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(**batch.layout)
    return seen[0] if seen[0].dim() == 2 else seen[0][torch.arange(len(batch.positions)), batch.positions]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["roberta", "untied", "bert"])
@pytest.mark.parametrize("objective", ["mlm", "cls"])
def test_a_probed_checkpoint_is_scikit_learns_in_plain_transformers(
    objective: str, kind: str, movies: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    base, run = request.getfixturevalue(kind), tmp_path / "run"
    words = [*small(base, movies, run, "steps=0"), "optimizer=linear_probe", f"objective={objective}", "probe_c=3"]
    words += [] if kind != "bert" else ["task.label_words=[bad,good]"]
    assert (said := mezo("train", *words)).code == 0, said

    ready = opened(read_config(run / "config.yaml"), Run.open(run), "best")
    batch = ready.objective.collate(ready.encoder.encode_all(TEXTS))
    model = STOCK[objective].from_pretrained(run / "checkpoints/best").eval()
    layer = model.get_output_embeddings() if objective == "mlm" else list(model.modules())[-1]
    padded = collate(batch.rows, ready.loaded)
    x = stock_features(model, layer, padded)
    with torch.no_grad():
        ours = outputs_of(model, ready, batch).softmax(-1)
    theirs = LogisticRegression(C=3, max_iter=5000).fit(x.double(), batch.labels)
    np.testing.assert_allclose(ours, theirs.predict_proba(x.double()), atol=1e-4)

    reported = Run(run).info()["probe"]
    assert [reported[key] for key in ("rows", "width", "forwards", "C", "folds")] == [24, 32, 3, 3.0, 0]
    summary = Run(run).read_summary()
    assert (summary["steps"], summary["forwards"], summary["probe"]) == (0, 3, reported)
    assert summary["train"]["accuracy"] == reported["train_accuracy"] == theirs.score(x.double(), batch.labels)
    if objective == "mlm":
        only_the_rows_moved(base, run, ready.encoder.label_ids)


def only_the_rows_moved(base: Path, run: Path, label_ids: list[int]) -> None:
    before = AutoModelForMaskedLM.from_pretrained(base)
    after = AutoModelForMaskedLM.from_pretrained(run / "checkpoints/best")
    assert torch.equal(after.get_input_embeddings().weight, before.get_input_embeddings().weight)
    for key in ("weight", "bias"):
        old, new = (getattr(model.get_output_embeddings(), key) for model in (before, after))
        changed = (old != new).reshape(len(old), -1).any(dim=1).nonzero().flatten().tolist()
        assert changed == sorted(label_ids)
    stored = safetensors.torch.load_file(run / "start.safetensors")
    assert sorted(list(tensor.shape) for tensor in stored.values()) == [[2], [2, 32]]


def test_mezo_continues_from_the_probe_and_its_replay_is_bitwise_identical(train: Train, tmp_path: Path) -> None:
    for name, words in {"run": ["init=linear_probe"], "lp": ["optimizer=linear_probe", "steps=0"]}.items():
        said = train(tmp_path / name, *words)
        assert said.code == 0, said
    first, alone = (Run(tmp_path / name).evaluations("dev")[0] for name in ("run", "lp"))
    assert {**first, "seconds": 0} == {**alone, "seconds": 0}
    for step, name in (("0", "lp"), ("6", "run")):
        said = ok("replay", tmp_path / "run", "--step", step, "--out", tmp_path / step)
        there = tmp_path / name / "checkpoints/last/model.safetensors"
        assert (tmp_path / step / "model.safetensors").read_bytes() == there.read_bytes()


def test_peft_head_trains_from_a_linear_probe(train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, "peft=head", "init=linear_probe").code == 0
    before = mezo("eval", run, "--checkpoint", "last").out
    assert mezo("prune", run).code == 0
    assert mezo("eval", run, "--checkpoint", "last").out == before
