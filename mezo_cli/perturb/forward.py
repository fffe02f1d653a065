"""Run a model's forwards with the perturbed weights theta + eps z and theta - eps z, without a write to theta.

The paper's Algorithm 1 adds eps z to the weights in place, subtracts it twice and adds it again: three passes over
theta, after which rounding leaves it slightly off. Here theta stays as it is. Every module that owns parameters gets
a patched forward, which writes the module's perturbed weights to a scratch buffer and runs the original forward with
them while they are still in cache. An embedding draws z only for the rows of its batch.

So the update is the only write to theta, a step takes one pass over theta and two forwards, and the peak of
memory is that of a forward plus the largest module. The same patch rounds the weights to the compute dtype.

z is drawn by `params.noise.perturb`, for all tensors of a module at once, and `perturb_rows`, as the module runs.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mezo_cli.distributed.ranks import ALONE, Ranks
from mezo_cli.perturb.functional import (
    Calls,
    Copies,
    MemberRows,
    MemberWeights,
    Owner,
    PairedLinear,
    Plan,
    ScratchBuffer,
    layer_norm_per_sign,
    linear_per_sign,
    split_signs,
    swap_params,
    swapped,
)
from mezo_cli.perturb.noise import Direction
from mezo_cli.perturb.noise.direction import Factors
from mezo_cli.perturb.params import SEGMENT, Params
from mezo_cli.process.memory import release_file_pages

# The most tokens of a batch for which one forward computes both signs of a step, by type of device. On a CPU, drawing z
# is a small part of the step in a larger batch, and the activations of two forwards are a large part of the memory.
# Elsewhere a second forward costs its launches.
PAIRED_TOKENS = {"cpu": 1024}
PAIRED_TOKENS_ELSEWHERE = 16384
# The most elements of a layer whose modules are perturbed together, before it runs. On a CPU so few that the layer and
# its copies for both signs are in L2 (384 KiB); each module of a larger one is perturbed alone, and read while cached.
LAYER_ELEMENTS = {"cpu": 1 << 15}
LAYER_ELEMENTS_ELSEWHERE = SEGMENT
ROW_COST = 4096  # elements of a vector that are drawn for one of them: a tile of rademacher noise


# What the forwards of a member see: names of the tensors that it has copies of, other parameters that are rounded, and
# the forwards of modules without patches.
MemberPlan = tuple[list[str], Collection[nn.Parameter], dict[nn.Module, Callable[..., Any]]]


class Perturbation(NamedTuple):
    """What forwards see instead of theta: theta + sign eps z for each of the signs."""

    direction: Direction
    eps: float
    signs: tuple[int, ...]  # (1, -1), the antithetic pair, or one of them

    @property
    def coefficient(self) -> float:
        """Factor of z for the first sign."""
        return self.signs[0] * self.eps


class PerturbedForward:
    """A model with patched forwards: inside `perturbed(direction, eps)` they see theta +- eps z.

    Args:
        model: a transformers model; the forwards of its modules are replaced for good.
        params: its trainable tensors. Only these are perturbed.
        rounds: whether modules see all weights in the compute dtype, and not in the one that each is stored in.

    Attributes:
        compute_dtype: the dtype that modules see their weights in; theta itself stays in its own.
        paired_tokens: the most tokens of a batch for which one forward should compute both signs.
        layer_elements: the most elements of a layer whose modules are perturbed together.
        scratch: memory for the perturbed weights of the module that is running.
        perturbation: what forwards see instead of theta; None outside `perturbed`.
        ranks: those that share the directions of a step; `ALONE` if this process computes all of them.
        is_streamed: whether a frozen tensor is read from its file as it runs, and never held in another dtype.
        uses_factors: whether a linear layer computes with the factors of a z of low rank, without a copy of its weight.
        upcoming: inside `losses_of`, all that losses are computed with there, in order; None stands for theta.
    """

    def __init__(self, model: nn.Module, params: Params, rounds: bool = True) -> None:
        self.model, self.params, self._rounds = model, params, rounds
        self.compute_dtype = torch.float32 if rounds else params.dtype
        device = next(model.parameters()).device.type
        self.paired_tokens = PAIRED_TOKENS.get(device, PAIRED_TOKENS_ELSEWHERE)
        self.layer_elements = LAYER_ELEMENTS.get(device, LAYER_ELEMENTS_ELSEWHERE)
        self._names: dict[int, str] = {id(p): name for name, p in model.named_parameters()}
        self._lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
        self.perturbation: Perturbation | None = None
        self._paired = False  # a paired forward is running
        self._read: set[str] = set()  # trainable tensors that patched forwards have read
        self._read_outside_module: list[str] = []  # those in the graph of the loss that no patched forward reads
        self.scratch = ScratchBuffer()
        self.uses_factors = True
        self.is_streamed: Callable[[Tensor], bool] = lambda p: False
        self.ranks: Ranks = ALONE
        self.upcoming: Sequence[Perturbation | None] = ()
        self._original_forwards: dict[nn.Module, Callable[..., Any]] = {}
        self._patched: list[nn.Module] = []
        self._plans: dict[tuple[nn.Module, bool, torch.dtype], Plan] = {}
        self._layer_plans: dict[tuple[nn.Module, torch.dtype], Plan] = {}
        self._member_plans: dict[tuple[bool, torch.dtype], MemberPlan] = {}
        self._planned_for = params.tensors  # the plans are for these trainable tensors
        self._calls: Calls = {}  # what runs the modules of the layer that is running, if it was perturbed
        self._member: MemberWeights | None = None
        self._member_of: Any = None  # the perturbations that it was written for
        self._rounded_copies: dict[nn.Parameter, Tensor] = {}  # of frozen weights in another dtype, for generation
        self._materialized = False
        self._patch(model)

    # --- what to compute ---

    @contextmanager
    def perturbed(self, direction: Direction, eps: float, signs: tuple[int, ...] = (1, -1)) -> Iterator[None]:
        """Let forwards inside see theta + sign eps z, z drawn for `direction`; theta itself is not written.

        With both signs, a forward inside is run by `forward_per_sign`, or inside `paired_forward`.

        Args:
            direction: names z. It is drawn by `params.noise.perturb` as each module runs, and never stored.
            eps: the perturbation scale.
            signs: (1, -1), (1,) or (-1,).
        """
        if signs not in ((1, -1), (1,), (-1,)):
            raise ValueError(f"signs are (1, -1), (1,) or (-1,), not {signs}")
        if self._materialized:
            raise RuntimeError("`perturbed` goes around `materialized`: inside, forwards are not patched")
        if self._planned_for is not self.params.tensors:
            self.perturb_whole(self._read_outside_module)
        whole, perturbation = dict[Tensor, Tensor](), Perturbation(direction, eps, signs)
        with swapped("perturbation", {self: perturbation}):
            for name in self._read_outside_module if len(signs) == 1 else ():  # no patched forward reads these
                p, span = self.params.tensors[name], self.params.span_of[name]
                out = torch.empty(span.numel, dtype=p.dtype, device=p.device)
                self.params.noise.perturb(direction, span, perturbation.coefficient, out)
                whole[p] = out[: p.numel()].view(p.shape)
            # A graph would be that of theta, not of the perturbed weights.
            with swapped("data", whole), torch.no_grad():
                yield

    @property
    def num_signs(self) -> int:
        """Number of signs that a forward is to compute now: 2 inside `perturbed` with both, else 1."""
        return 1 if self.perturbation is None else len(self.perturbation.signs)

    def forward_per_sign(self, forward: Callable[[], Tensor]) -> Tensor:
        """Run `forward` once per sign, one after the other; return the results stacked, [signs, ...]."""
        assert self.perturbation is not None
        direction, eps, signs = self.perturbation
        outputs = []
        for sign in signs:
            with self.perturbed(direction, eps, (sign,)):
                outputs.append(forward())
        return torch.stack(outputs)

    def losses_of(
        self,
        points: Sequence[Direction | None],
        eps: float,
        loss: Callable[[], Tensor],
        signs: tuple[int, ...] = (1, -1),
    ) -> list[Tensor]:
        """Return `loss()` at each point in turn: `perturbed` along each direction, theta where it is None.

        `upcoming` tells the objective which points there are: an inference engine computes several in one call.
        """
        perturbations = [None if z is None else Perturbation(z, eps, signs) for z in points]
        losses = []
        with swapped("upcoming", {self: perturbations}):
            for z in points:
                with nullcontext() if z is None else self.perturbed(z, eps, signs):
                    losses.append(loss())
        return losses

    @property
    def supports_paired_forward(self) -> bool:
        """Whether one forward can compute both signs: not where weights are read outside their own module."""
        return not self._read_outside_module

    @contextmanager
    def paired_forward(self) -> Iterator[None]:
        """Let one forward inside compute both signs: its tensors are [2, ...], theta + eps z's half first.

        z is drawn once for both signs, and modules without perturbed weights compute both halves at once.
        """
        if self.num_signs != 2 or not self.supports_paired_forward:
            raise ValueError("a paired forward needs both signs, and no weight that is read outside its own module")
        with swapped("_paired", {self: True}):
            yield

    @contextmanager
    def using_compute_dtype(self, dtype: torch.dtype) -> Iterator[None]:
        """Let forwards inside compute in `dtype`."""
        with swapped("compute_dtype", {self: dtype}):
            yield

    @contextmanager
    def materialized(self, members: "Sequence[Perturbation | None]" = ()) -> Iterator[MemberRows | None]:
        """Let forwards inside run without patches on weights that are made once: for the many forwards of a generation.

        Inside `perturbed` with one sign these are theta + sign eps z, else theta, all in the compute dtype: the bits
        that patched forwards see. theta is not written. A second copy of the trainable tensors is kept for the next
        time, and one of frozen weights that are stored in another dtype than the compute dtype.

        Args:
            members: with more than one, which `supports_members` must allow, their rows share the batches inside. Each
                has one sign; None is theta.

        Yields:
            With several members, where to say which rows of a batch are whose; else None.
        """
        if self._materialized:  # by the caller, for more than one generation
            yield None
            return
        if self.num_signs != 1:
            raise ValueError("a second copy of the weights is made for one sign: use `perturbed` with (1,) or (-1,)")
        rows = MemberRows(len(members)) if len(members) > 1 else None
        written = (self.perturbation,) if rows is None else tuple(members)
        # Which tensors are perturbed is the same for all members.
        with swapped("perturbation", {self: self.perturbation if rows is None else next(filter(None, members))}):
            if self._planned_for is not self.params.tensors:
                self.perturb_whole(self._read_outside_module)
            key = self.perturbation is not None, self.compute_dtype
            if key not in self._member_plans:
                self._member_plans[key] = self._new_member_plan()
            names, rounded, forwards = self._member_plans[key]
            data = {p: self._rounded_copy(p) for p in rounded}
            copies = self._written_members(names, written) if names else {}
            if rows is not None:
                matrices = {m: copies[self._names[id(m.weight)]] for m in self._owners()}
                forwards = forwards | {m: partial(rows.linear, matrix) for m, matrix in matrices.items()}
            else:
                data |= {self.params.tensors[name]: copies[name][0] for name in names}
        state = swapped("_materialized", {self: True}), swapped("perturbation", {self: None})
        with state[0], state[1], swapped("data", data), swapped("forward", forwards), torch.no_grad():
            yield rows

    @property
    def supports_members(self) -> bool:
        """Whether rows of several members can share a batch: all that is trained are matrices of linear modules.

        Not where such a module may see other rows than those of the batch: in an expert, in a list of a layer.
        """
        inner = [name for name in self.params.tensors if sum(name.startswith(f"{path}.") for path in self._lists) > 1]
        linears = all(type(module) is nn.Linear and module.bias is None for module in self._owners())
        return linears and not inner and not self._read_outside_module

    def _owners(self) -> list[nn.Module]:
        """Return the modules that own trainable tensors."""
        names, tensors = self._names, self.params.tensors
        return [m for m in self._original_forwards if any(names[id(p)] in tensors for p in own_parameters(m).values())]

    def _new_member_plan(self) -> MemberPlan:
        tensors, outside = self.params.tensors, self._read_outside_module
        seen = (name for name, p in tensors.items() if self._is_perturbed(p) or self._is_rounded(p))
        names = [name for name in seen if name not in outside]
        copied = {tensors[name] for name in names}
        rounded = {
            p
            for module in self._original_forwards
            for p in own_parameters(module).values()
            if p not in copied and self._is_rounded(p) and not is_plain_embedding(module)
        }
        forwards: dict[nn.Module, Callable[..., Any]] = {}
        for module in self._patched:
            own = own_parameters(module).values()
            if any(self._is_rounded(p) and p not in copied and p not in rounded for p in own):
                continue  # an embedding keeps its patch, which rounds the rows that it looks up
            forward = module.forward
            while isinstance(forward, PatchedForward):  # twice in a layer with parameters of its own
                forward = forward.__wrapped__
            forwards[module] = forward
        return names, rounded, forwards

    def _rounded_copy(self, p: nn.Parameter) -> Tensor:
        """Return a parameter in the compute dtype; the copy of one that never changes is kept."""
        copy = self._rounded_copies.get(p)
        if copy is None or copy.dtype != self.compute_dtype:
            copy = p.data.to(self.compute_dtype)
            if not p.requires_grad and self._names[id(p)] not in self._read_outside_module:
                self._rounded_copies[p] = copy
        return copy

    def _written_members(self, names: list[str], members: "tuple[Perturbation | None, ...]") -> dict[str, Tensor]:
        """Return these tensors as the members see them, [members, ...]; they are written once inside one `perturbed`.

        theta alone is written each time: it changes.
        """
        copies = self._member
        key = names, self.compute_dtype, len(members)
        if copies is None or (copies.names, copies.dtype, copies.count) != key:
            copies = self._member = MemberWeights(self.params, names, self.compute_dtype, len(members))
            self._member_of = ()
        for i, member in enumerate(members):
            if member is None:
                copies.write(i, None, 0.0)
            elif len(members) > 1 or self._member_of is not member:
                copies.write(i, member.direction, member.coefficient)
        self._member_of = members[0]
        return copies.tensors

    # --- setup ---

    def select_reachable(self, run: Callable[[], Tensor]) -> list[str]:
        """Keep as trainable only the tensors that can change the loss; return the names of the others.

        Left out are poolers and unused heads. The autograd graph of one small forward shows which; no backward is run.
        Of a mixture of experts it runs a few: another entry of a ModuleList stays where one reaches the loss, unless it
        ran without an effect.

        Args:
            run: runs a small forward and returns its logits.
        """
        self._read.clear()
        everything = self.params.tensors
        # The graph is looked at, and not run backward.
        no_activations = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda packed: packed)
        # In theta's dtype: the graph would keep all copies in another one.
        with self.using_compute_dtype(self.params.dtype), torch.enable_grad(), no_activations:
            unreachable = self.params.select_reachable(run())
        reached = self.params.tensors
        entries = {self._entry(name) for name in reached} - {""}
        others = {name for name in unreachable if name not in self._read and self._entry(name) in entries}
        self._read |= others
        self.params.tensors = {name: p for name, p in everything.items() if name in reached or name in others}
        self.perturb_whole([name for name in self.params.tensors if name not in self._read])
        return [name for name in unreachable if name not in others]

    def _entry(self, name: str) -> str:
        """Return a tensor's name without its number in the innermost ModuleList; "" if it is in none."""
        parts = name.split(".")
        for depth in range(len(parts) - 1, 0, -1):
            if ".".join(parts[:depth]) in self._lists:
                return ".".join([*parts[:depth], "*", *parts[depth + 1 :]])
        return ""

    def perturb_whole(self, names: list[str]) -> None:
        """Perturb these tensors in place for each sign, and put their bits back: a module reads them from another."""
        self._read_outside_module, self._planned_for = list(names), self.params.tensors
        self._plans, self._layer_plans, self._member_plans = {}, {}, {}

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """Let forwards compute in `dtype`, and store the frozen weights in it if theta is float32.

        Frozen weights are never updated: to round them once gives the same as to round them in every forward, in less
        memory and time. Embeddings stay as they are: only rows of them are read. Where theta is in half precision,
        so have they, whatever the dtype of the forwards is. Those that are read from a file as they run stay there.
        """
        self.compute_dtype = dtype
        self.perturb_whole(self._read_outside_module)
        if self.params.dtype != torch.float32:
            return
        for module, forward in self._original_forwards.items():
            if not (isinstance(module, nn.Embedding) and forward == nn.Embedding.forward.__get__(module)):
                for p in own_parameters(module).values():
                    if not p.requires_grad and p.dtype != dtype and not self.is_streamed(p):
                        stored, p.data = p.data, p.data.to(dtype)
                        release_file_pages(stored)

    def unpatch(self, module: nn.Module) -> None:
        """Restore a module's original forward: its caller gets the weights that it needs by `perturbed_weight`."""
        module.forward = self._original_forwards.pop(module)

    def perturbed_weight(self, p: Tensor, rows: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a parameter, or some rows of it, as the forward that is running sees it: perturbed.

        Args:
            p: a parameter of the model.
            rows: row numbers, [n], int64, some more than once perhaps; None for the whole tensor.
            dtype: the dtype to round to; the compute dtype when None.

        Returns:
            [n, ...] or p's shape, with a leading dimension of 2 signs in a paired forward; not in the scratch buffer.
        """
        name, dtype = self._names[id(p)], dtype or self.compute_dtype
        if torch.is_grad_enabled() and p.requires_grad:
            self._read.add(name)
            return (p if rows is None else p[rows]).to(dtype)
        if self.perturbation is None or not self._is_perturbed(p):
            value = (p.data if rows is None else p.data[rows]).to(dtype)
            return torch.stack([value, value]) if self._paired else value
        direction, c = self.perturbation.direction, self.perturbation.coefficient
        if rows is None or (p.dim() == 1 and len(rows) * ROW_COST >= p.numel()):
            span = self.params.span_of[name]
            outs = torch.empty(self.num_signs, span.numel, dtype=dtype, device=p.device)
            self.params.noise.perturb(direction, span, c, *outs)
            outs = outs[:, : p.numel()].view(self.num_signs, *p.shape)
            outs = outs if rows is None else outs[:, rows]
        else:
            outs = torch.empty(self.num_signs, len(rows), *p.shape[1:], dtype=dtype, device=p.device)
            self.params.noise.perturb_rows(direction, name, p.data, rows, c, *outs)
        return outs if self._paired else outs[0]

    # --- patched forwards ---

    def _patch(self, model: nn.Module) -> None:
        for module in model.modules():
            if not any(True for _ in module.parameters(recurse=False)):
                continue
            self._original_forwards[module] = module.forward
            patched = self._lookup_forward if is_plain_embedding(module) else self._module_forward
            module.forward = PatchedForward(patched, module, module.forward)
        for layers in model.modules():
            for layer in layers if isinstance(layers, nn.ModuleList) else ():
                layer.forward = PatchedForward(self._layer_forward, layer, layer.forward)
        self._patched = [module for module in model.modules() if isinstance(module.forward, PatchedForward)]

    def _lookup_forward(self, module: nn.Module, original_forward: Callable[..., Tensor], input: Tensor) -> Tensor:
        """Run an embedding; only the rows that the batch looks up are perturbed."""
        ids = input  # nn.Embedding's name for it
        weight = module.get_parameter("weight")
        if torch.is_grad_enabled():
            self._read.update([self._names[id(weight)]] if weight.requires_grad else [])
            rows = original_forward(ids)
            return rows.to(self.compute_dtype) if self._is_rounded(weight) else rows
        if not self._is_perturbed(weight) and not self._is_rounded(weight):
            return original_forward(ids)
        # z is drawn for a row per id, again for an id that repeats: to find the distinct ones, the host would wait for
        # the device, and the ids would decide how many rows there are. A table with fewer rows is drawn whole.
        if self._paired:
            ids = ids.chunk(2)[0]  # both signs look up the same rows
        if len(weight) > ids.numel():
            rows = self.perturbed_weight(weight, ids.flatten()).unflatten(-2, ids.shape)
        else:
            table = self.perturbed_weight(weight)
            rows = table[:, ids] if self._paired else table[ids]
        return rows.flatten(0, 1) if self._paired else rows

    def _layer_forward(self, layer: nn.Module, inner_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer; z is drawn for all of its modules at once, if they are small enough together."""
        if not self.layer_elements or self.perturbation is None or self._calls or self.params.noise.has_factors:
            return inner_forward(*args, **kwargs)
        key = layer, self.compute_dtype
        if key not in self._layer_plans:
            modules = [m for m in layer.modules() if m in self._original_forwards and not is_plain_embedding(m)]
            owners = [owner for owner in map(self._owner, modules) if not owner.rounded]
            self._layer_plans[key] = Plan(self.params, owners)
        plan = self._layer_plans[key]
        if plan.is_empty or plan.size(1) > self.layer_elements:
            return inner_forward(*args, **kwargs)
        with self._written(plan) as calls, swapped("_calls", {self: calls}):
            return inner_forward(*args, **kwargs)

    def _module_forward(
        self, module: nn.Module, original_forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run any other module with perturbed copies of its parameters, written to the scratch buffer."""
        call = self._calls.get(module)
        if call is not None:
            return call(*args, **kwargs)
        if torch.is_grad_enabled():
            own = own_parameters(module)
            self._read.update(self._names[id(p)] for p in own.values() if p.requires_grad)
            rounded = {key: p.to(self.compute_dtype) for key, p in own.items() if self._is_rounded(p)}
            return swap_params(module, rounded, original_forward, *args, **kwargs)
        plan = self._plan(module)
        if plan.is_empty:
            return original_forward(*args, **kwargs)
        if type(module) is nn.Linear and (factors := self._factors_of(module.weight)) is not None:
            return self._factored_linear(module, factors, *args, **kwargs)
        with self._written(plan) as calls:
            return calls[module](*args, **kwargs)

    def _factors_of(self, weight: Tensor) -> Factors | None:
        """Return z of a weight if its forward uses the factors: in float32, where no weight is rounded."""
        noise = self.params.noise
        if not (self.uses_factors and noise.has_factors and self._is_perturbed(weight)):
            return None
        if self.compute_dtype != torch.float32 or self.params.dtype != torch.float32:
            return None
        if self.perturbation is None or (self.num_signs == 2 and not self._paired):
            return None  # the latter is refused
        return noise.factors(self.perturbation.direction, self._names[id(weight)], weight.shape, weight.device)

    def _factored_linear(self, module: nn.Linear, factors: Factors, input: Tensor) -> Tensor:
        """Return x (W + c U V^T)^T + bias as x W^T + c (x V) U^T + bias: U V^T is not computed."""
        assert self.perturbation is not None
        _, eps, signs = self.perturbation
        biases: list[dict[str, Tensor]] = [{}] * len(signs)
        if module.bias is not None:
            biases = [{"bias": bias} for bias in self.perturbed_weight(module.bias).view(-1, module.out_features)]
        out = self._run_linear(module, biases, input)
        for sign, half, target in zip(signs, input.chunk(len(signs)), out.chunk(len(signs)), strict=True):
            x, into = half.reshape(-1, module.in_features), target.view(-1, module.out_features)
            into.addmm_(x @ factors.right, factors.left.t(), alpha=sign * eps)
        return out

    def _plan(self, module: nn.Module) -> Plan:
        """Return the plan of a module that is perturbed alone; made once for the trainable tensors."""
        key = module, self.perturbation is not None, self.compute_dtype
        if key not in self._plans:
            self._plans[key] = Plan(self.params, [self._owner(module)])
        return self._plans[key]

    def _owner(self, module: nn.Module) -> Owner:
        """Return which of a module's parameters its forward sees copies of now."""
        own = own_parameters(module)
        names = {attribute: self._names[id(p)] for attribute, p in own.items() if self._is_perturbed(p)}
        rounded = {name: p for name, p in own.items() if name not in names and self._is_rounded(p)}
        return Owner(module, self._original_forwards[module], names, rounded)

    @contextmanager
    def _written(self, plan: Plan) -> Iterator[Calls]:
        """Write the parameters of a plan to the scratch buffer as each sign sees them; yield what runs its modules."""
        signs = self.num_signs if plan.spans else 1
        if signs == 2 and not self._paired:
            raise RuntimeError("a forward with both signs goes through `forward_per_sign` or `paired_forward`")
        with self.scratch.allocate(plan.size(signs), self.compute_dtype, plan.device) as buffer:
            calls = plan.calls(buffer, signs, self._call_of)
            for span, outs in plan.perturbed:
                assert self.perturbation is not None
                self.params.noise.perturb(self.perturbation.direction, span, self.perturbation.coefficient, *outs)
            for p, out in plan.rounded:
                out.copy_(p.data)
            yield calls

    def _call_of(self, owner: Owner, copies: Copies) -> Callable[..., Any]:
        """Return what runs a module with these copies; with two signs, on both halves of a paired batch."""
        module, signs = owner.module, len(next(iter(copies.values())))
        of_signs = [{key: copy[i] for key, copy in copies.items()} for i in range(signs)]
        if signs == 1:
            return partial(swap_params, module, of_signs[0], owner.forward)
        if type(module) is nn.Linear:
            if "weight" in copies and (module.bias is None or "bias" in copies):
                return PairedLinear(copies["weight"], copies.get("bias"))
            return partial(self._run_linear, module, of_signs)
        if type(module) is nn.LayerNorm and copies.keys() == {"weight", "bias"}:
            return partial(layer_norm_per_sign, module, copies["weight"].unsqueeze(1), copies["bias"].unsqueeze(1))
        return partial(self._run_halves, owner, of_signs)

    def _run_linear(self, module: nn.Linear, of_signs: Sequence[Mapping[str, Tensor]], input: Tensor) -> Tensor:
        """Run a linear layer of which not all parameters have copies: its own, too, may be others at every call."""
        pairs = [(copies.get("weight", module.weight).t(), copies.get("bias", module.bias)) for copies in of_signs]
        out = linear_per_sign(pairs, input.reshape(len(pairs), -1, module.in_features))
        return out.view(*input.shape[:-1], module.out_features)

    def _run_halves(self, owner: Owner, of_signs: list[dict[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
        """Run a module on both halves of a paired batch, one after the other, each with its own weights."""
        assert self.perturbation is not None
        direction, eps, signs = self.perturbation
        outputs = []
        # The modules inside see one sign at a time.
        with swapped("_paired", {self: False}), swapped("_calls", {self: {}}):
            for index, sign in enumerate(signs):
                half = [split_signs(value, index) for value in args]
                named = {key: split_signs(value, index) for key, value in kwargs.items()}
                with self.perturbed(direction, eps, (sign,)):
                    outputs.append(swap_params(owner.module, of_signs[index], owner.forward, *half, **named))
        return torch.cat(outputs)

    def _is_perturbed(self, p: Tensor) -> bool:
        """Whether patched forwards see this parameter perturbed now."""
        name = self._names[id(p)]
        return self.perturbation is not None and name in self.params.tensors and name not in self._read_outside_module

    def _is_rounded(self, p: Tensor) -> bool:
        """Whether patched forwards see this parameter in another dtype than it is stored in."""
        return self._rounds and p.dtype != self.compute_dtype


class PatchedForward(partial[Any]):
    """A module's patched forward: `PatchedForward(function, module, original_forward)`.

    A copy of the module (copy.deepcopy, torch.save) gets the original forward, bound to the copy: it is no part of
    the model that is trained, and reads its own weights.
    """

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original forward: its signature is what transformers looks at."""
        original: Callable[..., Any] = self.args[1]
        return original

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce__(self) -> Any:
        return _identity, (self.__wrapped__,)


def _identity(value: Any) -> Any:
    return value


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters, without those that a module inside it owns too: that one reads them."""
    own = {key: p for key, p in module._parameters.items() if p is not None}
    if own and any(True for _ in module.children()):
        inside = {id(p) for child in module.children() for p in child.parameters()}
        own = {key: p for key, p in own.items() if id(p) not in inside}
    return own


def is_plain_embedding(module: nn.Module) -> bool:
    """Return whether a module looks up rows and no more.

    A subclass's own forward may scale them, or find positions; with `max_norm` rows are scaled first.
    """
    plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    return plain and module.max_norm is None
