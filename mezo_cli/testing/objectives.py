"""Conformance tests of objectives. Every built-in objective passes them, and a plug-in's test file runs them by

    from mezo_cli.testing import objectives

    class TestMine(objectives.Conformance):
        name = "mine"

They need pytest and nothing from the network: the model is the embedded demo model, and rows are the demo data's. For
an objective that this model does not fit, override the fixture `settings`.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import Tensor

from mezo_cli import models
from mezo_cli.api import finetune
from mezo_cli.config.choices import find_choices
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Config, Example
from mezo_cli.config.stored import read_config
from mezo_cli.data.texts import prompt_columns
from mezo_cli.errors import UserError
from mezo_cli.objectives import OBJECTIVES
from mezo_cli.objectives.base import Objective
from mezo_cli.objectives.classification import Classification
from mezo_cli.perturb.noise import Direction
from mezo_cli.runs import Run
from mezo_cli.session import restore
from mezo_cli.session.opening import opened
from mezo_cli.session.session import Session
from mezo_cli.tasks import ClassificationEncoder, InputEncoder

TEXTS = ("a joy from start to end", "what a poor film", "i yawned and left , and so did everybody else", "lovely")
DIRECTION, EPS = Direction(3, 11), 0.05


class Conformance:
    """What every objective must do. A subclass gives its name.

    Attributes:
        name: the choice of `objective=`.
        task: the choice of `task=`.
        config_dir: a folder with YAMLs, as `--config-dir`; not needed for those that a plug-in's package contains.
        device: the choice of `model.device=`.
        rtol, atol: how far scores may be from those of the model's own forward.
    """

    name: ClassVar[str]
    task: ClassVar[str] = "sst2"
    config_dir: ClassVar[str | None] = None
    device: ClassVar[str] = "cpu"
    rtol: ClassVar[float] = 1e-4
    atol: ClassVar[float] = 1e-4

    @pytest.fixture
    def settings(self) -> list[str]:
        """Return the overrides that choose the model; its weights are float32."""
        return ["model=demo"]

    @pytest.fixture
    def config(self, settings: list[str]) -> Config:
        """Return the config of a run with this objective."""
        words = [f"task={self.task}", f"objective={self.name}", "data=demo", f"model.device={self.device}", *settings]
        return build_config(words, self.config_dir)

    @pytest.fixture
    def session(self, config: Config) -> Session:
        """Return the loaded model with its objective."""
        return opened(config)

    @pytest.fixture
    def rows(self, config: Config) -> list[Example]:
        """Return rows of different lengths."""
        return [replace(self.row(config, text), label=i % 2) for i, text in enumerate(TEXTS)]

    def row(self, config: Config, text: str, where: str = "") -> Example:
        """Return a row of a text, without a label. A task without labels has it in each column."""
        if config.data_task.labels:
            return Example((text,) * len(config.task.columns), 0, where)
        return Example((), -1, where, dict.fromkeys(prompt_columns(config.data_task), text))

    # --- what it declares ---

    def test_its_name_is_registered_and_has_a_config_file(self, config: Config) -> None:
        """Its name is in the table or an entry point, and `objective=NAME` composes."""
        assert self.name in OBJECTIVES.names
        assert self.name in find_choices(self.config_dir)["objective"]
        assert config.objective.name == self.name

    def test_it_declares_its_model_and_its_encoder(self) -> None:
        """Its class attributes name a kind of transformers model and an input encoder."""
        objective = OBJECTIVES.implementation(self.name)
        assert issubclass(objective, Objective)
        assert isinstance(objective.model_kind, models.ModelKind)
        assert hasattr(transformers, objective.model_kind.auto_class)
        assert issubclass(objective.encoder_class, InputEncoder)
        assert issubclass(objective.encoder_class, ClassificationEncoder) or not issubclass(objective, Classification)

    # --- rows ---

    def test_rows_are_encoded_in_order_and_alike_one_by_one(self, session: Session, rows: list[Example]) -> None:
        """A row's tokens do not depend on the others; ids, lengths and positions are valid."""
        encoder, size = session.encoder, len(session.loaded.model.get_input_embeddings().weight)
        encoded, alone = encoder.encode_all(rows), [encoder.encode(row) for row in rows]
        assert [row.input_ids for row in encoded] == [row.input_ids for row in alone]
        for row in encoded:
            assert 0 < len(row.input_ids) <= encoder.max_length
            assert all(0 <= token < size for token in row.input_ids)
            assert encoder.decode(row)
        if isinstance(encoder, ClassificationEncoder):
            assert encoded == alone
            assert [row.label for row in encoded] == [row.label for row in rows]
            assert all(len(row.token_type_ids) == len(row.input_ids) for row in encoded)
            assert all(-len(row.input_ids) <= row.position < len(row.input_ids) for row in encoded)

    def test_a_long_row_is_cut_or_refused_by_name(self, session: Session, config: Config) -> None:
        """A row longer than the model's limit is cut, or the error names its file and line."""
        try:
            length = len(session.encoder.encode(self.row(config, "a long film " * 2000, "train.tsv:7")).input_ids)
        except UserError as error:
            length, refusal = 0, str(error)
        assert length or "train.tsv:7" in refusal
        assert length <= session.encoder.max_length

    # --- scores ---

    def test_scores_are_those_of_the_models_own_forward(self, session: Session, rows: list[Example]) -> None:
        """Outputs are [rows, ...], float32, repeatable, and equal to those of the plain forward."""
        encoded = session.encoder.encode_all(rows)
        batch = session.objective.collate(encoded)
        with torch.no_grad():
            logits = session.objective.outputs(batch)
            plain = session.objective.plain_outputs(self.load(session), encoded, session.encoder)
            self.assert_close(logits, plain)
            assert torch.equal(logits, session.objective.outputs(batch))
        assert (len(logits), logits.dtype) == (len(rows), torch.float32)

    def test_a_row_does_not_depend_on_the_others(self, session: Session, rows: list[Example]) -> None:
        """A row has the same scores alone and in a batch."""
        encoded, objective = session.encoder.encode_all(rows), session.objective
        with torch.no_grad():
            alone = torch.cat([objective.outputs(objective.collate([row])) for row in encoded])
            self.assert_close(objective.outputs(objective.collate(encoded)), alone)

    def test_perturbed_weights_give_their_scores_and_theta_is_not_written(
        self, session: Session, config: Config, rows: list[Example]
    ) -> None:
        """Under theta +- eps z the scores are those of a model with these weights."""
        encoded = session.encoder.encode_all(rows)
        batch = session.objective.collate(encoded)
        session.forward.select_reachable(lambda: session.objective.outputs(batch))
        theta = {name: p.detach().clone() for name, p in session.params.tensors.items()}
        plain, other = self.load(session), opened(config)
        expected, expected_losses = list[Tensor](), list[Tensor]()
        with torch.no_grad():
            for sign in (1, -1):
                for name, p in plain.model.named_parameters():
                    if name in theta:
                        z = session.params.noise.z(DIRECTION, name, p.shape, p.device).view(p.shape)
                        p.copy_(theta[name] + sign * EPS * z)
                        other.params.tensors[name].data.copy_(p)
                expected.append(session.objective.plain_outputs(plain, encoded, session.encoder))
                expected_losses.append(other.loss_of(encoded)())
                with session.forward.perturbed(DIRECTION, EPS, signs=(sign,)):
                    self.assert_close(session.objective.outputs(batch), expected[-1])
            if session.objective.fits_paired_forward(batch):
                with session.forward.perturbed(DIRECTION, EPS):
                    self.assert_close(session.objective.outputs(batch), torch.stack(expected))
            with session.forward.perturbed(DIRECTION, EPS):
                self.assert_close(session.loss_of(encoded)(), torch.stack(expected_losses))
        assert float((expected[0] - expected[1]).abs().max()) > 1e-3
        assert all(torch.equal(p, theta[name]) for name, p in session.params.tensors.items())

    def test_the_gradient_of_the_loss_is_that_of_the_models_own_forward(
        self, session: Session, rows: list[Example]
    ) -> None:
        """Methods that backpropagate get the gradient of the plain forward."""
        encoded, plain = session.encoder.encode_all(rows), self.load(session)
        with torch.enable_grad():
            loss = self.plain_loss(session, plain, encoded)
            if loss is None:
                pytest.skip("this objective gives no plain loss to compare with")
            loss.backward()
            session.loss_of(encoded)().backward()
        expected = {name: p.grad for name, p in plain.model.named_parameters() if p.grad is not None}
        gradients = {name: p.grad for name, p in session.params.tensors.items() if p.grad is not None}
        assert set(gradients) == set(expected)
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-5, msg=name)

    # --- runs ---

    def test_a_replayed_run_is_bitwise_identical(self, settings: list[str], tmp_path: Path) -> None:
        """Three steps of MeZO, replayed from the trajectory, are bitwise identical to the checkpoint."""
        words = [*settings, "data=demo", "data.train_size=16", "data.eval_limit=8", "log_every=1"]
        words += [f"model.device={self.device}", "steps=3", "batch_size=4", "optimizer.lr=1e-3", "seed=5"]
        done = finetune(
            "demo", self.task, objective=self.name, overrides=words, config_dir=self.config_dir,
            output_dir=tmp_path / "run",
        )  # fmt: skip
        assert math.isfinite(done.summary["test"]["loss"])
        config, run = read_config(done.run_dir / "config.yaml"), Run.open(done.run_dir)
        last = opened(config, run, "last").loaded.model.state_dict()
        session = opened(config, run)
        assert list(restore.replayed(session, run, [3])) == [3]
        replayed = session.loaded.model.state_dict()
        assert all(torch.equal(value, replayed[name]) for name, value in last.items())

    # --- helpers ---

    def load(self, session: Session) -> models.LoadedModel:
        """Return the session's model once more, unpatched."""
        config = session.config
        return models.load(config.model, session.loaded.model_kind, config.task.labels, config.seed)

    def plain_loss(self, session: Session, plain: models.LoadedModel, rows: list[Any]) -> Tensor | None:
        """Return the loss of rows by a model's own forward, differentiable; None if it is not tested."""
        if not isinstance(session.objective, Classification):
            return None
        labels = torch.tensor([row.label for row in rows]).to(plain.device)
        return torch.nn.functional.cross_entropy(session.objective.plain_outputs(plain, rows, session.encoder), labels)

    def assert_close(self, ours: Tensor, expected: Tensor) -> None:
        """Compare scores."""
        torch.testing.assert_close(ours, expected, rtol=self.rtol, atol=self.atol)
