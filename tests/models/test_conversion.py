"""The memory of a model that is loaded in another dtype than its file's."""

import os
import re
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from mezo_cli import models
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import ModelConfig
from mezo_cli.models.loading import SEQUENTIAL
from mezo_cli.objectives import plain_check
from mezo_cli.system import peak_memory, reset_peak_memory
from mezo_cli.training.load import load_session
from tests import tiny

pytestmark = pytest.mark.usefixtures("released_pages")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 113 MB in float32, no tensor of which is large."""
    shape = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4}
    return tiny.roberta(tmp_path_factory.mktemp("model"), **shape)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_file_does_not_stay_in_memory_beside_the_converted_model(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file and the model together are 1.5 times the file."""
    monkeypatch.delenv(SEQUENTIAL, raising=False)
    file = checkpoint / "model.safetensors"
    config = ModelConfig(name="tiny", path=str(checkpoint), device="cpu", dtype="bfloat16")
    models.load(ModelConfig(name="demo", path="demo", device="cpu"), models.MASKED_LM, ["a", "b"], 0)  # imports
    reset_peak_memory()
    before = peak_memory(torch.device("cpu"))
    loaded = models.load(config, models.MASKED_LM, ["a", "b"], 0)
    assert peak_memory(torch.device("cpu")) - before < 0.65 * file.stat().st_size
    assert SEQUENTIAL not in os.environ
    for name, value in safetensors.torch.load_file(file).items():
        assert torch.equal(loaded.model.get_parameter(name), value.to(torch.bfloat16)), name


def test_the_check_in_half_precision_is_in_float32(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear layer by parts, with a remainder."""
    monkeypatch.setattr(plain_check, "COPIED", 100 * 768)
    config = ModelConfig(name="tiny", path=str(checkpoint), device="cpu", dtype="bfloat16")
    model = models.load(config, models.MASKED_LM, ["a", "b"], 0).model
    ids = torch.arange(5, 17).view(2, 6)
    with torch.no_grad():
        with plain_check.computing_in_float32(model):
            found = model(input_ids=ids).logits
        torch.testing.assert_close(found, model.float()(input_ids=ids).logits)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.usefixtures("eager_kernels")
def test_nor_beside_frozen_weights_that_are_converted(checkpoint: Path) -> None:
    """The embeddings stay mapped, and with them what was read of the file."""
    words = [f"model.path={checkpoint}", "model.device=cpu", "data=demo", "peft=bias", "model.compute_dtype=bfloat16"]
    session = load_session(build_config(words))
    weight = session.loaded.model.get_parameter("roberta.encoder.layer.0.output.dense.weight")
    assert weight.dtype == torch.bfloat16
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8").split(str(checkpoint / "model.safetensors"))[1:]
    resident = sum(1024 * int(re.search(r"^Rss: +(\d+)", part, re.M)[1]) for part in maps)  # type: ignore[index]
    assert resident < 0.2 * (checkpoint / "model.safetensors").stat().st_size
