"""Data: from the hub, from files or the embedded demo to the rows of train, dev and test.

`load` gives a run its examples, `export` writes few-shot splits as files, `describe` counts what is there.
"""

from mezo_cli.data.describe import describe
from mezo_cli.data.export import export
from mezo_cli.data.splits import load

__all__ = ["describe", "export", "load"]
