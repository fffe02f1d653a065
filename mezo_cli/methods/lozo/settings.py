"""The settings of LOZO and LOZO-M."""

from typing import Any, ClassVar

from pydantic import Field

from mezo_cli.config.base import Positive
from mezo_cli.config.optimizers import MomentDecay, ZerothOrderConfig


class LozoConfig(ZerothOrderConfig):
    """Settings of LOZO."""

    implementation: ClassVar[str] = "mezo_cli.methods.lozo.method:Lozo"
    title: ClassVar[str] = "LOZO"
    has_engine: ClassVar[bool] = False
    rank: Positive = Field(4, le=10_000, description="r of z = U V^T")
    interval: Positive = Field(50, description="steps with the same V")

    def make_noise(self) -> Any:
        """Return a new noise of low rank."""
        from mezo_cli.methods.lozo.noise import LowRankNoise

        return LowRankNoise(super().make_noise(), self.rank, self.interval)


class LozoMConfig(LozoConfig):
    """Settings of LOZO-M."""

    implementation: ClassVar[str] = "mezo_cli.methods.lozo.method:LozoM"
    title: ClassVar[str] = "LOZO-M"
    beta: MomentDecay = Field(0.9, description="decay of the momentum")
