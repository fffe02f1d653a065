"""Objective choice: scores by plain transformers, one candidate at a time; losses; runs; mistakes."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Example
from mezo_cli.errors import UserError
from mezo_cli.perturb.noise import Direction
from mezo_cli.runs import Run
from mezo_cli.session.opening import opened
from mezo_cli.session.session import Session
from tests import tiny
from tests.command_line import mezo, ok
from tests.interruption import interrupt_and_resume, last_weights
from tests.objectives.plain_decoder import PlainDecoder

pytestmark = pytest.mark.usefixtures("eager_kernels")

NAMES = ["task.choice.each=names", "task.choice.right=right", "task.choice.prompt='{text} and'"]
NAMES += ["task=sst2", "task.name=names", "task.choice.candidates=[' {candidate} was it']"]
ROWS = [  # other numbers of candidates, of other lengths
    {"text": "It was good", "names": ["Human", "a bad Entity", "Location"], "right": ["Location", "Human"]},
    {"text": "No", "names": ["Number", "okay"], "right": "okay"},
    {"text": "Maybe a great film, maybe not", "names": ["Yes", "a", "No", "terrible"], "right": "Yes"},
    {"text": "bad", "names": ["It"], "right": "It"},
]
EXAMPLES = [Example((), -1, f"row {i}", row) for i, row in enumerate(ROWS)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of rows that list their candidates."""
    folder = tmp_path / "data"
    for split, count in (("train", 12), ("dev", 6), ("test", 5)):
        rows = [{**ROWS[i % 4], "text": f"{ROWS[i % 4]['text']} {i}"} for i in range(count)]
        tiny.write_jsonl(folder / f"{split}.jsonl", rows)  # type: ignore[arg-type]
    return folder


def words(model: object, *more: str) -> list[str]:
    return [f"model.path={model}", "model.name=tiny", "model.device=cpu", "objective=choice", *more]


def ready(home: Path, kind: str, *more: str) -> Session:
    given = words(tiny.decoder(home / kind, kind), "data=files", "data.dir=none", *NAMES, *more)
    return opened(build_config(given))


def batch_of(session: Session) -> Any:
    return session.objective.collate(session.encoder.encode_all(EXAMPLES))


def by_hand(folder: Path) -> list[list[Tensor]]:
    """Return the log-probability of each token of each candidate by plain transformers, one candidate at a time."""
    plain = PlainDecoder(folder)
    return [[plain.log_probs(f"{row['text']} and", f" {name} was it") for name in row["names"]] for row in ROWS]


TRAINED = [2, 1, 0, 0]  # the first right candidate of each row
RIGHT = [{2, 0}, {1}, {0}, {0}]


@pytest.mark.parametrize("kind", ["opt", "llama", "gpt2", "gpt_neox", "bloom"])
def test_scores_are_the_log_probabilities_by_hand(kind: str, tmp_path: Path) -> None:
    folder = tiny.decoder(tmp_path / kind, kind)
    with torch.no_grad():
        full = by_hand(folder)
        for normalize, reduce in (("mean", Tensor.mean), ("sum", Tensor.sum)):
            ours = ready(tmp_path, kind, f"objective.normalize={normalize}")
            scores = ours.objective.scores(batch_of(ours))[0]  # type: ignore[attr-defined]
            for of_row, expected in zip(scores, full, strict=True):
                values = torch.stack([reduce(log_probs) for log_probs in expected]).double()
                torch.testing.assert_close(of_row[: len(values)], values, rtol=1e-5, atol=1e-5)
                assert bool((of_row[len(values) :] == -torch.inf).all())


@torch.no_grad()
def test_losses(tmp_path: Path) -> None:
    full = by_hand(tiny.decoder(tmp_path / "llama", "llama"))
    means = [torch.stack([log_probs.mean() for log_probs in of_row]) for of_row in full]
    expected = {
        "cross_entropy": torch.stack(
            [F.cross_entropy(m, torch.tensor(i)) for m, i in zip(means, TRAINED, strict=True)]
        ).mean(),
        "lm": -torch.cat([of_row[i] for of_row, i in zip(full, TRAINED, strict=True)]).mean(),
        "accuracy": torch.tensor([int(m.argmax()) not in right for m, right in zip(means, RIGHT, strict=True)])
        .double()
        .mean(),
    }
    for loss, value in expected.items():
        ours = ready(tmp_path, "llama", f"objective.loss={loss}")
        found = float(ours.loss_of(ours.encoder.encode_all(EXAMPLES))())
        assert found == pytest.approx(float(value), rel=1e-6, abs=1e-7)


def test_parts_of_the_vocabulary_and_of_the_positions_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = ready(tmp_path, "opt")
    with torch.no_grad():
        whole = ours.objective.scores(batch_of(ours))  # type: ignore[attr-defined]
        monkeypatch.setattr("mezo_cli.objectives.decoder._ROWS", 17)
        monkeypatch.setattr("mezo_cli.objectives.decoder._POSITIONS", 3)
        torch.testing.assert_close(ours.objective.scores(batch_of(ours)), whole, rtol=1e-6, atol=1e-6)  # type: ignore[attr-defined]


def test_z_of_the_head_is_drawn_once_per_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, drawn = ready(tmp_path, "opt"), list[int]()
    monkeypatch.setattr("mezo_cli.objectives.decoder._ROWS", 17)
    draw = ours.params.noise.perturb_rows
    for positions in (256, 2):
        monkeypatch.setattr("mezo_cli.objectives.decoder._POSITIONS", positions)
        with (
            mock.patch.object(ours.params.noise, "perturb_rows", wraps=draw) as rows,
            ours.forward.perturbed(Direction(0, 0), 0.1, signs=(1,)),
        ):
            ours.objective.row_losses(batch_of(ours))
        drawn.append(sum(len(call.args[3]) for call in rows.call_args_list))
    assert drawn[0] == drawn[1] >= len(ours.loaded.model.lm_head.weight)


def test_a_prompt_is_computed_once_and_only_scored_positions_go_through_the_head(tmp_path: Path) -> None:
    ours = ready(tmp_path, "opt")
    rows, seen = ours.encoder.encode_all(EXAMPLES), list[Any]()
    ours.loaded.model.model.decoder.layers[0].fc1.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape))
    batch = ours.objective.collate(rows)
    with torch.no_grad():
        ours.objective.row_losses(batch)
    starts = [{tuple(ids[:n]) for ids in row.candidates for n in range(1, len(ids))} for row in rows]
    assert seen[0][-2] == sum(len(row.input_ids) + len(of_row) for row, of_row in zip(rows, starts, strict=True))
    assert len(batch.layout["read"]) == sum(1 + len(of_row) for of_row in starts)


RUNS = {
    "mezo, lm": ["objective.loss=lm", "micro_batch_size=3"],
    "es, lora": ["optimizer=es", "optimizer.members=2", "peft=lora"],
    "adamw": ["optimizer=adamw", "checkpoint=full"],
    "mezo, head": ["peft=head"],
    "mezo, prefix, accuracy": ["peft=prefix", "objective.loss=accuracy", "objective.normalize=sum"],
}


def run_words(data: Path, *more: str) -> list[str]:
    sizes = ["steps=4", "batch_size=4", "eval_every=2", "log_every=1", "eval_batch_size=4", "optimizer.lr=1e-3"]
    return words(tiny.decoder(data.parent / "opt", "opt"), "data=files", f"data.dir={data}", *NAMES, *sizes, *more)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", RUNS)
def test_resumed_replayed_evaluated_and_exported(name: str, data: Path, tmp_path: Path) -> None:
    run, whole = interrupt_and_resume(run_words(data, *RUNS[name]), tmp_path, name.split(",")[0])
    assert (run / "predictions.jsonl").read_bytes() == (whole / "predictions.jsonl").read_bytes()
    test = Run(run).read_summary()["test"]
    document = json.loads(mezo("eval", run, "--json").out)
    assert (document["loss"], document["accuracy"]) == (test["loss"], test["accuracy"])
    rows = Run(run).predictions() or []
    assert sum(row["prediction"] in row["right"] for row in rows) / len(rows) == pytest.approx(test["accuracy"])
    predicted = json.loads(mezo("predict", run, "--file", data / "test.jsonl", "--json").out)["rows"]
    assert [row["scores"] for row in predicted] == [row["scores"] for row in rows]
    assert mezo("predict", run, "--file", data / "test.jsonl", "-q").out.splitlines()[0] in {
        "Human was it",
        "a bad Entity was it",
        "Location was it",
    }
    assert "accuracy" in mezo("show", run).out
    assert "opt, choice" in mezo("compare", run).out
    assert mezo("report", run, "--out", tmp_path / "page.html").code == 0
    assert mezo("export", run, "--out", tmp_path / "exported").code == 0
    assert "| candidates | `' {candidate} was it'` |" in (tmp_path / "exported" / "README.md").read_text()
    if name != "adamw":
        assert mezo("replay", run, "--step", "4", "--out", tmp_path / "replayed").code == 0
        assert last_weights(tmp_path / "replayed") == last_weights(whole)
        assert mezo("export", run, "--trajectory", "--out", tmp_path / "trajectory").code == 0
        rebuilt = ["predict", tmp_path / "trajectory", "--base", tmp_path / "opt", "--json"]
        again = json.loads(mezo(*rebuilt, "--file", data / "test.jsonl").out)["rows"]
        assert [row["scores"] for row in again] == [row["scores"] for row in rows]


SHOWN = "It was good 0 and -> ' Human was it'* | ' a bad Entity was it' | ' Location was it'*"


@pytest.mark.parametrize(("command", "said"), [("data", SHOWN), pytest.param("doctor", "", marks=pytest.mark.slow)])
def test_data_and_doctor_read_prompts_and_candidates(command: str, said: str, data: Path) -> None:
    given = [word for word in run_words(data) if not word.startswith(("steps", "eval_every", "log_every"))]
    shown = ok(command, *given)
    assert said in shown.out


def test_diverged_scores_are_no_accuracy(tmp_path: Path) -> None:
    ours = ready(tmp_path, "opt", "objective.loss=accuracy")
    for p in ours.params.tensors.values():
        p.data.fill_(float("nan"))
    rows = ours.encoder.encode_all(EXAMPLES)
    assert not ours.objective.evaluate(rows).is_finite
    with torch.no_grad():
        assert bool(ours.loss_of(rows)().isnan())
    with pytest.raises(UserError, match="not finite"):
        ours.objective.predict(rows)
