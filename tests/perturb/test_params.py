"""The trainable tensors: their selection, their update, and their blocks."""

import pytest
import torch
from torch import nn

from mezo_cli.errors import UserError
from mezo_cli.perturb.noise import Direction, gaussian, make_noise
from mezo_cli.perturb.params import Params, graph_leaves


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(300, 700), nn.Linear(700, 5))
    layers[0].bias.requires_grad_(False)
    return layers


def test_tensors_are_the_trainable_ones_in_the_order_of_the_model() -> None:
    params = Params(model(), make_noise("gaussian"))
    assert list(params.tensors) == ["0.weight", "1.weight", "1.bias"]
    assert params.count == 300 * 700 + 700 * 5 + 5


def test_the_leaves_of_a_graph() -> None:
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    assert graph_leaves((a * 2 + b.exp()).sum()) == {id(a), id(b)}
    assert id(c) not in graph_leaves(a + b)


def test_what_is_not_in_the_graph_is_not_selected() -> None:
    layers = model()
    params = Params(layers, make_noise("gaussian"))
    assert params.select_reachable(layers[1](torch.ones(700))) == ["0.weight"]
    assert list(params.tensors) == ["1.weight", "1.bias"]
    with pytest.raises(UserError, match="nothing to train"):
        params.select_reachable(layers[0](torch.ones(1, 300)))


def test_a_long_update_makes_each_scaled_table_once() -> None:
    parts, whole = (Params(model(), make_noise("gaussian")) for _ in range(2))
    terms = [(Direction(1, step), 1e-3 * (step + 1)) for step in range(200)]
    gaussian.scaled_table.cache_clear()
    parts.update(terms, [1.0] * len(terms))
    assert gaussian.scaled_table.cache_info().misses == len(terms)  # not once for each of the three tensors
    for name, p in whole.tensors.items():
        whole.noise.update_(name, p.data, terms, [1.0] * len(terms))
        assert torch.equal(p, parts.tensors[name])


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_an_update_by_blocks_has_the_bits_of_an_update(kind: str) -> None:
    whole, parts = Params(model(), make_noise(kind)), Params(model(), make_noise(kind))
    terms, decays = [(Direction(1, 2), 0.5), (Direction(1, 3), -0.25)], [0.9, 1.0]
    before = {name: p.detach().clone() for name, p in whole.tensors.items()}
    whole.update(terms, decays)
    sizes: dict[str, int] = dict.fromkeys(parts.tensors, 0)
    for name, start, theta in parts.blocks():
        assert start == sizes[name]
        sizes[name] += theta.numel()
        parts.noise.update_(name, theta, terms, decays, start)
    assert sizes == {name: p.numel() for name, p in parts.tensors.items()}
    for name, p in whole.tensors.items():
        assert torch.equal(p, parts.tensors[name])
        z = [whole.noise.z(direction, name, p.shape, "cpu").view(p.shape) for direction, _ in terms]
        torch.testing.assert_close(p.detach(), 0.9 * before[name] + 0.5 * z[0] - 0.25 * z[1])
