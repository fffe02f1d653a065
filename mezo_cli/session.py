"""A model, what judges it and what moves it, put together; and the weights of any step of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mezo_cli import models, trajectory
from mezo_cli.errors import UserError
from mezo_cli.noise import make_noise
from mezo_cli.objectives import LOSSES, OBJECTIVES, Batch
from mezo_cli.optim import OPTIMIZERS, Mezo
from mezo_cli.params import Params
from mezo_cli.runs import Run, verify
from mezo_cli.schema import Config, Encoded
from mezo_cli.tasks import PlainInput, Prompt


@dataclass
class Session:
    """A model, what judges it and what moves it, ready to run."""

    config: Config
    loaded: models.Loaded
    params: Params
    objective: Any
    optimizer: Mezo
    inputs: Prompt | PlainInput

    def batch(self, rows: Sequence[Encoded]) -> Batch:
        """Pad rows to their own longest, on the model's device."""
        loaded = self.loaded
        return Batch.of(rows, loaded.tokenizer.pad_token_id, loaded.device, loaded.uses_segments)

    def loss(self, batch: Batch) -> float:
        """Return the objective's loss of a batch, at wherever the parameters are seen."""
        logits = self.objective.logits(batch)
        return float(LOSSES[self.config.objective.loss](logits, batch.labels))


def prepare(config: Config, path: str | None = None) -> Session:
    """Load the model (from `path` instead of `model.path` when given) and put the pieces together."""
    task = config.task
    source = config.model if path is None else models.at(config.model, path)
    loaded = models.load(source, config.objective.name, task.labels, config.seed)
    inputs = (Prompt if config.objective.name == "mlm" else PlainInput)(task, loaded.tokenizer)
    params = Params(loaded.model, make_noise(config.optimizer.noise), loaded.compute_dtype)
    objective = OBJECTIVES[config.objective.name](loaded.model, params, getattr(inputs, "label_ids", []))
    optimizer = OPTIMIZERS[config.optimizer.name](config.optimizer, config.seed, config.steps)
    return Session(config, loaded, params, objective, optimizer, inputs)


def weights_at(config: Config, run: Run, step: int) -> Session:
    """Return a session that stands at the weights of `step`: from a checkpoint of that step, else replayed."""
    for name in ("best", "last"):
        if run.saved_step(name) == step:
            return from_checkpoint(config, run, name)
    return replayed(config, run, step)


def from_checkpoint(config: Config, run: Run, name: str) -> Session:
    """Load checkpoint `best` or `last` of a run after checking its files."""
    folder = run.checkpoints / name
    if not folder.is_dir():
        raise UserError(f"{folder}: the run has no such checkpoint")
    verify(folder)
    return prepare(config, str(folder))


def replayed(config: Config, run: Run, step: int) -> Session:
    """Rebuild the weights of `step` from the base model and the trajectory: the arithmetic of training itself."""
    path = run.path / "trajectory.bin"
    past = trajectory.read(path)
    if not 0 <= step <= len(past):
        raise UserError(f"step {step}: {path} holds steps 0 to {len(past)}")
    session = prepare(config)
    models.restore(session.loaded.model, run.start_file)
    models.check_fingerprint(session.loaded.model, past.header.fingerprint, path)
    names = {name for name, _ in past.header.tensors}
    session.params.tensors = {name: p for name, p in session.params.tensors.items() if name in names}
    with torch.no_grad():
        session.optimizer.apply(session.params, past.records(0, step))
    return session
