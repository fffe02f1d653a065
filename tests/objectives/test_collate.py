"""Batches are copied to a device as parts of one tensor, from pinned memory under CUDA."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mezo_cli.objectives.collate import to_device


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_all_arrays_come_out_of_one_copy_that_nothing_waits_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is a stand-in: what would be copied to it stays on the CPU."""
    zeros, pinned, copies = torch.zeros, list[bool](), list[bool]()

    def make(*size: int, pin_memory: bool, **more: Any) -> Tensor:
        pinned.append(pin_memory)
        return zeros(*size, **more)

    def move(tensor: Tensor, device: Any, non_blocking: bool = False) -> Tensor:
        copies.append(non_blocking)
        return tensor.clone()

    monkeypatch.setattr(torch, "zeros", make)
    monkeypatch.setattr(Tensor, "to", move)
    arrays = {
        "odd": np.array([[True, False, True]]),
        "ids": np.array([[3, -1, 2**40], [5, 0, 1]]),
        "empty": np.zeros((0, 0), dtype=bool),
        "strided": np.arange(12, dtype=np.int32).reshape(3, 4)[:, 1:3],
        "last": np.array([7]),
    }
    device: Any = SimpleNamespace(type=kind)
    found = to_device(arrays, device)
    assert (pinned, copies) == ([kind == "cuda"], [True])
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == (torch.bool if array.dtype == bool else torch.int64)
        assert found[name].tolist() == array.tolist(), name
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1
