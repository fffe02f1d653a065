"""The embedded proof of rewards: MeZO elicits the right style of answers, and shuffled rewards do not."""

import json
from pathlib import Path

import pytest

from tests.command_line import process

TRAIN = ["train", "experiment=demo-reward", "seed=42", "log_every=50"]


def last_dev(tmp_path: Path, *words: str) -> dict[str, float]:
    """Train, and return the figures of dev after the last step."""
    run = tmp_path / "run"
    result = process(*TRAIN, *words, f"hydra.run.dir={run}", cwd=tmp_path, MEZO_EAGER="")
    assert result.code == 0, result.err
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    dev = {line["step"]: line for line in lines if line["kind"] == "eval" and line["split"] == "dev"}
    return dev[50]


@pytest.mark.slow
def test_mezo_reaches_what_the_better_style_gives(tmp_path: Path) -> None:
    """It starts at 4% of dev; answers in parentheses are 8 tokens, and 37.5% of them are right."""
    dev = last_dev(tmp_path)
    assert dev["reward"] > 0.3
    assert dev["length"] > 7.9


@pytest.mark.slow
def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    dev = last_dev(tmp_path, "objective.reward=shuffled:countdown")
    assert dev["reward_countdown"] < 0.1
    assert dev["length"] < 7.1
