"""Files are written whole or not at all, and of two processes with one `--out` one wins."""

from pathlib import Path

import pytest

from mezo_cli.errors import UserError
from mezo_cli.runs.atomic import LOCK, lock_file, write_file, write_folder


def test_what_another_process_writes_is_refused_and_its_leftovers_go(tmp_path: Path) -> None:
    """The campaign kills such commands, and runs two of them at once (tests/campaign/stops.py)."""
    lock = lock_file(tmp_path / LOCK.format("o"))
    with pytest.raises(UserError, match="another process writes it"):
        write_folder(tmp_path / "o", Path.mkdir)
    lock.release()
    (tmp_path / ".other.tmp").mkdir()
    (tmp_path / ".o.tmp").mkdir()
    write_file(tmp_path / "o", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.tmp", "o"]
