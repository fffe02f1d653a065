"""LOZO: its ranks, its momentum and runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mezo_cli.objectives.base import BatchLoss
from mezo_cli.optim import OPTIMIZERS, make_config
from mezo_cli.perturb.noise import Direction
from mezo_cli.testing.optimizers import Regression, Trial, same
from tests.command_line import Train, error_line
from tests.optim.test_mezo import SENTENCES, ready


def trained(name: str, **values: Any) -> Trial:
    config = make_config(name, lr=0.01, rank=2, interval=3, weight_decay=0.1, **values)
    ours = Trial(OPTIMIZERS.implementation(config.name), config, outputs=5)
    ours.train(0, 8)
    return ours


def test_without_beta_lozo_m_is_lozo_bit_for_bit() -> None:
    for values in ({}, {"samples": 2}):
        lozo, lozo_m = trained("lozo", **values), trained("lozo_m", beta=0.0, **values)
        assert same(lozo.problem.weights(), lozo_m.problem.weights())


def test_momentum_is_the_formula_in_float64_over_two_projections() -> None:
    config: Any = make_config("lozo_m", rank=2, interval=3, beta=0.7)
    problem = Regression(config.make_noise(), outputs=5)
    params, noise = problem.forward.params, problem.forward.params.noise
    want = {name: p.detach().double() for name, p in params.tensors.items()}
    n, m, old = (torch.zeros(*shape, dtype=torch.float64) for shape in ((5, 2), (5,), (6, 2)))
    optimizer: Any = OPTIMIZERS.implementation(config.name)(config, 1, 8)
    for step in range(8):
        g, z = 0.5 - step % 3, Direction(1, step)
        optimizer.apply_updates(params, [(step, [g], 0.125)])
        sides = noise.factors(z, "weight", (5, 6), torch.device("cpu"))
        u, v = (side.double() for side in sides)
        if step in (3, 6):
            n = n @ old.t() @ v / 6
        n, old = 0.7 * n + 0.3 * g * u, v
        m = 0.7 * m + 0.3 * g * noise.z(z, "bias", (5,), "cpu").double()
        want = {"weight": want["weight"] - 0.125 * n @ v.t() / 2, "bias": want["bias"] - 0.125 * m}
    for name, p in params.tensors.items():
        torch.testing.assert_close(p.detach().double(), want[name], rtol=1e-5, atol=1e-5)


def test_a_rank_above_every_matrix_is_refused(train: Train, tmp_path: Path, eager_kernels: None) -> None:
    said = train(tmp_path / "other", "optimizer=lozo", "optimizer.rank=5000")
    assert "optimizer.rank=5000: the largest trained matrix has" in error_line(said)
    assert not (tmp_path / "other" / "trajectory.bin").exists()


@pytest.mark.parametrize("paired", [0, 1024])
def test_losses_from_the_factors_are_those_of_the_whole_z(paired: int, roberta: Path, eager_kernels: None) -> None:
    ours = ready(roberta, "optimizer=lozo", "optimizer.rank=2", f"model.paired_tokens={paired}")
    loss = BatchLoss(ours.objective, [ours.objective.collate(ours.encoder.encode_all(SENTENCES))])
    pairs = []
    for uses in (True, False):
        ours.params.noise.has_factors = uses
        with ours.forward.perturbed(Direction(1, 3), 1e-2):
            pairs.append(loss().double())
    torch.testing.assert_close(pairs[0], pairs[1], rtol=1e-6, atol=0)
    assert not torch.equal(pairs[0][0], pairs[0][1])
