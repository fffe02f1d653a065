"""The tasks' own metrics, from scikit-learn: accuracy, F1 (MRPC, QQP), Matthews correlation (CoLA)."""

from collections.abc import Sequence


def score(metric: str, labels: Sequence[int], predicted: Sequence[int]) -> float:
    """Return the metric of that name: `accuracy`, `f1` (of label 1; macro over more than two labels), `matthews`."""
    if metric == "accuracy":
        return sum(a == b for a, b in zip(labels, predicted, strict=True)) / len(labels)
    from sklearn.metrics import f1_score, matthews_corrcoef

    if metric == "matthews":
        return float(matthews_corrcoef(labels, predicted))
    binary = set(labels) | set(predicted) <= {0, 1}
    return float(f1_score(labels, predicted, average="binary" if binary else "macro", zero_division=0.0))
