"""Restore the weights of any step of a run: load the nearest checkpoint, then replay the trajectory.

A checkpoint has every bit of the weights, and a replay runs the arithmetic of training, so the result is the same
whichever checkpoint it starts from. A method without a trajectory has only its checkpoints.
"""

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mezo_cli import models
from mezo_cli.config.optimizers import zeroth_order
from mezo_cli.config.schema import Config, StepRecord
from mezo_cli.console import progress_log
from mezo_cli.errors import UserError, join
from mezo_cli.process.device_errors import explain_device_errors
from mezo_cli.runs import Run, checkpoints, trajectory
from mezo_cli.runs.trajectory import Trajectory
from mezo_cli.training.prepare import load_session, smaller_model
from mezo_cli.training.session import Session

log = logging.getLogger("mezo")

OPTIMIZER_STATE = "optimizer.safetensors"  # in the checkpoint `last` of a method with moments
PART = 64  # steps that are replayed between two looks at the clock


def load_checkpoint(config: Config, run: Run, name: str) -> Session:
    """Return a session at the weights of `best`, `last` or a step number."""
    if name in checkpoints.NAMES and (run.checkpoints / name).is_dir():
        return load_verified(config, run, name)
    return load_step(config, run, find_step(config, run, name))


def find_step(config: Config, run: Run, name: str) -> int:
    """Return the step of `best`, `last` or a step number."""
    if name.isdecimal():
        return int(name)
    if name not in checkpoints.NAMES:
        raise UserError(f"--checkpoint {name}: allowed are {', '.join(checkpoints.NAMES)} or a step number")
    if run.status() == "finished":
        summary = run.read_summary()
        return int(summary["best"]["step"] if name == "best" else summary["steps"])
    stored = run.checkpoint_step(name)
    if stored is not None:
        return stored
    require_trajectory(config, run, name)
    last = len(run.read_trajectory())
    if name == "last":
        return last
    evaluations = dev_evaluations(config, run, run.metrics(), stop=last)
    if not evaluations:
        raise UserError(f"{run.path}: no evaluation yet, so there is no best step")
    return config.best_step(evaluations)


def dev_evaluations(
    config: Config, run: Run, lines: Sequence[Mapping[str, Any]], stop: int
) -> dict[int, Mapping[str, Any]]:
    """Return step -> line of every evaluation on dev among the lines of metrics.jsonl."""
    evaluations = {line["step"]: line for line in lines if line["kind"] == "eval" and line["split"] == "dev"}
    for step in range(stop):
        if config.evaluates_at(step) and step not in evaluations:
            raise UserError(f"{run.path / 'metrics.jsonl'} is damaged: it lacks the evaluation of step {step}")
    return evaluations


def load_step(config: Config, run: Run, step: int, for_resume: bool = False) -> Session:
    """Return a session at the weights of `step`, from the newest checkpoint that is not after it.

    `for_resume`: the state of the method (its moments) is rebuilt, too, so that training can continue.
    """
    saved = {name: run.checkpoint_step(name) for name in checkpoints.NAMES}
    if not config.optimizer.replayable and step in saved.values():
        return load_verified(config, run, next(name for name, at in saved.items() if at == step))
    past = _read_trajectory(config, run, step, for_resume)
    usable = [(at, name) for name, at in saved.items() if at is not None and at <= step]
    if not usable:
        return _check_weights(_replay(load_start(config, run, past), run, past, 0, step), run, step)
    at, name = max(usable)
    state, state_step = run.checkpoints / "last" / OPTIMIZER_STATE, saved["last"]
    if not state.is_file() or state_step is None or state_step > step or (at == step and not for_resume):
        return _replay(load_verified(config, run, name), run, past, at, step, for_resume)
    # The moments are stored: start from there, also when `best` is newer, which would need them rebuilt.
    return _replay(load_verified(config, run, "last"), run, past, state_step, step, for_resume, state)


def load_for_resume(config: Config, run: Run, step: int) -> Session:
    """Return a session at the weights and the optimizer state of `step`: training continues as if never stopped."""
    if config.optimizer.replayable:
        return load_step(config, run, step, for_resume=True)
    session = load_verified(config, run, "last")
    if not session.optimizer.replayable:
        session.optimizer.load_state(run.checkpoints / "last" / OPTIMIZER_STATE)
    return session


def replay_from_base(config: Config, run: Run, step: int) -> Session:
    """Return a session at the weights and the method's state of `step`, from base model and trajectory alone."""
    return next(replay_to_each(config, run, [step]))[1]


def _check_weights(session: Session, run: Run, step: int) -> Session:
    """Compare rebuilt weights with the sha256 that run.json has for their step, if it has one; return the session."""
    for name, known in (run.info().get("weights") or {}).items():
        found = models.fingerprint(session.loaded.model) if known["step"] == step else known["sha256"]
        if found != known["sha256"]:
            raise UserError(
                f"{run.path}: the rebuilt weights of step {step} ({name}) are not those of the run: sha256 "
                f"{found[:12]}..., expected {known['sha256'][:12]}..."
            )
    return session


def load_start(config: Config, run: Run, past: Trajectory | None = None) -> Session:
    """Return a session at the weights that the run began with, also of a method without a trajectory (`past`)."""
    session = load_session(config, restores=True)
    models.load_initial_state(session.loaded.model, run.initial_state_file)
    if past is None:
        models.check_fingerprint(session.loaded.model, run.info()["weights_fingerprint"], run.path / "run.json")
    else:
        models.check_fingerprint(session.loaded.model, past.header.fingerprint, run.trajectory)
    return session


def check_base(config: Config, run: Run) -> None:
    """Refuse a base model that is not the run's, from whose checkpoints weights may be loaded without a replay."""
    load_start(config, run, run.read_trajectory() if config.optimizer.replayable else None)
    gc.collect()  # memory may not hold two models


def replay_to_each(
    config: Config, run: Run, steps: Iterable[int], checks: bool = True
) -> Iterator[tuple[int, Session]]:
    """Yield (step, session) for each of the steps in order: one session, replayed from the base model on.

    `checks`: weights that are not those of the run are refused.
    """
    session, at = None, 0
    for step in sorted(set(steps)):
        past = _read_trajectory(config, run, step)
        if session is None:
            session = _replay(load_start(config, run, past), run, past, 0, step)
        elif session.optimizer.replayable:
            update = partial(session.optimizer.apply_updates, session.params)
            with torch.no_grad():
                _in_parts(past, at, step, update, "replaying the trajectory")
        at = step
        yield step, _check_weights(session, run, step) if checks else session


def load_verified(config: Config, run: Run, name: str) -> Session:
    """Return a session at the weights of checkpoint `best` or `last`, whose files match their checksums."""
    run.check_ends(run.info(), [f"checkpoints/{name}/{checkpoints.CHECKSUMS}"])
    checkpoints.verify(run.checkpoints / name)
    return load_session(config, run.checkpoints / name)


def _replay(
    session: Session,
    run: Run,
    past: Trajectory,
    start: int,
    stop: int,
    for_resume: bool = False,
    state: Path | None = None,
) -> Session:
    """Apply the updates of steps `start` to `stop` - 1 to the tensors that the trajectory's header lists.

    The method's state at `start` is rebuilt first where it is needed (for these updates, or to resume), or read from
    the file `state` if given.
    """
    params = session.params
    dtype, stored = session.config.model.dtype, past.header.dtype
    if stored != dtype:
        raise UserError(f"{run.trajectory}: the run stored its weights as {stored}, but model.dtype is {dtype}")
    shapes = {name: list(p.shape) for name, p in params.tensors.items()}
    for name, shape in past.header.tensors:
        if shapes.get(name) != shape:
            raise UserError(f"{run.trajectory}: the model's tensor {name} is {shapes.get(name)}, not {shape}")
    params.tensors = {name: params.tensors[name] for name, _ in past.header.tensors}
    params.nonnegative = past.header.nonnegative or []
    optimizer = session.optimizer
    if (stop > start or start == 0 or for_resume) and optimizer.replayable:  # at step 0 others may go on from it
        with torch.no_grad(), explain_device_errors(f"replaying {run.trajectory}", smaller_model(session.config)):
            first = start  # the weight decay of the steps before it that moved nothing is still to be applied
            while first > 0 and not (past.grads[first - 1].any() and past.lrs[first - 1]):
                first -= 1
            params.decay.rebuild(past.records(first, start), zeroth_order(session.config.optimizer).weight_decay)
            optimizer.keep_start(lambda: params if start == 0 else load_start(session.config, run, past).params)
            if state is not None:
                optimizer.load_state(state, start)
            else:
                _in_parts(past, 0, start, partial(optimizer.rebuild_state, params), "rebuilding the optimizer's state")
            _in_parts(past, start, stop, partial(optimizer.apply_updates, params), "replaying the trajectory")
    return session


def _in_parts(past: Trajectory, start: int, stop: int, work: Callable[[list[StepRecord]], None], what: str) -> None:
    """Call `work` on the records of steps `start` to `stop` - 1, part by part, and log the progress."""
    if stop - start > 1000:
        log.info("%s: steps %d to %d", what, start, stop)
    progress = progress_log(what, stop - start)
    for first in range(start, stop, PART):
        part = past.records(first, min(first + PART, stop))
        work(part)
        progress(first + len(part) - start)


def _read_trajectory(config: Config, run: Run, step: int, for_resume: bool = False) -> Trajectory:
    """Return the trajectory, which has to reach a step; `for_resume`: what follows may be damaged, and is cut."""
    require_trajectory(config, run, f"step {step}")
    past = trajectory.read(run.trajectory) if for_resume else run.read_trajectory()
    if not 0 <= step <= len(past):
        raise UserError(f"step {step}: {run.trajectory} holds steps 0 to {len(past)}")
    return past


def require_trajectory(config: Config, run: Run, what: str) -> None:
    """Refuse a run whose method writes no trajectory; `what` needs one."""
    if not config.optimizer.replayable:
        steps = {name: run.checkpoint_step(name) for name in checkpoints.NAMES}
        checkpoints_held = [f"{name} (step {step})" for name, step in steps.items() if step is not None]
        raise UserError(
            f"{what}: optimizer={config.optimizer.name} writes no trajectory to replay; "
            f"{run.checkpoints} holds {join(checkpoints_held) or 'nothing'}"
        )
