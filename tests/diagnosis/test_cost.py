"""What is trained, and what all jobs cost: time, memory, disk, kernels."""

from pathlib import Path

import pytest
import torch

from mezo_cli.config.compose import build_config
from mezo_cli.diagnosis import cost
from mezo_cli.diagnosis.findings import DOUBT, OK, UNKNOWN, Deadline, Finding, Section
from mezo_cli.diagnosis.jobs import Jobs
from mezo_cli.training.session import Session
from tests.command_line import mezo, small
from tests.diagnosis.sessions import config, load, named, only


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, and one timed step: the models are tiny."""
    monkeypatch.setenv("MEZO_EAGER", "1")
    monkeypatch.setattr(cost, "STEPS", 1)


def checked(model: Path, *words: str, folder: Path = Path("run"), seconds: float = 60.0) -> dict[str, Finding]:
    session, rows, unreachable = load(model, *words)
    jobs = Jobs([session.config], folder)
    return named(cost.check(session, {"train": rows, "dev": rows}, unreachable, 0.0, jobs, Deadline(seconds)))


def weights_of(session: Session) -> int:
    return cost.checkpoint_bytes(session, 0)


# --- what is trained ---


def test_what_is_trained_is_reported(roberta: Path) -> None:
    section = Section("cost")
    session, _, unreachable = load(roberta, "peft=lora")
    assert not unreachable
    cost.report_trainable(section, session, unreachable)
    assert 0 < only(section).figures["share"] < 0.5
    assert "{lora_A,lora_B}" in only(section).text


def test_parameters_that_no_forward_reads_are_a_doubt(roberta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mezo_cli.models import loading

    original = loading.load

    def with_spare(*args: object, **options: object) -> loading.LoadedModel:
        loaded = original(*args, **options)  # type: ignore[arg-type]
        loaded.model.roberta.spare = torch.nn.Linear(3, 3)
        return loaded

    monkeypatch.setattr("mezo_cli.models.load", with_spare)
    session, _, unreachable = load(roberta)
    section = Section("cost")
    cost.report_trainable(section, session, unreachable)
    found = named(section)["unreachable"]
    assert (found.verdict, found.figures["count"]) == (DOUBT, 12)
    assert "roberta.spare.{weight,bias}" in found.text


# --- steps ---


def test_a_step_is_measured_in_both_dtypes_and_theta_stays(roberta: Path, tmp_path: Path) -> None:
    session, rows, unreachable = load(roberta, "optimizer=mezo_momentum")
    before = {name: p.clone() for name, p in session.params.tensors.items()}
    jobs = Jobs([session.config], tmp_path / "run")
    found = named(cost.check(session, {"train": rows, "dev": rows}, unreachable, 0.0, jobs, Deadline(60.0)))
    costs = found["step"].figures["costs"]
    assert set(costs) == {"float32", "bfloat16"}
    assert all(one["seconds"] > 0 and one["passes"] == 2 and one["peak_bytes"] > 1e6 for one in costs.values())
    assert costs["float32"]["state_bytes"] == 4 * session.params.count  # the momentum buffer
    assert found["plan"].figures["forwards"] == 40
    assert found["disk"].verdict == OK
    assert found["noise_kernels"].verdict == DOUBT  # MEZO_EAGER is set
    assert all(torch.equal(before[name], p) for name, p in session.params.tensors.items())
    assert not (tmp_path / "run").exists()


def test_a_plan_of_no_steps_costs_its_evaluations(roberta: Path) -> None:
    found = checked(roberta, "steps=0")
    assert set(found) == {"trainable", "plan", "disk"}
    assert found["plan"].figures["evaluations"] == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize(("words", "passes"), [(["optimizer=adamw"], 2), (["optimizer.samples=3"], 6)])
def test_other_methods_are_measured(words: list[str], passes: int, roberta: Path) -> None:
    found = checked(roberta, "steps=2", *words, seconds=0.0)
    assert found["step"].figures["costs"]["float32"]["passes"] == passes


# --- all jobs ---


def test_forwards_of_every_job_are_its_own_and_jobs_that_cost_differently_are_named(roberta: Path) -> None:
    session, rows, _ = load(roberta)
    more = [["optimizer.samples=3"], ["init=linear_probe", "probe_c=1"], ["seed=2", "optimizer.lr=0.1"]]
    configs = [session.config, *(config(f"model.path={roberta}", *words) for words in more)]
    same = Jobs([configs[0], configs[3]], Path("sweep"), is_sweep=True)
    assert same.differing_settings() == []
    jobs = Jobs(configs, Path("sweep"), is_sweep=True)
    assert jobs.differing_settings() == ["init"]
    found = named(cost.check(session, {"train": rows, "dev": rows}, {}, 0.0, jobs, Deadline(60.0)))
    assert found["plan"].figures["forwards"] == 3 * 2 * 20 + 3 * 2 * 20 + 3  # 24 rows: the probe has 3 batches
    assert found["plan"].verdict == found["disk"].verdict == UNKNOWN
    sizes = sum(cost.job_bytes(job, weights_of(session)) for job in configs) + weights_of(session)
    assert found["disk"].figures["bytes"] == sizes


# --- disk and kernels ---


@pytest.mark.parametrize(("free", "verdict"), [(10**12, OK), (10**5, DOUBT)])
def test_a_disk_too_small_is_a_doubt(free: int, verdict: str) -> None:
    section = Section("cost")
    cost.judge_disk(section, Jobs([config()], Path("a")), 10**6, free)
    assert only(section).verdict == verdict
    assert verdict == OK or "checkpoint=trajectory" in only(section).advice


@pytest.mark.slow
def test_the_bytes_of_a_run_are_those_that_it_writes(roberta: Path, movies: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = small(roberta, movies, run, "steps=1")
    assert mezo("train", *words).code == 0
    written = sum(path.stat().st_size for path in run.rglob("*.safetensors"))
    weights = weights_of(load(roberta)[0])
    assert written == pytest.approx(2 * weights, rel=0.05)
    assert cost.job_bytes(build_config(words), weights) == pytest.approx(written, rel=0.1)
