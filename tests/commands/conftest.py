"""One finished run for all tests of commands on a run."""

from pathlib import Path

import pytest

from tests import tiny
from tests.command_line import mezo, small


@pytest.fixture(scope="package")
def run(roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six steps, to be read only; its data are in the folder `movies` beside it."""
    folder = tmp_path_factory.mktemp("commands")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZO_EAGER", "1")
        words = small(roberta, tiny.movie_folder(folder / "movies"), folder / "run", "eval_batch_size=5")
        assert mezo("train", *words).code == 0
    return folder / "run"
