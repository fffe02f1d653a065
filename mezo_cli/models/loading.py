"""Load the model and the tokenizer of a checkpoint, and save them.

A checkpoint without its head over the vocabulary is refused: a random head gives plausible but wrong results. A new
classification head is drawn from the run's seed.
"""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mezo_cli.config.schema import ModelConfig
from mezo_cli.config.validation import check_installed
from mezo_cli.console import log
from mezo_cli.errors import UserError, join
from mezo_cli.models.download import fetch, weight_files
from mezo_cli.models.quantized import QuantizedLinear, library_of, matrices_of, quantize, quantize_layers, widen
from mezo_cli.models.stored_tensors import check_stored, dtype_of_files, read_tensors
from mezo_cli.models.streaming import StreamedLayers
from mezo_cli.process.environment import environment
from mezo_cli.process.memory import is_device_error, release_file_pages, trim_malloc
from mezo_cli.runs import atomic

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"  # of transformers: tensors are read in this thread, each when it is needed
DEVICES = "allowed: auto, cpu, cuda, cuda:N, mps"


@dataclass(frozen=True)
class ModelKind:
    """What the loader and the adapters need to know about the model that an objective scores labels with.

    Attributes:
        auto_class: the transformers class that loads it, by name.
        description: the kind in words, for error lines.
        pipeline: the task of `transformers.pipeline` that such a model is for.
        task_type: peft's name for the task; None where peft has none.
        has_classifier: whether the output layer is a classification head over the task's labels. A checkpoint without
            one gets a new head, drawn from the run's seed. Without a classifier the output layer is over the
            vocabulary, and a checkpoint that lacks it is refused.
        is_decoder: whether a token attends only to the tokens before it. The tokenizer then needs no padding token.
    """

    auto_class: str
    description: str
    pipeline: str
    task_type: str | None = None
    has_classifier: bool = False
    is_decoder: bool = False


MASKED_LM = ModelKind("AutoModelForMaskedLM", "masked-LM", "fill-mask")
SEQUENCE_CLASSIFIER = ModelKind(
    "AutoModelForSequenceClassification", "sequence-classification", "text-classification", "SEQ_CLS", True
)
CAUSAL_LM = ModelKind("AutoModelForCausalLM", "causal-LM", "text-generation", "CAUSAL_LM", is_decoder=True)


@dataclass
class LoadedModel:
    """A model in eval mode, without dropout, and its tokenizer.

    Attributes:
        compute_dtype: the dtype that forwards compute in.
        fresh: names of the parameters that the base checkpoint does not contain: a new head, an adapter.
        fresh_rows: name -> row numbers, of parameters of which only these rows differ from the base checkpoint.
        adapter: the `adapters.Adapter` that is trained; None when the whole model is.
        revision: the commit on the hub that was loaded; None for a local folder.
        new_head: what is new in a classification head that was drawn from the seed; empty if there is none.
    """

    model: Any
    tokenizer: Any
    model_kind: ModelKind
    device: torch.device
    compute_dtype: torch.dtype
    fresh: list[str] = field(default_factory=list)
    fresh_rows: dict[str, list[int]] = field(default_factory=dict)
    adapter: Any = None
    revision: str | None = None
    new_head: str = ""


def load(
    config: ModelConfig, model_kind: ModelKind, labels: Sequence[str], seed: int, *spellings: Sequence[str]
) -> LoadedModel:
    """Load the tokenizer and the model of a checkpoint.

    Args:
        labels: the classes of a classification head, in the task's order.
        seed: draws a new classification head.
        spellings: lists of other names of the classes, in this order.
    """
    device = pick_device(config.device)
    if config.stream and (device.type != "cpu" or not hasattr(os, "posix_fadvise")):
        raise UserError(f"model.stream=true reads layers into the memory of a CPU, under Linux; here it is {device}")
    folder = fetch(config)
    stored, tokenizer = _load_config_and_tokenizer(folder, config.path, model_kind)
    check_installed(quantize=config.quantize)
    files = weight_files(folder, config.path)
    keeps = config.quantize == "none" and not config.stream
    dtype = DTYPES[config.dtype] if keeps else dtype_of_files(files)
    ties = None if model_kind.has_classifier else config.tie_embeddings
    options: dict[str, Any] = {"tie_word_embeddings": True} if ties else {}
    if model_kind.has_classifier:
        options["num_labels"] = len(labels)
    with _explain_errors(config.path, folder / "config.json", model_kind), _quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(f"fresh head {seed}".encode()))
        with environment({SEQUENTIAL: "1"}), _ReleaseConverted():
            model, report = getattr(transformers, model_kind.auto_class).from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `_check_missing` reports them
                **options,
            )
    check_stored(files, report["unexpected_keys"], model, config.path)
    fresh, new_head = _check_missing(report, model, model_kind, config.path)
    if model_kind.has_classifier:
        _name_classes(model, stored, [labels, *spellings], fresh, config.path)
    _fit_tokenizer(tokenizer, model, config.path)
    if ties is False:
        untie(model)
    if ties and model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        why = "has a decoder of its own; use null or false"
        raise UserError(f"model.tie_embeddings=true: model.path={config.path} {why}")
    model.eval()
    name = f"model.path={config.path}: {type(model).__name__}"
    if config.quantize != "none" and config.stream:
        files = map_quantized(model, config.quantize, files, name)
    elif config.quantize != "none":
        quantize_layers(model, config.quantize, name)
    if config.stream:
        model.mezo_stream = StreamedLayers(model, files, config.stream_memory, name)
    model.to(device)
    compute_dtype = DTYPES[resolved(config).computes_in]
    loaded = LoadedModel(model, tokenizer, model_kind, device, compute_dtype, fresh, new_head=new_head)
    if folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name):
        loaded.revision = folder.name
    return loaded


def load_tokenizer(config: ModelConfig, model_kind: ModelKind) -> Any:
    """Load the tokenizer alone, with the length that the model's config allows."""
    return _load_config_and_tokenizer(fetch(config, weights=False), config.path, model_kind)[1]


def pick_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` is cuda where there is one, else cpu."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"model.device={name}: not a device; {DEVICES}") from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"model.device={name}: not a device; {DEVICES}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"model.device={name}: this machine has {torch.cuda.device_count()} CUDA devices")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("model.device=mps: this machine has no MPS device")
    return device


def has_fast_float16(device: torch.device) -> bool:
    """Return whether products in float16 are as fast as in bfloat16: on a GPU, and on the CPUs that have them.

    Elsewhere torch takes some 200 times as long.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (7, 0)
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def worth_measuring(device: torch.device, of_run: str) -> list[str]:
    """Return the dtypes of forwards that are compared with a run's own: not a float16 that is slow."""
    return [name for name in DTYPES if name != "float16" or name == of_run or has_fast_float16(device)]


def resolved(config: ModelConfig) -> ModelConfig:
    """Return the config with a dtype of the forwards: where it has none, theta's on a GPU and float32 on a CPU."""
    if config.compute_dtype is not None:
        return config
    return config.replace(compute_dtype="float32" if pick_device(config.device).type == "cpu" else config.dtype)


def save(loaded: LoadedModel, folder: Path) -> None:
    """Write model and tokenizer in Hugging Face layout (safetensors), or the adapter alone when one is trained."""
    if loaded.adapter is not None:
        loaded.adapter.save(folder)
        return
    with _quiet():
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)


def untie(model: Any) -> list[str]:
    """Give the output layer its own copy of the tied weight, and of a tied bias, and say so in the model's config.

    The input embeddings stay the same tensors. The bias is untied too: with an untied config transformers looks for a
    bias in the output layer, and initializes a new one where a checkpoint has stored only the head's.
    Call it before `Params` is made, which reads the parameters' names.

    Returns:
        The names of the new parameters, clones that require a gradient; none for a model that is not tied.
    """
    pairs = model.all_tied_weights_keys.items()
    tied = [target for target, source in pairs if model.get_parameter(target) is model.get_parameter(source)]
    for name in tied:
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, nn.Parameter(model.get_parameter(name).detach().clone()))
    model.all_tied_weights_keys = {}
    model.config.tie_word_embeddings = False
    return tied


def map_quantized(model: Any, how: str, files: Sequence[Path], name: str) -> list[Path]:
    """Replace the matrices of a loaded model by quantised ones that are mapped from files; return those files.

    They are in the cache, one per layer, and made at first use, layer by layer. Their folder is named by what they are
    made from: the base's files (path, size, time of change), the kind, and the version of the library.
    """
    facts = [(os.path.realpath(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(repr((facts, library_of(how))).encode()).hexdigest()[:32]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mezo" / f"{key}-{how}"
    matrices, made = matrices_of(model, how, name), []
    for prefix, paths in groupby(matrices, lambda path: re.split(r"(\.\d+)\.", path, maxsplit=1)[0:2]):
        file, of_file = folder / f"{''.join(prefix)}.safetensors", list(paths)
        made.append(file)
        if not file.exists():
            tensors = {}
            for path in of_file:
                tensors[f"{path}.bits"], tensors[f"{path}.scale"] = quantize(how, matrices[path].weight.data)
                release_file_pages(matrices[path].weight.data)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                atomic.replace(file, partial(save_file, tensors))
            except (OSError, SafetensorError) as error:
                raise atomic.write_error(file, error) from error
            del tensors
            trim_malloc()
        stored, _ = read_tensors(file)
        for path in of_file:
            layer = QuantizedLinear(how, matrices[path], stored[f"{path}.bits"], stored[f"{path}.scale"])
            model.set_submodule(path, layer)
    widen(model)
    return made


# --- checks of a checkpoint ---


def _load_config_and_tokenizer(folder: Path, path: str, model_kind: ModelKind) -> tuple[Any, Any]:
    """Return the config and the tokenizer, with the most tokens that both allow; only a decoder's config is asked."""
    with _explain_errors(path, folder / "config.json"), _quiet():
        stored = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if getattr(stored, "quantization_config", None) is not None:  # each format needs a library, to train nothing
        raise UserError(
            f"model.path={path}: its weights are quantised already; use the checkpoint that they were made from, with "
            "model.quantize=int8 or nf4"
        )
    is_encoder = type(stored) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(stored, "is_decoder", False)
    if model_kind.is_decoder and (is_encoder or stored.is_encoder_decoder):  # transformers would load it as a decoder
        head = "sequence-to-sequence" if stored.is_encoder_decoder else "masked-LM"
        hint = "" if stored.is_encoder_decoder else "; for this model use objective=mlm"
        raise UserError(
            f"model.path={path}: a {head} model ({stored.model_type}) where a decoder is needed, such as model=opt-125m"
            f"{hint}"
        )
    with _explain_errors(path, folder / "tokenizer.json"), _quiet():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if tokenizer.pad_token_id is None and not model_kind.is_decoder:
        raise UserError(f"model.path={path}: its tokenizer has no padding token (for a decoder use objective=lm)")
    limit, longest = tokenizer.model_max_length, getattr(stored, "max_position_embeddings", None)
    if not isinstance(limit, (int, float)) or not limit > 0:
        where = f"{tokenizer.name_or_path}/tokenizer_config.json"
        raise UserError(f"{where}: model_max_length is {limit!r}: expected a number of tokens")
    tokenizer.model_max_length = int(min(limit, longest) if model_kind.is_decoder and longest else limit)
    return stored, tokenizer


def _check_missing(report: Any, model: Any, model_kind: ModelKind, path: str) -> tuple[list[str], str]:
    """Refuse weights that are missing or have another shape, except those of a classification head and of poolers.

    Returns:
        The names of what is missing, and for the log those of a new head, with the shapes of what does not fit.
    """
    mismatched = {
        key: f"{list(in_file)} in the checkpoint, {list(needed)} here"
        for key, in_file, needed in report["mismatched_keys"]
    }
    fresh = sorted({*report["missing_keys"], *mismatched})
    body = f"{model.base_model_prefix}."
    missing = [key for key in fresh if "pooler" not in key and (not model_kind.has_classifier or key.startswith(body))]
    if not missing:
        why = ", ".join(f"{key}: {shapes}" for key, shapes in mismatched.items())
        return fresh, f"{join(fresh)}{why and f' ({why})'}" if fresh and model_kind.has_classifier else ""
    if (first := missing[0]) in mismatched:
        raise UserError(f"model.path={path}: {first} does not fit its config.json: {mismatched[first]}")
    if not model_kind.has_classifier and not any(key.startswith(body) for key in missing):
        raise UserError(
            f"model.path={path}: the checkpoint has no {model_kind.description} head ({first} is missing), and a "
            "random one would give wrong scores; use a checkpoint with its head, or objective=cls"
        )
    raise UserError(f"model.path={path}: the checkpoint lacks {len(missing)} tensors, first {first}")


def label_layer(model: Any) -> nn.Linear | None:
    """Return the last linear layer over the labels: of a head that an adapter has copied, the copy."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return next((layer for layer in reversed(linear) if layer.out_features == model.config.num_labels), None)


def _name_classes(model: Any, stored: Any, lists: Sequence[Sequence[str]], fresh: list[str], path: str) -> None:
    """Put a trained head's classes into the order of the first list by name, and write that to the model's config."""
    classes, labels = [str(stored.id2label[i]) for i in sorted(stored.id2label)], lists[0]
    numbers = {name.casefold(): i for i, name in enumerate(classes)}
    orders = ([numbers.get(name.casefold(), -1) for name in names] for names in lists)
    order = next((order for order in orders if sorted(order) == [*range(len(labels))]), None)
    if all("pooler" in key for key in fresh) and order != sorted(order or ()):
        layer, found = label_layer(model), f"the checkpoint's classes ({join(classes)}) are"
        if order is not None and layer is None:
            raise UserError(f"model.path={path}: {found} not in the order {join(labels)}, and no linear layer has them")
        for tensor in (layer.weight, layer.bias) if order is not None and layer is not None else ():
            if tensor is not None:
                tensor.data = tensor.data[order]
        how = "taken as" if order is None else "matched by name with"
        log.warning("%s %s %s, in this order", found, how, join(labels))
    model.config.id2label = dict(enumerate(labels))
    model.config.label2id = {name: i for i, name in enumerate(labels)}


def _fit_tokenizer(tokenizer: Any, model: Any, path: str) -> None:
    """Limit a tokenizer to the model's position embeddings; refuse one with more tokens than the model embeds."""
    rows, tokens = len(model.get_input_embeddings().weight), max(tokenizer.get_vocab().values()) + 1
    if tokens > rows:
        why = f"its tokenizer has {tokens} tokens but the model embeds {rows}: they do not belong together"
        raise UserError(f"model.path={path}: {why}")
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding):
            # RoBERTa's family counts positions from the one after its padding index.
            count = table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
            tokenizer.model_max_length = min(tokenizer.model_max_length, count)


# --- memory, and transformers' errors and output ---


class _ReleaseConverted(TorchFunctionMode):
    """Release the pages of a mapped file tensor by tensor, as transformers converts these to another dtype.

    They would stay resident until the file is closed, so a model in bfloat16 would take its float32 file's memory too.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.to and result is not args[0]:
            release_file_pages(args[0])
        return result


@contextmanager
def _explain_errors(path: str, file: Path, model_kind: ModelKind | None = None) -> Iterator[None]:
    """Turn what transformers raises while it reads a folder, first the JSON `file` in it, into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a broken folder gives OSError, ValueError, KeyError and transformers' own
        if is_device_error(error):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])  # or in the next line
        if model_kind is not None and reason.startswith("Unrecognized configuration class"):
            reason = f"transformers has no {model_kind.description} model of its kind"
        elif not isinstance(error, (OSError, ValueError, RuntimeError)) or isinstance(error, json.JSONDecodeError):
            # AttributeError, KeyError, ...: the text alone does not say what it is about.
            reason = f"{file.name} is damaged or does not belong to it ({type(error).__name__}: {reason})"
        raise UserError(f"model.path={path} could not be loaded: {reason or type(error).__name__}") from error


@contextmanager
def _quiet() -> Iterator[None]:  # the checks above report what matters
    level, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()
