"""`mezo eval`: what it prints, and flags that do not fit what is evaluated: they are refused, not ignored."""

import json
from pathlib import Path

import pytest

from mezo_cli.runs import Run
from tests import tiny
from tests.command_line import error_line, mezo
from tests.models.test_loading import change_json, change_weights


@pytest.mark.usefixtures("eager_kernels")
def test_json_and_quiet(run: Path) -> None:
    said = mezo("eval", run, "--split", "dev", "--json")
    assert said.code == 0, said
    document = json.loads(said.out)
    best = Run(run).read_summary()["best"]
    line = next(one for one in Run(run).evaluations("dev") if one["step"] == best["step"])
    told = {"run": str(run), "checkpoint": "best", "split": "dev", "rows": 12, "predicted": line["predicted"]}
    scores = {"accuracy": pytest.approx(line["accuracy"]), "loss": pytest.approx(line["loss"], rel=1e-4)}
    assert document == told | scores
    said = mezo("eval", run, "--split", "dev", "-q")
    head, names, values = said.out.strip().splitlines()
    assert (head, said.err) == (f"{run} best, dev: 12 rows", "")
    assert names.split() == ["accuracy", "loss", "predicted", "negative", "predicted", "positive"]
    assert values.split() == [f"{document[name]:.4f}" for name in ("accuracy", "loss")] + [
        str(number) for number in document["predicted"].values()
    ]


@pytest.fixture
def sources(movies: Path, tmp_path: Path) -> dict[str, list[str]]:
    """The same rows as files with the labels 0 and 1, and as a data set of the hub with names."""
    for path in movies.glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        lines = [f"{row['sentence']}\t{int(row['label'] == 'positive')}\n" for row in rows]
        (tmp_path / "tsv").mkdir(exist_ok=True)
        (tmp_path / "tsv" / f"{path.stem}.tsv").write_text("sentence\tlabel\n" + "".join(lines))
    hub = ["data=hub", f"task.hub.path={movies}", "task.hub.name=null", "task.hub.test=test"]
    return {"files": ["data=files", f"data.dir={tmp_path / 'tsv'}"], "hub": hub}


@pytest.mark.parametrize("source", ["files", "hub"])
def test_the_order_of_a_checkpoints_classes_and_of_the_labels_changes_no_score(
    source: str, sources: dict[str, list[str]], roberta: Path, tmp_path: Path
) -> None:
    """A head with its classes turned round; then task.labels turned round, with the lists that the line names."""
    plain, turned = (tiny.roberta(tmp_path / name, head="cls") for name in ("a", "b"))
    change_json(turned / "config.json", id2label={"0": "positive", "1": "negative"})
    for part in ("weight", "bias"):
        change_weights(
            turned, lambda t, key=f"classifier.out_proj.{part}": t.update({key: t[key].flip(0).contiguous()})
        )

    def scores(folder: Path, *words: str) -> dict[str, float]:
        said = mezo("eval", folder, "task=sst2", *sources[source], "--json", *words)
        assert said.code == 0, said
        document = json.loads(said.out)
        return {"accuracy": document["accuracy"], "loss": document["loss"], **document["predicted"]}

    cls, labels = scores(plain, "objective=cls"), "task.labels=[positive,negative]"
    assert cls["negative"] != cls["positive"]
    assert scores(turned, "objective=cls") == cls
    lists = ["task.files.labels=['1','0']", "task.hub.labels=[positive,negative]"]
    line = "task.files.labels [0, 1] and task.hub.labels [negative, positive] into the order"
    if source == "files":
        assert line in error_line(mezo("eval", turned, "task=sst2", *sources[source], "objective=cls", labels))
    for more in (lists, *([] if source == "files" else [[]])):  # names of the hub need no list
        assert scores(turned, "objective=cls", labels, *more) == pytest.approx(cls)
    said = error_line(mezo("eval", roberta, "task=sst2", *sources[source], labels))
    assert f"put task.label_words [terrible, great] and {line}" in said
    assert scores(roberta, labels, *lists, "task.label_words=[great,terrible]") == pytest.approx(scores(roberta))
