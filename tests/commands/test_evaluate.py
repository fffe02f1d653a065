"""`mezo eval` and `mezo verify`: what they print and restore, what they refuse, and that a changed run is found."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mezo_cli.runs import Run, trajectory
from tests import tiny
from tests.command_line import error_line, mezo, ok
from tests.models.test_loading import change_json, change_weights

pytestmark = pytest.mark.usefixtures("eager_kernels")


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def test_json_and_quiet(run: Path) -> None:
    said = ok("eval", run, "--split", "dev", "--json")
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
        said = ok("eval", folder, "task=sst2", *sources[source], "--json", *words)
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


def test_a_damaged_checkpoint_says_how_to_go_on(copied: Path) -> None:
    wanted = mezo("eval", copied).out
    path = copied / "checkpoints" / "best" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert "remove the checkpoint's folder, and its step is replayed" in error_line(mezo("eval", copied))
    shutil.rmtree(path.parent)
    assert mezo("eval", copied).out == wanted


def test_a_plain_folder_with_task_and_data(run: Path, roberta: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a model, plain"
    shutil.copytree(run / "checkpoints" / "last", folder)
    words = ["task=sst2", "data=files", f"data.dir={run.parent / 'movies'}"]
    said = ok("eval", folder, *words)
    assert said.out.splitlines()[1:] == mezo("eval", run, "--checkpoint", "last").out.splitlines()[1:]
    start = mezo("eval", roberta, *words, "--split", "dev")
    line = Run(run).evaluations("dev")[0]
    assert f"{line['accuracy']:.4f}  {line['loss']:.4f}" in start.out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["{run}", "--split", "tset"], "(did you mean 'test'?)"),
        (["{run}", "--checkpoint", "bets"], "allowed are best, last or a step number"),
        (["{run}", "--checkpoint", "99"], "holds steps 0 to 6"),
        (["{run}", "--checkpoint", "-1"], "allowed are best, last or a step number"),
        (["{run}/checkpoints/best", "--checkpoint", "last"], "is the checkpoint 'best' of"),
        (["{model}", "task=sst2", "data=demo", "--checkpoint", "last"], "a plain model folder"),
        (["{run}", "task=sst2"], "a run has its own"),
        (["{run}/checkpoints"], "is no run: give task=... and data=..."),
        (["{run}/checkpoints/nosuch"], "no such folder"),
        (["{movies}"], "is no run: give task=... and data=..."),
        (["{movies}", "task=sst2", "data=demo"], "no config.json"),
        (["{movies}", "task=sst2,rte"], "add -m"),
    ],
)
def test_what_eval_refuses(words: list[str], part: str, run: Path, roberta: Path) -> None:
    places = {"run": run, "movies": run.parent / "movies", "model": roberta}
    assert part in error_line(mezo("eval", *(word.format(**places) for word in words)))


def test_changed_data_are_reported(run: Path, copied: Path, tmp_path: Path) -> None:
    text = (copied / "config.yaml").read_text()
    (copied / "config.yaml").write_text(text.replace(str(run.parent), str(tmp_path)))
    assert "was edited" in error_line(mezo("eval", copied))
    data = run.parent / "movies" / "test.jsonl"
    rows = data.read_text()
    data.write_text(rows.replace("film", "movie"))
    said = mezo("eval", run)
    data.write_text(rows)
    assert said.code == 0
    assert "warning: the data have changed since the run" in said.out


def other_prediction(run: Run) -> None:
    rows = run.predictions() or []
    first, other = rows[0], next(row for row in rows if row["predicted"] != rows[0]["predicted"])
    first["predicted"], other["predicted"] = other["predicted"], first["predicted"]
    run.write_predictions({key: row[key] for key in row if key != "row"} for row in rows)


def other_score(run: Run) -> None:
    summary = run.read_summary()
    summary["dev"]["accuracy"] += 0.25
    run.write_summary(summary)


def other_step(run: Run) -> None:
    past = trajectory.read(run.trajectory)
    with run.open_trajectory() as file:
        writer = trajectory.Writer(file, past.header)
        for step, grads, lr in past.records(0, len(past)):
            writer.append(step, [2 * g for g in grads] if step == 0 else grads, lr)


def other_cpu(run: Run) -> None:
    (here,) = run.info()["arithmetic"]
    run.update(arithmetic=[here, {**here, "from_step": 3, "CPU capability": "another"}])  # it went on there


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        (lambda run: None, []),
        (other_cpu, []),
        (other_prediction, ["test"]),
        (other_score, ["dev"]),
        (other_step, ["weights", "dev", "test", "last"]),
    ],
)
def test_what_was_changed_is_found(change: Callable[[Run], None], differing: list[str], copied: Path) -> None:
    change(Run(copied))
    if change in (other_prediction, other_score):  # a file with another end is no run's result
        assert "is not what run.json says that this run has written" in error_line(mezo("verify", copied))
    Run(copied).update(ends=Run(copied).ends())
    ended = mezo("verify", copied)
    lines = [line.split(maxsplit=2) for line in ended.out.splitlines()]
    assert [line[1] for line in lines] == ["data", "weights", "dev", "test", "last"]
    assert {line[1] for line in lines if line[0] == "DIFFERS"} >= set(differing[:1])
    assert {line[1] for line in lines if line[0] == "DIFFERS"} <= set(differing)
    assert ended.code == (1 if differing else 0)
    rule = (
        "[loss to 0.0001, 1 prediction in 200 may differ: other CPU capability]" if change is other_cpu else "[exact]"
    )
    assert all(line[2].endswith(rule) for line in lines[2:4])


def test_the_last_weights_are_checked(copied: Path) -> None:
    """Where step 0 was picked, nothing else would be replayed."""
    made = Run(copied)
    weights = made.info()["weights"]
    last = f"last     step 6, sha256 {weights['last']['sha256'][:12]}, as recorded; 6 of 6 steps replayed"
    assert mezo("verify", copied).out.splitlines()[-1] == f"ok      {last}"
    made.update(weights={**weights, "last": {"step": 6, "sha256": "0" * 64}})
    ended = mezo("verify", copied)
    assert (ended.code, ended.out.splitlines()[-1].split()[0]) == (1, "DIFFERS")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["steps=5"], "'steps=5': only a plain model folder takes settings"),
        (["foo"], "'foo': only"),
        (["+data.dir=x"], "'+data.dir=x': only"),
        (["steps=5", "data.dir=x"], "'steps=5': only"),
        (["objective.reward=exact_match"], "'objective.reward=exact_match': only"),
        (["--base", "OTHER"], "started from other weights than these"),
    ],
)
def test_what_it_does_not_read_is_refused(words: list[str], part: str, copied: Path, tmp_path: Path) -> None:
    other = tiny.roberta(tmp_path / "other", seed=1)
    words = [str(other) if word == "OTHER" else word for word in words]
    for command in (["verify", copied], ["eval", copied], ["export", copied, "--out", tmp_path / "out"]):
        if command[0] != "export" or words[0] == "--base":
            assert part in error_line(mezo(*command, *words)), command
    assert not (tmp_path / "out").exists()


def test_another_persons_run_is_verified_from_the_base(
    copied: Path, roberta: Path, movies: Path, tmp_path: Path
) -> None:
    assert mezo("export", copied, "--trajectory", "--out", tmp_path / "shared").code == 0
    ended = ok("verify", tmp_path / "shared", "--base", roberta, f"data.dir={movies}")
    assert [line.split()[:2] for line in ended.out.splitlines()] == [
        ["ok", x] for x in ("data", "weights", "dev", "test", "last")
    ]
