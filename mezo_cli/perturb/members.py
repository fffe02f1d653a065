"""The members of a generation: each one's weights are made once, and several complete prompts in one batch.

A patched forward draws z as its module runs, which is right for one forward per member and far too slow for one per
token. So for a generation theta + c z of all trainable tensors is written to a second copy, in the compute dtype, and
the model's parameters get that copy as their data; the patches are set aside. theta's own memory is only read. Where
all that is trained are matrices of linear modules without a bias, as in a LoRA, several members go through the model in
one batch: each of these modules multiplies the rows of a member by that member's matrix.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.functional import is_plain_embedding, swapped
from mezo_cli.perturb.noise.spans import Span
from mezo_cli.perturb.patched import PatchedForward
from mezo_cli.perturb.plan import Perturbation
from mezo_cli.perturb.reach import own_parameters


class MemberRows:
    """Which rows of the batch that is running are of which of `count` members."""

    def __init__(self, count: int) -> None:
        self.count, self._rows = count, 0
        self._places: Tensor | None = None  # of the rows, where members do not have the same number of them

    def set(self, members: Sequence[int], device: torch.device) -> None:
        """Let the rows of the next batches be of these members, in ascending order."""
        sizes = [members.count(member) for member in range(self.count)]
        self._rows, width, self._places = len(members), max(sizes), None
        if min(sizes) < width:
            places = [member * width + row for member, size in enumerate(sizes) for row in range(size)]
            self._places = torch.tensor(places).to(device)
        self._padded = self.count * width

    def linear(self, weights: Tensor, x: Tensor) -> Tensor:
        """Multiply each row by its member's matrix: [members, out, in], [rows, ..., in] -> [rows, ..., out]."""
        flat = x.reshape(self._rows, -1, x.shape[-1])
        if self._places is not None:
            flat = flat.new_zeros(self._padded, *flat.shape[1:]).index_copy_(0, self._places, flat)
        product = torch.bmm(flat.reshape(self.count, -1, x.shape[-1]), weights.mT).view(*flat.shape[:2], -1)
        product = product if self._places is None else product[self._places]
        return product.view(*x.shape[:-1], -1)


class Population:
    """The weights of a generation's members, which forwards inside `materialized` see without patches."""

    def __init__(self, forward: PerturbedForward) -> None:
        self._forward = forward
        self._written_as: tuple[list[str], torch.dtype, int] | None = None  # names, dtype and number of the copies
        self._outs: list[tuple[Span, Tensor]] = []  # a span of theta, and its copies, [members, span.numel]
        self._copies: dict[str, Tensor] = {}  # by the names of the tensors, [members, ...]
        self._written_for: Perturbation | None = None  # what the weights of a single member are for
        self._rounded_copies: dict[nn.Parameter, Tensor] = {}  # of frozen weights in another dtype

    @contextmanager
    def materialized(self, members: Sequence[Perturbation | None] = ()) -> Iterator[MemberRows | None]:
        """Let forwards inside run without patches on weights that are made once: for the many forwards of a generation.

        Inside `perturbed` with one sign these are theta + sign eps z, else theta, all in the compute dtype: the bits
        that patched forwards see. theta is not written. A second copy of the trainable tensors is kept for the next
        time, and one of frozen weights that are stored in another dtype than the compute dtype.

        Args:
            members: with more than one, which `can_share_batches` must allow, their rows share the batches inside. Each
                has one sign; None is theta.

        Yields:
            With several members, where to say which rows of a batch are whose; else None.
        """
        forward = self._forward
        if forward.num_signs != 1:
            raise ValueError("a second copy of the weights is made for one sign: use `perturbed` with (1,) or (-1,)")
        rows = MemberRows(len(members)) if len(members) > 1 else None
        written = [forward.perturbation] if rows is None else members
        names, rounded, forwards = self._plan(is_perturbed=any(written))  # the same tensors for all members
        data = {p: self._rounded_copy(p) for p in rounded}
        copies = self._written(names, written) if names else {}
        if rows is not None:
            forwards |= {m: partial(rows.linear, copies[forward.reach.names[id(m.weight)]]) for m in self._owners()}
        else:
            data |= {forward.params.tensors[name]: copies[name][0] for name in names}
        unpatched = swapped("is_patched", {forward: False}), swapped("forward", forwards)
        with unpatched[0], unpatched[1], forward.seeing(None), swapped("data", data), torch.no_grad():
            yield rows

    @property
    def can_share_batches(self) -> bool:
        """Whether rows of several members can share a batch: all that is trained are matrices of linear modules.

        Not where such a module may see other rows than those of the batch: in an expert, in a list of a layer.
        """
        reach, tensors = self._forward.reach, self._forward.params.tensors
        inner = [name for name in tensors if sum(name.startswith(f"{path}.") for path in reach.lists) > 1]
        linears = all(type(module) is nn.Linear and module.bias is None for module in self._owners())
        return linears and not inner and not reach.outside

    def _owners(self) -> list[Any]:
        names, tensors, patches = self._forward.reach.names, self._forward.params.tensors, self._forward.patches
        return [m for m in patches.modules if any(names[id(p)] in tensors for p in own_parameters(m).values())]

    def _plan(self, is_perturbed: bool) -> tuple[list[str], set[nn.Parameter], dict[nn.Module, Callable[..., Any]]]:
        """Return the tensors that members have copies of, other parameters to round, and forwards without patches."""
        patches, tensors, outside = self._forward.patches, self._forward.params.tensors, self._forward.reach.outside
        names = [n for n, p in tensors.items() if n not in outside and (is_perturbed or patches.is_rounded(p))]
        copied = {tensors[name] for name in names}
        of_modules = {module: own_parameters(module).values() for module in patches.modules}
        left = {p for held in of_modules.values() for p in held if p not in copied and patches.is_rounded(p)}
        rounded = {p for m, held in of_modules.items() for p in held if p in left and not is_plain_embedding(m)}
        forwards: dict[nn.Module, Callable[..., Any]] = {}
        for module in [*(one.module for one in patches.layers), *of_modules]:
            if not left.intersection(of_modules.get(module, ())) <= rounded:
                continue  # an embedding keeps its patch, which rounds the rows that it looks up
            forward = module.forward
            while isinstance(forward, PatchedForward):  # twice in a layer with parameters of its own
                forward = forward.__wrapped__
            forwards[module] = forward
        return names, rounded, forwards

    def _rounded_copy(self, p: nn.Parameter) -> Tensor:
        dtype, reach = self._forward.compute_dtype, self._forward.reach
        copy = self._rounded_copies.get(p)
        if copy is None or copy.dtype != dtype:
            copy = p.data.to(dtype)
            if not p.requires_grad and reach.names[id(p)] not in reach.outside:  # it never changes
                self._rounded_copies[p] = copy
        return copy

    def _written(self, names: list[str], members: Sequence[Perturbation | None]) -> dict[str, Tensor]:
        """Return these tensors as the members see them, [members, ...], rounded to the compute dtype.

        They are written once inside one `perturbed`, theta alone each time: it changes. The memory is used again.
        """
        params, dtype, count = self._forward.params, self._forward.compute_dtype, len(members)
        if self._written_as != (names, dtype, count):
            self._written_as, self._written_for = (names, dtype, count), None
            self._outs = [
                (span, span.theta.new_empty((count, span.numel), dtype=dtype)) for span in params.spans(names)
            ]
            self._copies = {
                piece.name: out[:, piece.part].view(count, *piece.shape)
                for span, out in self._outs
                for piece in span.pieces
            }
        for i, member in enumerate(members):
            is_written = member is not None and count == 1 and self._written_for is member
            for span, outs in () if is_written else self._outs:
                if member is None:
                    outs[i].copy_(span.theta)
                else:
                    params.noise.perturb(member.direction, span, member.coefficient, outs[i])
        self._written_for = members[0]
        return self._copies
