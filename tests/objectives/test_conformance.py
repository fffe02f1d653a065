"""The conformance tests of mezo_cli.testing.objectives, run on every built-in objective."""

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mezo_cli.config.registry import REWARDS
from mezo_cli.config.schema import Config, Example
from mezo_cli.models import LoadedModel
from mezo_cli.objectives import OBJECTIVES
from mezo_cli.session.session import Session
from mezo_cli.testing import objectives
from tests import tiny
from tests.models.test_loading import SERVED, family
from tests.objectives.digits import digits

pytestmark = pytest.mark.usefixtures("eager_kernels")


class OnTinyModel(objectives.Conformance):
    """On a tiny model of a family, with further settings."""

    kind: ClassVar[str]
    words: ClassVar[list[str]] = []

    @pytest.fixture
    def settings(self, tmp_path: Path) -> list[str]:
        if self.kind == "electra":
            folder = family(tmp_path / "model", SERVED["electra"])
        else:
            make = tiny.roberta if self.kind == "roberta" else partial(tiny.decoder, kind=self.kind)
            folder = make(tmp_path / "model")
        return [f"model.path={folder}", *self.words]


class TestMlm(OnTinyModel):
    name = "mlm"
    kind = "roberta"
    words: ClassVar = ["task.first_limit=40"]


class TestMlmPadded(TestMlm):
    """A model family that is not packed."""

    kind = "electra"


class TestCls(TestMlm):
    name = "cls"


class TestLm(OnTinyModel):
    name = "lm"
    kind = "gpt2"


class TestLmPadded(TestLm):
    """A decoder family that is not packed, and label words of several tokens that share a prefix."""

    kind = "bloom"
    words: ClassVar = ["task.lm.label_words=[rather bad,rather very good]"]


CANDIDATES = ["task.choice.prompt='{sentence|strip} It was '", "task.choice.candidates=[' terrible',' rather good']"]


class TestChoice(OnTinyModel):
    """Candidates of one and several tokens; Llama's keys have rotary positions, and heads that share them."""

    name = "choice"
    kind = "llama"
    words: ClassVar = CANDIDATES

    def plain_loss(self, session: Session, plain: LoadedModel, rows: list[Any]) -> Tensor:
        """Return the cross-entropy over the mean log-probabilities of the candidates, each by itself."""
        means = [torch.stack([log_probs(plain, row, ids).mean() for ids in row.candidates]) for row in rows]
        return F.cross_entropy(torch.stack(means), torch.tensor([row.label for row in rows]))


class TestChoiceLm(TestChoice):
    """The likelihood of the right candidates, by counts of tokens; OPT's positions are learned."""

    kind = "opt"
    words: ClassVar = [*CANDIDATES, "objective.loss=lm"]

    def plain_loss(self, session: Session, plain: LoadedModel, rows: list[Any]) -> Tensor:
        return -torch.cat([log_probs(plain, row, row.candidates[row.label]) for row in rows]).mean()


class TestChoicePadded(TestChoice):
    """A decoder family that is not packed."""

    kind = "bloom"


def log_probs(plain: LoadedModel, row: Any, candidate: Any) -> Tensor:
    """Return the log-probability of each token of a candidate after the prompt, by a model's own forward."""
    ids = torch.tensor([*row.input_ids, *candidate])
    logits = plain.model(input_ids=ids[None]).logits[0, -len(candidate) - 1 : -1]
    return logits.log_softmax(-1)[range(len(candidate)), ids[-len(candidate) :]]


class TestGenerateReward(objectives.Conformance):
    """Minus the reward of completions, which has no gradient."""

    name = "generate"
    task = "demo-arithmetic"

    @pytest.fixture
    def settings(self) -> list[str]:
        return ["model.path=demo-decoder", "objective.reward=mine", "objective.max_new_tokens=6"]

    @pytest.fixture(autouse=True)
    def reward(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A reward that differs between almost any two completions."""
        monkeypatch.setitem(REWARDS.targets, "mine", f"{digits.__module__}:digits")

    def row(self, config: Config, text: str, where: str = "") -> Example:
        return Example((), -1, where, {"numbers": [len(text) % 10, 3, text], "target": 7, "answer": "3+4"})

    @pytest.fixture
    def rows(self, config: Config) -> list[Example]:
        return [self.row(config, text) for text in ("5", "9", "12", "8")]


class TestGenerateLm(TestGenerateReward):
    """The likelihood of answers, by counts of tokens."""

    @pytest.fixture
    def settings(self) -> list[str]:
        return ["model.path=demo-decoder", "objective.loss=lm", "objective.max_new_tokens=6"]

    def plain_loss(self, session: Session, plain: LoadedModel, rows: list[Any]) -> Tensor:
        """Return the mean over the tokens of all answers, each row by itself."""
        losses = []
        for row in rows:
            ids = torch.tensor([[*row.input_ids, *row.answer_ids]])
            logits = plain.model(input_ids=ids).logits[0, len(row.input_ids) - 1 : -1]
            losses.append(F.cross_entropy(logits.double(), ids[0, len(row.input_ids) :], reduction="none"))
        return torch.cat(losses).mean()


def test_every_built_in_objective_is_tested_here() -> None:
    classes = [value for value in globals().values() if isinstance(value, type)]
    tested = {one.name for one in classes if issubclass(one, objectives.Conformance) and one is not OnTinyModel}
    assert tested == set(OBJECTIVES.built_in)
