"""First-order baselines, by backpropagation: AdamW (the paper's FT, its appendix D) and SGD.

They use the same loop, data, batches and metrics as MeZO, but also need memory for activations and for a gradient of
theta's size, and AdamW for two moments, SGD with momentum for one. With `micro_batch_size` the activations are those of
so many rows: one backward after the other adds to the gradient. With `model.checkpoint_activations` they are those of
one layer, and the inputs of all: each layer is computed again in the backward.
There is no trajectory: a run resumes from the checkpoint `last`, which has the moments beside the weights.

    AdamW   m <- b1 m + (1 - b1) grad,  v <- b2 v + (1 - b2) grad^2,
            theta <- (1 - lr wd) theta - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + adam_eps)
            (Loshchilov and Hutter 2019, arXiv 1711.05101; with wd = 0 Adam, Kingma and Ba 2015, arXiv 1412.6980)
    SGD     m <- momentum m + grad + wd theta,  theta <- theta - lr m        (torch.optim.SGD: the decay goes into m)

The gradient's norm is first clipped to `max_grad_norm`, as in the published trainer (null: never). Weight decay acts
on every tensor. The weights and their updates stay in float32 where the forward computes in bfloat16. The dropout rate
is the model's own, or `dropout`: on during a step, off in evaluations, the same if a step is repeated.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from mezo_cli.config.optimizers import AdamWConfig, FirstOrderConfig, SgdConfig
from mezo_cli.optim.base import LossFn, PartsLossFn, StatefulOptimizer, StepResult, learning_rate

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mezo_cli.perturb.forward import PerturbedForward


class FirstOrder(StatefulOptimizer):
    """An optimizer of torch.optim, given the gradient of the loss."""

    config: FirstOrderConfig

    def __init__(self, config: FirstOrderConfig, seed: int, steps: int) -> None:
        self.config, self.seed, self.steps = config, seed, steps
        self._torch: torch.optim.Optimizer | None = None  # made at the first step, over the trainable tensors
        self._names: dict[Tensor, str] = {}
        self._loaded: dict[str, Tensor] = {}

    @abstractmethod
    def make(self, tensors: "list[torch.nn.Parameter]") -> "torch.optim.Optimizer":
        """Return torch's optimizer over the trainable tensors; each step sets its learning rate."""

    def step(self, forward: "PerturbedForward", loss_fn: LossFn, step: int) -> StepResult:
        """Take step number `step` (from 0). `loss_fn` returns the loss of one fixed batch, with its graph."""
        import torch

        config, lr = self.config, learning_rate(self.config, step, self.steps)
        if self._torch is None:
            self._names = {p: name for name, p in forward.params.tensors.items()}
            self._torch = self.make(list(forward.params.tensors.values()))
            for p, name in self._names.items():
                state = {key[: -len(name) - 1]: v for key, v in self._loaded.items() if key.split(":", 1)[1] == name}
                if state:  # torch keeps `step`, a count, on the CPU
                    self._torch.state[p] = {k: v if k == "step" else v.to(p.device) for k, v in state.items()}
            self._loaded = {}
        limit = math.inf if config.max_grad_norm is None else config.max_grad_norm
        losses = []
        with torch.enable_grad():
            for loss in loss_fn.parts() if isinstance(loss_fn, PartsLossFn) else [loss_fn()]:
                losses.append(loss.detach())
                if loss.requires_grad:  # one that is not finite may be a constant
                    loss.backward()
        clipped = torch.nn.utils.clip_grad_norm_(list(self._names), limit)
        value, norm = torch.stack([torch.stack(losses).sum(), clipped]).tolist()  # both at once: reading waits
        if not math.isfinite(value):
            norm = math.nan
        if math.isfinite(norm):  # else theta is left as it was, and the loop ends the run
            for group in self._torch.param_groups:
                group["lr"] = lr
            self._torch.step()
        self._torch.zero_grad(set_to_none=True)
        return StepResult(value, [], lr, {"grad_norm": norm})  # before clipping

    def save_state(self, path: Path) -> None:
        """Write moments and counts as safetensors named `KIND:PARAMETER`; before any step, what was loaded."""
        import safetensors.torch

        state = self._loaded
        if self._torch is not None:
            of_each = {name: self._torch.state.get(p, {}) for p, name in self._names.items()}
            state = {
                f"{key}:{name}": v for name, values in of_each.items() for key, v in values.items() if v is not None
            }
        safetensors.torch.save_file({name: tensor.cpu().contiguous() for name, tensor in state.items()}, path)

    def load_state(self, path: Path) -> None:
        """Read what `save_state` wrote, before the first step."""
        from mezo_cli.models.stored_tensors import read_tensors

        self._loaded, _ = read_tensors(path)


class AdamW(FirstOrder):
    """Adam with decoupled weight decay: the paper's FT, with weight decay 0."""

    config: AdamWConfig

    def make(self, tensors: "list[torch.nn.Parameter]") -> "torch.optim.Optimizer":
        """Return torch's AdamW."""
        import torch

        c = self.config
        return torch.optim.AdamW(tensors, betas=(c.beta1, c.beta2), eps=c.adam_eps, weight_decay=c.weight_decay)


class Sgd(FirstOrder):
    """Stochastic gradient descent, with heavy-ball momentum if `momentum` is above 0."""

    config: SgdConfig

    def make(self, tensors: "list[torch.nn.Parameter]") -> "torch.optim.Optimizer":
        """Return torch's SGD."""
        import torch

        c = self.config
        return torch.optim.SGD(tensors, momentum=c.momentum, weight_decay=c.weight_decay)


def set_rate(model: "torch.nn.Module", rate: float) -> None:
    """Set the rate of all dropout of a model: its dropout modules, and the attributes that attention reads."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = rate
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, rate)


@contextmanager
def dropout(model: "torch.nn.Module", seed: int, step: int) -> Iterator[None]:
    """Turn the model's dropout on, drawn from (seed, step) alone: a repeated step drops the same units.

    The states of torch's global generators are restored. Their streams differ between CPU and CUDA.
    """
    import torch

    device = next(model.parameters()).device
    key = blake2b(f"dropout\0{seed}\0{step}".encode(), digest_size=7).digest()  # torch takes a seed of up to 63 bits
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(key, "little"))
        model.train()
        try:
            yield
        finally:
            model.eval()
