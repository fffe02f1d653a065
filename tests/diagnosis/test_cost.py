"""What is trained, and what a run costs: time and memory."""

from pathlib import Path

import pytest
import torch

from mezo_cli.diagnosis import cost
from mezo_cli.diagnosis.findings import DOUBT, Deadline, Finding, Section
from mezo_cli.session.prepare import Prepared
from tests.diagnosis.sessions import load, named, only

pytestmark = pytest.mark.usefixtures("eager_kernels")


def findings(prepared: Prepared, seconds: float = 60.0) -> dict[str, Finding]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "STEPS", 1)
        return named(cost.check(prepared, 0.0, Deadline(seconds)))


def test_what_is_trained_is_reported_and_what_no_forward_reads_is_a_doubt(roberta: Path) -> None:
    section = Section("cost")
    cost.report_trainable(section, load(roberta, "peft=lora").session, {})
    assert 0 < only(section).figures["share"] < 0.5
    assert "{lora_A,lora_B}" in only(section).text
    cost.report_trainable(section, load(roberta).session, {"roberta.spare.weight": 9, "roberta.spare.bias": 3})
    found = section.findings[-1]
    assert (found.name, found.verdict, found.figures["count"]) == ("unreachable", DOUBT, 12)
    assert "roberta.spare.{weight,bias}" in found.text


def test_a_step_is_measured_in_both_dtypes_and_theta_stays(roberta: Path) -> None:
    prepared = load(roberta, "optimizer=mezo_momentum")
    tensors = prepared.session.params.tensors
    before = {name: p.clone() for name, p in tensors.items()}
    found = findings(prepared)
    costs = found["step"].figures["costs"]
    assert set(costs) == {"float32", "bfloat16"}
    assert all(one["seconds"] > 0 and one["passes"] == 2 and one["peak_bytes"] > 1e6 for one in costs.values())
    assert found["plan"].figures["forwards"] == 40
    assert all(torch.equal(before[name], p) for name, p in tensors.items())


@pytest.mark.sample(1)
@pytest.mark.parametrize(("words", "passes"), [(["optimizer=adamw"], 2), (["optimizer.samples=3"], 6)])
def test_other_methods_are_measured(words: list[str], passes: int, roberta: Path) -> None:
    found = findings(load(roberta, "steps=2", *words), seconds=0.0)
    assert found["step"].figures["costs"]["float32"]["passes"] == passes


def test_a_probe_counts_and_without_steps_none_is_measured(roberta: Path) -> None:
    found = findings(load(roberta, "steps=0", "init=linear_probe", "probe_c=1"))
    assert set(found) == {"trainable", "plan"}
    assert found["plan"].figures["forwards"] == 3  # 24 rows: the probe has 3 batches
    assert found["plan"].figures["evaluations"] == 1
