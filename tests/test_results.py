"""results/: every published run of an embedded model is what it says, by `mezo verify`."""

from pathlib import Path

import pytest

from mezo_cli.config.stored import read_config
from tests.command_line import mezo

RESULTS = Path(__file__).parents[1] / "results"
RUNS = sorted(path.parent for path in RESULTS.rglob("config.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run.relative_to(RESULTS)))
def test_a_published_run_is_true(run: Path) -> None:
    if not read_config(run / "config.yaml").model.is_embedded:
        pytest.skip("needs a model that is not in the package: make verify-results")
    said = mezo("verify", run)
    assert said.code == 0, said.out


def test_published_runs_are_small_and_have_no_texts() -> None:
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 10_000_000
    for path in files:
        if path.name == "predictions.jsonl":
            assert '"columns"' not in path.read_text()
        assert path.name != "train.log"
