"""The step in a loop of one's own: its losses, its update, what it tunes, and what a mistake is answered."""

import copy
import io
import math
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezo_cli import MezoOptimizer
from mezo_cli.errors import UserError
from mezo_cli.perturb.noise import Direction, make_noise

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(8) % 3


class Tied(nn.Module):
    """A model that reads an embedding as the weight of a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 6)
        self.mix = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.mix(x) + self.embed(Y), self.embed.weight)


class Attention(nn.Module):
    """nn.MultiheadAttention reads its output projection's weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x[:, None], x[:, None], x[:, None], need_weights=False)[0][:, 0])


class Recurrent(nn.Module):
    """nn.LSTM keeps its weights in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x[:, None])[0][:, 0])


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Dropout(0.5), nn.Tanh(), nn.Linear(12, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "tied": Tied,
    "attention": Attention,
    "recurrent": Recurrent,
}
UNCOVERED = {
    "plain": [],
    "tied": ["embed.weight"],
    "attention": ["attention.out_proj.weight", "attention.out_proj.bias"],
    "recurrent": [],  # nn.LSTM sees that its weights are others, and lists them again
}


def make(name: str = "plain") -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def loss_of(model: nn.Module) -> Tensor:
    """Return a loss in float32 of a model in any dtype."""
    return F.cross_entropy(model(X.to(next(model.parameters()).dtype)).float(), Y)


def in_place_step(
    model: nn.Module, step: int, lr: float, eps: float, decay: float, samples: int, part: str = ""
) -> list[float]:
    """Take one step as Algorithm 1 says, on copies of the weights; return the projected gradients.

    `part` is in the names of the tensors that are tuned.
    """
    noise, named = make_noise("gaussian"), {name: p for name, p in model.named_parameters() if part in name}
    start = {name: p.data.clone() for name, p in named.items()}
    z = [
        {name: noise.z(Direction(0, step, i), name, p.shape, "cpu").view(p.shape) for name, p in named.items()}
        for i in range(samples)
    ]
    grads = []
    with torch.no_grad():
        for one in z:
            losses = []
            for sign in (1, -1):
                for name, p in named.items():
                    p.copy_(start[name] + sign * eps * one[name])
                losses.append(float(loss_of(model)))
            grads.append((losses[0] - losses[1]) / (2 * eps))
        for name, p in named.items():
            g = sum(grad * one[name] for grad, one in zip(grads, z, strict=True)) / samples
            p.copy_(start[name] - lr * (g + decay * start[name]))
    return grads


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_algorithm_1_whatever_the_modules_read(name: str, samples: int) -> None:
    model = make(name)
    reference = copy.deepcopy(model).eval()
    optimizer = MezoOptimizer(model, lr=0.01, eps=1e-2, weight_decay=0.1, samples=samples)
    for step in range(4):
        loss = optimizer.step(lambda: loss_of(model))
        assert loss > 0
        grads = in_place_step(reference, step, 0.01, 1e-2, 0.1, samples)
        assert optimizer.result is not None
        assert optimizer.result.recorded == pytest.approx(grads, rel=1e-3, abs=1e-4)
        for p, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.data, wanted.data, rtol=1e-5, atol=1e-5)
    assert sorted(optimizer.uncovered) == sorted(UNCOVERED[name])
    assert optimizer.unreachable == []


def test_the_modules_are_in_eval_mode_inside_and_as_before_outside() -> None:
    model = make()
    model[0].eval()
    optimizer, seen = MezoOptimizer(model), set()

    def closure() -> Tensor:
        seen.add(tuple(module.training for module in model.modules()))
        return loss_of(model)

    before = [module.training for module in model.modules()]
    optimizer.step(closure)
    assert seen == {(False,) * len(before)}
    assert [module.training for module in model.modules()] == before
    model.eval()
    optimizer.step(lambda: loss_of(model.train()).item())  # the closure changes it
    assert not any(module.training for module in model.modules())


def test_a_loss_without_a_graph_tunes_all_and_a_loss_with_one_what_it_reaches() -> None:
    model = nn.ModuleDict({"used": nn.Linear(6, 3), "unused": nn.Linear(2, 2)})
    used = model["used"]
    optimizer = MezoOptimizer(model, lr=0.1)
    optimizer.step(lambda: F.cross_entropy(used(X), Y))
    assert optimizer.unreachable == ["unused.weight", "unused.bias"]
    before = model["unused"].weight.clone()
    optimizer.step(lambda: F.cross_entropy(used(X), Y))
    assert torch.equal(model["unused"].weight, before)
    other = MezoOptimizer(model, lr=0.1)
    other.step(lambda: F.cross_entropy(used(X), Y).item())
    assert other.unreachable == []
    assert not torch.equal(model["unused"].weight, before)


def test_groups_have_their_own_learning_rate_and_schedule() -> None:
    model = make()
    groups = [
        {"params": lambda name: "0." in name, "lr": 0.1},
        {"params": ["4.weight"], "lr": 0.0, "weight_decay": 0.5},
    ]
    optimizer = MezoOptimizer(model, groups, lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    before = {name: p.data.clone() for name, p in model.named_parameters()}
    optimizer.step(lambda: loss_of(model))
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"0.weight", "0.bias"}
    scheduler.step()
    before = {name: p.data.clone() for name, p in model.named_parameters()}
    optimizer.step(lambda: loss_of(model))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_loss_that_is_not_finite_leaves_the_weights(tmp_path: Path) -> None:
    model = make()
    optimizer = MezoOptimizer(model, lr=0.1, trajectory=tmp_path / "run.bin")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FloatingPointError, match=r"step 1: the losses are nan and nan, not finite"):
        optimizer.step(lambda: float("nan"))
    assert optimizer.steps == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.step(lambda: loss_of(model))
    assert optimizer.steps == 1


def test_frozen_weights_of_another_dtype_stay_as_they_are() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 6).bfloat16().requires_grad_(False), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.body(x.bfloat16())
            logits: Tensor = self.head(hidden.float())
            return logits

    model = Mixed()
    body = model.body.weight.clone()
    optimizer = MezoOptimizer(model, lr=0.1)
    assert optimizer.step(lambda: loss_of(model)) > 0
    assert model.body.weight.dtype == torch.bfloat16
    assert torch.equal(model.body.weight, body)


@pytest.mark.parametrize("copied", ["deepcopy", "torch.save"])
def test_a_copy_of_the_model_reads_its_own_weights(copied: str) -> None:
    model = make()
    optimizer = MezoOptimizer(model, lr=0.1)
    optimizer.step(lambda: loss_of(model))
    with torch.no_grad():
        best = loss_of(model.eval())
    if copied == "deepcopy":
        kept = copy.deepcopy(model)
    else:
        content = io.BytesIO()
        torch.save(model, content)
        content.seek(0)
        kept = torch.load(content, weights_only=False)
    optimizer.step(lambda: loss_of(model))
    with torch.no_grad():
        assert loss_of(model) != best
        assert loss_of(kept) == best
    MezoOptimizer(kept, lr=0.1).step(lambda: loss_of(kept))  # it can be trained, too
    assert loss_of(kept) != best


def test_weights_that_were_moved_are_refused() -> None:
    """An update of the memory that the optimizer knows would change nothing in the model."""

    def replace_data(model: nn.Module) -> None:
        for p in model.parameters():
            p.data = p.data.clone()

    moves: list[Callable[[nn.Module], object]] = [
        replace_data,
        lambda model: model.load_state_dict(make().state_dict(), assign=True),
        lambda model: model.bfloat16(),
        MezoOptimizer,
    ]
    for move in moves:
        model = make()
        optimizer = MezoOptimizer(model)
        optimizer.step(lambda model=model: loss_of(model))  # type: ignore[misc]
        move(model)
        with pytest.raises(UserError, match=r"^0\.weight was moved since the optimizer was made"):
            optimizer.step(lambda model=model: loss_of(model))  # type: ignore[misc]
        assert optimizer.steps == 1
    model = make()
    optimizer = MezoOptimizer(model)
    model.load_state_dict(make().state_dict())  # in place
    optimizer.step(lambda: loss_of(model))


def test_the_first_step_keeps_no_activations() -> None:
    model, outputs, alive = make(), list[Any](), list[int]()
    for module in model:
        module.register_forward_hook(lambda module, args, out: outputs.append(weakref.ref(out)))

    def closure() -> Tensor:
        outputs.clear()
        loss = loss_of(model)
        alive.append(sum(one() is not None for one in outputs))
        return loss

    optimizer = MezoOptimizer(model)
    optimizer.step(closure)
    assert alive == [0, 0, 0, 0]
    assert optimizer.unreachable == []


def test_a_closure_may_take_a_gradient_itself() -> None:
    def slope(model: nn.Module) -> Tensor:
        with torch.enable_grad():
            x = X.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().mean()

    model = make()
    optimizer = MezoOptimizer(model, lr=0.01)
    assert optimizer.step(lambda: slope(model)) > 0
    assert optimizer.unreachable == ["4.bias"]


def test_tensors_that_are_left_out_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"used": nn.Linear(6, 3), "unused": nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])})
    optimizer = MezoOptimizer(model)
    for _ in range(2):
        optimizer.step(lambda: F.cross_entropy(model["used"](X), Y))
    shown = [name for name, _ in model["unused"].named_parameters(prefix="unused")][:8]
    text = "MezoOptimizer: not in the graph of the loss, so not tuned: "
    assert caplog.messages == [f"{text}{', '.join(shown)} and 2 more"]


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, "lr=-1.0"),
    ({"eps": 0.0}, "eps=0.0"),
    ({"samples": 0}, "samples=0"),
    ({"noise": "gausian"}, "did you mean 'gaussian'?"),
    ({"seed": -1}, "seed=-1"),
    ({"params": ["0.weigth"]}, "the model has no parameter 0.weigth (did you mean '0.weight'?)"),
    ({"params": [torch.zeros(2, 3)]}, "give names or tensors of the model, not another Tensor"),
    ({"params": lambda name: False}, "no trainable tensor is chosen"),
    ({"params": [{"params": ["0.weight"], "eps": 1}]}, "a group has no setting 'eps'"),
    ({"params": [{"params": ["0.weight"], "lr": -1}]}, "lr=-1"),
    ({"params": ["1.weight"]}, "1.weight is frozen"),
    ({"params": [{"params": None}, {"params": ["0.weight"]}]}, "0.weight is in 2 groups"),
    ({"params": 5}, "give names or tensors of the model, not another int"),
    ({"params": [{"params": 5}]}, "give names or tensors of the model, not another int"),
    ({"betas": (0.9, 2)}, "betas=(0.9, 2): allowed are two numbers"),
    ({"betas": 0.9}, "betas=0.9: allowed are two numbers"),
    ({"momentum": 1.0}, "momentum=1.0"),
    ({"momentum": 0.9, "betas": (0.9, 0.99)}, "leave momentum out"),
    ({"sample_schedule": "linear"}, "give both or neither"),
    ({"total_steps": 5}, "give both or neither"),
]


@pytest.mark.parametrize(("values", "text"), MISTAKES, ids=[text for _, text in MISTAKES])
def test_a_mistake_is_one_line(values: dict[str, Any], text: str) -> None:
    model = make()
    model[1].requires_grad_(False)
    with pytest.raises(UserError) as caught:
        MezoOptimizer(model, **values)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_closure_may_return() -> None:
    model = make()
    optimizer = MezoOptimizer(model)
    with pytest.raises(UserError, match=r"the closure returned a tensor of shape \[8, 3\]; it must return one loss"):
        optimizer.step(lambda: model(X))
    wrong: dict[Any, str] = {"low": "'low', a str", None: "None, a NoneType", (): r"\(\), a tuple"}
    wrong |= {10**400: "1000.*, a int"}
    for value, shown in wrong.items():
        with pytest.raises(UserError, match=f"the closure returned {shown}; it must return one loss"):
            optimizer.step(lambda value=value: value)  # type: ignore[arg-type,return-value,misc]
    with pytest.raises(UserError, match=r"takes the model, an nn\.Module, .* not a generator"):
        MezoOptimizer(model.parameters())  # type: ignore[arg-type]  # as torch's optimizers take it
    with pytest.raises(UserError, match="give names or tensors of the model, not another tuple"):
        MezoOptimizer(model, model.named_parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
@pytest.mark.parametrize("value", [math.nan, math.inf, "high", -1.0, 10**400])
def test_a_rate_that_is_not_finite_is_refused_before_the_step(name: str, value: Any) -> None:
    model, calls = make(), []
    optimizer = MezoOptimizer(model, params=[{"params": ["0.weight"]}, {"params": ["4.weight"]}])
    optimizer.step(lambda: loss_of(model))
    before = [p.clone() for p in model.parameters()]
    optimizer.param_groups[1][name] = value
    with pytest.raises(UserError, match=rf"^param_groups\[1\]\.{name}=.*: (out of range, )?allowed is a finite number"):
        optimizer.step(lambda: calls.append(0) or loss_of(model))  # type: ignore[func-returns-value]
    assert (calls, optimizer.steps) == ([], 1)
    assert all(p.equal(q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.param_groups[1][name] = torch.tensor(1e-3)
    optimizer.step(lambda: loss_of(model))


def test_a_group_is_not_added_later() -> None:
    model = make()
    optimizer = MezoOptimizer(model, params=["0.weight"])
    with pytest.raises(UserError, match=r"^add_param_group: .* make another one with params=\[\.\.\.\] of all$"):
        optimizer.add_param_group({"params": [model[4].weight]})
    optimizer.step(lambda: loss_of(model))


OTHERS = {"seed": 7, "eps": 0.5, "samples": 3, "noise": "rademacher", "steps": -1, "param_groups": [{}]}


@pytest.mark.parametrize("name", [*OTHERS, "deferred"])
def test_a_state_dict_of_another_run_is_refused_by_what_differs(name: str) -> None:
    state = MezoOptimizer(make()).state_dict()
    state = state | {name: OTHERS[name]} if name in OTHERS else {key: state[key] for key in state if key != name}
    with pytest.raises(UserError, match=rf"^state_dict: it.* {name.removeprefix('param_')}"):
        MezoOptimizer(make()).load_state_dict(state)


@pytest.mark.slow
def test_the_watch_of_the_first_step_lets_the_noise_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEZO_EAGER", raising=False)
    model = make()
    MezoOptimizer(model).step(lambda: loss_of(model))
    found = make_noise("gaussian").describe_kernels()
    assert found == ("compiled", "")


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_a_copy_would_not_reach_the_model(how: Any) -> None:
    with pytest.raises(UserError, match="state_dict"):
        how(MezoOptimizer(nn.Linear(6, 3), lr=1e-3))
