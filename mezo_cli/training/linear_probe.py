"""Linear probing: fit a logistic regression on the input of the output layer, and write it into that layer.

It is the paper's LP baseline (appendix on experiment setup) and the start of LP-then-MeZO; the body keeps the base
model's weights. The regression is scikit-learn's. Its regularisation is chosen as in the paper's code, by
cross-validation on train, unless `probe_c` gives C.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mezo_cli.config.schema import TokenizedExample
from mezo_cli.console import log
from mezo_cli.errors import UserError, join
from mezo_cli.objectives.classification import Classification
from mezo_cli.session.session import Session

STRENGTHS = tuple(float(c) for c in np.logspace(-4, 4, 10))  # the grid of C: scikit-learn's for LogisticRegressionCV
FOLDS = 5
MAX_ITERATIONS = 5000


@torch.no_grad()
def fit_output_layer(session: Session, rows: Sequence[TokenizedExample]) -> dict[str, Any]:
    """Fit the probe on `rows` and write it into the output layer of the session's model.

    Returns:
        The record for run.json: rows, width (of a feature), forwards (batches of `batch_size`), C, folds,
        validated (C -> accuracy in cross-validation), train_accuracy, converged.
    """
    config = session.config
    assert isinstance(session.objective, Classification)
    layer, label_rows = session.objective.output_layer()
    x, labels = compute_features(session, layer, rows), np.array([row.label for row in rows])
    weight, bias, record = fit(x, labels, config.task.labels, config.probe_c, intercept=layer.bias is not None)
    # What is written is listed as initial weights that the base checkpoint does not have.
    loaded = session.loaded
    names = {id(p): name for name, p in loaded.model.named_parameters()}
    for tensor, value in ((layer.weight, weight), (layer.bias, bias)):
        if value is None:
            continue
        if label_rows is None:
            tensor.data.copy_(value)
            loaded.fresh = sorted({*loaded.fresh, names[id(tensor)]})
        else:
            tensor.data[label_rows] = value.to(tensor)
            if names[id(tensor)] not in loaded.fresh:  # with peft=head it is, and stored whole
                loaded.fresh_rows[names[id(tensor)]] = label_rows.tolist()
    how = f"chosen by {record['folds']}-fold cross-validation" if record["folds"] else "not cross-validated"
    figures = (*x.shape, record["C"], how, 100 * record["train_accuracy"])
    log.info("probe  %d rows, %d features, C %.4g (%s): train accuracy %.1f%%", *figures)
    if not record["converged"]:
        log.warning("warning: the probe's regression did not converge in %d iterations", MAX_ITERATIONS)
    return {"rows": x.shape[0], "width": x.shape[1], "forwards": -(-len(rows) // config.batch_size), **record}


@torch.no_grad()
def compute_features(session: Session, layer: nn.Module, rows: Sequence[TokenizedExample]) -> np.ndarray:
    """Return the input of the output layer for each row, in order: [rows, width], float64."""
    size, inputs, parts = session.config.batch_size, [], []
    # A hook, so that the features come from the same forward as in training and evaluation.
    hook = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        for start in range(0, len(rows), size):
            batch = session.objective.collate(rows[start : start + size])
            session.objective.outputs(batch)
            parts.append(inputs.pop().reshape(len(batch.labels), -1).cpu().double())  # MPS has no float64
    finally:
        hook.remove()
    return torch.cat(parts).numpy()


def fit(
    x: np.ndarray, labels: np.ndarray, names: Sequence[str], C: float | None, *, intercept: bool = True
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Fit scikit-learn's logistic regression (L2, lbfgs, multinomial).

    With two labels scikit-learn fits one row w, for the second; rows -w/2 and w/2 give the same probabilities.

    Args:
        x: features, [rows, width].
        labels: the label of each row, [rows].
        names: the labels' names, in order.
        C: the inverse of the penalty's strength. None: the best of `STRENGTHS` by mean accuracy over `FOLDS` folds of
            the rows (stratified, in their order; the stronger penalty on a tie); 1, scikit-learn's default, if a
            label has only one row.
        intercept: whether the output layer has a bias.

    Returns:
        The weight [labels, width] and the bias [labels], None without an intercept, float32; and C, folds, validated,
        train_accuracy, converged. `validated` is empty, and `folds` 0, if C was given or train was too small to split.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold

    counts = np.bincount(labels, minlength=len(names))
    lacking = [name for name, count in zip(names, counts, strict=True) if count == 0]
    if lacking:
        raise UserError(f"init=linear_probe: train has no row labelled {join(lacking)}; every label needs some")
    if not np.isfinite(x).all():
        raise UserError("init=linear_probe: the model's features are not finite: the weights are damaged")
    folds = min(FOLDS, int(counts.min())) if C is None else 0
    validated: dict[str, float] = {}  # C -> accuracy
    model = LogisticRegression(C=1.0 if C is None else C, max_iter=MAX_ITERATIONS, fit_intercept=intercept)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if folds >= 2:
            search = GridSearchCV(model, {"C": STRENGTHS}, scoring="accuracy", cv=StratifiedKFold(folds), refit=False)
            means = search.fit(x, labels).cv_results_["mean_test_score"]
            model.set_params(**search.best_params_)
            validated = {f"{c:.4g}": float(mean) for c, mean in zip(STRENGTHS, means, strict=True)}
        caught.clear()  # only the final fit must converge
        model.fit(x, labels)
    weight, bias = torch.from_numpy(model.coef_), torch.from_numpy(np.atleast_1d(model.intercept_))
    if len(names) == 2:
        weight, bias = torch.cat([-weight / 2, weight / 2]), torch.cat([-bias / 2, bias / 2])
    record = {
        "C": float(model.C),
        "folds": folds if validated else 0,
        "validated": validated,
        "train_accuracy": float((model.predict(x) == labels).mean()),
        "converged": not any(issubclass(w.category, ConvergenceWarning) for w in caught),
    }
    return weight.float(), bias.float() if intercept else None, record
