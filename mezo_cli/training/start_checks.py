"""Check at every start that the patched model's outputs are those of its own forward, and that the data are the
run's."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mezo_cli import models
from mezo_cli.config.schema import Config, Splits
from mezo_cli.errors import UserError, first_line
from mezo_cli.objectives import OBJECTIVES
from mezo_cli.objectives.plain_check import (
    check_against_plain,
    check_perturbed,
    computing_in_float32,
    flip_weights,
)
from mezo_cli.perturb.params import Params
from mezo_cli.runs import Run
from mezo_cli.system import is_device_error
from mezo_cli.tasks import ClassificationEncoder
from mezo_cli.training.session import Session


class ScoreCheck:
    """The outputs for two short rows by the model's own forward, to compare those of the patched model with.

    It is made before the model is patched.

    Args:
        config: of the run.
        loaded: the model.
        encoder: encodes the rows.
        params: the trainable tensors.
        perturbed: compare with perturbed weights, too.
    """

    def __init__(
        self,
        config: Config,
        loaded: models.LoadedModel,
        encoder: ClassificationEncoder,
        params: Params,
        *,
        perturbed: bool,
    ) -> None:
        self._name = _model_name(config, loaded)
        objective, self._flipped = OBJECTIVES.load(config.objective.name), None
        self._rows = objective.check_rows(encoder)
        with computing_in_float32(loaded.model):
            self._plain = objective.plain_outputs(loaded, self._rows, encoder)
            if perturbed:
                with flip_weights(params):
                    self._flipped = objective.plain_outputs(loaded, self._rows, encoder)

    def compare(self, session: Session) -> None:
        """Compare the scores of the patched model, computed in float32, then switch to the run's compute dtype.

        Raises:
            UserError: when the scores differ, or are not finite.
        """
        loaded, forward = session.loaded, session.forward
        batch = session.objective.collate(self._rows)
        check_against_plain(session.objective.outputs(batch), self._plain, loaded.device.type, self._name)
        if self._flipped is not None:
            scores = torch.stack([self._flipped, self._plain])
            check_perturbed(forward, session.objective, batch, scores, self._name)
        forward.set_compute_dtype(loaded.compute_dtype)
        torch.set_float32_matmul_precision(session.config.model.matmul_precision)
        session.objective.outputs(batch)  # a model may not support this dtype


@contextmanager
def refusing_unsupported(config: Config, loaded: models.LoadedModel) -> Iterator[None]:
    """Turn what the code of an unknown architecture raises inside the block into one line."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        if is_device_error(error):
            raise
        family = f"is a model family that objective={config.objective.name} does not support"
        raise UserError(f"{_model_name(config, loaded)} {family}: {first_line(error)}") from error


def check_data_unchanged(config: Config, run: Run, splits: Splits) -> None:
    """Refuse to resume a run with other rows than it began with, or another file as `data.keep`.

    Raises:
        UserError: when their fingerprint differs.
    """
    before, keep, why = run.info(), config.data.keep, "changed since this run began, so it cannot be resumed"
    if before.get("data_fingerprint") not in (None, splits.fingerprint):
        raise UserError(f"{run.path}: the data have {why}")
    if before.get("keep_sha256") not in (None, file_sha256(keep)):
        raise UserError(f"{run.path}: data.keep={keep} has {why}")


def file_sha256(file: str | None) -> str | None:
    """Return the sha256 of a file's content; None for no file.

    Raises:
        UserError: when it cannot be read.
    """
    try:
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"data.keep={file}: {error.strerror}") from error


def _model_name(config: Config, loaded: models.LoadedModel) -> str:
    return f"model.path={config.model.path}: {type(loaded.model).__name__}"
