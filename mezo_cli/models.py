"""Checkpoints: tokenizer and model from a hub id or a local folder, and the device they run on.

Safetensors only, no remote code. A masked-LM checkpoint without its head is refused for `mlm`: a head left at random
gives plausible, wrong results. A fresh classification head (`cls`) is drawn from the run's seed.
"""

import dataclasses
import hashlib
import importlib.resources
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import transformers

from mezo_cli.errors import UserError
from mezo_cli.schema import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Loaded:
    """A model in eval mode (dropout off) with its tokenizer. `fresh` names the tensors that no checkpoint gave."""

    model: Any
    tokenizer: Any
    device: torch.device
    compute_dtype: torch.dtype
    fresh: list[str] = field(default_factory=list)

    @property
    def uses_segments(self) -> bool:
        """Whether the model tells first from second sentences by token_type_ids."""
        return "token_type_ids" in self.tokenizer.model_input_names


def load(config: ModelConfig, objective: str, labels: int, seed: int) -> Loaded:
    """Load tokenizer and model for an objective.

    Args:
        config: path (hub id, local folder, or `demo`), device, dtypes.
        objective: `mlm` or `cls`.
        labels: number of classes, for `cls`.
        seed: draws a fresh classification head.

    Raises:
        UserError: when nothing is found, when the head is missing, or when weights are not safetensors.
    """
    device = pick_device(config.device)
    path: str = resolve(config.path)
    kind: Any = transformers.AutoModelForMaskedLM
    options: dict[str, Any] = {}
    if objective == "cls":
        kind, options = transformers.AutoModelForSequenceClassification, {"num_labels": labels}
    with _explained(config), _quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(f"fresh head {seed}".encode()))
        model, report = kind.from_pretrained(
            path,
            revision=config.revision,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
            **options,
        )
    tokenizer = load_tokenizer(config)
    fresh = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    _check_fresh(fresh, model, objective, config.path)
    model.eval()
    return Loaded(model.to(device), tokenizer, device, DTYPES[config.compute_dtype], fresh)


def load_tokenizer(config: ModelConfig) -> Any:
    """Load the tokenizer alone.

    Raises:
        UserError: when it is not found, or has no padding token.
    """
    path = resolve(config.path)
    with _explained(config), _quiet():
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, revision=config.revision, trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        raise UserError(f"model.path={config.path}: its tokenizer has no padding token")
    return tokenizer


def resolve(path: str) -> str:
    """Return where a `model.path` points: the embedded demo model, an existing folder, or a hub id as it is.

    Raises:
        UserError: for a path that looks like a folder and is none.
    """
    if path == "demo":
        return str(importlib.resources.files("mezo_cli") / "demo" / "model")
    local = Path(path).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise UserError(f"model.path={path}: the folder holds no config.json, so it is no Hugging Face model")
        return str(local)
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UserError(f"model.path={path}: no such folder; give a folder with config.json or a hub id like org/name")
    return path


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


def _check_fresh(fresh: list[str], model: Any, objective: str, path: str) -> None:
    """Refuse weights that are missing where the checkpoint should have had them."""
    body = f"{model.base_model_prefix}."
    missing = fresh if objective == "mlm" else [key for key in fresh if key.startswith(body)]
    missing = [key for key in missing if "pooler" not in key]
    if not missing:
        return
    if objective == "mlm" and not any(key.startswith(body) for key in missing):
        raise UserError(
            f"model.path={path}: the checkpoint has no masked-LM head ({missing[0]} is missing), and objective=mlm "
            "never uses a random one; give a checkpoint with its head, or objective=cls"
        )
    raise UserError(f"model.path={path}: the checkpoint lacks {len(missing)} tensors, first {missing[0]}")


@contextmanager
def _explained(config: ModelConfig) -> Iterator[None]:
    """Turn what transformers and the hub raise into one line: what was looked for, and how to run offline."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, its own and the hub's families here
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        where = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        if Path(config.path).expanduser().is_dir() or config.path == "demo":
            raise UserError(f"model.path={config.path} could not be loaded: {first}") from error
        raise UserError(
            f"model={config.name}: '{config.path}' was found neither in the local cache nor at {where} ({first}). "
            "To run offline: experiment=demo, or model.path=FOLDER with data=files data.dir=FOLDER"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' loading report and bars off the terminal; what matters in them is checked here."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)


def save(loaded: Loaded, folder: Path) -> None:
    """Write weights and tokenizer in Hugging Face layout (safetensors)."""
    with _quiet():
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)


def at(config: ModelConfig, folder: str) -> ModelConfig:
    """Return the config with its weights read from `folder`."""
    return dataclasses.replace(config, path=folder, revision=None)


def fingerprint(model: Any) -> str:
    """Return the sha256 over the names, shapes and bytes of all parameters."""
    total = hashlib.sha256()
    for name, p in model.named_parameters():
        total.update(f"{name}{tuple(p.shape)}".encode())
        total.update(memoryview(p.detach().cpu().contiguous().view(-1).numpy()).cast("B"))
    return total.hexdigest()


def keep(model: Any, names: list[str], path: Path) -> None:
    """Store the named tensors: a start that is not just the base model."""
    state = model.state_dict()
    safetensors.torch.save_file({name: state[name].cpu().contiguous() for name in names}, path)


def restore(model: Any, path: Path) -> None:
    """Put stored tensors back, if the run has any."""
    if not path.exists():
        return
    state = model.state_dict()
    for name, value in _read_tensors(path).items():
        state[name].copy_(value)


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def check_fingerprint(model: Any, wanted: str, path: Path) -> None:
    """Refuse to replay a trajectory from other weights than it began with.

    Raises:
        UserError: naming the trajectory.
    """
    if fingerprint(model) != wanted:
        raise UserError(f"{path} began from other weights than these: model.path has changed since the run")
