"""The settings of AdaMeZO."""

from typing import ClassVar

from pydantic import Field

from mezo_cli.config.base import Positive, PositiveNumber
from mezo_cli.config.optimizers import MomentDecay, SlowMomentDecay, ZerothOrderConfig


class AdaMezoConfig(ZerothOrderConfig):
    """Settings of AdaMeZO."""

    implementation: ClassVar[str] = "mezo_cli.methods.adamezo.method:AdaMezo"
    title: ClassVar[str] = "AdaMeZO"
    has_engine: ClassVar[bool] = False
    window: Positive = Field(10, le=1000, description="h, the steps that the moments are sums over")
    beta1: MomentDecay = Field(0.7, description="decay of Adam's first moment")
    beta2: SlowMomentDecay = Field(0.9, description="decay of Adam's second moment")
    adam_eps: PositiveNumber = Field(1e-5, description="added to the root of Adam's second moment")
