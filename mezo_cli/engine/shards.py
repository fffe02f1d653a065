"""The part of mezo inside each worker of vLLM: the worker's shards of theta, theta + c z, and the update of theta.

vLLM mixes the class into its worker (`worker_extension_cls`) and calls its methods by name. Each worker draws z for its
own shards, by the name of the checkpoint's tensor and the number of the element, so nothing of z is sent. The shards of
theta are held in float32, apart from the weights that the engine computes with: these are written from them, and no
rounding adds up. The arithmetic is that of `perturb.noise`: the shards stay bitwise identical to mezo's own theta.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.model_executor.layers import utils as layer_utils

from mezo_cli.engine.layout import Block, LayoutError, as_matrix, digest, find_blocks
from mezo_cli.perturb.noise import Direction, make_noise
from mezo_cli.perturb.noise.kernels import add_to_decayed

# On a CPU, oneDNN would pack the linear layers' weights and leave tensors of 0 elements, which no perturbation reaches.
# With AMX, so would a kernel of vLLM's own for small matrices in bfloat16.
_custom_ops._supports_onednn = False
layer_utils.check_cpu_sgl_kernel = lambda n, k, dtype: False

PART = 1 << 22  # elements of z that are drawn at a time


class Shards:
    """Methods of a worker of vLLM: `model_runner` is the worker's own."""

    model_runner: Any

    def mezo(self, method: str, params: str) -> Any:
        """Call a method by its name, with arguments as a text in JSON: what the server's interface passes on."""
        return getattr(self, f"mezo_{method}")(**json.loads(params))

    @torch.inference_mode()
    def mezo_lay_out(self, tensors: Sequence[tuple[str, Sequence[int]]], noise: str) -> list[list[int]]:
        """Find which elements of the trained tensors this worker holds, and copy them.

        Args:
            tensors: name and shape of each trained tensor, by the checkpoint's names.
            noise: the kind of the noise.

        Returns:
            The worker's blocks (`layout.Block`). A tensor that is not made of blocks (GPT-2's are transposed) has none,
            so that mezo refuses the model by the first tensor of which elements are missing.
        """
        self._mezo_tensors = [(name, tuple(shape)) for name, shape in tensors]
        self._mezo_noise = make_noise(noise)
        self._mezo_held: list[tuple[Tensor, Tensor, Block]] = []  # (weights, theta, block): [block's rows, columns]
        model, loaded = self.model_runner.get_model(), []
        params = dict(model.named_parameters())
        weights = {name: p.data for name, p in params.items()}
        for what in ("tensor", "row", "column"):
            for p in params.values():
                p.data = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
            model.load_weights(self._mezo_coordinates(what))
            loaded.append({name: _matrix(p.data).to(torch.int32).cpu().numpy() for name, p in params.items()})
        for name, p in params.items():
            p.data = weights[name]
            with contextlib.suppress(LayoutError):
                for block in find_blocks(*(of[name] for of in loaded)):
                    held = _matrix(p.data)[block.local]
                    self._mezo_held.append((held, held.float().clone(), block))
        return [list(block) for _, _, block in self._mezo_held]

    def _mezo_coordinates(self, what: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's tensors with each element's number of tensor, row or column, from 1 (at most 2^24)."""
        for number, (name, shape) in enumerate(self._mezo_tensors):
            rows, columns = as_matrix(shape)
            down, right = torch.arange(1.0, rows + 1)[:, None], torch.arange(1.0, columns + 1)
            values = {"tensor": torch.tensor(number + 1.0), "row": down, "column": right}[what]
            yield name, values.expand(rows, columns).reshape(shape).contiguous()

    @torch.inference_mode()
    def mezo_perturb(self, direction: Sequence[int] | None = None, c: float = 0.0) -> None:
        """Let the engine compute with theta + c z, or with theta if there is no direction."""
        for weights, theta, block in self._mezo_held:
            if direction is None:
                weights.copy_(theta)
                continue
            for rows, z in self._mezo_draw(block, direction):
                weights[rows] = theta[rows] + z * float(np.float32(c))

    @torch.inference_mode()
    def mezo_update(self, terms: Sequence[tuple[Sequence[int], float]], decays: Sequence[float]) -> None:
        """Apply theta <- decay theta + coefficient z for each (direction, coefficient) in order (`Noise.update_`)."""
        for (direction, coefficient), decay in zip(terms, decays, strict=True):
            for _, theta, block in self._mezo_held:
                for rows, z in self._mezo_draw(block, direction):
                    cz = z * float(np.float32(coefficient))
                    theta[rows] = add_to_decayed(theta[rows], cz, decay, in_float64=True)
        self.mezo_perturb()

    @torch.inference_mode()
    def mezo_load(self, path: str) -> None:
        """Set theta from a safetensors file of whole tensors."""
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            for _, theta, block in self._mezo_held:
                theta.copy_(_matrix(file.get_tensor(self._mezo_tensors[block.tensor][0]))[block.source])
        self.mezo_perturb()

    def mezo_digests(self) -> list[tuple[list[int], str]]:
        """Return the SHA-256 of each block of theta, as its float32 values in rows."""
        return [(list(block), digest(theta.cpu().numpy())) for _, theta, block in self._mezo_held]

    def _mezo_draw(self, block: Block, direction: Sequence[int]) -> Iterator[tuple[slice, Tensor]]:
        """Yield z of a block, part by part, each with its rows in the block. A part is cut from whole rows."""
        name, shape = self._mezo_tensors[block.tensor]
        width, device = as_matrix(shape)[1], self._mezo_held[0][0].device
        size = max(1, PART // width)
        for start in range(0, block.rows, size):
            rows, first = min(size, block.rows - start), (block.row + start) * width
            z = self._mezo_noise.z(Direction(*direction), name, shape, device, first, first + rows * width)
            yield slice(start, start + rows), z.view(rows, width)[:, block.source[1]]


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.view(as_matrix(tensor.shape))
