"""Stochastic rounding: the mean is the value, what needs no rounding stays, the bits are a function of their key."""

import pytest
import torch
from torch import Tensor

from mezo_cli.perturb.noise import Direction
from mezo_cli.perturb.noise.rounding import FUNCTIONS, MAX_ELEMENTS, kernel, round_
from mezo_cli.perturb.noise.spans import Segment, Span, tiles_of

Z = Direction(seed=42, step=7)
TILE = 256  # that of gaussian noise
# Sizes from the subnormal numbers of float16 to its largest.
SCALES = {torch.bfloat16: (1e-39, 1e-8, 1.0, 1e6, 1e38), torch.float16: (1e-7, 2e-5, 1e-3, 1.0, 2e4)}

pytestmark = pytest.mark.usefixtures("eager_kernels")


@pytest.fixture(params=list(FUNCTIONS), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


def span_of(numel: int, name: str = "w", tile: int = TILE) -> Span:
    """Return a span of storage for one tensor."""
    return Segment(torch.empty(tiles_of(numel, tile) * tile), [(name, (numel,))], tile).whole


def rounded_to(
    dtype: torch.dtype, values: Tensor, name: str = "w", direction: Direction = Z, tile: int = TILE
) -> Tensor:
    """Return the rounded values of a tensor."""
    span = span_of(len(values), name, tile)
    padded = torch.nn.functional.pad(values, (0, span.numel - len(values)))
    round_(padded, span, dtype, direction)
    return padded[: len(values)]


def values_of(dtype: torch.dtype, n: int) -> Tensor:
    """Return n values of each scale, of both signs."""
    normal = torch.randn(n, generator=torch.Generator().manual_seed(n))
    return torch.cat([normal * scale for scale in SCALES[dtype]]) if n else torch.empty(0)


def neighbours(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return, in float64, the values of `dtype` next to 0 and next away from it, by its integers."""
    stored = values.abs().to(dtype)
    below = torch.where(stored.double() > values.abs().double(), stored.view(torch.int16) - 1, stored.view(torch.int16))
    low, high = below.view(dtype).double(), (below + 1).view(dtype).double()
    sign = values.double().sign()
    return low * sign, high * sign


def test_a_value_becomes_one_of_its_two_neighbours_and_is_right_in_expectation(dtype: torch.dtype) -> None:
    values, times = values_of(dtype, 40), 1 << 16
    low, high = neighbours(values, dtype)
    bits = torch.arange(times, dtype=torch.int32)  # every value that the bits can have, once
    rounded = torch.stack([FUNCTIONS[dtype](value.expand(times), bits).double() for value in values])
    assert ((rounded == low[:, None]) | (rounded == high[:, None])).all()
    share = (values.double() - low) / (high - low)
    # exact, but for the subnormal numbers of float16: there the share may be off by the size of one of the bits' values
    assert ((rounded == high[:, None]).double().mean(1) - share).abs().max() <= 1 / times
    if dtype == torch.bfloat16:
        assert torch.equal((rounded == high[:, None]).double().mean(1), share)


def test_a_value_that_the_dtype_represents_stays(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)  # each of its values
    rounded = rounded_to(dtype, every.float())
    assert torch.equal(rounded.isnan(), every.isnan())
    assert torch.equal(rounded.to(dtype).view(torch.int16)[~every.isnan()], every.view(torch.int16)[~every.isnan()])


def test_beyond_the_largest_value_lies_infinity() -> None:
    bits = torch.arange(0, 1 << 16, 16, dtype=torch.int32)
    for value, dtype, up in (
        (65520.0, torch.float16, 0.5),
        (-65504.0 - 8, torch.float16, 0.25),
        (65536.0, torch.float16, 1.0),
        (-1e6, torch.float16, 1.0),
        (3.3961776e38, torch.bfloat16, 0.5),
        (-torch.inf, torch.float16, 1.0),
        (torch.inf, torch.bfloat16, 1.0),
    ):
        rounded = FUNCTIONS[dtype](torch.full(bits.shape, value), bits)
        infinite = rounded.isinf()
        assert float(infinite.float().mean()) == pytest.approx(up, abs=1e-3), value
        assert (rounded[~infinite].abs() == torch.finfo(dtype).max).all()
        assert (rounded.sign() == (1 if value > 0 else -1)).all()


@pytest.mark.parametrize("tile", [TILE, pytest.param(4096, marks=pytest.mark.slow)])
def test_eager_and_compiled_round_alike(dtype: torch.dtype, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (1, 5000, MAX_ELEMENTS + 5):
        values = torch.randn(n, generator=torch.Generator().manual_seed(n)) * torch.logspace(-9, 4, n)
        results = []
        for flag in ("0", "1"):
            monkeypatch.setenv("MEZO_EAGER", flag)
            results.append(rounded_to(dtype, values, tile=tile))
        assert torch.equal(*results)
        assert not torch.equal(values, results[0])
        assert torch.equal(results[0], results[0].to(dtype).float())
    assert kernel(dtype, tile).compiled


def test_the_bits_depend_neither_on_the_part_nor_on_the_tile_nor_on_the_tensors_beside_it(dtype: torch.dtype) -> None:
    values = torch.randn(16 * TILE)
    whole, parts = rounded_to(dtype, values), values.clone()
    span = span_of(len(values))
    for place, part in span.split(3 * TILE):
        round_(parts[place], part, dtype, Z)
    assert torch.equal(whole, parts)
    assert torch.equal(whole, rounded_to(dtype, values, tile=4096))  # that of rademacher noise
    both = torch.cat([values, values])
    round_(both, Segment(both, [("v", (len(values),)), ("w", (len(values),))], TILE).whole, dtype, Z)
    assert torch.equal(whole, both[len(values) :])
    assert not torch.equal(whole, both[: len(values)])


def test_bits_differ_between_tensors_steps_and_seeds(dtype: torch.dtype) -> None:
    def ups(name: str, direction: Direction) -> Tensor:
        values = torch.full((100 * TILE,), 1.0 + torch.finfo(dtype).eps / 2)
        return (rounded_to(dtype, values, name, direction) > 1.0).double()

    first = ups("w", Z)
    assert float(first.mean()) == pytest.approx(0.5, abs=0.02)
    for other in (ups("v", Z), ups("w", Direction(42, 8)), ups("w", Direction(43, 7))):
        assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 0.03
    assert torch.equal(first, ups("w", Z))
