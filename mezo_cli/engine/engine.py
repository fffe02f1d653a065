"""An engine at work for one run: start it, check it, let it complete and score, and keep its weights up to date."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mezo_cli.config.registry import ENGINE_OBJECTIVES
from mezo_cli.config.schema import Config, OpenAiConfig, VllmConfig
from mezo_cli.engine.members import Adapters, Members, WorkerWeights
from mezo_cli.engine.process import VllmServer
from mezo_cli.engine.server import server_at
from mezo_cli.errors import UserError
from mezo_cli.models import LoadedModel
from mezo_cli.models.download import fetch
from mezo_cli.optim import Optimizer, StepResult
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import Direction
from mezo_cli.perturb.params import Params
from mezo_cli.runs import Run

log = logging.getLogger("mezo")

# The largest difference of two log-probabilities of a label, as a fraction of the largest score.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
# Factors of z in the check at the start: the first that moves the log-probabilities by so many times what is allowed.
CHECKED_C = (1e-2, 3e-2, 1e-1, 3e-1, 1.0)
MOVED = 4.0
CHECKED_ROWS = 2  # whose scores an engine computes at the start, to compare them


class Engine:
    """The engine of one run, for texts of at most `max_length` tokens. It takes the run's sessions one after the other.

    `record` is what run.json says of it.
    """

    def __init__(self, config: Config, max_length: int) -> None:
        settings = config.engine
        assert isinstance(settings, VllmConfig | OpenAiConfig)
        self.config, self._settings, self._max_length = config, settings, max_length
        self.record: dict[str, Any] = {"name": settings.name}
        self._members: Members | None = None
        if isinstance(settings, OpenAiConfig):
            self._server = server_at(settings)
        else:
            rank = getattr(config.peft, "r", None)
            self._server = VllmServer(settings, Path(fetch(config.model)), max_length, rank)

    def attach(self, loaded: LoadedModel, forward: PerturbedForward) -> Members:
        """Return what answers the requests of a session's objective, with the session's weights."""
        self.release()
        if not self._server.is_started:
            self.record["version"] = self._server.start(self._max_length)
            log.info("engine %s %s, %s", self._settings.name, self.record["version"], self._settings.dtype)
        kind = Adapters if self.config.peft.name == "lora" else WorkerWeights
        self._members = kind(self._server, forward, loaded)
        return self._members

    def serve(self, session: Any, rows: Sequence[Any]) -> None:
        """Compute a session's forwards from now on, with its weights; the first of `rows` are scored to compare."""
        ENGINE_OBJECTIVES.load(self.config.objective.name).attach(session.objective, self, rows[:CHECKED_ROWS])

    @torch.no_grad()
    def check(self, forward: PerturbedForward, by_model: Callable[[], Tensor], by_engine: Callable[[], Tensor]) -> None:
        """Compare scores by the engine with the model's own, at theta and with perturbed weights, once in a process.

        Both compute those of some rows, with theta or one sign: [rows, ...].
        """
        if self._server.is_started:
            return
        direction = Direction(self.config.seed, 0)
        plain, tolerance = by_model(), TOLERANCE[self._settings.dtype]
        for c in CHECKED_C:
            with forward.perturbed(direction, c):
                wanted = torch.stack([plain, *forward.forward_per_sign(by_model)])
            allowed = tolerance * float(wanted.abs().max())
            moved = min(float((a - b).abs().max()) for a, b in combinations(wanted, 2))
            if moved >= MOVED * allowed:
                break
        else:
            log.warning(
                "warning: engine: a perturbation by %g z moves the scores by %.2g only, where %.2g is allowed for "
                "rounding: the check cannot tell whether the engine's weights are perturbed",
                *(c, moved, allowed),
            )
        with forward.perturbed(direction, c):
            perturbed = forward.forward_per_sign(by_engine)
        error = float((torch.stack([by_engine(), *perturbed]) - wanted).abs().max())
        if not error <= allowed:
            raise UserError(
                f"engine={self._settings.name} computes other scores than the model "
                f"{self.config.model.path} itself (by {error:.2g}, allowed is {allowed:.2g})"
            )
        self._server.is_started = True
        log.info("engine its scores are the model's own, up to %.1g", error)

    def update(self, optimizer: Optimizer, step: int, result: StepResult) -> None:
        """Follow an update of the session's weights: that of step number `step` (from 0)."""
        assert self._members is not None
        self._members.follow(optimizer, (step, result.recorded, result.lr))

    def check_weights(self, params: Params) -> None:
        """Check that the engine's weights, where it keeps some, are bitwise identical to `params`."""
        assert self._members is not None
        self._members.check(params)

    def release(self) -> None:
        """Let go of the session whose scores were computed last: its weights are needed no more."""
        if self._members is not None:
            self._members.forget()
            self._members.close()
        self._members = None

    def close(self) -> None:
        """Let go of the server and remove what was written for it."""
        self._server.cancel()
        if self._members is not None:
            self._members.close()
        self._server.close()


@contextmanager
def running_engine(config: Config, run: Run, session: Any, rows: Mapping[str, Sequence[Any]]) -> Iterator[Engine]:
    """Yield the run's engine, which computes the session's forwards from then on; `rows` are those of each split."""
    longest = ENGINE_OBJECTIVES.load(config.objective.name).longest
    engine = Engine(config, max(longest(session.objective, of) for of in rows.values() if of))
    try:
        engine.serve(session, rows["train"])
        run.update(engine=engine.record)
        del session  # which is replaced at the end of a run: memory may not hold two models
        yield engine
    finally:
        engine.close()
