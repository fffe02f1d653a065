"""The untied output layer: it changes alone, and transformers loads it again."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from mezo_cli import models
from tests import tiny

IDS = torch.tensor([[0, 7, 8, 4, 2]])
SMALL = {"vocab_size": 40, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}


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


@pytest.mark.parametrize(
    "model",
    [
        GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=16, **SMALL)),
        LlamaForCausalLM(
            LlamaConfig(
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                tie_word_embeddings=True,
                **SMALL,
            )
        ),
    ],
    ids=["gpt2", "llama"],
)
def test_the_output_layer_of_a_causal_model(model: torch.nn.Module, tmp_path: Path) -> None:
    model.eval()
    before = logits(model)
    assert models.untie(model) == ["lm_head.weight"]
    with torch.no_grad():
        model.lm_head.weight[5] += 1.0
    moved = logits(model)
    assert torch.equal(moved[..., :5], before[..., :5])
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "out").eval()), moved)
