"""Rewards as a run calls them: the user's functions in the worker, mistakes in one line, mixtures, the null control."""

import datetime
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.errors import RunFailed, UserError
from mezo_cli.rewards import worker
from mezo_cli.rewards.scoring import Reward, RewardBatch
from mezo_cli.rewards.spec import parse_reward
from tests.command_line import environment

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file with a function `score`, and return its setting."""

    def write(body: str, arguments: str = "completions, rows", name: str = "reward.py") -> str:
        lines = "\n".join(f"    {line}" for line in body.splitlines())
        (tmp_path / name).write_text(f"import os, subprocess, sys, time\n\n\ndef score({arguments}):\n{lines}\n")
        return f"{tmp_path / name}:score"

    return write


def score(reward: Reward, completions: Sequence[str], rows: Any = None, samples: int = 1) -> RewardBatch:
    """Score completions of rows that a data file has on lines 1, 2, ..., `samples` of each."""
    n = len(completions)
    golds = [[f"gold {i // samples}"] for i in range(n)]
    locations = [f"train.jsonl:{i // samples + 1}" for i in range(n)]
    seeds, prompts = [1000 + i for i in range(n)], [f"prompt {i // samples}" for i in range(n)]
    return reward.score(batch_of(completions, rows or [{}] * n, golds, seeds, locations, prompts))


def batch_of(completions: Any, rows: Any, golds: Any, seeds: Any, locations: Any, prompts: Any = None) -> Any:
    of_rows = {"rows": rows, "golds": golds, "prompts": prompts or [""] * len(rows), "locations": locations}
    return {"completions": completions, "seed": seeds, **of_rows}


def failure(setting: Any, completions: Sequence[str], **options: Any) -> str:
    """The line with which a batch ends a run."""
    with Reward(parse_reward(setting), **options) as reward, pytest.raises(RunFailed) as error:
        score(reward, completions)
    assert "\n" not in str(error.value)
    return str(error.value)


def refusal(setting: Any, **options: Any) -> str:
    """The line with which a reward is refused at the start."""
    rows: Any = [{"x": 1}, {"y": 2}]
    with pytest.raises(UserError) as error, Reward(parse_reward(setting), **options) as reward:
        reward.check(batch_of([], rows, [["a"], ["b"]], [0, 1], ["train.jsonl:1", "train.jsonl:2"]), ["x", "y"])
    assert "\n" not in str(error.value)
    return str(error.value)


def is_gone(pid: int) -> bool:
    """Whether a process ends within 10 s."""
    for _ in range(200):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


# --- what a function gets and gives ---


def test_a_function_gets_every_column_and_what_it_asks_for(write: Write) -> None:
    body = """
first = {"reward": len(rows[0]["list"]), "date": rows[0]["date"] == "2026-11-23", "seed": seed[0]}
second = {"reward": rows[1]["record"]["x"], "date": golds == [["gold 0"], ["gold 1"]], "seed": seed[1]}
return [first, second]
"""
    rows = [{"list": [1, 2], "date": datetime.date(2026, 11, 23)}, {"record": {"x": 0.1}}]
    with Reward(parse_reward(write(body, "completions, rows, seed, golds"))) as reward:
        batch = score(reward, ["a", "b"], rows)
    assert batch.values.tolist() == [2.0, 0.1]
    assert {name: part.tolist() for name, part in batch.parts.items()} == {"date": [1, 1], "seed": [1000, 1001]}


PARAMETERS = {  # and what is 6 and 7 characters long
    "prompts, completions, **kwargs": "completions",  # TRL's order
    "completions, target, **kwargs": "target",
    "rows, completions": "completions",
    "golds, seed, target, scale=2": "target",
    "**everything": "everything['target']",
    "other, *, golds=None, rows=None": "[row['target'] for row in rows]",
}


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_parameters_go_by_name(write: Write, parameters: str) -> None:
    rows: list[dict[str, Any]] = [{"target": "t" * 6, "completions": "a column", "other": 1}, {"target": "t" * 7}]
    with Reward(parse_reward(write(f"return [len(text) for text in {PARAMETERS[parameters]}]", parameters))) as reward:
        assert score(reward, ["c" * 6, "c" * 7], rows).values.tolist() == [6.0, 7.0]


def test_kwargs_get_all_and_the_names_of_mezo_win_over_columns() -> None:
    seen: list[dict[str, Any]] = []
    batch = batch_of(["aa"], [{"target": 9, "completions": "a column"}], [["g"]], [3], ["row"], ["p"])
    with Reward(parse_reward(lambda **everything: seen.append(everything) or [1])) as reward:
        reward.score(batch)
    assert seen == [{name: batch[name] for name in worker.NAMES} | {"target": [9]}]


REFUSED = {
    "texts, examples": "takes 'texts', which is no column; parameters go by name: completions, rows, "
    "prompts, golds, seed, a column of the rows, or **kwargs for all; the columns are: x, y",
    "completions, *rest": "takes (completions, *rest), 'rest' by position alone; parameters go by name: completions,",
    "completions, rows, /": "takes (completions, rows, /), 'completions' by position alone",
}


@pytest.mark.parametrize("parameters", REFUSED)
def test_other_parameters_are_refused_in_one_line(write: Write, parameters: str) -> None:
    assert REFUSED[parameters] in refusal(write("return [1] * len(completions)", parameters))
    namespace: dict[str, Any] = {}
    exec(f"def function({parameters}): pass", namespace)
    assert REFUSED[parameters] in refusal(namespace["function"])


def test_what_a_function_prints_does_not_reach_the_protocol(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
print("{}")
os.write(1, b"written\\n")
subprocess.run(["echo", "child"])
return [len(sys.stdin.read())]
"""
    setting = write(body)
    with Reward(parse_reward(setting)) as reward:
        assert score(reward, ["a"]).values.tolist() == [0.0]
        assert score(reward, ["a"]).values.tolist() == [0.0]
    out, err = capfd.readouterr()
    assert (out, sorted(set(err.split()))) == ("", ["child", "written", "{}"])


def test_the_worker_is_a_light_process_of_its_own(write: Write) -> None:
    loaded = "'torch': 'torch' in sys.modules, 'forked': 'multiprocessing' in sys.modules"
    setting = write(f"return [{{'reward': os.getpid(), {loaded}}}]")
    with Reward(parse_reward(setting)) as reward:
        batch = score(reward, ["a"])
    assert (batch.parts["torch"], batch.parts["forked"]) == ([0.0], [0.0])
    assert batch.values[0] != os.getpid()
    assert is_gone(int(batch.values[0]))


def test_a_file_and_a_module_are_imported(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    with Reward(parse_reward(write("import neighbour\nreturn [neighbour.VALUE]"))) as reward:
        assert score(reward, ["a"]).values.tolist() == [7.0]
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "package").mkdir()
    write("return [8]", name="package/module.py")
    with Reward(parse_reward("package.module:score")) as reward:
        assert score(reward, ["a"]).values.tolist() == [8.0]
    assert "package" not in sys.modules


MISTAKES = {
    "return [1 / len(c) for c in completions]": "raised ZeroDivisionError: division by zero (",
    "return [1.0 for c in completions if c]": "returned 0 values for 1 completions",
    "return [float('nan') if not c else 1 for c in completions]": "returned nan as reward: expected a finite number",
    "return [{'reward': 1, 'x': c or None} if not c else 1 for c in completions]": "returned None as x",
    "return [{'rewrad': 1} if not c else {'reward': 1} for c in completions]": "returned a dict without 'reward'",
    "return ['1' if not c else 1 for c in completions]": "returned '1' as reward",
    "return [{'reward': 1, c: 1} for c in ['' if not c else 'x' for c in completions]]": "returned the parts",
    "'' in completions and sys.exit('done')\nreturn [1] * len(rows)": "raised SystemExit: done",
    "'' in completions and os._exit(3)\nreturn [1] * len(rows)": "ended its process by exit status 3",
    "if '' in completions: raise KeyboardInterrupt\nreturn [1] * len(rows)": "raised KeyboardInterrupt (",
    "if '' in completions: raise GeneratorExit\nreturn [1] * len(rows)": "raised GeneratorExit (",
    "return [10**5000 if not c else 1 for c in completions]": "expected a finite number",
    "x = []\nfor _ in range(10**5): x = [x]\nreturn [x if not c else 1 for c in completions]": "as reward: expected",
    "'' in completions and os.write(4, b'5\\n')\nreturn [1] * len(rows)": "wrote b'5' to the pipe",
    "'' in completions and os.write(4, b'{\"result\": [[{\"reward\": 9}]]}\\n')\nreturn [1] * len(rows)": "wrote b'{",
    "return [{'reward': 1, '\\ud800': 1} if not c else 1 for c in completions]": "a part named '\\ud800', which",
    "if '' in completions: raise ValueError('\\ud800')\nreturn [1] * len(rows)": "raised ValueError: \\ud800 (",
    "return [{'reward': 1, 'std': 1} if not c else {'reward': 1} for c in completions]": "returned a part named 'std'",
}


@pytest.mark.parametrize("body", MISTAKES)
def test_a_mistake_ends_the_run_with_the_row_or_counts_zero(write: Write, body: str) -> None:
    setting = write(body)
    line = failure(setting, ["a", "b", "", "d"])
    assert line.startswith(f"train.jsonl:3: objective.reward={setting}: ")
    assert MISTAKES[body] in line
    with Reward(parse_reward(setting), on_error="zero") as reward:
        batch = score(reward, ["a", "b", "", "d"])
    assert (batch.errors, batch.values.tolist()) == (1, [1.0, 1.0, 0.0, 1.0])


def test_parts_have_the_same_names_in_every_batch(write: Write) -> None:
    with Reward(parse_reward(write("return [{'reward': 1, c: 2} for c in completions]"))) as reward:
        assert score(reward, ["a", "a"]).parts["a"].tolist() == [2.0, 2.0]
        with pytest.raises(
            RunFailed, match=r"returned the parts \['b', 'reward'\], and \['a', 'reward'\] for the rows"
        ):
            score(reward, ["b"])


def test_a_raise_names_the_line_of_the_users_file(write: Write) -> None:
    setting = write("import json\nreturn [json.loads(c) for c in completions]")
    file = setting.removesuffix(":score")
    assert failure(setting, ["1", "{"]).endswith(f"({file}:6)")


def test_what_fails_only_together_names_the_rows(write: Write) -> None:
    line = failure(write("return [1 / (len(rows) == 1)] * len(rows)"), ["a", "b"])
    assert line.startswith("train.jsonl:1 to train.jsonl:2, 2 completions together: ")


def test_a_timeout_names_its_row_and_kills_what_was_started(write: Write, tmp_path: Path) -> None:
    slow = f"subprocess.Popen(['sh', '-c', 'echo $$ >> {tmp_path}/pids; sleep 60']).wait()"
    setting = write(f"if '' in completions: {slow}\nreturn [{{'reward': 1, 'pid': os.getpid()}} for _ in completions]")
    line = failure(setting, ["a", ""], timeout=0.5)
    assert line == f"train.jsonl:2: objective.reward={setting}: took longer than 0.5 s (objective.reward_timeout)"
    with Reward(parse_reward(setting), timeout=3, on_error="zero") as reward:  # a sound row takes less at any load
        before = score(reward, ["a"])
        batch = score(reward, ["a", ""])
        after = score(reward, ["a"])
    assert (batch.errors, batch.values.tolist()) == (1, [1.0, 0.0])
    assert before.parts["pid"][0] != after.parts["pid"][0]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert pids
    assert all(is_gone(pid) for pid in [*pids, int(before.parts["pid"][0]), int(after.parts["pid"][0])])


def test_a_file_that_changes_during_the_run_is_refused_when_the_worker_starts_again(write: Write) -> None:
    body = "'' in completions and os._exit(3)\nreturn [1] * len(rows)"
    with Reward(parse_reward(write(body)), on_error="zero") as reward:
        assert score(reward, [""]).errors == 1
        write(body + " or 0")
        with pytest.raises(RunFailed, match=r"reward\.py has changed since"):
            score(reward, ["a"])


def test_the_start_says_what_does_not_import(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = write("return 1")
    assert refusal(setting.replace(":score", ":socre")).endswith("reward.py has no function 'socre'")
    (tmp_path / "reward.py").write_text("import os\n\nimport nosuchmodule\n")
    line = refusal(setting)
    assert "cannot be imported: ModuleNotFoundError: No module named 'nosuchmodule'" in line
    assert "reward.py:3)" in line
    (tmp_path / "reward.py").write_text("def score(:\n")
    assert "cannot be imported: SyntaxError" in refusal(setting)
    (tmp_path / "reward.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(worker, "START_LIMIT", 0.5)
    assert "took longer than 0.5 s" in refusal(setting)


def test_the_check_refuses_a_reward_that_fails_on_every_row_and_sees_one_that_differs(write: Write) -> None:
    assert "train.jsonl:1: " in refusal(write("return None"))
    assert "returned a NoneType for 1 completions" in refusal(write("return None"), on_error="zero")
    rows: Any = batch_of([], [{}, {}], [["a"], []], [0, 1], ["1", "2"])
    with Reward(parse_reward(write("return [completions == ['a', '']] * len(rows)"))) as reward:
        assert reward.check(rows)
        assert score(reward, ["a", ""]).values.tolist() == [1.0, 1.0]
    with Reward(parse_reward(write("return [time.time()] * len(rows)"))) as reward:
        assert not reward.check(rows)


# --- the end of mezo ---

PARENT = """
import sys
from mezo_cli.rewards.scoring import Reward
from mezo_cli.rewards.spec import parse_reward
with Reward(parse_reward(sys.argv[1]), timeout=60) as reward:
    names = ("completions", "prompts", "locations")
    reward.score({"rows": [{}], "golds": [[]], "seed": [0], **dict.fromkeys(names, ["a"])})
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_the_worker_ends_with_mezo_in_the_middle_of_a_call(write: Write, tmp_path: Path, end: signal.Signals) -> None:
    body = f"""
child = subprocess.Popen(["sleep", "60"])
with open("{tmp_path}/new", "w") as file:
    print(os.getpid(), child.pid, file=file)
os.rename("{tmp_path}/new", "{tmp_path}/pids")
child.wait()
"""
    setting = write(body)
    command = [sys.executable, "-c", PARENT, setting]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL, start_new_session=True) as parent:
        for _ in range(600):
            if (tmp_path / "pids").exists():
                break
            time.sleep(0.05)
        if end == signal.SIGINT:
            os.killpg(parent.pid, end)  # as the terminal sends it
        else:
            parent.send_signal(end)
    assert all(is_gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


# --- mixtures, the null control, callables ---


def test_a_mixture_is_the_weighted_sum_and_its_parts() -> None:
    setting = {"exact": 2, "length": {"weight": 0.1}, "contains": 0}
    with Reward(parse_reward(setting)) as reward:
        batch = score(reward, ["gold 0", "gold 1!"])
    assert batch.values.tolist() == [2.0, -0.1]
    assert list(batch.parts) == ["exact", "length", "contains"]
    assert [part.tolist() for part in batch.parts.values()] == [[1.0, 0.0], [-0.0, -1.0], [1.0, 1.0]]


def test_shuffled_scores_against_another_row_that_follows_from_the_seeds(write: Write) -> None:
    setting = write("return [{'reward': row['i'], 'seed': s} for row, s in zip(rows, seed)]", "completions, rows, seed")
    rows, numbers = [{"i": i // 2} for i in range(20)], [i // 2 for i in range(20)]
    with Reward(parse_reward(f"shuffled:{setting}")) as reward:
        batch, again = (score(reward, ["x"] * 20, rows, samples=2) for _ in range(2))
        other = reward.score(batch_of(["x"] * 20, rows, [[]] * 20, range(20), [str(i) for i in numbers]))
        single = score(reward, ["x"], [{"i": 5}])
    values = batch.values.tolist()
    assert values == again.values.tolist() != other.values.tolist()
    assert sorted(values) == numbers
    assert all(value != number for value, number in zip(values, numbers, strict=True))
    assert values[::2] == values[1::2]  # samples of a row go together
    assert batch.parts[Path(setting).name].tolist() == numbers
    assert batch.parts["seed"].tolist() == [1000 + i for i in range(20)]
    assert single.values.tolist() == [5]


def test_a_callable_runs_in_this_process_without_a_timeout() -> None:
    rows: list[dict[str, Any]] = [{"x": object()}, {}]

    def function(completions: list[str], rows: list[dict[str, Any]], seed: list[int]) -> list[float]:
        time.sleep(0.3)
        return [float(os.getpid()) if row is rows[0] and "x" in row else math.nan for row in rows]

    spec = parse_reward(function)
    with Reward(spec, timeout=0.1, on_error="zero") as reward:
        batch = score(reward, ["a", "b"], rows)
    assert (batch.values.tolist(), batch.errors) == ([float(os.getpid()), 0.0], 1)
    assert spec.record() | {"sha256": None} == {"name": spec.describe(), "in_process": True, "sha256": None}
    assert "takes 'text', which is no column" in refusal(lambda text: [])
