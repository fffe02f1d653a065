"""(IA)3: vectors that scale keys, values and activations (Liu et al. 2022, arXiv 2205.05638)."""

from typing import ClassVar

from pydantic import Field

from mezo_cli.adapters import PeftMethod
from mezo_cli.config.base import Entry
from mezo_cli.config.schema import PeftConfig


class Ia3Config(PeftConfig):
    """The settings that `peft.IA3Config` gets."""

    implementation: ClassVar[str] = "mezo_parts.ia3:Ia3"
    title: ClassVar[str] = "(IA)3"
    target_modules: list[Entry] = Field([], description="ends of the names of the scaled modules")
    feedforward_modules: list[Entry] = Field([], description="those whose input is scaled, and not their output")


class Ia3(PeftMethod):
    """(IA)3. It starts from the base model: every scale is 1."""

    library = "IA3Config"
