"""Find a checkpoint's files: in a local folder, in the embedded demo, or on the hub, through its local cache.

All downloads are done here, and transformers reads only the returned folder. So tokenizer and weights come from one
commit, and the hub is never asked to convert weights that are not safetensors. Pickled weights, and code inside a
checkpoint, are refused before anything is loaded.
"""

import importlib.resources
import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import safetensors
from huggingface_hub import errors

from mezo_cli.config.schema import EMBEDDED_MODELS, ModelConfig
from mezo_cli.console import is_live
from mezo_cli.errors import UserError, first_line
from mezo_cli.hub import hub_url, is_offline, is_reachable, progress_bars

log = logging.getLogger("mezo")

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
GENERATION = "generation_config.json"  # of a decoder: which tokens end a completion
TOKENIZER = (
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)
PATTERNS = {  # of the files to download, without the weights and with them
    False: [CONFIG, *TOKENIZER],
    True: [CONFIG, GENERATION, *TOKENIZER, WEIGHTS, INDEX, "model-*-of-*.safetensors"],
}
VOCABULARIES = (  # one of these is needed; without any, transformers makes an empty tokenizer without an error
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
    ("tokenizer.model",),
)
HOW_OFFLINE = "to run offline: experiment=demo, or model.path=FOLDER with data=files data.dir=PATH"


def fetch(config: ModelConfig, weights: bool = True) -> Path:
    """Return the folder of a checkpoint: config.json, the tokenizer's files and, if `weights`, the weights.

    Args:
        config: its path is `demo` or `demo-decoder`, a local folder, or a hub id (with its revision).
        weights: whether to fetch the weights too.
    """
    folder = local_folder(config.path)
    if folder is None:
        folder = _from_hub(config, weights)
        _refuse_adapter(folder, config.path)
    _refuse_code(folder, config.path)
    if not _has_tokenizer(folder):
        raise UserError(f"model.path={config.path}: there is no tokenizer (tokenizer.json, or a vocabulary's files)")
    if weights:
        _check_weights(folder, config.path)
    return folder


def hub_commit(folder: Path) -> str | None:
    """Return the commit of a folder in the hub's local cache; None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name) else None


def local_folder(path: str) -> Path | None:
    """Return the folder that a path names; None for a hub id."""
    if path in EMBEDDED_MODELS:
        return Path(str(importlib.resources.files("mezo_cli") / "demo" / EMBEDDED_MODELS[path]))
    folder = Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown user
    if folder.is_dir():
        _refuse_adapter(folder, path)
        if not (folder / CONFIG).is_file():
            raise UserError(f"model.path={path}: the folder holds no {CONFIG}, so it is not a Hugging Face model")
        return folder
    if folder.exists():
        raise UserError(f"model.path={path}: this is a file; give the folder that holds it, with its {CONFIG}")
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or not path:
        raise UserError(f"model.path={path}: no such folder; give a folder with {CONFIG} or a hub id like org/name")
    return None


# --- the hub ---


def _from_hub(config: ModelConfig, weights: bool) -> Path:
    """Download the files to the local cache, or find them there; return the folder of their commit."""
    cached_only = is_offline() or not is_reachable()
    try:
        with progress_bars(huggingface_hub.utils, shown=is_live(sys.stderr)):  # not in CI
            path = huggingface_hub.hf_hub_download(
                config.path, CONFIG, revision=config.revision, local_files_only=cached_only, endpoint=hub_url()
            )
            folder = Path(path).parent
            _refuse_code(folder, config.path)
            if not cached_only:
                huggingface_hub.snapshot_download(
                    config.path, revision=folder.name, allow_patterns=PATTERNS[weights], endpoint=hub_url()
                )
    except UserError:
        raise
    except Exception as error:  # huggingface_hub's and its HTTP library's; OSError from the disk
        raise UserError(f"{_cannot_load(config)}: {_reason(error, config, cached_only)}") from error
    if cached_only:
        if not is_offline():
            said = "warning: %s does not answer: %s is read from the local cache, at commit %s"
            log.warning(said, hub_url(), config.path, folder.name)
        lacks_weights = weights and not (folder / WEIGHTS).exists() and not (folder / INDEX).exists()
        if lacks_weights or not _has_tokenizer(folder):
            missing = WEIGHTS if _has_tokenizer(folder) else VOCABULARIES[0][0]
            raise UserError(f"{_cannot_load(config)}: {_not_cached(config, missing)}")
    return folder


def _cannot_load(config: ModelConfig) -> str:
    revision = f" at revision {config.revision}" if config.revision else ""
    return f"model.path={config.path}: cannot load it{revision} from {hub_url()}"


def _not_cached(config: ModelConfig, name: str) -> str:
    """Return which file the local cache lacks, why it is not downloaded, and the command that brings it."""
    why = "HF_HUB_OFFLINE is set" if is_offline() else "the server does not answer"
    revision = f" --revision {config.revision}" if config.revision else ""
    command = f"hf download {config.path}{revision}"
    return f"{why}, and the local cache lacks {name} of {config.path}; with a network: {command}; {HOW_OFFLINE}"


def _reason(error: Exception, config: ModelConfig, cached_only: bool) -> str:
    """Return what a failure of the hub's library means."""
    if isinstance(error, errors.GatedRepoError):
        return f"it is gated: accept its terms at {hub_url()}/{config.path}, then hf auth login (or HF_TOKEN)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such model, or it is private: check the spelling of model.path, or log in (hf auth login)"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the model has no such revision (model.revision)"
    if cached_only and isinstance(error, errors.EntryNotFoundError):
        return _not_cached(config, CONFIG)
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return f"the repository lacks a file that is needed ({_with_type(error)})"
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    return f"{_with_type(cause)}; {HOW_OFFLINE}"


def _with_type(error: BaseException) -> str:
    """Return the type of an error and the first line of its text."""
    name, text = type(error).__name__, first_line(error)
    return name if text == name else f"{name}: {text}"


# --- checks of the folder ---


def _has_tokenizer(folder: Path) -> bool:
    return any(all((folder / name).is_file() for name in names) for names in VOCABULARIES)


def _refuse_adapter(folder: Path, path: str) -> None:
    """Refuse an adapter where a model is needed: transformers would download the base model that it names."""
    if (folder / ADAPTER).is_file():
        raise UserError(
            f"model.path={path}: this is an adapter ({ADAPTER}), not a model: give its base model as model.path, or "
            "evaluate the run that it belongs to (mezo eval RUN)"
        )


def _refuse_code(folder: Path, path: str) -> None:
    """Refuse a checkpoint that needs its own Python code: such code is never run."""
    for name in (CONFIG, "tokenizer_config.json"):
        if (folder / name).is_file() and _json(folder / name, path).get("auto_map"):
            raise UserError(
                f"model.path={path}: its {name} asks for code that comes with the checkpoint (auto_map), and such code "
                "is never run; use a checkpoint of a model that transformers itself contains"
            )


def _check_weights(folder: Path, path: str) -> None:
    """Refuse weights that are missing, not safetensors, or truncated."""
    other = _json(folder / CONFIG, path).get("transformers_weights")
    if other is not None:
        raise UserError(f"model.path={path}: its {CONFIG} names weights of its own ({other}); only {WEIGHTS} is read")
    if not (folder / WEIGHTS).is_file() and not (folder / INDEX).is_file():
        pickled = [file.name for pattern in ("*.bin", "*.pt") for file in sorted(folder.glob(pattern))]
        raise UserError(
            f"model.path={path}: there is no {WEIGHTS}{f' (only {pickled[0]})' if pickled else ''}; weights are read "
            "from safetensors alone, never from pickles (*.bin), which can run code"
        )
    for file in weight_files(folder, path):
        try:
            with safetensors.safe_open(file, "pt") as opened:
                opened.keys()
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"model.path={path}: {file} is damaged or missing: {error}") from error


def weight_files(folder: Path, path: str) -> list[Path]:
    """Return the safetensors files of a checkpoint: one, or those that its index names."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    table = _json(folder / INDEX, path).get("weight_map")
    names = sorted({str(name) for name in table.values()}) if isinstance(table, dict) else []
    for name in names or ["no file at all"]:
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise UserError(f"model.path={path}: {INDEX} names {name}; weights are read from safetensors alone")
    return [folder / name for name in names]


def _json(file: Path, path: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"model.path={path}: {file} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"model.path={path}: {file} is damaged: it holds no JSON object")
    return content
