"""Packed batches of encoders: the same scores as padded ones, and no padding is computed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mezo_cli.config.registry import ENCODER_FAMILIES
from mezo_cli.config.schema import Example
from mezo_cli.objectives.base import BatchLoss
from mezo_cli.perturb.noise import Direction
from tests.models.test_loading import SERVED, SHAPE, family
from tests.optim.test_mezo import SENTENCES, outputs_of, ready, stock_of

EVEN = [Example(("same length here",), 0), Example(("same length here",), 1)]
OBJECTIVES = ["mlm", "cls"]
BUILT = {"roberta": ("Roberta", SHAPE), "camembert": ("Camembert", SHAPE), **SERVED}  # a tokenizer without segments


@pytest.mark.parametrize(("name", "objective"), zip(ENCODER_FAMILIES.names, OBJECTIVES * 2, strict=True))
def test_packed_families_give_their_scores_also_in_paired_forwards(name: str, objective: str, tmp_path: Path) -> None:
    folder = family(tmp_path, BUILT[name])
    ours = ready(folder, f"objective={objective}")
    batch = ours.objective.collate(ours.encoder.encode_all(SENTENCES))
    ours.forward.select_reachable(lambda: ours.objective.logits(batch))
    assert ours.objective.fits_paired_forward(batch)
    stock, z = stock_of(ours, folder), Direction(3, 11)
    for rows in (SENTENCES[:1], EVEN):
        with torch.no_grad():
            other = ours.objective.collate(ours.encoder.encode_all(rows))
            expected = outputs_of(stock, ours, other)
            torch.testing.assert_close(ours.objective.logits(other), expected, rtol=1e-4, atol=1e-5)
    noise = {n: ours.params.noise.z(z, n, p.shape, "cpu").view(p.shape) for n, p in ours.params.tensors.items()}
    want = []
    with torch.no_grad():
        for way in (0.0, 0.05, -0.1):  # to theta, to theta + 0.05 z, from there to theta - 0.05 z
            for p_name, p in stock.named_parameters():
                p += way * noise.get(p_name, 0)
            want.append(outputs_of(stock, ours, batch))
        torch.testing.assert_close(ours.objective.logits(batch), want[0], rtol=1e-4, atol=1e-5)
        with ours.forward.perturbed(z, 0.05):
            both = ours.objective.logits(batch)
    torch.testing.assert_close(both, torch.stack(want[1:]), rtol=1e-4, atol=2e-5)
    assert (both[0] - both[1]).abs().max() > 1e-3


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", ["roberta", "bert"])
def test_only_real_tokens_are_computed(objective: str, kind: str, request: Any) -> None:
    ours = ready(request.getfixturevalue(kind), f"objective={objective}")
    batch = ours.objective.collate(ours.encoder.encode_all(SENTENCES))
    seen: list[tuple[str, int]] = []
    layers = ours.loaded.model.base_model.encoder.layer
    for name, module in (("first", layers[0].intermediate.dense), ("last", layers[-1].intermediate.dense)):
        module.register_forward_pre_hook(lambda m, args, name=name: seen.append((name, args[0].shape[:-1].numel())))
    with torch.no_grad():
        ours.objective.logits(batch)
    lengths = [len(row.input_ids) for row in batch.rows]
    assert seen == [("first", sum(lengths)), ("last", len(SENTENCES))]
    assert len({*lengths}) > 1


def test_a_classification_head_of_another_family_takes_padded_batches(tmp_path: Path) -> None:
    folder = family(tmp_path, SERVED["distilbert"])
    ours = ready(folder, "objective=cls")
    batch = ours.objective.collate(ours.encoder.encode_all(SENTENCES))
    assert ours.objective.frozen is None
    assert not ours.objective.fits_paired_forward(batch)
    with torch.no_grad():
        want = stock_of(ours, folder)(**batch.layout).logits
        torch.testing.assert_close(ours.objective.logits(batch), want, rtol=1e-4, atol=1e-6)
        with ours.forward.perturbed(Direction(3, 11), 0.05):
            assert BatchLoss(ours.objective, [batch])().shape == (2,)
