"""W + B Q^T with a fixed orthonormal Q, [inputs, r], and a trained B, [outputs, r], which starts from 0.

A direction U of B is the direction U Q^T of W, and since Q is orthonormal and not scaled,

    E[g U Q^T] = G Q Q^T          (G: the gradient of W; MeZO's estimate has E[g Z] = G)

so lr and eps mean what they mean for MeZO, in the subspace of the inputs' top r directions (compare AGZO, arXiv
2601.17261, which renews Q). A fixed Q is a LoRA with A = Q^T: it is saved, resumed, replayed and exported like one.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from mezo_cli.adapters.methods import Lora
from mezo_cli.config.base import Positive
from mezo_cli.config.schema import PeftConfig
from mezo_cli.errors import UserError

ROWS = 256  # of train, per round
ROUNDS = 3  # of subspace iteration
EXTRA = 8  # columns more than r


class FixedLoraConfig(PeftConfig):
    """Settings of the method. `targets`, `head`, `layers` and `alpha` are LoRA's, which are not to be chosen here."""

    implementation: ClassVar[str] = "mezo_directions.fixed_lora:FixedLora"
    title: ClassVar[str] = "LoRA with a fixed A"
    targets: ClassVar[str] = "attention_feed_forward"
    head: ClassVar[bool] = False
    layers: ClassVar[None] = None
    r: Positive = Field(8, description="columns of Q, the rank of B Q^T")
    init: Literal["activations", "random"] = Field("activations", description="what the columns of Q are")

    @property
    def alpha(self) -> int:
        """Return r: B A is not scaled."""
        return self.r


class FixedLora(Lora):
    """A LoRA of every matrix of the layers whose A is orthonormal and stays as it is."""

    config: Any  # a FixedLoraConfig

    def insert(self, loaded: Any, name: str) -> Any:
        """Insert A and B beside the matrices, A with random orthonormal rows."""
        wrapped = super().insert(loaded, name)
        for _, layer in branches(loaded.model):
            weight = layer.lora_A["default"].weight
            weight.requires_grad_(False)
            if len(weight) > weight.shape[1]:
                raise UserError(f"peft.r={len(weight)}: {name} has a matrix of {weight.shape[1]} inputs")
            weight.copy_(torch.linalg.qr(torch.randn(weight.shape[1], len(weight)))[0].T)
        return wrapped

    @torch.no_grad()
    def fit(self, session: Any, rows: Sequence[Any]) -> dict[str, Any] | None:
        """Set A to the top directions of the matrices' inputs over rows of train.

        Returns:
            The record for run.json: `sha256` of all A, and `rows` and `forwards` (of a batch) that it took.
        """
        if self.config.init == "random":
            return None
        seed, whole = session.config.seed, session.config.batch_size
        size = whole if session.objective.lay_out(rows[:1]) is not None else 1  # one row alone has no padding
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()[:ROWS]
        batches = [[rows[i] for i in order[start : start + size]] for start in range(0, len(order), size)]
        layers = dict(branches(session.loaded.model))
        group_of = find_groups(session, layers, batches[0][:1])
        generator = torch.Generator().manual_seed(seed)
        bases: dict[str, Tensor] = {}
        for name in sorted(set(group_of.values())):
            weight = layers[name].lora_A["default"].weight
            width = weight.shape[1]
            start = torch.randn(width, min(self.config.r + EXTRA, width), generator=generator, dtype=torch.float64)
            bases[name] = torch.linalg.qr(start)[0].to(weight.device, torch.float32)
        for _ in range(ROUNDS):
            sums = multiply_by_covariance(session, {name: layers[name] for name in bases}, bases, batches)
            bases = {name: torch.linalg.svd(total, full_matrices=False)[0].float() for name, total in sums.items()}
        digest = hashlib.sha256()
        for name, layer in layers.items():
            weight = layer.lora_A["default"].weight
            weight.copy_(bases[group_of[name]][:, : self.config.r].T)
            digest.update(weight.float().cpu().numpy().tobytes())
        return {"sha256": digest.hexdigest(), "rows": len(order), "forwards": ROUNDS * -(-len(order) // whole)}


def branches(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (path, layer) of each layer with a LoRA."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


def find_groups(session: Any, layers: dict[str, Any], rows: Sequence[Any]) -> dict[str, str]:
    """Return path -> path of the first layer that has the same input: q, k and v share a basis."""
    seen: list[tuple[str, Tensor]] = []
    hooks = [
        layer.base_layer.register_forward_pre_hook(lambda _, args, name=name: seen.append((name, args[0])))
        for name, layer in layers.items()
    ]
    try:
        session.objective.outputs(session.objective.collate(rows))
    finally:
        for hook in hooks:
            hook.remove()
    return {name: next(first for first, other in seen if other is x) for name, x in seen}


def multiply_by_covariance(
    session: Any, layers: dict[str, Any], bases: dict[str, Tensor], batches: Sequence[Sequence[Any]]
) -> dict[str, Tensor]:
    """Return X^T X Q of each layer's inputs X, [tokens, width], over the batches: one forward of each."""
    sums = {name: torch.zeros_like(basis, dtype=torch.float64) for name, basis in bases.items()}

    def add(name: str, x: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1]).float()
        sums[name] += x.T @ (x @ bases[name])

    hooks = [
        layer.base_layer.register_forward_pre_hook(lambda _, args, name=name: add(name, args[0]))
        for name, layer in layers.items()
    ]
    try:
        for rows in batches:
            session.objective.outputs(session.objective.collate(rows))
    finally:
        for hook in hooks:
            hook.remove()
    return sums
