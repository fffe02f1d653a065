"""Check at every start that an objective's scores are those of the model's own forward, also with perturbed weights."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mezo_cli.errors import UserError
from mezo_cli.models import LoadedModel
from mezo_cli.objectives.base import Objective
from mezo_cli.perturb.functional import is_plain_embedding, swap_params, swapped
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


class PlainCheck:
    """The outputs for two short rows by the model's own forward, to compare those of the patched model with.

    It is made before the model is patched; `perturbed`: to compare with perturbed weights, too.
    """

    def __init__(
        self, objective: type[Objective], loaded: LoadedModel, encoder: Any, params: Params, perturbed: bool, name: str
    ) -> None:
        self._name, self.rows, self._flipped = name, objective.check_rows(encoder), None
        with computing_in_float32(loaded.model):
            self._plain = objective.plain_outputs(loaded, self.rows, encoder)
            if perturbed:
                spans = params.spans(params.tensors)
                for span in spans:
                    _flip_(span.theta)
                self._flipped = objective.plain_outputs(loaded, self.rows, encoder)
                for span in spans:
                    _flip_(span.theta)

    def compare(self, objective: Objective) -> None:
        """Refuse a model family that an objective does not support: its outputs, in float32, differ from the model's.

        Without a perturbation they are right where a weight is also read by another module than its own (an embedding
        in a linear layer elsewhere), which sees it unperturbed. So they are compared with perturbed weights too.
        """
        batch, plain, forward = objective.collate(self.rows), self._plain, objective.forward
        compute = partial(objective.outputs, batch)
        if not bool(plain.isfinite().all()):
            raise UserError(f"{self._name}: its scores are not finite: the weights are damaged")
        refusal, outputs = f"{self._name} is a model family that is not supported", compute()
        if not _agree(outputs, plain):
            error = float((outputs - plain).abs().max()) if outputs.shape == plain.shape else float("inf")
            raise UserError(f"{refusal}: its scores are wrong (by {error:.2g})")
        if self._flipped is None:
            return
        params = forward.params  # of a noise forwards call only the two methods of `_FlippedBits`
        with swapped("tensors", {params: params.tensors}), swapped("noise", {params: _FlippedBits()}):
            forward.select_reachable(compute)
            with forward.perturbed(Direction(0, 0), 1.0):
                outputs = compute() if objective.fits_paired_forward(batch) else forward.forward_per_sign(compute)
        if not _agree(outputs, torch.stack([self._flipped, plain])):
            raise UserError(
                f"{refusal}: with perturbed weights its scores are wrong, because some weight is used outside its own "
                "module"
            )


def _agree(outputs: Tensor, plain: Tensor) -> bool:
    allowed = TOLERANCE.get(plain.device.type, DEFAULT_TOLERANCE) * float(plain.abs().max())
    return outputs.shape == plain.shape and float((outputs - plain).abs().max()) <= allowed


def computing_in_float32(model: nn.Module) -> AbstractContextManager[None]:
    """Let the model's own forwards compute in float32: a module in half precision gets copies as it runs."""
    changed = {
        module: partial(_forward_in_float32, module, module.forward)
        for module in model.modules()
        if any(p.dtype != torch.float32 for p in module.parameters(recurse=False))
    }
    return swapped("forward", changed)


def _forward_in_float32(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if is_plain_embedding(module):
        return forward(*args, **kwargs).float()
    if type(module) is nn.Linear and module.weight.numel() > COPIED:  # the decoder is a third of a small model
        parts = module.weight.split(max(1, COPIED // module.in_features))
        out = torch.cat([torch.nn.functional.linear(args[0], part.float()) for part in parts], dim=-1)
        return out if module.bias is None else out.add_(module.bias.float())
    copies = {name: p.float() for name, p in module.named_parameters(recurse=False)}
    return swap_params(module, copies, forward, *args, **kwargs)


def _flip_(theta: Tensor) -> Tensor:
    """Perturb each element in place by one flipped bit; called again, restore them exactly."""
    dtype, bit = FLIPPED_BITS[theta.dtype]
    theta.view(dtype).bitwise_xor_(bit)
    return theta


class _FlippedBits:
    """The perturbation of `_flip_`, in place of a noise: it does not depend on direction and element.

    The flipped weights are those of the positive sign, theta those of the other.
    """

    has_factors = False

    def perturb(self, direction: Direction, span: Span, c: float, *outs: Tensor) -> None:
        for out, sign in zip(outs, (c, -c), strict=False):
            out.copy_(_flip_(span.theta.clone()) if sign > 0 else span.theta)

    def perturb_rows(
        self, direction: Direction, name: str, theta: Tensor, rows: Tensor, c: float, *outs: Tensor
    ) -> None:
        for out, sign in zip(outs, (c, -c), strict=False):
            out.copy_(_flip_(theta[rows]) if sign > 0 else theta[rows])
