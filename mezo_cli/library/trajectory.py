"""Record the steps of a `MezoOptimizer` in a trajectory file, continue such a file, and replay it on a model."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mezo_cli.config.schema import StepRecord
from mezo_cli.errors import UserError
from mezo_cli.models.initial_state import check_fingerprint, fingerprint
from mezo_cli.optim.mezo import gradient_estimate
from mezo_cli.perturb.noise import Direction, make_noise
from mezo_cli.perturb.params import Params
from mezo_cli.runs import trajectory
from mezo_cli.runs.trajectory import Header, Trajectory, Writer

OPTIMIZER = "MezoOptimizer"  # in the header: a run of the command line has the name of a choice there


def apply_records(
    params: Params,
    groups: Sequence[Mapping[str, Any]],
    seed: int,
    records: Sequence[StepRecord],
    deferred: list[float],
) -> None:
    """Update theta by each record in order: theta <- (1 - lr wd) theta - lr sum_i g_i z_i / n, group by group.

    Args:
        params: the tuned tensors.
        groups: each with `names`, `weight_decay`, and `lr_ratio`, its learning rate's ratio to the record's.
        seed: of the run.
        records: (step, the n projected gradients, the learning rate of the first group where it is not 0).
        deferred: the weight decay of each group that steps without a gradient have left to the next one, a factor (see
            perturb/decay.py); it is brought up to date.
    """
    for i, group in enumerate(groups):
        names = tuple(group["names"])
        params.decay.deferred[names] = deferred[i]
        terms: list[tuple[Direction, float]] = []
        decays: list[float] = []
        for step, grads, lr in records:
            rate = lr * group["lr_ratio"]
            terms += gradient_estimate(seed, step, grads, -rate)
            decays += [1.0 - rate * group["weight_decay"], *[1.0] * (len(grads) - 1)]
        params.update(terms, decays, names)
        deferred[i] = params.decay.deferred.pop(names, 1.0)


def make_header(model: nn.Module, params: Params, groups: Sequence[Mapping[str, Any]], seed: int, n: int) -> Header:
    """Return the header of the trajectory that starts from the model's weights as they are now."""
    decays = params.decay.in_float64 and any(group["weight_decay"] for group in groups)
    return Header(
        fingerprint=fingerprint(model),
        optimizer=OPTIMIZER,
        noise=params.noise.name,
        seed=seed,
        samples=n,
        weight_decay=float(groups[0]["weight_decay"]),
        tensors=[(name, list(p.shape)) for name, p in params.tensors.items()],
        settings={"groups": [dict(group) for group in groups]},
        decay="float64" if decays else None,
    )


def open_writer(path: Path, header: Header, step: int) -> Writer:
    """Open a file to record from step `step` on: a new one for step 0, else the file that has the steps before.

    Raises:
        UserError: when there is a file for step 0, or none that fits for a later step; it is left as it is.
    """
    if step == 0:
        try:
            return Writer(open(path, "xb"), header)
        except FileExistsError as error:
            raise UserError(
                f"{path}: there is a file already; to continue it, load the state_dict of its last step first"
            ) from error
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror})") from error
    recorded = trajectory.read(path)
    if changed(recorded.header, fingerprint=header.fingerprint) != header:
        raise UserError(f"{path}: its header does not fit this model and these settings")
    if len(recorded) < step:
        raise UserError(f"{path}: it has {len(recorded)} steps, and the state_dict is of step {step}")
    os.truncate(path, recorded.bytes_until(step))
    return Writer(open(path, "ab"), header, recorded.crc)


@torch.no_grad()
def replay(model: nn.Module, path: str | os.PathLike[str], step: int | None = None) -> int:
    """Give a model the weights that it had after step `step` of a recorded training, bit for bit.

    It must have the weights that the training started from. One draw of z per step and direction; no forward.

    Args:
        model: the model; its tuned tensors are written in place.
        path: the trajectory file that `MezoOptimizer(trajectory=...)` wrote.
        step: the number of steps; all when None.

    Returns:
        The number of steps that were replayed.

    Raises:
        UserError: when the file is damaged or of a run directory, the model does not have the tensors or the initial
            weights, or `step` is out of range. The weights are then as they were.
    """
    path = Path(path)
    recorded = trajectory.read(path)
    if recorded.header.optimizer != OPTIMIZER:
        raise UserError(
            f"{path}: a trajectory of optimizer={recorded.header.optimizer}; `mezo replay RUN` reads its run"
        )
    step = len(recorded) if step is None else step
    if not 0 <= step <= len(recorded):
        raise UserError(f"step={step}: {path} holds steps 0 to {len(recorded)}")
    params = _params_of(model, recorded, path)
    check_fingerprint(model, recorded.header.fingerprint, path)
    params.decay.in_float64, groups = recorded.header.decay is not None, recorded.header.settings["groups"]
    apply_records(params, groups, recorded.header.seed, recorded.records(0, step), [1.0] * len(groups))
    return step


def _params_of(model: nn.Module, recorded: Trajectory, path: Path) -> Params:
    """Return the tensors that the trajectory names."""
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    for name, shape in recorded.header.tensors:
        if shapes.get(name) != shape:
            raise UserError(f"{path}: the model has no tensor {name} of shape {shape}")
    return Params(model, make_noise(recorded.header.noise), names={name for name, _ in recorded.header.tensors})
