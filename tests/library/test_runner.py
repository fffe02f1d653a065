"""The runner's objective as closure gives the runner's weights bitwise."""

from pathlib import Path

import pytest
import torch

from mezo_cli import MezoOptimizer, models
from mezo_cli.config.compose import build_config
from mezo_cli.data import load_splits
from mezo_cli.data.batch_sampler import BatchSampler
from mezo_cli.objectives import OBJECTIVES
from mezo_cli.objectives.base import BatchLoss
from mezo_cli.training.prepare import load_session
from mezo_cli.training.session import Session
from tests.command_line import small

STEPS = 3


pytestmark = pytest.mark.usefixtures("eager_kernels")


def test_the_step_is_the_runners(roberta: Path, movies: Path, tmp_path: Path) -> None:
    config = build_config([*small(roberta, movies, tmp_path / "run")[:3], "batch_size=8", "optimizer.lr=1e-2"], None)
    runner = load_session(config, trains=True)
    rows = runner.encoder.encode_all(load_splits(config).train)
    sampler = BatchSampler(len(rows), config.batch_size, config.seed)
    runner.exclude_unreachable(rows[0])

    loaded = models.load(config.model, OBJECTIVES.implementation("mlm").model_kind, config.task.labels, config.seed)
    model, encoder = loaded.model, runner.encoder
    optimizer = MezoOptimizer(model, lr=1e-2, eps=config.optimizer.eps, seed=config.seed)
    objective = OBJECTIVES.implementation("mlm")(config, loaded, optimizer.forward, encoder)
    session = Session(config, loaded, optimizer.forward, objective, runner.optimizer, encoder)
    for step in range(STEPS):
        chosen = [rows[i] for i in sampler.batch(step)]
        with torch.no_grad():
            expected = runner.step(chosen, step)
        batch = session.objective.collate(chosen)
        loss = optimizer.step(lambda batch=batch: BatchLoss(session.objective, [batch])(), paired=True)  # type: ignore[misc]
        assert loss == expected.loss
        assert optimizer.result is not None
        assert optimizer.result.projected_grads == expected.projected_grads
    theirs = dict(runner.loaded.model.named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in model.named_parameters())
