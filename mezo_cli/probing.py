"""Linear probing: logistic regression on what enters the output layer, written into the rows that score the labels.

The paper's LP baseline (its appendix on experiment setup), and the start of LP-then-MeZO: the body stays the base
model's. The regression is scikit-learn's. How strongly it is regularised is chosen as the paper's code has it, by
cross-validation on train, unless `probe_c` gives C.
"""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mezo_cli.errors import UserError, listed
from mezo_cli.schema import Encoded
from mezo_cli.session import Session

log = logging.getLogger("mezo")

STRENGTHS = tuple(float(c) for c in np.logspace(-4, 4, 10))  # of C: scikit-learn's own grid for LogisticRegressionCV
FOLDS = 5
MAX_ITERATIONS = 5000


@dataclass(frozen=True)
class Fit:
    """A fitted regression. `weight` [labels, width] and `bias` [labels] (None without an intercept), float32.

    `validated` is the accuracy in cross-validation, one number for each C of the grid; empty where C was given or
    train was too small to be split (`folds` 0).
    """

    weight: Tensor
    bias: Tensor | None
    C: float
    folds: int
    validated: list[float]
    train_accuracy: float
    converged: bool


@torch.no_grad()
def probe(session: Session, rows: Sequence[Encoded]) -> dict[str, Any]:
    """Fit the probe on `rows`, write it into the session's model, and note there what its start has to store.

    Returns:
        What was done, for run.json: rows, width (of a feature), forwards (batches of `batch_size`), C, folds,
        validated (C -> accuracy in cross-validation), train_accuracy, converged.

    Raises:
        UserError: when a label has no row, or the features are not finite.
    """
    config = session.config
    layer, label_rows = session.objective.output()
    x, labels = features(session, layer, rows), np.array([row.label for row in rows])
    fitted = fit(x, labels, config.task.labels, config.probe_c, intercept=layer.bias is not None)
    _write(session, layer, label_rows, fitted)
    how = f"chosen by {fitted.folds} folds of train" if fitted.folds else "not cross-validated"
    right = f"{100 * fitted.train_accuracy:.1f}% of train right"
    log.info("probe  %d rows of %d features, C %.4g (%s): %s", *x.shape, fitted.C, how, right)
    if not fitted.converged:
        log.warning("warning: the probe's regression has not converged in %d iterations", MAX_ITERATIONS)
    return {
        "rows": x.shape[0],
        "width": x.shape[1],
        "forwards": -(-len(rows) // config.batch_size),
        "C": fitted.C,
        "folds": fitted.folds,
        "validated": {f"{c:.4g}": score for c, score in zip(STRENGTHS, fitted.validated, strict=False)},
        "train_accuracy": fitted.train_accuracy,
        "converged": fitted.converged,
    }


@torch.no_grad()
def features(session: Session, layer: nn.Module, rows: Sequence[Encoded]) -> np.ndarray:
    """Return what enters the output layer for each row, in order: shape [rows, width], float64."""
    size, seen, parts = session.config.batch_size, [], []
    # A hook on the layer, so that the features are those of the very forward that judges and trains.
    watch = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        for start in range(0, len(rows), size):
            batch = session.batch(rows[start : start + size])
            session.objective.logits(batch)
            parts.append(seen.pop().reshape(len(batch.labels), -1).double().cpu())
    finally:
        watch.remove()
    return torch.cat(parts).numpy()


def fit(x: np.ndarray, labels: np.ndarray, names: Sequence[str], C: float | None, *, intercept: bool = True) -> Fit:
    """Fit scikit-learn's logistic regression (L2, lbfgs, multinomial).

    With two labels scikit-learn fits one row w for the second; the rows -w/2 and w/2 give the same probabilities.

    Args:
        x: features, [rows, width].
        labels: the right label of each row, [rows].
        names: the labels' names, in order.
        C: the inverse of the penalty's strength. None: the best of `STRENGTHS` by mean accuracy over `FOLDS` folds of
            the rows (stratified, in their order; the stronger penalty on a tie); 1, scikit-learn's default, where a
            label has but one row.
        intercept: whether the output layer has a bias.

    Raises:
        UserError: when a label has no row, or a feature is not finite.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold

    counts = np.bincount(labels, minlength=len(names))
    lacking = [name for name, count in zip(names, counts, strict=True) if count == 0]
    if lacking:
        raise UserError(f"init=linear_probe: train has no row labelled {listed(lacking)}; every label needs some")
    if not np.isfinite(x).all():
        raise UserError("init=linear_probe: the model's features are not finite: the weights are damaged")
    folds = min(FOLDS, int(counts.min())) if C is None else 0
    validated: list[float] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if folds >= 2:
            plain = LogisticRegression(max_iter=MAX_ITERATIONS, fit_intercept=intercept)
            search = GridSearchCV(
                plain, {"C": STRENGTHS}, scoring="accuracy", cv=StratifiedKFold(folds), refit=False
            ).fit(x, labels)
            C, validated = float(search.best_params_["C"]), [float(s) for s in search.cv_results_["mean_test_score"]]
        caught.clear()  # only the last fit's counts
        model = LogisticRegression(C=1.0 if C is None else C, max_iter=MAX_ITERATIONS, fit_intercept=intercept)
        model.fit(x, labels)
    weight, bias = torch.from_numpy(model.coef_), torch.from_numpy(np.atleast_1d(model.intercept_))
    if len(names) == 2:
        weight, bias = torch.cat([-weight / 2, weight / 2]), torch.cat([-bias / 2, bias / 2])
    return Fit(
        weight=weight.float(),
        bias=bias.float() if intercept else None,
        C=float(model.C),
        folds=folds if validated else 0,
        validated=validated,
        train_accuracy=float((model.predict(x) == labels).mean()),
        converged=not any(issubclass(w.category, ConvergenceWarning) for w in caught),
    )


def _write(session: Session, layer: nn.Linear, label_rows: Tensor | None, fitted: Fit) -> None:
    """Put the rows where the labels' scores come from; name them as part of the start that no checkpoint gave."""
    loaded = session.loaded
    names = {id(p): name for name, p in loaded.model.named_parameters()}
    for tensor, value in ((layer.weight, fitted.weight), (layer.bias, fitted.bias)):
        if value is None:
            continue
        if label_rows is None:
            tensor.data.copy_(value)
            loaded.fresh = sorted({*loaded.fresh, names[id(tensor)]})
        else:
            tensor.data[label_rows] = value.to(tensor.device)
            loaded.fresh_rows[names[id(tensor)]] = label_rows.tolist()
