"""The types that all packages share: the frozen config, and the records of data and of a trajectory.

It imports neither Hydra nor torch. Of fields' annotations and descriptions docs/reference/config.md is made.

A group whose settings depend on the choice (`optimizer=`, `peft=`) has a base class here. The class of each choice is
the entry of its registry (optimizers.py, objectives.py, adapters.py, or a plug-in's).
"""

import copy
import functools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, WrapValidator

from mezo_cli.config.base import (
    MISSING,
    Conflicts,
    Entry,
    Flag,
    NotNegative,
    Number,
    Own,
    Positive,
    PositiveNumber,
    Seed,
    Settings,
    Text,
    Whole,
    number_or_auto,
    own_path,
)
from mezo_cli.config.registry import LOGGERS, LOSSES, METRICS

Length = Annotated[Whole, Field(ge=8)]  # of a row, in tokens
Dtype = Literal["float32", "bfloat16"]
StoredDtype = Literal["float32", "bfloat16", "float16"]
LossName = Annotated[Text, AfterValidator(LOSSES.check), WithJsonSchema({"enum": [*LOSSES.rows]})]
LoggerName = Annotated[Entry, AfterValidator(LOGGERS.check)]


class HubSource(Settings):
    """A task's data set on the Hugging Face hub: `datasets.load_dataset(path, name)`.

    Labels are mapped by name, never by the hub's integers: RTE, MNLI and TREC number their classes differently there.
    """

    path: Text | None = Field(None, description="the data set's name, e.g. `nyu-mll/glue`; null: the task has none")
    name: Text | None = Field(None, description="its subset, e.g. `sst2`; null: none")
    revision: Text | None = Field(None, description="a branch, tag or commit; null: the newest")
    train: Text = Field("train", description="the split that is the source of train")
    dev: Text | None = Field(None, description="the split that is dev; null: rows of train (`data.dev_size`)")
    test: str | None = Field("validation", description="the split that is test; null: there is none")
    labels: list[Entry] = Field([], description="its class names, in the order of `task.labels`, which are read too")


class FileSource(Settings):
    """The format of a task's files in GLUE and LM-BFF folders."""

    folder: Text | None = Field(None, description="LM-BFF's name of the folder, e.g. `SST-2`; null: the task has none")
    columns: list[Entry] = Field([], description="names of the fields of a file without a header")
    labels: list[Entry] = Field([], description="spellings of the labels, in the order of `task.labels`, read too")
    dev: Text = Field("dev", description="stem of the official dev file: `dev`, or `dev_matched` for MNLI")
    test: Text = Field("test", description="stem of the official test file")


class LmPrompt(Settings):
    """A task's prompt for decoders (objective lm)."""

    template: Text | None = Field(None, description="the prompt, which ends in `{mask}`; null: the task has none")
    label_words: list[Entry] = Field([], description="a word or phrase per label; empty: `task.label_words`")
    max_length: Length | None = Field(
        None, description="tokens of prompt and word, cut at the start; null: model's limit"
    )


class GeneratePrompt(Settings):
    """What a decoder continues, and what it should say (objective generate).

    In a template, `{column}` is a text, a number or a list of numbers, `{answers.text[0]}` a part of a record or list.
    """

    prompt: Entry | None = Field(None, description="the prompt; empty: answers are plain text. null: the task has none")
    answer: Text | None = Field(None, description="the text after it that `objective.loss=lm` learns; null: none")
    gold: Text | None = Field(None, description="the column with the right text or texts; null: the answer")
    stop: list[Text] = Field([], description="texts that end a completion")
    keep_stop: Flag = Field(False, description="whether a completion keeps the text that ended it")
    chat: Flag = Field(False, description="the prompt is the user's message in the chat template, or a column of them")
    system: Text | None = Field(None, description="the chat's system message; null: none")
    max_length: Length | None = Field(None, description="tokens with answer or completion; null: the model's limit")
    too_long: Literal["refuse", "cut"] = Field("refuse", description="of a longer row; cut: its prompt loses its start")


class ChoicePrompt(Settings):
    """A prompt and the texts that may follow it, of which the most likely is chosen (objective choice).

    The templates are those of `task.generate`. White space before the prompt and spaces after it are dropped, and
    spaces after a candidate.
    """

    prompt: Text | None = Field(None, description="the prompt; null: the task has none")
    candidates: list[Text] = Field([], description="a template per candidate; with `each`, one of `{candidate}`")
    each: Text | None = Field(None, description="the column with a row's texts; null: a row has all of `candidates`")
    right: Text | None = Field(
        None, description="the column with the right text, or texts, of `each`; null: the label numbers the candidate"
    )
    max_length: Length | None = Field(None, description="tokens of prompt and longest candidate; null: model's limit")
    too_long: Literal["refuse", "cut"] = Field("cut", description="as in `task.generate`; cut keeps the first token")


class TaskConfig(Settings):
    """A task: its template, its labels and their words, its prompts, its columns, and its data sources."""

    name: Text = Field(MISSING, description="the task's name in tables and run directories")
    version: Positive = Field(1, description="recorded in run.json; raise it when template, words or splits change")
    template: Text | None = Field(None, description="prompt of objective mlm, of `{column}` and `{mask}`; null: none")
    labels: list[Entry] = Field([], description="the names of the labels; empty for a task with `task.generate` alone")
    label_words: list[Entry] = Field([], description="a word per label, each one token, in the order of `task.labels`")
    columns: list[Entry] = Field([], description="the texts of a row, in order (`sent_0`, `sent_1` of LM-BFF)")
    rename: dict[Entry, Entry] = Field({}, description="column name in the source -> name used in `task.columns`")
    label_column: Text = Field("label", description="the column with the label")
    skip_labels: list[Entry] = Field([], description="rows with one of these labels are dropped")
    max_length: Length = Field(128, description="tokens of a row; a longer one is cut, and refused without its mask")
    first_limit: Positive | None = Field(None, description="tokens kept of the first sentence; null: no own limit")
    other_limit: Positive | None = Field(None, description="the same of every other sentence")
    bos_token_id: NotNegative | None = Field(  # the MeZO paper's code gave OPT 0 in place of 2
        None, description="the first token of a decoder's prompt; null: what the tokenizer puts before a text"
    )
    metric: Text | None = Field(None, description="the metric that picks the best checkpoint; null: the objective's")
    demonstrations: NotNegative = Field(0, description="rows of train, solved, before each of dev and test; `steps=0`")
    lm: LmPrompt = LmPrompt()
    generate: GeneratePrompt = GeneratePrompt()
    choice: ChoicePrompt = ChoicePrompt()
    hub: HubSource = HubSource()
    files: FileSource = FileSource()

    def lists(self, per_label: Iterable[str] = ()) -> dict[str, list[str]]:
        """Return the lists of `per_label` keys and of other spellings, which go by the order of `labels`, by key."""
        keys = (*per_label, "task.files.labels", "task.hub.labels")
        return {key: functools.reduce(getattr, key.split(".")[1:], self) for key in keys}  # type: ignore[arg-type]

    def reordered(self, per_label: Iterable[str] = ()) -> str:
        """Return which lists to put into the order of `labels`, if a list of spellings has its names in another one."""
        names = {label: i for i, label in enumerate(self.labels)}
        lists = [each for each in self.lists().values() if len(each) == len(names)]
        if not any(names.get(label, i) != i for each in lists for i, label in enumerate(each)):
            return ""
        every = self.lists(per_label).items()
        wrong = [f"{key} [{', '.join(each)}]" for key, each in every if each and each != self.labels]
        return f"put {' and '.join(wrong)} into the order of task.labels [{', '.join(self.labels)}]"

    @property
    def offered(self) -> str:
        """The objectives that the task has a prompt for, as the end of an error line; empty if there is none."""
        prompts = {"mlm": self.template, "lm": self.lm.template}
        prompts |= {"choice": self.choice.prompt, "generate": self.generate.prompt}
        names = [f"objective={name}" for name, prompt in prompts.items() if prompt is not None]
        return f"; or use {' or '.join(names)}, for which the task has a prompt" if names else ""


class ObjectiveConfig(Settings):
    """The objective, which scores the labels, and the loss of its scores."""

    implementation: ClassVar[str]  # `module:Class` of the objective
    needs_labels: ClassVar[bool] = True  # whether label words or a head score the task's labels
    per_label: ClassVar[tuple[str, ...]] = ()  # keys of the lists that have something for each label, in their order
    has_head: ClassVar[bool] = False  # whether a classification head scores them
    demonstrates: ClassVar[bool] = False  # whether rows may come after demonstrations
    differentiable_loss: ClassVar[str] = "cross_entropy"  # one that has a gradient, for the line that refuses another
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"loss"})  # the metrics whose lowest value is the best
    name: Text = Field(MISSING, description="how labels are scored; chosen by `objective=`")
    loss: LossName = Field("cross_entropy", description="the loss that is minimised. accuracy and f1 have no gradient")

    @property
    def default_metric(self) -> str:
        """The metric that picks the best checkpoint where neither `metric` nor `task.metric` names one."""
        return "accuracy"

    @property
    def metric_names(self) -> list[str] | None:
        """The metrics of its evaluations besides the loss; None if they are not known before there is one."""
        return METRICS.names

    def data_task(self, task: TaskConfig) -> TaskConfig:
        """Return the task as its rows are read: without labels a row is all of its columns, for its `generate`."""
        return task if self.needs_labels else task.replace(labels=[], choice=ChoicePrompt())

    def conflicts(self, config: "Config") -> Conflicts:
        """Yield the settings that do not go with others; of a task, those that the objective needs and it lacks."""
        task = config.task
        if self.needs_labels and not task.labels:
            yield "task.labels", f"task '{task.name}' has none; give two or more names{task.offered}"
        if not self.needs_labels and task.generate.prompt is None:
            why = f"task '{task.name}' has no prompt to continue (objective={self.name})"
            column = task.columns[0] if task.columns else "question"
            yield "task.generate.prompt", f"{why}, e.g. '{{{column}}}\\nAnswer:'{task.offered}"

    def completion_tokens(self, config: "Config") -> int:
        """Return the tokens to leave free after a prompt for a completion; 0 for a run that completes nothing."""
        return 0

    @property
    def is_differentiable(self) -> bool:
        """Whether the loss has a gradient."""
        registered = LOSSES.load(self.loss) if self.loss in LOSSES.targets else None
        return self.loss != "reward" and bool(getattr(registered, "differentiable", True))


class OptimizerConfig(Settings):
    """The chosen optimizer and its settings."""

    implementation: ClassVar[str]  # `module:Class` of the optimizer
    title: ClassVar[str] = ""  # the name in tables; empty: the name of the choice
    replayable: ClassVar[bool] = True  # whether a step follows from the scalars that the trajectory stores
    needs_backward: ClassVar[bool] = False  # whether it differentiates the loss: dropout is on
    has_engine: ClassVar[bool] = True  # whether an engine may compute the forwards
    name: Text = Field(MISSING, description="the method; chosen by `optimizer=`")
    lr: Number = Field(1e-6, ge=0.0, le=3e38, description="learning rate")  # float32, as the trajectory stores it

    @property
    def picks_rate(self) -> bool:
        """Whether lr is `auto`, until a race has found it."""
        return isinstance(self.lr, str)

    @property
    def adds_directions(self) -> bool:
        """Whether an update is `Params.update` and nothing else, a sum of c z: what an engine computes too."""
        return False

    def count_forwards(self, steps: int, total: int) -> dict[str, int]:
        """Return the `forwards` and `backwards` of a batch that the first `steps` steps of a run of `total` take."""
        return {"forwards": 0, "backwards": 0}

    def conflicts(self) -> Conflicts:
        """Yield the settings that do not go with others."""
        return iter(())


class PeftConfig(Settings):
    """Which parameters are trained: the method and its settings."""

    implementation: ClassVar[str]  # `module:Class` of the method
    title: ClassVar[str] = ""  # its name in tables, after the optimizer's; empty: the name of the choice
    trains_output: ClassVar[bool] = False  # whether it trains and saves the layer over the vocabulary too
    name: Text = Field(MISSING, description="which parameters are trained; chosen by `peft=`")

    def conflicts(self, config: "Config") -> Conflicts:
        """Yield the settings that do not go with the method."""
        return iter(())


EMBEDDED_MODELS = {"demo": "model", "demo-decoder": "decoder"}  # values of model.path -> their folders in mezo_cli/demo


class ModelConfig(Settings):
    """The pretrained model: a hub id or a local folder, its dtypes and device."""

    name: Text = Field(MISSING, description="the model's name in tables; chosen by `model=`")
    path: Text = Field(MISSING, description="a hub id, a local folder, or an embedded model (`demo`, `demo-decoder`)")
    revision: Text | None = Field(None, description="a branch, tag or commit on the hub; null: the newest")
    dtype: StoredDtype = Field(
        "float32", description="how the weights are stored; updates in half precision are rounded stochastically"
    )
    compute_dtype: StoredDtype | None = Field(  # chosen when a run begins, and stored (training/precision.py)
        None, description="the dtype of the forwards; null: as the weights, but float32 on a CPU"
    )
    quantize: Literal["none", "int8", "nf4"] = Field(
        "none", description="the matrices of a frozen base: int8 (a scale per row), nf4 (bitsandbytes)"
    )
    tie_embeddings: Flag | None = Field(  # false: it starts as a copy, unless the checkpoint has one
        None, description="whether the decoder over the vocabulary is the embeddings' matrix; null: as its config"
    )
    matmul_precision: Literal["highest", "high"] = Field("highest", description="of float32 products; high: TF32")
    device: Text = Field("auto", description="`cpu`, `cuda`, `cuda:N`, `mps`, or `auto`: cuda where there is one")
    paired_tokens: NotNegative | None = Field(
        None, description="the most tokens of a batch whose signs one forward computes; null: 1024, 16384 off a CPU"
    )
    checkpoint_activations: Flag = Field(
        False, description="compute each layer again in the backward pass, for adamw and sgd: less memory, more time"
    )
    cache_frozen: Literal["auto", "off"] = Field(
        "auto", description="auto computes the layers below the first trained tensor once per batch, for both signs"
    )
    cache_bytes: NotNegative = Field(
        256_000_000, description="memory in which their output is kept between steps, if all of a split's fits; 0: none"
    )
    stream: Flag = Field(
        False, description="read the numbered layers of a frozen base from its files as they run (peft; Linux, a CPU)"
    )
    stream_memory: NotNegative = Field(
        0, description="with stream: bytes of layers that stay in memory, and of rows that an evaluation takes together"
    )

    @property
    def computes_in(self) -> str:
        """The dtype of the forwards, where it was given or has been chosen (`models.resolved`)."""
        return self.compute_dtype or "float32"

    @property
    def wider_range(self) -> str:
        """What the line about a loss that is not finite ends with: an advice where forwards compute in float16."""
        advice = "; float16 ends at 65,504: model.compute_dtype=bfloat16 or float32 has the range"
        return advice if self.compute_dtype == "float16" else ""

    @property
    def is_embedded(self) -> bool:
        """Whether the model is part of this package."""
        return self.path in EMBEDDED_MODELS


class EngineConfig(Settings):
    """The inference engine that computes the forwards (docs/how-to/engines.md)."""

    name: Text = Field("none", description="what computes; vllm: a server that mezo starts; chosen by `engine=`")


class VllmConfig(EngineConfig):
    """A vLLM server that mezo starts, on a Unix socket, and that ends with it."""

    python: Annotated[Text | None, AfterValidator(own_path), Own("MEZO_ENGINE_PYTHON", own_path)] = Field(
        None, description="an interpreter with vLLM, never stored; null: MEZO_ENGINE_PYTHON"
    )
    tensor_parallel: Positive = Field(1, description="over how many processes the engine's weights are sharded")
    dtype: Dtype = Field("float32", description="of the engine's weights and forwards")
    memory: Positive = Field(1_000_000_000, description="bytes for the engine's keys and values, in each process")
    max_loras: Positive = Field(8, le=256, description="the most LoRA members that are computed in one call")
    timeout: PositiveNumber = Field(600.0, description="seconds to wait for an answer, the engine's start included")


class OpenAiConfig(EngineConfig):
    """A vLLM server that the user has started, by its HTTP interface; for LoRA members."""

    url: Annotated[Text | None, Own("MEZO_ENGINE_URL", lambda value: value)] = Field(
        None, description="its address, never stored; null: MEZO_ENGINE_URL"
    )
    adapter_dir: Annotated[Text | None, AfterValidator(own_path), Own("MEZO_ENGINE_ADAPTER_DIR", own_path)] = Field(
        None, description="for adapters; the server sees it too; null: MEZO_ENGINE_ADAPTER_DIR"
    )
    allow_remote: Flag = Field(False, description="whether the server may be on another machine")
    server: Literal["vllm", "sglang"] = Field("vllm", description="whose paths it has; sglang was run on a CPU alone")
    dtype: Dtype = Field("float32", description="of the server's weights and forwards, for the check at the start")
    max_loras: Positive = Field(8, le=256, description="the most LoRA members at once: the server's --max-loras")
    timeout: PositiveNumber = Field(600.0, description="seconds to wait for an answer")


class DataConfig(Settings):
    """The source of the rows, and how many are used."""

    name: Text = Field(MISSING, description="the source (`registry.SOURCES`); chosen by `data=`")
    shots: Positive | None = Field(None, description="k rows per class for train and again for dev; null: all rows")
    seed: Seed | None = Field(None, description="the seed that rows are drawn with; null: the run's `seed`")
    train_size: Positive | None = Field(None, description="rows drawn for train from all classes together; null: all")
    dev_size: Positive | None = Field(  # null with train_size: 1000
        None, description="rows of train, at most half, for dev if dev or test is missing; null: a tenth, max. 1000"
    )
    test_size: Positive | None = Field(
        None, description="the most rows of test, drawn; of data without one, rows held out. null: all, none"
    )
    as_released: Flag = Field(  # of WSC's 554 rows, 54
        False, description="dev and ends of completions as in the MeZO paper's OPT runs (docs/reference/paper.md)"
    )
    eval_limit: Positive | None = Field(None, description="rows of dev and of test that are used; null: all")
    batches: Literal["shuffled", "balanced", "replacement"] = Field(
        "shuffled", description="shuffled: by epochs. balanced: as many rows of each label. replacement: each row drawn"
    )
    weights: Literal["mean", "none"] = Field(  # none: the loss is that of equally frequent labels
        "mean", description="of rows in balanced batches; mean: the loss estimates the mean over the training rows"
    )
    store_texts: Flag = Field(
        True, description="false: no file of the run has the texts of a row or a completion, so that it can be shared"
    )
    keep: Text | None = Field(  # rows with `prompt` and `answer`: log-probability, and KL divergence from the start
        None,
        description="a file of rows that a run on generated text must not forget, scored at evaluations; null: none",
    )


class FilesConfig(DataConfig):
    """The user's own files."""

    dir: Text | None = Field(None, description="a folder with train, dev and test files, or one file")


def data_dir(data: DataConfig) -> str | None:
    """Return the folder or file of the rows; None for other sources."""
    return data.dir if isinstance(data, FilesConfig) else None


class LoggerConfig(Settings):
    """The loggers that receive the scalars, besides metrics.jsonl."""

    names: list[LoggerName] = Field([], description="the loggers, chosen by `logger=`, several by `logger=[one,two]`")
    project: Text = Field("mezo", description="the project's name in Weights & Biases and Trackio")
    tags: list[Entry] = Field([], description="tags of the run, besides its task, method, model and data")


class DistributedConfig(Settings):
    """How the processes (ranks) of a `torchrun` share a run; read by them alone (docs/how-to/scaling.md)."""

    split: Literal["directions", "rows"] | None = Field(
        None, description="what a rank has of a step; null: directions if there is one or more for each, else rows"
    )
    timeout: PositiveNumber = Field(120.0, le=1e6, description="seconds that a rank waits for the others")


class Config(Settings):
    """The whole config of a run."""

    task: TaskConfig = TaskConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    model: ModelConfig = ModelConfig()
    peft: PeftConfig = PeftConfig()
    data: DataConfig = DataConfig()
    logger: LoggerConfig = LoggerConfig()
    distributed: DistributedConfig = DistributedConfig()
    engine: EngineConfig = EngineConfig()
    init: Literal["none", "linear_probe"] = Field(
        "none", description="linear_probe fits the output layer by logistic regression before the first step"
    )
    probe_c: PositiveNumber | None = Field(None, description="C of that regression; null: by cross-validation on train")
    seed: Seed = Field(42, description="the seed of z, of the batches, of new weights, and (`data.seed`) of the rows")
    steps: Seed = Field(100_000, description="training steps; 0: evaluate only")
    forwards: Annotated[Positive, Field(le=2**32 - 1)] | None = Field(
        None, description="in place of steps: the most forwards (and backwards) of the batch; null: steps"
    )
    batch_size: Positive = Field(64, description="rows per training step")
    micro_batch_size: Annotated[Positive, WrapValidator(number_or_auto)] | None = Field(
        None, description="most rows per forward, in evaluations too; null: all; `auto`: the most that fit"
    )
    eval_batch_size: Positive = Field(64, description="rows per forward of an evaluation")
    eval_every: NotNegative = Field(10_000, description="steps between evaluations on dev; 0: before and after them")
    eval_at_forwards: list[Positive] = Field(
        [], description="in place of eval_every: numbers of forwards; evaluated after each"
    )
    log_every: Positive | None = Field(None, description="steps between lines of metrics.jsonl; null: for 1,000 lines")
    test_at_start: Flag = Field(True, description="evaluate on test and 1,000 rows of train before the first step too")
    checkpoint: Literal["full", "trajectory"] = Field(
        "full", description="full saves weights; trajectory saves none and replays them"
    )
    checkpoint_every: NotNegative = Field(0, description="steps between saves of `last`; 0: at every evaluation")
    metric: Text | None = Field(None, description="picks the best checkpoint on dev, or `loss`; null: `task.metric`")
    max_seconds: PositiveNumber | None = Field(None, description="seconds after which a process stops; null: no limit")
    at_limit: Literal["stop", "finish"] = Field(
        "stop", description="at max_seconds: stop leaves a run to resume, exit status 130; finish tests its best step"
    )
    patience: Positive | None = Field(
        None, description="evaluations without a better dev score after which the run ends; null: any number"
    )
    stop_on_divergence: Flag | None = Field(None, description="end a diverged run, and test its best step; null: true")

    @property
    def data_task(self) -> TaskConfig:
        """The task as its rows are read: without labels where the objective needs none."""
        return self.objective.data_task(self.task)

    @property
    def data_seed(self) -> int:
        """The seed that rows are drawn with: `data.seed`, or the run's seed if that is null."""
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def chosen_metric(self) -> str:
        """The metric on dev that picks the best checkpoint."""
        return self.metric or self.task.metric or self.objective.default_metric

    @property
    def shown_metric(self) -> str:
        """The metric of results: that which picks the best checkpoint, or the task's if the loss picks it."""
        of_task = self.task.metric or self.objective.default_metric
        return of_task if self.chosen_metric == "loss" else self.chosen_metric

    @property
    def picks_micro_batch(self) -> bool:
        """Whether micro_batch_size is `auto`, until the most rows that fit are known."""
        return isinstance(self.micro_batch_size, str)

    def rows_per_forward(self, rows: int) -> int:
        """Return the most rows of a forward, of so many; all where no run has chosen what fits yet."""
        return rows if self.micro_batch_size is None or self.picks_micro_batch else self.micro_batch_size

    def order_of(self, metric: str) -> int:
        """Return 1 for a metric of which the highest value is the best, -1 for one of which the lowest is."""
        return -1 if metric in self.objective.lower_is_better else 1

    def better(self, metric: str, value: float, other: float) -> bool:
        """Return whether one value of a metric is better than another."""
        return self.order_of(metric) * (value - other) > 0

    def rank(self, scores: Mapping[str, Any], metric: str | None = None) -> tuple[float, float]:
        """Return the sort key of the scores on dev, the best first: by `metric`, of equal ones by the loss.

        The metric is the chosen one if none is given. Of equal keys the earlier step, or the smaller setting, wins.
        """
        name = metric or self.chosen_metric
        return -self.order_of(name) * float(scores[name]), float(scores["loss"])

    def best_step(self, evaluations: Mapping[int, Mapping[str, Any]]) -> int:
        """Return the step with the best value of the chosen metric; of equal ones the lower loss, then the earlier."""
        return min((*self.rank(line), step) for step, line in evaluations.items())[-1]

    def passes(self, steps: int, total: int | None = None) -> int:
        """Return the passes of the first `steps` steps of a run of `total` steps, by default `steps` of this config.

        A pass is over the batch with one weight set, forward or backward; evaluations are not counted.
        """
        return sum(self.optimizer.count_forwards(steps, self.steps if total is None else total).values())

    def batch_number(self, step: int) -> int:
        """Return the number of the batch that step number `step` (from 0) takes.

        With `forwards` it is half of the passes before it: a step of MeZO takes two, so that after as many passes every
        method stands at the same place of one stream of batches.
        """
        return step if self.forwards is None else self.passes(step) // 2

    def evaluates_at(self, step: int) -> bool:
        """Return whether the run is evaluated on dev after `step` steps: 0, the last, and those that are asked for."""
        if step in (0, self.steps):
            return True
        if self.eval_at_forwards:
            return any(self.passes(step - 1) < number <= self.passes(step) for number in self.eval_at_forwards)
        return self.eval_every > 0 and step % self.eval_every == 0

    @property
    def log_interval(self) -> int:
        """The steps between lines of metrics.jsonl: `log_every`; null gives about 1,000 lines, or one per step."""
        return max(1, self.steps // 1000) if self.log_every is None else self.log_every

    def logs_at(self, step: int) -> bool:
        """Whether the run writes a line on step `step` (from 1) to metrics.jsonl."""
        return step % self.log_interval == 0 or step == self.steps


def to_dict(settings: Settings, whole: bool = False) -> dict[str, Any]:
    """Return settings as plain nested values, in the order of config.yaml; the user's own is null, unless `whole`."""
    values = {name: getattr(settings, name) for name in type(settings).model_fields}
    marked = {} if whole else type(settings).own_fields()
    values |= {name: None for name, mark in marked.items() if mark.find(values[name]) is not None}
    return {
        key: to_dict(each, whole) if isinstance(each, Settings) else copy.copy(each) for key, each in values.items()
    }


# One step of a trajectory: the step (from 0), its projected gradients (one per sample), its learning rate.
StepRecord = tuple[int, list[float], float]


@dataclass(frozen=True, slots=True)
class Example:
    """One row."""

    texts: tuple[str, ...]  # in the order of `task.columns`; empty for a row without a label
    label: int  # its index; -1 for a row of a task without labels
    where: str = ""  # its file and line, for error lines: "train.tsv:17"
    columns: Mapping[str, Any] | None = None  # all, lists and records included, of a task without labels; else None
    demonstrations: "tuple[Example, ...]" = ()  # rows of train that are put before it (`task.demonstrations`)


@dataclass(frozen=True)
class Splits:
    """The rows of a run. `test` is None if the data have none; `notes` are warnings to show."""

    train: list[Example]
    dev: list[Example]
    test: list[Example] | None
    fingerprint: str = ""  # sha256 over all texts and labels, or over all columns of rows without labels
    notes: list[str] = field(default_factory=list)
    revision: str | None = None  # the commit of a data set on the hub


@dataclass(frozen=True, slots=True)
class TokenizedExample:
    """One tokenized row. It stores its ids in arrays: 5 bytes per token, where lists of Python ints take 44."""

    input_ids: Sequence[int]  # the token ids (int32)
    token_type_ids: Sequence[int]  # the segment of each token, 0 or 1 (int8)
    position: int  # the token whose hidden state is scored: the mask token's (mlm), the last one's (lm), -1 (cls)
    label: int  # the label's index

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_ids", array("i", self.input_ids))
        object.__setattr__(self, "token_type_ids", array("b", self.token_type_ids))
