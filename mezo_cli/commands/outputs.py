"""Where the commands on many runs look for them: in the folders that are named, or in outputs/."""

from collections.abc import Sequence
from pathlib import Path

from mezo_cli.errors import UserError

OUTPUTS = Path("outputs")


def folders_or_outputs(folders: Sequence[Path]) -> list[Path]:
    """Return the folders; outputs/ if there are none.

    Raises:
        UserError: when there is no outputs/ either.
    """
    if not folders and not OUTPUTS.is_dir():
        raise UserError(f"no runs: there is no folder {OUTPUTS}/ here; name the folder of your runs")
    return list(folders) or [OUTPUTS]
