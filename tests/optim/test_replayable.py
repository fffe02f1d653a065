"""Every optimizer that leaves a trajectory, with every noise, on a small RoBERTa: replay and resume, bitwise.

A new one is picked up from the table OPTIMIZERS. If its formula is in FORMULAS, steps are compared with it in float64.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import StepRecord, to_dict
from mezo_cli.config.validation import build
from mezo_cli.errors import UserError
from mezo_cli.optim import OPTIMIZERS, make_config
from mezo_cli.optim.base import learning_rate
from mezo_cli.optim.mezo import Clip, random_sign
from mezo_cli.perturb import params
from mezo_cli.perturb.noise import NOISES, Direction
from mezo_cli.session.session import Session
from tests.optim.test_mezo import SENTENCES, ready

STEPS = 8
SAMPLES: dict[str, dict[str, Any]] = {"one": {}, "three": {"samples": 3, "sample_schedule": "linear"}}
COMMON = ["optimizer.lr=1e-3", "optimizer.weight_decay=0.1", "optimizer.schedule=linear", f"steps={STEPS}"]


def cases() -> Iterator[Any]:
    """Every method with every noise, with one and with more samples."""
    found = {name: OPTIMIZERS.implementation(name) for name in OPTIMIZERS.built_in if name != "linear_probe"}
    methods = [name for name, kind in found.items() if kind.replayable]
    defaults = to_dict(build_config([]))
    for name, noise, samples in product(methods, NOISES.names, SAMPLES):
        known = OPTIMIZERS.load(name).model_fields
        values = {"name": name, "noise": noise, **SAMPLES[samples]}
        values |= {"members": 4} if "members" in known else {}
        if values.keys() - known.keys():  # it has no samples
            continue
        try:
            build(defaults | {"optimizer": values})
        except UserError:  # refused: another test says which
            continue
        own = [f"optimizer.{key}={value}" for key, value in values.items() if key != "name"]
        yield pytest.param([f"optimizer={name}", *own], id=f"{name}-{noise}-{samples}")


CASES = list(cases())
_READY: dict[Path, tuple[Session, dict[str, Tensor]]] = {}  # the model is loaded once, and put back for each test


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long replays go part by part: here the parts are short."""
    monkeypatch.setattr(params, "TERMS_PER_PASS", 6)
    monkeypatch.setenv("MEZO_EAGER", "1")


def tuned(model: Path, words: list[str], block: int = 4096) -> Session:
    """A session at the start of a run; the one before it is no more."""
    if model not in _READY:
        loaded = ready(model)
        rows = loaded.encoder.encode_all(SENTENCES[:2])
        loaded.forward.select_reachable(lambda: loaded.objective.logits(loaded.objective.collate(rows)))
        parts = ("word_embeddings", "layer.1.attention.self")  # enough for every path, and quick
        loaded.params.tensors = {
            name: p for name, p in loaded.params.tensors.items() if any(part in name for part in parts)
        }
        _READY[model] = loaded, theta(loaded)
    session, start = _READY[model]
    for name, p in session.params.tensors.items():
        p.data.copy_(start[name])
    config = build_config([f"model.path={model}", "data=demo", *COMMON, *words])
    selected = list(session.params.tensors)
    session.forward.params = fresh = params.Params(session.loaded.model, config.optimizer.make_noise())
    fresh.tensors = {name: fresh.tensors[name] for name in selected}
    if config.optimizer.noise != "torch":
        session.params.noise.block = block  # type: ignore[misc]
    optimizer = OPTIMIZERS.implementation(config.optimizer.name)(config.optimizer, config.seed, config.steps)
    return dataclasses.replace(session, config=config, optimizer=optimizer)


def train(session: Session, start: int, stop: int) -> list[StepRecord]:
    rows = session.encoder.encode_all(SENTENCES[:2])
    results = [(step, session.step(rows, step)) for step in range(start, stop)]
    n = session.config.optimizer.record_width  # as the trajectory gives them back
    return [(t, [*r.recorded, *[0.0] * (n - len(r.recorded))], r.lr) for t, r in results]


def theta(session: Session) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in session.params.tensors.items()}


@pytest.mark.sample(4)
@pytest.mark.parametrize("words", CASES)
def test_replay_in_other_blocks_ends_in_the_bits_of_training(words: list[str], roberta: Path) -> None:
    ours = tuned(roberta, words)
    records, wanted = train(ours, 0, STEPS), theta(ours)
    replayed = tuned(roberta, words, block=1 << 17)
    replayed.optimizer.apply_updates(replayed.params, records)  # type: ignore[attr-defined]
    assert all(torch.equal(p, wanted[name]) for name, p in replayed.params.tensors.items())


# --- the formulas, in float64: (theta, estimates of the gradient so far, lr, decay, settings) -> theta ---


def mezo(p: Tensor, g: list[Tensor], lr: float, c: Any) -> Tensor:
    return p - lr * (g[-1] + c.weight_decay * p)


def momentum(p: Tensor, g: list[Tensor], lr: float, c: Any) -> Tensor:
    m = sum(c.momentum**k * estimate for k, estimate in enumerate(reversed(g)))
    return p - lr * (m + c.weight_decay * p)


def adam(p: Tensor, g: list[Tensor], lr: float, c: Any) -> Tensor:
    t = len(g)
    m = (1 - c.beta1) * sum(c.beta1**k * estimate for k, estimate in enumerate(reversed(g)))
    v = (1 - c.beta2) * sum(c.beta2**k * estimate**2 for k, estimate in enumerate(reversed(g)))
    step = (m / (1 - c.beta1**t)) / ((v / (1 - c.beta2**t)).sqrt() + c.adam_eps)
    return p - lr * (step + c.weight_decay * p)


def lozo(p: Tensor, g: list[Tensor], lr: float, c: Any) -> Tensor:
    return p - lr * (g[-1] / (c.rank if p.dim() == 2 else 1) + c.weight_decay * p)


def null_signs(p: Tensor, g: list[Tensor], lr: float, c: Any) -> Tensor:
    return p - lr * (g[-1] * random_sign(42, len(g) - 1, 0) + c.weight_decay * p)


def adamezo(p: Tensor, g: list[Tensor], lr: float, c: Any) -> Tensor:
    window = g[-c.window :]
    m = sum(c.beta1**k * estimate for k, estimate in enumerate(reversed(window)))
    v = sum(c.beta2**k * estimate**2 for k, estimate in enumerate(reversed(window)))
    return p - lr * (m / (v**0.5 + c.adam_eps) + c.weight_decay * p)  # type: ignore[operator]


FORMULAS: dict[str, Callable[..., Tensor]] = {"mezo": mezo, "mezo_momentum": momentum, "mezo_adam": adam, "lozo": lozo}
FORMULAS |= {"null_signs": null_signs, "adamezo": adamezo}
with_formula = [
    case
    for case in CASES
    if (name := case.values[0][0].removeprefix("optimizer=")) in FORMULAS
    and (name != "null_signs" or len(case.values[0]) == 2)  # each sample has its sign
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("words", with_formula)
def test_it_is_the_formula_in_float64(words: list[str], roberta: Path) -> None:
    ours = tuned(roberta, words)
    settings = ours.config.optimizer
    samples = [1 + settings.samples * step // STEPS if settings.samples > 1 else 1 for step in range(STEPS)]
    want = {name: p.double() for name, p in theta(ours).items()}
    start = dict(want)
    seen: dict[str, list[Tensor]] = {name: [] for name in want}
    for step, grads, lr in train(ours, 0, STEPS):
        assert lr == pytest.approx(1e-3 * (1 - step / STEPS))
        assert all(g != 0 for g in grads[: samples[step]])
        assert grads[samples[step] :] == [0.0] * (len(grads) - samples[step])
        for name, p in ours.params.tensors.items():
            draw = partial(ours.params.noise.z, name=name, shape=p.shape, device="cpu")
            z = [draw(Direction(42, step, i)).view(p.shape).double() for i in range(samples[step])]
            seen[name].append(sum(g * d for g, d in zip(grads, z, strict=False)) / samples[step])  # type: ignore[arg-type]
            want[name] = FORMULAS[settings.name](want[name], seen[name], lr, settings)
    for name, p in ours.params.tensors.items():
        moved = float((want[name] - start[name]).abs().max())
        torch.testing.assert_close(p.detach().double(), want[name], rtol=2e-6, atol=2e-5 * moved)


@pytest.mark.parametrize(
    ("bound", "wanted"), [("2", [1, 2, -2, 2, 0.5, 2]), ("q0.5", [1, 1, -1, 3, 0.5, 4]), ("q1", [1, 1, -3, 4, 0.5, 5])]
)
def test_the_bound_is_a_number_or_a_quantile_of_the_raw_sizes_before(bound: str, wanted: list[float]) -> None:
    """Window 3: the first g is not clipped; of n sizes the quantile is the ceil(q n)-th smallest."""
    raw, clip = [1.0, 3.0, -4.0, 5.0, 0.5, 6.0], Clip(bound, 3)
    assert [clip.clip(step, [g])[0] for step, g in enumerate(raw) for _ in range(2)][1::2] == wanted


def test_a_bound_that_is_none_is_refused() -> None:
    for value in ("0", "-1", "q1.5", "inf", "true"):
        with pytest.raises(UserError, match=r"optimizer.clip_g=.*: allowed are a number above 0, and a quantile"):
            build_config([f"optimizer.clip_g={value}"])


@pytest.mark.parametrize(("schedule", "half"), [("constant", 1.0), ("linear", 0.5), ("cosine", 0.5)])
def test_schedules_fall_from_lr_to_zero(schedule: str, half: float) -> None:
    config = make_config("mezo", lr=1.0, schedule=schedule)
    assert [learning_rate(config, step, 8) for step in (0, 4)] == [1.0, half]
    assert learning_rate(config, 2, 8) == pytest.approx({"linear": 0.75, "cosine": 0.5 + 2**-1.5}.get(schedule, 1.0))


def test_a_step_out_of_order_is_never_taken(roberta: Path) -> None:
    ours = tuned(roberta, ["optimizer=mezo_momentum"])
    with pytest.raises(RuntimeError, match="every step in order: got step 3, expected 0"):
        train(ours, 3, 4)
