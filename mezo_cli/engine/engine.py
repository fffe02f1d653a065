"""An engine at work for one run: start it, check it, let it complete and score, and keep its weights up to date.

mezo's own copy of theta is the authoritative one: it is updated by the optimizer as in every run, and checkpoints and
the trajectory come from it. The engine has weights of its own, and only computes with them:

- a LoRA's A and B are sent with every request, as the files of an adapter;
- all parameters are perturbed and updated inside the engine by the same scalars, bitwise identically.
"""

import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mezo_cli.config.optimizers import zeroth_order
from mezo_cli.config.own_code import ADAPTER_DIR, URL, of_server
from mezo_cli.config.registry import ENGINE_OBJECTIVES
from mezo_cli.config.schema import Config, OpenAiConfig, VllmConfig
from mezo_cli.engine.adapter_files import AdapterFiles, scratch_folder
from mezo_cli.engine.layout import Block, LayoutError, as_matrix, check_whole, digest
from mezo_cli.engine.members import AHEAD, Member, Members
from mezo_cli.engine.process import ServerProcess
from mezo_cli.engine.server import EngineFailed, EngineServer
from mezo_cli.errors import RunFailed, UserError, join
from mezo_cli.models import LoadedModel
from mezo_cli.models.download import fetch
from mezo_cli.optim import Optimizer, StepResult
from mezo_cli.perturb.decay import Term
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import Direction
from mezo_cli.perturb.params import Params

log = logging.getLogger("mezo")

# The largest difference of two log-probabilities of a label, as a fraction of the largest score.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
# Factors of z in the check at the start: the first that moves the log-probabilities by so many times what is allowed.
CHECKED_C = (1e-2, 3e-2, 1e-1, 3e-1, 1.0)
MOVED = 4.0
CHECKED_ROWS = 2  # whose scores an engine computes at the start, to compare them


class Engine:
    """The engine of one run. It takes the run's sessions one after the other.

    Args:
        max_length: tokens of the longest text: a prompt with what is generated or scored after it.

    Attributes:
        record: what run.json says of it.
        is_started: whether it has been found right; from then on its errors are `RunFailed`.
    """

    def __init__(self, config: Config, max_length: int) -> None:
        assert isinstance(config.engine, VllmConfig | OpenAiConfig)
        self.config, self._settings, self._max_length = config, config.engine, max_length
        self.is_started = False
        self.record: dict[str, Any] = {"name": config.engine.name}
        self._members: Members | None = None
        self._adapters: AdapterFiles | None = None
        self._clean: list[str] = []  # the adapter at theta, until theta changes
        self._blocks: list[Block] = []
        try:
            self._server = _open(config, max_length)
        except EngineFailed as failure:
            raise UserError(f"engine={config.engine.name} cannot be started: {failure}") from failure

    def attach(self, loaded: LoadedModel, forward: PerturbedForward) -> Members:
        """Return what answers the requests of a session's objective, with the session's weights."""
        self.release()
        if not self.is_started:
            self._start(loaded, forward.params)
        if self.config.peft.name == "lora":
            count, folder = (AHEAD + 1) * self._settings.max_loras + 1, _adapter_dir(self._settings)
            self._adapters = AdapterFiles(loaded.adapter, forward.params, count, folder)
        else:
            self._load(forward.params)
        self._members = Members(forward, self._send, 1 if self._adapters is None else self._settings.max_loras)
        return self._members

    def serve(self, session: Any, rows: Sequence[Any]) -> None:
        """Compute a session's forwards from now on, with its weights; the first of `rows` are scored to compare."""
        by_engine = ENGINE_OBJECTIVES.load(self.config.objective.name)
        session.objective = by_engine.attach(session.objective, self, rows[:CHECKED_ROWS])

    def _start(self, loaded: LoadedModel, params: Params) -> None:
        """Let the engine load the model, and check that it holds all that is trained."""
        config, engine = self.config, self._settings
        tensors = [(name, list(p.shape)) for name, p in params.tensors.items()]
        lora = config.peft.name == "lora"
        held: dict[str, Any] = {} if lora else {"tensors": tensors, "noise": zeroth_order(config.optimizer).noise}
        described = self._call("start", max_length=self._max_length, **held)
        self._blocks = [Block(*block) for block in described["blocks"]]
        if not lora:
            try:
                check_whole(tensors, self._blocks)
            except LayoutError as error:
                family = type(loaded.model).__name__
                raise UserError(f"engine={engine.name} does not support {family}: {error}") from error
        processes = getattr(engine, "tensor_parallel", 1)
        sharded = f" in {processes} processes" if processes != 1 else ""
        self.record |= {"version": described["version"]}
        log.info("engine %s %s, %s%s", engine.name, described["version"], engine.dtype, sharded)

    @torch.no_grad()
    def check(
        self, forward: PerturbedForward, own: Callable[[], Tensor], by_engine: Callable[[], Tensor], rows: int
    ) -> None:
        """Compare scores by the engine with the model's own, at theta and with perturbed weights, once in a process.

        Args:
            own: computes the scores of some rows, with theta or one sign: [rows, ...].
            by_engine: lets the engine compute them.
            rows: their number.
        """
        if self.is_started:
            return
        direction = Direction(self.config.seed, 0)
        plain, tolerance = own(), TOLERANCE[self._settings.dtype]
        for c in CHECKED_C:
            with forward.perturbed(direction, c):
                wanted = torch.stack([plain, *forward.forward_per_sign(own)])
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
                f"engine={self.config.engine.name} computes other scores than the model "
                f"{self.config.model.path} itself (by {error:.2g}, allowed is {allowed:.2g})"
            )
        self.is_started = True
        log.info("engine its scores of %d rows are the model's own, up to %.1g", rows, error)

    def say_repeats(self, first: Any, second: Any) -> None:
        """Say whether the engine completed the same prompts by the same texts, and what that promises."""
        self.record["texts_repeat"] = repeats = first == second
        log.info(
            "engine %s: recorded steps replay bitwise; steps after a resume may differ from those of a run without it",
            "it completed the same prompts twice alike" if repeats else "it completed the same prompts differently",
        )

    def _send(self, method: str, params: Mapping[str, Any], members: Sequence[Member]) -> Callable[[], list[Any]]:
        """Send a request for some members; return a function that waits for the results."""
        if self._adapters is None:
            weights: list[dict[str, Any]] = [{} if m.direction is None else m._asdict() for m in members]
            return self._submit(method, **params, weights=weights)
        theirs = [self._adapters.write(*m) for m in members if m.direction is not None]
        if len(theirs) < len(members) and not self._clean:
            self._clean = [self._adapters.write(None, 0.0)]
        names = iter(theirs)
        weights = [
            {"adapter": self._clean[0], "keep": True}
            if m.direction is None
            else {"adapter": next(names), "keep": False}
            for m in members
        ]
        wait, files = self._submit(method, **params, weights=weights), self._adapters

        def results() -> list[Any]:
            answer: list[Any] = wait()
            files.remove(theirs)  # the engine has read them and let go of them
            return answer

        return results

    def update(self, optimizer: Optimizer, step: int, result: StepResult) -> None:
        """Follow an update of the session's weights: that of step number `step` (from 0).

        Raises:
            RunFailed: when the engine has ended.
        """
        if self._adapters is None:
            assert optimizer.replayable
            record = (step, result.recorded, result.lr)
            optimizer.apply_updates(self._params, [record])  # type: ignore[arg-type]  # it calls `update` alone
        else:
            self._forget_clean()

    def check_weights(self, params: Params) -> None:
        """Check that the engine's weights, where it keeps some, are bitwise identical to `params`.

        Raises:
            RunFailed: when they have not.
        """
        if self._adapters is not None:
            return
        tensors = list(params.tensors.items())
        wrong = set()
        for numbers, sha256 in self._call("digests"):
            block = Block(*numbers)
            name, p = tensors[block.tensor]
            own = p.detach().view(as_matrix(p.shape))[block.row :, block.column :][: block.rows, : block.columns]
            if digest(own.cpu().numpy()) != sha256:
                wrong.add(name)
        if wrong:
            raise RunFailed(f"the engine's weights are not those of the trajectory: {join(sorted(wrong)[:3])}")

    def _load(self, params: Params) -> None:
        """Give the engine the session's weights."""
        with scratch_folder("mezo-weights-", sum(p.nbytes for p in params.tensors.values())) as folder:
            path = Path(folder) / "theta.safetensors"
            save_file({name: p.detach().cpu().clone() for name, p in params.tensors.items()}, path)
            self._call("load", path=str(path))
        self._params = _RemoteParams(self, params)

    def _forget_clean(self) -> None:
        if self._clean and self._adapters is not None:
            self._call("remove", folders=self._clean)
            self._adapters.remove(self._clean)
        self._clean = []

    def _call(self, method: str, **params: Any) -> Any:
        return self._submit(method, **params)()

    def _submit(self, method: str, **params: Any) -> Callable[[], Any]:
        with self._explaining():
            wait = self._server.submit(method, **params)

        def result() -> Any:
            with self._explaining():
                return wait()

        return result

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except EngineFailed as failure:
            error_class = RunFailed if self.is_started else UserError
            raise error_class(f"engine={self.config.engine.name} failed: {failure}") from failure

    def release(self) -> None:
        """Let go of the session whose scores were computed last: its weights are needed no more."""
        if self._members is not None:
            self._members.forget()
        if self._adapters is not None:
            self._forget_clean()
            self._adapters.close()
        self._members, self._adapters = None, None

    def close(self) -> None:
        """Let go of the server and remove what was written for it."""
        self._server.close()
        if self._adapters is not None:
            self._adapters.close()


class _RemoteParams:
    """The engine's theta, for an optimizer whose `apply_updates` calls `Params.update` alone."""

    def __init__(self, engine: Engine, params: Params) -> None:
        self._engine, self._decay = engine, copy.deepcopy(params.decay)

    def update(self, terms: Sequence[Term], decays: Sequence[float], names: Sequence[str] | None = None) -> None:
        """Apply theta <- decay theta + coefficient z for each (direction, coefficient) in order."""
        self._engine._call("update", terms=list(terms), decays=list(self._decay.take_each(terms, decays)))


def _open(config: Config, max_length: int) -> EngineServer:
    """Find the server, or start it.

    Raises:
        EngineFailed: for an address that is not one, or of another machine; when it does not start.
    """
    settings = config.engine
    if isinstance(settings, VllmConfig):
        process = ServerProcess(settings, Path(fetch(config.model)), max_length, getattr(config.peft, "r", None))
        return EngineServer.started(settings, process)
    assert isinstance(settings, OpenAiConfig)
    _adapter_dir(settings)
    return EngineServer.at(settings, of_server(settings, URL))


def _adapter_dir(settings: VllmConfig | OpenAiConfig) -> Path | None:
    if isinstance(settings, VllmConfig):
        return None
    folder = Path(of_server(settings, ADAPTER_DIR)).expanduser()
    if not (folder.is_absolute() and folder.is_dir() and os.access(folder, os.W_OK)):
        raise UserError(f"engine.adapter_dir={folder}: give the absolute path of a folder that can be written to")
    return folder
