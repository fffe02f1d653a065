"""The output layer: tied to the input embeddings or not, it changes alone, and transformers loads it again."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from mezo_cli import models
from mezo_cli.config.compose import build_config
from mezo_cli.models import CAUSAL_LM, MASKED_LM, ModelKind
from tests import tiny
from tests.command_line import error_line, mezo, small

IDS = torch.tensor([[0, 7, 8, 4, 2]])


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("make", "auto", "untied"),
    [
        (tiny.roberta, AutoModelForMaskedLM, ["decoder.weight", "decoder.bias"]),
        (tiny.bert, AutoModelForMaskedLM, ["decoder.weight", "decoder.bias"]),
        (tiny.decoder, AutoModelForCausalLM, ["lm_head.weight"]),
        (partial(tiny.decoder, kind="llama"), AutoModelForCausalLM, ["lm_head.weight"]),
    ],
)
def test_an_untied_decoder_is_alone(make: Callable[[Path], Path], auto: Any, untied: list[str], tmp_path: Path) -> None:
    model = auto.from_pretrained(make(tmp_path / "base")).eval()
    embeddings, decoder = model.get_input_embeddings().weight, model.get_output_embeddings()
    assert decoder.weight is embeddings
    kept, before = embeddings.detach().clone(), logits(model)
    names = models.untie(model)
    assert [".".join(name.split(".")[-2:]) for name in names] == untied
    assert all(model.get_parameter(name).requires_grad for name in names)
    assert torch.equal(logits(model), before)
    assert model.get_input_embeddings().weight is embeddings
    with torch.no_grad():
        decoder.weight[5] += 1.0
        if decoder.bias is not None:
            decoder.bias[6] += 1.0
    moved = logits(model)
    assert torch.equal(embeddings, kept)
    changed = (moved != before).any(dim=1).squeeze(0).nonzero().flatten()
    assert changed.tolist() == [5, 6][: len(untied)]
    model.save_pretrained(tmp_path / "out")
    again, said = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not said["missing_keys"]
    assert not again.config.tie_word_embeddings
    assert torch.equal(logits(again.eval()), moved)
    assert models.untie(again) == []


def load(folder: Path, setting: str, kind: ModelKind = MASKED_LM) -> models.LoadedModel:
    config = build_config([f"model.path={folder}", "model.device=cpu", f"model.tie_embeddings={setting}"])
    return models.load(config.model, kind, ["a", "b"], 0)


@pytest.mark.parametrize(("family", "kind"), [("roberta", MASKED_LM), ("llama", CAUSAL_LM)])
def test_tie_embeddings_ties_or_copies(family: str, kind: ModelKind, tmp_path: Path) -> None:
    folder = tmp_path / family
    _ = tiny.roberta(folder) if family == "roberta" else tiny.decoder(folder, family)
    for setting in ("null", "true", "false"):
        model = load(folder, setting, kind).model
        embeddings, decoder = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert (decoder is embeddings) == (setting != "false")
        assert torch.equal(decoder, embeddings)


def test_a_decoder_of_its_own_is_kept_or_refused(untied: Path, movies: Path, tmp_path: Path) -> None:
    own, kept = (load(untied, setting).model for setting in ("null", "false"))
    assert torch.equal(own.get_output_embeddings().weight, kept.get_output_embeddings().weight)
    words = small(untied, movies, tmp_path / "run", "model.tie_embeddings=true")
    assert "has a decoder of its own; use null or false" in error_line(mezo("train", *words))


def test_a_copied_decoder_is_trained_apart(roberta: Path, movies: Path, tmp_path: Path, eager_kernels: None) -> None:
    words = small(roberta, movies, tmp_path / "run", "model.tie_embeddings=false", "optimizer.lr=1e-2")
    assert mezo("train", *words).code == 0
    last = tmp_path / "run" / "checkpoints" / "last"
    assert mezo("replay", tmp_path / "run", "--step", "6", "--out", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (last / "model.safetensors").read_bytes()
    base, plain = (AutoModelForMaskedLM.from_pretrained(folder) for folder in (roberta, last))
    moved = [
        m.weight - base.get_input_embeddings().weight for m in (plain.get_input_embeddings(), plain.lm_head.decoder)
    ]
    assert all(difference.abs().max() > 1e-3 for difference in moved)
    assert torch.corrcoef(torch.stack([difference.flatten() for difference in moved]))[0, 1].abs() < 0.1
