"""Packed batches give what padded ones give."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM

from mezo_cli import packing
from mezo_cli.schema import Example
from tests.optim.test_mezo import SENTENCES, full_logits, ready

EVEN = [Example(("same length here",), 0), Example(("same length here",), 1)]


@pytest.mark.parametrize("kind", ["roberta", "bert"])
@pytest.mark.parametrize("rows", [SENTENCES, SENTENCES[:1], EVEN], ids=["uneven", "one", "even"])
def test_packed_equals_padded(kind: str, rows: list[Example], request: Any) -> None:
    folder = request.getfixturevalue(kind)
    ours = ready(folder)
    batch = ours.batch(ours.inputs.encode_all(rows))
    stock = AutoModelForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        want = full_logits(stock, batch, ours.inputs.label_ids)
        torch.testing.assert_close(ours.objective.logits(batch), want, rtol=1e-4, atol=1e-5)


def test_only_real_tokens_are_computed(roberta: Any) -> None:
    ours = ready(roberta)
    batch = ours.batch(ours.inputs.encode_all(SENTENCES))
    seen: list[tuple[str, int]] = []
    layers = ours.loaded.model.roberta.encoder.layer
    for name, module in (("first", layers[0].intermediate.dense), ("last", layers[-1].intermediate.dense)):
        module.register_forward_pre_hook(lambda m, args, name=name: seen.append((name, args[0].shape[1])))
    with torch.no_grad():
        ours.objective.logits(batch)
    assert seen == [("first", int(batch.attention.sum())), ("last", len(SENTENCES))]
    assert batch.attention.sum() < batch.attention.numel()


def test_a_row_does_not_see_its_neighbours(roberta: Any) -> None:
    ours = ready(roberta)
    alone = ours.batch(ours.inputs.encode_all(SENTENCES[1:2]))
    among = ours.batch(ours.inputs.encode_all(SENTENCES))
    with torch.no_grad():
        torch.testing.assert_close(
            ours.objective.logits(alone)[0], ours.objective.logits(among)[1], rtol=1e-4, atol=1e-6
        )
    assert packing.serves(ours.loaded.model)
