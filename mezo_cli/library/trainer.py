"""The Trainer of transformers with the MeZO step (docs/how-to/library.md)."""

import os
from collections.abc import Mapping
from inspect import signature
from typing import Any, cast

import torch
import torch.distributed
from torch import Tensor, nn
from transformers import Trainer

from mezo_cli.errors import UserError, did_you_mean
from mezo_cli.library.optimizer import MezoOptimizer, in_eval_mode, log

Batch = dict[str, Any]
FROM_ARGS = {"lr": "learning_rate", "weight_decay": "weight_decay", "seed": "seed"}  # setting -> TrainingArguments


class MezoTrainer(Trainer):
    """Fine-tune with forward passes only; all that is not the step is transformers' own.

        trainer = MezoTrainer(model, args, train_dataset=..., mezo={"eps": 1e-3, "samples": 4})
        trainer.train()

    A step has one loss per sign and direction, over all micro-batches of `gradient_accumulation_steps` as the Trainer
    weighs them, and over all processes of `torchrun`. These exchange the losses, 8 bytes each, and no gradients: there
    is no DistributedDataParallel. `max_grad_norm` and `optim` have no effect.

    Args:
        *args, **kwargs: as of `transformers.Trainer`. `args.learning_rate`, `args.weight_decay` (not of biases and
            normalizations, as there), the scheduler and `args.seed` are the step's.
        mezo: further arguments of `MezoOptimizer`: eps, params, samples, momentum, betas, noise, trajectory, ...
    """

    optimizer: MezoOptimizer | None

    def __init__(self, *args: Any, mezo: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mezo = dict(mezo or {})
        arguments = [*signature(MezoOptimizer).parameters][1:]  # without the model
        for name in self.mezo:
            if name in FROM_ARGS:
                raise UserError(f"mezo: {name} is that of TrainingArguments({FROM_ARGS[name]}=...)")
            if name not in arguments:
                raise UserError(f"mezo: MezoOptimizer has no argument {name!r}{did_you_mean(str(name), arguments)}")
        if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            raise UserError("MezoTrainer makes its optimizer itself: give its settings as mezo={...}")
        if self.args.n_gpu > 1 or self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise UserError("MezoTrainer takes one GPU per process (torchrun), without DeepSpeed and FSDP")
        spins = torch.get_num_threads() > 1 and os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE"
        if self.args.device.type == "cpu" and spins:  # torch was imported without `LIBRARY_DEFAULTS`
            log.warning(
                "MezoTrainer: torch's idle threads spin, and take the cores from others: set OMP_WAIT_POLICY=PASSIVE "
                "before Python starts, or import mezo_cli before torch"
            )
        self._micro_batches: list[Batch] = []
        self._scales: bool | None = False  # whether a loss is divided by the number of items of the whole step

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the `MezoOptimizer`, and keep accelerate from wrapping the model for gradients."""
        if self.optimizer is None:
            assert isinstance(self.model, nn.Module)
            if self.args.world_size > 1:  # as DistributedDataParallel does at its start
                for tensor in (*self.model.parameters(), *self.model.buffers()):
                    torch.distributed.broadcast(tensor.data, 0)
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
            settings: dict[str, Any] = {"params": None, **self.mezo}
            if self.args.weight_decay and "params" not in self.mezo:  # the Trainer's groups, with it and without
                names = [name for name, p in self.model.named_parameters() if p.requires_grad]
                decaying = set(self.get_decay_parameter_names(self.model))
                groups: list[dict[str, Any]] = [{"params": [name for name in names if name in decaying]}]
                groups += [{"params": [name for name in names if name not in decaying], "weight_decay": 0.0}]
                settings["params"] = [group for group in groups if group["params"]]
            if not self.is_world_process_zero():
                settings.pop("trajectory", None)
            of_arguments = {name: getattr(self.args, field) for name, field in FROM_ARGS.items()}
            self.optimizer = TwoPartOptimizer(self.model, **settings, **of_arguments)
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Keep a micro-batch; at the last one of a step compute the losses, before the Trainer's `optimizer.step()`."""
        self.create_optimizer()  # where a loop of one's own calls this without train()
        assert self.optimizer is not None
        model.train()  # as the Trainer's own; the step computes in eval mode
        self._micro_batches.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._micro_batches = self._micro_batches, []
        is_first = self.optimizer.result is None
        if is_first and num_items_in_batch is not None:
            self._scales = getattr(self, "loss_is_scaled_for_ga", None)
            if self._scales is None:  # the Trainer goes by the signature; a classifier ignores the argument that it has
                with torch.no_grad(), in_eval_mode(model):
                    ones = (self._loss(model, dict(batches[0]), times * num_items_in_batch) for times in (1, 2))
                    self._scales = not torch.equal(*ones)
        num_items = num_items_in_batch if self._scales else None

        def closure() -> Tensor:
            loss = torch.stack([self._loss(model, dict(batch), num_items) for batch in batches]).sum()
            if torch.is_grad_enabled() or self.args.world_size == 1:  # each process looks at the graph by itself
                return loss
            return cast("Tensor", self.accelerator.gather(loss.double().reshape(1))).mean()  # the same bits in each

        loss = self.optimizer.estimate(closure)
        if is_first and self.args.world_size > 1:
            lists: list[Any] = [None] * self.args.world_size
            torch.distributed.all_gather_object(lists, self.optimizer.unreachable)
            for name in set().union(*lists).difference(set(lists[0]).intersection(*lists)):
                raise UserError(
                    f"{name} is in the graph of the loss in some processes alone: choose mezo={{'params': ...}}"
                )
        return torch.tensor(loss, device=self.args.device)

    def _loss(self, model: nn.Module, batch: Batch, num_items: Tensor | int | None) -> Tensor:
        """Return what a micro-batch adds to the loss of its step.

        Args:
            num_items: of the whole step, by which the loss divides its sum; None where it is the micro-batch's mean.
        """
        with self.compute_loss_context_manager():
            loss = cast("Tensor", self.compute_loss(model, batch, num_items_in_batch=num_items))
        return loss / self.current_gradient_accumulation_steps if num_items is None else loss

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Do nothing: there are no gradients."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Return None, which is not logged."""


class TwoPartOptimizer(MezoOptimizer):
    """The Trainer takes a step in two calls: the losses in `training_step`, the update by `optimizer.step()`."""

    _is_accelerate_prepared = True  # accelerate's wrapper would scale gradients
    step_was_skipped = False  # what accelerate asks its wrapper

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights by the losses of `training_step`."""
        self.update()
