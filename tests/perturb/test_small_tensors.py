"""The small tensors of the kernels: kept by key, and at the same addresses at every step."""

import torch
from torch import Tensor

from mezo_cli.perturb.noise.small_tensors import SmallTensors


def number(value: float) -> Tensor:
    return torch.full((3,), value)


def test_a_tensor_is_made_once_per_key() -> None:
    kept = SmallTensors(number, 4)
    assert kept.get(1.0) is kept.get(1.0)
    assert [kept.get(float(i))[0].item() for i in (2, 1, 3)] == [2.0, 1.0, 3.0]
    assert len(kept) == 3


def test_passes_with_other_keys_find_the_same_memory() -> None:
    kept, addresses = SmallTensors(number, 64), []
    for step in range(4):
        kept.begin_pass()
        of_pass = [kept.get(10.0 * step + i) for i in range(3)]
        assert [t[0].item() for t in of_pass] == [10.0 * step + i for i in range(3)]
        addresses.append([t.data_ptr() for t in of_pass])
    assert addresses == [addresses[0]] * 4
    assert len(set(addresses[0])) == 3


def test_no_more_than_the_most_are_kept_in_a_pass() -> None:
    kept = SmallTensors(number, 2)
    for i in range(5):
        assert kept.get(float(i))[0].item() == i
    assert len(kept) == 2
    with torch.inference_mode():
        assert not kept.get(9.0).is_inference()
