"""Conformance tests of rewards. Every built-in reward passes them, and a plug-in's test file runs them by

    from mezo_cli.testing import rewards

    class TestMine(rewards.Conformance):
        name = "mine"
        cases = [("a completion", {"column": "of its row"}, ["a gold answer"], 1.0)]

They need pytest alone: no model, and nothing from the network.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest

from mezo_cli.config.registry import REWARDS
from mezo_cli.errors import UserError
from mezo_cli.rewards.scoring import Reward, RewardBatch
from mezo_cli.rewards.spec import parse_reward

UNUSUAL = ["", " ", "\n", "0" * 5000, "((((" * 2000, "</answer><answer>", "\\boxed{", "#### "]
UNUSUAL += ["\u2212\u00e9\U0001f600\x00"]


class Conformance:
    """What every reward must do. A subclass gives its name and cases.

    Attributes:
        name: the name in `objective.reward`.
        settings: of the reward, beside its weight.
        cases: a completion, the columns of its row, its gold answers, and its reward.
    """

    name: ClassVar[str]
    settings: ClassVar[Mapping[str, Any]] = {}
    cases: ClassVar[list[tuple[str, dict[str, Any], list[str], float]]]

    @pytest.fixture(scope="class")
    def reward(self) -> Iterator[Reward]:
        """Open the reward in a worker, as a run does."""
        with Reward(parse_reward({self.name: self.settings})) as reward:
            yield reward

    def test_its_name_is_registered(self) -> None:
        """Its name is in the table or an entry point."""
        assert self.name in REWARDS.names

    def test_an_unknown_setting_is_refused_by_name(self) -> None:
        """A misspelled setting ends in one line."""
        with pytest.raises(UserError, match=rf"objective\.reward\.{self.name}\.nosuch"):
            parse_reward({self.name: {**self.settings, "nosuch": 1}})

    def test_each_case_has_its_reward(self, reward: Reward) -> None:
        """Completions of one batch get the rewards of the cases."""
        batch = self.score(reward, range(len(self.cases)))
        assert batch.values.tolist() == pytest.approx([case[3] for case in self.cases])

    def test_a_row_does_not_depend_on_the_others(self, reward: Reward) -> None:
        """A row has the same reward alone, in a batch and in another order, bit for bit, every time."""
        together = self.score(reward, range(len(self.cases))).values.tolist()
        assert [self.score(reward, [i]).values[0] for i in range(len(self.cases))] == together
        assert self.score(reward, range(len(self.cases))[::-1]).values.tolist() == together[::-1]

    def test_whatever_a_model_writes_has_a_reward(self, reward: Reward) -> None:
        """Empty, long and malformed completions get a finite number: a run stops at a reward that raises."""
        assert self.score(reward, [0] * len(UNUSUAL), UNUSUAL).errors == 0

    def score(self, reward: Reward, numbers: Any, texts: Any = None) -> RewardBatch:
        """Score some of the cases, with their own completions or others."""
        completions, rows, golds, _ = zip(*(self.cases[i] for i in numbers), strict=True)
        batch = {"rows": rows, "golds": golds, "prompts": golds, "seed": list(numbers), "locations": numbers}
        return reward.score({**batch, "completions": texts or completions})
