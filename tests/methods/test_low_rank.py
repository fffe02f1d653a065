"""Low-rank noise: what z is, which steps share V, and that every way to draw a part of it gives the same bits."""

from typing import cast

import pytest
import torch
from torch import nn

from mezo_cli.methods.lozo.noise import LowRankNoise
from mezo_cli.methods.lozo.settings import LozoConfig
from mezo_cli.optim import make_config
from mezo_cli.perturb.noise import Direction
from mezo_cli.perturb.params import Params

CPU = torch.device("cpu")


def low_rank(noise: str = "gaussian", rank: int = 4, interval: int = 3) -> LowRankNoise:
    config = cast(LozoConfig, make_config("lozo", noise=noise, rank=rank, interval=interval))
    return cast(LowRankNoise, config.make_noise())


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZO_EAGER", "1")
    monkeypatch.setattr("mezo_cli.methods.lozo.noise.CHUNK", 64)


@pytest.mark.parametrize("noise", ["gaussian", "rademacher", "torch"])
def test_z_is_u_v_transposed_on_a_matrix_and_dense_elsewhere(noise: str) -> None:
    drawn, direction = low_rank(noise), Direction(1, 5, 2)
    u, v = drawn.left(direction, "w", (40, 30), CPU), drawn.right(direction, "w", (40, 30), CPU)
    z = drawn.z(direction, "w", (40, 30), CPU).view(40, 30)
    torch.testing.assert_close(z.double(), u.double() @ v.double().t(), rtol=1e-6, atol=1e-6)
    assert torch.linalg.matrix_rank(z) == 4
    for shape in ((40,), (3, 30), (5, 6, 7)):
        assert torch.equal(drawn.z(direction, "w", shape, CPU), drawn.base.z(direction, "w", shape, CPU))


def test_v_is_kept_for_an_interval_and_shared_by_its_samples() -> None:
    drawn, shape = low_rank(), (40, 30)
    v = [drawn.right(Direction(1, step, sample), "w", shape, CPU) for step, sample in ((3, 0), (5, 2), (6, 0))]
    assert torch.equal(v[0], v[1])
    assert not torch.equal(v[0], v[2])
    u = [drawn.left(Direction(1, step, sample), "w", shape, CPU) for step, sample in ((3, 0), (4, 0), (4, 1))]
    assert len({tuple(some.flatten().tolist()) for some in u}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_part_of_z_has_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    drawn, direction = low_rank(), Direction(1, 5)
    model = nn.Linear(300, 200).to(dtype)
    params = Params(model, drawn)
    whole = drawn.z(direction, "weight", (200, 300), CPU)
    assert torch.equal(drawn.z(direction, "weight", (200, 300), CPU, 777, 50_001), whole[777:50_001])
    span = params.span_of["weight"]
    plus, minus = torch.empty(2, span.numel, dtype=dtype)
    drawn.perturb(direction, span, 0.25, plus, minus)
    theta = model.weight.detach().float().flatten().clone()
    assert torch.equal(plus[:60_000], (theta + whole * 0.25).to(dtype))
    assert torch.equal(minus[:60_000], (theta - whole * 0.25).to(dtype))
    rows = torch.tensor([3, 199, 3])
    some = torch.empty(3, 300, dtype=dtype)
    drawn.perturb_rows(direction, "weight", model.weight.data, rows, 0.25, some)
    assert torch.equal(some, plus[:60_000].view(200, 300)[rows])
    updated = model.weight.detach().float()
    for _, part in span.split(4096):
        piece = part.pieces[0]
        theta_part = updated.view(-1)[piece.start : piece.start + piece.numel]
        padded = torch.zeros(part.numel)
        padded[: piece.numel] = theta_part
        drawn.update_(part, padded, [(direction, 0.25)], [1.0])
        theta_part.copy_(padded[: piece.numel])
    assert torch.equal(updated.view(-1), theta + whole * 0.25)
