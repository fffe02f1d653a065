"""Check at every start that an objective's scores are those of the model's own forward, also with perturbed weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezo_cli.errors import UserError
from mezo_cli.objectives.base import Objective
from mezo_cli.perturb.forward import PerturbedForward, is_plain_embedding
from mezo_cli.perturb.functional import swap_params
from mezo_cli.perturb.noise import Direction
from mezo_cli.perturb.noise.spans import Span
from mezo_cli.perturb.params import Params

# The largest allowed difference, as a fraction of the largest score: rounding, and no more.
TOLERANCE = {"cpu": 1e-4}
DEFAULT_TOLERANCE = 1e-2  # a GPU adds in other orders
COPIED = 1 << 22  # elements of a weight in half precision that are copied to float32 at once: 16 MB
# One bit in the middle of the mantissa: to flip it changes a weight by 1/16 to 1/8, and to flip it again restores it.
FLIPPED_BITS = {
    torch.float32: (torch.int32, 1 << 19),
    torch.bfloat16: (torch.int16, 1 << 3),
    torch.float16: (torch.int16, 1 << 6),
}


def check_against_plain(logits: Tensor, plain: Tensor, device: str, name: str) -> None:
    """Refuse a model of a family that an objective does not support: its scores differ from the model's own.

    Args:
        logits, plain: scores of the same rows by the objective and by the model's own forward, [rows, labels],
            float32.
        device: the type of the device.
        name: of the model, for the error line.

    Raises:
        UserError: also when the plain scores are not finite, which means that the weights are damaged.
    """
    if not bool(plain.isfinite().all()):
        raise UserError(f"{name}: its scores are not finite: the weights are damaged")
    if not _agree(logits, plain, device):
        error = float((logits - plain).abs().max()) if logits.shape == plain.shape else float("inf")
        raise UserError(f"{name} is a model family that is not supported: its scores are wrong (by {error:.2g})")


def check_perturbed(forward: PerturbedForward, objective: Objective, batch: Any, plain: Tensor, name: str) -> None:
    """Refuse a model whose patched forwards miss a use of a weight: one that its own module does not make.

    A weight that a module reads and another one too (an embedding in a linear layer elsewhere) is seen perturbed by the
    first only. Without a perturbation the scores are right, so only perturbed weights show it.

    Args:
        forward, objective: of the patched model, without a perturbation.
        batch: some rows.
        plain: their scores by the model's own forward, float32, [2, rows, labels]: inside `flip_weights`, plain.
        name: of the model, for the error line.

    Raises:
        UserError: when the scores differ.
    """
    tensors, noise = forward.params.tensors, forward.params.noise
    try:
        forward.select_reachable(lambda: objective.outputs(batch))
        forward.params.noise = _FlippedBits()  # type: ignore[assignment]  # forwards call only these two methods
        with forward.perturbed(Direction(0, 0), 1.0):
            paired = objective.fits_paired_forward(batch)
            logits = objective.outputs(batch) if paired else forward.forward_per_sign(lambda: objective.outputs(batch))
    finally:
        forward.params.tensors, forward.params.noise = tensors, noise
    if not _agree(logits, plain, plain.device.type):
        raise UserError(
            f"{name} is a model family that is not supported: with perturbed weights its scores are wrong, because "
            "some weight is used outside its own module"
        )


@contextmanager
def computing_in_float32(model: nn.Module) -> Iterator[None]:
    """Let the model's own forwards compute in float32: a module in half precision gets copies as it runs."""
    changed = {
        module: module.__dict__.get("forward")
        for module in model.modules()
        if any(p.dtype != torch.float32 for p in module.parameters(recurse=False))
    }
    try:
        for module in changed:
            module.forward = partial(_forward_in_float32, module, module.forward)
        yield
    finally:
        for module, before in changed.items():
            del module.__dict__["forward"]
            if before is not None:
                module.forward = before


def _forward_in_float32(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if is_plain_embedding(module):
        return forward(*args, **kwargs).float()
    if type(module) is nn.Linear and module.weight.numel() > COPIED:
        return _linear_in_parts(module, *args, **kwargs)
    copies = {name: p.float() for name, p in module.named_parameters(recurse=False)}
    return swap_params(module, copies, forward, args, kwargs)


def _linear_in_parts(module: nn.Linear, input: Tensor) -> Tensor:
    """Run a linear layer in float32 by rows of its weight: a decoder is a third of a small model."""
    rows = module.weight.split(max(1, COPIED // module.in_features))
    out = torch.cat([F.linear(input, part.float()) for part in rows], dim=-1)
    return out if module.bias is None else out.add_(module.bias.float())


@contextmanager
def flip_weights(params: Params) -> Iterator[None]:
    """Perturb the trainable parameters in place by one flipped bit each, and restore them exactly after the block."""
    stored = [span.theta for span in params.spans(params.tensors)]
    try:
        for theta in stored:
            _flip_(theta)
        yield
    finally:
        for theta in stored:
            _flip_(theta)


class _FlippedBits:
    """The perturbation of `flip_weights`, in place of a noise: it does not depend on direction and element."""

    def perturb(self, direction: Direction, span: Span, c: float, *outs: Tensor) -> None:
        """Write the flipped weights for a positive sign, theta for the other."""
        self._write(span.theta, c, outs)

    def perturb_rows(
        self, direction: Direction, name: str, theta: Tensor, rows: Tensor, c: float, *outs: Tensor
    ) -> None:
        """Do the same for some rows."""
        self._write(theta[rows], c, outs)

    def _write(self, theta: Tensor, c: float, outs: Sequence[Tensor]) -> None:
        for out, sign in zip(outs, (c, -c), strict=False):
            out.copy_(_flip_(theta.clone()) if sign > 0 else theta)


def _flip_(theta: Tensor) -> Tensor:
    dtype, bit = FLIPPED_BITS[theta.dtype]
    theta.view(dtype).bitwise_xor_(bit)
    return theta


def _agree(logits: Tensor, plain: Tensor, device: str) -> bool:
    allowed = TOLERANCE.get(device, DEFAULT_TOLERANCE) * float(plain.abs().max())
    return logits.shape == plain.shape and float((logits - plain).abs().max()) <= allowed
