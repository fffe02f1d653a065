#!/usr/bin/env python3
"""Find the top r directions of the inputs of each matrix, over rows of train, and write them for `peft=fixed_lora`.

    pip install -e scripts/bench/directions
    python scripts/measure/find_bases.py --out bases --seeds 1,2,3 experiment=bench/sst2 data.dir=GLUE/SST-2
    mezo train experiment=bench/sst2 data.dir=GLUE/SST-2 seed=1 peft=fixed_lora peft.basis=bases/1.safetensors

Three rounds of subspace iteration over 256 rows, without padding: 768 rows of forwards, which no run counts.
"""

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from mezo_directions.fixed_lora import branches
from safetensors.torch import save_file
from torch import Tensor

from mezo_cli.config.compose import build_config
from mezo_cli.data import load_splits
from mezo_cli.training.prepare import load_session
from mezo_cli.training.session import Session

ROWS = 256  # of train, per round
ROUNDS = 3  # of subspace iteration
EXTRA = 8  # columns more than r


@torch.no_grad()
def find_bases(session: Session, rows: Sequence[Any]) -> dict[str, Tensor]:
    """Return Q of each matrix with a LoRA, float32 [inputs, r], by its path; q, k and v share theirs."""
    peft: Any = session.config.peft
    seed, whole, r = session.config.seed, session.config.batch_size, peft.r
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
        start = torch.randn(width, min(r + EXTRA, width), generator=generator, dtype=torch.float64)
        bases[name] = torch.linalg.qr(start)[0].to(weight.device, torch.float32)
    for _ in range(ROUNDS):
        sums = multiply_by_covariance(session, {name: layers[name] for name in bases}, bases, batches)
        bases = {name: torch.linalg.svd(total, full_matrices=False)[0].float() for name, total in sums.items()}
    return {name: bases[group_of[name]][:, :r].contiguous() for name in layers}


def set_bases(session: Session, bases: dict[str, Tensor]) -> None:
    """Set the A of a loaded model."""
    for name, layer in branches(session.loaded.model):
        layer.lora_A["default"].weight.data.copy_(bases[name].T)


def find_groups(session: Session, layers: dict[str, Any], rows: Sequence[Any]) -> dict[str, str]:
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
    session: Session, layers: dict[str, Any], bases: dict[str, Tensor], batches: Sequence[Sequence[Any]]
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


def main() -> None:
    """Write a file per seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="A folder for SEED.safetensors.")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="Overrides of the runs.")
    args = parser.parse_intermixed_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds.split(","):
        config = build_config([*args.words, "peft=fixed_lora", f"seed={seed}"])
        session = load_session(config)
        path = args.out / f"{seed}.safetensors"
        rows = session.encoder.encode_all(load_splits(config).train)
        save_file({name: q.cpu().clone() for name, q in find_bases(session, rows).items()}, path)
        print(f"{path}: sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
