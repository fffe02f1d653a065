"""Noise of low rank: z = U V^T on matrices, U [m, r] drawn for each direction, V [n, r] for some steps at a time.

The elements of U and V are those of another noise; on tensors with a dimension below r, or that are no matrices, z is
that noise itself. An element of U V^T is a sum of r products in their order, each product and each sum rounded to
float32: the same bits on every device, and whatever part of z is drawn. A linear layer computes x W^T + c (x V) U^T
instead, where it can (perturb/forward.py).
"""

from math import prod

import torch
from torch import Tensor

from mezo_cli.perturb.noise import Direction, Factors, Noise, Shape, to_float32
from mezo_cli.perturb.noise.by_tensor import NoiseByTensor, scaled_rows
from mezo_cli.perturb.noise.counter import Device
from mezo_cli.perturb.noise.spans import Piece, compute_device

CHUNK = 1 << 16  # elements of U V^T that are computed at once on a CPU: they stay in cache
CHUNK_ELSEWHERE = 1 << 25


class LowRankNoise(NoiseByTensor):
    """The methods are those of `Noise`.

    Args:
        base: the noise of the elements of U, V and z of the other tensors.
        rank: r.
        interval: the number of steps that have the same V.
    """

    has_factors = True

    def __init__(self, base: Noise, rank: int, interval: int) -> None:
        self.base, self.rank, self.interval = base, rank, interval
        self.name, self.tile, self.block = base.name, base.tile, base.block
        self.describe_kernels, self.begin_pass = base.describe_kernels, base.begin_pass
        self._kept: dict[tuple[str, str], tuple[Direction, Tensor]] = {}  # (tensor, side) -> what was drawn last

    def is_matrix(self, shape: Shape) -> bool:
        """Return whether z of a tensor is of low rank."""
        return len(shape) == 2 and min(shape) >= self.rank

    def left(self, direction: Direction, name: str, shape: Shape, device: torch.device) -> Tensor:
        """Return U of a matrix, float32 [m, r]."""
        return self._side("U", direction, name, shape[0], device)

    def right(self, direction: Direction, name: str, shape: Shape, device: torch.device) -> Tensor:
        """Return V of a matrix, float32 [n, r]: all samples of `interval` steps have it."""
        shared = Direction(direction.seed, direction.step // self.interval)
        return self._side("V", shared, name, shape[1], device)

    def factors(self, direction: Direction, name: str, shape: Shape, device: torch.device) -> Factors | None:
        """Return U and V of a matrix; None for a tensor whose z is not of low rank."""
        if not self.is_matrix(shape):
            return None
        return Factors(self.left(direction, name, shape, device), self.right(direction, name, shape, device))

    def _side(self, side: str, direction: Direction, name: str, count: int, device: torch.device) -> Tensor:
        drawn, tensor = self._kept.get((name, side), (None, None))
        if drawn != direction or tensor is None or tensor.device != device:
            tensor = self.base.z(direction, f"{name}:{side}", (count, self.rank), device).view(count, self.rank)
            self._kept[name, side] = direction, tensor
        return tensor

    def z(
        self, direction: Direction, name: str, shape: Shape, device: Device, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Return elements [start, stop) of z for that tensor, float32 [stop - start], in row-major order."""
        stop = prod(shape) if stop is None else stop
        return self.piece(direction, Piece(name, tuple(shape), start, stop - start), torch.device(device), 1.0)

    def piece(self, direction: Direction, piece: Piece, device: torch.device, c: float) -> Tensor:
        """Return c z of these elements: see `NoiseByTensor.piece`."""
        computed = compute_device(device)
        factors = self.factors(direction, piece.name, piece.shape, computed)
        if factors is None:
            z = self.base.z(direction, piece.name, piece.shape, computed, piece.start, piece.start + piece.numel)
        else:
            z = torch.empty(piece.numel, device=computed)
            write_product(factors, piece.start, z)
        return z.mul_(to_float32(c)).to(device)

    def rows(self, direction: Direction, name: str, theta: Tensor, rows: Tensor, c: float) -> Tensor:
        """Return c z of some rows of theta, float32 [R, ...]."""
        computed = compute_device(theta.device)
        factors = self.factors(direction, name, theta.shape, computed)
        if factors is None:
            return scaled_rows(self.base, direction, name, theta, rows, c)
        z = torch.empty(len(rows), theta.shape[1], device=computed)
        write_product(Factors(factors.left[rows.to(computed)], factors.right), 0, z.view(-1))
        return z.mul_(to_float32(c)).to(theta.device)


def write_product(factors: Factors, start: int, out: Tensor) -> None:
    """Write elements [start, start + len(out)) of left right^T, in row-major order, to `out`, float32."""
    columns = factors.right.t().contiguous()  # [r, n]
    width, stop = columns.shape[1], start + len(out)
    rows, end_row = max(1, (CHUNK if out.device.type == "cpu" else CHUNK_ELSEWHERE) // width), -(-stop // width)
    for first in range(start // width, end_row, rows):
        last = min(first + rows, end_row)
        left = factors.left[first:last]
        product = left[:, :1] * columns[0]
        term = torch.empty_like(product)
        for k in range(1, len(columns)):
            product.add_(torch.mul(left[:, k : k + 1], columns[k], out=term))
        begin, end = max(start, first * width), min(stop, last * width)
        out[begin - start : end - start] = product.view(-1)[begin - first * width : end - first * width]
