"""Files for the engine lie in memory only where they fit."""

import shutil
import tempfile
from pathlib import Path

import pytest

from mezo_cli.engine import adapter_files


def test_what_does_not_fit_in_memory_is_written_to_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_files, "MEMORY", tmp_path)
    free = shutil.disk_usage(tmp_path).free
    with adapter_files.scratch_folder("small-", free // 4) as folder:
        assert Path(folder).parent == tmp_path
    with adapter_files.scratch_folder("large-", free) as folder:
        assert Path(folder).parent == Path(tempfile.gettempdir())
    monkeypatch.setattr(adapter_files, "MEMORY", tmp_path / "nothing")
    with adapter_files.scratch_folder("none-", 1) as folder:
        assert Path(folder).parent == Path(tempfile.gettempdir())
