"""The conformance tests of optimizers and objectives on a GPU: `pytest -m cuda`. Every other test sees none."""

import pytest
import torch

from mezo_cli.testing import objectives, optimizers
from tests import tiny

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, and `pytest -m cuda`", allow_module_level=True)

pytestmark = pytest.mark.cuda


class OnGpu:
    device = "cuda"


class TestMezo(OnGpu, optimizers.Conformance):
    name = "mezo"


class TestMezoMomentum(OnGpu, optimizers.Conformance):
    name = "mezo_momentum"
    lr = 0.005


class TestMezoAdam(OnGpu, optimizers.Conformance):
    name = "mezo_adam"
    lr = 0.3


class TestAdamW(OnGpu, optimizers.Conformance):
    name = "adamw"
    lr = 0.1


class TestSgd(OnGpu, optimizers.Conformance):
    name = "sgd"


class TestMlm(OnGpu, objectives.Conformance):
    name = "mlm"


class TestCls(OnGpu, objectives.Conformance):
    name = "cls"


class TestLm(OnGpu, objectives.Conformance):
    name = "lm"

    @pytest.fixture
    def settings(self, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
        return [f"model.path={tiny.decoder(tmp_path_factory.mktemp('gpt2'))}"]
