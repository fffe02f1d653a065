"""Running one module with other tensors in place of its parameters, and the memory for these."""

import pytest
import torch
from torch import nn

from mezo_cli.perturb.functional import CACHE_LINE, ScratchBuffer, linear_per_sign, swap_params

CPU = torch.device("cpu")


def test_allocations_are_aligned_nested_and_free_again() -> None:
    scratch = ScratchBuffer()
    with scratch.allocate(100, torch.float32, CPU) as outer:
        outer.fill_(1)
        with scratch.allocate(3, torch.bfloat16, CPU) as inner:
            inner.fill_(2)
            assert inner.data_ptr() % CACHE_LINE == 0
            assert inner.dtype == torch.bfloat16
        assert (outer == 1).all()
    assert scratch.used == 0
    capacity = scratch.capacity
    for _ in range(3):
        with scratch.allocate(100, torch.float32, CPU):
            pass
    assert scratch.capacity == capacity


def test_swap_params_runs_with_the_tensors_and_restores_the_parameters() -> None:
    module, x = nn.Linear(3, 2), torch.ones(1, 3)
    weight = module.weight
    out = swap_params(module, {"weight": torch.zeros(2, 3)}, module.forward, (x,), {})
    assert torch.equal(out[0], module.bias)
    assert module.weight is weight
    with pytest.raises(RuntimeError):
        swap_params(module, {"weight": torch.zeros(2, 5)}, module.forward, (x,), {})
    assert module.weight is weight


@pytest.mark.parametrize("bias", [True, False])
def test_linear_per_sign_is_one_linear_per_half(bias: bool) -> None:
    plus, minus, x = nn.Linear(3, 4, bias=bias), nn.Linear(3, 4, bias=bias), torch.randn(2, 5, 3)
    with torch.no_grad():
        out = linear_per_sign(x, [(plus.weight, plus.bias), (minus.weight, minus.bias)])
        torch.testing.assert_close(out, torch.stack([plus(x[0]), minus(x[1])]))
