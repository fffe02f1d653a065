"""Theta in half precision: one rounding per step, right in expectation, bitwise identical in every replay."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import NOISES, Direction, make_noise
from mezo_cli.perturb.noise.compiled import Kernel
from mezo_cli.perturb.params import Params

KINDS = ["gaussian", "rademacher"]
DTYPES = [torch.bfloat16, torch.float16]
Terms = Sequence[tuple[Direction, float]]

# test_rounding.py and test_compiled.py check that compiled code is bitwise identical.
pytestmark = pytest.mark.usefixtures("eager_kernels")


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
