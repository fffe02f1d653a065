"""Measure the error of the projected gradient in bfloat16: same directions, batches and weights as in float32.

    python scripts/measure_signal.py                                       the embedded demo, 100 directions
    python scripts/measure_signal.py task=sst2 model=roberta-large data.shots=16
    python scripts/measure_signal.py model=demo data=files data.dir=GLUE/SST-2 --directions 200 --eps 1e-3 1e-2

Prints, for each eps: the correlation of g in bfloat16 with g in float32, the relative error |g' - g|_2 / |g|_2, the
share of directions with the same sign, and mean |g|. theta is not changed.
"""

import argparse
import dataclasses
from functools import partial

import numpy as np

from mezo_cli.config.compose import build_config
from mezo_cli.data import load_splits
from mezo_cli.data.batch_sampler import BatchSampler
from mezo_cli.optim.mezo import spsa
from mezo_cli.perturb.noise import Direction
from mezo_cli.training.setup import prepare


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directions", type=int, default=100)
    parser.add_argument("--eps", type=float, nargs="+", default=[1e-4, 1e-3, 1e-2])
    parser.add_argument("overrides", nargs="*", help="settings as for `mezo train`")
    args = parser.parse_intermixed_args()
    config = build_config(args.overrides or ["experiment=demo", "batch_size=64"])
    low = dataclasses.replace(config, model=dataclasses.replace(config.model, compute_dtype="bfloat16"))
    exact, rounded = prepare(config), prepare(low)
    rows = exact.encoder.encode_all(load_splits(config).train)
    sampler = BatchSampler(len(rows), config.batch_size, config.seed)
    print(f"{config.model.path}, {config.task.name}, batch {config.batch_size}, {args.directions} directions")
    print("| eps | correlation | relative error | same sign | mean abs g |\n|---|---|---|---|---|")
    for eps in args.eps:
        pairs = []
        for step in range(args.directions):
            z, chosen = Direction(config.seed, step), [rows[i] for i in sampler.batch(step)]
            pairs.append([spsa(s.forward, partial(s.loss, s.batch(chosen)), z, eps)[2] for s in (exact, rounded)])
        g, r = np.array(pairs).T
        correlation, error = np.corrcoef(g, r)[0, 1], np.linalg.norm(r - g) / np.linalg.norm(g)
        same = np.mean(np.sign(g) == np.sign(r))
        print(f"| {eps:g} | {correlation:.3f} | {error:.3f} | {100 * same:.0f}% | {np.abs(g).mean():.2f} |", flush=True)


if __name__ == "__main__":
    main()
