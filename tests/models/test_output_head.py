"""The untied output layer: it changes alone, and transformers loads it again."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from mezo_cli import models
from tests import tiny

IDS = torch.tensor([[0, 7, 8, 4, 2]])


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("make", [tiny.roberta, tiny.bert])
def test_an_untied_decoder_changes_alone_and_is_loaded_again(make: Callable[[Path], Path], tmp_path: Path) -> None:
    model = AutoModelForMaskedLM.from_pretrained(make(tmp_path / "base")).eval()
    embeddings, decoder = model.get_input_embeddings().weight, model.get_output_embeddings()
    assert decoder.weight is embeddings
    kept, before = embeddings.detach().clone(), logits(model)

    names = models.untie(model)
    assert [name.rpartition("decoder.")[2] for name in names] == ["weight", "bias"]
    assert all(model.get_parameter(name).requires_grad for name in names)
    assert torch.equal(logits(model), before)
    assert model.get_input_embeddings().weight is embeddings

    with torch.no_grad():
        decoder.weight[5] += 1.0
        decoder.bias[6] += 1.0
    moved = logits(model)
    assert torch.equal(embeddings, kept)
    changed = (moved != before).any(dim=1).squeeze(0).nonzero().flatten()
    assert changed.tolist() == [5, 6]

    model.save_pretrained(tmp_path / "out")
    again, said = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not said["missing_keys"]
    assert not again.config.tie_word_embeddings
    assert torch.equal(logits(again.eval()), moved)
    assert models.untie(again) == []


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_output_layer_of_a_causal_model(kind: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.decoder(tmp_path / "base", kind)).eval()
    before = logits(model)
    assert models.untie(model) == ["lm_head.weight"]
    with torch.no_grad():
        model.lm_head.weight[5] += 1.0
    moved = logits(model)
    assert torch.equal(moved[..., :5], before[..., :5])
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "out").eval()), moved)
