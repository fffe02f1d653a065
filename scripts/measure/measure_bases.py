#!/usr/bin/env python3
"""Measure the cosine of each estimate with the gradient, in the linear layers: which directions see more per forward.

    pip install -e scripts/bench/directions                       # peft=fixed_lora, optimizer=mezo_rows
    mezo replay RUN --step 500 --out step500                      # of a run of tuned MeZO
    python scripts/measure/measure_bases.py --models 0=demo,500=step500 --ranks 1,4,8,32 --seeds 1,2,3 \
        task=sst2 objective=mlm data=files data.dir=GLUE/SST-2 ...

For each model, seed and rank, every method takes steps from the same weights until `--calls` calls are used. The sum of
its estimates is compared with g, the gradient of the mean loss over `--rows` rows of train, and with what of g is
orthogonal to b, the gradient of the mean over rows of score(label 1) - score(label 0): a basis that sees the bias alone
would score there. `held`: the share of |g|^2 in the basis of the first model's activations.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from find_bases import find_bases, set_bases
from torch import Tensor

from mezo_cli.config.compose import build_config
from mezo_cli.data import load_splits
from mezo_cli.data.batch_sampler import make_sampler
from mezo_cli.training.prepare import load_session
from mezo_cli.training.session import Session

Gradients = dict[str, Tensor]  # name of a linear layer -> [outputs, inputs]
FIXED = ["peft=fixed_lora"]
METHODS = {
    "MeZO": [],
    "LOZO": ["optimizer=lozo"],
    "A random": FIXED,
    "A activations": FIXED,
    "rows, A random": [*FIXED, "optimizer=mezo_rows"],
    "rows, A activations": [*FIXED, "optimizer=mezo_rows"],
}


def load(words: Sequence[str], seed: int, count: int) -> tuple[Session, list[Any], list[Any]]:
    """Return a session, its encoded rows of train, and `count` of them, which do not depend on the seed."""
    config = build_config([*words, f"seed={seed}", "data.seed=1", "steps=1000", "model.cache_frozen=off"])
    session, train = load_session(config), load_splits(config).train
    rows = session.encoder.encode_all(train)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    session.exclude_unreachable(rows[0])
    return session, rows, [rows[i] for i in order[:count]]


def gradients(session: Session, rows: Sequence[Any], names: Sequence[str]) -> tuple[Gradients, Gradients]:
    """Return g and b of the named layers, float64."""
    tensors = [session.params.tensors[f"{name}.weight"] for name in names]
    sums = [[torch.zeros_like(p, dtype=torch.float64) for p in tensors] for _ in range(2)]
    size = session.config.batch_size
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        with torch.enable_grad():
            scores = session.objective.outputs(session.objective.collate(part))
            losses = session.loss_of(part)(), (scores[:, 1] - scores[:, 0]).mean()
            found = [torch.autograd.grad(loss, tensors) for loss in losses]
        for of_loss, parts in zip(sums, found, strict=True):
            for total, one in zip(of_loss, parts, strict=True):
                total += one.double() * (len(part) / len(rows))
    g, b = (dict(zip(names, of_loss, strict=True)) for of_loss in sums)
    return g, b


def basis_of(session: Session) -> Gradients:
    """Return Q of each layer with a LoRA, [inputs, r], by the layer's name in the plain model."""
    modules = session.loaded.adapter.peft.base_model.model.named_modules()
    return {n: m.lora_A["default"].weight.detach().double().T for n, m in modules if hasattr(m, "lora_A")}


def estimate(session: Session, train: Sequence[Any], calls: int, names: Sequence[str]) -> Gradients:
    """Return minus the sum of the updates of steps from the same weights: of the layers, or of their B."""
    optimizer: Any = session.optimizer
    tensors = dict(session.params.tensors)
    if session.config.peft.name == "none":
        tensors = {f"{name}.weight": tensors[f"{name}.weight"] for name in names}
        session.params.tensors = tensors
    optimizer.keep_start(lambda: session.params)
    start = {name: p.detach().clone() for name, p in tensors.items()}
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in start.items()}
    sampler, step = make_sampler(session.config, train), 0
    with torch.no_grad():
        while optimizer.count_forwards(step + 1)["forwards"] <= calls:
            session.step([train[i] for i in sampler.batch(step)], step)
            for name, p in tensors.items():
                total[name] += (start[name] - p).double()
                p.copy_(start[name])
            step += 1
    short = {name.removeprefix("base_model.model."): value for name, value in total.items()}
    return {name.removesuffix(".weight").removesuffix(".lora_B.default"): value for name, value in short.items()}


def dot(a: Gradients, b: Gradients) -> float:
    """Return the inner product over all layers."""
    return sum(float((a[name] * b[name]).sum()) for name in a)


def cosine(update: Gradients, g: Gradients, basis: Gradients | None) -> float:
    """Return the cosine of an update, or of the B of one that is B Q^T, with a gradient."""
    seen = g if basis is None else {name: g[name] @ basis[name] for name in update}
    return dot(update, seen) / (dot(update, update) * dot(g, g)) ** 0.5


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="0=demo", help="STEP=FOLDER, separated by commas")
    parser.add_argument("--ranks", default="8")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--calls", type=int, default=120)
    parser.add_argument("--rows", type=int, default=848)
    parser.add_argument("words", nargs="*", help="overrides")
    args = parser.parse_intermixed_args()
    first: dict[tuple[str, int], Gradients] = {}
    print("| step | r | method | cosine with g | without b | held |\n|---|---|---|---|---|---|")
    for model in args.models.split(","):
        step, _, folder = model.partition("=")
        words = [*args.words, "optimizer.lr=1e-3", *([] if folder == "demo" else [f"model.path={folder}"])]
        probe, _, _ = load([*words, "peft=fixed_lora"], 1, 1)
        names = list(basis_of(probe))
        plain, _, rows = load(words, 1, args.rows)
        g, b = gradients(plain, rows, names)
        share = dot(g, b) / dot(b, b)
        orthogonal = {name: g[name] - share * b[name] for name in names}
        for r in args.ranks.split(","):
            for method, own in METHODS.items():
                is_fixed = own[:1] == FIXED
                if not is_fixed and r != args.ranks.split(",")[0]:
                    continue
                found, held = [], []
                for seed in map(int, args.seeds.split(",")):
                    session, train, _ = load([*words, *own, *([f"peft.r={r}"] if is_fixed else [])], seed, 1)
                    if method.endswith("A activations"):
                        set_bases(session, find_bases(session, train))
                    basis = basis_of(session) if is_fixed else None
                    update = estimate(session, train, args.calls, names)
                    found.append((cosine(update, g, basis), cosine(update, orthogonal, basis)))
                    if method == "A activations" and basis is not None:
                        start = first.setdefault((r, seed), basis)
                        inside = {name: g[name] @ start[name] for name in names}
                        held.append(dot(inside, inside) / dot(g, g))
                cells = [f"{statistics.mean(c):.4f} ({min(c):.4f} to {max(c):.4f})" for c in zip(*found, strict=True)]
                cells += [f"{statistics.mean(held):.2f}" if held else ""]
                print(f"| {step} | {r if is_fixed else ''} | {method} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
