"""`mezo eval`: what it prints, and flags that do not fit what is evaluated: they are refused, not ignored."""

import json
from pathlib import Path

import pytest

from mezo_cli.runs import Run
from tests.command_line import error_line, mezo


def test_a_checkpoint_is_named_once(roberta: Path, run: Path, movies: Path) -> None:
    line = error_line(mezo("eval", run / "checkpoints" / "best", "--checkpoint", "last"))
    assert "--checkpoint last" in line
    assert "the checkpoint 'best'" in line
    words = ["task=sst2", "data=files", f"data.dir={movies}", "--checkpoint", "last"]
    assert "a plain model folder" in error_line(mezo("eval", roberta, *words))


@pytest.mark.usefixtures("eager_kernels")
def test_json_and_quiet(run: Path) -> None:
    """Standard output has the document alone; without --json the same numbers are in the table."""
    said = mezo("eval", run, "--split", "dev", "--json")
    assert said.code == 0, said
    document = json.loads(said.out)
    best = Run(run).read_summary()["best"]
    line = next(one for one in Run(run).evaluations("dev") if one["step"] == best["step"])
    assert document == {
        "run": str(run),
        "checkpoint": "best",
        "split": "dev",
        "rows": 12,
        "accuracy": pytest.approx(line["accuracy"]),
        "loss": pytest.approx(line["loss"], rel=1e-4),
        "predicted": line["predicted"],
    }
    said = mezo("eval", run, "--split", "dev", "-q")
    head, names, values = said.out.strip().splitlines()
    assert (head, said.err) == (f"{run} best, dev: 12 rows", "")
    assert names.split() == ["accuracy", "loss", "predicted", "negative", "predicted", "positive"]
    assert values.split() == [f"{document[name]:.4f}" for name in ("accuracy", "loss")] + [
        str(number) for number in document["predicted"].values()
    ]
