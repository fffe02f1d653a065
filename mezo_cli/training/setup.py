"""Build what a run needs from its config: model, trainable parameters, objective, optimizer, input encoder."""

import logging
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
from mezo_cli.config.schema import Config, Example, ModelConfig, TokenizedExample
from mezo_cli.distributed.ranks import Ranks, current
from mezo_cli.distributed.shard_group import ShardGroup
from mezo_cli.errors import UserError, first_line
from mezo_cli.models import adapters
from mezo_cli.models.parameter_names import count_parameters
from mezo_cli.objectives import OBJECTIVES
from mezo_cli.objectives.base import Objective
from mezo_cli.objectives.collate import Batch, collate
from mezo_cli.objectives.losses import find_loss
from mezo_cli.objectives.reference_check import (
    check_against_reference,
    check_perturbed,
    computing_in_float32,
    flip_weights,
)
from mezo_cli.optim import LossFn, Optimizer, StepResult, optimizer_class
from mezo_cli.optim.dropout import dropout, set_rate
from mezo_cli.optim.settings import FirstOrderConfig, zeroth_order
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import Noise, make_noise
from mezo_cli.perturb.params import Params
from mezo_cli.perturb.shards import gathered_modules, shard_parameters
from mezo_cli.system import is_device_error
from mezo_cli.tasks import InputEncoder
from mezo_cli.training.device_errors import explain_device_errors, smaller_model
from mezo_cli.training.shared_loss import SharedLoss

log = logging.getLogger("mezo")


@dataclass
class Session:
    """A loaded model with its trainable parameters, objective, optimizer and input encoder.

    Attributes:
        loaded: the model and its tokenizer.
        forward: the model's forwards with perturbed weights, and the trainable parameters.
        objective: computes label scores: `objective.logits(batch)`.
        optimizer: updates the parameters.
        encoder: encodes rows for the model.
        ranks: the processes that share the run's steps and evaluations; None if this one is alone.
        shard_group: the ranks that hold parts of the model; None if this process holds all of it.
    """

    config: Config
    loaded: models.LoadedModel
    forward: PerturbedForward
    objective: Objective
    optimizer: Optimizer
    encoder: InputEncoder
    ranks: Ranks | None = None
    shard_group: ShardGroup | None = None

    @property
    def params(self) -> Params:
        """The trainable tensors."""
        return self.forward.params

    def batch(self, rows: Sequence[TokenizedExample]) -> Batch:
        """Collate rows as the objective reads them, on the model's device."""
        return _collate(self.loaded, rows, self.objective)

    def loss_of(self, rows: Sequence[TokenizedExample]) -> LossFn:
        """Return a function that computes the loss of these rows, which are laid out once, in micro-batches.

        Where ranks share the rows, each computes the label scores of its own, and all get the loss of all rows.
        """
        if self.ranks is None or self.ranks.split != "rows":
            return partial(self.loss, *self.micro_batches(rows))
        own = self.micro_batches(self.ranks.own(rows))
        labels = torch.tensor([row.label for row in rows])
        return SharedLoss(find_loss(self.config.objective.loss), labels, self.ranks, partial(self.label_scores, *own))

    def micro_batches(self, rows: Sequence[TokenizedExample]) -> list[Batch]:
        """Collate rows as batches of `micro_batch_size` rows: the whole batch as one where that is null."""
        size = self.config.micro_batch_size or len(rows)
        return [self.batch(rows[start : start + size]) for start in range(0, len(rows), size)]

    def loss(self, *batches: Batch) -> Tensor:
        """Return the objective's loss of a batch with the weights as `self.forward` has them.

        It is differentiable under `torch.enable_grad`.

        Args:
            batches: the batch, or its micro-batches: one forward each, then one loss over the label scores of all rows.

        Returns:
            float64 (float32 on MPS), [], or [2] inside `forward.perturbed` with both signs; nan if a logit is not
            finite.
        """
        logits, labels = self.label_scores(*batches), torch.cat([batch.labels for batch in batches])
        if logits.dim() == 3:
            return torch.stack([self._loss(one_sign, labels) for one_sign in logits])
        return self._loss(logits, labels)

    def label_scores(self, *batches: Batch) -> Tensor:
        """Return the label scores of micro-batches: [rows, labels], or [2, rows, labels] under both signs."""
        if self.forward.num_signs == 2 and not all(map(self.objective.fits_paired_forward, batches)):
            return self.forward.forward_per_sign(lambda: self.label_scores(*batches))
        return torch.cat([self.objective.logits(batch) for batch in batches], dim=-2)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = find_loss(self.config.objective.loss)(logits, labels)
        # The accuracy and f1 losses would count a logit that is not finite as a wrong prediction. No value is read: the
        # host would wait for the device.
        return torch.where(logits.isfinite().all(), loss, math.nan)

    def step(self, rows: Sequence[TokenizedExample], step: int) -> StepResult:
        """Do step number `step` (from 0) on a batch of rows."""
        # MeZO runs without dropout (paper, section 2); the model is in eval mode.
        uses_dropout = self.optimizer.needs_backward
        with dropout(self.loaded.model, self.config.seed, step) if uses_dropout else nullcontext():
            return self.optimizer.step(self.forward, self.loss_of(rows), step)

    def exclude_unreachable(self, row: TokenizedExample, batch: Sequence[TokenizedExample] = ()) -> list[str]:
        """Exclude the parameters that the loss does not depend on; return their names.

        Args:
            row: a row whose forward shows it.
            batch: rows that may reach what this row does not: the experts of a mixture, a branch for long texts.
        """
        everything = self.params.tensors
        frozen = self.objective.frozen if self.config.model.cache_frozen == "auto" else None
        with nullcontext() if frozen is None else frozen.find():
            unreachable = self.forward.select_reachable(lambda: self.objective.logits(self.batch([row])))
        if not batch:
            return unreachable
        known = self.objective.frozen
        count = 0 if known is None else known.count
        if known is not None:
            known.count = 0  # a layer that seems frozen may have an expert that is trained
        left = self.forward.add_reachable(everything, lambda: self.label_scores(*self.micro_batches(batch)))
        if known is not None and len(left) == len(unreachable):
            known.count = count
        return left

    def keep_states(self, *splits: Sequence[TokenizedExample]) -> int:
        """Keep what frozen layers compute for all rows of a split, from when they are first needed.

        A split that would not fit in `model.cache_bytes` beside those before it is left out: which rows are kept
        decides the last bits of a loss, so it must not depend on the order of the batches.

        Returns:
            The memory that the states will take, in bytes.
        """
        frozen, used = self.objective.frozen, 0
        if frozen is None or not frozen.count:
            return used
        for rows in splits:
            needed = frozen.bytes_of(rows)
            if used + needed <= self.config.model.cache_bytes:
                frozen.keep(rows, self.config.eval_batch_size, self.batch)
                used += needed
        return used

    def trainable(self) -> dict[str, Any]:
        """Return the `count` of trainable scalars, their `share` of the model's, and the `names` of the tensors."""
        count, names = self.params.count, list(self.params.tensors)
        return {"count": count, "share": count / count_parameters(self.loaded.model), "names": names}


def prepare(config: Config, checkpoint: Path | None = None, *, trains: bool = False, restores: bool = False) -> Session:
    """Load the model, or a checkpoint of the run if given, and build the session.

    The precision of matrix products is set for the whole process.

    Args:
        config: of the run.
        checkpoint: the folder of one of its checkpoints.
        trains: a new run begins: the model's scores are then also checked with perturbed weights.
        restores: the caller loads the run's own head, so nothing is said about a new one.

    Raises:
        UserError: when the model cannot be loaded or is not supported.
    """
    task, whole = config.task, config.peft.name == "none"
    source = models.with_path(config.model, str(checkpoint)) if checkpoint is not None and whole else config.model
    with explain_device_errors(f"loading model.path={source.path}", smaller_model(config)):
        objective_class = OBJECTIVES.load(config.objective.name)
        kind = objective_class.model_kind
        group = find_shard_group(config)
        loaded = models.load(source, kind, task.labels, config.seed, as_stored=group is not None)
        if loaded.new_head and checkpoint is None and not restores:
            log.warning("a new classification head, drawn from the seed: %s", loaded.new_head)
        if config.init == "linear_probe" and not kind.has_classifier and config.peft.name != "head":
            models.untie(loaded.model)  # the probe writes rows of the decoder, not of the embeddings
        adapters.attach(loaded, config.peft, config.model, config.seed)
        if checkpoint is not None and not whole:
            loaded.adapter.load(checkpoint)
        encoder = objective_class.encoder_class(task, loaded.tokenizer)
        if isinstance(config.optimizer, FirstOrderConfig) and config.optimizer.dropout is not None:
            set_rate(loaded.model, config.optimizer.dropout)
        optimizer = optimizer_class(config.optimizer)(config.optimizer, config.seed, config.steps)
        check = trains and config.steps > 0 and not optimizer.needs_backward
        forward, objective = _build_objective(config, loaded, encoder, check, group)
        ranks = current() if group is None else None  # a forward of shards is one of all ranks together
        forward.ranks = ranks if ranks is not None and ranks.split == "directions" else None
        return Session(config, loaded, forward, objective, optimizer, encoder, ranks, group)


def find_shard_group(config: Config) -> ShardGroup | None:
    """Return the ranks that share the weights; None if this process is alone, or holds all of them."""
    ranks = current()
    return None if ranks is None or config.distributed.shard == "none" else ShardGroup(ranks)


def _store(loaded: models.LoadedModel, noise: Noise, config: ModelConfig, group: ShardGroup | None) -> Params:
    """Move the trainable tensors to flat storage; with a group, keep this rank's parts of the large ones alone."""
    if group is None:
        return Params(loaded.model, noise)
    dtype = models.STORAGE_DTYPES[config.dtype]
    shards = shard_parameters(loaded.model, noise.tile, group, loaded.device, dtype, whole=loaded.fresh)
    loaded.shards = shards
    return Params(loaded.model, noise, shards)


def _check_gathered(params: Params, group: ShardGroup, name: str) -> None:
    """Refuse a model whose scores are not finite though its weights are: it has read the placeholder of a weight.

    Raises:
        UserError: for such a model.
    """
    damaged = sum(int((~span.theta.isfinite()).sum()) for span in params.spans(params.tensors))
    count = torch.tensor([damaged])
    group.sum_(count, "evaluation")  # the sum over all ranks' parts
    if not int(count):
        raise UserError(
            f"{name}: distributed.shard=full does not support this model family: a module reads a large weight of "
            "another one, where it is not gathered; use distributed.shard=none"
        )


def _collate(loaded: models.LoadedModel, rows: Sequence[TokenizedExample], objective: Objective | None = None) -> Batch:
    """Collate rows as the objective reads them; without one, padded."""
    lay_out = None if objective is None else objective.lay_out
    return collate(rows, loaded.pad_id, loaded.device, loaded.uses_token_type_ids, lay_out)


@torch.no_grad()
def _build_objective(
    config: Config,
    loaded: models.LoadedModel,
    encoder: InputEncoder,
    perturbed: bool,
    group: ShardGroup | None,
) -> tuple[PerturbedForward, Objective]:
    """Patch the model's forwards, build the objective, and check its logits against the unpatched model's.

    The check runs on two short rows; if `perturbed`, also with perturbed weights. With a group, this rank keeps its
    part of the weights alone.
    """
    torch.set_float32_matmul_precision("highest")  # the run's own precision would blur the check
    objective_class, label_ids = OBJECTIVES.load(config.objective.name), encoder.label_ids
    rows = encoder.encode_all([Example((text,) * len(config.task.columns), 0) for text in ("a", "a a a")])
    name = f"model.path={config.model.path}: {type(loaded.model).__name__}"
    padded = _collate(loaded, rows)
    try:
        params = _store(loaded, make_noise(zeroth_order(config.optimizer).noise), config.model, group)
        with gathered_modules(loaded.model, params.shards), computing_in_float32(loaded.model):
            reference = objective_class.reference_logits(loaded.model, padded, label_ids)
            if perturbed:
                with flip_weights(params):
                    flipped = objective_class.reference_logits(loaded.model, padded, label_ids)
        if group is not None and not bool(reference.isfinite().all()):
            _check_gathered(params, group, name)
        forward = PerturbedForward(loaded.model, params)
        if config.model.paired_tokens is not None:
            forward.paired_tokens = config.model.paired_tokens
        objective = objective_class(loaded.model, forward, label_ids)
        batch = _collate(loaded, rows, objective)
        check_against_reference(objective.logits(batch), reference, loaded.device.type, name)
        if perturbed:
            check_perturbed(forward, objective, batch, torch.stack([flipped, reference]), name)
        forward.set_compute_dtype(loaded.compute_dtype)
        torch.set_float32_matmul_precision(config.model.matmul_precision)
        objective.logits(batch)  # a model may not support this dtype
    # What the code of an unknown architecture may raise.
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        if is_device_error(error):
            raise
        family = f"{name} is a model family that objective={config.objective.name} does not support"
        raise UserError(f"{family}: {first_line(error)}") from error
    return forward, objective
