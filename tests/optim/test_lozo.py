"""LOZO: its ranks, what the published code does otherwise, and runs."""

from pathlib import Path
from typing import Any, cast

import torch

from mezo_cli.optim import make_config
from mezo_cli.optim.lozo import Lozo, LozoConfig
from mezo_cli.perturb.noise import Direction
from mezo_cli.runs import trajectory
from mezo_cli.testing.optimizers import Regression
from tests.command_line import error_line, mezo, small


def moved(as_released: bool, step: int, **values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What a step with g = 1, lr = 0.5 adds to the weights [5, 6], and z."""
    config = cast(LozoConfig, make_config("lozo", rank=2, interval=3, as_released=as_released, **values))
    problem = Regression(config.make_noise(), outputs=5)
    before = problem.weights()[0]
    params = problem.forward.params
    Lozo(config, 1, 8).apply_updates(params, [(step, [1.0], 0.5)])
    return before - problem.weights()[0], params.noise.z(Direction(1, step), "weight", (5, 6), "cpu").view(5, 6)


def test_the_released_code_has_no_1_over_r_and_moves_along_an_unprobed_u_where_v_is_new() -> None:
    for step in (3, 4):
        step_taken, z = moved(False, step)
        torch.testing.assert_close(step_taken, 0.5 * z / 2, rtol=1e-5, atol=1e-5)
    released, z = moved(True, 4)
    torch.testing.assert_close(released, 0.5 * z, rtol=1e-5, atol=1e-5)
    released, z = moved(True, 3)
    cosine = float((released * z).sum() / (released.norm() * z.norm()))
    assert abs(cosine) < 0.9
    assert torch.linalg.matrix_rank(torch.cat([released, z]), atol=1e-4) == 2, "V is the one that was probed"


def test_a_run_is_replayed_to_its_weights_and_a_rank_above_every_matrix_trains_nothing(
    roberta: Path, movies: Path, tmp_path: Path, eager_kernels: None
) -> None:
    run = tmp_path / "run"
    words = ["optimizer=lozo", "optimizer.interval=2", "optimizer.rank=2", "steps=3", "eval_every=3"]
    done = mezo("train", *small(roberta, movies, run, *words))
    assert done.code == 0, done
    past = trajectory.read(run / "trajectory.bin")
    assert (past.record_bytes, past.header.version) == (16, 2)
    assert past.header.settings["interval"] == 2
    assert mezo("replay", run, "--step", 3, "--out", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        run / "checkpoints" / "last" / "model.safetensors"
    ).read_bytes()
    said = mezo("train", *small(roberta, movies, tmp_path / "other", "optimizer=lozo", "optimizer.rank=5000"))
    assert "optimizer.rank=5000: the largest trained matrix has" in error_line(said)
    assert not (tmp_path / "other" / "trajectory.bin").exists()
