"""Write files for the engine: a LoRA at theta + c z as an adapter's folder, in the layout that `peft` and vLLM load."""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mezo_cli.adapters.adapter import WEIGHTS, Adapter
from mezo_cli.perturb.noise import Direction
from mezo_cli.perturb.params import Params

MEMORY = Path("/dev/shm")  # a file system in memory, on Linux; often small in a container


def scratch_folder(prefix: str, size: int) -> "tempfile.TemporaryDirectory[str]":
    """Make a folder for files of `size` bytes that are read once: in memory if they fit there, else a temporary one."""
    fits = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 * size
    return tempfile.TemporaryDirectory(prefix=prefix, dir=MEMORY if fits else None)


class AdapterFiles:
    """Folders of adapters, each with weights of its own. They are removed by `remove`, and all of them by `close`.

    Args:
        adapter: that of the model, whose settings every folder has.
        count: the most of them at a time.
        folder: where the folders are made; None: in memory where they fit.
    """

    def __init__(self, adapter: Adapter, params: Params, count: int, folder: Path | None = None) -> None:
        size = count * sum(p.nbytes for p in params.tensors.values())
        prefix = "mezo-adapters-"
        in_folder = None if folder is None else tempfile.TemporaryDirectory(prefix=prefix, dir=folder)
        self._root = in_folder or scratch_folder(prefix, size)
        if in_folder is not None:
            os.chmod(in_folder.name, 0o755)  # a server may be another user's process
        self._params, self._count = params, 0
        self._template = Path(self._root.name) / "template"
        adapter.save(self._template)
        saved = load_file(self._template / WEIGHTS)
        # peft leaves the adapter's own name out of the names of its tensors
        self._names = {name: f"base_model.model.{name.replace('.default.', '.')}" for name in params.tensors}
        if sorted(self._names.values()) != sorted(saved):
            raise ValueError("the tensors that are trained are not those of the saved adapter")
        (self._template / WEIGHTS).unlink()

    def write(self, direction: Direction | None, c: float) -> str:
        """Write theta + c z, or theta if there is no direction; return the folder."""
        self._count += 1
        folder = Path(self._root.name) / str(self._count)
        shutil.copytree(self._template, folder)
        tensors = {
            self._names[name]: self._perturbed(name, p, direction, c) for name, p in self._params.tensors.items()
        }
        save_file(tensors, folder / WEIGHTS)
        return str(folder)

    def _perturbed(self, name: str, p: Tensor, direction: Direction | None, c: float) -> Tensor:
        if direction is None:
            return p.detach().cpu().clone()
        span = self._params.span_of[name]
        out = torch.empty(span.numel, dtype=p.dtype, device=p.device)
        self._params.noise.perturb(direction, span, c, out)
        return out[: p.numel()].view(p.shape).cpu()

    def remove(self, folders: list[str]) -> None:
        """Remove folders."""
        for folder in folders:
            shutil.rmtree(folder)

    def close(self) -> None:
        """Remove all folders."""
        self._root.cleanup()
