"""Models: tokenizer and model of a checkpoint, on a device; what may be missing in it and what may not.

A checkpoint without its head over the vocabulary is refused for `mlm` and `lm`: a head left at random gives plausible,
wrong results. A fresh classification head (`cls`) is drawn from the run's seed.
"""

import dataclasses
import logging
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from mezo_cli.errors import UserError, listed
from mezo_cli.models.fetch import fetch
from mezo_cli.schema import ModelConfig

log = logging.getLogger("mezo")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KINDS: dict[str, Any] = {
    "mlm": transformers.AutoModelForMaskedLM,
    "cls": transformers.AutoModelForSequenceClassification,
    "lm": transformers.AutoModelForCausalLM,
}
CALLED = {"mlm": "masked-LM", "cls": "sequence-classification", "lm": "causal-LM"}


@dataclass
class Loaded:
    """A model in eval mode (dropout off) with its tokenizer.

    `fresh` names the tensors that no checkpoint gave, `fresh_rows` those of which only some rows are such: together
    what a start holds that the base model does not.

    `adapter` (an `adapters.Adapter`) holds what is tuned where that is not the whole model.
    """

    model: Any
    tokenizer: Any
    device: torch.device
    compute_dtype: torch.dtype
    fresh: list[str] = field(default_factory=list)
    fresh_rows: dict[str, list[int]] = field(default_factory=dict)
    adapter: Any = None

    @property
    def uses_segments(self) -> bool:
        """Whether the model tells first from second sentences by token_type_ids."""
        return "token_type_ids" in self.tokenizer.model_input_names

    @property
    def pad_id(self) -> int:
        """What fills a row up. A decoder's tokenizer may have no token for it; any will do: no real token sees it."""
        pad = self.tokenizer.pad_token_id
        return 0 if pad is None else int(pad)


def load(config: ModelConfig, objective: str, labels: Sequence[str], seed: int) -> Loaded:
    """Load tokenizer and model for an objective.

    Args:
        config: path (hub id, local folder, or `demo`), device, dtypes.
        objective: `mlm`, `cls` or `lm`.
        labels: the classes, in the task's order, for `cls`.
        seed: draws a fresh classification head.

    Raises:
        UserError: when nothing is found, when weights are missing (for `mlm` and `lm` the head, too), are not
            safetensors or do not fit, and when tokenizer and model do not go together.
    """
    device = pick_device(config.device)
    folder = fetch(config)
    tokenizer = _tokenizer(folder, config.path, objective)
    options = {"num_labels": len(labels)} if objective == "cls" else {}
    with _explained(config.path, objective), _quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(f"fresh head {seed}".encode()))
        theirs = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if objective == "lm":
            _refuse_encoder(theirs, config.path)
        model, report = KINDS[objective].from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are judged below
            **options,
        )
    resized = {
        key: f"{list(stored)} in the checkpoint, {list(needed)} here"
        for key, stored, needed in report["mismatched_keys"]
    }
    fresh = sorted({*report["missing_keys"], *resized})
    _check_fresh(fresh, resized, model, objective, config.path)
    if objective == "cls":
        _name_classes(model, theirs, labels, fresh, config.path)
    _fit(tokenizer, model, objective, config.path)
    model.eval()
    return Loaded(model.to(device), tokenizer, device, DTYPES[config.compute_dtype], fresh)


def load_tokenizer(config: ModelConfig, objective: str) -> Any:
    """Load the tokenizer alone.

    Raises:
        UserError: when it is not found, or has no padding token, which every objective but `lm` needs.
    """
    return _tokenizer(fetch(config, weights=False), config.path, objective)


def _tokenizer(folder: Path, path: str, objective: str) -> Any:
    with _explained(path), _quiet():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if tokenizer.pad_token_id is None and objective != "lm":
        raise UserError(f"model.path={path}: its tokenizer has no padding token (a decoder goes with objective=lm)")
    return tokenizer


def pick_device(name: str) -> torch.device:
    """Return the device of that name; `auto` takes cuda, then cpu.

    Raises:
        UserError: when this machine does not have it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"model.device={name}: not a device; allowed: auto, cpu, cuda, cuda:N, mps") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"model.device={name}: this machine has {torch.cuda.device_count()} CUDA devices")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("model.device=mps: this machine has no MPS device")
    if device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"model.device={name}: not a device; allowed: auto, cpu, cuda, cuda:N, mps")
    return device


def _refuse_encoder(theirs: Any, path: str) -> None:
    """Refuse a model whose tokens see what follows them: transformers would load it as a decoder all the same."""
    encoder = type(theirs) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not theirs.is_decoder
    if encoder or theirs.is_encoder_decoder:
        kind = "sequence-to-sequence" if theirs.is_encoder_decoder else "masked-LM"
        instead = "" if theirs.is_encoder_decoder else "; this one goes with objective=mlm"
        raise UserError(
            f"model.path={path}: a {kind} model ({theirs.model_type}), and objective=lm needs a decoder, such as "
            f"model=opt-125m{instead}"
        )


def _check_fresh(fresh: list[str], resized: dict[str, str], model: Any, objective: str, path: str) -> None:
    """Refuse weights that are missing or misshapen where the checkpoint should have had them; tell of a fresh head."""
    body = f"{model.base_model_prefix}."
    lacking = [key for key in fresh if "pooler" not in key and (objective != "cls" or key.startswith(body))]
    if not lacking:
        if fresh and objective == "cls":
            why = ", ".join(f"{key}: {shape}" for key, shape in resized.items())
            log.warning("a fresh classification head, drawn from the seed: %s%s", listed(fresh), why and f" ({why})")
        return
    first = lacking[0]
    if first in resized:
        raise UserError(f"model.path={path}: {first} does not fit its config.json: {resized[first]}")
    if objective != "cls" and not any(key.startswith(body) for key in lacking):
        raise UserError(
            f"model.path={path}: the checkpoint has no {CALLED[objective]} head ({first} is missing), and "
            f"objective={objective} never uses a random one; give a checkpoint with its head, or objective=cls"
        )
    raise UserError(f"model.path={path}: the checkpoint lacks {len(lacking)} tensors, first {first}")


def _name_classes(model: Any, theirs: Any, labels: Sequence[str], fresh: list[str], path: str) -> None:
    """Give the model's config the task's class names; refuse a trained head that has them in another order."""
    known = [str(theirs.id2label[i]) for i in sorted(theirs.id2label)]
    trained = all("pooler" in key for key in fresh)
    if trained and [k.casefold() for k in known] != [name.casefold() for name in labels]:
        if {k.casefold() for k in known} == {name.casefold() for name in labels}:
            raise UserError(
                f"model.path={path}: its classes are in the order {listed(known)}, the task's are {listed(labels)}; "
                "put task.labels in the checkpoint's order"
            )
        log.warning("the checkpoint's classes (%s) are taken as %s, in this order", listed(known), listed(labels))
    model.config.id2label = dict(enumerate(labels))
    model.config.label2id = {name: i for i, name in enumerate(labels)}


def _fit(tokenizer: Any, model: Any, objective: str, path: str) -> None:
    """Check that the model has an embedding for every token, and note how long its rows may be."""
    rows, tokens = model.get_input_embeddings().weight.shape[0], max(tokenizer.get_vocab().values()) + 1
    if tokens > rows:
        raise UserError(
            f"model.path={path}: its tokenizer has {tokens} tokens but the model embeds {rows}: they do not go together"
        )
    longest = getattr(model.config, "max_position_embeddings", None)
    if objective == "lm" and longest:
        tokenizer.model_max_length = min(tokenizer.model_max_length, longest)
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding):
            # RoBERTa's family counts positions from behind its padding index.
            first = 0 if table.padding_idx is None else table.padding_idx + 1
            tokenizer.model_max_length = min(tokenizer.model_max_length, table.num_embeddings - first)


@contextmanager
def _explained(path: str, objective: str = "") -> Iterator[None]:
    """Tell in one line what transformers raises while it reads a folder."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # OSError, ValueError, KeyError and its own: what a broken or foreign folder brings
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if objective and first.startswith("Unrecognized configuration class"):
            first = f"transformers has no {CALLED[objective]} model of its kind"
        raise UserError(f"model.path={path} could not be loaded: {first}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' loading report and bars off the terminal; what matters in them is checked here."""
    level, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


def save(loaded: Loaded, folder: Path) -> None:
    """Write weights and tokenizer in Hugging Face layout (safetensors), or the adapter alone where there is one."""
    if loaded.adapter is not None:
        loaded.adapter.save(folder)
        return
    with _quiet():
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)


def at(config: ModelConfig, folder: str) -> ModelConfig:
    """Return the config with its weights read from `folder`."""
    return dataclasses.replace(config, path=folder, revision=None)
