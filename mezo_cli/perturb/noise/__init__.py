"""Directions z that are drawn again whenever they are needed, and never stored (docs/noise.md).

`NOISES` is the table of the kinds that `optimizer.noise` can name; a new kind is one module and one row here. This
module imports no torch, so that a config can be checked without it.
"""

from typing import cast

from mezo_cli.config.registry import Registry
from mezo_cli.perturb.noise.direction import Direction, Noise

__all__ = ["NOISES", "Direction", "Noise", "make_noise"]

NOISES = Registry(
    "optimizer.noise",
    {
        "gaussian": "mezo_cli.perturb.noise.gaussian:gaussian_noise",
        "rademacher": "mezo_cli.perturb.noise.rademacher:rademacher_noise",
        "torch": "mezo_cli.perturb.noise.torch_stream:TorchNoise",
    },
)


def make_noise(kind: str) -> Noise:
    """Return a new noise of that kind.

    Raises:
        UserError: for an unknown kind.
    """
    return cast("Noise", NOISES.load(kind)())
