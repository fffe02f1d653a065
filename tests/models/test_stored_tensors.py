"""Tensors of a checkpoint that its config.json does not use, and those that are no floats."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from mezo_cli.errors import UserError
from tests import tiny
from tests.models.test_loading import change_json, change_weights, load


def made(folder: Path, kind: str) -> Path:
    """Write a tiny checkpoint with all the tensors that well-known ones have beside those of their model."""
    if kind == "roberta-large":
        added = {
            "roberta.pooler.dense.weight": torch.zeros(32, 32),
            "roberta.pooler.dense.bias": torch.zeros(32),
            "roberta.embeddings.position_ids": torch.arange(80).unsqueeze(0),
        }
        change_weights(tiny.roberta(folder), lambda t: t.update(added))
    elif kind == "bert-base":

        def as_of_old(tensors: dict[str, torch.Tensor]) -> None:
            for name in list(tensors):
                if "LayerNorm" in name:
                    old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                        "LayerNorm.bias", "LayerNorm.beta"
                    )
                    tensors[old] = tensors.pop(name)
            tensors["cls.seq_relationship.weight"] = torch.zeros(2, 32)
            tensors["cls.seq_relationship.bias"] = torch.zeros(2)
            tensors["bert.pooler.dense.weight"] = torch.zeros(32, 32)
            tensors["bert.embeddings.position_ids"] = torch.arange(80).unsqueeze(0)

        change_weights(tiny.bert(folder), as_of_old)
    else:

        def as_of_old(tensors: dict[str, torch.Tensor]) -> None:
            for name in list(tensors):
                tensors[name.removeprefix("transformer.")] = tensors.pop(name)
            for layer in range(2):
                tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 300, 300, dtype=torch.uint8).tril()
                tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

        change_weights(tiny.decoder(folder, "gpt2"), as_of_old)
    return folder


@pytest.mark.parametrize(
    ("kind", "objective", "unused"),
    [
        ("roberta-large", "mlm", "roberta.pooler.dense.{bias,weight}"),
        ("roberta-large", "cls", "lm_head."),
        ("bert-base", "mlm", "cls.seq_relationship.{bias,weight}"),
        ("gpt2", "lm", "h.*.attn.masked_bias"),
    ],
)
def test_well_known_checkpoints_load(
    kind: str, objective: str, unused: str, tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(logging.getLogger("mezo"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="mezo"):
        loaded = load(made(tmp_path, kind), objective)
    assert all(name.startswith("classifier.") for name in loaded.fresh)
    (said,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("not used of the checkpoint")]
    assert unused in said


@pytest.mark.parametrize(("objective", "head"), [("mlm", "mlm"), ("cls", "mlm"), ("cls", "none")])
def test_a_layer_that_the_config_leaves_out_is_refused(tmp_path: Path, objective: str, head: str) -> None:
    folder = tiny.roberta(tmp_path, head=head)
    change_json(folder / "config.json", num_hidden_layers=1)
    said = r"no place for the checkpoint's tensor (roberta\.)?encoder\.layer\.1\..*config\.json is that of another"
    with pytest.raises(UserError, match=said):
        load(folder, objective)


def test_a_tensor_inside_a_layer_without_a_place_is_refused(tmp_path: Path) -> None:
    for index, name in enumerate(("attention.self.query.scale", "adapter.down.weight")):
        folder = tiny.roberta(tmp_path / str(index))
        change_weights(folder, lambda t, n=name: t.update({f"roberta.encoder.layer.0.{n}": torch.zeros(3)}))
        with pytest.raises(UserError, match=f"no place for the checkpoint's tensor roberta.encoder.layer.0.{name}"):
            load(folder)


def test_parameters_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    folder, name = tiny.roberta(tmp_path / "int8"), "roberta.embeddings.LayerNorm.bias"
    change_weights(folder, lambda t: t.update({name: t[name].to(torch.int8)}))
    with pytest.raises(UserError, match=f"model.safetensors stores {name} as I8; allowed are F64, F32, F16, BF16"):
        load(folder)
    folder = tiny.roberta(tmp_path / "half")
    change_weights(folder, lambda t: t.update({key: value.half() for key, value in t.items()}))
    assert load(folder).fresh == []
    body = tiny.roberta(tmp_path / "body", head="none")
    short = name.removeprefix("roberta.")
    tensors = safetensors.torch.load_file(body / "model.safetensors")
    assert short in tensors
    change_weights(body, lambda t: t.update({short: t[short].to(torch.int64)}))
    with pytest.raises(UserError, match=f"stores {short} as I64"):
        load(body, "cls")


# --- what transformers and tokenizers raise ---


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("config.json", "{", "config.json is damaged"),
        ("config.json", "[]", "config.json is damaged: it holds no JSON object"),
        ("config.json", '{"model_type": "nothing"}', "could not be loaded: "),
        ("config.json", '{"model_type": "gpt2", "vocab_size": 400}', "transformers has no masked-LM model of its kind"),
        ("config.json", {"hidden_act": "foo"}, "foo"),
        ("config.json", {"hidden_size": "x"}, "hidden_size"),
        ("config.json", {"num_attention_heads": 0}, "config.json is damaged"),
        ("config.json", {"id2label": 3}, "(config.json is damaged|id2label)"),
        ("tokenizer.json", "{}", "tokenizer.json is damaged.*added_tokens"),
        ("tokenizer.json", "[]", "tokenizer.json is damaged"),
    ],
)
def test_what_cannot_be_used_is_one_line(file: str, content: Any, word: str, tmp_path: Path) -> None:
    path = tiny.roberta(tmp_path) / file
    path.write_text(content if isinstance(content, str) else json.dumps({**json.loads(path.read_text()), **content}))
    with pytest.raises(UserError, match=word) as caught:
        load(tmp_path)
    assert str(caught.value).startswith(f"model.path={tmp_path}")
    assert "\n" not in str(caught.value)


def test_a_model_too_large_for_the_memory_is_not_called_damaged(tmp_path: Path) -> None:
    folder = tiny.roberta(tmp_path)
    change_json(folder / "config.json", hidden_size=10**9)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        load(folder)
