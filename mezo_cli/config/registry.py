"""Look up what a name in the config stands for: a built-in module, or one that another package registers.

A table maps names to `module:attribute`, so that the names are known without importing what they stand for. Packages
add to a table by an entry point of its group (`mezo.optimizers`, `mezo.objectives`).
"""

import importlib
from collections.abc import Mapping
from functools import cached_property
from importlib import metadata
from typing import Any

from mezo_cli.errors import UserError, did_you_mean, join


class Registry:
    """The choices of one kind.

    Args:
        kind: the config key that names the choice, for error lines: `optimizer`.
        built_in: name -> `module:attribute`.
        group: the entry-point group by which other packages add choices; None where they cannot.
    """

    def __init__(self, kind: str, built_in: Mapping[str, str], group: str | None = None) -> None:
        self.kind, self.built_in, self.group = kind, dict(built_in), group

    @cached_property
    def targets(self) -> dict[str, str]:
        """Map every name to its `module:attribute`; a built-in name cannot be replaced."""
        added = metadata.entry_points(group=self.group) if self.group else ()
        return {**{point.name: point.value for point in added}, **self.built_in}

    @property
    def names(self) -> list[str]:
        """List the names, the built-in ones first."""
        return [*self.built_in, *sorted(set(self.targets) - set(self.built_in))]

    @property
    def plugins(self) -> list[str]:
        """List the names that other packages add."""
        return self.names[len(self.built_in) :]

    def load(self, name: str) -> Any:
        """Import and return what a name stands for.

        Raises:
            UserError: for an unknown name, and for a plug-in that cannot be imported.
        """
        if name not in self.targets:
            raise UserError(f"{self.kind}={name}: allowed are {join(self.names)}{did_you_mean(name, self.names)}")
        module, _, attribute = self.targets[name].partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception as error:  # a plug-in may raise anything
            if name in self.built_in:
                raise
            raise UserError(
                f"{self.kind}={name}: the plug-in {self.targets[name]} cannot be imported: {error}"
            ) from error
