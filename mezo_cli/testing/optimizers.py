"""Conformance tests of optimizers. Every built-in optimizer passes them, and a plug-in's test file runs them by

    from mezo_cli.testing import optimizers

    class TestMine(optimizers.Conformance):
        name = "mine"
        lr = 0.05

They need pytest, no model and no network: the problem is a linear regression.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mezo_cli.config.choices import find_choices
from mezo_cli.config.compose import build_config
from mezo_cli.config.explain import takes
from mezo_cli.config.optimizers import PerturbationConfig, zeroth_order
from mezo_cli.config.schema import OptimizerConfig, StepRecord
from mezo_cli.config.validation import choose
from mezo_cli.errors import UserError
from mezo_cli.optim import OPTIMIZERS, Optimizer, make_config, not_finite
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import NOISES, Noise, to_float32
from mezo_cli.perturb.params import Params

STEPS, STOP = 8, 5  # a short run, and the step after which it is interrupted
FLAT = (2, 3, 4)  # its steps without a gradient, where it has some
ACTS_AFTER = 30  # steps in which a setting must have changed the weights
CLIPPED = {"clip_g": "q0.5", "clip_window": 3}
MEMBERS = 4  # of a population, unless a test is about their number


class Regression:
    """Fit a line to 32 points of 6 dimensions by least squares, from weights far off.

    Attributes:
        forward: the model with patched forwards; `forward.params` are its weights.
        calls: the number of forwards so far.
        batch: the points of the batch, all at first.
        constant: the loss whatever the weights are; None: that of the weights.
    """

    def __init__(self, noise: Noise, device: str = "cpu", dtype: torch.dtype = torch.float32, outputs: int = 1) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(32, 6, generator=generator)
        self.x, self.y = x.to(device), (x @ torch.randn(6, outputs, generator=generator) + 1).to(device)
        self.model = nn.utils.skip_init(nn.Linear, 6, outputs)
        for p in self.model.parameters():
            p.data = 3 * torch.randn(p.shape, generator=generator).to(device, dtype)
        self.forward = PerturbedForward(self.model, Params(self.model, noise))
        self.calls, self.batch = 0, slice(None)
        self.constant: float | None = None

    def __call__(self) -> Tensor:
        """Return the mean squared error: shape [], or [2] with weights perturbed by both signs."""
        return self._errors().mean(dim=-1)

    def rows(self) -> Tensor:
        """Return the squared error of each point: float64 [signs, points]."""
        return torch.atleast_2d(self._errors()).double()

    def _errors(self) -> Tensor:
        if self.forward.num_signs == 2:
            return self.forward.forward_per_sign(self._errors)
        self.calls += 1
        errors = (self.model(self.x[self.batch]) - self.y[self.batch]).square().sum(dim=-1)
        return errors if self.constant is None else torch.full_like(errors.detach(), self.constant)

    def weights(self) -> list[Tensor]:
        """Return a copy of the weights."""
        return [p.detach().clone() for p in self.forward.params.tensors.values()]

    def set_weights(self, values: list[Tensor]) -> None:
        """Overwrite the weights."""
        for p, value in zip(self.forward.params.tensors.values(), values, strict=True):
            p.data.copy_(value)


class Trial:
    """A short run on the regression, before its first step."""

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        config: OptimizerConfig,
        steps: int = STEPS,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        outputs: int = 1,
    ) -> None:
        self.config, self.problem = config, Regression(zeroth_order(config).make_noise(), device, dtype, outputs)
        self.optimizer = optimizer_class(config, 1, steps)
        if self.optimizer.replayable:  # as a run does before the first step
            self.optimizer.keep_start(self.problem.forward.params)

    def resume(self, weights: list[Tensor], records: list[StepRecord]) -> None:
        """Continue as a resumed run does after the steps of `records`, by a replayable optimizer."""
        assert self.optimizer.replayable
        params = self.problem.forward.params
        self.problem.set_weights(weights)
        self.optimizer.rebuild_state(params, records)
        params.decay.rebuild(records, zeroth_order(self.config).weight_decay)

    def train(self, start: int, stop: int) -> list[StepRecord]:
        """Take steps as the loop of a run does; return their records as a trajectory returns them."""
        records = []
        for step in range(start, stop):
            with torch.no_grad():
                result = self.optimizer.step(self.problem.forward, self.problem, step)
            assert not not_finite(result), f"step {step} of {self.config}: {not_finite(result)}"
            missing = [0.0] * (zeroth_order(self.config).record_width - len(result.recorded))
            records.append((step, [*result.recorded, *missing], result.lr))
        return records


class Conformance:
    """What every optimizer must do. A subclass gives its name.

    Attributes:
        name: the choice of `optimizer=`.
        lr: a learning rate that suits the regression, whose curvature is about 2.
        steps: the number of steps by which the error falls to a tenth.
        learning: further settings for that, e.g. {"schedule": "linear"} where a step does not shrink with the gradient.
        config_dir: a folder with YAMLs, as `--config-dir`; not needed for those that a plug-in's package contains.
        device: the torch device of the regression's weights.
        outputs: the number of lines that are fitted: its weights are a matrix [outputs, 6].
        variants: settings to try beside the defaults.
    """

    name: ClassVar[str]
    lr: ClassVar[float] = 0.05
    steps: ClassVar[int] = 100
    learning: ClassVar[dict[str, Any]] = {}
    config_dir: ClassVar[str | None] = None
    device: ClassVar[str] = "cpu"
    outputs: ClassVar[int] = 1
    variants: ClassVar[tuple[dict[str, Any], ...]] = ()

    @pytest.fixture(autouse=True)
    def eager(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Use the eager noise: the problem is small, and a compiler takes longer to start."""
        monkeypatch.setenv("MEZO_EAGER", "1")

    # --- what it declares ---

    def test_its_name_is_registered_and_has_a_config_file(self) -> None:
        """Its name is in the table or an entry point, and `optimizer=NAME` composes."""
        assert self.name in OPTIMIZERS.names
        assert self.name in find_choices(self.config_dir)["optimizer"]
        assert build_config([f"optimizer={self.name}"], self.config_dir).optimizer.name == self.name

    def test_its_defaults_are_valid_and_its_settings_have_a_meaning(self) -> None:
        """Defaults are in range, and each setting has a description."""
        values = {**self.settings_class().model_dump(), "name": self.name}
        assert type(choose("optimizer", values)) is self.settings_class
        assert [name for name, field in self.settings_class.model_fields.items() if not field.description] == []

    def test_every_setting_acts_at_the_default_learning_rate(self) -> None:
        """Another value of a setting leads to other weights, alone or with more samples or another noise.

        A value that is accepted, recorded and has no effect would mislead. The learning rate is that of its YAML file.
        Settings may need another value of one that has named choices.
        """
        base, declared = self.few_members(), {*self.settings_class.model_fields} - {"name"}
        ends: dict[str, list[Tensor]] = {}
        samples = {"samples": 3} if "samples" in declared else {}
        contexts: list[dict[str, Any]] = [{}, samples]
        if "clip_g" in declared:  # with several directions it acts on a sign too
            contexts.append(CLIPPED | samples)
        contexts += [{"noise": noise} for noise in self.noises() if "noise" in declared]
        contexts += [{key: value} for key in declared for value in takes(self.settings_class, key).get("enum", ())]

        def weights(**values: Any) -> list[Tensor]:
            config = base.replace(**values)
            if repr(config) not in ends and not any(config.conflicts()):
                trial = self.trial(config, ACTS_AFTER)
                for step in range(ACTS_AFTER):
                    trial.problem.batch = slice(step % 4, None, 4)  # else the gradient would hardly change
                    trial.train(step, step + 1)
                ends[repr(config)] = trial.problem.weights()
            return ends.get(repr(config), [])

        for name in declared - {"dropout"}:  # which the setup of a run reads
            values = [variant[name] for variant in self.variants if name in variant] or other_values(base, name)
            acts = any(
                weights(**context) and not same(weights(**context), after)
                for context in contexts
                for value in values
                if (after := weights(**{**context, name: value}))
            )
            assert acts, f"optimizer.{name}: {values} change nothing"

    # --- steps ---

    def test_an_interrupted_run_ends_bitwise_identical(self, tmp_path: Path) -> None:
        """A run that is resumed, from its records or its stored state, has the records and weights of a whole one."""
        for number, config in enumerate(self.configs()):
            whole, path = self.trial(config), tmp_path / str(number)
            records = whole.train(0, STOP)
            half = whole.problem.weights()
            whole.optimizer.save_state(path)
            records += whole.train(STOP, STEPS)
            assert not same(half, whole.problem.weights()), config
            for stored in {path.exists(), not whole.optimizer.replayable}:
                resumed = self.trial(config)
                resumed.problem.set_weights(half)
                if not stored:
                    resumed.resume(half, records[:STOP])
                elif resumed.optimizer.replayable:
                    with pytest.raises(UserError):
                        resumed.optimizer.load_state(path, STOP + 1)
                    resumed.optimizer.load_state(path, STOP)
                else:
                    resumed.optimizer.load_state(path)
                assert same(resumed.problem.weights(), half), config
                assert resumed.train(STOP, STEPS) == records[STOP:], config
                assert same(resumed.problem.weights(), whole.problem.weights()), config

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_a_replayed_run_is_bitwise_identical(self, dtype: torch.dtype) -> None:
        """The records alone lead from the first weights to the last, which may be stored in half precision."""
        for config in self.configs(dtype):
            trained, replayed = (self.trial(config, dtype=dtype) for _ in range(2))
            if not replayed.optimizer.replayable:
                pytest.skip("it leaves no trajectory")
            records, params = trained.train(0, STEPS), replayed.problem.forward.params
            replayed.optimizer.apply_updates(params, records[:3])
            replayed.optimizer.apply_updates(params, records[3:])
            assert same(replayed.problem.weights(), trained.problem.weights()), config
            assert replayed.problem.calls == 0, "a replay runs no forward"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_steps_without_a_gradient_leave_their_decay_to_the_next_one(self, dtype: torch.dtype) -> None:
        """At once, one by one, and resumed among them, the records lead to bitwise identical weights."""
        for config in self.configs(dtype):
            optimizer = self.trial(config).optimizer
            if not optimizer.replayable or not isinstance(config, PerturbationConfig):
                pytest.skip("it leaves no trajectory, or has no weight decay")
            n, shown = zeroth_order(config).record_width, optimizer.samples(0)
            grads = [[0.5 - i for i in range(n)] for _ in range(STEPS - 1)] + [[0.0] * (n - 1) + [0.25]]
            for step in FLAT:
                grads[step] = [0.0] * n
            grads[FLAT[-1]][shown:] = [0.25] * (n - shown)  # no gradient, and a curvature
            records = [(step, of_step, to_float32(1e-3 * self.lr)) for step, of_step in enumerate(grads)]
            ends = []
            for cuts, resumes in (([STEPS], False), (range(1, STEPS + 1), False), ([FLAT[1], STEPS], True)):
                trial, at = self.trial(config, dtype=dtype), 0
                for cut in cuts:
                    if resumes:
                        before, trial = trial, self.trial(config, dtype=dtype)
                        trial.resume(before.problem.weights(), records[:at])
                    assert trial.optimizer.replayable
                    trial.optimizer.apply_updates(trial.problem.forward.params, records[at:cut])
                    at = cut
                ends.append(trial.problem.weights())
            assert same(ends[0], ends[1]), config
            assert same(ends[0], ends[2]), f"{config}: params.decay is not used, or not each step's lr wd"

    def test_what_it_returns_fits_a_record_and_its_cost_is_counted(self) -> None:
        """The scalars of a step are float32, at most `record_width` of them; in its line `loss` is first, `lr` last.

        `count_forwards` returns what the steps cost.
        """
        for config in self.configs():
            trial, drawn = self.trial(config), zeroth_order(config)
            optimizer, problem = trial.optimizer, trial.problem
            for step in range(STEPS):
                result = optimizer.step(problem.forward, problem, step)
                scalars = list(result.scalars())
                assert (scalars[0], scalars[-1]) == ("loss", "lr")
                assert all(to_float32(value) == value for value in (*result.recorded, result.lr))
                number = optimizer.samples(step) * drawn.record_width // drawn.directions if optimizer.replayable else 0
                assert len(result.recorded) == number <= drawn.record_width
            backwards = STEPS if config.needs_backward else 0
            assert optimizer.count_forwards(STEPS) == {"forwards": problem.calls, "backwards": backwards}

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_loss_that_is_not_finite_leaves_weights_and_state(self, value: float) -> None:
        """The step is reported as not finite, and the next one continues as if it had not been."""
        for config in self.configs():
            trial, undisturbed = self.trial(config), self.trial(config)
            problem = trial.problem
            trial.train(0, 2)
            before, problem.constant = problem.weights(), value
            result = trial.optimizer.step(problem.forward, problem, 2)
            problem.constant = None
            assert not_finite(result), config
            assert same(problem.weights(), before), config
            assert trial.train(2, 4) == undisturbed.train(0, 4)[2:], config
            assert same(problem.weights(), undisturbed.problem.weights()), config

    def test_no_global_generator_is_used(self) -> None:
        """Steps neither read nor advance the generators of torch, NumPy and Python."""
        ends = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            before, trial = generator_states(), self.trial(next(self.configs()))
            trial.train(0, 3)
            assert generator_states() == before
            ends.append(trial.problem.weights())
        assert same(*ends)

    def test_it_learns(self) -> None:
        """With each noise the error falls to a tenth of what it was.

        Not with `torch`: its generator uses the low 32 bits of the seed, which depend on the tensor's name alone, so z
        is the same at every step. It is for comparing steps with the published code, which seeds likewise.
        """
        for noise in set(self.noises()) - {"torch"}:
            more = {"noise": noise} if "noise" in self.settings_class.model_fields else {}
            more |= {**self.members(), **self.learning}
            trial = self.trial(make_config(self.name, lr=self.lr, **more), self.steps)
            before = trial.problem().item()
            trial.train(0, self.steps)
            after, by = trial.problem().item(), {"lr": self.lr, "steps": self.steps, **more}
            assert after < before / 10, f"the error went from {before:.4g} to {after:.4g}, not to a tenth, with {by}"

    # --- helpers ---

    def few_members(self) -> OptimizerConfig:
        """Return the config that `optimizer=NAME` gives, with few members if it has a population."""
        return build_config([f"optimizer={self.name}"], self.config_dir).optimizer.replace(**self.members())

    def members(self) -> dict[str, Any]:
        """Return the setting by which a population is small; nothing for an optimizer without one."""
        return {"members": MEMBERS} if "members" in self.settings_class.model_fields else {}

    @property
    def settings_class(self) -> type[OptimizerConfig]:
        """The class of its settings."""
        return OPTIMIZERS.load(self.name)

    def trial(self, config: OptimizerConfig, steps: int = STEPS, dtype: torch.dtype = torch.float32) -> Trial:
        """Return a run of the optimizer on the regression, before its first step."""
        return Trial(OPTIMIZERS.implementation(self.name), config, steps, self.device, dtype, self.outputs)

    def noises(self) -> list[str]:
        """Return the noises that the optimizer can be given."""
        return NOISES.names if "noise" in self.settings_class.model_fields else NOISES.names[:1]

    def configs(self, dtype: torch.dtype = torch.float32) -> Iterator[OptimizerConfig]:
        """Return configs to try: every noise; a growing number of samples, a bound and the variants with one noise."""
        declared, base, noises = self.settings_class.model_fields, self.few_members(), self.noises()
        samples = [{"samples": 3, "sample_schedule": "linear"}] if "sample_schedule" in declared else []
        clipped = [CLIPPED] if "clip_g" in declared else []
        others = [noise for noise in noises if noise != "torch"] or noises  # in half precision torch's is refused
        cases: list[list[dict[str, Any]]] = [[{"noise": noise}] for noise in noises]
        for number, more in enumerate([*samples, *clipped, *self.variants]):
            first = number % len(others)  # of those that it may have
            cases.append([{"noise": noise, **more} for noise in others[first:] + others[:first]])
        common = {"lr": self.lr, "weight_decay": 0.1, "schedule": "linear"}
        for case in cases:
            of_case = ({**common, **changes}.items() for changes in case)
            changed = (base.replace(**{key: value for key, value in one if key in declared}) for one in of_case)
            config = next((config for config in changed if not any(config.conflicts())), None)
            if config is not None and (dtype == torch.float32 or zeroth_order(config).noise != "torch"):
                yield config


def other_values(base: OptimizerConfig, name: str) -> list[Any]:
    """Return values of a setting that are allowed, other than that of `base`: near it first, then far off."""
    value, choices = getattr(base, name), takes(type(base), name).get("enum")
    if name == "noise" or choices:
        candidates = list(choices or NOISES.names)
    elif isinstance(value, bool):
        candidates = [not value]
    elif value is None or value == 0:
        candidates = [0.02, 2]
    else:
        candidates = [2 * value, value / 2, 1e8 * value]
    valid = []
    for other in [*candidates, None]:
        with suppress(UserError):
            if other != value:
                valid.append(getattr(choose("optimizer", {**base.model_dump(), name: other}), name))
    return valid


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return whether two lists of tensors are bitwise identical."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def generator_states() -> tuple[list[int], list[int], object]:
    """Return the states of the global random generators."""
    return torch.get_rng_state().tolist(), np.random.get_state(legacy=False)["state"]["key"].tolist(), random.getstate()
