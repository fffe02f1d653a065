"""The first-order baselines, by backpropagation: AdamW (the paper's FT, its appendix D) and SGD.

They run on the loop, data, batches and metrics of the others, and are the only methods that may spend memory on
activations and gradients: a gradient of theta's size and, for AdamW, two moments of it, for SGD with momentum one.
There is no trajectory: a run goes on from the checkpoint `last`, which holds the moments beside the weights.

    AdamW   m <- b1 m + (1 - b1) grad,  v <- b2 v + (1 - b2) grad^2,
            theta <- (1 - lr wd) theta - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + adam_eps)
            (Loshchilov and Hutter 2019, arXiv 1711.05101; with wd = 0 Adam, Kingma and Ba 2015, arXiv 1412.6980)
    SGD     m <- momentum m + grad + wd theta,  theta <- theta - lr m        (torch.optim.SGD: the decay goes into m)

A gradient longer than `max_grad_norm` is scaled down to it first, as in the reference's trainer (null: never). Weight
decay acts on every tensor. The weights, and what is done with them here, stay in float32 where the forward computes in
bfloat16. Dropout is the model's own, or `dropout` (see dropout.py).
"""

import math
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from mezo_cli.errors import UserError
from mezo_cli.optim.step import LossFn, learning_rate
from mezo_cli.params import Params
from mezo_cli.schema import OptimizerConfig


@dataclass(frozen=True)
class GradientResult:
    """What one step by backpropagation saw: the loss before it, and the gradient's norm before it was clipped."""

    loss: float
    grad_norm: float
    lr: float

    @property
    def projected_grads(self) -> list[float]:
        """None: the step cannot be replayed from scalars."""
        return []

    def scalars(self) -> dict[str, float]:
        """Return what a line of metrics.jsonl says of the step."""
        return {"loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr}


class FirstOrder:
    """A method of torch.optim. Its state follows from no scalars: `save` writes it, `load` takes it up again."""

    def __init__(self, config: OptimizerConfig, seed: int, steps: int) -> None:
        self.config, self.seed, self.steps = config, seed, steps
        self._torch: torch.optim.Optimizer | None = None  # made at the first step, when the live tensors are known
        self._names: dict[Tensor, str] = {}
        self._loaded: dict[str, Tensor] = {}

    def make(self, tensors: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return torch's optimizer over the live tensors."""
        raise NotImplementedError

    def passes(self, steps: int) -> dict[str, int]:
        """One forward and one backward a step."""
        return {"forwards": steps, "backwards": steps}

    @torch.enable_grad()
    def step(self, params: Params, loss_fn: LossFn, step: int) -> GradientResult:
        """Do step number `step` (from 0). `loss_fn` gives the loss of one fixed batch, to be differentiated."""
        config, lr = self.config, learning_rate(self.config, step, self.steps)
        optimizer = self._torch or self._begin(params)
        loss = loss_fn()
        norm = math.nan
        if math.isfinite(loss.item()):
            loss.backward()
            limit = math.inf if config.max_grad_norm is None else config.max_grad_norm
            norm = float(torch.nn.utils.clip_grad_norm_(list(self._names), limit))
        if math.isfinite(norm):  # the loop stops a run where it is not; theta is left as it was
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return GradientResult(loss.item(), norm, lr)

    def _begin(self, params: Params) -> torch.optim.Optimizer:
        self._names = {p: name for name, p in params.tensors.items()}
        self._torch = self.make(list(params.tensors.values()))
        for p, name in self._names.items():
            held = {key.split(":", 1)[0]: value for key, value in self._loaded.items() if key.split(":", 1)[1] == name}
            if held:  # `step` is a count that torch keeps on the CPU
                self._torch.state[p] = {k: v if k == "step" else v.to(p.device) for k, v in held.items()}
        self._loaded = {}
        return self._torch

    def save(self, path: Path) -> None:
        """Write the moments and counts as safetensors named `KIND:PARAMETER`; what was loaded, before any step."""
        state = self._loaded
        if self._torch is not None:
            held = {name: self._torch.state.get(p, {}) for p, name in self._names.items()}
            state = {f"{key}:{name}": v for name, values in held.items() for key, v in values.items() if v is not None}
        safetensors.torch.save_file({name: tensor.cpu().contiguous() for name, tensor in state.items()}, path)

    def load(self, path: Path) -> None:
        """Take up what `save` wrote, before the first step.

        Raises:
            UserError: when the file is missing or damaged.
        """
        try:
            self._loaded = safetensors.torch.load_file(path)
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged: {error}") from error


class AdamW(FirstOrder):
    """Adam with decoupled weight decay: the paper's FT, which decays nothing."""

    def make(self, tensors: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return torch's AdamW."""
        c = self.config
        return torch.optim.AdamW(
            tensors, lr=c.lr, betas=(c.beta1, c.beta2), eps=c.adam_eps, weight_decay=c.weight_decay
        )


class Sgd(FirstOrder):
    """Stochastic gradient descent, with heavy-ball momentum where `momentum` is above 0."""

    def make(self, tensors: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return torch's SGD."""
        c = self.config
        return torch.optim.SGD(tensors, lr=c.lr, momentum=c.momentum, weight_decay=c.weight_decay)
