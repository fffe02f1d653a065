"""Tensors of which each rank holds a part."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezo_cli.perturb import shards
from mezo_cli.perturb.noise import Direction, make_noise
from mezo_cli.perturb.params import Params
from mezo_cli.perturb.shards import Shard, gathered_modules, shard_parameters
from tests.perturb.thread_ranks import ThreadGroup, run_ranks

Z = Direction(7, 3, 1)
CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("eager_kernels")


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype))


def shard(group: Any, *shape: int, dtype: torch.dtype = torch.float32, noise: str = "gaussian") -> Shard:
    return Shard("w", parameter(*shape, dtype=dtype), make_noise(noise).tile, group, CPU, dtype)


def expected(shape: tuple[int, ...], dtype: torch.dtype, noise: str, out: torch.dtype) -> Tensor:
    """Return theta + c z and theta - c z as one process computes them."""
    module = nn.ParameterDict({"w": parameter(*shape, dtype=dtype)})
    params = Params(module, make_noise(noise))
    both = torch.empty(2, params.span("w").numel, dtype=out)
    params.perturb(Z, params.span_of("w"), 1e-2, *both)
    return both[:, : math.prod(shape)].view(2, *shape)


# The second has rows that no part begins with; the last parts of the third lie behind its end.
@pytest.mark.parametrize("noise", ["gaussian", "rademacher"])
@pytest.mark.parametrize(
    ("ranks", "shape", "dtype", "out"),
    [
        (2, (300, 128), torch.float32, torch.float32),
        (3, (70, 999), torch.float32, torch.float32),
        (4, (5, 33), torch.float32, torch.bfloat16),
        (2, (301, 64), torch.bfloat16, torch.bfloat16),
    ],
)
def test_gathered_weights_have_the_bits_of_one_process(
    ranks: int, shape: tuple[int, ...], dtype: torch.dtype, out: torch.dtype, noise: str
) -> None:
    rows = torch.tensor([4, 0, 3, 0, shape[0] - 1])

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        one = shard(group, *shape, dtype=dtype, noise=noise)
        whole = torch.empty(2, one.numel, dtype=out)
        one.perturb(make_noise(noise), Z, 1e-2, *whole)
        of_rows = torch.empty(2, len(rows), *shape[1:], dtype=out)
        one.perturb_rows(make_noise(noise), Z, rows, 1e-2, of_rows)
        seen = whole[:, : math.prod(shape)].view(2, *shape)
        return seen, of_rows, one.read(None, dtype), one.read(rows, dtype), torch.cat(list(one.chunks()))

    wanted, theta = expected(shape, dtype, noise, out), parameter(*shape, dtype=dtype).data
    for seen, of_rows, read, read_rows, in_order in run_ranks(ranks, work):
        assert torch.equal(seen, wanted)
        assert torch.equal(of_rows, wanted[:, rows])
        assert torch.equal(read, theta)
        assert torch.equal(read_rows, theta[rows])
        assert torch.equal(in_order, theta.view(-1))


def test_the_sign_of_a_zero_survives_the_exchange() -> None:
    """A sum of floats would turn -0.0 into 0.0."""

    def work(group: ThreadGroup) -> Tensor:
        p = nn.Parameter(torch.full((300, 128), -0.0))
        one = Shard("w", p, make_noise("gaussian").tile, group, CPU, torch.float32)
        return one.read(torch.arange(300), torch.float32)

    assert all(bool(found.signbit().all()) for found in run_ranks(2, work))


def test_only_rows_that_are_looked_up_are_exchanged() -> None:
    def work(group: ThreadGroup) -> int:
        one = shard(group, 3000, 128)
        one.perturb_rows(make_noise("gaussian"), Z, torch.tensor([5, 2999]), 1e-3, torch.empty(2, 2, 128))
        return group.received

    assert run_ranks(2, work) == [0, 0]  # nothing was gathered


class Net(nn.Module):
    """Two layers that are sharded, and small ones that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(400, 128), nn.LayerNorm(128)
        self.up, self.down = nn.Linear(128, 200), nn.Linear(200, 3)
        generator = torch.Generator().manual_seed(0)  # torch's own is shared by the threads
        for p in self.parameters():
            p.data = 0.1 * torch.randn(p.shape, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(self.norm(self.table(ids)))))
        return out


def test_a_placeholder_takes_no_memory_and_has_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that reads one past the patched modules has no finite loss, so no run goes on with it."""
    monkeypatch.setattr(shards, "WHOLE", 1 << 12)

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor, list[str], float]:
        model, ids = Net(), torch.tensor([1, 2, 399])
        total, plain = sum(p.numel() for p in model.parameters()), model(ids)
        found = shard_parameters(model, make_noise("gaussian").tile, group, CPU, torch.float32)
        assert all(p.untyped_storage().nbytes() == 4 for name, p in model.named_parameters() if name in found)
        assert bool(model(ids).isnan().all())
        with gathered_modules(model, found):
            seen = model(ids)
        held = sum(one.local.numel for one in found.values())
        held += sum(p.numel() for name, p in model.named_parameters() if name not in found)
        return plain, seen, list(found), held / total

    for plain, seen, names, share in run_ranks(2, work):
        assert torch.equal(plain, seen)
        assert names == ["table.weight", "up.weight"]
        assert share < 0.53


def test_an_update_writes_this_ranks_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks update and then hold together what one process has."""
    monkeypatch.setattr(shards, "WHOLE", 1 << 12)
    terms = [(Z, 0.5), (Direction(7, 3, 2), -0.25)]
    model = Net()
    Params(model, make_noise("gaussian")).update(terms, [0.9, 1.0])

    def work(group: ThreadGroup) -> dict[str, Tensor]:
        net, noise = Net(), make_noise("gaussian")
        found = shard_parameters(net, noise.tile, group, CPU, torch.float32)
        params = Params(net, noise, found)
        params.update(terms, [0.9, 1.0])
        return {n: found[n].read(None, p.dtype) if n in found else p.data for n, p in net.named_parameters()}

    for found in run_ranks(2, work):
        assert all(torch.equal(p, found[name]) for name, p in model.named_parameters())
