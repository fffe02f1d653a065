"""What a data source offers before anything is sampled."""

from dataclasses import dataclass, field

from mezo_cli.data.table import Rows


@dataclass(frozen=True)
class Source:
    """The labelled rows of one source. `dev` and `test` are None where the source has none."""

    train: Rows
    dev: Rows | None = None
    test: Rows | None = None
    notes: list[str] = field(default_factory=list)
