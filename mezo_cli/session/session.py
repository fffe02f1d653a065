"""A loaded model with all that computes its loss and takes a step, from loading to leaving."""

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mezo_cli.adapters.methods import find_method
from mezo_cli.config.schema import Config, Example
from mezo_cli.distributed.ranks import ALONE, Ranks
from mezo_cli.errors import UserError
from mezo_cli.models import LoadedModel
from mezo_cli.models.quantized import count_parameters
from mezo_cli.objectives.base import BatchLoss, Objective
from mezo_cli.objectives.prediction import Predicted
from mezo_cli.optim import Optimizer, StepResult
from mezo_cli.optim.first_order import dropout
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.params import Params


@dataclass
class Session(AbstractContextManager["Session"]):
    """A loaded model with its trainable parameters, objective, optimizer and input encoder.

    It owns the model: `with opened(...) as session:` drops it at the end, and using it afterwards is an error.

    Attributes:
        loaded: the model and its tokenizer.
        forward: the model's forwards with perturbed weights, and the trainable parameters.
        objective: computes losses, and evaluates rows.
        optimizer: updates the parameters.
        encoder: encodes rows for the model.
        ranks: the processes that share the run's steps and evaluations.
        at: the step whose weights it has; 0 before the first one.
    """

    config: Config
    loaded: LoadedModel
    forward: PerturbedForward
    objective: Objective
    optimizer: Optimizer
    encoder: Any
    ranks: Ranks = ALONE
    at: int = 0

    def __exit__(self, *of_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the model and all that belongs to it, and free its memory."""
        parts = (self.objective, self.forward, self.optimizer, self.loaded) if vars(self) else ()
        for part in (*parts, self):  # they hold each other, and a caller's variable may hold one of them
            vars(part).clear()
        gc.collect()  # the patched modules form cycles
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"the session is closed, its model was dropped: it has no '{name}' any more")

    @property
    def params(self) -> Params:
        """The trainable tensors."""
        return self.forward.params

    def loss_of(self, rows: Sequence[Any], weights: Sequence[float] | None = None) -> BatchLoss:
        """Return a function that computes the loss of these rows, which are laid out once, in micro-batches.

        Where ranks share the rows, each computes its own, and all get the loss of all rows. `weights` are those of the
        rows' losses, None for 1.
        """
        ranks = self.ranks if self.ranks.split == "rows" else ALONE
        share = ranks.share_of(rows)
        size = self.config.rows_per_forward(len(share))
        batches = [self.objective.collate(share[start : start + size]) for start in range(0, len(share), size)]
        return BatchLoss(self.objective, batches, ranks, len(rows), weights)

    def step(self, rows: Sequence[Any], step: int, weights: Sequence[float] | None = None) -> StepResult:
        """Do step number `step` (from 0) on a batch of rows, whose losses have these weights (None for 1)."""
        # MeZO runs without dropout (paper, section 2); the model is in eval mode.
        uses_dropout = self.config.optimizer.needs_backward
        self.objective.begin_step(step)
        with dropout(self.loaded.model, self.config.seed, step) if uses_dropout else nullcontext():
            result = self.optimizer.step(self.forward, self.loss_of(rows, weights), step)
        self.at = step + 1
        return result

    def exclude_unreachable(self, row: Any) -> list[str]:
        """Exclude the parameters that the loss of a row does not depend on; return their names."""
        frozen = self.objective.frozen if self.config.model.cache_frozen == "auto" else None
        with nullcontext() if frozen is None else frozen.find():
            return self.forward.select_reachable(partial(self.objective.outputs, self.objective.collate([row])))

    def keep_states(self, *splits: Sequence[Any]) -> int:
        """Keep what frozen layers compute for all rows of a split, from when they are first needed.

        A split that would not fit in `model.cache_bytes` beside those before it is left out: which rows are kept
        decides the last bits of a loss, so it must not depend on the order of the batches.

        Returns:
            The memory that the states will take, in bytes.
        """
        frozen, used, config = self.objective.frozen, 0, self.config
        if frozen is None or not frozen.count:
            return used
        for rows in splits:
            used += frozen.keep(rows, config.eval_batch_size, self.objective.collate, config.model.cache_bytes - used)
        return used

    def trainable(self) -> dict[str, Any]:
        """Return the `count` of trainable scalars, their `share` of the model's, and the `names` of the tensors."""
        count, names = self.params.count, list(self.params.tensors)
        return {"count": count, "share": count / count_parameters(self.loaded.model), "names": names}

    def predict(
        self, examples: Sequence[Example], report: Callable[[int], None] = lambda done: None
    ) -> list[Predicted]:
        """Predict rows, in order, in batches of `eval_batch_size`. `report` is called with the number of rows done.

        The rows of a split, in their order, give scores bitwise identical to those of its evaluation.
        """
        if not examples:
            return []
        objective, names = self.objective, self.config.data_task.columns
        rows, cut = self.encoder.encode_to_fit(examples)
        records = objective.predict(rows, report, self.ranks)
        texts = (dict(zip(names, row.texts, strict=True)) if row.columns is None else row.columns for row in examples)
        return [objective.prediction.of(dict(row), *rest) for row, *rest in zip(texts, records, cut, strict=True)]


def not_finite_at_start(config: Config) -> UserError:
    """Return the error for a model whose loss is not finite before training."""
    what = f"its loss is not finite before the first step{config.model.wider_range}"
    return UserError(f"model.path={config.model.path}: {what}")


# --- what to lower when memory runs out ---


def smaller_model(config: Config) -> str:
    """Return the advice for a model that does not fit."""
    setting = find_method(config.peft).size_setting
    size = f"a lower peft.{setting} (now {getattr(config.peft, setting)}), " if setting else ""
    return f"{size}a smaller model or a device with more memory (model.device)"


def smaller_batches(config: Config) -> str:
    """Return the advice for batches that do not fit."""
    advice = f"a lower batch_size (now {config.batch_size}) or eval_batch_size (now {config.eval_batch_size})"
    if config.optimizer.needs_backward and not config.model.checkpoint_activations:
        advice += ", model.checkpoint_activations=true"
    now = "null" if config.micro_batch_size is None else config.micro_batch_size
    return f"{advice}, or a lower micro_batch_size (now {now}), which leaves the loss as it is"
