"""Measure what a step costs on this machine in each compute dtype, and what the whole plan will take."""

import dataclasses
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mezo_cli import system
from mezo_cli.config.schema import Config, TokenizedExample
from mezo_cli.console import format_duration
from mezo_cli.data.batch_sampler import BatchSampler
from mezo_cli.diagnosis.checkpoint_sizes import checkpoint_bytes, checkpoint_sizes, still_optimizer, tensor_bytes
from mezo_cli.diagnosis.deadline import Deadline
from mezo_cli.diagnosis.findings import DOUBT, NOTE, OK, UNKNOWN, Section, count
from mezo_cli.diagnosis.plan import Plan
from mezo_cli.diagnosis.prepared import Prepared
from mezo_cli.models.loading import DTYPES
from mezo_cli.optim import optimizer_class
from mezo_cli.optim.settings import zeroth_order
from mezo_cli.training.loop import TRAIN_ROWS
from mezo_cli.training.session import Session

TITLE = "cost"
STEPS = 5  # that are timed in each dtype, after one that is not
CLEARLY = 1.15  # times the seconds of the other dtype
DISK = 0.9  # of the free disk
LINE_BYTES = 160  # of a line of metrics.jsonl, about


@dataclass(frozen=True)
class StepCost:
    """The cost of one step in a compute dtype: the median of some steps.

    Attributes:
        seconds: per step.
        passes: forwards and backwards per step.
        peak_bytes: of the process, or of the GPU.
        steps: that were timed.
        state_bytes: of the optimizer's tensors after a step.
    """

    seconds: float
    passes: int
    peak_bytes: int
    steps: int
    state_bytes: int


def check(prepared: Prepared, plan: Plan, deadline: Deadline) -> Section:
    """Measure steps and an evaluation, and add up the plan's time and disk. Leaves another compute dtype behind."""
    section, session = Section(TITLE), prepared.session
    costs: dict[str, StepCost] = {}
    if session.config.steps:
        costs = measure_steps(prepared, deadline)
        _judge_speed(section, costs, session.config)
        section.cut += [f"a step in {dtype}" for dtype in DTYPES if dtype not in costs]
    session.forward.set_compute_dtype(session.loaded.compute_dtype)
    row_seconds = _evaluation_seconds(session, prepared.dev)
    own = costs.get(session.config.model.compute_dtype)
    _report_plan(section, prepared, plan, own, row_seconds)
    sizes, guessed = _sizes(section, prepared, plan, own, deadline)
    judge_disk(section, plan, sizes, guessed, _free_disk(plan.directory))
    if session.config.steps and session.optimizer.replayable:
        judge_kernels(section, *session.params.noise.describe_kernels())
    return section


def measure_steps(prepared: Prepared, deadline: Deadline) -> dict[str, StepCost]:
    """Return the cost of a step in each compute dtype for which there is time, the run's own first.

    The dtypes take turns, so that other work on the machine slows both. The steps have lr 0, so theta stays as it is.
    """
    config = prepared.config
    optimizer = still_optimizer(config)
    session = dataclasses.replace(prepared.session, optimizer=optimizer)
    sampler = BatchSampler(len(prepared.train), config.batch_size, config.seed)
    times: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    passes: dict[str, int] = {}
    step = 0
    for turn in range(1 + STEPS):
        rows = [prepared.train[i] for i in sampler.batch(turn)]
        for dtype in sorted(DTYPES, key=lambda name: name != config.model.compute_dtype):
            expected = min(times.get(dtype) or [times_of[-1] for times_of in times.values()], default=0.0)
            if times and not deadline.allows(expected):
                continue
            session.forward.set_compute_dtype(DTYPES[dtype])
            system.reset_peak_memory()
            times.setdefault(dtype, []).append(_time_step(session, rows, step))
            peaks[dtype] = max(peaks.get(dtype, 0), system.peak_memory(session.loaded.device))
            passes[dtype] = sum(optimizer.passes(step + 1).values()) - sum(optimizer.passes(step).values())
            step += 1
    state = tensor_bytes(vars(optimizer))
    timed = {dtype: taken[1:] or taken for dtype, taken in times.items()}  # the first step allocates buffers
    return {
        dtype: StepCost(statistics.median(taken), passes[dtype], peaks[dtype], len(taken), state)
        for dtype, taken in timed.items()
    }


def judge_disk(section: Section, plan: Plan, sizes: Sequence[int], guessed: int, free: int) -> None:
    """Compare what the plan writes with the free disk.

    Args:
        section: gets the finding.
        plan: the jobs.
        sizes: bytes of one checkpoint of each job.
        guessed: jobs that there was no time to load, taken to be like the first one.
        free: bytes.
    """
    jobs = [job_bytes(job, size) for job, size in zip(plan.jobs, sizes, strict=True)]
    full = [size for job, size in zip(plan.jobs, sizes, strict=True) if job.checkpoint == "full"]
    need = sum(jobs) + max(full, default=0)  # the old checkpoint is removed after the new one is written
    kinds = " and ".join(sorted({job.checkpoint for job in plan.jobs}))
    of_jobs = f"{len(plan.jobs):,} jobs" if plan.is_sweep else "the run"
    least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
    each = least if least == most else f"{least} to {most}"
    text = (
        f"disk: {of_jobs} will take {format_bytes(need)} (checkpoint={kinds}; a checkpoint has {each}, best and last"
        f" are kept), {format_bytes(free)} are free"
    )
    if guessed:
        text += f"; {guessed:,} jobs that were not loaded are counted like job 1"
    advice = "choose another disk (hydra.run.dir, hydra.sweep.dir)"
    if full and optimizer_class(plan.config.optimizer).replayable:
        advice = f"use checkpoint=trajectory, which writes no weights, or {advice}"
    verdict = DOUBT if need > DISK * free else UNKNOWN if guessed else OK
    section.add(verdict, "disk", text, advice, bytes=need, checkpoint_bytes=max(sizes), free_bytes=free)


def judge_kernels(section: Section, kind: str, reason: str) -> None:
    """Judge how the kernels of the noise run: from `Noise.describe_kernels`."""
    if kind == "compiled" and not reason:
        section.ok("noise_kernels", "the fast noise kernels are compiled", kind=kind)
    elif kind == "none":
        advice = "leave optimizer.noise at gaussian or rademacher: z of this kind is the same at every step on a CPU"
        text = "optimizer.noise=torch is only for a comparison with the reference"
        section.add(DOUBT, "noise_kernels", text, advice, kind=kind)
    else:
        advice = "install a C++ compiler (g++), and leave MEZO_EAGER unset" if kind == "eager" else "use a pinned torch"
        section.add(DOUBT, "noise_kernels", reason, advice, kind=kind)


def job_bytes(config: Config, checkpoint: int) -> int:
    """Return the bytes that a job leaves on the disk: checkpoints, the trajectory and metrics."""
    weights = 2 * checkpoint if config.checkpoint == "full" else 0
    replayable = optimizer_class(config.optimizer).replayable
    record = 12 + 4 * zeroth_order(config.optimizer).samples if replayable else 0
    lines = config.steps // config.log_interval + number_of_evaluations(config)
    return weights + record * config.steps + LINE_BYTES * lines


def number_of_evaluations(config: Config) -> int:
    """Return how often a run is evaluated on dev: `Config.evaluates_at`, counted."""
    if not config.steps:
        return 1
    regular = config.steps // config.eval_every if config.eval_every else 0
    ends_between = not config.eval_every or config.steps % config.eval_every > 0
    return 1 + regular + ends_between


def format_bytes(size: float) -> str:
    """Return a size as text: 21.6 MB, 1.42 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} bytes"


def _time_step(session: Session, rows: list[TokenizedExample], step: int) -> float:
    start = time.perf_counter()
    with torch.enable_grad() if session.optimizer.needs_backward else torch.no_grad():
        session.step(rows, step)
    system.trim_malloc()
    _synchronize(session)
    return time.perf_counter() - start


@torch.no_grad()
def _evaluation_seconds(session: Session, rows: list[TokenizedExample]) -> float:
    """Return the seconds per row of an evaluation: a batch of evenly spaced rows."""
    size = min(session.config.eval_batch_size, len(rows))
    chosen = [rows[i * len(rows) // size] for i in range(size)]
    start = time.perf_counter()
    session.objective.logits(session.batch(chosen)).cpu()
    return (time.perf_counter() - start) / size


def _synchronize(session: Session) -> None:
    if session.loaded.device.type == "cuda":
        torch.cuda.synchronize(session.loaded.device)


def _judge_speed(section: Section, costs: dict[str, StepCost], config: Config) -> None:
    own = config.model.compute_dtype
    parts = [
        f"{dtype} {one.seconds:.2g} s per step, peak {format_bytes(one.peak_bytes)}" for dtype, one in costs.items()
    ]
    text = f"batch_size={config.batch_size}: {'; '.join(parts)}"
    figures: dict[str, Any] = {"costs": {dtype: dataclasses.asdict(one) for dtype, one in costs.items()}}
    if len(costs) < 2:
        section.ok("step", text, **figures)
        return
    faster = min(costs, key=lambda dtype: costs[dtype].seconds)
    ratio = max(one.seconds for one in costs.values()) / costs[faster].seconds
    figures |= {"faster": faster, "ratio": ratio}
    text += f". {faster} is faster here, {ratio:.2f} times"
    if faster == own or ratio < CLEARLY:
        section.ok("step", text, **figures)
    elif faster == "float32":
        section.add(DOUBT, "step", text, "use model.compute_dtype=float32: it is faster here, and exact", **figures)
    else:
        advice = f"model.compute_dtype={faster} saves time if the signal above allows it"
        section.add(NOTE, "step", text, advice, **figures)


def _report_plan(section: Section, prepared: Prepared, plan: Plan, own: StepCost | None, row_seconds: float) -> None:
    """Report forwards and time of all jobs, as far as the steps of the first one tell."""
    forwards = backwards = evaluations = 0
    seconds = 0.0
    final = min(TRAIN_ROWS, len(prepared.train)) + len(prepared.test or ())
    passes: dict[Any, dict[str, int]] = {}
    for job in plan.jobs:
        key = (job.optimizer, job.steps)
        if key not in passes:
            passes[key] = optimizer_class(job.optimizer)(job.optimizer, job.seed, job.steps).passes(job.steps)
        one = passes[key]
        forwards += one["forwards"]
        if job.init == "linear_probe":
            forwards += -(-len(prepared.train) // job.batch_size)
        backwards += one["backwards"]
        evaluations += number_of_evaluations(job)
        rows = number_of_evaluations(job) * len(prepared.dev) + final
        steps = sum(one.values()) * own.seconds / own.passes if own and job.steps else 0.0
        trained = steps + rows * row_seconds + prepared.seconds
        seconds += trained if job.max_seconds is None else min(trained, job.max_seconds + prepared.seconds)
    back = f" and {backwards:,} backwards" if backwards else ""
    steps_of_all = sum(job.steps for job in plan.jobs)
    what = f"{len(plan.jobs):,} jobs: " if plan.is_sweep else ""
    text = (
        f"the whole plan: {what}{steps_of_all:,} steps, {forwards:,} forwards{back}, {evaluations:,} evaluations of"
        f" {len(prepared.dev):,} dev rows: about {format_duration(seconds)} on this machine"
    )
    if plan.is_adaptive:
        text += ", for one job: its sweeper proposes the jobs as it goes"
    figures: dict[str, Any] = {
        "jobs": len(plan.jobs),
        "steps": steps_of_all,
        "forwards": forwards,
        "backwards": backwards,
        "evaluations": evaluations,
        "seconds": seconds,
    }
    differing = plan.differing_settings()
    if differing:
        shown = ", ".join(differing[:4]) + (f" and {len(differing) - 4} more" if len(differing) > 4 else "")
        section.add(
            UNKNOWN,
            "plan",
            f"{text}, if every job is as slow as the first; they differ in {shown}",
            "look at each choice by itself: mezo doctor with one value of these settings",
            **figures,
            differing=differing,
        )
    else:
        section.ok("plan", text, **figures)


def _sizes(
    section: Section, prepared: Prepared, plan: Plan, own: StepCost | None, deadline: Deadline
) -> tuple[list[int], int]:
    """Return the bytes of a checkpoint of each job, and how many jobs were not loaded and taken to be like job 1."""
    first = checkpoint_bytes(prepared.session, own.state_bytes if own else 0)
    found = checkpoint_sizes(plan, first, prepared.seconds, deadline)
    for number, reason in found.failed.items():
        text = f"job {number + 1} of {len(plan.jobs):,} cannot start: {reason}"
        section.add(
            DOUBT, "job", text, "correct its settings, or leave it out: the other jobs would run", job=number + 1
        )
    guessed = found.of_jobs.count(None)
    if guessed:
        section.cut.append(f"the checkpoints of {count(guessed, 'job')}")
    return [first if size is None else size for size in found.of_jobs], guessed


def _free_disk(path: Path) -> int:
    """Return the free bytes of the disk that a path is on; it need not exist."""
    return shutil.disk_usage(next(one for one in (path, *path.parents) if one.is_dir())).free
