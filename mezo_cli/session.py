"""A model, what judges it and what moves it, put together."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mezo_cli import models
from mezo_cli.dropout import dropout, set_rate
from mezo_cli.errors import UserError
from mezo_cli.models import adapters
from mezo_cli.noise import make_noise
from mezo_cli.objectives import LOSSES, OBJECTIVES, check_served
from mezo_cli.objectives.batches import Batch
from mezo_cli.optim import OPTIMIZERS, Optimizer, StepResult
from mezo_cli.params import Params
from mezo_cli.schema import Config, Encoded, Example
from mezo_cli.tasks import INPUTS, Inputs


@dataclass
class Session:
    """A model, what judges it and what moves it, ready to run."""

    config: Config
    loaded: models.Loaded
    params: Params
    objective: Any
    optimizer: Optimizer
    inputs: Inputs

    def batch(self, rows: Sequence[Encoded]) -> Batch:
        """Pad rows to their own longest, on the model's device."""
        loaded = self.loaded
        return Batch.of(rows, loaded.pad_id, loaded.device, loaded.uses_segments)

    def loss(self, batch: Batch) -> Tensor:
        """Return the objective's loss of a batch, float32, at wherever the parameters are seen.

        Under `torch.enable_grad` it can be differentiated.

        Returns:
            shape [], or [2] where both sides of a step are in force; nan where a score is no number.
        """
        if self.params.sides == 2 and not self.objective.carries(batch):
            return self.params.each_side(lambda: self.loss(batch))
        logits = self.objective.logits(batch)
        if logits.dim() == 3:
            return torch.stack([self._loss_of(side, batch) for side in logits])
        return self._loss_of(logits, batch)

    def _loss_of(self, logits: Tensor, batch: Batch) -> Tensor:
        if not bool(logits.isfinite().all()):  # a loss that counts hits would take it for a miss
            return torch.tensor(math.nan)
        return LOSSES[self.config.objective.loss](logits, batch.labels)

    def step(self, rows: Sequence[Encoded], step: int) -> StepResult:
        """Do step number `step` (from 0) on a batch of rows."""
        off = nullcontext()  # the model is in eval mode: MeZO runs without dropout (paper, section 2)
        drop = dropout(self.loaded.model, self.config.seed, step) if self.config.method.backward else off
        with drop:
            return self.optimizer.step(self.params, partial(self.loss, self.batch(rows)), step)

    def tuned(self) -> dict[str, Any]:
        """Return what is trainable: the number of scalars, their share of the model's, the tensors' names."""
        count, names = self.params.count, list(self.params.tensors)
        return {"count": count, "share": count / adapters.size(self.loaded.model), "names": names}


def prepare(config: Config, checkpoint: Path | None = None) -> Session:
    """Load the model, or a checkpoint of its run when given, and put the pieces together."""
    task, whole = config.task, config.peft.name == "none"
    source = models.at(config.model, str(checkpoint)) if checkpoint is not None and whole else config.model
    loaded = models.load(source, config.objective.name, task.labels, config.seed)
    if config.init == "linear_probe" and config.objective.name != "cls" and config.peft.name != "head":
        models.untie(loaded.model)  # the probe's rows are the decoder's own; a checkpoint of the run has them already
    adapters.attach(loaded, config.peft, config.model, config.objective.name, config.seed)
    if checkpoint is not None and not whole:
        loaded.adapter.load(checkpoint)
    inputs = INPUTS[config.objective.name](task, loaded.tokenizer)
    if config.optimizer.dropout is not None:
        set_rate(loaded.model, config.optimizer.dropout)
    optimizer = OPTIMIZERS[config.optimizer.name](config.optimizer, config.seed, config.steps)
    return Session(config, loaded, *_judged(config, loaded, inputs), optimizer, inputs)


@torch.no_grad()
def _judged(config: Config, loaded: models.Loaded, inputs: Inputs) -> tuple[Params, Any]:
    """Put the lens and the objective over a model, and hold them against its own forward on two short rows."""
    kind, label_ids = OBJECTIVES[config.objective.name], inputs.label_ids
    rows = inputs.encode_all([Example((text,) * len(config.task.columns), 0) for text in ("a", "a a a")])
    name = f"model.path={config.model.path}: {type(loaded.model).__name__}"
    probe = Batch.of(rows, loaded.pad_id, loaded.device, loaded.uses_segments)
    try:
        stock = kind.stock(loaded.model, probe, label_ids)
        params = Params(loaded.model, make_noise(config.optimizer.noise))
        objective = kind(loaded.model, params, label_ids)
        check_served(objective.logits(probe), stock, loaded.device.type, name)
        params.compute_in(loaded.compute_dtype)
        objective.logits(probe)  # a family may refuse to compute in it
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:  # a family with ways of its own
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{name} is a family that is not served by objective={config.objective.name}: {first}"
        ) from error
    return params, objective
