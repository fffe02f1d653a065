"""The settings of HiZOO, with a diagonal and with a scalar."""

from typing import ClassVar

from pydantic import Field

from mezo_cli.config.base import Number
from mezo_cli.config.optimizers import ZerothOrderConfig


class HizooConfig(ZerothOrderConfig):
    """Settings of HiZOO."""

    implementation: ClassVar[str] = "mezo_cli.methods.hizoo.method:Hizoo"
    title: ClassVar[str] = "HiZOO"
    has_engine: ClassVar[bool] = False
    alpha: Number = Field(1e-6, ge=0.0, lt=1.0, description="weight of a step's curvature in the Hessian's estimate")

    @property
    def record_width(self) -> int:
        """Two per direction: g and the curvature."""
        return 2 * self.samples

    @property
    def points(self) -> int:
        """The directions, and theta."""
        return self.samples + 1

    def count_forwards(self, steps: int, total: int) -> dict[str, int]:
        """Return those of MeZO, and one at theta."""
        return {"forwards": super().count_forwards(steps, total)["forwards"] + steps, "backwards": 0}


class HizooScalarConfig(HizooConfig):
    """Settings of HiZOO with a scalar."""

    implementation: ClassVar[str] = "mezo_cli.methods.hizoo.method:HizooScalar"
    title: ClassVar[str] = "HiZOO (scalar)"
