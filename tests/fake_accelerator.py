"""Take steps on a device that computes nothing: `MEZO_EAGER=1 python -m tests.fake_accelerator FOLDER CASE ...`.

torch calls the device `fakegpu`. Its tensors have a shape, a dtype and a device, but no values; mixing
them with tensors of the CPU is an error. Each case prints one line of JSON: its error, or where the host waited for
the device and what it copied to it. Reading values returns made-up numbers; checks of values are skipped by name.
"""

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import AutoModelForCausalLM

from mezo_cli import models
from mezo_cli.objectives.decoding import Decoder, Sampling
from tests import tiny
from tests.device_cases import CASES, HostWaits, case_config, take_steps

_setup_privateuseone_for_python_backend("fakegpu")
DEVICE = torch.device("fakegpu:0")


def made_up(shape: torch.Size) -> Any:
    """Return numbers in place of a tensor's values: the losses of a step."""
    if not shape:
        return 0.5
    return [made_up(shape[1:]) if len(shape) > 1 else 0.5 + i / 8 for i in range(shape[0])]


def to_fake(model: nn.Module) -> None:
    """Replace parameters and buffers by tensors of the fake device; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                fake = made.setdefault(id(p), nn.Parameter(torch.empty_like(p, device=DEVICE), p.requires_grad))
                module._parameters[name] = fake
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=DEVICE)


def tensor(original: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """Stand in for `torch.tensor`, which the fake device lacks: make it on the CPU and copy it, and wait."""
    made = original(*args, **kwargs)
    return made if device is None else made.to(device)


def apply(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """Stand in for `nn.Module._apply` (`to`, `float`): torch's own cannot move a parameter to the fake device."""
    for child in module.children() if recurse else ():
        child._apply(function)
    for name, p in module._parameters.items():
        if p is not None and (moved := function(p.data)) is not p.data:
            module._parameters[name] = nn.Parameter(moved, p.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


@contextlib.contextmanager
def fake_device() -> Iterator[None]:
    """Let tensors of `DEVICE` be made inside, and stand in for what torch lacks for it."""
    replaced = {
        # Of tensors up to this size torch would keep the values, and copy them for real.
        "torch._subclasses.fake_tensor.CONSTANT_NUMEL_LIMIT": -1,
        "torch.tensor": partial(tensor, torch.tensor),
        "torch.nn.Module._apply": apply,
    }
    with replace(replaced), FakeTensorMode(allow_non_fake_inputs=True):
        yield


def replace(objects: dict[str, Any]) -> contextlib.ExitStack:
    """Return a context in which other objects have these names."""
    stack = contextlib.ExitStack()
    for name, value in objects.items():
        stack.enter_context(mock.patch(name, value))
    return stack


def run_case(name: str, folder: Path) -> dict[str, Any]:
    """Return what the host did in the case: the product's own set-up, without its checks of values."""

    def load(config: Any, *more: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            loaded = original(config.replace(device="cpu"), *more, **options)
        to_fake(loaded.model)
        loaded.device = DEVICE
        return loaded

    original, config = models.load, case_config(name, folder, "cpu")
    replaced = {
        "mezo_cli.models.load": load,
        "mezo_cli.adapters.adapter.fingerprint": lambda *_, **__: "",
        "mezo_cli.objectives.plain_check.PlainCheck.compare": lambda *_: None,
        "torch.Tensor.numpy": lambda x: np.array(made_up(x.shape)),  # a linear probe reads its features so
    }
    with replace(replaced), fake_device():
        hosts = take_steps(config, made_up)
    return {key: {"waits": host.waits, "copies": host.copies} for key, host in hosts.items()}


def complete_prompts(folder: Path) -> dict[str, Any]:
    """Return what the host did while six tokens were drawn for two prompts of different lengths."""
    model = AutoModelForCausalLM.from_pretrained(tiny.decoder(folder / "llama", "llama")).eval()
    sampling = Sampling(max_new_tokens=6, temperature=1.0, stop=(), keep_stop=False)
    with fake_device():
        to_fake(model)
        with HostWaits(lambda shape: [7] * shape[0] if shape else 0) as host:
            Decoder(model, tiny.metaspace()).complete([[5, 6, 7], [8, 9]], [(0, 0), (1, 0)], sampling)
    return {"waits": host.waits, "copies": host.copies}


def main(folder: Path, names: list[str]) -> None:
    for name in names:
        try:
            result = complete_prompts(folder) if name == "generation" else run_case(name, folder)
        except Exception:
            result = {"error": traceback.format_exc()}
        print(json.dumps({"case": name, **result}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
