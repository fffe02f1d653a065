"""The experiments of the paper's large-model table, run as they are documented, on a tiny random OPT and a few rows."""

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.command_line import mezo
from tests.opt_tasks import FOLDER

SMALL = ["model.device=cpu", "data=files", "data.train_size=4", "data.dev_size=2", "data.test_size=2"]
STEPS = ["steps=2", "eval_every=1", "batch_size=2", "objective.max_new_tokens=4"]
CASES = {  # experiment -> task, number of runs; those of one run get one lr
    "zero_shot": ("record", 1),
    "icl": ("copa", 1),
    "mezo": ("copa", 2),
    "mezo_lora": ("sst2", 1),
    "mezo_prefix": ("squad", 1),
    "ft": ("boolq", 1),
    "non_differentiable": ("drop", 1),
}


@pytest.mark.slow
@pytest.mark.usefixtures("eager_kernels")
def test_each_row_runs_by_its_one_command_and_stands_in_the_table(tmp_path: Path) -> None:
    opt = tiny.decoder(tmp_path / "opt-13b", "opt")
    for name, (task, count) in CASES.items():
        steps = [] if name in ("zero_shot", "icl") else STEPS if task in ("squad", "drop") else STEPS[:-1]
        steps = [*steps, "optimizer.lr=1e-3"] if count == 1 and steps else steps
        icl = ["data.train_size=null", "task.demonstrations=3"] if name == "icl" else []
        words = [f"experiment=paper/opt-13b/{name}", f"task={task}", f"model.path={opt}", *SMALL, *steps, *icl]
        done = mezo("train", "-m", *words, f"data.dir={FOLDER}/{task}.jsonl", f"hydra.sweep.dir={tmp_path}/runs/{name}")
        assert done.code == 0, (name, done.out, done.err)
        assert len(list((tmp_path / "runs" / name).glob("*/summary.json"))) == count, name
    document = json.loads(mezo("compare", "--paper", "--table", "opt", "--json", tmp_path / "runs").out)
    cells = {(cell["row"], cell["task"]): cell for cell in document["cells"] if cell["n"]}
    rows = ["zero-shot", "ICL", "MeZO", "MeZO LoRA", "MeZO prefix", "FT"]
    assert set(cells) == {
        *((f"{row}, opt-13b", task) for row, (task, _) in zip(rows, CASES.values(), strict=False)),
        ("MeZO prefix (reward), opt-13b", "drop"),
    }
    for (row, task), cell in cells.items():
        assert cell["metric"] == ("f1" if task in ("squad", "drop") else "accuracy"), row
        assert 0 <= cell["test_mean"] <= 100, row
    assert "steps=2 not 20000" in cells["MeZO, opt-13b", "copa"]["unlike_paper"]
