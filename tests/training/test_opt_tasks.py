"""The tasks and experiments of the paper's OPT table, run on a tiny random OPT and a few rows."""

import json
from pathlib import Path

import pytest

from mezo_cli.config.registry import OPTIMIZERS
from mezo_cli.runs import Run
from tests import tiny
from tests.command_line import error_line, mezo, ok
from tests.interruption import interrupted_at
from tests.opt_tasks import CHOICES, FOLDER, GENERATED, WORDS

pytestmark = pytest.mark.usefixtures("eager_kernels")

CASES = {
    **{f"{name}, choice": ["objective=choice"] for name in CHOICES},
    **{f"{name}, choice, lm": ["objective=choice", "objective.loss=lm"] for name in ("copa", "record")},
    **{f"{name}, lm": ["objective=lm"] for name in [*WORDS][:2]},  # the others differ in words alone
    **{f"{name}, generate": ["objective=generate", "objective.loss=lm"] for name in GENERATED},
    "squad, generate, reward": ["objective=generate", "objective.reward=f1"],
}
SHORT = ["model.device=cpu", "steps=3", "batch_size=3", "eval_every=1", "metric=loss", "optimizer.lr=1e-3"]
ROWS = ["data=files", "data.train_size=4", "data.dev_size=2", "data.test_size=2", "data.seed=0", "test_at_start=false"]


def words(case: str, opt: Path) -> list[str]:
    task = case.split(",")[0]
    long = ["objective.max_new_tokens=4"] if "generate" in case else []
    return [f"task={task}", *CASES[case], *long, f"model.path={opt}", *SHORT, *ROWS, f"data.dir={FOLDER}/{task}.jsonl"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES)
def test_a_task_trains_resumes_and_is_evaluated(case: str, opt: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with interrupted_at(OPTIMIZERS.implementation("mezo"), "step", 3):
        assert mezo("train", "model=opt-125m", *words(case, opt), f"hydra.run.dir={run}").code == 130
    ok("resume", run)
    summary = Run(run).read_summary()
    document = json.loads(mezo("eval", run, "--json").out)
    assert document["loss"] == summary["test"]["loss"]
    metric = "f1" if "generate" in case else "accuracy"
    assert 0 <= document[metric] == summary["test"][metric] <= 1


@pytest.mark.parametrize(
    ("task", "objective", "parts"),
    [
        ("squad", "choice", ["task 'squad' has no prompt with candidates", "or use objective=generate, for which"]),
        ("squad", "lm", ["task.labels=[]: task 'squad' has none", "or use objective=generate, for which"]),
        ("cb", "mlm", ["task.template is not set", "or use objective=lm or objective=choice, for which"]),
        ("copa", "generate", ["task 'copa' has no prompt to continue", "or use objective=choice, for which"]),
        ("copa", "lm", ["task 'copa' has no template for decoders", "or use objective=choice, for which"]),
        ("record", "choice objective.loss=f1", ["objective.loss=f1", "cross_entropy, lm, accuracy"]),
        ("squad", "generate objective.loss=cross_entropy", ["objective.loss=cross_entropy", "reward, lm"]),
    ],
)
def test_an_objective_or_loss_that_does_not_fit_is_said(task: str, objective: str, parts: list[str], opt: Path) -> None:
    where = [f"data.dir={FOLDER}/{task}.jsonl", *ROWS, f"model.path={opt}", "model=opt-125m"]
    line = error_line(mezo("train", f"task={task}", *f"objective={objective}".split(), *where))
    assert all(part in line for part in parts), line


SMALL = ["model.device=cpu", "data=files", "data.train_size=4", "data.dev_size=2", "data.test_size=2"]
STEPS = ["steps=2", "eval_every=1", "batch_size=2", "objective.max_new_tokens=4"]
ROWS_OF_TABLE = {  # experiment -> task, number of runs; those of one run get one lr
    "zero_shot": ("record", 1),
    "icl": ("copa", 1),
    "mezo": ("copa", 2),
    "mezo_lora": ("sst2", 1),
    "mezo_prefix": ("squad", 1),
    "ft": ("boolq", 1),
    "non_differentiable": ("drop", 1),
}


@pytest.mark.slow
def test_each_row_runs_by_its_one_command_and_stands_in_the_table(tmp_path: Path) -> None:
    opt = tiny.decoder(tmp_path / "opt-13b", "opt")
    for name, (task, count) in ROWS_OF_TABLE.items():
        steps = [] if name in ("zero_shot", "icl") else STEPS if task in ("squad", "drop") else STEPS[:-1]
        steps = [*steps, "optimizer.lr=1e-3"] if count == 1 and steps else steps
        icl = ["data.train_size=null", "task.demonstrations=3"] if name == "icl" else []
        words = [f"experiment=paper/opt-13b/{name}", f"task={task}", f"model.path={opt}", *SMALL, *steps, *icl]
        ok("train", "-m", *words, f"data.dir={FOLDER}/{task}.jsonl", f"hydra.sweep.dir={tmp_path}/runs/{name}")
        assert len(list((tmp_path / "runs" / name).glob("*/summary.json"))) == count, name
    document = json.loads(mezo("compare", "--paper", "--table", "opt", "--json", tmp_path / "runs").out)
    cells = {(cell["row"], cell["task"]): cell for cell in document["cells"] if cell["n"]}
    rows = ["zero-shot", "ICL", "MeZO", "MeZO LoRA", "MeZO prefix", "FT"]
    assert set(cells) == {
        *((f"{row}, opt-13b", task) for row, (task, _) in zip(rows, ROWS_OF_TABLE.values(), strict=False)),
        ("MeZO prefix (reward), opt-13b", "drop"),
    }
    for (row, task), cell in cells.items():
        assert cell["metric"] == ("f1" if task in ("squad", "drop") else "accuracy"), row
        assert 0 <= cell["test_mean"] <= 100, row
    assert "steps=2 not 20000" in cells["MeZO, opt-13b", "copa"]["unlike_paper"]
