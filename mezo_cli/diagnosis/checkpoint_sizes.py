"""The bytes of a checkpoint of every job of a sweep. Jobs of another model, adapter or method are loaded in turn."""

import dataclasses
import gc
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mezo_cli.config.schema import Config, Example
from mezo_cli.diagnosis.deadline import Deadline
from mezo_cli.diagnosis.plan import Plan
from mezo_cli.errors import UserError
from mezo_cli.optim import Optimizer, optimizer_class
from mezo_cli.optim.moments import Moment
from mezo_cli.report.settings import flatten
from mezo_cli.training.load import load_session
from mezo_cli.training.session import Session

# What the tensors of a checkpoint depend on: the model, its head, the adapter, and the optimizer's state.
SIZED = ("model.path", "model.revision", "objective.name", "task.labels", "peft.", "init", "optimizer.")
NOT_SIZED = tuple(
    f"optimizer.{name}"
    for name in ("lr", "eps", "weight_decay", "schedule", "samples", "sample_schedule", "noise", "dropout")
)


@dataclass
class Sizes:
    """The bytes of a checkpoint of each job.

    Attributes:
        of_jobs: in the order of the plan; None for a job whose kind there was no time to load.
        failed: job number (from 0) -> why it cannot be loaded, of the first job of each kind.
    """

    of_jobs: list[int | None] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)


def checkpoint_sizes(plan: Plan, first: int, loading: float, deadline: Deadline) -> Sizes:
    """Return the sizes of all jobs' checkpoints.

    Args:
        plan: the jobs.
        first: the bytes of a checkpoint of the first one.
        loading: the seconds that it took to load the first one; a job that would end too late is left out.
        deadline: for all of them.
    """
    found, known = Sizes(), {_kind(plan.config): first}
    for number, job in enumerate(plan.jobs):
        kind = _kind(job)
        if kind not in known and job.checkpoint == "full" and deadline.allows(loading):
            try:
                known[kind] = _measure(job)
            except UserError as error:
                known[kind] = 0
                found.failed[number] = str(error)
            gc.collect()  # a model and its hooks refer to each other
        found.of_jobs.append(known.get(kind, None if job.checkpoint == "full" else first))
    return found


def checkpoint_bytes(session: Session, state: int) -> int:
    """Return the bytes of one checkpoint: the model's weights, or the adapter's, and the optimizer's state."""
    parameters = dict(session.loaded.model.named_parameters())
    if session.loaded.adapter is not None:
        parameters = {name: p for name, p in parameters.items() if p.requires_grad}
    return state + sum(p.numel() * p.element_size() for p in parameters.values())


def still_optimizer(config: Config) -> Optimizer:
    """Return the run's optimizer with lr 0."""
    still = dataclasses.replace(config.optimizer, lr=0.0)
    return optimizer_class(config.optimizer)(still, config.seed, config.steps)


def tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a structure of dicts, lists, moments and objects of torch's optimizers."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Moment):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(tensor_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(tensor_bytes, value))
    return tensor_bytes(value.state) if isinstance(value, torch.optim.Optimizer) else 0


def _kind(config: Config) -> tuple[str, ...]:
    """Return what the size of a job's checkpoints depends on."""
    values = flatten(config).items()
    kept = [f"{key}={value}" for key, value in values if key not in NOT_SIZED and _is_sized(key)]
    return (*kept, str(config.steps > 0))


def _is_sized(key: str) -> bool:
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in SIZED)


def _measure(config: Config) -> int:
    """Load a job and take a step with lr 0 on a short row, for the optimizer's state; return the bytes."""
    session = dataclasses.replace(load_session(config), optimizer=still_optimizer(config))
    if not config.steps:
        return checkpoint_bytes(session, 0)
    rows = session.encoder.encode_all([Example(("a",) * len(config.task.columns), 0)])
    session.exclude_unreachable(rows[0])
    with torch.enable_grad() if session.optimizer.needs_backward else torch.no_grad():
        session.step(rows, 0)
    return checkpoint_bytes(session, tensor_bytes(vars(session.optimizer)))
