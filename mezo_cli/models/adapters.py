"""Parameter-efficient tuning (PEFT): which few tensors are tuned, and how they are saved without the model.

The `peft` library puts them into the model and writes them, one config a method (`METHODS`):

    lora    low-rank updates B A of query and value (paper: r 8, alpha 16), or of every matrix of the layers
    prefix  keys and values before every row's own; prefix.py
    head    what stands behind the body; the copy that is tuned leaves a tied decoder's input embeddings as they were
    bias    the bias terms (Zaken et al. 2022, arXiv 2106.10199)

A classification head (objective `cls`) is tuned and saved with each. Nothing is ever merged into the weights below:
a merged LoRA would not see A and B move. `peft` is imported when a run asks for it.
"""

import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from mezo_cli.errors import UserError
from mezo_cli.models import Loaded, prefix
from mezo_cli.models.starts import fingerprint
from mezo_cli.schema import ModelConfig, PeftConfig

WEIGHTS, BASE = "adapter_model.safetensors", "mezo_base"  # the file, and its note of what it stands on
TASK_TYPES = {"cls": "SEQ_CLS", "lm": "CAUSAL_LM"}  # as `peft` calls them; it has none for masked LMs
# What families call the projections to queries and values; GPT-2's (c_attn) and GPT-NeoX's are fused with the keys'.
QUERY_VALUE = (
    ("query", "value"),
    ("q_proj", "v_proj"),
    ("q_lin", "v_lin"),
    ("query_proj", "value_proj"),
    ("c_attn",),
    ("query_key_value",),
)
SHOWN = 6  # names of tensors in a line
COPIES = re.compile(r"\.(modules_to_save\.default|original_module|base_layer|default)(?=\.)")


@dataclass(frozen=True)
class Adapter:
    """The tuned tensors of a model. `base` is the fingerprint of the checkpoint that they stand on."""

    peft: Any
    base: str

    def save(self, folder: Path) -> None:
        """Write the adapter alone, in the layout that `peft` reads."""
        from peft import get_peft_model_state_dict

        folder.mkdir(parents=True, exist_ok=True)
        state = get_peft_model_state_dict(self.peft, save_embedding_layers=False)
        apart = {name: value.detach().cpu().clone() for name, value in state.items()}  # tied ones are stored twice
        safetensors.torch.save_file(apart, folder / WEIGHTS, metadata={BASE: self.base})
        self.peft.peft_config["default"].save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Take the tensors of a saved adapter.

        Raises:
            UserError: when they are damaged, or were tuned on another base or by another method.
        """
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        path = folder / WEIGHTS
        try:
            with safetensors.safe_open(path, "pt") as file:
                base = (file.metadata() or {}).get(BASE)
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged or missing: {error}") from error
        if base != self.base:
            raise UserError(f"{path} was tuned on other weights than these: model.path has changed")
        wanted = {
            name: v.shape for name, v in get_peft_model_state_dict(self.peft, save_embedding_layers=False).items()
        }
        if {name: value.shape for name, value in stored.items()} != wanted:
            raise UserError(f"{path} does not hold the tensors of this adapter: the run's settings have changed")
        set_peft_model_state_dict(self.peft, stored)


def attach(loaded: Loaded, config: PeftConfig, model: ModelConfig, objective: str, seed: int) -> None:
    """Put an adapter into a loaded model, freeze everything else, and note it as `loaded.adapter`.

    Args:
        loaded: a model; its `fresh` names then are those of the adapter's start, too.
        config: the method and its settings; `none` leaves the model as it is.
        model: where the base came from, for those who load the adapter with it.
        objective: mlm, cls or lm.
        seed: draws A of a LoRA and the tokens of a prefix.

    Raises:
        UserError: for a family that the method does not serve.
    """
    if config.name == "none":
        return
    name = f"model.path={model.path}: {type(loaded.model).__name__}"
    base, before = fingerprint(loaded.model, leaving=loaded.fresh), set(dict(loaded.model.named_parameters()))
    with _quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(f"fresh adapter {seed}".encode()))
        wrapped = METHODS[config.name](loaded, config, TASK_TYPES.get(objective), name)
    settings = wrapped.peft_config["default"]
    settings.inference_mode = True  # as every saved adapter is
    if isinstance(getattr(settings, "target_modules", None), set):
        settings.target_modules = sorted(settings.target_modules)  # a set would be saved in any order
    if settings.modules_to_save is not None:
        settings.modules_to_save = list(dict.fromkeys(settings.modules_to_save))  # peft adds its own to them
    if model.path != "demo" and not Path(model.path).is_dir():  # a hub id, not the cache's folder
        settings.base_model_name_or_path, settings.revision = model.path, model.revision
    for module in loaded.model.modules():
        if hasattr(module, "original_module"):
            module.original_module.requires_grad_(False)
        if hasattr(module, "cast_input_dtype_enabled"):  # the weights that the lens shows have the inputs' dtype
            module.cast_input_dtype_enabled = False
    names = [n for n, _ in loaded.model.named_parameters()]
    loaded.fresh = [n for n in names if plain(n) in loaded.fresh or plain(n) not in before]
    loaded.adapter = Adapter(wrapped.eval(), base)


def plain(name: str) -> str:
    """Return a parameter's name without what `peft` puts between: that of the base model's tensor, where it has one."""
    return COPIES.sub("", name)


def size(model: nn.Module) -> int:
    """Return the number of scalars in a model; the untuned original of a tuned copy does not count."""
    return sum(p.numel() for name, p in model.named_parameters() if ".original_module." not in name)


def told(names: Iterable[str]) -> str:
    """Return tensors' names in short: all layers as one, and names that differ in one place as one in braces."""
    rows = [tuple(re.sub(r"\.\d+\.", ".*.", plain(name)).split(".")) for name in names]
    for place in range(1, max(map(len, rows)) + 1):  # from the end
        groups: dict[Any, dict[str, None]] = {}
        for row in rows:
            head, part, tail = row[:-place], row[-place:][:1], row[len(row) - place + 1 :]
            groups.setdefault((head, tail), {})[part[0] if len(row) >= place else ""] = None
        rows = [
            (*head, next(iter(parts)) if len(parts) == 1 else f"{{{','.join(parts)}}}", *tail)
            for (head, tail), parts in groups.items()
        ]
    shown = [".".join(part for part in row if part) for row in rows]
    return ", ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")


# --- the methods ---


def _lora(loaded: Loaded, config: PeftConfig, task_type: str | None, name: str) -> Any:
    import peft

    assert config.r is not None
    assert config.alpha is not None
    matrices = _matrices(loaded.model)
    called = sorted({path.rpartition(".")[2] for path in matrices})
    targets: list[str] | str = next((list(names) for names in QUERY_VALUE if set(names) <= set(called)), [])
    if config.targets == "attention_feed_forward":
        targets = rf".*\.\d+\.(.*\.)?({'|'.join(called)})" if called else []
    if not targets:
        raise UserError(f"{name} is a family that is not served by peft=lora peft.targets={config.targets}")
    settings = peft.LoraConfig(
        task_type=task_type,
        r=config.r,
        lora_alpha=config.alpha,
        target_modules=targets,
        modules_to_save=_fresh_head(loaded, task_type),
        fan_in_fan_out=any(isinstance(matrix, Conv1D) for matrix in matrices.values()),
    )
    return peft.get_peft_model(loaded.model, settings)


def _prefix(loaded: Loaded, config: PeftConfig, task_type: str | None, name: str) -> Any:
    import peft

    assert config.length is not None
    model, tokenizer = loaded.model, loaded.tokenizer
    words = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    ids = torch.tensor(words)[torch.randint(len(words), (config.length,))].to(loaded.device)
    body = prefix.way_in(model)
    if body is None:
        raise UserError(
            f"{name} is a family that is not served by peft=prefix: its layers take no keys and values from outside; "
            "take peft=lora, or a model like RoBERTa, BERT, OPT, GPT-2 or Llama"
        )
    if config.length >= tokenizer.model_max_length:
        most = f"takes {tokenizer.model_max_length} tokens"
        raise UserError(f"peft.length={config.length}: {name} {most}, so none would be left for the text")
    with torch.no_grad():
        start, shape = prefix.activations(body, ids)
    settings = peft.PrefixTuningConfig(
        task_type=task_type or "FEATURE_EXTRACTION",  # without one, peft's own forward would leave the prefix out
        num_virtual_tokens=config.length,
        num_layers=shape[0],
        num_attention_heads=shape[1],
        token_dim=shape[1] * shape[2],
        num_transformer_submodules=1,
        modules_to_save=_fresh_head(loaded, task_type),
    )
    wrapped = peft.get_peft_model(model, settings)
    encoder: Any = wrapped.prompt_encoder["default"]
    encoder.load_prompt_embeddings(start)
    prefix.Prefix(body, encoder.embedding, shape)
    model.add_module("prefix", encoder.embedding)  # so that its name is one of the model's own
    tokenizer.model_max_length -= config.length
    return wrapped


def _head(loaded: Loaded, config: PeftConfig, task_type: str | None, name: str) -> Any:
    return _without_targets(loaded, task_type, modules_to_save=_fresh_head(loaded, task_type) or _behind_body(loaded))


def _bias(loaded: Loaded, config: PeftConfig, task_type: str | None, name: str) -> Any:
    if not any(n.endswith(".bias") for n, _ in loaded.model.named_parameters()):
        raise UserError(f"{name} has no bias terms: peft=bias has nothing to tune")
    return _without_targets(loaded, task_type, bias="all", modules_to_save=_fresh_head(loaded, task_type))


METHODS: dict[str, Callable[[Loaded, PeftConfig, str | None, str], Any]] = {
    "lora": _lora,
    "prefix": _prefix,
    "head": _head,
    "bias": _bias,
}


def _without_targets(loaded: Loaded, task_type: str | None, **settings: Any) -> Any:
    """Tune biases or whole modules: to `peft`, what stands beside a LoRA, here one that changes no matrix."""
    import peft
    from peft.utils.constants import DUMMY_TARGET_MODULES

    config = peft.LoraConfig(task_type=task_type, target_modules=DUMMY_TARGET_MODULES, **settings)
    return peft.get_peft_model(loaded.model, config)


# --- what there is in a model ---


def _matrices(model: nn.Module) -> dict[str, nn.Module]:
    """Return path -> matrix of everything multiplied with inside the layers (which are numbered)."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and re.search(r"\.\d+\.", path)
    }


def _behind_body(loaded: Loaded) -> list[str]:
    """Return the paths of the modules with weights that stand behind the body."""
    body = loaded.model.base_model_prefix
    return [
        path
        for path, child in loaded.model.named_children()
        if path != body and next(child.parameters(), None) is not None
    ]


def _fresh_head(loaded: Loaded, task_type: str | None) -> list[str] | None:
    """Return the paths of a classification head, with a pooler that no checkpoint gave; None where there is none."""
    if task_type != "SEQ_CLS":
        return None
    body = f"{loaded.model.base_model_prefix}."
    poolers = {".".join(name.split(".")[:2]) for name in loaded.fresh if name.startswith(body)}
    return [*_behind_body(loaded), *sorted(poolers)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep `peft`'s notes off the terminal: that a tied decoder is copied is what is wanted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
