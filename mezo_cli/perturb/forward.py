"""Run a model's forwards with the perturbed weights theta + eps z and theta - eps z, without a write to theta.

The paper's Algorithm 1 adds eps z to the weights in place, subtracts it twice and adds it again: three passes over
theta, after which rounding leaves it slightly off. Here theta stays as it is. Every module that owns parameters gets
a patched forward (patched.py), which writes the module's perturbed weights to a scratch buffer and runs the original
forward with them while they are still in cache. An embedding draws z only for the rows of its batch.

So the update is the only write to theta, a step takes one pass over theta and two forwards, and the peak of
memory is that of a forward plus the largest module. The same patch rounds the weights to the compute dtype.

z is drawn by `params.noise.perturb`, for all tensors of a module at once, and `perturb_rows`, as the module runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from mezo_cli.distributed.ranks import ALONE, Ranks
from mezo_cli.perturb.functional import swapped
from mezo_cli.perturb.noise import Direction
from mezo_cli.perturb.params import Params
from mezo_cli.perturb.patched import Patches
from mezo_cli.perturb.plan import BOTH, NOTED, ONE_SIGN, PAIRED, THETA, Perturbation
from mezo_cli.perturb.reach import Reach, own_parameters
from mezo_cli.process.memory import release_file_pages

# The most tokens of a batch for which one forward computes both signs of a step, by type of device. On a CPU, drawing z
# is a small part of the step in a larger batch, and the activations of two forwards are a large part of the memory.
# Elsewhere a second forward costs its launches.
PAIRED_TOKENS = {"cpu": 1024}
PAIRED_TOKENS_ELSEWHERE = 16384
ROW_COST = 4096  # elements of a vector that are drawn for one of them: a tile of rademacher noise


class PerturbedForward:
    """A model with patched forwards: inside `perturbed(direction, eps)` they see theta +- eps z.

    Args:
        model: a transformers model; the forwards of its modules are replaced for good.
        params: its trainable tensors. Only these are perturbed.
        rounds: whether modules see all weights in the compute dtype, and not in the one that each is stored in.

    Attributes:
        compute_dtype: the dtype that modules see their weights in; theta itself stays in its own.
        perturbation: what forwards see instead of theta; None outside `perturbed`.
        mode: the same, as the place of a module's way: `THETA`, `ONE_SIGN`, ...
        reach: which of the trainable tensors reach the loss.
        patches: how each module runs.
        is_patched: whether forwards are patched: not inside `Population.materialized`.
        paired_tokens: the most tokens of a batch for which one forward should compute both signs.
        ranks: those that share the directions of a step; `ALONE` if this process computes all of them.
        is_streamed: whether a frozen tensor is read from its file as it runs, and never held in another dtype.
        upcoming: inside `losses_of`, all that losses are computed with there, in order; None stands for theta.
    """

    def __init__(self, model: nn.Module, params: Params, rounds: bool = True) -> None:
        self.params, self.compute_dtype = params, torch.float32 if rounds else params.dtype
        self.perturbation: Perturbation | None = None
        self.mode, self.is_patched = THETA, True
        self.paired_tokens = PAIRED_TOKENS.get(next(model.parameters()).device.type, PAIRED_TOKENS_ELSEWHERE)
        self.is_streamed: Callable[[Tensor], bool] = lambda p: False
        self.ranks: Ranks = ALONE
        self.upcoming: Sequence[Perturbation | None] = ()
        self.reach = Reach(model, params)
        self.patches = Patches(self, model, rounds)

    # --- what to compute ---

    @contextmanager
    def seeing(self, perturbation: Perturbation | None, paired: bool = False) -> Iterator[None]:
        """Let patched forwards inside see theta with this perturbation; with both signs `paired`, in one forward."""
        signs = () if perturbation is None else perturbation.signs
        before = self.perturbation, self.mode
        self.perturbation = perturbation
        self.mode = (THETA, ONE_SIGN, PAIRED if paired else BOTH)[len(signs)]
        try:
            yield
        finally:
            self.perturbation, self.mode = before

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
        if not self.is_patched:
            raise RuntimeError("`perturbed` goes around `materialized`: inside, forwards are not patched")
        patches, params = self.patches, self.params
        decided_for = id(params.tensors), params.noise.has_factors, patches.layer_elements
        if patches.decided_for != decided_for:  # what is perturbed, or how, is no longer what it was
            patches.decided_for = decided_for
            patches.reset()
        perturbation = Perturbation(direction, eps, signs)
        names = self.reach.outside if len(signs) == 1 else ()  # no patched forward reads these
        whole = {params.tensors[n]: params.perturbed(n, direction, perturbation.coefficient)[0] for n in names}
        # A graph would be that of theta, not of the perturbed weights.
        with self.seeing(perturbation), swapped("data", whole), torch.no_grad():
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

    def paired_forward(self) -> AbstractContextManager[None]:
        """Let one forward inside compute both signs: its tensors are [2, ...], theta + eps z's half first.

        z is drawn once for both signs, and modules without perturbed weights compute both halves at once.
        """
        if self.num_signs != 2 or self.reach.outside:
            raise ValueError("a paired forward needs both signs, and no weight that is read outside its own module")
        return self.seeing(self.perturbation, paired=True)

    @contextmanager
    def using_compute_dtype(self, dtype: torch.dtype) -> Iterator[None]:
        """Let forwards inside compute in `dtype`."""
        try:
            with swapped("compute_dtype", {self: dtype}):
                self.patches.reset()
                yield
        finally:
            self.patches.reset()

    # --- setup ---

    def select_reachable(self, run: Callable[[], Tensor]) -> list[str]:
        """Keep as trainable only the tensors that can change the loss; return the names of the others: `Reach.select`.

        Args:
            run: runs a small forward and returns its logits.
        """
        # The graph is looked at, and not run backward.
        no_activations = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda packed: packed)
        # In theta's dtype: the graph would keep all copies in another one. Before and after, how each module runs is
        # undecided, and a module notes what it reads as it decides.
        in_dtype, noted = self.using_compute_dtype(self.params.dtype), swapped("mode", {self: NOTED})
        with in_dtype, noted, torch.enable_grad(), no_activations:
            return self.reach.select(self.params, run)

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """Let forwards compute in `dtype`, and store the frozen weights in it if theta is float32.

        Frozen weights are never updated: to round them once gives the same as to round them in every forward, in less
        memory and time. Embeddings stay as they are: only rows of them are read. Where theta is in half precision,
        so have they, whatever the dtype of the forwards is. Those that are read from a file as they run stay there.
        """
        self.compute_dtype = dtype
        self.patches.reset()
        if self.params.dtype != torch.float32:
            return
        for module, patched in self.patches.modules.items():
            if not (isinstance(module, nn.Embedding) and patched.__wrapped__ == nn.Embedding.forward.__get__(module)):
                for p in own_parameters(module).values():
                    if not p.requires_grad and p.dtype != dtype and not self.is_streamed(p):
                        stored, p.data = p.data, p.data.to(dtype)
                        release_file_pages(stored)

    def unpatch(self, module: nn.Module) -> None:
        """Restore a module's original forward: its caller gets the weights that it needs by `perturbed_weight`."""
        module.forward = self.patches.modules.pop(module).__wrapped__

    def perturbed_weight(self, p: Tensor, rows: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a parameter, or some rows of it, as the forward that is running sees it: perturbed.

        Args:
            p: a parameter of the model.
            rows: row numbers, [n], int64, some more than once perhaps; None for the whole tensor.
            dtype: the dtype to round to; the compute dtype when None.

        Returns:
            [n, ...] or p's shape, with a leading dimension of 2 signs in a paired forward; not in the scratch buffer.
        """
        name, dtype, paired = self.reach.names[id(p)], dtype or self.compute_dtype, self.mode == PAIRED
        if torch.is_grad_enabled() and p.requires_grad:
            self.reach.read.add(name)
            return (p if rows is None else p[rows]).to(dtype)
        if self.perturbation is None or not self.patches.is_perturbed(p):
            value = (p.data if rows is None else p.data[rows]).to(dtype)
            return torch.stack([value, value]) if paired else value
        direction, c = self.perturbation.direction, self.perturbation.coefficient
        if rows is None or (p.dim() == 1 and len(rows) * ROW_COST >= p.numel()):
            outs = self.params.perturbed(name, direction, c, dtype, self.num_signs)
            outs = outs if rows is None else outs[:, rows]
        else:
            outs = torch.empty(self.num_signs, len(rows), *p.shape[1:], dtype=dtype, device=p.device)
            self.params.noise.perturb_rows(direction, name, p.data, rows, c, *outs)
        return outs if paired else outs[0]
