"""The interface of an objective: from a batch to its loss, and from the rows of a split to metrics and records.

The loss of a batch is put together from its micro-batches and from the ranks that share its rows (`BatchLoss`).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from mezo_cli.config.schema import Config, Example
from mezo_cli.distributed.ranks import ALONE, Ranks, split_sizes
from mezo_cli.errors import UserError
from mezo_cli.models import LoadedModel, ModelKind
from mezo_cli.objectives.collate import Arrays, batches_by_length, collate
from mezo_cli.objectives.frozen_layers import FrozenLayers
from mezo_cli.objectives.prediction import Predicted, PredictedRecord
from mezo_cli.objectives.scoring import Evaluation, mean_over_rows
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.tasks import InputEncoder

Report = Callable[[int], None]  # of the number of rows that are done
Measured = tuple[Tensor, list[dict[str, Any]]]  # what an evaluation follows from, [rows, values], and records
Records = Sequence[Mapping[str, Any]]  # one per row, plain JSON
Evaluations = Mapping[str, Evaluation]  # by split
Weights = Sequence[float] | None  # of the losses of rows; None: 1


class Objective:
    """Computes losses and evaluates rows. The class of its settings names it.

    A subclass defines `outputs` and `row_losses` at least; where the loss is no mean over rows, `counts` and
    `from_counts` in place of `row_losses`. `Classification` and `Generation` are the built-in families. All methods see
    the weights that are active in `forward`: theta, or theta + eps z for one sign or both.

    Class attributes:
        model_kind: the kind of model that is loaded.
        encoder_class: turns a task's rows into token ids.
        measures_forgetting: whether each evaluation says how far the weights are from those of the start.
        prediction: what `predict` says of one row, as users get it.
        kept_records: of so many dev rows the records of every evaluation are kept, in completions.jsonl.

    Attributes:
        loss_from_counts: whether the loss of a batch is `from_counts` of its `counts`, not the mean of `row_losses`.
        supports_paired_forward: whether both signs of a perturbation can be computed in one forward.
        frozen: the model's lowest layers, whose output is computed once per batch if they are not trained; None for an
            objective that does not.

    Args:
        config: of the run.
        loaded: the model, of `model_kind`, and its tokenizer.
        forward: runs it with perturbed weights. Its modules are patched, so `model(...)` sees them too.
        encoder: of `encoder_class`.
    """

    model_kind: ClassVar[ModelKind]
    encoder_class: ClassVar[type[InputEncoder[Any]]]
    prediction: ClassVar[type[Predicted]] = PredictedRecord
    kept_records: ClassVar[int] = 0
    measures_forgetting: ClassVar[bool] = False
    loss_from_counts: bool = False
    supports_paired_forward: bool = False
    frozen: FrozenLayers | None = None

    def __init__(self, config: Config, loaded: LoadedModel, forward: PerturbedForward, encoder: Any) -> None:
        self.config, self.loaded, self.forward = config, loaded, forward
        self.encoder: Any = encoder
        self.model: Any = loaded.model

    # --- batches ---

    def collate(self, rows: Sequence[Any]) -> Any:
        """Return rows as a batch on the model's device. By default a `Batch`, laid out by `lay_out`."""
        return collate(rows, self.loaded, self.lay_out(rows))

    def lay_out(self, rows: Sequence[Any]) -> Arrays | None:
        """Return the arrays that are read as `batch.layout`; None for padded rows (`collate`).

        They are made on the host, so that a batch is copied to the device once and nothing waits for it.
        """
        return None

    # --- losses ---

    def row_losses(self, batch: Any) -> Tensor:
        """Return the loss of each row, of which the batch's loss is the mean.

        Return float64 (float32 on MPS), [1, rows], or [2, rows] inside `forward.perturbed` with both signs, which is
        asked for only where `fits_paired_forward` returned True. It is differentiable under `torch.enable_grad`.
        """
        raise NotImplementedError

    def counts(self, batch: Any) -> Tensor:
        """Return what the loss of a batch follows from, float64 [1, ...] or [2, ...]; those of parts of it add up."""
        raise NotImplementedError

    def from_counts(self, counts: Tensor) -> Tensor:
        """Return the loss that `counts` of all rows are, [1] or [2]: by default of a sum and a number, the mean."""
        return counts[:, 0] / counts[:, 1]

    def check_start(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Check what has to be right before the first step, train first; return what run.json keeps of it."""
        return {}

    def begin_step(self, step: int) -> None:
        """Prepare for the losses of step number `step`; by default nothing depends on it."""

    def step_scalars(self, count_forwards: Callable[[int], Mapping[str, int]]) -> dict[str, float]:
        """Return further figures of the step that was begun last, for its line in metrics.jsonl.

        `count_forwards` returns the number of `forwards` of a batch that the first so many steps take.
        """
        return {}

    def fits_paired_forward(self, batch: Any) -> bool:
        """Return whether one forward should compute both signs: that draws z once, but takes more memory."""
        can_pair = self.supports_paired_forward and not self.forward.reach.outside
        return can_pair and batch.layout["input_ids"].numel() <= self.forward.paired_tokens

    def outputs(self, batch: Any) -> Tensor:
        """Return the model's outputs that the loss is computed from, differentiable: [rows, ...], float32.

        They show which parameters the loss depends on, and are compared with `plain_outputs` at every start.
        """
        raise NotImplementedError

    @classmethod
    def plain_outputs(cls, loaded: LoadedModel, rows: Sequence[Any], encoder: Any) -> Tensor:
        """Return the same outputs by the model's own forward, as plainly as possible, before the model is patched."""
        raise NotImplementedError

    @classmethod
    def check_rows(cls, encoder: Any) -> list[Any]:
        """Return two short rows, on which `outputs` is compared with `plain_outputs`."""
        return encoder.encode_all([Example((text,) * len(encoder.task.columns), 0) for text in ("a", "a a a")])

    # --- evaluations ---

    def measure(self, batch: Any) -> Measured:
        """Return what an evaluation follows from, float32 or float64 [rows, values], and a record of each row.

        A record has what is worth keeping besides the values, such as generated text; it is plain JSON.
        """
        return self.row_losses(batch)[0].unsqueeze(1), [{} for _ in batch.rows]

    def assess(self, values: Tensor, rows: Sequence[Any], records: Records | None = None) -> Evaluation:
        """Return the evaluation of rows that `measure` has measured; `records` are None for those of before training.

        By default the values are losses, and their mean is the only metric.
        """
        return Evaluation(float(values.double().mean()), {}, values, list(records or []))

    def measure_all(
        self, rows: Sequence[Any], report: Report, ranks: Ranks, measure: Callable[[Any], Measured] | None = None
    ) -> Measured:
        """Return what `measure` does of all rows, in their order: the values on the CPU, and the records.

        Batches of `eval_batch_size` rows are formed by length, to pad little. They go through the model in
        micro-batches. The same rows in the same order get bitwise identical values; a row in another batch gets the
        same values up to rounding. Ranks share the batches, so they change no bit.
        """
        measure, size = measure or self.measure, self.config.eval_batch_size
        batches = batches_by_length(rows, size)
        shares = [[i for batch in batches[rank :: ranks.size] for i in batch] for rank in range(ranks.size)]
        values: list[Tensor] = []
        records: list[dict[str, Any]] = []
        # A rank that has no batch measures one in vain: it has to know how many values a row has.
        of_rank, width = batches[ranks.rank :: ranks.size] or batches[:1], self.config.rows_per_forward(size)
        split = [[batch[start : start + width] for start in range(0, len(batch), width)] for batch in of_rank]
        all_rows = [[rows[i] for i in numbers] for parts in split for numbers in parts]
        frozen = self.frozen
        collated = map(self.collate, all_rows) if frozen is None else frozen.collated(all_rows, self.collate)
        for done, parts in enumerate(split):
            measured = [measure(next(collated)) for _ in parts]
            values.append(torch.cat([of_rows for of_rows, _ in measured]).cpu())
            records += [record for _, of_rows in measured for record in of_rows]
            report(min(len(rows), (done * ranks.size + ranks.rank + 1) * size))
        sizes = list(map(len, shares))
        of_all = torch.cat(values)[: sizes[ranks.rank]]
        if ranks.size > 1:
            of_all = ranks.gather_parts(of_all, sizes, "evaluation")
            texts = ranks.exchange(json.dumps(records[: sizes[ranks.rank]]))
            records = [record for text in texts for record in json.loads(text)]
        places = np.argsort([i for share in shares for i in share])
        return of_all[torch.from_numpy(places)], [records[i] for i in places] if records else []

    def evaluate(self, rows: Sequence[Any], report: Report = lambda done: None, ranks: Ranks = ALONE) -> Evaluation:
        """Evaluate all rows. `report` is called with the number of rows done."""
        with torch.no_grad():
            values, records = self.measure_all(rows, report, ranks)
        return self.assess(values, rows, records)

    def predict(self, rows: Sequence[Any], report: Report = lambda done: None, ranks: Ranks = ALONE) -> Records:
        """Return a record per row: what the model says of it. The right answers are not needed."""
        evaluation = self.evaluate(rows, report, ranks)
        if not evaluation.is_finite:
            raise UserError("the scores are not finite: the weights have diverged or are damaged")
        return evaluation.records

    def describe(self) -> dict[str, Any]:
        """Return what run.json says of it for those who read the run."""
        return {}

    def describe_row(self, example: Example) -> dict[str, Any]:
        """Return what predictions.jsonl says of a row besides its record."""
        named = zip(self.config.task.columns, example.texts, strict=True)
        return {"columns": dict(named if example.columns is None else example.columns)}

    def compare(
        self, before: Evaluations, after: Evaluations, rows: Mapping[str, Sequence[Any]], *, trained: bool
    ) -> dict[str, Any]:
        """Return what summary.json says of the best step besides its scores, of `dev` and of `test` if there is one.

        `intervals`; where the untrained model is known, `difference` to it and `test_before`. A run that was not
        trained has no difference: its result is that of the untrained model. `before` are the evaluations by the
        untrained model, empty if it is not known, `after` those at the best step, `train` among them.
        """
        splits = [split for split in after if split != "train"]
        summary: dict[str, Any] = {"intervals": {split: after[split].summary()["intervals"] for split in splits}}
        if before and trained:
            summary["difference"] = {split: after[split].summary(before[split]) for split in splits}
            if "test" in splits:
                summary["test_before"] = before["test"].summary()
        return summary


class BatchLoss:
    """A function of no arguments that returns the loss of a batch with the weights as `objective.forward` has them.

    Args:
        objective: computes losses of rows, or counts.
        batches: the batch, or its micro-batches: one forward each.
        ranks: those that share its rows, of which `batches` are this rank's; `ALONE` if this process has all of them.
        rows: the number of rows of the whole batch, for ranks.
        weights: of the losses of the whole batch's rows.
    """

    def __init__(
        self, objective: Objective, batches: Sequence[Any], ranks: Ranks = ALONE, rows: int = 0, weights: Weights = None
    ) -> None:
        self._objective, self._batches, self._rows, self._ranks = objective, batches, rows, ranks
        self._weights = weights
        if weights is not None and objective.loss_from_counts:
            raise UserError(
                f"objective.loss={objective.config.objective.loss}: it is no mean over rows, so that data.weights=mean "
                "has no rows to weight; use data.weights=none, or data.batches=shuffled"
            )

    def __call__(self) -> Tensor:
        """Return the loss, float64 (float32 on MPS), [], or [2] inside `forward.perturbed` with both signs.

        It is nan if an output of the model is not finite, and differentiable under `torch.enable_grad`.
        """
        if self._objective.loss_from_counts:
            of_rank = self._of_members(lambda: torch.stack(list(map(self._objective.counts, self._batches))).sum(dim=0))
            counts = self._ranks.gather_parts(of_rank.unsqueeze(0), [1] * self._ranks.size, "step").sum(dim=0)
            losses = self._objective.from_counts(counts)
        else:
            losses = torch.stack([mean_over_rows(of_rows) for of_rows in self.rows()])
        return losses if self._objective.forward.num_signs == 2 else losses[0]

    def parts(self) -> Iterator[Tensor]:
        """Yield what each micro-batch adds to the loss of all rows, [], one forward after the other."""
        if len(self._batches) == 1:
            yield self()
            return
        total, done = sum(len(batch.rows) for batch in self._batches), 0
        for batch in self._batches:
            losses = self._objective.row_losses(batch)[0]
            if self._weights is not None:
                losses = losses * losses.new_tensor(self._weights[done : done + len(losses)])
            done += len(losses)
            yield losses.sum() / total

    def rows(self) -> Tensor:
        """Return the losses of the rows, times their weights: [1, rows], or [2, rows] inside `forward.perturbed`."""
        if self._objective.loss_from_counts:
            raise UserError(f"objective.loss={self._objective.config.objective.loss}: single rows have no such loss")
        losses = self._of_members(lambda: torch.cat(list(map(self._objective.row_losses, self._batches)), dim=1))
        losses = self._ranks.gather_parts(losses.mT, split_sizes(self._rows, self._ranks.size), "step").mT
        return losses if self._weights is None else losses * losses.new_tensor(self._weights)

    def _of_members(self, compute: Callable[[], Tensor]) -> Tensor:
        forward = self._objective.forward
        if self._objective.frozen is not None:
            self._objective.frozen.expected = self._batches
        if forward.num_signs == 2 and not all(map(self._objective.fits_paired_forward, self._batches)):
            return forward.forward_per_sign(compute).flatten(0, 1)  # a batch that does not fit
        return compute()


def linear_in_float32(forward: PerturbedForward, layer: nn.Linear, rows: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return what multiplies hidden states by rows of an unpatched layer (None: all), whatever the compute dtype is.

    z of these rows is drawn here, once. For a few rows this costs nothing. What is returned is a function of hidden
    states, [signs * rows, ..., width] -> float32 [signs, any, rows of the weight].
    """
    weight = forward.perturbed_weight(layer.weight, rows, torch.float32)
    bias = None if layer.bias is None else forward.perturbed_weight(layer.bias, rows, torch.float32).unsqueeze(-2)

    def multiply(hidden: Tensor) -> Tensor:
        signs = len(weight) if weight.dim() == 3 else 1
        scores = hidden.float().reshape(signs, -1, hidden.shape[-1]) @ weight.mT
        return scores if bias is None else scores + bias

    return multiply
