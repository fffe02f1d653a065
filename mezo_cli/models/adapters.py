"""Parameter-efficient fine-tuning (PEFT): train a few tensors, and save them without the model.

The `peft` library inserts the tensors and saves them. There is one builder per method (`ADAPTERS`):

    lora    low-rank updates B A of the query and value matrices (paper: r 8, alpha 16), or of every matrix of a layer
    prefix  keys and values before those of the text, in every layer (prefix.py)
    head    the output head; a copy is trained, so the input embeddings that it may be tied to stay unchanged
    bias    the bias terms (Zaken et al. 2022, arXiv 2106.10199)

A classification head is trained and saved with each of them. A LoRA is never merged into the base weights: forwards
with perturbed A and B would then not see the perturbation. `peft` is imported only when a run asks for an adapter.
"""

import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from mezo_cli.config.schema import BiasConfig, LoraConfig, ModelConfig, PeftConfig, PrefixConfig
from mezo_cli.errors import UserError
from mezo_cli.models import prefix
from mezo_cli.models.initial_state import fingerprint
from mezo_cli.models.loading import STORAGE_DTYPES, LoadedModel
from mezo_cli.models.parameter_names import base_name

WEIGHTS = "adapter_model.safetensors"
BASE_FINGERPRINT = "mezo_base"  # key of the file's metadata
# Names of the query and value projections in model families; those of GPT-2 (c_attn) and GPT-NeoX hold the keys too.
QUERY_VALUE = (
    ("query", "value"),
    ("q_proj", "v_proj"),
    ("q_lin", "v_lin"),
    ("query_proj", "value_proj"),
    ("c_attn",),
    ("query_key_value",),
)


@dataclass(frozen=True)
class Adapter:
    """The trained tensors of a model.

    Attributes:
        peft: the model inside peft's wrapper.
        base: fingerprint of the base checkpoint.
    """

    peft: Any
    base: str

    def save(self, folder: Path) -> None:
        """Write the adapter alone, in the layout that `peft` loads."""
        from peft import get_peft_model_state_dict

        folder.mkdir(parents=True, exist_ok=True)
        state = get_peft_model_state_dict(self.peft, save_embedding_layers=False)
        copies = {name: value.detach().cpu().clone() for name, value in state.items()}  # safetensors refuses tied ones
        safetensors.torch.save_file(copies, folder / WEIGHTS, metadata={BASE_FINGERPRINT: self.base})
        self.peft.peft_config["default"].save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Load the tensors of a saved adapter.

        Raises:
            UserError: when the file is damaged, or was trained on another base or with other settings.
        """
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        path = folder / WEIGHTS
        try:
            with safetensors.safe_open(path, "pt") as file:
                base = (file.metadata() or {}).get(BASE_FINGERPRINT)
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is not a dict)
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged or missing: {error}") from error
        if base != self.base:
            raise UserError(f"{path} was trained on other base weights than these: model.path has changed")
        wanted = {
            name: v.shape for name, v in get_peft_model_state_dict(self.peft, save_embedding_layers=False).items()
        }
        if {name: value.shape for name, value in stored.items()} != wanted:
            raise UserError(f"{path} does not hold the tensors of this adapter: the run's settings have changed")
        set_peft_model_state_dict(self.peft, stored)


def attach(loaded: LoadedModel, config: PeftConfig, model: ModelConfig, seed: int) -> None:
    """Insert an adapter into a loaded model, freeze all other parameters, and set `loaded.adapter`.

    Args:
        loaded: a model. The adapter's parameters are added to its `fresh` names.
        config: the method and its settings; `none` leaves the model as it is.
        model: the base checkpoint, which the saved adapter names.
        seed: draws A of a LoRA, and the tokens that a prefix starts from.

    Raises:
        UserError: for a model family that the method does not support.
    """
    if config.name == "none":
        return
    base, before = fingerprint(loaded.model, exclude=loaded.fresh), set(dict(loaded.model.named_parameters()))
    with _ignore_warnings(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(f"fresh adapter {seed}".encode()))
        wrapped = ADAPTERS[config.name](loaded, config, f"model.path={model.path}: {type(loaded.model).__name__}")
    _set_saved_config(wrapped.peft_config["default"], model)
    for module in loaded.model.modules():
        if hasattr(module, "original_module"):
            module.original_module.requires_grad_(False)
        if hasattr(module, "cast_input_dtype_enabled"):  # the perturbed weights have the inputs' dtype already
            module.cast_input_dtype_enabled = False
    for p in loaded.model.parameters():
        p.data = p.data.to(STORAGE_DTYPES[model.dtype])  # peft makes new tensors in float32
    names = [name for name, _ in loaded.model.named_parameters()]
    loaded.fresh = [name for name in names if base_name(name) in loaded.fresh or base_name(name) not in before]
    loaded.adapter = Adapter(wrapped.eval(), base)


def _set_saved_config(settings: Any, model: ModelConfig) -> None:
    """Set what `adapter_config.json` says, in an order that does not change from run to run."""
    settings.inference_mode = True  # as in every saved adapter
    if isinstance(getattr(settings, "target_modules", None), set):
        settings.target_modules = sorted(settings.target_modules)
    if settings.modules_to_save is not None:
        settings.modules_to_save = list(dict.fromkeys(settings.modules_to_save))  # peft adds its own to them
    if model.path != "demo" and not Path(model.path).is_dir():  # a hub id, not the folder in the cache
        settings.base_model_name_or_path, settings.revision = model.path, model.revision


# --- the methods ---


def _lora(loaded: LoadedModel, config: LoraConfig, name: str) -> Any:
    import peft

    matrices = _layer_matrices(loaded.model)
    last_parts = sorted({path.rpartition(".")[2] for path in matrices})
    targets: list[str] | str = next((list(names) for names in QUERY_VALUE if set(names) <= set(last_parts)), [])
    if config.targets == "attention_feed_forward":
        targets = rf".*\.\d+\.(.*\.)?({'|'.join(last_parts)})" if last_parts else []
    if targets and config.layers is not None:
        names = last_parts if config.targets == "attention_feed_forward" else targets
        top = range(_first_trained_layer(loaded.model, config.layers, name), loaded.model.config.num_hidden_layers)
        targets = rf".*\.({'|'.join(map(str, top))})\.(.*\.)?({'|'.join(names)})"
    if not targets:
        raise UserError(f"{name} is a model family that peft=lora peft.targets={config.targets} does not support")
    settings = peft.LoraConfig(
        task_type=loaded.kind.task_type,
        r=config.r,
        lora_alpha=config.alpha,
        target_modules=targets,
        modules_to_save=_classifier_modules(loaded),
        fan_in_fan_out=any(isinstance(matrix, Conv1D) for matrix in matrices.values()),
    )
    return peft.get_peft_model(loaded.model, settings)


def _prefix(loaded: LoadedModel, config: PrefixConfig, name: str) -> Any:
    import peft

    model, tokenizer = loaded.model, loaded.tokenizer
    words = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    ids = torch.tensor(words)[torch.randint(len(words), (config.length,))].to(loaded.device)
    body = prefix.find_cached_forward(model)
    if body is None:
        raise UserError(
            f"{name} is a model family that peft=prefix does not support: it takes no past_key_values; use peft=lora, "
            "or a model like RoBERTa, BERT, OPT, GPT-2 or Llama"
        )
    if config.length >= tokenizer.model_max_length:
        raise UserError(
            f"peft.length={config.length}: {name} takes {tokenizer.model_max_length} tokens, so none would be left for "
            "the text"
        )
    with torch.no_grad():
        key_values, shape = prefix.compute_key_values(body, ids)
    settings = peft.PrefixTuningConfig(
        task_type=loaded.kind.task_type or "FEATURE_EXTRACTION",  # with None, peft's own forward ignores the prefix
        num_virtual_tokens=config.length,
        num_layers=shape[0],
        num_attention_heads=shape[1],
        token_dim=shape[1] * shape[2],
        num_transformer_submodules=1,
        modules_to_save=_classifier_modules(loaded),
    )
    wrapped = peft.get_peft_model(model, settings)
    encoder: Any = wrapped.prompt_encoder["default"]
    encoder.load_prompt_embeddings(key_values)
    prefix.Prefix(body, encoder.embedding, shape)
    model.add_module("prefix", encoder.embedding)  # gives its parameter a name in the model
    tokenizer.model_max_length -= config.length
    return wrapped


def _head(loaded: LoadedModel, config: PeftConfig, name: str) -> Any:
    return _without_targets(loaded, modules_to_save=_classifier_modules(loaded) or _head_modules(loaded))


def _bias(loaded: LoadedModel, config: BiasConfig, name: str) -> Any:
    if not any(parameter.endswith(".bias") for parameter, _ in loaded.model.named_parameters()):
        raise UserError(f"{name} has no bias terms: peft=bias has nothing to train")
    wrapped = _without_targets(loaded, bias="all", modules_to_save=_classifier_modules(loaded))
    if config.layers is not None:
        first = _first_trained_layer(loaded.model, config.layers, name)
        for parameter, p in loaded.model.named_parameters():
            if parameter.endswith(".bias") and _is_below(parameter, first):
                p.requires_grad_(False)
    return wrapped


ADAPTERS: dict[str, Callable[[LoadedModel, Any, str], Any]] = {
    "lora": _lora,
    "prefix": _prefix,
    "head": _head,
    "bias": _bias,
}


def _without_targets(loaded: LoadedModel, **settings: Any) -> Any:
    """Train biases or whole modules: in `peft` these are options of a LoRA, here of one without target matrices."""
    import peft
    from peft.utils.constants import DUMMY_TARGET_MODULES

    config = peft.LoraConfig(task_type=loaded.kind.task_type, target_modules=DUMMY_TARGET_MODULES, **settings)
    return peft.get_peft_model(loaded.model, config)


# --- modules of a model ---


def _layer_matrices(model: nn.Module) -> dict[str, nn.Module]:
    """Return path -> linear module, for all inside the numbered layers."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and re.search(r"\.\d+\.", path)
    }


def _first_trained_layer(model: Any, layers: int, name: str) -> int:
    """Return the number of the lowest of the top `layers` layers.

    Raises:
        UserError: when the model has fewer.
    """
    count: int = model.config.num_hidden_layers
    if layers > count:
        raise UserError(f"peft.layers={layers}: {name} has {count} layer{'' if count == 1 else 's'}")
    return count - layers


def _is_below(parameter: str, layer: int) -> bool:
    """Return whether a parameter is in a lower layer, or in the embeddings before the layers."""
    number = re.search(r"\.(\d+)\.", parameter)
    return int(number[1]) < layer if number else "embed" in parameter


def _head_modules(loaded: LoadedModel) -> list[str]:
    """Return the paths of the modules with parameters outside the body."""
    body = loaded.model.base_model_prefix
    return [
        path
        for path, child in loaded.model.named_children()
        if path != body and next(child.parameters(), None) is not None
    ]


def _classifier_modules(loaded: LoadedModel) -> list[str] | None:
    """Return the paths of the classification head and of new poolers; None for a model without such a head."""
    if not loaded.kind.has_classifier:
        return None
    body = f"{loaded.model.base_model_prefix}."
    poolers = {".".join(name.split(".")[:2]) for name in loaded.fresh if name.startswith(body)}
    return [*_head_modules(loaded), *sorted(poolers)]


@contextmanager
def _ignore_warnings() -> Iterator[None]:
    """Ignore peft's warnings: that a tied output layer is copied is intended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
