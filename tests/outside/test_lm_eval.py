"""Exports scored by EleutherAI's lm-evaluation-harness, row by row against a run's predictions and summary.json."""

import importlib
import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
import yaml
from jinja2.sandbox import SandboxedEnvironment
from transformers import AutoTokenizer

from mezo_cli.runs import Run
from tests import tiny
from tests.command_line import mezo

lm_eval = pytest.importorskip("lm_eval", reason="needs lm_eval: make test-outside")

DEMO = Path(__file__).parents[2] / "mezo_cli" / "demo"
CHOICES = {"output_type": "multiple_choice", "target_delimiter": "", "metric_list": [{"metric": "acc"}]}
FILMS = CHOICES | {
    "doc_to_text": "</s>{{sentence}} It was",
    "doc_to_target": "{{['negative', 'positive'].index(label)}}",
}
DIGITS = CHOICES | {"doc_to_text": "<s>{{text}}=", "doc_to_target": "{{label}}"}  # is the first digit even or odd?
SUMS = {
    "output_type": "generate_until",
    "generation_kwargs": {"until": ["</s>"], "max_gen_toks": 8, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
    "doc_to_target": "{{answer}}",
}
SUM_OF = "{{numbers | join('')}}>{{target}}="
for task, data in (FILMS, DEMO / "data"), (DIGITS, "digits"), (SUMS, DEMO / "arithmetic"):
    task["dataset_kwargs"] = {"data_files": {"test": f"{data}/test.jsonl"}}
TRAINED = ["steps=20", "optimizer.lr=1e-3", "batch_size=16", "eval_every=20", "log_every=20", "model.device=cpu"]
OPT = ["task=sst2", "data=demo", "model.path=opt", *TRAINED]
DECODER = ["task=sst2", "data=files", "data.dir=digits", "model=demo-decoder", "task.columns=[text]", *TRAINED]
DECODER += ["task.labels=[even,odd]", "task.files.labels=['0','1']"]
COUNTDOWN = ["task=demo-arithmetic", "data=demo", "objective=generate", "objective.reward=countdown"]
SUM = ["objective=choice", "objective.normalize=sum"]
LM = ["objective=lm", "task.lm.template='{text}={mask}'", "task.lm.label_words=['(','4']"]
CASES: dict[str, tuple[list[str], dict[str, Any], list[str]]] = {  # words of `mezo train`, a task, its choices
    "lm opt": (["objective=lm", *OPT], FILMS, [" terrible", " great"]),
    "sum opt": ([*SUM, *OPT], FILMS, [" terrible", " great"]),
    "mean opt": (["objective=choice", *OPT, "task.choice.candidates=[' ok',' so bad']"], FILMS, [" ok", " so bad"]),
    "lm decoder": ([*LM, *DECODER], DIGITS, [" (", " 4"]),  # label words follow a space
    "sum decoder": (
        [*SUM, *DECODER, "task.choice.prompt='{text}='", "task.choice.candidates=['(7+','4']"], DIGITS, ["(7+", "4"]
    ),
    "generate decoder": ([*COUNTDOWN, "experiment=demo-reward", "steps=10", "eval_every=10"], SUMS, ["<s>" + SUM_OF]),
    "generate opt": ([*COUNTDOWN, "objective.max_new_tokens=8", "model.path=opt", *TRAINED], SUMS, ["</s>" + SUM_OF]),
}  # fmt: skip
EXPRESSIONS = SandboxedEnvironment()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with a tiny OPT in `opt` and rows that the decoder's few letters can spell in `digits`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tiny.decoder(tmp_path / "opt", "opt")
    problems = [json.loads(line) for line in (DEMO / "arithmetic" / "train.jsonl").read_text().splitlines()]
    texts = ["".join(map(str, row["numbers"])) + ">" + row["target"] for row in problems]
    lines = [json.dumps({"text": text, "label": str(int(text[0]) % 2)}) for text in texts]
    Path("digits").mkdir()
    for split, some in {"train": lines[:200], "dev": lines[200:300], "test": lines[300:]}.items():
        Path("digits", f"{split}.jsonl").write_text("\n".join(some) + "\n")


@pytest.mark.parametrize("name", CASES)
def test_an_export_gives_the_same_to_lm_eval(name: str) -> None:
    words, task, choices = CASES[name]
    assert mezo("train", *words, "hydra.run.dir=run").code == 0
    assert mezo("export", "run", "--out", "model").code == 0
    ours = [json.loads(line) for line in Path("run/predictions.jsonl").read_text().splitlines()]
    if "generate" in name:
        check_completions(ours, evaluate(task | {"doc_to_text": choices[0]}))
    else:
        check_scores(ours, evaluate(task | {"doc_to_choice": choices}), "mean" in name)


def evaluate(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Return lm_eval's samples of a task, in the order of its rows."""
    Path("tasks").mkdir()
    task = task | {"task": "own", "dataset_path": "json", "test_split": "test"}
    Path("tasks", "own.yaml").write_text(yaml.safe_dump(task))
    model = {"pretrained": "model", "dtype": "float32", "add_bos_token": False}
    tasks = importlib.import_module("lm_eval.tasks").TaskManager(include_path="tasks")
    done = lm_eval.simple_evaluate("hf", model, ["own"], batch_size=1, device="cpu", task_manager=tasks)
    return sorted(done["samples"]["own"], key=lambda sample: sample["doc_id"])


def check_completions(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Check that all completions, exact matches and rewards are equal, and the mean of summary.json."""
    rewards = [row["reward"] for row in ours]
    assert [sample["resps"][0][0] for sample in theirs] == [row["completion"] for row in ours]
    assert [sample["exact_match"] for sample in theirs] == [row["completion"] in row["golds"] for row in ours]
    assert [countdown(sample["doc"], sample["resps"][0][0]) for sample in theirs] == rewards
    assert sum(rewards) / 320 == pytest.approx(Run(Path("run")).read_summary()["test"]["reward"])


def countdown(row: dict[str, Any], completion: str) -> float:
    """Return 1 for an expression with each digit once and the target as its value."""
    digits = sorted(filter(str.isdigit, completion)) == sorted(map(str, row["numbers"]))
    if not digits or "**" in completion or not set(completion) <= set("0123456789+-*() "):
        return 0.0
    try:
        return float(EXPRESSIONS.compile_expression(completion)() == int(row["target"]))
    except jinja2.TemplateSyntaxError:
        return 0.0


def check_scores(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], mean: bool) -> None:
    """Check log-likelihoods to 1e-5, that no row is a tie, right rows, and the mean of summary.json."""
    tokenizer, right = AutoTokenizer.from_pretrained("model"), []
    for row, sample in zip(ours, theirs, strict=True):
        lengths = [len(tokenizer.encode(text, add_special_tokens=False)) for _, text in sample["arguments"]]
        scores = torch.tensor([resp[0][0] for resp in sample["resps"]], dtype=torch.float64)
        scores /= torch.tensor(lengths) if mean else 1
        assert abs(float(scores.diff())) > 1e-5, f"a tie: {row}"
        probabilities = row["probabilities"].values() if "label" in row else row["probabilities"]
        assert list(probabilities) == pytest.approx(scores.softmax(0).tolist(), abs=1e-5)
        assert row.get("scores", []) == pytest.approx(scores.tolist() if "scores" in row else [], rel=1e-5)
        right.append(int(scores.argmax()) == sample["target"])
        assert right[-1] == (row["predicted"] == row["label"] if "label" in row else row["accuracy"])
        assert mean or right[-1] == sample["acc"]
    assert sum(right) / len(right) == pytest.approx(Run(Path("run")).read_summary()["test"]["accuracy"])
