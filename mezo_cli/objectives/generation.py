"""Objective `generate`: a reward of what the model says after a prompt, or the likelihood of an answer.

`objective.loss=reward`: minus the mean reward of the completions (the paper's section 3.3 trains F1 so; evolution
strategies any reward). A member's weights are made once and generate all of its tokens; members of a LoRA complete the
rows in one batch. With a temperature the random numbers are a function of the seed, the step, the row, the sample and
the token, the same for all members of a step.

`objective.loss=lm`: cross-entropy of the answers' tokens, averaged over all of them in the batch (what the paper trains
SQuAD and DROP with).
"""

import hashlib
import json
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezo_cli.config.schema import Config
from mezo_cli.distributed.ranks import ALONE, Ranks
from mezo_cli.errors import UserError
from mezo_cli.models import CAUSAL_LM, LoadedModel
from mezo_cli.objectives.base import Measured, Objective, Records, Report
from mezo_cli.objectives.collate import Batch, to_device
from mezo_cli.objectives.decoding import Completion, Decoder, Sampling
from mezo_cli.objectives.prediction import CompletedPrompt
from mezo_cli.objectives.scoring import Evaluation, mean_of
from mezo_cli.objectives.settings import GenerateConfig
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.members import Population
from mezo_cli.perturb.plan import Perturbation
from mezo_cli.rewards.scoring import Reward
from mezo_cli.rewards.spec import NO_REWARD, RewardSpec, parse_reward, reward_spec
from mezo_cli.tasks.generate import GenerateEncoder, PromptRow

log = logging.getLogger("mezo")

REWARD = "reward"
IGNORED = -100  # torch.nn.functional.cross_entropy's mark of a position that is not scored
FIGURES = ("truncated", "length")  # of completions: in metrics.jsonl beside the metrics
UNITS = {"length": " tokens", "truncated": " of all"}
ANSWER = ("answer_loss", "answer_tokens")  # of answers: the loss of all rows follows from them
# The most tokens, of prompts and completions, of a batch that several members share, and the most elements of all their
# matrices. In larger batches a member more spares no time (scripts/bench/bench_generation.py --members).
MEMBER_TOKENS = 8192
MEMBER_ELEMENTS = 1 << 25

Members = Sequence[Perturbation | None]  # whose weights complete prompts; None: those that are active


class Generation(Objective):
    """Completes prompts and rewards the completions, or scores the answers.

    Attributes:
        decoder: completes prompts.
        engine: the `EngineAnswers` that complete prompts and score answers instead of the model; None: the model.
        generates: whether evaluations complete prompts: there is something to score completions by.
    """

    model_kind = CAUSAL_LM
    encoder_class = GenerateEncoder
    prediction = CompletedPrompt
    kept_records = 8
    measures_forgetting = True

    def __init__(self, config: Config, loaded: LoadedModel, forward: PerturbedForward, encoder: Any) -> None:
        super().__init__(config, loaded, forward, encoder)
        assert isinstance(config.objective, GenerateConfig)
        self._settings, self.decoder = config.objective, Decoder(loaded.model, loaded.tokenizer)
        self.engine: Any = None
        self._population, self.loss_from_counts = Population(forward), self._settings.loss == "lm"
        self._stop, self._stop_tokens = tuple(encoder.stop), frozenset[int]()
        if config.data.as_released:  # there a completion ends with the last token of a stop text
            of_texts = (loaded.tokenizer.encode(text, add_special_tokens=False) for text in self._stop)
            self._stop, self._stop_tokens = (), frozenset(ids[-1] for ids in of_texts)
        self._reward = reward_spec(config)
        metric, parts = config.task.metric, [] if self._reward is None else self._reward.parts
        # The reward is named `reward` in the metrics, also where it is this metric alone or has it.
        self._metric = None if metric is None or metric in [part.name for part in parts] else parse_reward(metric)
        self.generates = self._reward is not None or self._metric is not None
        self._open, self._workers = dict[str, Reward](), ExitStack()  # rewards by what they are, once their workers run
        weakref.finalize(self, self._workers.close)
        self._step, self._members = 0, list[dict[str, Any]]()  # figures of members, for `step_scalars`
        self._ahead: dict[tuple[Batch, Perturbation | None], list[list[Completion]]] = {}  # of later members
        self._ahead_of: Members = ()  # the points that they were made for
        self._columns: list[str] = []  # the names of an evaluation's values
        encoder.leave_room(self._settings.completion_tokens(config))

    # --- batches ---

    def collate(self, rows: Sequence[PromptRow]) -> Batch:
        """Return rows as a batch on the model's device.

        Its layout are the model's keyword arguments for prompts and answers, padded on the left, [rows, length]. Its
        labels are the tokens to predict at the last positions, int64 [rows, longest answer]; IGNORED elsewhere.
        """
        texts, pad = [row.text for row in rows], self.loaded.tokenizer.pad_token_id or 0
        width, longest = max(map(len, texts)), max(len(row.answer_ids) for row in rows)
        ids = np.array([[pad] * (width - len(text)) + text for text in texts])
        mask = np.array([[0] * (width - len(text)) + [1] * len(text) for text in texts])
        answers = np.array([[IGNORED] * (longest - len(row.answer_ids)) + [*row.answer_ids] for row in rows])
        arrays = {"input_ids": ids, "attention_mask": mask, "answers": answers}
        if self.decoder.takes_positions:
            arrays["position_ids"] = np.maximum(mask.cumsum(axis=1) - 1, 0)
        layout = to_device(arrays, self.loaded.device)
        return Batch(rows, layout, labels=layout.pop("answers"))

    @classmethod
    def check_rows(cls, encoder: Any) -> list[PromptRow]:
        """Return two short rows of tokens that any text may have."""
        ids = [encoder.tokenizer.encode(text, add_special_tokens=False) or [0] for text in ("a", "a b c")]
        return [PromptRow(row, (), index, {}, ()) for index, row in enumerate(ids)]

    # --- losses ---

    def begin_step(self, step: int) -> None:
        """Let completions be those of step number `step`."""
        self._step, self._members = step, []

    def row_losses(self, batch: Batch) -> Tensor:
        """Return minus the reward of each row, float64 [1, rows]."""
        assert self._reward is not None
        completions = self._complete_active(batch)
        values, errors = self._rewards(self._reward, batch.rows, completions, self._step)
        self._members.append(
            {  # of one member on the rows of one micro-batch, as plain JSON: ranks exchange it
                "rows": [row.index for row in batch.rows],
                "values": {name: of_rows.tolist() for name, of_rows in (values | _figures(completions)).items()},
                "errors": errors,
                "tokens": sum(len(one.ids) for of_row in completions for one in of_row),
            }
        )
        return -torch.from_numpy(values[REWARD]).unsqueeze(0)

    def _complete_active(self, batch: Batch) -> list[list[Completion]]:
        """Return what the active member says. Members that complete rows in one batch do so when the first is asked."""
        forward, samples, active = self.forward, self._settings.samples, self.forward.perturbation
        if self._ahead_of is not forward.upcoming:
            self._ahead_of, self._ahead = forward.upcoming, {}
        if (batch, active) not in self._ahead:
            signed = [[p] if p is None else [p._replace(signs=(sign,)) for sign in p.signs] for p in forward.upcoming]
            members = [member for of_point in signed for member in of_point]
            if self.engine is None and active in members and self._population.can_share_batches:
                longest = max(len(row.input_ids) for row in batch.rows) + self._settings.max_new_tokens
                tokens = len(batch.rows) * samples * longest
                most = min(MEMBER_TOKENS // tokens, MEMBER_ELEMENTS // forward.params.count)
                members = members[members.index(active) :][: max(1, most)]
            else:
                members = [active]
            completed = self.complete(batch.rows, self._settings.temperature, samples, self._step, members)
            self._ahead |= zip([(batch, member) for member in members], completed, strict=True)
        return self._ahead.pop((batch, active))

    def complete(
        self, rows: Sequence[PromptRow], temperature: float, samples: int, step: int = 0, members: Members = (None,)
    ) -> list[list[list[Completion]]]:
        """Return the completions of each row by each member: [members][rows][samples]. A single one is active."""
        limit, keep_stop = self._settings.max_new_tokens, self.encoder.keep_stop
        sampling = Sampling(limit, temperature, self._stop, keep_stop, self.config.seed, step, self._stop_tokens)
        keys = [(row.index, sample) for row in rows for sample in range(samples)]
        prompts = [row.input_ids for row in rows for _ in range(samples)]
        if self.engine is not None:
            seeds = [self._seed_of(number, sample, step) for number, sample in keys]
            completions = self.engine.complete(prompts, seeds, sampling)
        else:
            with self._population.materialized(members) as member_rows:
                completions = self.decoder.complete(prompts, keys, sampling, member_rows)
        of_rows = [completions[i : i + samples] for i in range(0, len(completions), samples)]
        return [of_rows[i : i + len(rows)] for i in range(0, len(of_rows), len(rows))]

    def _rewards(
        self, spec: RewardSpec, rows: Sequence[PromptRow], completions: Sequence[Sequence[Completion]], step: int
    ) -> tuple[dict[str, np.ndarray], int]:
        """Return `reward` and each `reward_PART`, float64 [rows], of all samples; and how many failed."""
        keys = [(row, sample) for row, of_row in zip(rows, completions, strict=True) for sample in range(len(of_row))]
        texts = [completion.text for of_row in completions for completion in of_row]
        scored = self._opened(spec).score({"completions": texts, **self._of_rows(keys, step)})
        reduce = np.max if self._settings.reduce == "max" else np.mean
        values = {REWARD: scored.values, **{f"{REWARD}_{name}": part for name, part in scored.parts.items()}}
        return {name: reduce(v.reshape(len(rows), -1), axis=1) for name, v in values.items()}, scored.errors

    def _of_rows(self, keys: Sequence[tuple[PromptRow, int]], step: int) -> dict[str, list[Any]]:  # keys: (row, sample)
        return {
            "rows": [row.columns for row, _ in keys],
            "prompts": [self.encoder.decode(row) for row, _ in keys],
            "golds": [row.golds for row, _ in keys],
            "seed": [self._seed_of(row.index, sample, step) for row, sample in keys],
            "locations": [row.where or f"row {row.index}" for row, _ in keys],
        }

    def _opened(self, spec: RewardSpec) -> Reward:
        name, settings = spec.describe(), self._settings
        if name not in self._open:
            reward = Reward(spec, timeout=settings.reward_timeout, on_error=settings.reward_errors)
            self._open[name] = self._workers.enter_context(reward)
        return self._open[name]

    def _seed_of(self, row: int, sample: int, step: int) -> int:
        digest = hashlib.sha256(f"{self.config.seed} {step} {row} {sample}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1  # for an engine and for the reward: 63 bits

    def counts(self, batch: Batch) -> Tensor:
        """Return the sum of the losses of the answers' tokens, and their number: float64 [1, 2]."""
        losses = self.answer_losses(batch)
        return torch.stack([losses.sum(), (batch.labels != IGNORED).sum().to(losses)]).unsqueeze(0)

    def answer_losses(self, batch: Batch) -> Tensor:
        """Return the sum of the losses of each answer's tokens: float64 [rows]."""
        if self.engine is not None:
            losses: Tensor = self.engine.losses(batch.rows)
            return losses
        # Row by row: in float64 the logits of a whole batch are large.
        loss = partial(torch.nn.functional.cross_entropy, reduction="sum", ignore_index=IGNORED)
        rows = zip(self._answer_logits(batch), batch.labels, strict=True)
        return torch.stack([loss(of_row.double(), answer) for of_row, answer in rows])

    def _answer_logits(self, batch: Batch) -> Any:  # at `batch.labels`: [rows, longest answer, words]
        return self.model(**batch.layout, use_cache=False, logits_to_keep=batch.labels.shape[1] + 1).logits[:, :-1]

    def answer_log_probs(self, batch: Batch) -> list[Tensor]:
        """Return the log-probability of every word at each token of each row's answer: float32 [tokens, words]."""
        scored = zip(self._answer_logits(batch), batch.labels, strict=True)
        return [logits[answer != IGNORED].float().log_softmax(dim=-1) for logits, answer in scored]

    def outputs(self, batch: Batch) -> Tensor:
        """Return the logits of the token after each row, float32 [rows, words]."""
        return self.model(**batch.layout, use_cache=False, logits_to_keep=1).logits[:, -1].float()

    @classmethod
    def plain_outputs(cls, loaded: LoadedModel, rows: Sequence[PromptRow], encoder: Any) -> Tensor:
        """Return the same by the model's own forward, each row by itself."""
        texts = [torch.tensor([row.text]).to(loaded.device) for row in rows]
        return torch.cat([loaded.model(input_ids=ids, use_cache=False).logits[:, -1].float() for ids in texts])

    def step_scalars(self, count_forwards: Callable[[int], Mapping[str, int]]) -> dict[str, float]:
        """Return the figures of this step's completions for its line in metrics.jsonl; {} if none was generated.

        `completions` are those of all steps so far. Mean, standard deviation, minimum and maximum of rewards are over
        the members. `agreeing_rows` is the share of rows on which all members have the same: they give no signal.
        """
        members, ranks = self._members, self.forward.ranks
        if ranks.size > 1:
            members = [member for text in ranks.exchange(json.dumps(members)) for member in json.loads(text)]
        if not members:
            return {}
        by_row: dict[int, list[float]] = {}
        for member in members:
            for row, reward in zip(member["rows"], member["values"][REWARD], strict=True):
                by_row.setdefault(row, []).append(reward)
        count = min(map(len, by_row.values()))  # more for a row that is in the batch twice, where an epoch ends
        rewards = np.concatenate([np.reshape(values, (count, -1)).T for values in by_row.values()])  # [rows, members]
        of_members, errors = rewards.mean(axis=0), sum(member["errors"] for member in members)
        table = {name: np.concatenate([member["values"][name] for member in members]) for name in members[0]["values"]}
        means = {name: float(of_rows.mean()) for name, of_rows in table.items()}
        return {
            REWARD: float(of_members.mean()),
            "reward_std": float(of_members.std()),
            "reward_min": float(of_members.min()),
            "reward_max": float(of_members.max()),
            **{name: mean for name, mean in means.items() if name not in (REWARD, *FIGURES)},
            "agreeing_rows": float((rewards == rewards[:, :1]).all(axis=1).mean()),
            **{name: means[name] for name in FIGURES},
            "completions": count_forwards(self._step + 1)["forwards"] * len(rewards) * self._settings.samples,
            "tokens": float(sum(member["tokens"] for member in members)),
            **({"reward_errors": errors} if errors else {}),
        }

    # --- evaluations ---

    def _demand_reward(self) -> None:
        if self._reward is None and self._settings.loss == "reward":
            raise UserError(f"objective.loss=reward: {NO_REWARD}")

    def check_start(self, rows: Sequence[PromptRow]) -> dict[str, Any]:
        """Call the reward twice on two rows; return what run.json keeps of it. No row lacks a column that it names."""
        self._demand_reward()
        if self._reward is None:
            return {}
        for column in {value for part in self._reward.parts for value in (part.settings or {}).values()}:
            for row in rows:
                if isinstance(column, str) and row.columns.get(column, "") is None:
                    raise UserError(f"{row.where}: column '{column}' is null, and objective.reward reads it")
        keys, columns = [(row, 0) for row in rows[:2]], (column for row in rows for column in row.columns)
        repeatable = self._opened(self._reward).check(self._of_rows(keys, 0), columns)
        if not repeatable:
            log.warning("warning: the reward gave other numbers when it was called again: a resumed run may differ")
        return {"reward": {**self._reward.record(), "repeatable": repeatable}}

    def measure(self, batch: Batch) -> Measured:
        """Return the figures of each row: rewards and metrics, those of its completions, the loss of its answer.

        A record has the prompt, the completion (all of them, if there are several), the reward and its parts.
        """
        self._demand_reward()
        columns: dict[str, np.ndarray] = {}
        records: list[dict[str, Any]] = [{} for _ in batch.rows]
        if self.generates:
            completions, records = self._answers(batch.rows, every=self._settings.eval_samples > 1)
            columns = self._scores(batch.rows, completions)
            for i, (row, record) in enumerate(zip(batch.rows, records, strict=True)):
                record |= {"golds": list(row.golds), **{name: float(values[i]) for name, values in columns.items()}}
            columns |= _figures(completions)
        if self.loss_from_counts:
            tokens = np.array([len(row.answer_ids) for row in batch.rows], dtype=float)
            columns |= dict(zip(ANSWER, (self.answer_losses(batch).cpu().numpy(), tokens), strict=True))
        self._columns = list(columns)
        return torch.from_numpy(np.stack(list(columns.values()), axis=1)), records

    def _scores(self, rows: Sequence[PromptRow], completions: list[list[Completion]]) -> dict[str, np.ndarray]:
        columns, metric = dict[str, np.ndarray](), self.config.task.metric
        if self._reward is not None:
            columns, _ = self._rewards(self._reward, rows, completions, 0)
            if metric is not None and self._metric is None:  # the reward is this metric, or has it as a part
                columns[metric] = columns.pop(f"{REWARD}_{metric}", columns[REWARD])
        if metric is not None and self._metric is not None:
            columns[metric] = self._rewards(self._metric, rows, completions, 0)[0][REWARD]
        return columns

    def _answers(self, rows: Sequence[PromptRow], every: bool) -> tuple[list[list[Completion]], list[dict[str, Any]]]:
        (completions,) = self.complete(rows, self._settings.eval_temperature, self._settings.eval_samples)
        records: list[dict[str, Any]] = []
        for row, of_row in zip(rows, completions, strict=True):
            more = {"completions": [one.text for one in of_row]} if every else {}
            records.append({"prompt": self.encoder.decode(row), "completion": of_row[0].text, **more})
        return completions, records

    def assess(self, values: Tensor, rows: Sequence[PromptRow], records: Records | None = None) -> Evaluation:
        """Return the evaluation that the figures of rows are: the mean of each, and the loss."""
        columns = dict(zip(self._columns, values.double().numpy().T, strict=True))
        names = [name for name in columns if name not in (*FIGURES, *ANSWER)]
        means = {name: float(column.mean()) for name, column in columns.items()}
        samples = {name: mean_of(columns[name]) for name in names}
        if self.loss_from_counts:
            loss = float(columns[ANSWER[0]].sum() / columns[ANSWER[1]].sum())
            samples["loss"] = mean_of(*(columns[name] for name in ANSWER))
        else:
            loss, samples["loss"] = -means[REWARD], mean_of(-columns[REWARD])
        details = {name: means[name] for name in FIGURES if name in means}
        metrics = {name: means[name] for name in names}
        shown = ({} if loss == -means.get(REWARD, math.nan) else {"loss": loss}) | metrics | details
        text = "  ".join(f"{name} {value:.4f}{UNITS.get(name, '')}" for name, value in shown.items())
        return Evaluation(loss, metrics, values, list(records or []), details, samples, text=text)

    def predict(self, rows: Sequence[PromptRow], report: Report = lambda done: None, ranks: Ranks = ALONE) -> Records:
        """Return the prompt and the completions of each row; no reward is needed."""

        def measure(batch: Batch) -> Measured:
            return torch.zeros(len(batch.rows), 0), self._answers(batch.rows, every=True)[1]

        return self.measure_all(rows, report, ranks, measure)[1]


def _figures(completions: Sequence[Sequence[Completion]]) -> dict[str, np.ndarray]:
    return {  # of each row
        "truncated": np.array([np.mean([one.truncated for one in of_row]) for of_row in completions]),
        "length": np.array([np.mean([len(one.ids) for one in of_row]) for of_row in completions]),
    }
