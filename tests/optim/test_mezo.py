"""MeZO's step equals the reference's, step by step, and the formula in float64."""

import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForMaskedLM

from mezo_cli import models
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Example
from mezo_cli.objectives.base import BatchLoss
from mezo_cli.perturb.noise import Direction
from mezo_cli.session.opening import opened
from mezo_cli.session.session import Session

SENTENCES = [
    Example(("a joy from start to end ",), 1),
    Example(("what a poor film ",), 0),
    Example(("i yawned and left , and so did everybody i had come with ",), 0),
    Example(("lovely ",), 1),
]
# A random model gives most rows one label: only with unequal labels does its accuracy move.
UNEQUAL = [Example(row.texts, int(i > 0)) for i, row in enumerate(SENTENCES)]
PAIRS = [
    Example(("The cat sat on the mat.", "A cat sat."), 0),
    Example(("No man is an island, it was said.", "An island is a man."), 1),
    Example(("It was bad.", "It was good, he said to them all."), 1),
]


def ready(model: Path, *words: str) -> Session:
    config = build_config([f"model.path={model}", "model.name=tiny", "data=demo", *words])
    return opened(config)


def full_logits(model: Any, batch: Any, label_ids: list[int]) -> torch.Tensor:
    """The label words' scores by the stock forward: the whole vocabulary at every position, then pick."""
    texts, pad = [torch.tensor(row.input_ids) for row in batch.rows], model.config.pad_token_id
    ids, mask = (pad_sequence(x, True, value) for x, value in ((texts, pad), ([t * 0 + 1 for t in texts], 0)))
    scores = model(input_ids=ids, attention_mask=mask).logits
    return scores[torch.arange(len(batch.positions)), batch.positions][:, label_ids]


def outputs_of(model: Any, ours: Session, batch: Any) -> torch.Tensor:
    """The outputs for the rows of a batch by the own forward of another model."""
    return ours.objective.plain_outputs(replace(ours.loaded, model=model), batch.rows, ours.encoder)


def stock_of(ours: Session, folder: Path) -> Any:
    """The same weights in transformers' own model, which takes padded batches; a fresh head's are copied."""
    stock = type(ours.loaded.model).from_pretrained(folder).eval()
    stock.load_state_dict(ours.loaded.model.state_dict())
    return stock


def reference_loss(kind: str, batch: Any, label_ids: list[int], model: Any) -> float:
    logits = full_logits(model, batch, label_ids)
    if kind == "accuracy":
        return 1.0 - float((logits.argmax(-1) == batch.labels).float().mean())
    return float(F.cross_entropy(logits, batch.labels))


class Reference:
    """The reference's step, written from its published description, with `noise: torch`'s stream.

    It shares nothing with `mezo_cli`: the stock Hugging Face forward with the whole vocabulary at every position, four
    passes over the weights, torch's own generator keyed by tensor name.
    """

    def __init__(self, model: torch.nn.Module, lr: float, eps: float, weight_decay: float, seed: int) -> None:
        self.model, self.lr, self.eps, self.weight_decay = model.eval(), lr, eps, weight_decay
        self.stream = np.random.RandomState(seed)

    def _perturb(self, step_seed: int, scale: float) -> None:
        for name, p in self.model.named_parameters():
            p.data = p.data + scale * self._z(step_seed, name, p)

    def _z(self, step_seed: int, name: str, p: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed((step_seed << 32) + zlib.crc32(name.encode()))
        return torch.randn(p.shape, generator=generator)

    @torch.no_grad()
    def step(self, loss: Callable[[torch.nn.Module], float]) -> tuple[float, float]:
        """Do one step; return loss_plus and loss_minus."""
        step_seed = int(self.stream.randint(10**9))
        self._perturb(step_seed, self.eps)
        plus = loss(self.model)
        self._perturb(step_seed, -2 * self.eps)
        minus = loss(self.model)
        self._perturb(step_seed, self.eps)
        g = (plus - minus) / (2 * self.eps)
        for name, p in self.model.named_parameters():
            p.data = p.data - self.lr * (g * self._z(step_seed, name, p) + self.weight_decay * p.data)
        return plus, minus


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("task", "rows", "weight_decay", "loss", "lr", "eps"),
    [
        ("sst2", SENTENCES, 0.0, "cross_entropy", 1e-4, 1e-3),
        ("sst2", SENTENCES, 0.1, "cross_entropy", 1e-4, 1e-3),
        ("rte", PAIRS, 0.0, "cross_entropy", 1e-4, 1e-3),
        ("rte", PAIRS, 0.1, "cross_entropy", 1e-4, 1e-3),
        ("sst2", UNEQUAL, 0.1, "accuracy", 1e-4, 1e-1),
    ],
)
@pytest.mark.parametrize("decoder", ["tied", "untied", "copied"])
def test_a_hundred_steps_agree_with_the_reference(
    task: str, rows: list[Example], weight_decay: float, loss: str, lr: float, eps: float, decoder: str, request: Any
) -> None:
    """`copied` is the published code with RoBERTa: the decoder starts as the embeddings, and moves by itself."""
    folder = request.getfixturevalue("untied" if decoder == "untied" else "roberta")
    if (decoder, loss) == ("copied", "accuracy"):
        loss = "cross_entropy"  # scores of two labels come within 1e-5 of each other at every seed that was tried
    ours = ready(
        folder,
        f"task={task}",
        "optimizer.noise=torch",
        f"optimizer.weight_decay={weight_decay}",
        f"optimizer.lr={lr}",
        f"optimizer.eps={eps}",
        f"objective.loss={loss}",
        "seed=7",
        f"model.tie_embeddings={'false' if decoder == 'copied' else 'null'}",
    )
    stock = AutoModelForMaskedLM.from_pretrained(folder)
    if decoder == "copied":
        models.untie(stock)
    theirs = Reference(stock, lr=lr, eps=eps, weight_decay=weight_decay, seed=7)
    batch = ours.objective.collate(ours.encoder.encode_all(rows))
    # transformers gives an untied decoder its own bias, and the head's then serves nothing
    dead = [] if decoder == "tied" else ["lm_head.bias"]
    assert ours.forward.select_reachable(lambda: ours.objective.logits(batch)) == dead
    moved = 0
    with torch.no_grad():
        for step in range(100):
            result = ours.optimizer.step(ours.forward, BatchLoss(ours.objective, [batch]), step)
            plus, minus = theirs.step(partial(reference_loss, loss, batch, ours.encoder.label_ids))
            assert result.others["loss_plus"] == pytest.approx(plus, abs=1e-5), step
            assert result.others["loss_minus"] == pytest.approx(minus, abs=1e-5), step
            moved += result.recorded[0] != 0
    assert moved > (10 if loss == "accuracy" else 90)


def test_the_projected_gradient_is_the_slope_along_z(roberta: Path) -> None:
    """For small eps, g is the directional derivative, which backpropagation gives exactly."""
    ours = ready(roberta, "optimizer.eps=1e-3", "optimizer.lr=0")
    batch = ours.objective.collate(ours.encoder.encode_all(SENTENCES))
    ours.forward.select_reachable(lambda: ours.objective.logits(batch))
    F.cross_entropy(ours.objective.logits(batch), batch.labels).backward()
    with torch.no_grad():
        for step in range(5):
            result = ours.optimizer.step(ours.forward, BatchLoss(ours.objective, [batch]), step)
            slope = 0.0
            for name, p in ours.params.tensors.items():
                z = ours.params.noise.z(Direction(42, step), name, p.shape, "cpu").view(p.shape)
                slope += float((p.grad * z).sum())
            assert result.recorded[0] == pytest.approx(slope, rel=0.02, abs=0.01)
