"""How each module of a model runs: decided when it first does, for what forwards see, and bound.

A module that owns parameters gets a patched forward: its original one where it sees no copies of them, else a `Plan`,
which writes the perturbed and the rounded copies to a scratch buffer just before they are used; an embedding looks up
perturbed rows. The modules of a small layer have copies that are written together.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mezo_cli.perturb.functional import is_plain_embedding, swap_params
from mezo_cli.perturb.noise import Factors
from mezo_cli.perturb.noise.spans import SEGMENT
from mezo_cli.perturb.plan import BOTH, MODES, NOTED, ONE_SIGN, PAIRED, THETA, Owner, Plan, Way, run_linear
from mezo_cli.perturb.reach import own_parameters

if TYPE_CHECKING:
    from mezo_cli.perturb.forward import PerturbedForward

# The most elements of a layer whose modules are perturbed together, before it runs. On a CPU so few that the layer and
# its copies for both signs are in L2 (384 KiB); each module of a larger one is perturbed alone, and read while cached.
LAYER_ELEMENTS = {"cpu": 1 << 15}
LAYER_ELEMENTS_ELSEWHERE = SEGMENT


class PatchedForward:
    """A module's patched forward.

    A copy of the module (copy.deepcopy, torch.save) gets the original forward, bound to the copy: it is no part of
    the model that is trained, and reads its own weights.

    Attributes:
        ways: what runs the module, by what forwards see (`THETA`, ...).
    """

    def __init__(self, module: nn.Module, forward: "PerturbedForward", way_of: Callable[..., Way]) -> None:
        self.module, self.__wrapped__ = module, module.forward  # its signature is what transformers looks at
        self._forward, self._way_of = forward, way_of
        self.ways: list[Way] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.ways[self._forward.mode](*args, **kwargs)

    def decide(self, mode: int, *args: Any, **kwargs: Any) -> Any:
        """Decide what runs the module from now on where forwards see this, and run it."""
        if mode == NOTED:
            reach, parameters = self._forward.reach, own_parameters(self.module).values()
            reach.read.update(reach.names[id(p)] for p in parameters if p.requires_grad)
        self.ways[mode] = way = self._way_of(self, THETA if mode == NOTED else mode)
        return way(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce__(self) -> Any:
        return _identity, (self.__wrapped__,)


def _identity(value: Any) -> Any:
    return value


class Patches:
    """The patched forwards of a model's modules, and how each module runs.

    Attributes:
        modules: module -> its patched forward, of those that own parameters.
        layers: those of the entries of ModuleLists: a second one, where a layer has parameters of its own.
        layer_elements: the most elements of a layer whose modules are perturbed together.
        scratch: where the copies of parameters are, in bytes, as large as the largest module needs: modules run one
            after another. Views into the one before stay valid: they hold its storage.
        scratch_used: bytes; for more than one module where a module with parameters calls another.
        decided_for: what is perturbed, and how, as it was when the ways were last decided.
    """

    def __init__(self, forward: "PerturbedForward", model: nn.Module, rounds: bool) -> None:
        self.layer_elements = LAYER_ELEMENTS.get(next(model.parameters()).device.type, LAYER_ELEMENTS_ELSEWHERE)
        self.scratch, self.scratch_used = torch.empty(0, dtype=torch.uint8), 0
        self._forward, self._rounds = forward, rounds
        self.decided_for: tuple[Any, ...] = ()
        self.modules: dict[nn.Module, PatchedForward] = {}
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                way = self._embedding_way if is_plain_embedding(module) else self._module_way
                self.modules[module] = module.forward = PatchedForward(module, forward, way)
        self.layers: list[PatchedForward] = []
        for layers in model.modules():
            for layer in layers if isinstance(layers, nn.ModuleList) else ():
                layer.forward = PatchedForward(layer, forward, self._layer_way)
                self.layers.append(layer.forward)
        self.reset()

    def reset(self) -> None:
        """Decide anew how each module runs, when it next does."""
        for patched in (*self.modules.values(), *self.layers):
            patched.ways = [partial(patched.decide, mode) for mode in MODES]

    def is_perturbed(self, p: Tensor) -> bool:
        """Whether patched forwards see this parameter perturbed where they see z."""
        name = self._forward.reach.names[id(p)]
        return name in self._forward.params.tensors and name not in self._forward.reach.outside

    def is_rounded(self, p: Tensor) -> bool:
        """Whether patched forwards see this parameter in another dtype than it is stored in."""
        return self._rounds and p.dtype != self._forward.compute_dtype

    def _owner(self, module: nn.Module, mode: int) -> Owner:
        parameters, of = own_parameters(module), self._forward.reach.names
        names = {key: of[id(p)] for key, p in parameters.items() if mode != THETA and self.is_perturbed(p)}
        rounded = {key: p for key, p in parameters.items() if key not in names and self.is_rounded(p)}
        return Owner(module, self.modules[module].__wrapped__, names, rounded)

    def _module_way(self, patched: PatchedForward, mode: int) -> Way:
        owner = self._owner(patched.module, mode)
        if not owner.perturbed and not owner.rounded:
            return owner.forward
        if mode == BOTH and owner.perturbed:
            return _refuse
        module = patched.module
        if mode != THETA and type(module) is nn.Linear and self._factors_of(module.weight) is not None:
            return partial(self._factored_linear, module)
        run = Plan(self._forward, [owner], 2 if mode == PAIRED else 1).run
        return partial(self._at_theta, owner, run) if mode == THETA else run

    def _at_theta(self, owner: Owner, run: Way, *args: Any, **kwargs: Any) -> Any:
        """Run a module on rounded parameters, under autograd as part of the graph."""
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        rounded = {key: p.to(self._forward.compute_dtype) for key, p in owner.rounded.items()}
        return swap_params(owner.module, rounded, owner.forward, *args, **kwargs)

    def _embedding_way(self, patched: PatchedForward, mode: int) -> Way:
        """Run an embedding; only the rows that the batch looks up are perturbed, or rounded."""
        weight, look_up = patched.module.get_parameter("weight"), patched.__wrapped__
        if mode != THETA and self.is_perturbed(weight):
            return _refuse if mode == BOTH else partial(self._perturbed_rows, weight, mode == PAIRED)
        dtype = self._forward.compute_dtype
        return (lambda input: look_up(input).to(dtype)) if self.is_rounded(weight) else look_up

    def _perturbed_rows(self, weight: Tensor, paired: bool, input: Tensor) -> Tensor:
        # z is drawn for a row per id, again for an id that repeats: to find the distinct ones, the host would wait for
        # the device, and the ids would decide how many rows there are. A table with fewer rows is drawn whole.
        ids = input.chunk(2)[0] if paired else input  # both signs look up the same rows
        if len(weight) > ids.numel():
            rows = self._forward.perturbed_weight(weight, ids.flatten()).unflatten(-2, ids.shape)
        else:
            table = self._forward.perturbed_weight(weight)
            rows = table[:, ids] if paired else table[ids]
        return rows.flatten(0, 1) if paired else rows

    def _layer_way(self, patched: PatchedForward, mode: int) -> Way:
        run, inside = patched.__wrapped__, set(patched.module.modules())
        if mode not in (ONE_SIGN, PAIRED) or not self.layer_elements or self._forward.params.noise.has_factors:
            return run
        of_modules = {m: one for m, one in self.modules.items() if m in inside and not is_plain_embedding(m)}
        owners = [owner for owner in (self._owner(module, mode) for module in of_modules) if not owner.rounded]
        if not any(owner.perturbed for owner in owners):
            return run
        # A layer inside this one has no copies of its own, then.
        layers = [one for one in self.layers if one.module in inside and one is not patched]
        of_layers = [Owner(one.module, one.__wrapped__, {}, {}) for one in layers]
        plan = Plan(self._forward, [*owners, *of_layers], 2 if mode == PAIRED else 1)
        if sum(span.numel for span in plan.spans) > self.layer_elements:
            return run
        ways = [*(of_modules[owner.module].ways for owner in owners), *(one.ways for one in layers)]
        return partial(self._run_layer, plan, ways, mode, run)

    def _run_layer(self, plan: Plan, ways: list[list[Way]], mode: int, run: Way, *args: Any, **kwargs: Any) -> Any:
        before, ways_before = self.scratch_used, [of_module[mode] for of_module in ways]
        try:
            plan.write()
            for of_module, call in zip(ways, plan.calls, strict=True):
                of_module[mode] = call
            return run(*args, **kwargs)
        finally:
            for of_module, way in zip(ways, ways_before, strict=True):
                of_module[mode] = way
            self.scratch_used = before

    def _factors_of(self, weight: Tensor) -> Factors | None:
        """Return z of a weight if its forward uses the factors: in float32, where no weight is rounded."""
        forward = self._forward
        dtypes, perturbation = {forward.compute_dtype, forward.params.dtype}, forward.perturbation
        if not forward.params.noise.has_factors or dtypes != {torch.float32}:
            return None
        if perturbation is None or not self.is_perturbed(weight):
            return None
        name = forward.reach.names[id(weight)]
        return forward.params.noise.factors(perturbation.direction, name, weight.shape, weight.device)

    def _factored_linear(self, module: nn.Linear, input: Tensor) -> Tensor:
        """Return x (W + c U V^T)^T + bias as x W^T + c (x V) U^T + bias: U V^T is not computed."""
        forward, factors, perturbation = self._forward, self._factors_of(module.weight), self._forward.perturbation
        assert factors is not None
        assert perturbation is not None
        _, eps, signs = perturbation
        biases: list[dict[str, Tensor]] = [{}] * len(signs)
        if module.bias is not None:
            biases = [{"bias": bias} for bias in forward.perturbed_weight(module.bias).view(-1, module.out_features)]
        out = run_linear(module, biases, input)
        for sign, half, target in zip(signs, input.chunk(len(signs)), out.chunk(len(signs)), strict=True):
            x, into = half.reshape(-1, module.in_features), target.view(-1, module.out_features)
            into.addmm_(x @ factors.right, factors.left.t(), alpha=sign * eps)
        return out


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a forward with both signs goes through `forward_per_sign` or `paired_forward`")
