"""Choose the device that a run computes on."""

import torch

from mezo_cli.errors import UserError

ALLOWED = "allowed: auto, cpu, cuda, cuda:N, mps"


def pick_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` is cuda where there is one, else cpu.

    Raises:
        UserError: when the name is not a device, or this machine does not have it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"model.device={name}: not a device; {ALLOWED}") from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"model.device={name}: not a device; {ALLOWED}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"model.device={name}: this machine has {torch.cuda.device_count()} CUDA devices")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("model.device=mps: this machine has no MPS device")
    return device
