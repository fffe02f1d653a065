"""Load the train, dev and test rows of a task from the hub, from files or from the embedded demo data.

`load` returns a run's examples, `export` writes few-shot splits as files, `describe` counts rows and lengths,
and `describe_lengths` sums up the latter.
"""

from mezo_cli.data.splits import describe, describe_lengths, export, load, load_splits

__all__ = ["describe", "describe_lengths", "export", "load", "load_splits"]
