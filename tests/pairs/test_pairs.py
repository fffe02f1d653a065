"""Pairs of settings as they meet, through the commands of a run's life; rows of values are from `settings`."""

import functools
import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.command_line import error_line, mezo, ok
from tests.pairs.settings import LEFT_OUT, REFUSED, Row, covering_rows

ORDINARY = 16  # rows; the others are slow
STEPS = 2
GENERATE = [
    "task.generate.prompt='{sentence} It was'",
    "task.generate.answer=' {label}'",
    "objective.reward=length",
    "objective.max_new_tokens=2",
]

pytestmark = pytest.mark.usefixtures("eager_kernels", "in_tmp_path")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows, an encoder and a decoder."""
    home = tmp_path_factory.mktemp("pairs")
    tiny.movie_folder(home / "movies", train=8)
    tiny.roberta(home / "roberta")
    tiny.decoder(home / "opt", "opt")
    return home


@functools.cache
def rows() -> list[Row]:
    return covering_rows()


def words(home: Path, row: Row) -> list[str]:
    """Return the words that train with these values."""
    given = [f"{key}={value}" for key, value in row.items() if value != LEFT_OUT]
    objective, optimizer = row.get("objective", "mlm"), row.get("optimizer", "mezo")
    model = "roberta" if objective in ("mlm", "cls") else "opt"
    given += [f"model.path={home / model}", "data=files", f"data.dir={home / 'movies'}", "batch_size=4"]
    given += GENERATE if objective == "generate" else []
    if optimizer == "linear_probe":
        return [*given, "probe_c=1"]
    given += ["optimizer.members=2"] if optimizer in ("es", "fzoo") else []
    return [*given, f"steps={STEPS}", "optimizer.lr=1e-3"]


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder with the weights of the last step of a run, as `mezo replay` writes them."""
    from mezo_cli import models
    from mezo_cli.session.session import Session
    from mezo_cli.training.evaluations import Evaluations

    original, folder = Evaluations.on_dev, tmp_path / "live"

    def on_dev(self: Evaluations, session: Session, *rest: Any) -> None:
        original(self, session, *rest)
        if self.run_log.step == session.config.steps:
            models.save(session.loaded, folder)

    monkeypatch.setattr(Evaluations, "on_dev", on_dev)
    return folder


def weights(folder: Path) -> dict[str, bytes]:
    """Return name -> content of the files with weights."""
    found = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert found
    return found


def live_a_life(home: Path, row: Row, run: Path, live: Path) -> None:
    """Train with a row of values, and look at the run with every command; each ends with status 0."""
    for left in live.glob("*"):  # by the row before
        left.unlink()
    done = mezo("train", *words(home, row), f"hydra.run.dir={run}")
    if row["max_seconds"] != LEFT_OUT and row["optimizer"] != "linear_probe":
        assert done.code == 130, done
        done = mezo("resume", run, "max_seconds=null")
    assert done.code == 0, done
    assert mezo("show", run).code == 0
    listed = mezo("runs", run.parent)
    assert (listed.code, "finished" in listed.out) == (0, True), listed
    compared = ok("compare", run.parent, "--json")
    json.loads(compared.out)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert mezo("resume", run).code == 0
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    if (run / "trajectory.bin").exists() and row["optimizer"] != "linear_probe":
        ok("replay", run, "--step", STEPS, "--out", run.parent.parent / "replayed")
        assert weights(run.parent.parent / "replayed") == weights(live)

    exported = run.parent.parent / "exported"
    ok("export", run, "--out", exported)
    loads(exported, row)


def loads(exported: Path, row: Row) -> None:
    """Load an exported folder by transformers, and peft for a prefix: no weight is missing."""
    import transformers

    kinds = {"mlm": "MaskedLM", "cls": "SequenceClassification"}
    kind = getattr(transformers, f"AutoModelFor{kinds.get(row['objective'], 'CausalLM')}")
    if row["peft"] == "prefix":
        from peft import PeftModel

        base = json.loads((exported / "adapter_config.json").read_text())["base_model_name_or_path"]
        PeftModel.from_pretrained(kind.from_pretrained(base), exported)
        return
    _, info = kind.from_pretrained(exported, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@pytest.mark.parametrize("number", range(ORDINARY))
def test_settings_that_meet(number: int, home: Path, live: Path, tmp_path: Path) -> None:
    live_a_life(home, rows()[number], tmp_path / "runs" / "run", live)


@pytest.mark.slow
def test_every_pair_stands_in_a_row(home: Path, live: Path, tmp_path: Path) -> None:
    for number, row in enumerate(rows()[ORDINARY:]):
        live_a_life(home, row, tmp_path / str(number) / "runs" / "run", live)
        shutil.rmtree(tmp_path / str(number))


@pytest.mark.parametrize(("values", "why"), REFUSED, ids=[" ".join(values) for values, _ in REFUSED])
def test_what_may_not_meet_is_refused(values: dict[str, str], why: str, home: Path, tmp_path: Path) -> None:
    for some in product(*(named.split() for named in values.values())):
        row = dict(zip(values, some, strict=True))
        if "reward" in row.values() and "objective" not in row:
            row["objective"] = "generate"
        if row.get("peft") == "scales" and "model.quantize" not in row:
            row["model.quantize"] = "int8"
        if "model.quantize" in row and "peft" not in row:
            row["peft"] = "lora"
        assert why in error_line(mezo("train", *words(home, row), f"hydra.run.dir={tmp_path / 'run'}")), row
        assert list(tmp_path.iterdir()) == [], row
