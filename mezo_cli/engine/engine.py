"""An engine at work for one run: start it, check it, let it score label words, and keep its weights up to date.

mezo's own copy of theta is the authoritative one: it is updated by the optimizer as in every run, and checkpoints and
the trajectory come from it. The engine has weights of its own, and only computes scores with them:

- a LoRA's A and B are sent with every request, as the files of an adapter;
- all parameters are perturbed and updated inside the engine by the same scalars, bitwise identically.
"""

import copy
import logging
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mezo_cli.config.schema import Config, VllmConfig
from mezo_cli.engine.adapter_files import AdapterFiles, scratch_folder
from mezo_cli.engine.environment import find_python
from mezo_cli.engine.layout import Block, LayoutError, as_matrix, check_whole, digest
from mezo_cli.engine.process import EngineFailed, EngineProcess
from mezo_cli.engine.scores import EngineScores
from mezo_cli.errors import RunFailed, UserError, join
from mezo_cli.models import LoadedModel
from mezo_cli.models.download import fetch
from mezo_cli.objectives.classification import Classification
from mezo_cli.objectives.collate import Batch
from mezo_cli.optim import Optimizer, StepResult
from mezo_cli.optim.settings import zeroth_order
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


class Engine:
    """The engine of one run. It takes the run's sessions one after the other: `objective` replaces a session's own.

    Args:
        config: of the run.
        max_length: tokens of the longest prompt that will be scored, with all of a label word but its last token.

    Raises:
        UserError: when the engine cannot be started.
    """

    def __init__(self, config: Config, max_length: int) -> None:
        assert isinstance(config.engine, VllmConfig)
        self.config, self._settings, self._max_length = config, config.engine, max_length
        self._is_started = False  # from then on its errors are `RunFailed`
        self._adapters: AdapterFiles | None = None
        self._clean: list[str] = []  # the adapter at theta, until theta changes
        self._blocks: list[Block] = []
        try:
            self._process = EngineProcess(find_python(self._settings.python))
        except EngineFailed as failure:
            raise UserError(f"engine={config.engine.name} cannot be started: {failure}") from failure

    def objective(
        self, loaded: LoadedModel, forward: PerturbedForward, own: Classification, rows: Batch
    ) -> EngineScores:
        """Return the objective that scores a session's rows by the engine, with the session's weights.

        Args:
            loaded, forward, own: the session's model, its forwards and its objective.
            rows: some rows, whose scores by the engine are compared with those of `own`, plain and perturbed.

        Raises:
            UserError: when the engine does not support the model, or computes other scores.
        """
        self.release()
        first = not self._is_started
        words = max(map(len, own.label_ids))
        if first:
            self._start(loaded, forward.params, words == 1)
        if self.config.peft.name == "lora":
            self._adapters = AdapterFiles(loaded.adapter, forward.params)
        else:
            self._load(forward.params)
        scores = EngineScores(own, lambda *requests: self._score(forward, *requests))
        if first:
            self._check(forward, own, scores, rows)
            self._is_started = True
        return scores

    def _start(self, loaded: LoadedModel, params: Params, raw_logits: bool) -> None:
        """Let the process load the model, and check that it holds all that is trained."""
        config, engine = self.config, self._settings
        tensors = [(name, list(p.shape)) for name, p in params.tensors.items()]
        lora = config.peft.name == "lora"
        described = self._call(
            "start",
            folder=str(fetch(config.model)),
            tensor_parallel=engine.tensor_parallel,
            dtype=engine.dtype,
            memory=engine.memory,
            max_length=self._max_length,
            raw_logits=raw_logits,
            prefix_cache=True,
            rank=getattr(config.peft, "r", None),
            tensors=[] if lora else tensors,
            noise=zeroth_order(config.optimizer).noise,
        )
        self._blocks = [Block(*block) for block in described["blocks"]]
        if not lora:
            try:
                check_whole(tensors, self._blocks)
            except LayoutError as error:
                family = type(loaded.model).__name__
                raise UserError(f"engine={engine.name} does not support {family}: {error}") from error
        sharded = f" in {engine.tensor_parallel} processes" if engine.tensor_parallel != 1 else ""
        log.info("engine %s %s, %s%s", engine.name, described["version"], engine.dtype, sharded)

    @torch.no_grad()
    def _check(self, forward: PerturbedForward, own: Classification, scores: EngineScores, rows: Batch) -> None:
        """Compare the label scores of some rows with those of the session's own objective, plain and perturbed."""
        direction = Direction(self.config.seed, 0)
        plain, tolerance = own.logits(rows), TOLERANCE[self._settings.dtype]
        for c in CHECKED_C:
            with forward.perturbed(direction, c):
                own_scores = torch.stack([plain, *forward.forward_per_sign(lambda: own.logits(rows))])
            allowed, wanted = tolerance * float(own_scores.abs().max()), _label_log_probs(own_scores)
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
            perturbed = scores.logits(rows)
        error = float((_label_log_probs(torch.stack([scores.logits(rows), *perturbed])) - wanted).abs().max())
        if not error <= allowed:
            raise UserError(
                f"engine={self.config.engine.name} computes other scores than the model "
                f"{self.config.model.path} itself (by {error:.2g}, allowed is {allowed:.2g})"
            )
        log.info("engine its scores of %d rows are the model's own, up to %.1g", len(rows.rows), error)

    def _score(self, forward: PerturbedForward, prompts: Any, tokens: Any) -> list[list[list[float]]]:
        """Ask for the scores with the weights that `forward` perturbs."""
        perturbation = forward.perturbation
        direction = None if perturbation is None else perturbation.direction
        coefficients = [0.0] if perturbation is None else [sign * perturbation.eps for sign in perturbation.signs]
        if self._adapters is None:
            weights = [{} if direction is None else {"direction": direction, "c": c} for c in coefficients]
            return self._request(prompts, tokens, weights)
        if direction is None:
            self._clean = self._clean or self._adapters.write(None, [0.0])
            return self._request(prompts, tokens, [{"adapter": self._clean[0]}])
        folders = self._adapters.write(direction, coefficients)
        scores = self._request(prompts, tokens, [{"adapter": folder} for folder in folders])
        self._remove(folders)
        return scores

    def _request(self, prompts: Any, tokens: Any, weights: list[dict[str, Any]]) -> list[list[list[float]]]:
        scores: list[list[list[float]]] = self._call("score", prompts=prompts, tokens=tokens, weights=weights)
        return scores

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
            self._remove(self._clean)
            self._clean = []

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

    def _remove(self, folders: list[str]) -> None:
        if folders and self._adapters is not None:
            self._call("remove", folders=folders)
            self._adapters.remove(folders)

    def _call(self, method: str, **params: Any) -> Any:
        try:
            return self._process.call(method, **params)
        except EngineFailed as failure:
            error_class = RunFailed if self._is_started else UserError
            raise error_class(f"engine={self.config.engine.name} failed: {failure}") from failure

    def release(self) -> None:
        """Let go of the session whose scores were computed last: its weights are needed no more."""
        if self._adapters is not None:
            self._remove(self._clean)
            self._adapters.close()
        self._adapters, self._clean = None, []

    def close(self) -> None:
        """End the process and remove what was written for it."""
        self._process.close()
        if self._adapters is not None:
            self._adapters.close()


class _RemoteParams:
    """The engine's theta, for an optimizer whose `apply_updates` calls `Params.update` alone.

    Args:
        engine: the engine, with the weights of `params`.
        params: the session's.
    """

    def __init__(self, engine: Engine, params: Params) -> None:
        self._engine, self._decay = engine, copy.deepcopy(params.decay)

    def update(self, terms: Sequence[Term], decays: Sequence[float], names: Sequence[str] | None = None) -> None:
        """Apply theta <- decay theta + coefficient z for each (direction, coefficient) in order."""
        due, in_float64 = list(self._decay.take_each(terms, decays)), self._decay.in_float64
        self._engine._call("update", terms=list(terms), decays=due, decay_in_float64=in_float64)


def _label_log_probs(scores: Tensor) -> Tensor:
    """Return the log-probabilities of the labels: a prompt's normalizer may be left out of its scores."""
    return scores.double().log_softmax(-1)
