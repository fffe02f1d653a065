"""Packed batches of encoders: the same scores as padded ones, and no padding is computed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM

from mezo_cli.config.registry import ENCODER_FAMILIES
from mezo_cli.config.schema import Example
from mezo_cli.errors import UserError
from mezo_cli.objectives import packed_encoder
from mezo_cli.objectives.families import find_encoder_family
from mezo_cli.perturb.noise import Direction
from tests.models.test_loading import SERVED, SHAPE, family
from tests.optim.test_mezo import SENTENCES, full_logits, ready, stock_of

EVEN = [Example(("same length here",), 0), Example(("same length here",), 1)]
ROWS = {"uneven": SENTENCES, "one": SENTENCES[:1], "even": EVEN}
OBJECTIVES = ["mlm", "cls"]
BUILT = {"roberta": ("Roberta", SHAPE), "camembert": ("Camembert", SHAPE), **SERVED}  # a tokenizer without segments


@pytest.mark.parametrize("kind", ["roberta", "bert"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_packed_equals_padded(kind: str, rows: list[Example], request: Any) -> None:
    folder = request.getfixturevalue(kind)
    ours = ready(folder)
    batch = ours.batch(ours.encoder.encode_all(rows))
    stock = AutoModelForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        want = full_logits(stock, batch, ours.encoder.label_ids)
        torch.testing.assert_close(ours.objective.logits(batch), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["roberta", "bert"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_a_packed_classification_head_equals_a_padded_one(kind: str, rows: list[Example], request: Any) -> None:
    folder = request.getfixturevalue(kind)
    ours = ready(folder, "objective=cls")
    batch = ours.batch(ours.encoder.encode_all(rows))
    with torch.no_grad():
        want = stock_of(ours, folder)(**batch.inputs()).logits
        torch.testing.assert_close(ours.objective.logits(batch), want, rtol=1e-4, atol=1e-5)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ENCODER_FAMILIES.names)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_packed_family_gives_its_scores_at_theta_and_in_a_paired_forward(
    name: str, objective: str, tmp_path: Path
) -> None:
    folder = family(tmp_path, BUILT[name])
    ours = ready(folder, f"objective={objective}")
    batch = ours.batch(ours.encoder.encode_all(SENTENCES))
    ours.forward.select_reachable(lambda: ours.objective.logits(batch))
    assert ours.objective.fits_paired_forward(batch)
    stock, z = stock_of(ours, folder), Direction(3, 11)
    noise = {n: ours.params.noise.z(z, n, p.shape, "cpu").view(p.shape) for n, p in ours.params.tensors.items()}
    want = []
    with torch.no_grad():
        for way in (0.0, 0.05, -0.1):  # to theta, to theta + 0.05 z, from there to theta - 0.05 z
            for p_name, p in stock.named_parameters():
                p += way * noise.get(p_name, 0)
            want.append(ours.objective.reference_logits(stock, batch, ours.encoder.label_ids))
        torch.testing.assert_close(ours.objective.logits(batch), want[0], rtol=1e-4, atol=1e-5)
        with ours.forward.perturbed(z, 0.05):
            both = ours.objective.logits(batch)
    torch.testing.assert_close(both, torch.stack(want[1:]), rtol=1e-4, atol=2e-5)
    assert (both[0] - both[1]).abs().max() > 1e-3


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", ["roberta", "bert"])
def test_only_real_tokens_are_computed(objective: str, kind: str, request: Any) -> None:
    ours = ready(request.getfixturevalue(kind), f"objective={objective}")
    batch = ours.batch(ours.encoder.encode_all(SENTENCES))
    seen: list[tuple[str, int]] = []
    layers = ours.loaded.model.base_model.encoder.layer
    for name, module in (("first", layers[0].intermediate.dense), ("last", layers[-1].intermediate.dense)):
        module.register_forward_pre_hook(lambda m, args, name=name: seen.append((name, args[0].shape[:-1].numel())))
    with torch.no_grad():
        ours.objective.logits(batch)
    assert seen == [("first", int(batch.attention_mask.sum())), ("last", len(SENTENCES))]
    assert batch.attention_mask.sum() < batch.attention_mask.numel()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_row_does_not_attend_to_other_rows(objective: str, roberta: Path) -> None:
    ours = ready(roberta, f"objective={objective}")
    alone = ours.batch(ours.encoder.encode_all(SENTENCES[1:2]))
    among = ours.batch(ours.encoder.encode_all(SENTENCES))
    with torch.no_grad():
        torch.testing.assert_close(
            ours.objective.logits(alone)[0], ours.objective.logits(among)[1], rtol=1e-4, atol=1e-6
        )
    assert find_encoder_family(ours.loaded.model) is not None


@pytest.mark.parametrize("name", ["electra", "distilbert"])
def test_a_classification_head_of_another_family_takes_padded_batches(name: str, tmp_path: Path) -> None:
    folder = family(tmp_path, SERVED[name])
    ours = ready(folder, "objective=cls")
    batch = ours.batch(ours.encoder.encode_all(SENTENCES))
    assert find_encoder_family(ours.loaded.model) is None
    assert not ours.objective.fits_paired_forward(batch)
    with torch.no_grad():
        want = stock_of(ours, folder)(**batch.inputs()).logits
        torch.testing.assert_close(ours.objective.logits(batch), want, rtol=1e-4, atol=1e-6)
        with ours.forward.perturbed(Direction(3, 11), 0.05):
            assert ours.loss(batch).shape == (2,)


def test_a_head_that_reads_another_token_is_refused(roberta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out = packed_encoder.PackedEncoder.lay_out
    monkeypatch.setattr(
        packed_encoder.PackedEncoder, "lay_out", lambda self, rows, read: lay_out(self, rows, [at + 1 for at in read])
    )
    with pytest.raises(UserError, match="RobertaForSequenceClassification is a model family that is not supported"):
        ready(roberta, "objective=cls")
