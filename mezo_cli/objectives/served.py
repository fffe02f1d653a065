"""Whether an objective serves a model: its scores are held against the model's own forward at every start."""

from torch import Tensor

from mezo_cli.errors import UserError

# How far the scores may be from those of the stock forward, as a share of the largest: rounding, and no more.
ROUNDING = {"cpu": 1e-4}
COARSE_ROUNDING = 1e-2  # a GPU may multiply in TF32


def check_served(ours: Tensor, stock: Tensor, device: str, name: str) -> None:
    """Refuse a model of a family that an objective does not serve: its scores differ from the model's own.

    Args:
        ours, stock: scores of the same rows by an objective and by the stock forward, [rows, labels], in float32.
        device: its type.
        name: the model's, for the error line.

    Raises:
        UserError: also when the stock scores are not finite, which means damaged weights.
    """
    if not bool(stock.isfinite().all()):
        raise UserError(f"{name}: its scores are not finite: the weights are damaged")
    allowed = ROUNDING.get(device, COARSE_ROUNDING) * float(stock.abs().max())
    error = float((ours - stock).abs().max()) if ours.shape == stock.shape else float("inf")
    if not error <= allowed:
        raise UserError(f"{name} is a family that is not served: its scores come out wrong (by {error:.2g})")
