"""Compare a run by an engine with one by the model: scores before every step, that is after every update; losses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mezo_cli.engine.objectives import with_last_tokens_scored
from mezo_cli.objectives.collate import Batch
from mezo_cli.objectives.generation import Generation
from mezo_cli.perturb.noise import Direction


def losses_and_metrics(run: Path) -> list[dict[str, float]]:
    """Return the losses and the accuracies of the lines of a run's metrics.jsonl."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in line if key.startswith("loss") or key == "accuracy"} for line in lines]


def own_losses(objective: Generation, batch: Batch) -> torch.Tensor:
    """Return the losses of the answers by the model itself, float64 [rows]."""
    engine, objective.engine = objective.engine, None
    losses = objective.answer_losses(batch).cpu()
    objective.engine = engine
    return losses


def compare_scores(monkeypatch: pytest.MonkeyPatch, rows: Any = None) -> list[float]:
    """Return the list to which each step adds the largest difference of a score, at theta and along a direction."""
    errors: list[float] = []
    begin = Generation.begin_step

    def begin_step(self: Any, step: int) -> None:
        begin(self, step)
        engine = self.engine
        if engine is None:
            return
        row = with_last_tokens_scored(self.check_rows(self.encoder)[1])
        own, batch = [], self.collate([row])
        theirs = []
        with torch.no_grad():
            own.append(own_losses(self, batch))
            theirs.append(engine.losses([row]))
            for sign in (1, -1):
                with self.forward.perturbed(Direction(1, step), 0.1, (sign,)):
                    own.append(own_losses(self, batch))
                    theirs.append(engine.losses([row]))
        assert (own[1] - own[2]).abs().max() > 1e-3  # so that another adapter would be seen
        errors.append(float((torch.stack(own) - torch.stack(theirs)).abs().max()))

    monkeypatch.setattr(Generation, "begin_step", begin_step)
    return errors
