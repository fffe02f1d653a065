"""Complete the prompts of rows with the weights that are active, and reward the completions."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mezo_cli.config.objectives import GenerateConfig
from mezo_cli.config.rewards import RewardSpec
from mezo_cli.config.schema import Config
from mezo_cli.models import LoadedModel
from mezo_cli.models.decoding import Completion, Decoder, Sampling
from mezo_cli.perturb.forward import Perturbation, PerturbedForward
from mezo_cli.rewards.scoring import Reward
from mezo_cli.tasks.generate import GenerateEncoder, PromptRow

REWARD = "reward"
# The most tokens, of prompts and completions, of a batch that several members share, and the most elements of all their
# matrices. In larger batches a member more spares no time (scripts/bench/bench_generation.py --members).
MEMBER_TOKENS = 8192
MEMBER_ELEMENTS = 1 << 25


class Completer:
    """Completes and rewards the rows of a run.

    Args:
        config: of the run; its objective is a `GenerateConfig`.
        loaded: the model.
        forward: its forwards; what is perturbed there is generated with.
        encoder: of the rows.

    Attributes:
        takes_positions: whether the model's forward takes `position_ids`.
        ends: the tokens that end a completion.
        stop_tokens: those that end it in place of the stop texts, with `data.as_released`.
        engine: the `EngineAnswers` that complete prompts and score answers instead of the model; None: the model.
    """

    def __init__(
        self, config: Config, loaded: LoadedModel, forward: PerturbedForward, encoder: GenerateEncoder
    ) -> None:
        assert isinstance(config.objective, GenerateConfig)
        self._own, self._seed, self._forward, self._encoder = config.objective, config.seed, forward, encoder
        self._stop, self.stop_tokens = tuple(encoder.stop), frozenset[int]()
        if config.data.as_released:
            of_texts = (loaded.tokenizer.encode(text, add_special_tokens=False) for text in self._stop)
            self._stop, self.stop_tokens = (), frozenset(ids[-1] for ids in of_texts)
        self._decoder = Decoder(loaded.model, loaded.tokenizer)
        self.takes_positions, self.ends = self._decoder.takes_positions, self._decoder.ends
        self.engine: Any = None
        self._rewards: dict[str, Reward] = {}  # by what they are, once they are open

    def complete(
        self, rows: Sequence[PromptRow], temperature: float, samples: int, step: int
    ) -> list[list[Completion]]:
        """Return the completions of each row by the weights that are active: [rows][samples]."""
        return self.complete_members(rows, temperature, samples, step, [self._forward.perturbation])[0]

    def complete_members(
        self,
        rows: Sequence[PromptRow],
        temperature: float,
        samples: int,
        step: int,
        members: Sequence[Perturbation | None],
    ) -> list[list[list[Completion]]]:
        """Return the completions of each row by each member: [members][rows][samples]. A single one is active."""
        keep_stop, limit = self._encoder.keep_stop, self._own.max_new_tokens
        sampling = Sampling(limit, temperature, self._stop, keep_stop, self._seed, step, self.stop_tokens)
        keys = [(row.index, sample) for row in rows for sample in range(samples)]
        prompts = [row.input_ids for row in rows for _ in range(samples)]
        if self.engine is not None:
            seeds = [self.seed_of(row, sample, step) for row in rows for sample in range(samples)]
            completions = self.engine.complete(prompts, seeds, sampling)
        else:
            with self._forward.materialized(members) as member_rows:
                completions = self._decoder.complete(prompts, keys, sampling, member_rows)
        of_rows = [completions[i : i + samples] for i in range(0, len(completions), samples)]
        return [of_rows[i : i + len(rows)] for i in range(0, len(of_rows), len(rows))]

    def members_together(self, rows: Sequence[PromptRow], samples: int) -> list[Perturbation | None]:
        """Return the active member of a step, and those after it that complete these rows in the same batch.

        An engine has its own way.
        """
        forward, active = self._forward, self._forward.perturbation
        signed = [[p] if p is None else [p._replace(signs=(sign,)) for sign in p.signs] for p in forward.upcoming]
        members = [member for of_point in signed for member in of_point]
        if self.engine is not None or active not in members or not forward.supports_members:
            return [active]
        tokens = len(rows) * samples * (max(len(row.input_ids) for row in rows) + self._own.max_new_tokens)
        first, most = members.index(active), min(MEMBER_TOKENS // tokens, MEMBER_ELEMENTS // forward.params.count)
        return members[first : first + max(1, most)]

    def reward(
        self, spec: RewardSpec, rows: Sequence[PromptRow], completions: Sequence[Sequence[Completion]], step: int
    ) -> tuple[dict[str, np.ndarray], int]:
        """Return the rewards of rows by name, float64 [rows], `reward` first, and of how many completions they failed.

        The samples of a row are put together.

        Raises:
            UserError: when the reward cannot be opened.
            RunFailed: when it fails, with `objective.reward_errors=stop`.
        """
        keys = [(row, sample) for row, of_row in zip(rows, completions, strict=True) for sample in range(len(of_row))]
        scored = self.open(spec).score(
            [completion.text for of_row in completions for completion in of_row],
            [row.columns for row, _ in keys],
            [row.golds for row, _ in keys],
            [self.seed_of(row, sample, step) for row, sample in keys],
            [row.where or f"row {row.index}" for row, _ in keys],
        )
        reduce = np.max if self._own.reduce == "max" else np.mean
        values = {REWARD: scored.values, **scored.parts}
        return {name: reduce(v.reshape(len(rows), -1), axis=1) for name, v in values.items()}, scored.errors

    def check(self, spec: RewardSpec, rows: Sequence[PromptRow]) -> bool:
        """Call a reward twice on some rows; return whether it gave the same numbers."""
        places = [row.where or f"row {row.index}" for row in rows]
        seeds = [self.seed_of(row, 0, 0) for row in rows]
        return self.open(spec).check([row.columns for row in rows], [row.golds for row in rows], seeds, places)

    def open(self, spec: RewardSpec) -> Reward:
        """Return a reward that is ready; it is opened once."""
        name = spec.describe()
        if name not in self._rewards:
            own = self._own
            self._rewards[name] = Reward(spec, timeout=own.reward_timeout, on_error=own.reward_errors)
        return self._rewards[name]

    def close(self) -> None:
        """End the processes of the rewards."""
        while self._rewards:
            self._rewards.popitem()[1].close()

    def seed_of(self, row: PromptRow, sample: int, step: int) -> int:
        """Return the seed of a completion, for an engine and for its reward: 63 bits of a hash."""
        digest = hashlib.sha256(f"{self._seed} {step} {row.index} {sample}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


def figures(completions: Sequence[Sequence[Completion]]) -> dict[str, np.ndarray]:
    """Return of each row the share of its completions that ended at the limit, and their mean length in tokens."""
    return {
        "truncated": np.array([np.mean([one.truncated for one in of_row]) for of_row in completions]),
        "length": np.array([np.mean([len(one.ids) for one in of_row]) for of_row in completions]),
    }
