"""Directions z that are drawn again whenever they are needed, and never stored (docs/concepts/noise.md).

`NOISES` (config/registry.py) names the kinds of `optimizer.noise`; a new kind is one module and one row there. This
module imports no torch, so that a config can be checked without it.
"""

from typing import cast

from mezo_cli.config.registry import NOISES
from mezo_cli.perturb.noise.direction import Direction, Noise, to_float32


def make_noise(name: str) -> Noise:
    """Return a new noise of that name."""
    return cast("Noise", NOISES.load(name)())
