"""Dropout for optimizers that backpropagate: on during a step, off in evaluations, the same if a step is repeated."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch
from torch import nn


def set_rate(model: nn.Module, rate: float) -> None:
    """Set the rate of all dropout of a model: its dropout modules, and the attributes that attention reads."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, rate)


@contextmanager
def dropout(model: nn.Module, seed: int, step: int) -> Iterator[None]:
    """Turn the model's dropout on, drawn from (seed, step) alone: a repeated step drops the same units.

    The states of torch's global generators are restored. Their streams differ between CPU and CUDA.
    """
    device = next(model.parameters()).device
    key = blake2b(f"dropout\0{seed}\0{step}".encode(), digest_size=7).digest()  # torch takes a seed of up to 63 bits
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(key, "little"))
        model.train()
        try:
            yield
        finally:
            model.eval()
