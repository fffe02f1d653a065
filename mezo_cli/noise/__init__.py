"""Perturbations z ~ N(0, I) or +-1 that are never stored, fused with what is done with them (docs/noise.md).

`make_noise(kind)` gives a `Noise`: an object with `z`, `shift`, `shift_rows` and `update_`. A `Direction` names one z.
"""

from mezo_cli.errors import UserError, did_you_mean, listed
from mezo_cli.noise.counter import CounterNoise
from mezo_cli.noise.direction import Direction, Noise
from mezo_cli.noise.torch_stream import TorchNoise

__all__ = ["KINDS", "CounterNoise", "Direction", "Noise", "TorchNoise", "make_noise"]

KINDS = ("gaussian", "rademacher", "torch")


def make_noise(kind: str) -> Noise:
    """Return the noise of that kind; UserError for an unknown one."""
    if kind not in KINDS:
        raise UserError(f"optimizer.noise={kind}: unknown noise{did_you_mean(kind, KINDS)}; allowed: {listed(KINDS)}")
    return TorchNoise() if kind == "torch" else CounterNoise(kind)
