"""Measure by backpropagation how noisy the gradient of a set-up is at the start, and how the loss curves.

    python scripts/measure_gradient_noise.py experiment=demo-sst2 data.dir=GLUE/SST-2 data.shots=null
    python scripts/measure_gradient_noise.py experiment=demo-sst2 data.dir=GLUE/SST-2 data.shots=null peft=bias

On `--rows` rows of train, in float32. A constant is subtracted from the scores (two labels) first, that of the lowest
loss: the bias between the labels would hide what else there is to learn. It prints
- G, the squared norm of the gradient over all the rows;
- N, the noise of one row: a batch of B rows drawn at random has the expected squared gradient G + N / B;
- the same for batches with as many rows of each label;
- tr H, the trace of the Hessian (Hutchinson's estimate, one draw per batch);
- G / (2 tr H), about the largest decrease of the loss per MeZO step on all the rows, and 1 / tr H, its learning rate.
`mezo doctor` estimates G and tr H by forwards alone.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import TokenizedExample
from mezo_cli.data import load_splits
from mezo_cli.training.setup import Session, prepare

Batches = list[list[TokenizedExample]]


def random_batches(rows: Sequence[TokenizedExample], size: int) -> Batches:
    """Cut rows into batches of `size`, in their order; the rest is left out."""
    return [list(rows[start : start + size]) for start in range(0, len(rows) - size + 1, size)]


def balanced_batches(rows: Sequence[TokenizedExample], size: int) -> Batches:
    """Cut rows into batches with size / 2 rows of each of two labels; what is left of the longer label is left out."""
    zeros, ones = ([row for row in rows if row.label == label] for label in (0, 1))
    pairs = zip(random_batches(zeros, size // 2), random_batches(ones, size // 2), strict=False)
    return [zero + one for zero, one in pairs]


def noise(squares: Sequence[float], mean_square: float, size: int) -> tuple[float, float]:
    """Return (G, N) from the squared gradients of batches of `size` rows and the square of their mean gradient."""
    count = len(squares)
    of_a_batch = (sum(squares) / count - mean_square) * count / (count - 1)
    return mean_square - of_a_batch / count, of_a_batch * size


def best_shift(scores: Tensor, labels: Tensor) -> float:
    """Return the b of the lowest cross-entropy of `scores - b`: there the mean probability is the mean label."""
    low, high = float(scores.min()) - 20, float(scores.max()) + 20
    for _ in range(60):
        middle = (low + high) / 2
        too_high = (scores - middle).sigmoid().mean() > labels.float().mean()
        low, high = (middle, high) if too_high else (low, middle)
    return low


class Gradients:
    """Gradients and curvature of a session's loss after the best shift of the scores of `rows` is subtracted."""

    def __init__(self, session: Session, rows: Sequence[TokenizedExample], size: int) -> None:
        self.session = session
        with torch.no_grad():
            scores = torch.cat([self._scores(rows[start : start + size]) for start in range(0, len(rows), size)])
        self.shift = best_shift(scores, torch.tensor([row.label for row in rows]))

    def _scores(self, rows: Sequence[TokenizedExample]) -> Tensor:
        logits = self.session.objective.logits(self.session.batch(rows))
        return logits[:, 1] - logits[:, 0]

    def _loss(self, rows: Sequence[TokenizedExample]) -> Tensor:
        scores = self._scores(rows) - self.shift
        return cross_entropy(torch.stack([torch.zeros_like(scores), scores], 1), torch.tensor([r.label for r in rows]))

    def measure(self, batches: Batches, size: int, *, curvature: bool) -> tuple[float, float, float]:
        """Return G, N and, if `curvature`, tr H (else 0)."""
        tensors = list(self.session.params.tensors.values())
        mean = [torch.zeros_like(tensor) for tensor in tensors]
        squares, trace = [], 0.0
        for rows in batches:
            # Only the plain implementation of attention can be differentiated twice.
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                gradient = torch.autograd.grad(self._loss(rows), tensors, create_graph=curvature)
                if curvature:
                    z = [torch.randint(0, 2, tensor.shape) * 2.0 - 1.0 for tensor in tensors]
                    product = torch.stack([(g * one).sum() for g, one in zip(gradient, z, strict=True)]).sum()
                    hz = torch.autograd.grad(product, tensors)
                    trace += sum(float((h * one).sum()) for h, one in zip(hz, z, strict=True)) / len(batches)
            for total, g in zip(mean, gradient, strict=True):
                total += g.detach() / len(batches)
            squares.append(sum(float(g.detach().square().sum()) for g in gradient))
        return *noise(squares, sum(float(total.square().sum()) for total in mean), size), trace


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024, help="rows of train")
    parser.add_argument("--batch", type=int, default=64, help="rows per batch (even)")
    parser.add_argument("overrides", nargs="*", help="settings as for `mezo train`")
    args = parser.parse_intermixed_args()
    config = build_config([*args.overrides, "model.device=cpu", "model.dtype=float32", "model.compute_dtype=float32"])
    if len(config.task.labels) != 2:
        parser.error(f"task '{config.task.name}' has {len(config.task.labels)} labels; this needs two")
    session, train = prepare(config), load_splits(config).train
    torch.manual_seed(config.seed)
    rows = session.encoder.encode_all([train[i] for i in torch.randperm(len(train)).tolist()[: args.rows]])
    batches = random_batches(rows, args.batch), balanced_batches(rows, args.batch)
    if min(map(len, batches)) < 2:
        parser.error(f"{len(rows)} rows in batches of {args.batch}: at least two batches of each kind are needed")
    session.exclude_unreachable(rows[0])
    measured = Gradients(session, rows, args.batch)
    gain, per_row, trace = measured.measure(batches[0], args.batch, curvature=True)
    _, balanced, _ = measured.measure(batches[1], args.batch, curvature=False)
    print("| template | trained | G | N | N, labels balanced | tr H | G / (2 tr H) | 1 / tr H |")
    print("|---|---|---|---|---|---|---|---|")
    print(
        f"| `{config.task.template}` | {config.peft.name} | {gain:.3g} | {per_row:.3g} | {balanced:.3g} | {trace:.3g} "
        f"| {gain / (2 * trace):.2g} | {1 / trace:.2g} |"
    )


if __name__ == "__main__":
    main()
