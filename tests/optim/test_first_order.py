"""Optimizers that backpropagate: the stock model's gradients, repeatable dropout, float32 weights."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM

from mezo_cli.data import load_splits
from mezo_cli.objectives.base import BatchLoss
from mezo_cli.optim import OPTIMIZERS
from mezo_cli.session.session import Session
from tests import tiny
from tests.objectives.test_choice import EXAMPLES, NAMES
from tests.optim.test_mezo import SENTENCES, full_logits, ready

METHOD = [name for name in OPTIMIZERS.built_in if OPTIMIZERS.load(name).needs_backward]


def tuned(model: Path, *words: str) -> Session:
    session = ready(model, *words)
    rows = session.encoder.encode_all(SENTENCES)
    session.forward.select_reachable(lambda: session.objective.logits(session.objective.collate(rows[:1])))
    return session


def steps(session: Session, number: int) -> list[Any]:
    rows = session.encoder.encode_all(SENTENCES)
    with torch.no_grad():  # as the loop runs
        return [session.step(rows, step) for step in range(number)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("limit", ["0.5", "null"])
@pytest.mark.parametrize(
    ("name", "words", "make"),
    [
        (  # a larger adam_eps: Adam makes whole steps of rounding where a gradient is zero (the keys' biases)
            "adamw",
            ("optimizer.weight_decay=0.1", "optimizer.beta1=0.8", "optimizer.adam_eps=1e-4"),
            partial(torch.optim.AdamW, betas=(0.8, 0.999), eps=1e-4),
        ),
        ("sgd", ("optimizer.weight_decay=0.1", "optimizer.momentum=0.5"), partial(torch.optim.SGD, momentum=0.5)),
    ],
)
@pytest.mark.parametrize("decoder", ["roberta", "untied"])
def test_it_is_the_stock_model_under_torchs_own_optimizer_in_float64(
    name: str, words: tuple[str, ...], make: Any, limit: str, decoder: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(decoder)
    common = ["optimizer.lr=1e-3", "optimizer.dropout=0", "optimizer.schedule=linear", "steps=10"]
    ours = tuned(folder, f"optimizer={name}", f"optimizer.max_grad_norm={limit}", *common, *words)
    stock = AutoModelForMaskedLM.from_pretrained(folder).double().eval()
    torchs = make(stock.parameters(), lr=1e-3, weight_decay=0.1)
    batch = ours.objective.collate(ours.encoder.encode_all(SENTENCES))
    for step, result in enumerate(steps(ours, 10)):
        loss = torch.nn.functional.cross_entropy(full_logits(stock, batch, ours.encoder.label_ids), batch.labels)
        torchs.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), float("inf") if limit == "null" else float(limit))
        torchs.param_groups[0]["lr"] = 1e-3 * (1 - step / 10)
        torchs.step()
        assert result.loss == pytest.approx(loss.item(), abs=1e-5), step
        assert result.others["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert result.lr == pytest.approx(1e-3 * (1 - step / 10))
    theirs = dict(stock.named_parameters())
    for key, p in ours.params.tensors.items():
        torch.testing.assert_close(p.detach().double(), theirs[key].detach(), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("name", METHOD)
def test_gradients_are_of_live_tensors_alone_and_are_let_go(name: str, roberta: Path) -> None:
    ours = tuned(roberta, f"optimizer={name}", "objective=cls")
    seen: set[int] = set()
    for p in ours.loaded.model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: seen.add(id(p)))
    steps(ours, 1)
    assert seen == {id(p) for p in ours.params.tensors.values()}
    assert all(p.grad is None for p in ours.loaded.model.parameters())


@pytest.mark.parametrize("name", METHOD)
def test_a_gradient_that_is_not_finite_leaves_the_weights(name: str, roberta: Path) -> None:
    ours = tuned(roberta, f"optimizer={name}")
    p = next(iter(ours.params.tensors.values()))
    before = [q.detach().clone() for q in ours.params.tensors.values()]
    spiked = ours.optimizer.step(ours.forward, lambda: (p - p.detach()).abs().sqrt().sum(), 0)  # infinite slope at 0
    assert spiked.loss == 0.0
    assert not torch.tensor(spiked.others["grad_norm"]).isfinite()
    assert all(torch.equal(a, b) for a, b in zip(before, ours.params.tensors.values(), strict=True))


@pytest.mark.parametrize("objective", ["mlm", "cls"])
def test_dropout_is_on_in_a_step_alone_and_drawn_from_seed_and_step(objective: str, roberta: Path) -> None:
    still = ["optimizer=sgd", "optimizer.lr=0", f"objective={objective}"]
    ours = tuned(roberta, *still)
    generator = torch.get_rng_state()
    first, second = steps(ours, 2)
    assert torch.equal(generator, torch.get_rng_state())
    assert not ours.loaded.model.training
    assert first.loss != second.loss
    assert [r.scalars() for r in steps(ours, 2)] == [first.scalars(), second.scalars()]
    assert steps(tuned(roberta, *still, "seed=7"), 1)[0].loss != first.loss
    plain = BatchLoss(ours.objective, [ours.objective.collate(ours.encoder.encode_all(SENTENCES))])().item()
    none = tuned(roberta, *still, "optimizer.dropout=0")
    assert steps(none, 1)[0].loss == pytest.approx(plain, abs=1e-6)
    more = tuned(roberta, *still, "optimizer.dropout=0.5")
    rates = {m.p for m in more.loaded.model.modules() if isinstance(m, torch.nn.Dropout)}
    assert rates == {0.5}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("roberta", ["peft=none"]),
        ("roberta", ["objective=cls", "peft=lora"]),
        ("bert", ["peft=bias"]),
        ("opt", ["objective=lm", "peft=lora"]),
        ("gpt2", ["objective=choice", "peft=none", "data=files", "data.dir=none", *NAMES]),
        ("llama", ["objective=lm", "peft=head"]),
        ("llama", ["objective=generate", "objective.loss=lm", "peft=lora"]),
    ],
)
def test_checkpointed_activations_give_the_same_gradients(kind: str, words: list[str], tmp_path: Path) -> None:
    make = {"roberta": tiny.roberta, "bert": tiny.bert}.get(kind, partial(tiny.decoder, kind=kind))
    if "objective=generate" in words:
        words = [*words, "task=demo-arithmetic"]
    results, calls = [], []
    for checkpoint in (False, True):
        session = ready(
            make(tmp_path / kind),
            "optimizer=sgd",
            "optimizer.lr=1e-2",
            "optimizer.dropout=0.1",
            f"model.checkpoint_activations={checkpoint}",
            *words,
        )
        examples = EXAMPLES if kind == "gpt2" else SENTENCES
        if "objective=generate" in words:
            examples = load_splits(session.config).train[:4]
        rows = session.encoder.encode_all(examples)
        ran: list[str] = []
        for name, module in session.loaded.model.named_modules():
            if name.endswith((".0.attention", ".0.self_attn", ".0.attn")):
                module.register_forward_hook(lambda *_, ran=ran: ran.append("forward"))
        with torch.no_grad():
            session.exclude_unreachable(rows[0])
            ran.clear()
            results.append([session.step(rows, step).scalars() for step in range(3)])
        calls.append(len(ran))
    assert calls[1] == 2 * calls[0] > 0  # each layer is computed again
    for with_checkpoints, plain in zip(*reversed(results), strict=True):
        assert with_checkpoints == pytest.approx(plain, rel=1e-6)
