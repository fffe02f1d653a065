"""What is tuned, and what the plan costs: time, memory, disk, kernels."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Config, Example
from mezo_cli.diagnosis import cost, tuned
from mezo_cli.diagnosis.checkpoint_sizes import checkpoint_bytes, checkpoint_sizes
from mezo_cli.diagnosis.cost import number_of_evaluations
from mezo_cli.diagnosis.deadline import Deadline
from mezo_cli.diagnosis.findings import DOUBT, OK, UNKNOWN, Finding, Section
from mezo_cli.diagnosis.plan import Plan
from mezo_cli.diagnosis.prepared import Prepared
from mezo_cli.training.load import load_session
from tests import tiny
from tests.command_line import mezo, small


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, and one timed step: the models are tiny."""
    monkeypatch.setenv("MEZO_EAGER", "1")
    monkeypatch.setattr(cost, "STEPS", 1)


def config(*words: str) -> Config:
    return build_config(["task=sst2", "data=demo", *words])


def prepared(model: Path, *words: str) -> Prepared:
    session = load_session(config(f"model.path={model}", "batch_size=8", "steps=20", *words))
    rows = [Example((row["sentence"],), int(row["label"] == "positive")) for row in tiny.movie_rows(24)]
    encoded = session.encoder.encode_all(rows)
    sizes = {name: p.numel() for name, p in session.params.tensors.items()}
    unreachable = {name: sizes[name] for name in session.exclude_unreachable(encoded[0])}
    return Prepared(session, encoded, encoded, None, unreachable, 0.0)


def named(section: Section) -> dict[str, Finding]:
    return {one.name: one for one in section.findings}


# --- what is tuned ---


def test_a_sound_model_is_trained_whole(roberta: Path) -> None:
    found = named(tuned.check(prepared(roberta)))
    assert found["unreachable"].verdict == OK
    assert found["trainable"].figures["share"] == 1.0
    assert found["decoder"].figures["tied"]


def test_unreachable_tensors_are_a_doubt(roberta: Path) -> None:
    given = prepared(roberta, "peft=head", "objective=cls")
    lost = {name: p.numel() for name, p in given.session.params.tensors.items()}
    section = Section("what is tuned")
    tuned.judge_unreachable(section, lost, 10 * sum(lost.values()))
    assert section.findings[0].verdict == DOUBT
    assert "10% of the model" in section.findings[0].text


def test_a_parameter_that_no_forward_reads_is_found(roberta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mezo_cli.models import loading

    original = loading.load

    def with_spare(*args: Any, **options: Any) -> loading.LoadedModel:
        loaded = original(*args, **options)
        loaded.model.roberta.spare = torch.nn.Linear(3, 3)
        return loaded

    monkeypatch.setattr("mezo_cli.models.load", with_spare)
    found = named(tuned.check(prepared(roberta)))
    assert found["unreachable"].verdict == DOUBT
    assert found["unreachable"].figures["count"] == 12
    assert "roberta.spare.{weight,bias}" in found["unreachable"].text


def test_an_untied_decoder_and_an_adapter_are_told(untied: Path) -> None:
    found = named(tuned.check(prepared(untied, "peft=lora")))
    assert found["decoder"].figures["tied"] is False
    assert 0 < found["trainable"].figures["share"] < 0.5
    assert "{lora_A,lora_B}" in found["trainable"].text


# --- cost ---


def test_a_step_is_measured_in_both_dtypes_and_theta_stays(roberta: Path, tmp_path: Path) -> None:
    given = prepared(roberta, "optimizer=mezo_momentum")
    before = {name: p.clone() for name, p in given.session.params.tensors.items()}
    section = cost.check(given, Plan([given.config], tmp_path / "run"), Deadline(60.0))
    found = named(section)
    costs = found["step"].figures["costs"]
    assert set(costs) == {"float32", "bfloat16"}
    assert all(one["seconds"] > 0 and one["passes"] == 2 and one["peak_bytes"] > 1e6 for one in costs.values())
    assert costs["float32"]["state_bytes"] == 4 * given.session.params.count  # the momentum buffer
    assert found["plan"].figures["forwards"] == 40
    assert found["disk"].verdict == OK
    assert found["noise_kernels"].verdict == DOUBT  # MEZO_EAGER is set
    assert all(torch.equal(before[name], p) for name, p in given.session.params.tensors.items())
    assert not (tmp_path / "run").exists()


def test_a_plan_of_no_steps_costs_its_evaluations(roberta: Path, tmp_path: Path) -> None:
    given = prepared(roberta, "steps=0")
    found = named(cost.check(given, Plan([given.config], tmp_path), Deadline(60.0)))
    assert set(found) == {"plan", "disk"}
    assert found["plan"].figures["evaluations"] == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("words", [["optimizer=adamw"], ["optimizer.samples=3"]])
def test_other_methods_are_measured(words: list[str], roberta: Path, tmp_path: Path) -> None:
    given = prepared(roberta, "steps=2", *words)
    found = named(cost.check(given, Plan([given.config], tmp_path), Deadline(0.0)))
    assert found["step"].figures["costs"]["float32"]["passes"] == (2 if words == ["optimizer=adamw"] else 6)


def test_the_slower_dtype_is_a_doubt_only_when_it_is_the_run_s() -> None:
    fast, slow = cost.StepCost(1.0, 2, 1, 3, 0), cost.StepCost(2.0, 2, 1, 3, 0)
    verdicts = []
    for own in ("float32", "bfloat16"):
        section = Section("cost")
        cost._judge_speed(section, {"float32": fast, "bfloat16": slow}, config(f"model.compute_dtype={own}"))
        verdicts.append(section.findings[0].verdict)
        assert section.findings[0].figures["faster"] == "float32"
    assert verdicts == [OK, DOUBT]


@pytest.mark.parametrize(("steps", "every"), [(0, 5), (7, 5), (10, 5), (10, 0), (1, 1), (12, 100)])
def test_evaluations_are_counted_as_the_run_makes_them(steps: int, every: int) -> None:
    given = config(f"steps={steps}", f"eval_every={every}")
    assert number_of_evaluations(given) == sum(given.evaluates_at(step) for step in range(steps + 1))


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(("free", "verdict"), [(10**12, OK), (10**5, DOUBT)])
def test_a_disk_too_small_is_a_doubt(
    free: int, verdict: str, roberta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost.shutil, "disk_usage", lambda path: Usage(free, 0, free))
    given = prepared(roberta, "steps=0")
    found = named(cost.check(given, Plan([given.config], tmp_path / "a" / "b"), Deadline(60.0)))["disk"]
    assert found.verdict == verdict
    assert verdict == OK or "checkpoint=trajectory" in found.advice


@pytest.mark.slow
def test_the_bytes_of_a_run_are_those_that_it_writes(roberta: Path, movies: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = small(roberta, movies, run, "steps=1")
    assert mezo("train", *given).code == 0
    written = sum(path.stat().st_size for path in run.rglob("*.safetensors"))
    weights = checkpoint_bytes(prepared(roberta).session, 0)
    assert written == pytest.approx(2 * weights, rel=0.05)
    assert cost.job_bytes(build_config(given), weights) == pytest.approx(written, rel=0.1)


def test_jobs_that_cost_differently_are_named(tmp_path: Path) -> None:
    same = Plan([config("seed=1"), config("seed=2", "optimizer.lr=0.1")], tmp_path)
    assert same.differing_settings() == []
    other = Plan([*same.jobs, config("batch_size=8", "optimizer.noise=rademacher")], tmp_path)
    assert sorted(other.differing_settings()) == ["batch_size", "optimizer.noise"]


def test_forwards_and_bytes_of_every_job_are_its_own(roberta: Path, tmp_path: Path) -> None:
    given = prepared(roberta)
    more = [[], ["optimizer.samples=3"], ["peft=lora"], ["optimizer=mezo_adam"], ["init=linear_probe", "probe_c=1"]]
    jobs = [given.config, *(config(f"model.path={roberta}", "batch_size=8", "steps=20", *words) for words in more)]
    jobs.append(config(f"model.path={tmp_path}/none", "steps=20"))
    section = cost.check(given, Plan(jobs, tmp_path / "sweep", is_sweep=True), Deadline(600.0))
    found = named(section)
    assert found["plan"].figures["forwards"] == 6 * 2 * 20 + 2 * 2 * 20 + 3 + 40  # 24 rows: the probe has 3 batches
    weights, scalars = checkpoint_bytes(given.session, 0), given.session.params.count
    lora = checkpoint_bytes(prepared(roberta, "peft=lora").session, 0)
    sizes = checkpoint_sizes(Plan(jobs, tmp_path, is_sweep=True), weights, 0.0, Deadline(600.0)).of_jobs
    head = given.session.loaded.model.lm_head.decoder
    decoder = head.weight.nbytes + head.bias.nbytes  # the probe unties it
    assert sizes == [weights, weights, weights, lora, weights + 8 * scalars, weights + decoder, 0]
    expected = sum(cost.job_bytes(job, size or 0) for job, size in zip(jobs, sizes, strict=True)) + max(map(int, sizes))
    assert found["disk"].figures["bytes"] == expected
    assert found["job"].verdict == DOUBT
    assert found["job"].text.startswith("job 7 of 7 cannot start: model.path=")


def test_without_time_to_load_them_jobs_are_taken_to_be_like_the_first(roberta: Path, tmp_path: Path) -> None:
    given = prepared(roberta, "steps=0")
    jobs = [given.config, config(f"model.path={roberta}", "steps=0", "peft=lora")]
    section = cost.check(given, Plan(jobs, tmp_path / "sweep", is_sweep=True), Deadline(0.0))
    disk = named(section)["disk"]
    assert section.cut == ["the checkpoints of 1 job"]
    assert disk.verdict == UNKNOWN
    assert f"a checkpoint has {cost.format_bytes(checkpoint_bytes(given.session, 0))}," in disk.text


@pytest.mark.parametrize(
    ("kind", "reason", "verdict"),
    [
        ("compiled", "", OK),
        ("compiled", "the noise does not use AVX-512", DOUBT),
        ("eager", "the noise is not compiled", DOUBT),
        ("guarded", "the noise is compiled with guards", DOUBT),
        ("none", "", DOUBT),
    ],
)
def test_slow_kernels_are_a_doubt(kind: str, reason: str, verdict: str) -> None:
    section = Section("cost")
    cost.judge_kernels(section, kind, reason)
    assert section.findings[0].verdict == verdict
