"""Insert the adapter of a method into a model; save and load it without the model.

A classification head is trained and saved with each method. `peft` is imported only when a run asks for an adapter.
"""

import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from mezo_cli.adapters.methods import find_method
from mezo_cli.config.schema import ModelConfig, PeftConfig
from mezo_cli.errors import UserError, first_line
from mezo_cli.models.loading import DTYPES, LoadedModel, untie
from mezo_cli.models.quantized import describe, quantized_layers, row_factors
from mezo_cli.models.stored_tensors import base_name, fingerprint, read_tensors

WEIGHTS = "adapter_model.safetensors"
BASE_FINGERPRINT = "mezo_base"  # key of the file's metadata; after it, how the base is quantised, if it is


@dataclass(frozen=True)
class Adapter:
    """The trained tensors of a model.

    Attributes:
        peft: the model inside peft's wrapper.
        base: fingerprint of the base checkpoint.
        quantized: how the base is quantised: `quantized.describe`.
    """

    peft: Any
    base: str
    quantized: str = "none"

    def save(self, folder: Path) -> None:
        """Write the adapter alone, in the layout that `peft` loads, into a folder that is made."""
        from peft import get_peft_model_state_dict

        folder.mkdir(parents=True, exist_ok=True)
        state = {**get_peft_model_state_dict(self.peft, save_embedding_layers=False), **row_factors(self.peft)}
        copies = {name: value.detach().cpu().clone() for name, value in state.items()}  # safetensors refuses tied ones
        base = self.base if self.quantized == "none" else f"{self.base} {self.quantized}"
        # One entry: safetensors writes several in an order that changes from run to run.
        safetensors.torch.save_file(copies, folder / WEIGHTS, metadata={BASE_FINGERPRINT: base})
        settings = self.peft.peft_config["default"]
        # In an order that does not change from run to run.
        if isinstance(getattr(settings, "target_modules", None), set):
            settings.target_modules = sorted(settings.target_modules)
        if settings.modules_to_save is not None:
            settings.modules_to_save = list(dict.fromkeys(settings.modules_to_save))  # peft adds its own to them
        settings.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Load the tensors of a saved adapter."""
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        path = folder / WEIGHTS
        stored, metadata = read_tensors(path)
        base, _, quantized = metadata.get(BASE_FINGERPRINT, "").partition(" ")
        if (quantized or "none") != self.quantized:
            was = f"was trained with model.quantize={quantized or 'none'}"
            raise UserError(f"{path} {was}, and here it is {self.quantized}")
        if base != self.base:
            raise UserError(f"{path} was trained on other base weights than these: model.path has changed")
        factors = row_factors(self.peft)
        state = get_peft_model_state_dict(self.peft, save_embedding_layers=False)
        wanted = {name: v.shape for name, v in {**state, **factors}.items()}
        if {name: value.shape for name, value in stored.items()} != wanted:
            raise UserError(f"{path} does not hold the tensors of this adapter: the run's settings have changed")
        with torch.no_grad():
            for name, factor in factors.items():
                factor.copy_(stored.pop(name))
        set_peft_model_state_dict(self.peft, stored)


def attach(loaded: LoadedModel, config: PeftConfig, model: ModelConfig, seed: int) -> None:
    """Insert an adapter into a loaded model, freeze all other parameters, and set `loaded.adapter`.

    Args:
        loaded: a model. The adapter's parameters are added to its `fresh` names.
        config: the method and its settings; `none` leaves the model as it is.
        model: the base checkpoint, which the saved adapter names.
        seed: draws the new tensors: A of a LoRA, the tokens that a prefix starts from.
    """
    if config.name == "none":
        return
    base, before = fingerprint(loaded.model, exclude=loaded.fresh), set(dict(loaded.model.named_parameters()))
    # peft warns that a tied output layer is copied, which is intended.
    with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(f"fresh adapter {seed}".encode()))
        name = f"model.path={model.path}: {type(loaded.model).__name__}"
        try:
            wrapped = find_method(config).insert(loaded, name)
        except ValueError as error:  # the library's: it finds no module of the names that it looks for
            raise UserError(
                f"{name} is a model family that peft={config.name} does not support: {first_line(error)}"
            ) from error
    settings = wrapped.peft_config["default"]
    settings.inference_mode = True  # as in every saved adapter; and peft gives a prefix in its own dtype then
    if not model.is_embedded and not Path(model.path).is_dir():  # a hub id, not the folder in the cache
        settings.base_model_name_or_path, settings.revision = model.path, model.revision
    for module in loaded.model.modules():
        if hasattr(module, "original_module"):
            module.original_module.requires_grad_(False)
        if hasattr(module, "cast_input_dtype_enabled"):  # the perturbed weights have the inputs' dtype already
            module.cast_input_dtype_enabled = False
    for p in loaded.model.parameters():
        if p.requires_grad or not model.stream:  # a base that is read as it runs stays as it is in its files
            p.data = p.data.to(DTYPES[model.dtype])  # peft makes new tensors in float32
    names = [name for name, _ in loaded.model.named_parameters()]
    loaded.fresh = [name for name in names if base_name(name) in loaded.fresh or base_name(name) not in before]
    loaded.adapter = Adapter(wrapped.eval(), base, describe(loaded.model))


def merge(loaded: LoadedModel, dtype: str) -> None:
    """Write what an adapter has trained into the model's own weights; the model is then a plain one of its library.

    Args:
        loaded: a model with an adapter of a method that `merges`; its `adapter` is None then.
        dtype: of the merged weights, where the base is quantised or matrices have a LoRA; else it stays.
    """
    model = loaded.model
    layers = quantized_layers(model)
    for path, layer in layers.items():
        weight = layer.dequantized()
        if layer.rows is not None:
            weight *= layer.rows.factor.detach()[:, None]
        plain = torch.nn.utils.skip_init(torch.nn.Linear, layer.in_features, layer.out_features, bias=False)
        plain.weight, plain.bias = torch.nn.Parameter(weight), layer.bias
        model.set_submodule(path, plain)
    if layers or any("lora_A" in name for name, _ in model.named_parameters()):
        model.to(DTYPES[dtype])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")  # so it shall be
        loaded.model = loaded.adapter.peft.merge_and_unload()
    outputs = loaded.model.get_output_embeddings()
    if outputs is not None and outputs.weight is not loaded.model.get_input_embeddings().weight:
        untie(loaded.model)
    loaded.adapter = None
