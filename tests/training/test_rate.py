"""optimizer.lr=auto: four rates race on rows of train, and the run is one with the chosen rate given."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from mezo_cli.config.rates import ROWS, advise, find_rate
from mezo_cli.objectives.scoring import Evaluation, mean_of
from mezo_cli.runs import Run
from mezo_cli.training import auto
from tests.command_line import error_line, mezo, small
from tests.interruption import last_weights

pytestmark = pytest.mark.usefixtures("eager_kernels")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "choose-a-rate.md"
AUTO = "optimizer.lr=auto"


def words(roberta: Path, movies: Path, run: Path, *more: str) -> list[str]:
    return small(roberta, movies, run, "steps=20", "eval_every=10", "peft=lora", *more)


@pytest.mark.parametrize("more", [(), ("optimizer.samples=2", "data.batches=balanced", "model.compute_dtype=bfloat16")])
def test_the_run_has_the_chosen_rate(more: tuple[str, ...], roberta: Path, movies: Path, tmp_path: Path) -> None:
    assert mezo("train", *words(roberta, movies, tmp_path / "auto", AUTO, *more)).code == 0
    auto = Run(tmp_path / "auto")
    race = auto.info()["race"]
    rates = sorted(map(float, race["losses"]))
    assert rates == [0.0033, 0.01, 0.03, 0.09]
    first = float(min(race["losses"], key=lambda name: race["losses"][name]))
    assert race["chosen"] in (0.01, first if first <= 0.01 else rates[rates.index(first) - 1])
    assert yaml.safe_load((auto.path / "config.yaml").read_text())["optimizer"]["lr"] == race["chosen"]
    given = words(roberta, movies, tmp_path / "given", f"optimizer.lr={race['chosen']}", *more)
    assert mezo("train", *given).code == 0
    plain = Run(tmp_path / "given")
    assert auto.trajectory.read_bytes() == plain.trajectory.read_bytes()
    assert last_weights(auto.path) == last_weights(plain.path)
    per_step = 2 * (2 if more else 1)
    assert race["steps"] == 1
    assert race["forwards"] == 4 * per_step
    assert auto.read_summary()["forwards"] == plain.read_summary()["forwards"] + race["forwards"]


def test_another_rate_must_be_better_beyond_chance() -> None:
    def ended(losses: torch.Tensor) -> Evaluation:
        return Evaluation(float(losses.mean()), {}, losses, samples={"loss": mean_of(losses.numpy())})

    usual = torch.linspace(0.5, 0.9, 40)
    noise = 0.3 * torch.randn(40, generator=torch.Generator().manual_seed(0))
    lucky, lower, lowest = ended(usual - 0.02 + noise - noise.mean()), ended(usual - 0.02), ended(usual - 0.1)
    assert auto.choose({1.0: lucky, 3.0: ended(usual), 9.0: None}, 3.0) == 3.0
    assert auto.choose({1.0: lower, 3.0: ended(usual), 9.0: lowest}, 3.0) == 9.0
    assert auto.choose({1.0: lower, 3.0: None, 9.0: lucky}, 3.0) == 1.0


def test_of_a_larger_rate_that_wins_the_next_lower_one_trains_the_run() -> None:
    one = Evaluation(0.5, {}, torch.tensor([0.5]))
    raced = {1.0: one, 3.0: one, 9.0: one, 27.0: one}
    assert [auto.for_more_steps(raced, first, 3.0) for first in raced] == [1.0, 3.0, 3.0, 9.0]
    assert auto.for_more_steps(raced | {3.0: None, 9.0: None}, 27.0, 3.0) == 27.0


def test_a_race_that_was_stopped_begins_anew_and_a_run_has_one_race(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    races, whole = [], auto.race

    def stop(prepared: object, lr: float, tick: object) -> float:
        races.append(lr)
        if len(races) == 3:
            raise KeyboardInterrupt
        return whole(prepared, lr, tick)  # type: ignore[arg-type]

    monkeypatch.setattr(auto, "race", stop)
    assert mezo("train", *words(roberta, movies, tmp_path / "run", AUTO)).code != 0
    assert mezo("resume", tmp_path / "run").code == 0
    assert races[:3] == races[3:6]
    assert mezo("resume", tmp_path / "run", "steps=22").code == 0
    assert len(races) == 7


def test_max_seconds_bounds_the_race(roberta: Path, movies: Path, tmp_path: Path) -> None:
    limited = words(roberta, movies, tmp_path / "run", AUTO, "max_seconds=1e-9")
    assert mezo("train", *limited).code == 130
    race = Run(tmp_path / "run").info()["race"]
    assert (len(race["losses"]), race["chosen"], race["forwards"]) == (1, 0.01, 4)  # cut in the second rate's step
    assert Run(tmp_path / "run").info()["stopped"] == {"by": "max_seconds", "step": 1}
    assert mezo("resume", tmp_path / "run", "max_seconds=null").code == 0
    assert Run(tmp_path / "run").info()["race"] == race


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["peft=bias"], "there are rates to begin with for peft=head, peft=lora, peft=none, peft=prefix alone"),
        (["init=linear_probe", "peft=head"], "rates are tried without init=linear_probe"),
        (["optimizer=lozo"], "optimizer.lr=auto: allowed is a finite number"),
        (["optimizer=null_signs"], "optimizer.lr=auto: allowed is a finite number"),
    ],
)
def test_what_has_no_race_is_refused(more: list[str], why: str, roberta: Path, movies: Path, tmp_path: Path) -> None:
    line = error_line(mezo("train", *words(roberta, movies, tmp_path / "run", *more, AUTO)))
    assert why in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["doctor", "tune"])
def test_commands_that_need_a_rate_say_so(command: str, roberta: Path, movies: Path, tmp_path: Path) -> None:
    given = [word for word in words(roberta, movies, tmp_path / "run", AUTO) if not word.startswith("hydra")]
    assert "optimizer.lr=auto: " in error_line(mezo(command, *given))


def test_the_page_has_the_table() -> None:
    lines = [re.findall(r"[^|]+", line) for line in PAGE.read_text().splitlines() if "| `peft=" in line]
    table = {(size.strip(), peft.strip().strip("`")): float(lr) for size, peft, lr, *_ in lines if "parameters" in size}
    shown = {3e7: "below 30 M", 2e8: "below 200 M", 6e8: "below 600 M", float("inf"): "600 M and more"}
    assert table == {(f"{shown[row.below]} parameters", f"peft={row.peft}"): row.lr for row in ROWS}
    assert "begin with 0.0002" in advise(10**6, "none", above=1e-5)
    assert not advise(10**6, "none", below=1e-5)  # a lower rate is asked for
    assert find_rate(10**9, "head") is None
