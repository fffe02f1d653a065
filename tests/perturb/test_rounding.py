"""Theta in half precision: each step is rounded once, right in expectation, by bits that follow from their key."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import NOISES, Direction, make_noise
from mezo_cli.perturb.noise.compiled import Kernel
from mezo_cli.perturb.noise.rounding import FUNCTIONS, MAX_ELEMENTS, kernel, round_
from mezo_cli.perturb.noise.spans import Segment, Span, tiles_of
from mezo_cli.perturb.params import Params

pytestmark = pytest.mark.usefixtures("eager_kernels")

Z = Direction(seed=42, step=7)
TILE = 256  # that of gaussian noise
# Sizes from the subnormal numbers of float16 to its largest.
SCALES = {torch.bfloat16: (1e-39, 1e-8, 1.0, 1e6, 1e38), torch.float16: (1e-7, 2e-5, 1e-3, 1.0, 2e4)}


@pytest.fixture(params=list(FUNCTIONS), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


def span_of(numel: int, name: str = "w", tile: int = TILE) -> Span:
    """Return a span of storage for one tensor."""
    return Segment(torch.empty(tiles_of(numel, tile) * tile), [(name, (numel,))], tile).whole


def rounded_to(
    dtype: torch.dtype, values: Tensor, name: str = "w", direction: Direction = Z, tile: int = TILE
) -> Tensor:
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


KINDS = ["gaussian", "rademacher"]
DTYPES = [torch.bfloat16, torch.float16]
Terms = Sequence[tuple[Direction, float]]


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 90), nn.Linear(90, 5)).to(dtype)


def params(dtype: torch.dtype, kind: str = "gaussian") -> Params:
    return Params(model(dtype), make_noise(kind))


def values(made: Params) -> Tensor:
    return torch.cat([p.detach().flatten() for p in made.tensors.values()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_steps_follow_the_float64_trajectory_and_rounding_to_nearest_does_not(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weight decay alone, whose effect adds up; one step of it is far below the spacing of the values."""
    made, nearest, steps = params(dtype), params(dtype), 300
    start = values(made).double()
    terms, decays = [(Direction(5, step), 1e-30) for step in range(steps)], [1 - 1e-4] * steps
    exact = start * (1 - 1e-4) ** steps
    made.update(terms, decays)
    nearest.fuses = False
    monkeypatch.setattr("mezo_cli.perturb.params.round_", lambda theta, span, dtype, _: theta.copy_(theta.to(dtype)))
    nearest.update(terms, decays)
    assert torch.equal(values(nearest).double(), start)  # every update is lost
    scale = start.abs().mean()
    assert abs(float((values(made).double() - exact).mul(start.sign()).mean() / scale)) < 1e-3
    assert float((exact - start).abs().mean() / scale) > 0.02


@pytest.mark.parametrize("nonnegative", [[], ["0.bias"]])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES], ids=str)
def test_a_replay_of_many_steps_has_the_bits_of_one_term_at_a_time(
    kind: str, dtype: torch.dtype, nonnegative: list[str]
) -> None:
    at_once, one_by_one = params(dtype, kind), params(dtype, kind)
    at_once.nonnegative = nonnegative
    terms, decays = [], []
    for step in range(7):
        samples = 80 if step == 3 else 1 + step % 3  # one step has more terms than a pass, and than tables are kept
        of_step = [(Direction(3, step, sample), 1e-3 * (sample - 1)) for sample in range(samples)]
        terms += of_step
        decays += [0.999, *[1.0] * (samples - 1)]
        for span in one_by_one.blocks(one_by_one.noise.block):
            theta = one_by_one.load(span)
            for i, term in enumerate(of_step):
                one_by_one.noise.update_(span, theta, [term], [1.0 if i else 0.999], decay_in_float64=True)
            one_by_one.round_(span, theta, of_step[0][0])
            one_by_one.store(span, theta)
        for name in nonnegative:
            one_by_one.tensors[name].data.clamp_(min=0.0)
    at_once.update(terms, decays)
    assert torch.equal(values(at_once), values(one_by_one))
    assert not torch.equal(values(at_once), values(params(dtype, kind)))


@pytest.mark.parametrize("kind", [*KINDS, "uniform"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_kernel_per_step_gives_the_bits_of_update_and_rounding(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NOISES.targets, "uniform", "tests.perturb.uniform_noise:uniform_noise")
    fused, apart = params(dtype, kind), params(dtype, kind)
    apart.fuses = False
    for made in (fused, apart):
        # Also what no finite sum gives: the first elements are inf, -inf, nan and the largest value.
        first = next(iter(made.tensors.values())).data.view(-1)
        first[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).max])
        first[4:90] *= torch.logspace(-9, 4, 86)
    terms = [(Direction(3, step), 1e-3 * (step - 1)) for step in range(5)]
    calls: list[Kernel] = []
    monkeypatch.setattr(Kernel, "__call__", counting(Kernel.__call__, calls))
    fused.update(terms, [1.0, 0.999, 1.0, 0.5, 1.0])
    assert len(calls) == len(terms)
    apart.update(terms, [1.0, 0.999, 1.0, 0.5, 1.0])
    assert len(calls) == 3 * len(terms)
    assert torch.equal(values(fused).view(torch.int16), values(apart).view(torch.int16))
    assert not torch.equal(values(fused)[4:], values(params(dtype, kind))[4:])


def counting(call: Callable[..., None], calls: list[Kernel]) -> Callable[..., None]:
    def counted(kernel: Kernel, *tensors: Tensor) -> None:
        calls.append(kernel)
        call(kernel, *tensors)

    return counted


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_forward_sees_theta_plus_eps_z_rounded_once_to_the_compute_dtype(
    dtype: torch.dtype, compute: torch.dtype
) -> None:
    net, x = model(dtype), torch.randn(3, 60).to(compute)
    plain = copy.deepcopy(net)
    forward = PerturbedForward(net, Params(net, make_noise("gaussian")))
    forward.set_compute_dtype(compute)
    with forward.perturbed(Direction(1, 2), 1e-3, (-1,)):
        seen = net(x)
    for name, p in plain.named_parameters():
        z = forward.params.noise.z(Direction(1, 2), name, p.shape, "cpu").view(p.shape)
        p.data = (p.data.float() - z * torch.tensor(1e-3)).to(compute)
    assert torch.equal(seen, plain(x))
    assert {p.dtype for p in net.parameters()} == {dtype}  # no copy is kept


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_frozen_weights_stay_in_thetas_dtype(compute: torch.dtype) -> None:
    net = model(torch.float16)
    net[0].requires_grad_(False)
    forward = PerturbedForward(net, Params(net, make_noise("gaussian")))
    forward.set_compute_dtype(compute)
    assert net[0].weight.dtype == torch.float16
    with torch.no_grad():
        seen = net(torch.ones(1, 60, dtype=compute))
    assert seen.dtype == compute
