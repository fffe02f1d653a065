"""Which kinds of weights are faster, smaller, and fit."""

import sys
from pathlib import Path

import pytest

from mezo_cli import system
from mezo_cli.diagnosis import storage
from mezo_cli.diagnosis.findings import DOUBT, OK, Deadline
from mezo_cli.models.quantized import quantized_layers
from tests import tiny
from tests.optim.test_mezo import SENTENCES, ready

pytestmark = pytest.mark.usefixtures("eager_kernels")


def test_each_kind_is_measured_and_the_bytes_are_those_in_memory(
    roberta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ready(roberta, "peft=head", "model.quantize=int8")
    rows = session.encoder.encode_all(SENTENCES)
    (finding,) = storage.check(session, rows, Deadline(100)).findings
    assert finding.verdict == OK
    assert {"float32", "bfloat16", "int8"} <= set(finding.figures["seconds"])
    assert all(seconds > 0 for seconds in finding.figures["seconds"].values())
    model = session.loaded.model
    copied = {id(p) for module in model.modules() if hasattr(module, "modules_to_save") for p in module.parameters()}
    held = sum(p.nbytes for p in model.parameters() if id(p) not in copied)
    held += sum(layer.bits.nbytes + layer.scale.nbytes for layer in quantized_layers(model).values())
    own = storage.weight_bytes(model, storage._matrices(model))["int8"]
    assert held < own <= held + sum(p.nbytes for p in model.parameters() if id(p) in copied)
    monkeypatch.setattr(system, "available_memory", lambda device: -own + 10)
    (finding,) = storage.check(session, rows, Deadline(0)).findings
    assert finding.verdict == DOUBT
    assert finding.figures["fitting"] == []


def test_a_missing_package_is_named_and_not_called_a_lack_of_time(
    roberta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it were not installed
    session = ready(roberta, "peft=head")
    section = storage.check(session, session.encoder.encode_all(SENTENCES), Deadline(100))
    assert section.cut == []
    (finding,) = section.findings
    assert "nf4 is not timed" in finding.text
    assert 'pip install -e ".[quantized]" -c constraints.txt' in finding.text


def test_a_model_without_linear_layers_is_no_case(tmp_path: Path) -> None:
    session = ready(tiny.decoder(tmp_path, "gpt2"), "objective=lm", "peft=lora", "task=sst2")
    (finding,) = storage.check(session, session.encoder.encode_all(SENTENCES), Deadline(100)).findings
    assert "not nn.Linear" in finding.text
