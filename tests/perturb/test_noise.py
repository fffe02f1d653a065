"""The kinds of noise: their bits, their statistics, and the operations that apply them."""

from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mezo_cli.perturb.noise import NOISES, Direction, Noise, counter, make_noise, spans
from mezo_cli.perturb.noise.by_tensor import TorchNoise
from mezo_cli.perturb.noise.counter import gaussian_table
from mezo_cli.perturb.noise.kernels import philox
from mezo_cli.perturb.noise.spans import Segment, stream_key, tiles_of
from tests.perturb.flat import perturb, update_

Z = Direction(seed=42, step=7)
KERNELS = {"gaussian": counter.GAUSSIAN, "rademacher": counter.RADEMACHER}
CHUNK = max(kernels.tile * kernels.max_tiles for kernels in KERNELS.values())
MADE = {kind: make_noise(kind) for kind in NOISES.names}


@pytest.fixture(params=NOISES.names)
def noise(request: pytest.FixtureRequest) -> Noise:
    return MADE[request.param]


@pytest.fixture(params=list(KERNELS))
def counted(request: pytest.FixtureRequest) -> Noise:
    return MADE[request.param]


def z32(noise: Noise, direction: Direction, name: str, n: int) -> torch.Tensor:
    return noise.z(direction, name, (n,), "cpu")


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_known_answers(counter: str, key: str, words: str) -> None:
    numbers = [torch.tensor([int(word, 16)]) for word in f"{counter} {key}".split()]
    assert [word.item() & 0xFFFFFFFF for word in philox(*numbers)] == [int(word, 16) for word in words.split()]


@pytest.mark.parametrize("kind", KERNELS)
def test_z_is_philox_of_key_and_counter_by_the_stated_layout(kind: str) -> None:
    """z again, from Python integers and nothing of the kernels: block t * 32 + lane, then word, then bits in it."""
    direction, name = Direction(3, 2**32 - 1, 5), "roberta.x"
    z = z32(MADE[kind], direction, name, 9000)
    per_word = 2 if kind == "gaussian" else 32
    tile = 4 * per_word * 32
    table = gaussian_table()
    for element in (0, 1, 31, 32, 255, 256, 4095, 4096, 8191, 8999):
        lane, row = element % 32, element % tile // 32
        block = element // tile * 32 + lane
        key = stream_key(direction.seed, name)
        words = philox(*(torch.tensor([x]) for x in (block, 0, direction.step, direction.sample, *key)))
        word, piece = words[row // per_word].item() & 0xFFFFFFFF, row % per_word
        expected = table[word >> 16 * piece & 0xFFFF] if kind == "gaussian" else 1.0 if word >> piece & 1 else -1.0
        assert z[element] == expected


def test_the_quantile_table_is_the_same_everywhere_symmetric_and_of_unit_variance() -> None:
    table = gaussian_table()
    exact = table.double()
    assert table.shape == (65536,)
    assert table.dtype == torch.float32
    assert torch.equal(table, -table.flip(0))
    assert (table[1:] > table[:-1]).all()
    assert abs(exact.square().mean().item() - 1) < 1e-8
    assert abs(exact.pow(4).mean().item() - 3) < 2e-3
    assert 4.3 < exact.max().item() < 4.4
    assert crc32(table.numpy().tobytes()) == 0x9A4E1B18


@settings(max_examples=60)
@given(kind=st.sampled_from(NOISES.names), n=st.integers(1, 20_000), ends=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_a_slice_alone_equals_the_slice_of_the_whole(kind: str, n: int, ends: tuple[float, float]) -> None:
    start, stop = sorted(int(end * n) for end in ends)
    whole = z32(MADE[kind], Z, "w", n)
    assert whole.shape == (n,)
    assert torch.equal(MADE[kind].z(Z, "w", (n,), "cpu", start, stop), whole[start:stop])


@pytest.mark.sample(22)
@pytest.mark.parametrize("n", [1, 2, 31, 255, 256, 257, 4096, 5000, 8192, CHUNK, CHUNK + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_perturb_is_theta_plus_and_minus_the_rounded_product(noise: Noise, n: int, dtype: torch.dtype) -> None:
    theta = torch.randn(n, generator=torch.Generator().manual_seed(n))
    out, plus, minus = torch.full((3, n), torch.nan, dtype=dtype)
    before = theta.clone()
    perturb(noise, Z, "w", theta, 1e-3, out)
    perturb(noise, Z, "w", theta, 1e-3, plus, minus)
    z = torch.tensor(1e-3) * z32(noise, Z, "w", n)
    assert torch.equal(out, (theta + z).to(dtype))
    assert torch.equal(plus, out)
    assert torch.equal(minus, (theta - z).to(dtype))
    assert torch.equal(theta, before)


@pytest.mark.sample(14)
@pytest.mark.parametrize("width", [1, 7, 128, 256, 768, 1024, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_perturb_rows_equals_the_rows_of_perturb(noise: Noise, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    theta = torch.randn(600, width, generator=generator)
    rows = torch.cat([torch.tensor([0, 599, 0]), torch.randint(600, (400,), generator=generator)])
    whole = torch.empty(600, width, dtype=dtype)
    out, plus, minus = torch.empty(3, len(rows), width, dtype=dtype)
    perturb(noise, Z, "e", theta, -2e-3, whole)
    noise.perturb_rows(Z, "e", theta, rows, -2e-3, out)
    noise.perturb_rows(Z, "e", theta, rows, 2e-3, plus, minus)
    assert torch.equal(out, whole[rows])
    assert torch.equal(minus, out)
    assert not torch.equal(plus, out)
    noise.perturb_rows(Z, "e", theta, rows[:0], -2e-3, out[:0])


@pytest.mark.sample(6)
@pytest.mark.parametrize("in_float64", [True, False])
@pytest.mark.parametrize("n", [1, 300, 4096, 10_000, CHUNK + 77])
def test_update_is_the_formula_and_many_terms_are_one_by_one(noise: Noise, n: int, in_float64: bool) -> None:
    terms = [(Direction(42, step, step % 2), 0.3 - 0.1 * step) for step in range(5)]
    decays = [1.0, 0.999, 1.0, 0.9, 1 - 1e-8]
    theta = torch.randn(n, generator=torch.Generator().manual_seed(n))
    expected = theta.clone()
    for (direction, c), decay in zip(terms, decays, strict=True):
        step = (torch.tensor(c) * z32(noise, direction, "w", n)).double()
        d, wide = float(np.float32(1 - decay)), expected.double()
        decayed = wide - d * wide if in_float64 else wide * float(np.float32(decay))
        expected = (decayed + step).float()
    at_once, one_by_one = theta.clone(), theta.clone()
    update_(noise, "w", at_once, terms, decays, in_float64)
    for term, decay in zip(terms, decays, strict=True):
        update_(noise, "w", one_by_one, [term], [decay], in_float64)
    assert torch.equal(at_once, expected)
    assert torch.equal(one_by_one, expected)


def test_parameters_that_want_gradients_and_inference_mode_are_fine(counted: Noise) -> None:
    theta = torch.nn.Parameter(torch.randn(512, 3))
    out = torch.empty(512, 3)
    perturb(counted, Z, "w", theta, 1e-3, out)
    with torch.inference_mode():
        inside = torch.empty(512, 3)
        perturb(counted, Z, "w", theta, 1e-3, inside)
        update_(counted, "w", theta, [(Z, 1e-3)], [1.0])
    assert torch.equal(inside, out)
    assert torch.equal(theta, out)


def test_moments(counted: Noise) -> None:
    """4 million elements: each bound is over five standard errors."""
    n = 1 << 22
    z = z32(counted, Z, "w", n).double()
    gaussian = counted.name == "gaussian"
    assert abs(z.mean()) < 5 / n**0.5
    assert abs(z.square().mean() - 1) < (5 * (2 / n) ** 0.5 if gaussian else 1e-12)
    assert abs(z.pow(3).mean()) < 5 * 15**0.5 / n**0.5
    assert abs(z.pow(4).mean() - (3 if gaussian else 1)) < (5 * 96**0.5 / n**0.5 if gaussian else 1e-12)
    if gaussian:
        tail = (z.abs() > 3).double().mean()
        assert abs(tail - 0.0026998) < 5 * (0.0027 / n) ** 0.5


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return abs((a.double() * b.double()).mean().item())


def test_elements_tensors_steps_samples_and_seeds_are_uncorrelated(counted: Noise) -> None:
    n = 1 << 20
    bound = 5 / n**0.5
    z = z32(counted, Z, "w", n)
    for lag in (1, 2, 31, 32, 33, 64, 128, 256, 512, 1024, 4096, 8192):
        assert correlation(z[lag:], z[:-lag]) < bound * 1.01, lag
        assert correlation(z[lag:] ** 2 - 1, z[:-lag] ** 2 - 1) < 2 * bound * 1.01, lag
    others = [
        (Direction(42, 8), "w"),
        (Direction(42, 7, 1), "w"),
        (Direction(43, 7), "w"),
        (Z, "v"),
        (Z, "w.bias"),
        (Direction(7, 42), "w"),
        (Direction(42, 7 + 2**31), "w"),
        (Direction(42 + 2**32, 7), "w"),
    ]
    for direction, name in others:
        assert correlation(z, z32(counted, direction, name, n)) < bound, (direction, name)


def test_torch_noise_is_the_stream_of_the_reference() -> None:
    stream = np.random.RandomState(42)
    seeds = [stream.randint(10**9) for _ in range(2000)]
    noise = TorchNoise()
    assert [noise.step_seed(42, step) for step in (1999, 0, 1023, 1024)] == [seeds[i] for i in (1999, 0, 1023, 1024)]
    generator = torch.Generator().manual_seed((seeds[3] << 32) + crc32(b"lm_head.bias"))
    assert torch.equal(
        noise.z(Direction(42, 3), "lm_head.bias", (5, 3), "cpu"), torch.randn((5, 3), generator=generator).view(-1)
    )
    assert noise.step_seed(7, 0) == np.random.RandomState(7).randint(10**9)


def test_a_new_kind_is_one_module_and_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZO_EAGER", "1")
    monkeypatch.setitem(NOISES.targets, "uniform", "tests.perturb.uniform_noise:uniform_noise")
    noise, theta, out, out_minus = make_noise("uniform"), torch.randn(70, 1000), *torch.empty(2, 70, 1000)
    z = noise.z(Z, "w", theta.shape, "cpu").view(theta.shape)
    assert abs(z.double().square().mean() - 1) < 0.01
    perturb(noise, Z, "w", theta, 1e-3, out, out_minus)
    assert torch.equal(out, theta + torch.tensor(1e-3) * z)
    assert torch.equal(out_minus, theta - torch.tensor(1e-3) * z)
    noise.perturb_rows(Z, "w", theta, torch.tensor([69, 3]), 1e-3, out_minus[:2])
    assert torch.equal(out_minus[:2], out[[69, 3]])
    update_(noise, "w", theta, [(Z, 1e-3)], [1.0])
    assert torch.equal(theta, out)


@pytest.mark.parametrize("kind", KERNELS)
def test_results_computed_on_another_device_are_copied_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cpu:0`, which is not equal to `cpu`, takes the place of the other device."""
    noise, theta, rows = make_noise(kind), torch.randn(300, 40), torch.tensor([299, 3])
    plus, minus = torch.empty(300, 40), torch.empty(300, 40)
    perturb(noise, Z, "w", theta, 1e-3, plus, minus)
    for module in (counter, spans):
        monkeypatch.setattr(module, "compute_device", lambda device: torch.device("cpu", 0))
    out, out_minus = torch.empty(300, 40), torch.empty(300, 40)
    perturb(noise, Z, "w", theta, 1e-3, out, out_minus)
    assert torch.equal(out, plus)
    assert torch.equal(out_minus, minus)
    noise.perturb_rows(Z, "w", theta, rows, 1e-3, out[:2], out_minus[:2])
    assert torch.equal(out[:2], plus[rows])
    assert torch.equal(out_minus[:2], minus[rows])
    update_(noise, "w", theta, [(Z, 1e-3)], [1.0])
    assert torch.equal(theta, plus)


@pytest.mark.parametrize("kind", NOISES.names)
def test_a_span_of_several_tensors_has_the_bits_of_each(kind: str) -> None:
    """And so have its parts: z depends on the name and the element, not on where they are stored."""
    noise = make_noise(kind)
    shapes = {"a": (7, 33), "b": (5,), "c": (90, 100), "d": (1,)}
    thetas = {name: torch.randn(shape) for name, shape in shapes.items()}
    sizes = [tiles_of(theta.numel(), noise.tile) * noise.tile for theta in thetas.values()]
    flat = torch.zeros(sum(sizes))
    for part, theta in zip(flat.split(sizes), thetas.values(), strict=True):
        part[: theta.numel()] = theta.view(-1)
    whole = Segment(flat, list(shapes.items()), noise.tile).whole
    assert [(p.name, p.numel, p.start) for p in whole.pieces] == [(n, t.numel(), 0) for n, t in thetas.items()]
    out, terms = torch.empty(whole.numel), [(Z, 0.5), (Direction(42, 8), -0.25)]
    noise.perturb(Z, whole, 1e-2, out)
    for place, part in whole.split(3 * noise.tile):
        assert part.theta.data_ptr() == flat[place].data_ptr()
        assert part.last - part.first >= 2
        noise.update_(part, part.theta, terms, [0.9, 1.0])
    for piece in whole.pieces:
        here = piece.part
        theta = thetas[piece.name]
        alone = torch.empty_like(theta)
        perturb(noise, Z, piece.name, theta, 1e-2, alone)
        assert torch.equal(out[here].view(theta.shape), alone)
        update_(noise, piece.name, theta, terms, [0.9, 1.0])
        assert torch.equal(flat[here].view(theta.shape), theta)


@given(tiles=st.integers(2, 40), size=st.integers(1, 12))
def test_a_span_is_cut_without_gaps_into_parts_of_two_tiles_or_more(tiles: int, size: int) -> None:
    whole = Segment(torch.zeros(tiles * 4), [("w", (tiles * 4,))], 4).whole
    parts = whole.split(4 * size)
    assert [part.first for _, part in parts] + [tiles] == [0, *(part.last for _, part in parts)]
    assert all(2 <= part.last - part.first <= max(2, size) + 1 for _, part in parts)
    assert torch.cat([part.tiles for _, part in parts]).tolist() == list(range(tiles))
