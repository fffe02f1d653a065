"""A checkpoint's files, all in one folder: a local one, the embedded demo, or the hub's, through its local cache.

Nothing is loaded here, and nothing is fetched elsewhere: transformers reads the returned folder alone. So there is one
place that asks the hub, one commit that tokenizer and weights come from, and no request for a conversion of weights
that are not safetensors. Pickled weights and code that a checkpoint brings along are refused before anything is read.
"""

import importlib.resources
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import safetensors
from huggingface_hub import errors

from mezo_cli import endpoint
from mezo_cli.errors import UserError
from mezo_cli.schema import ModelConfig

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
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
VOCABULARIES = (  # any of these makes a tokenizer; without one, transformers makes an empty one and says nothing
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
    ("tokenizer.model",),
)
HOW_OFFLINE = "to run offline: experiment=demo, or model.path=FOLDER with data=files data.dir=PATH"


def fetch(config: ModelConfig, weights: bool = True) -> Path:
    """Return the folder that holds a checkpoint: config.json, the tokenizer's files and, when asked for, the weights.

    Args:
        config: its path is `demo`, a local folder, or a hub id (with its revision).
        weights: whether the weights are wanted too.

    Raises:
        UserError: when nothing is found, when it has no tokenizer or needs code of its own, when its weights
            are not safetensors or are damaged.
    """
    folder = _local(config.path)
    if folder is None:
        folder = _from_hub(config, weights)
        _refuse_adapter(folder, config.path)
    _refuse_code(folder, config.path)
    if not any(all((folder / name).is_file() for name in names) for names in VOCABULARIES):
        raise UserError(f"model.path={config.path}: there is no tokenizer (tokenizer.json, or a vocabulary's files)")
    if weights:
        _check_weights(folder, config.path)
    return folder


def _local(path: str) -> Path | None:
    """Return the folder a path means, None for a hub id."""
    if path == "demo":
        return Path(str(importlib.resources.files("mezo_cli") / "demo" / "model"))
    folder = Path(os.path.expanduser(path))  # Path.expanduser raises for a user that is not there
    if folder.is_dir():
        _refuse_adapter(folder, path)
        if not (folder / CONFIG).is_file():
            raise UserError(f"model.path={path}: the folder holds no {CONFIG}, so it is no Hugging Face model")
        return folder
    if folder.exists():
        raise UserError(f"model.path={path}: this is a file; give the folder that holds it, with its {CONFIG}")
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or not path:
        raise UserError(f"model.path={path}: no such folder; give a folder with {CONFIG} or a hub id like org/name")
    return None


# --- the hub ---


def _from_hub(config: ModelConfig, weights: bool) -> Path:
    """Bring the hub's files into its local cache (or find them there) and return the folder of their commit."""
    cached_only = endpoint.switched_off() or not endpoint.answers()

    def get(name: str, revision: str | None) -> Path:
        path = huggingface_hub.hf_hub_download(
            config.path, name, revision=revision, local_files_only=cached_only, endpoint=endpoint.address()
        )
        return Path(path)

    def has(name: str) -> bool:
        known = huggingface_hub.try_to_load_from_cache(config.path, name, revision=commit)
        if known is not None:  # a path, or a mark that the commit has no such file
            return isinstance(known, str)
        try:
            get(name, commit)
        except errors.EntryNotFoundError as error:
            if isinstance(error, errors.LocalEntryNotFoundError) and not cached_only:
                raise  # the connection broke
            return False
        return True

    with _explained(config, cached_only):
        folder = get(CONFIG, config.revision).parent
        commit = folder.name
        _refuse_code(folder, config.path)
        for name in TOKENIZER:
            has(name)
        if weights and not has(WEIGHTS) and has(INDEX):
            for name in _shards(folder, config.path):
                get(name, commit)
    if weights and cached_only and not (folder / WEIGHTS).exists() and not (folder / INDEX).exists():
        raise UserError(f"{_not_had(config)}: the cache has {CONFIG} but not the weights; {HOW_OFFLINE}")
    return folder


@contextmanager
def _explained(config: ModelConfig, cached_only: bool) -> Iterator[None]:
    """Tell in one line what the hub's library raises: what was looked for, and how to go on."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the families of huggingface_hub and of its HTTP library, OSError from the disk
        raise UserError(f"{_not_had(config)}: {_reason(error, config, cached_only)}") from error


def _not_had(config: ModelConfig) -> str:
    revision = f" at revision {config.revision}" if config.revision else ""
    return f"model={config.name}: cannot load '{config.path}'{revision} from {endpoint.address()}"


def _reason(error: Exception, config: ModelConfig, cached_only: bool) -> str:
    if isinstance(error, errors.GatedRepoError):
        return f"it is gated: accept its terms at {endpoint.address()}/{config.path}, then hf auth login (or HF_TOKEN)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such model, or it is private: check the spelling of model.path, or log in (hf auth login)"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the model has no such revision (model.revision)"
    if cached_only and isinstance(error, errors.EntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if endpoint.switched_off() else "the server does not answer"
        return f"{why}, and the local cache does not have it; {HOW_OFFLINE}"
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return f"the repository lacks a file that is needed ({_first_line(error)})"
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    return f"{_first_line(cause)}; {HOW_OFFLINE}"


def _first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# --- what is in the folder ---


def _refuse_adapter(folder: Path, path: str) -> None:
    """Refuse an adapter in the place of a model: transformers would fetch the base that it names from elsewhere."""
    if (folder / ADAPTER).is_file():
        raise UserError(
            f"model.path={path}: this is an adapter ({ADAPTER}), not a model: give its base as model.path, or evaluate "
            "the run that it came from (mezo eval RUN)"
        )


def _refuse_code(folder: Path, path: str) -> None:
    """Refuse a checkpoint that asks for Python of its own: such code is never run."""
    for name in (CONFIG, "tokenizer_config.json"):
        if (folder / name).is_file() and _json(folder / name, path).get("auto_map"):
            raise UserError(
                f"model.path={path}: its {name} asks for code that comes with the checkpoint (auto_map), and such code "
                "is never run; give a checkpoint of a model that transformers itself has"
            )


def _check_weights(folder: Path, path: str) -> None:
    """Refuse weights that are absent, not safetensors, or cut short."""
    other = _json(folder / CONFIG, path).get("transformers_weights")
    if other is not None:
        raise UserError(f"model.path={path}: its {CONFIG} names weights of its own ({other}); only {WEIGHTS} is read")
    if not (folder / WEIGHTS).is_file() and not (folder / INDEX).is_file():
        pickled = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt"))
        found = f" (only {pickled[0]})" if pickled else ""
        raise UserError(
            f"model.path={path}: there is no {WEIGHTS}{found}; weights are read from safetensors alone, never from "
            "pickles (*.bin), which can run code"
        )
    names = [WEIGHTS] if (folder / WEIGHTS).is_file() else _shards(folder, path)
    for name in names:
        try:
            with safetensors.safe_open(folder / name, "pt") as file:
                file.keys()
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"model.path={path}: {folder / name} is damaged or missing: {error}") from error


def _shards(folder: Path, path: str) -> list[str]:
    """Return the names of the files that the weights are split over."""
    table = _json(folder / INDEX, path).get("weight_map")
    names = sorted({str(name) for name in table.values()}) if isinstance(table, dict) else []
    for name in names or ["no file at all"]:
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise UserError(f"model.path={path}: {INDEX} names {name}; weights are read from safetensors alone")
    return names


def _json(file: Path, path: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, OSError) as error:
        raise UserError(f"model.path={path}: {file} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"model.path={path}: {file} is damaged: it holds no JSON object")
    return content
