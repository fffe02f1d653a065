"""Record the steps of a `MezoOptimizer` in a trajectory file, continue such a file, and replay it on a model."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mezo_cli.errors import UserError
from mezo_cli.library.settings import StepSettings, Updates, check_settings
from mezo_cli.models.stored_tensors import check_fingerprint, fingerprint
from mezo_cli.perturb.noise import make_noise
from mezo_cli.perturb.params import Params
from mezo_cli.runs import trajectory
from mezo_cli.runs.trajectory import Header, Writer

OPTIMIZER = "MezoOptimizer"  # in the header: a run of the command line has the name of a choice there


def open_writer(
    path: Path, step: int, model: nn.Module, params: Params, groups: Sequence[Mapping[str, Any]], settings: StepSettings
) -> Writer:
    """Open a file to record from step `step` on: a new one for step 0, else the file that has the steps before.

    A new one starts from the model's weights as they are now.
    """
    dtype, method = str(params.dtype).removeprefix("torch."), settings.method_settings()
    header = Header(
        fingerprint=fingerprint(model),
        optimizer=OPTIMIZER,
        noise=params.noise.name,
        seed=settings.seed,
        samples=settings.samples,
        weight_decay=float(groups[0]["weight_decay"]),
        tensors=[(name, list(p.shape)) for name, p in params.tensors.items()],
        settings={"groups": [dict(group) for group in groups]} | ({"method": method} if method else {}),
        dtype=dtype,
        rounding=trajectory.ROUNDINGS[dtype],
        decay="float64" if any(group["weight_decay"] for group in groups) else None,
    )
    if step == 0:
        try:
            return Writer(open(path, "xb"), header)
        except FileExistsError as error:
            why = "to continue it, load the state_dict of its last step first"
            raise UserError(f"{path}: there is a file already; {why}") from error
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
        path: the trajectory file that `MezoOptimizer(trajectory=...)` wrote.
        step: the number of steps; all when None.

    Returns:
        The number of steps that were replayed.
    """
    path = Path(path)
    recorded = trajectory.read(path)
    recorded.check_end(path)
    if recorded.header.optimizer != OPTIMIZER:
        why = f"a trajectory of optimizer={recorded.header.optimizer}; `mezo replay RUN` reads its run"
        raise UserError(f"{path}: {why}")
    step = len(recorded) if step is None else step
    if not 0 <= step <= len(recorded):
        raise UserError(f"step={step}: {path} holds steps 0 to {len(recorded)}")
    header, tensors = recorded.header, dict(model.named_parameters())
    for name, shape in header.tensors:
        if name not in tensors or list(tensors[name].shape) != shape:
            raise UserError(f"{path}: the model has no tensor {name} of shape {shape}")
        if tensors[name].dtype != getattr(torch, header.dtype):
            raise UserError(f"{path}: {name} was trained in {header.dtype}; the model has it in {tensors[name].dtype}")
    params = Params(model, make_noise(header.noise), names={name for name, _ in header.tensors})
    check_fingerprint(model, header.fingerprint, path)
    groups, method = header.settings["groups"], header.settings.get("method", {})
    settings = check_settings(noise=header.noise, seed=header.seed, samples=header.samples, **method)
    Updates(params, [group["names"] for group in groups], settings).apply(groups, recorded.records(0, step))
    return step
