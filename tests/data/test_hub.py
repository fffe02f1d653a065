"""The hub: the real `datasets.load_dataset` with a local server, its cache, and the error lines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub_server import Hub

pytest.importorskip("pyarrow")

SHOW = """
from mezo_cli.data import load
from mezo_cli.errors import UserError
from mezo_cli.config.schema import DataConfig
from tests.data.sample_data import {task} as task
try:
    splits = load(task, DataConfig(name="hub"{more}), 42)
    for name in ("train", "dev", "test"):
        rows = getattr(splits, name)
        print(name, len(rows), *sorted({{(e.texts[0][0], task.labels[e.label]) for e in rows}}))
    print(splits.fingerprint)
except UserError as error:
    print("UserError:", error)
"""
NAMES = ["entailment", "neutral", "contradiction"]  # the hub's order, which is not the task's


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set repository as the hub has them: Parquet files, a README that names its splits, class numbers."""
    import datasets

    root = tmp_path_factory.mktemp("hub")
    folder = root / "datasets/nyu-mll/glue"
    text = datasets.Value("string")
    mnli = datasets.Features(
        {"premise": text, "hypothesis": text, "label": datasets.ClassLabel(names=NAMES), "idx": datasets.Value("int32")}
    )
    datasets.disable_progress_bars()
    for split, count in (("train", 60), ("validation_matched", 12)):
        rows = {
            "premise": [f"{NAMES[i % 3][0]} {i}" for i in range(count)],
            "hypothesis": ["h"] * count,
            "label": [i % 3 for i in range(count)],
            "idx": list(range(count)),
        }
        path = folder / "mnli" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_dict(rows, features=mnli).to_parquet(str(path))
    files = "".join(f"  - split: {split}\n    path: mnli/{split}-*\n" for split in ("train", "validation_matched"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: mnli\n  data_files:\n{files}---\n")
    return root


def _load(endpoint: str, home: Path, task: str = "MNLI", more: str = "") -> str:
    """Load in a process of its own: the libraries read HF_ENDPOINT and HF_HOME when they are imported."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_")) and "proxy" not in k.lower()
    }
    done = subprocess.run(
        [sys.executable, "-c", SHOW.format(task=task, more=more)],
        env={**kept, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "%|" not in done.stderr  # no progress bars where nobody watches
    return done.stdout


@pytest.mark.slow
def test_rows_come_from_the_hub_and_then_from_its_cache(repositories: Path, tmp_path: Path) -> None:
    with Hub(repositories) as hub:
        said = _load(hub.url, tmp_path)
        assert "datasets/nyu-mll/glue/resolve/main/README.md" in hub.seen
        shots = _load(hub.url, tmp_path, more=", shots=4").splitlines()
    lines = said.splitlines()
    by_name = "('c', 'contradiction') ('e', 'entailment') ('n', 'neutral')"
    assert lines[:3] == [f"train 54 {by_name}", f"dev 6 {by_name}", f"test 12 {by_name}"]
    assert [line.split()[:2] for line in shots[:3]] == [["train", "12"], ["dev", "12"], ["test", "12"]]
    assert _load(hub.url, tmp_path) == said  # the server is gone: the cache serves, and without long retries


def test_no_server_and_no_cache_is_one_line_that_says_how_to_run_offline(tmp_path: Path) -> None:
    said = _load("http://127.0.0.1:9", tmp_path)
    assert said.count("\n") == 1
    for part in ("nyu-mll/glue (mnli)", "http://127.0.0.1:9", "does not answer", "experiment=demo", "data.dir=PATH"):
        assert part in said


def test_a_task_without_a_hub_data_set() -> None:
    from mezo_cli.config.schema import DataConfig
    from mezo_cli.data import load
    from mezo_cli.errors import UserError
    from tests.data.sample_data import MRPC

    with pytest.raises(UserError, match=r"'mrpc' has no data set on the hub .* data=files"):
        load(MRPC, DataConfig(name="hub"), 42)
