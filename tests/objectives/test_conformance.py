"""The conformance tests of mezo_cli.testing.objectives, run on every built-in objective."""

from pathlib import Path

import pytest

from mezo_cli.objectives import OBJECTIVES
from mezo_cli.testing import objectives
from tests import tiny
from tests.models.test_loading import SERVED, family

pytestmark = pytest.mark.usefixtures("eager_kernels")


@pytest.fixture(scope="module")
def electra(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked LM of a family that is not packed."""
    return family(tmp_path_factory.mktemp("electra"), SERVED["electra"])


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of a packed family."""
    return tiny.decoder(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of a family that is not packed."""
    return tiny.decoder(tmp_path_factory.mktemp("bloom"), "bloom")


class TestMlm(objectives.Conformance):
    name = "mlm"

    @pytest.fixture
    def settings(self, roberta: Path) -> list[str]:
        return [f"model.path={roberta}", "task.first_limit=40"]


class TestMlmPadded(objectives.Conformance):
    """A model family that is not packed."""

    name = "mlm"

    @pytest.fixture
    def settings(self, electra: Path) -> list[str]:
        return [f"model.path={electra}", "task.first_limit=40"]


class TestCls(objectives.Conformance):
    name = "cls"

    @pytest.fixture
    def settings(self, roberta: Path) -> list[str]:
        return [f"model.path={roberta}", "task.first_limit=40"]


class TestLm(objectives.Conformance):
    name = "lm"

    @pytest.fixture
    def settings(self, gpt2: Path) -> list[str]:
        return [f"model.path={gpt2}"]


class TestLmPadded(objectives.Conformance):
    """A decoder family that is not packed, and label words of several tokens that share a prefix."""

    name = "lm"

    @pytest.fixture
    def settings(self, bloom: Path) -> list[str]:
        return [f"model.path={bloom}", "task.lm.label_words=[rather bad,rather very good]"]


def test_every_built_in_objective_is_tested_here() -> None:
    classes = [value for value in globals().values() if isinstance(value, type)]
    tested = {one.name for one in classes if issubclass(one, objectives.Conformance)}
    assert tested == set(OBJECTIVES.built_in)
