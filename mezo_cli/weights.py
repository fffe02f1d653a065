"""The weights of any step of a run: a checkpoint, or the one before it and the trajectory from there.

A checkpoint holds every bit of the weights, and replaying is the arithmetic of training itself, so it does not matter
from where a step is reached: the bits are the same. A method without a trajectory has its checkpoints alone.
"""

import logging

import torch

from mezo_cli import models
from mezo_cli.errors import UserError, listed
from mezo_cli.optim import FirstOrder, Mezo
from mezo_cli.runs import Run, checkpoints, trajectory
from mezo_cli.runs.trajectory import Trajectory
from mezo_cli.schema import Config
from mezo_cli.session import Session, prepare

log = logging.getLogger("mezo")

STATE = "optimizer.safetensors"  # in the checkpoint `last` of a method without a trajectory: its moments


def named(config: Config, run: Run, name: str) -> Session:
    """Return a session at `best`, `last`, or a step given by its number.

    Raises:
        UserError: for another name, a step that the run has not reached, or a damaged run.
    """
    if name.isdecimal():
        return at_step(config, run, int(name))
    if name not in checkpoints.NAMES:
        raise UserError(f"--checkpoint {name}: allowed are {', '.join(checkpoints.NAMES)} or a step number")
    if (run.checkpoints / name).is_dir():
        return _loaded(config, run, name)
    _check_trajectory(config, run, name)
    past = trajectory.read(run.trajectory)
    return at_step(config, run, _last(config, run, past) if name == "last" else _best(config, run, past))


def at_step(config: Config, run: Run, step: int, going_on: bool = False) -> Session:
    """Return a session at the weights of `step`, from the newest checkpoint that is not past it.

    Raises:
        UserError: when the run has not reached the step, or a file that is needed is damaged.
    """
    saved = {name: run.saved_step(name) for name in checkpoints.NAMES}
    if not config.method.trajectory and step in saved.values():
        return _loaded(config, run, next(name for name, at in saved.items() if at == step))
    _check_trajectory(config, run, f"step {step}")
    past = trajectory.read(run.trajectory)
    _within(run, past, step)
    usable = [(at, name) for name, at in saved.items() if at is not None and at <= step]
    if not usable:
        return from_start(config, run, step)  # by which the method knows all of its past
    at, name = max(usable)
    return _replay(_loaded(config, run, name), run, past, at, step, going_on)


def resumed(config: Config, run: Run, step: int) -> Session:
    """Return a session that goes on behind `step` as if it had never stopped: the weights, and the method's state.

    Raises:
        UserError: when a file that is needed is damaged.
    """
    if config.method.trajectory:
        return at_step(config, run, step, going_on=True)
    session = _loaded(config, run, "last")
    if isinstance(session.optimizer, FirstOrder):
        session.optimizer.load(run.checkpoints / "last" / STATE)
    return session


def from_start(config: Config, run: Run, step: int) -> Session:
    """Return a session at the weights of `step`, rebuilt from the base model and the trajectory alone.

    Raises:
        UserError: when the run has not reached the step, or the base model is not what the run began with.
    """
    _check_trajectory(config, run, f"step {step}")
    past = trajectory.read(run.trajectory)
    _within(run, past, step)
    session = prepare(config)
    models.restore(session.loaded.model, run.start_file)
    models.check_fingerprint(session.loaded.model, past.header.fingerprint, run.trajectory)
    return _replay(session, run, past, 0, step)


def _loaded(config: Config, run: Run, name: str) -> Session:
    checkpoints.verify(run.checkpoints / name)
    return prepare(config, run.checkpoints / name)


def _replay(session: Session, run: Run, past: Trajectory, start: int, stop: int, going_on: bool = False) -> Session:
    """Do the updates of steps `start` to `stop` - 1 on the tensors that the trajectory names.

    What the method remembers of the steps before them is rebuilt where it is needed: for these, or to go on.
    """
    params = session.params
    shapes = {name: list(p.shape) for name, p in params.tensors.items()}
    for name, shape in past.header.tensors:
        if shapes.get(name) != shape:
            raise UserError(f"{run.trajectory}: the model's tensor {name} is {shapes.get(name)}, not {shape}")
    params.tensors = {name: params.tensors[name] for name, _ in past.header.tensors}
    if stop - start > 1000:
        log.info("replaying steps %d to %d of the trajectory", start, stop)
    if stop > start or going_on:
        assert isinstance(session.optimizer, Mezo)  # the family of methods whose steps can be replayed
        with torch.no_grad():
            session.optimizer.recall(params, past.records(0, start))
            session.optimizer.apply(params, past.records(start, stop))
    return session


def _check_trajectory(config: Config, run: Run, what: str) -> None:
    if not config.method.trajectory:
        steps = {name: run.saved_step(name) for name in checkpoints.NAMES}
        held = [f"{name} (step {step})" for name, step in steps.items() if step is not None]
        raise UserError(
            f"{what}: optimizer={config.optimizer.name} leaves no trajectory to replay; "
            f"{run.checkpoints} holds {listed(held) or 'nothing'}"
        )


def _within(run: Run, past: Trajectory, step: int) -> None:
    if not 0 <= step <= len(past):
        raise UserError(f"step {step}: {run.trajectory} holds steps 0 to {len(past)}")


def _last(config: Config, run: Run, past: Trajectory) -> int:
    if run.status() == "finished" and len(past) != config.steps:
        raise UserError(f"{run.trajectory} is damaged: it holds {len(past)} of the run's {config.steps} steps")
    return len(past)


def _best(config: Config, run: Run, past: Trajectory) -> int:
    """Return the step of the highest dev score, the earlier on a tie; no evaluation may be missing."""
    evals = run.evaluations("dev")
    scores = {line["step"]: line[config.task.metric] for line in evals}
    finished = run.status() == "finished"
    for step in range(_last(config, run, past) + 1):
        if config.evaluates_at(step) and step not in scores and (finished or step < len(past)):
            raise UserError(f"{run.path / 'metrics.jsonl'} is damaged: it lacks the evaluation of step {step}")
    if not scores:
        raise UserError(f"{run.path}: no evaluation yet, so there is no best step")
    return int(max(scores, key=lambda step: (scores[step], -step)))
