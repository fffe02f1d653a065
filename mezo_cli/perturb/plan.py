"""The copies of the parameters of modules that are written together, and what runs each module with them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mezo_cli.perturb.functional import PairedLinear, layer_norm_per_sign, linear_per_sign, split_signs, swap_params
from mezo_cli.perturb.noise import Direction
from mezo_cli.perturb.noise.spans import Span

if TYPE_CHECKING:
    from mezo_cli.perturb.forward import PerturbedForward

CACHE_LINE = 64  # bytes

# What forwards see: theta; theta + eps z of one sign; of both signs, in one forward or (refused) in none; theta, and
# which tensors are read is noted. Each is the place of a module's way in `PatchedForward.ways`.
MODES = THETA, ONE_SIGN, PAIRED, BOTH, NOTED = range(5)

Way = Callable[..., Any]  # what runs a module
Copies = dict[str, Tensor]  # attribute of a module -> as each sign sees it, [signs, ...]


class Perturbation(NamedTuple):
    """What forwards see instead of theta: theta + sign eps z for each of the signs."""

    direction: Direction
    eps: float
    signs: tuple[int, ...]  # (1, -1), the antithetic pair, or one of them

    @property
    def coefficient(self) -> float:
        """Factor of z for the first sign."""
        return self.signs[0] * self.eps


class Owner(NamedTuple):
    """A module, and which of its parameters its forward sees copies of.

    Args:
        module: the module.
        forward: its original forward.
        perturbed: attribute of the module -> name of the tensor, of those that are perturbed.
        rounded: attribute -> parameter, of the others whose dtype is not the compute dtype.
    """

    module: nn.Module
    forward: Way
    perturbed: Mapping[str, str]
    rounded: Mapping[str, nn.Parameter]


class Plan:
    """The perturbed and the rounded copies of the parameters of modules that are written together, made once.

    A copy is [signs, ...]; one without a perturbation is the same memory for both.

    Args:
        forward: what forwards see now; the copies are in the scratch buffer of its `patches`.
        owners: one module, or the modules of a layer.
        signs: how many signs a forward computes.

    Attributes:
        spans: of the tensors that are perturbed.
        calls: what runs each module with its copies, from the first `write` on.
    """

    def __init__(self, forward: "PerturbedForward", owners: Sequence[Owner], signs: int) -> None:
        self._forward, self._owners = forward, owners
        self.spans = forward.params.spans(name for owner in owners for name in owner.perturbed.values())
        rounded = {p for owner in owners for p in owner.rounded.values()}
        self._dtype, self._signs = forward.compute_dtype, signs if self.spans else 1
        elements = self._signs * sum(span.numel for span in self.spans) + sum(p.numel() for p in rounded)
        self._bytes = elements * self._dtype.itemsize
        self._device = next(iter([*(span.theta.device for span in self.spans), *(p.device for p in rounded)]))
        self._scratch: Tensor | None = None  # where the copies were laid out, and from which byte on
        self._start = 0
        self._perturbed: list[tuple[Span, Sequence[Tensor]]] = []  # outputs of each sign
        self._rounded: dict[nn.Parameter, Tensor] = {p: p for p in rounded}  # their copies, once laid out
        self.calls: list[Way] = []

    def write(self) -> None:
        """Write the copies as each sign sees them."""
        patches, start = self._forward.patches, self._forward.patches.scratch_used
        patches.scratch_used += -(-self._bytes // CACHE_LINE) * CACHE_LINE
        if patches.scratch.numel() < patches.scratch_used or patches.scratch.device != self._device:
            patches.scratch = torch.empty(patches.scratch_used, dtype=torch.uint8, device=self._device)
        if self._scratch is not patches.scratch or self._start != start:  # lay them out there
            self._scratch, self._start = patches.scratch, start
            buffer, begin, signs = patches.scratch[start : start + self._bytes].view(self._dtype), 0, self._signs
            tensors: dict[str, Tensor] = {}
            self._perturbed, self.calls = [], []
            for span in self.spans:
                outs = buffer[begin : begin + signs * span.numel].view(signs, span.numel)
                begin += signs * span.numel
                self._perturbed.append((span, outs.unbind()))
                for piece in span.pieces:
                    tensors[piece.name] = outs[:, piece.part].view(signs, *piece.shape)
            for p in self._rounded:
                self._rounded[p] = buffer[begin : begin + p.numel()].view(p.shape)
                begin += p.numel()
            for owner in self._owners:
                copies = {key: tensors[name] for key, name in owner.perturbed.items()}
                copies |= {key: self._rounded[p].expand(signs, *p.shape) for key, p in owner.rounded.items()}
                self.calls.append(_call_of(self._forward, owner, copies) if copies else owner.forward)
        for span, outs_of_signs in self._perturbed:
            perturbation = self._forward.perturbation
            assert perturbation is not None
            self._forward.params.noise.perturb(perturbation.direction, span, perturbation.coefficient, *outs_of_signs)
        for p, out in self._rounded.items():
            out.copy_(p.data)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the one module of the plan."""
        patches, before = self._forward.patches, self._forward.patches.scratch_used
        try:
            self.write()
            return self.calls[0](*args, **kwargs)
        finally:
            patches.scratch_used = before


def _call_of(forward: "PerturbedForward", owner: Owner, copies: Copies) -> Way:
    """Return what runs a module with these copies; with two signs, on both halves of a paired batch."""
    module, signs = owner.module, len(next(iter(copies.values())))
    of_signs = [{key: copy[i] for key, copy in copies.items()} for i in range(signs)]
    if signs == 1:
        return partial(swap_params, module, of_signs[0], owner.forward)
    if type(module) is nn.Linear:
        if "weight" in copies and (module.bias is None or "bias" in copies):
            return PairedLinear(copies["weight"], copies.get("bias"))
        return partial(run_linear, module, of_signs)
    if type(module) is nn.LayerNorm and copies.keys() == {"weight", "bias"}:
        return partial(layer_norm_per_sign, module, copies["weight"].unsqueeze(1), copies["bias"].unsqueeze(1))
    return partial(_run_halves, forward, owner, of_signs)


def run_linear(module: nn.Linear, of_signs: Sequence[Mapping[str, Tensor]], input: Tensor) -> Tensor:
    """Run a linear layer of which not all parameters have copies: its own, too, may be others at every call."""
    pairs = [(copies.get("weight", module.weight).t(), copies.get("bias", module.bias)) for copies in of_signs]
    out = linear_per_sign(pairs, input.reshape(len(pairs), -1, module.in_features))
    return out.view(*input.shape[:-1], module.out_features)


def _run_halves(
    forward: "PerturbedForward", owner: Owner, of_signs: Sequence[Copies], *args: Any, **kwargs: Any
) -> Any:
    """Run a module on both halves of a paired batch, one after the other, each with its own weights."""
    assert forward.perturbation is not None
    both, outputs = forward.perturbation, []
    for index, sign in enumerate(both.signs):
        half = [split_signs(value, index) for value in args]
        named = {key: split_signs(value, index) for key, value in kwargs.items()}
        with forward.seeing(both._replace(signs=(sign,))):  # for the modules inside
            outputs.append(swap_params(owner.module, of_signs[index], owner.forward, *half, **named))
    return torch.cat(outputs)
