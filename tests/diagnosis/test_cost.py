"""What is trained, what a run costs in time and memory, and backpropagation beside MeZO's step."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mezo_cli.diagnosis import cost, signal
from mezo_cli.diagnosis.findings import DOUBT, NOTE, OK, UNKNOWN, Deadline, Finding, Section
from mezo_cli.models import loading
from mezo_cli.objectives.collate import Batch
from mezo_cli.session.opening import Prepared
from tests.diagnosis.sessions import load, named, only
from tests.diagnosis.test_signal import Ticks

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


@pytest.mark.parametrize(("fast", "own"), [(True, "float32"), (False, "float16"), (False, "float32")])
def test_float16_is_measured_if_it_serves(fast: bool, own: str, roberta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "has_fast_float16", lambda device: fast)
    prepared = load(roberta, "batch_size=24", f"model.compute_dtype={own}")
    measured = {"float32", "bfloat16", *(["float16"] if fast or own == "float16" else [])}
    costs = findings(prepared)["step"].figures["costs"]
    rows = named(signal.check(prepared, Deadline(150.0, Ticks())))["resolution"].figures["rows"]
    assert {row["dtype"] for row in rows} == set(costs) == measured
    if fast:
        section, seconds = Section("cost"), {"float32": 2.0, "bfloat16": 1.0, "float16": 1.1}
        cost.judge_speed(
            section, {name: costs[name] | {"seconds": s} for name, s in seconds.items()}, prepared.session.config
        )
        assert "float16, about as fast, keeps 10 bits" in only(section).advice


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


def test_kept_states_are_computed_once_and_in_one_dtype(roberta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = load(roberta, "peft=head", "model.compute_dtype=bfloat16")
    frozen = prepared.session.objective.frozen
    assert frozen is not None
    prepared.states_bytes = prepared.session.keep_states(prepared.rows["dev"])
    computed: list[int] = []
    compute = frozen._compute

    def counted(batches: Sequence[Batch]) -> list[Tensor]:
        computed.extend([len(batches)] * bool(batches))
        return compute(batches)

    monkeypatch.setattr(frozen, "_compute", counted)
    assert set(findings(prepared)["step"].figures["costs"]) == {"bfloat16"}
    assert computed == [1]  # the 24 rows are one batch of an evaluation
    prepared.rows["train"] = prepared.session.encoder.encode_all(prepared.splits.train)  # too many to be kept
    assert set(findings(prepared)["step"].figures["costs"]) == {"float32", "bfloat16"}


def test_a_probe_counts_and_without_steps_none_is_measured(roberta: Path) -> None:
    found = findings(load(roberta, "steps=0", "init=linear_probe", "probe_c=1"))
    assert set(found) == {"trainable", "plan"}
    assert found["plan"].figures["forwards"] == 3  # 24 rows: the probe has 3 batches
    assert found["plan"].figures["evaluations"] == 1


def found(prepared: Prepared, seconds: float = 300.0) -> Finding:
    section = Section("cost")
    cost.judge_rival(section, prepared, Deadline(seconds))
    return named(section)["backprop"]


def test_each_takes_steps_in_a_process_of_its_own(roberta: Path, movies: Path) -> None:
    words = ["data=files", f"data.dir={movies}", "checkpoint=trajectory", "peft=lora"]  # its own rival is the LoRA's
    finding = found(load(roberta, *words))
    measured = finding.figures["measured"]
    assert list(measured) == ["mezo", "adamw peft=lora"]
    assert all(one["peak_bytes"] > 1e5 and one["seconds"] > 0 for one in measured.values())
    assert finding.text.count("s per step (the time of ") == 1


def test_what_it_says_of_the_figures(roberta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = load(roberta)
    peaks = {"mezo": 5e7, "adamw": 9e7}

    def measured(job: object, deadline: Deadline) -> dict[str, float]:
        return {"peak_bytes": peaks[job.optimizer.name], "seconds": 0.5}  # type: ignore[attr-defined]

    monkeypatch.setattr(cost, "_measured", measured)
    assert found(prepared).verdict == OK
    peaks["adamw"] = 4e7
    finding = found(prepared)
    assert (finding.verdict, finding.advice.split(" fits")[0]) == (NOTE, "adamw peft=none, adamw peft=lora")
    monkeypatch.setattr(cost, "free_memory", lambda: 1000)
    finding = found(prepared)
    assert (finding.verdict, finding.text.count("GB are free")) == (UNKNOWN, 2)


def test_without_time_nothing_is_known(roberta: Path) -> None:
    finding = found(load(roberta), 0.0)
    assert (finding.verdict, finding.advice) == (UNKNOWN, "give more --seconds")


@pytest.mark.parametrize("words", [["steps=0"], ["optimizer=adamw"]])
def test_a_run_that_takes_no_step_of_mezo_has_no_rival(words: list[str], roberta: Path) -> None:
    section = Section("cost")
    cost.judge_rival(section, load(roberta, *words), Deadline(0.0))
    assert not section.findings
