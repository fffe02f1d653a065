"""Measure what a step costs on this machine in each compute dtype, and what all jobs will take: time and disk."""

import dataclasses
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mezo_cli import system
from mezo_cli.config.schema import Config, TokenizedExample
from mezo_cli.console import format_duration
from mezo_cli.data.batch_sampler import BatchSampler
from mezo_cli.diagnosis.findings import DOUBT, NOTE, OK, UNKNOWN, Deadline, Section, count, percent
from mezo_cli.diagnosis.jobs import Jobs
from mezo_cli.models.loading import DTYPES
from mezo_cli.models.parameter_names import count_parameters, format_names
from mezo_cli.optim import optimizer_class
from mezo_cli.optim.moments import Moment
from mezo_cli.optim.settings import zeroth_order
from mezo_cli.training.loop import TRAIN_ROWS
from mezo_cli.training.session import Session

TITLE = "cost"
STEPS = 5  # that are timed in each dtype, after one that is not
CLEARLY = 1.15  # times the seconds of the other dtype
DISK = 0.9  # of the free disk
LINE_BYTES = 160  # of a line of metrics.jsonl, about

Rows = Mapping[str, Sequence[TokenizedExample]]  # split -> its rows


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


def check(
    session: Session, rows: Rows, unreachable: Mapping[str, int], loading: float, jobs: Jobs, deadline: Deadline
) -> Section:
    """Measure steps and an evaluation, and add up time and disk of all jobs. Leaves another compute dtype behind.

    Args:
        session: only the parameters that reach the loss are trainable in it.
        rows: train, dev and, if there is one, test.
        unreachable: name -> number of scalars, of the parameters that do not reach the loss.
        loading: seconds that loading took.
        jobs: what will be run; the session is of the first one.
        deadline: for all of it.
    """
    section = Section(TITLE)
    report_trainable(section, session, unreachable)
    costs: dict[str, StepCost] = {}
    if session.config.steps:
        costs = measure_steps(session, rows["train"], deadline)
        judge_speed(section, costs, session.config)
        section.cut += [f"a step in {dtype}" for dtype in DTYPES if dtype not in costs]
    session.forward.set_compute_dtype(session.loaded.compute_dtype)
    own = costs.get(session.config.model.compute_dtype)
    counts = {name: len(some) for name, some in rows.items()}
    _report_jobs(section, counts, jobs, own, loading, _row_seconds(session, rows["dev"]))
    disk = next(folder for folder in (jobs.directory, *jobs.directory.parents) if folder.is_dir())
    free = shutil.disk_usage(disk).free
    judge_disk(section, jobs, checkpoint_bytes(session, own.state_bytes if own else 0), free)
    if session.config.steps and session.optimizer.replayable:
        judge_kernels(section, *session.params.noise.describe_kernels())
    return section


def report_trainable(section: Section, session: Session, unreachable: Mapping[str, int]) -> None:
    """Report the trainable tensors; doubt those that would be trained, but that the loss does not depend on."""
    trainable, total = session.trainable(), count_parameters(session.loaded.model)
    prefix = f"{session.loaded.model.base_model_prefix}."
    names = [name.removeprefix(prefix) for name in trainable["names"]]
    shown = "" if session.loaded.adapter is None else f": {format_names(names)}"
    text = (
        f"peft={session.config.peft.name} trains {trainable['count']:,} of {total:,} parameters"
        f" ({percent(trainable['share'])}), {count(len(names), 'tensor')}{shown}"
    )
    section.add(OK, "trainable", text, count=trainable["count"], share=trainable["share"], tensors=len(names))
    scalars = sum(unreachable.values())
    if unreachable:
        advice = "right for a pooler or an unused head; if you meant to train them, choose another objective or peft"
        text = (
            f"the loss does not depend on {count(len(unreachable), 'tensor')} ({percent(scalars / total)} of the"
            f" model), which stay as they are: {format_names(unreachable)}"
        )
        section.add(DOUBT, "unreachable", text, advice, tensors=list(unreachable), count=scalars)


# --- steps ---


def measure_steps(session: Session, train: Sequence[TokenizedExample], deadline: Deadline) -> dict[str, StepCost]:
    """Return the cost of a step in each compute dtype for which there is time, the run's own first.

    The dtypes take turns, so that other work on the machine slows both. The steps have lr 0, so theta stays as it is.
    """
    config = session.config
    optimizer = optimizer_class(config.optimizer)(
        dataclasses.replace(config.optimizer, lr=0.0), config.seed, config.steps
    )
    if optimizer.replayable:
        optimizer.keep_start(lambda: session.params)
    session = dataclasses.replace(session, optimizer=optimizer)
    sampler = BatchSampler(len(train), config.batch_size, config.seed)
    times: dict[str, list[float]] = {}
    peaks, passes = Counter[str](), Counter[str]()
    step = 0
    for turn in range(1 + STEPS):
        rows = [train[i] for i in sampler.batch(turn)]
        for dtype in sorted(DTYPES, key=lambda name: name != config.model.compute_dtype):
            expected = min(times.get(dtype) or [taken[-1] for taken in times.values()], default=0.0)
            if times and not deadline.allows(expected):
                continue
            session.forward.set_compute_dtype(DTYPES[dtype])
            system.reset_peak_memory()
            times.setdefault(dtype, []).append(_time_step(session, rows, step))
            peaks[dtype] = max(peaks[dtype], system.peak_memory(session.loaded.device))
            passes[dtype] = sum(optimizer.count_forwards(step + 1).values()) - sum(
                optimizer.count_forwards(step).values()
            )
            step += 1
    state = tensor_bytes(vars(optimizer))
    timed = {dtype: taken[1:] or taken for dtype, taken in times.items()}  # the first step allocates buffers
    return {
        dtype: StepCost(statistics.median(taken), passes[dtype], peaks[dtype], len(taken), state)
        for dtype, taken in timed.items()
    }


def _time_step(session: Session, rows: list[TokenizedExample], step: int) -> float:
    start = time.perf_counter()
    with torch.enable_grad() if session.optimizer.needs_backward else torch.no_grad():
        session.step(rows, step)
    system.trim_malloc()
    if session.loaded.device.type == "cuda":
        torch.cuda.synchronize(session.loaded.device)
    return time.perf_counter() - start


def judge_speed(section: Section, costs: Mapping[str, StepCost], config: Config) -> None:
    """Report the cost of a step in each dtype; doubt a dtype that is rounded and slower."""
    own = config.model.compute_dtype
    steps = [f"{name} {c.seconds:.2g} s per step, peak {format_bytes(c.peak_bytes)}" for name, c in costs.items()]
    text = f"batch_size={config.batch_size}: {'; '.join(steps)}"
    figures: dict[str, Any] = {"costs": {dtype: dataclasses.asdict(cost) for dtype, cost in costs.items()}}
    verdict, advice = OK, ""
    if len(costs) > 1:
        faster = min(costs, key=lambda dtype: costs[dtype].seconds)
        ratio = max(measured.seconds for measured in costs.values()) / costs[faster].seconds
        figures |= {"faster": faster, "ratio": ratio}
        text += f". {faster} is faster here, {ratio:.2f} times"
        if faster != own and ratio >= CLEARLY:
            exact = faster == "float32"
            verdict, why = (DOUBT, "is exact, too") if exact else (NOTE, "saves time if the signal above allows it")
            advice = f"model.compute_dtype={faster} {why}"
    section.add(verdict, "step", text, advice, **figures)


@torch.no_grad()
def _row_seconds(session: Session, dev: Sequence[TokenizedExample]) -> float:
    """Return the seconds per row of an evaluation: a batch of evenly spaced dev rows."""
    size = min(session.config.eval_batch_size, len(dev))
    start = time.perf_counter()
    session.objective.measure(session.objective.collate([dev[i * len(dev) // size] for i in range(size)]))[0].cpu()
    return (time.perf_counter() - start) / size


# --- all jobs ---


def _report_jobs(
    section: Section, rows: Mapping[str, int], jobs: Jobs, own: StepCost | None, loading: float, row_seconds: float
) -> None:
    """Report forwards and time of all jobs, as far as the steps of the first one tell; `rows` are those per split."""
    totals: Counter[str] = Counter()
    seconds, final = 0.0, min(TRAIN_ROWS, rows["train"]) + rows.get("test", 0)
    for job in jobs.configs:
        passes = optimizer_class(job.optimizer)(job.optimizer, job.seed, job.steps).count_forwards(job.steps)
        probe = -(-rows["train"] // job.batch_size) if job.init == "linear_probe" else 0
        evaluations = number_of_evaluations(job)
        totals.update({**passes, "steps": job.steps, "evaluations": evaluations})
        totals["forwards"] += probe
        steps = sum(passes.values()) * own.seconds / own.passes if own and job.steps else 0.0
        trained = steps + (evaluations * rows["dev"] + final) * row_seconds
        seconds += loading + (trained if job.max_seconds is None else min(trained, job.max_seconds))
    back = f" and {totals['backwards']:,} backwards" if totals["backwards"] else ""
    what = f"{len(jobs.configs):,} jobs: " if jobs.is_sweep else ""
    text = (
        f"the whole plan: {what}{totals['steps']:,} steps, {totals['forwards']:,} forwards{back},"
        f" {totals['evaluations']:,} evaluations of {rows['dev']:,} dev rows: about {format_duration(seconds)} on this"
        " machine"
    )
    if jobs.is_adaptive:
        text += ", for one job: its sweeper proposes the jobs as it goes"
    names = ("steps", "forwards", "backwards", "evaluations")
    figures: dict[str, Any] = {"jobs": len(jobs.configs), **{name: totals[name] for name in names}, "seconds": seconds}
    verdict, advice, differing = OK, "", jobs.differing_settings()
    if differing:
        shown = ", ".join(differing[:4]) + (f" and {len(differing) - 4} more" if len(differing) > 4 else "")
        verdict, text = UNKNOWN, f"{text}, if every job is as slow as the first; they differ in {shown}"
        advice = "look at each choice by itself: mezo doctor with one value of these settings"
    section.add(verdict, "plan", text, advice, **figures, differing=differing)


def number_of_evaluations(config: Config) -> int:
    """Return how often a run is evaluated on dev: `Config.evaluates_at`, counted."""
    if not config.steps:
        return 1
    if config.eval_at_forwards:
        return len({0, config.steps} | config.steps_at_forwards)
    regular = config.steps // config.eval_every if config.eval_every else 0
    ends_between = not config.eval_every or config.steps % config.eval_every > 0
    return 1 + regular + ends_between


# --- disk and kernels ---


def judge_disk(section: Section, jobs: Jobs, checkpoint: int, free: int) -> None:
    """Compare what all jobs write with the free disk.

    Args:
        jobs: what will be run.
        checkpoint: bytes of one checkpoint of the first job; those of jobs that differ in it are taken to be like it.
        free: bytes.
    """
    writes_weights = any(job.checkpoint == "full" for job in jobs.configs)
    replaced = checkpoint if writes_weights else 0  # the old one is removed after the new one is written
    need = sum(job_bytes(job, checkpoint) for job in jobs.configs) + replaced
    modes = " and ".join(sorted({job.checkpoint for job in jobs.configs}))
    differing = jobs.differing_settings() if writes_weights else []
    text = (
        f"disk: {count(len(jobs.configs), 'job') if jobs.is_sweep else 'the run'} will take {format_bytes(need)}"
        f" (checkpoint={modes}; a checkpoint has {format_bytes(checkpoint)}, best and last are kept),"
        f" {format_bytes(free)} are free{', if every checkpoint is as large as that of job 1' if differing else ''}"
    )
    advice = "choose another disk (hydra.run.dir, hydra.sweep.dir)"
    if writes_weights and optimizer_class(jobs.config.optimizer).replayable:
        advice = f"use checkpoint=trajectory, which writes no weights, or {advice}"
    verdict = DOUBT if need > DISK * free else UNKNOWN if differing else OK
    section.add(verdict, "disk", text, advice, bytes=need, checkpoint_bytes=checkpoint, free_bytes=free)


def job_bytes(config: Config, checkpoint: int) -> int:
    """Return the bytes that a job leaves on the disk: checkpoints, the trajectory and metrics."""
    weights = 2 * checkpoint if config.checkpoint == "full" else 0
    replayable = optimizer_class(config.optimizer).replayable
    record = 12 + 4 * zeroth_order(config.optimizer).directions if replayable else 0
    lines = config.steps // config.log_interval + number_of_evaluations(config)
    return weights + record * config.steps + LINE_BYTES * lines


def checkpoint_bytes(session: Session, state: int) -> int:
    """Return the bytes of one checkpoint: the model's weights, or the adapter's, and the optimizer's state."""
    parameters = session.loaded.model.named_parameters()
    has_adapter = session.loaded.adapter is not None
    return state + sum(p.numel() * p.element_size() for _, p in parameters if p.requires_grad or not has_adapter)


def tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a structure of dicts, lists, moments and objects of torch's optimizers."""
    if isinstance(value, (Tensor, Moment)):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(tensor_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(tensor_bytes, value))
    return tensor_bytes(value.state) if isinstance(value, torch.optim.Optimizer) else 0


def format_bytes(size: float) -> str:
    """Return a size as text: 21.6 MB, 1.42 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} bytes"


def judge_kernels(section: Section, state: str, reason: str) -> None:
    """Judge how the kernels of the noise run: from `Noise.describe_kernels`."""
    text, advice = reason or "the fast noise kernels are compiled", "use a pinned torch"
    if state == "none":
        text = "optimizer.noise=torch is only for a comparison with the published code"
        advice = "leave optimizer.noise at gaussian or rademacher: z of this kind is the same at every step on a CPU"
    elif state == "eager":
        advice = "install a C++ compiler (g++), and leave MEZO_EAGER unset"
    section.judge("noise_kernels", state != "compiled" or bool(reason), text, advice, kind=state)
