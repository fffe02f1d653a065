"""The weights of any step of a run: the nearest checkpoint, copied into a session at the run's start, then a replay.

A checkpoint has every bit of the weights, and a replay runs the arithmetic of training, so the result is the same
whichever checkpoint it starts from. A method without a trajectory has only its checkpoints.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mezo_cli import models
from mezo_cli.config.optimizers import zeroth_order
from mezo_cli.config.schema import Config, StepRecord
from mezo_cli.console import log, progress_log
from mezo_cli.errors import UserError, join
from mezo_cli.models.download import weight_files
from mezo_cli.models.stored_tensors import copy_stored
from mezo_cli.process.memory import explain_device_errors
from mezo_cli.runs import Run, checkpoints, trajectory
from mezo_cli.runs.trajectory import Trajectory
from mezo_cli.session.session import Session, smaller_model

OPTIMIZER_STATE = "optimizer.safetensors"  # in the checkpoint `last` of a method with moments
PART = 64  # steps that are replayed between two looks at the clock


# --- which step ---


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


def find_checkpoint(run: Run, at: str | int) -> str | None:
    """Return which checkpoint, `best` or `last`, has the weights of `best`, `last` or a step number."""
    if isinstance(at, str):
        return at if at in checkpoints.NAMES and (run.checkpoints / at).is_dir() else None
    return next((name for name in checkpoints.NAMES if run.checkpoint_step(name) == at), None)


def verified(run: Run, name: str) -> Path:
    """Return the folder of the checkpoint `best` or `last`, whose files match their checksums."""
    run.check_ends(run.info(), [f"checkpoints/{name}/{checkpoints.CHECKSUMS}"])
    checkpoints.verify(run.checkpoints / name)
    return run.checkpoints / name


# --- from the start of the run to a step ---


def go_to(session: Session, run: Run, step: int, past: Trajectory | None = None) -> None:
    """Bring a session from the run's start to the weights of `step`: by the newest checkpoint that is not after it.

    The method's state is brought there, too, so that training can continue as if it had never stopped. `past` is the
    trajectory; None: it is read here, and what follows the step may be damaged, as a crash leaves it.
    """
    optimizer, state = session.optimizer, run.checkpoints / "last" / OPTIMIZER_STATE
    if not optimizer.replayable:
        copy_checkpoint(session, run, "last")
        optimizer.load_state(state)
        return
    past = past or read_trajectory(session.config, run, step, resumes=True)
    _begin_replay(session, run, past)
    stored = {name: at for name in checkpoints.NAMES if (at := run.checkpoint_step(name)) is not None and at <= step}
    # From `best` the moments would have to be rebuilt, though it be newer than `last`, which stores them.
    name = "last" if "last" in stored and state.is_file() else max(stored, key=lambda one: stored[one], default=None)
    if name is not None:
        copy_checkpoint(session, run, name)
    start = session.at
    with torch.no_grad(), explain_device_errors(f"replaying {run.trajectory}", smaller_model(session.config)):
        first = start  # the weight decay of the steps before it that moved nothing is still to be applied
        while first > 0 and not (past.grads[first - 1].any() and past.lrs[first - 1]):
            first -= 1
        decay = zeroth_order(session.config.optimizer).weight_decay
        session.params.decay.rebuild(past.records(first, start), decay)
        if name == "last" and state.is_file():
            optimizer.load_state(state, start)
        else:
            rebuild = partial(optimizer.rebuild_state, session.params)
            _in_parts(past, 0, start, rebuild, "rebuilding the optimizer's state")
    _replay(session, run, past, step)
    check_weights(session, run)


def copy_checkpoint(session: Session, run: Run, name: str) -> None:
    """Copy the weights of the checkpoint `best` or `last` into a session of the run."""
    folder, adapter = verified(run, name), session.loaded.adapter
    if adapter is not None:
        adapter.load(folder)
    else:
        copy_stored(session.loaded.model, weight_files(folder, str(folder)))
    session.at = run.checkpoint_step(name) or 0


def replayed(session: Session, run: Run, steps: Iterable[int]) -> Iterator[int]:
    """Bring a session from the run's start to each of the steps, in order, by the trajectory alone, and yield them."""
    wanted = sorted(set(steps))
    past = read_trajectory(session.config, run, wanted[-1])
    _begin_replay(session, run, past)
    for step in wanted:
        _replay(session, run, past, step)
        yield step


def check_weights(session: Session, run: Run) -> None:
    """Compare rebuilt weights with the sha256 that run.json has for their step, if it has one."""
    for name, recorded in (run.info().get("weights") or {}).items():
        found = models.fingerprint(session.loaded.model) if recorded["step"] == session.at else recorded["sha256"]
        if found != recorded["sha256"]:
            raise UserError(
                f"{run.path}: the rebuilt weights of step {session.at} ({name}) are not those of the run: sha256 "
                f"{found[:12]}..., expected {recorded['sha256'][:12]}..."
            )


def _begin_replay(session: Session, run: Run, past: Trajectory) -> None:
    """Train the tensors that the trajectory's header lists, and let the method keep the start."""
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
    assert session.optimizer.replayable
    session.optimizer.keep_start(params)


def _replay(session: Session, run: Run, past: Trajectory, step: int) -> None:
    """Apply the updates between the step that a session is at and `step`; its method's state is of the first one."""
    assert session.optimizer.replayable
    with torch.no_grad(), explain_device_errors(f"replaying {run.trajectory}", smaller_model(session.config)):
        update = partial(session.optimizer.apply_updates, session.params)
        _in_parts(past, session.at, step, update, "replaying the trajectory")
    session.at = step


def _in_parts(past: Trajectory, start: int, stop: int, work: Callable[[list[StepRecord]], None], what: str) -> None:
    """Call `work` on the records of steps `start` to `stop` - 1, part by part, and log the progress."""
    if stop - start > 1000:
        log.info("%s: steps %d to %d", what, start, stop)
    progress = progress_log(what, stop - start)
    for first in range(start, stop, PART):
        part = past.records(first, min(first + PART, stop))
        work(part)
        progress(first + len(part) - start)


def read_trajectory(config: Config, run: Run, step: int, resumes: bool = False) -> Trajectory:
    """Return the trajectory, which has to reach a step; `resumes`: what follows may be damaged, and is cut."""
    require_trajectory(config, run, f"step {step}")
    past = trajectory.read(run.trajectory) if resumes else run.read_trajectory()
    if not 0 <= step <= len(past):
        raise UserError(f"step {step}: {run.trajectory} holds steps 0 to {len(past)}")
    return past


def require_trajectory(config: Config, run: Run, what: str) -> None:
    """Refuse a run whose method writes no trajectory; `what` needs one."""
    if not config.optimizer.replayable:
        steps = {name: run.checkpoint_step(name) for name in checkpoints.NAMES}
        held = join(f"{name} (step {step})" for name, step in steps.items() if step is not None) or "nothing"
        why = f"optimizer={config.optimizer.name} writes no trajectory to replay; {run.checkpoints} holds {held}"
        raise UserError(f"{what}: {why}")
