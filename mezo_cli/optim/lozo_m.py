"""LOZO-M (Chen et al. 2024, arXiv 2410.07698, section 4): LOZO with momentum in the space of U.

    N <- beta N + (1 - beta) g U,   W <- W - lr (N V^T / r + wd W)           on a matrix W [m, n]; z = U V^T as lozo.py
    N <- N V_old^T V_new / n        first, at a step with a new V

On other tensors m <- beta m + (1 - beta) g z, dense. For independent gaussian V the projection leaves about sqrt(r / n)
of the norm of N (0.06 for r 4 and n 1024): nearly a restart, at every `interval` steps. The first one of a process is
logged with what it leaves, beside sqrt(r / n). beta 0.9, from the paper's grid 0.5, 0.7, 0.9; the rest as in lozo.py.

A step costs two forwards. The state is N, [m, r] per matrix, and m of the other tensors: 4 bytes per element, stored in
the checkpoint `last`. `beta: 0` is LOZO, bit for bit. The products with V are sums in a fixed order.
"""

import logging
from typing import TYPE_CHECKING

from mezo_cli.config.optimizers import LozoMConfig
from mezo_cli.config.schema import StepRecord
from mezo_cli.optim.base import StoredState, to_float32
from mezo_cli.optim.lozo import Lozo, low_rank_noise
from mezo_cli.perturb.noise import Direction

if TYPE_CHECKING:
    from torch import Tensor

    from mezo_cli.perturb.params import Params

log = logging.getLogger("mezo")


class LozoM(StoredState, Lozo):
    """LOZO with momentum. `rebuild_state` and `apply_updates` need every step of a run once, in order."""

    config: LozoMConfig

    def __init__(self, config: LozoMConfig, seed: int, steps: int) -> None:
        super().__init__(config, seed, steps)
        self._next = 0
        self._momentum: dict[str, Tensor] = {}  # N of a matrix, m of another tensor
        self._said = False

    def rebuild_state(self, params: "Params", records: list[StepRecord]) -> None:
        """Rebuild the momentum from all steps so far; theta stays."""
        for record in records:
            self.direction(params, record)

    def direction(self, params: "Params", record: StepRecord) -> "dict[str, Tensor]":
        """Return the momentum, after the update of it."""
        step, new = record[0], super().direction(params, record)
        if step != self._next:
            raise RuntimeError(f"momentum needs every step in order: got step {step}, expected {self._next}")
        if step and step % self.config.interval == 0:
            self._project(params, step)
        beta = to_float32(self.config.beta)
        weight = to_float32(1 - self.config.beta)
        for name, estimate in new.items():
            old = self._momentum.get(name)
            decayed = 0.0 if old is None else old.to(estimate.device) * beta
            self._momentum[name] = estimate * weight + decayed
        self._next += 1
        return self._momentum

    def _project(self, params: "Params", step: int) -> None:
        """Apply N <- N V_old^T V_new / n to every matrix."""
        noise, before, after, expected = low_rank_noise(params), 0.0, 0.0, 0.0
        for name, p in params.tensors.items():
            if not noise.is_matrix(p.shape):
                continue
            old, shape = self._momentum[name], tuple(p.shape)
            sides = (noise.right(Direction(self.seed, at), name, shape, old.device) for at in (step - 1, step))
            projected = self._momentum[name] = project(old, *sides)
            if not self._said:
                norm = float(old.square().sum())
                before, after = before + norm, after + float(projected.square().sum())
                expected += norm * self.config.rank / shape[1]
        if not self._said and before:
            self._said, left, by_formula = True, (after / before) ** 0.5, (expected / before) ** 0.5
            line = "step %d: with a new V %.2g of the momentum's norm is left (sqrt(r / n) is %.2g over the matrices)"
            log.info(line, step + 1, left, by_formula)

    def state_tensors(self) -> "dict[str, Tensor]":
        """Return the momentum, named `m:PARAMETER`, and `next`."""
        import torch

        tensors = {f"m:{name}": tensor.cpu() for name, tensor in self._momentum.items()}
        tensors["clip"] = torch.tensor(self.clip.past, dtype=torch.float64)
        return tensors | {"next": torch.tensor(self._next)}

    def load_tensors(self, tensors: "dict[str, Tensor]", step: int) -> None:
        """Take over what `state_tensors` returned after `step` steps."""
        if "next" not in tensors or int(tensors["next"]) != step:
            raise ValueError(f"it does not hold the state of {self.config.name} at step {step}")
        self._next = step
        self.clip.restore(tensors["clip"].tolist())
        self._momentum = {key.removeprefix("m:"): value for key, value in tensors.items() if key.startswith("m:")}


def project(moving: "Tensor", old: "Tensor", new: "Tensor") -> "Tensor":
    """Return N V_old^T V_new / n, float32 [m, r], the same bits on every device."""
    import torch

    old, new = old.to(moving.device), new.to(moving.device)
    products = old.double()[:, :, None] * new.double()[:, None, :]  # exact
    rows = 1 << (len(products) - 1).bit_length()
    products = torch.cat([products, products.new_zeros(rows - len(products), *products.shape[1:])])
    while len(products) > 1:  # pairwise: a library's sum differs from device to device
        products = products[: len(products) // 2] + products[len(products) // 2 :]
    weights = (products[0] / len(old)).float()  # [r, r]
    projected = moving[:, :1] * weights[0]
    for k in range(1, len(weights)):
        projected = projected + moving[:, k : k + 1] * weights[k]
    return projected
