"""Load the train, dev and test rows of a task from the hub, from files or from the embedded demo data.

`load` returns a run's examples, `export` writes few-shot splits as files.
"""

from mezo_cli.data.splits import export, load, load_splits

__all__ = ["export", "load", "load_splits"]
