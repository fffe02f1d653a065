"""Find a checkpoint's files: in a local folder, in the embedded demo, or on the hub, through its local cache.

All downloads are done here, and transformers reads only the returned folder. So tokenizer and weights come from one
commit, and the hub is never asked to convert weights that are not safetensors. Pickled weights, and code inside a
checkpoint, are refused before anything is loaded.
"""

import importlib.resources
import json
import os
from itertools import chain
from pathlib import Path
from typing import Any

import huggingface_hub
import safetensors
from huggingface_hub import errors

from mezo_cli.config.schema import EMBEDDED_MODELS, ModelConfig
from mezo_cli.errors import UserError, first_line
from mezo_cli.hub import hub_url, is_offline, is_reachable, not_cached, progress_bars, warn_of_cache

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
GENERATION = "generation_config.json"  # of a decoder: which tokens end a completion
VOCABULARIES = (  # one of these is needed; without any, transformers makes an empty tokenizer without an error
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    *((name,) for name in ("vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")),
)
TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", *chain(*VOCABULARIES))
PATTERNS = {  # of the files to download, without the weights and with them
    False: [CONFIG, *TOKENIZER],
    True: [CONFIG, GENERATION, *TOKENIZER, WEIGHTS, INDEX, "model-*-of-*.safetensors"],
}
_REASONS = (  # what errors of the hub's library mean
    (errors.GatedRepoError, "it is gated: accept its terms at URL, then hf auth login (or HF_TOKEN)"),
    (errors.RepositoryNotFoundError, "there is no such model, or it is private: check the spelling, or hf auth login"),
    (errors.RevisionNotFoundError, "the model has no such revision (model.revision)"),
    (errors.RemoteEntryNotFoundError, "the repository lacks a file that is needed"),
)
HOW_OFFLINE = "to run offline: experiment=demo, or model.path=FOLDER with data=files data.dir=PATH"


def fetch(config: ModelConfig, weights: bool = True) -> Path:
    """Return the folder of a checkpoint: config.json, the tokenizer's files and, if `weights`, the weights.

    Args:
        config: its path is `demo` or `demo-decoder`, a local folder, or a hub id (with its revision).
        weights: whether to fetch the weights too.
    """
    folder = local_folder(config.path) or _from_hub(config, weights)
    if (folder / ADAPTER).is_file():  # transformers would download the base model that it names
        raise UserError(
            f"model.path={config.path}: this is an adapter ({ADAPTER}), not a model: give its base model as model.path,"
            " or evaluate the run that it belongs to (mezo eval RUN)"
        )
    if not (folder / CONFIG).is_file():
        raise UserError(f"model.path={config.path}: the folder holds no {CONFIG}, so it is not a Hugging Face model")
    _refuse_code(folder, config.path)
    if not _has_tokenizer(folder):
        raise UserError(f"model.path={config.path}: there is no tokenizer (tokenizer.json, or a vocabulary's files)")
    if weights:
        weight_files(folder, config.path)
    return folder


def local_folder(path: str) -> Path | None:
    """Return the folder that a path names; None for a hub id."""
    if path in EMBEDDED_MODELS:
        return Path(str(importlib.resources.files("mezo_cli") / "demo" / EMBEDDED_MODELS[path]))
    folder = Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown user
    if folder.is_dir():
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
    revision = f" at revision {config.revision}" if config.revision else ""
    failed, missing = f"model.path={config.path}: cannot load it{revision} from {hub_url()}", CONFIG
    try:
        with progress_bars(huggingface_hub.utils):
            path = huggingface_hub.hf_hub_download(
                config.path, CONFIG, revision=config.revision, local_files_only=cached_only, endpoint=hub_url()
            )
            folder = Path(path).parent
            _refuse_code(folder, config.path)
            if not cached_only:
                huggingface_hub.snapshot_download(
                    config.path, revision=folder.name, allow_patterns=PATTERNS[weights], endpoint=hub_url()
                )
                return folder
        warn_of_cache(config.path, folder.name)
        lacks_weights = weights and not (folder / WEIGHTS).exists() and not (folder / INDEX).exists()
        missing = WEIGHTS if lacks_weights else VOCABULARIES[0][0]
        if lacks_weights or not _has_tokenizer(folder):
            raise errors.LocalEntryNotFoundError(missing)
    except UserError:
        raise
    except Exception as error:  # huggingface_hub's and its HTTP library's; OSError from the disk
        reasons = [text for kind, text in _REASONS if isinstance(error, kind)]
        cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
        reason = f"{type(cause).__name__}: {first_line(cause)}"
        if cached_only and isinstance(error, errors.EntryNotFoundError):
            reason = not_cached(f"{missing} of {config.path}", config.path, config.revision)
        reason = reasons[0].replace("URL", f"{hub_url()}/{config.path}") if reasons else f"{reason}; {HOW_OFFLINE}"
        raise UserError(f"{failed}: {reason}") from error
    return folder


# --- checks of the folder ---


def _has_tokenizer(folder: Path) -> bool:
    return any(all((folder / name).is_file() for name in names) for names in VOCABULARIES)


def _refuse_code(folder: Path, path: str) -> None:
    """Refuse a checkpoint that needs its own Python code: such code is never run."""
    for name in (CONFIG, "tokenizer_config.json"):
        if (folder / name).is_file() and _json(folder / name, path).get("auto_map"):
            raise UserError(
                f"model.path={path}: its {name} asks for code that comes with the checkpoint (auto_map), and such code "
                "is never run; use a checkpoint of a model that transformers itself contains"
            )


def weight_files(folder: Path, path: str) -> list[Path]:
    """Return the safetensors files of a checkpoint: one, or those that its index names.

    Weights that are missing, not safetensors, or truncated are refused.
    """
    other = _json(folder / CONFIG, path).get("transformers_weights")
    if other is not None:
        raise UserError(f"model.path={path}: its {CONFIG} names weights of its own ({other}); only {WEIGHTS} is read")
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and not (folder / INDEX).is_file():
        pickled = [file.name for pattern in ("*.bin", "*.pt") for file in sorted(folder.glob(pattern))]
        raise UserError(
            f"model.path={path}: there is no {WEIGHTS}{f' (only {pickled[0]})' if pickled else ''}; weights are read "
            "from safetensors alone, never from pickles (*.bin), which can run code"
        )
    if not (folder / WEIGHTS).is_file():
        table = _json(folder / INDEX, path).get("weight_map")
        names = sorted({str(name) for name in table.values()}) if isinstance(table, dict) else []
    for name in names or ["no file at all"]:
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise UserError(f"model.path={path}: {INDEX} names {name}; weights are read from safetensors alone")
        try:
            with safetensors.safe_open(folder / name, "pt") as opened:
                opened.keys()
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"model.path={path}: {folder / name} is damaged or missing: {error}") from error
    return [folder / name for name in names]


def _json(file: Path, path: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"model.path={path}: {file} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"model.path={path}: {file} is damaged: it holds no JSON object")
    return content
