"""The types that all packages share: the frozen, typed config, and the records of data and of a trajectory.

Every package may import this module; it imports neither Hydra nor torch. Type, range and choices of a field are its
annotation, which config/validation.py lets pydantic enforce. The meaning of a field is under `Attributes` in its
class's docstring; scripts/reference/make_reference.py makes docs/reference/config.md of it.

A group whose settings depend on the choice (`optimizer=`, `peft=`) has a base class here, and one class per choice.
`registry.settings_class` finds the class by the name of the choice.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from mezo_cli.config.values import Entry, Flag, Number, Text, Whole
from mezo_cli.errors import UserError

MISSING = "???"  # as in OmegaConf: a value has to be given

Positive = Annotated[Whole, Field(ge=1)]
NotNegative = Annotated[Whole, Field(ge=0)]
Seed = Annotated[Whole, Field(ge=0, le=2**32 - 1)]


class Settings:
    """The base of every class of settings: pydantic refuses a key that the class does not have."""

    __pydantic_config__ = ConfigDict(extra="forbid")


class SettingError(UserError):
    """A setting that is not valid.

    Attributes:
        key: its dotted name.
    """

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


@dataclass(frozen=True)
class HubSource(Settings):
    """A task's data set on the Hugging Face hub: `datasets.load_dataset(path, name)`.

    Labels are mapped by name, never by the hub's integers: RTE, MNLI and TREC number their classes differently there.

    Attributes:
        path: the data set's name on the hub, e.g. `nyu-mll/glue`; null: the task has none.
        name: its subset, e.g. `sst2`; null: none.
        revision: a branch, tag or commit; null: the newest.
        train: the split that is the source of train.
        dev: the split that is dev; null: a part of train (`data.dev_size` rows).
        test: the split that is test; null: there is none.
        labels: the data set's own class names (or values), in the order of `task.labels`, which are read as well.
    """

    path: Text | None = None
    name: Text | None = None
    revision: Text | None = None
    train: Text = "train"
    dev: Text | None = None  # null: a part of train
    test: str | None = "validation"
    labels: list[Entry] = field(default_factory=list)


@dataclass(frozen=True)
class FileSource(Settings):
    """The format of a task's files in GLUE and LM-BFF folders.

    Attributes:
        folder: LM-BFF's name of the folder, e.g. `SST-2`; null: the task has none.
        columns: names of the fields of a file without a header.
        labels: spellings of the labels in files, in the order of `task.labels`, which are read as well.
        dev: stem of the official dev file: `dev`, or `dev_matched` for MNLI.
        test: stem of the official test file.
    """

    folder: Text | None = None
    columns: list[Entry] = field(default_factory=list)
    labels: list[Entry] = field(default_factory=list)
    dev: Text = "dev"
    test: Text = "test"


@dataclass(frozen=True)
class LmPrompt(Settings):
    """A task's prompt for decoders (objective lm).

    Attributes:
        template: the prompt; it ends in `{mask}`, where the label word goes. null: the task has none.
        label_words: one word or phrase per label, of any number of tokens; empty: `task.label_words`.
        max_length: tokens of prompt and word; a longer prompt loses its start. null: the model's limit.
    """

    template: Text | None = None
    label_words: list[Entry] = field(default_factory=list)
    max_length: Annotated[Whole, Field(ge=8)] | None = None


@dataclass(frozen=True)
class GeneratePrompt(Settings):
    """What a decoder continues, and what it should say (objective generate).

    Attributes:
        prompt: the prompt: `{column}` is a text, a number or a list of numbers, `{answers.text[0]}` a part of a record
            or list. Empty: the model learns the answers as plain text. null: the task has none.
        answer: the text that `objective.loss=lm` learns, after the prompt; its leading space and its line end count.
            null: none.
        gold: the column (`answers.text`: a part of it) with the right text or texts; null: the answer.
        stop: texts that end a completion.
        keep_stop: whether a completion keeps the text that ended it.
        chat: the prompt is the user's message in the tokenizer's chat template; or, if it is the name of a column, that
            column's list of messages (a last one of the assistant's is left out).
        system: the chat's system message; null: none.
        max_length: tokens of a prompt and its answer or completion; null: the model's limit.
        too_long: a longer row is refused, or cut: its prompt loses its start.
    """

    prompt: Entry | None = None
    answer: Text | None = None
    gold: Text | None = None
    stop: list[Text] = field(default_factory=list)
    keep_stop: Flag = False
    chat: Flag = False
    system: Text | None = None
    max_length: Annotated[Whole, Field(ge=8)] | None = None
    too_long: Literal["refuse", "cut"] = "refuse"


@dataclass(frozen=True)
class ChoicePrompt(Settings):
    """A prompt and the texts that may follow it, of which the most likely is chosen (objective choice).

    The templates are those of `task.generate`. White space before the prompt and spaces after it are dropped, and
    spaces after a candidate.

    Attributes:
        prompt: the prompt; null: the task has none.
        candidates: one template per candidate, which follows the prompt: its leading space counts. With `each`, one.
        each: the column with a list of texts; the row has a candidate for each of them, in whose template `{candidate}`
            is that text. null: a row has all of `candidates`.
        right: the column with the right text of `each`, or with a list of them, of which any counts as right and the
            first is trained. null: the row's label is the number of the right candidate, from 0.
        max_length: tokens of a prompt and its longest candidate; null: the model's limit.
        too_long: a longer row is refused, or cut: its prompt loses its start, but for the first token.
    """

    prompt: Text | None = None
    candidates: list[Text] = field(default_factory=list)
    each: Text | None = None
    right: Text | None = None
    max_length: Annotated[Whole, Field(ge=8)] | None = None
    too_long: Literal["refuse", "cut"] = "cut"


@dataclass(frozen=True)
class TaskConfig(Settings):
    """A task: its template, its labels and their words, its prompts, its columns, and its data sources.

    Attributes:
        name: the task's name in tables and run directories.
        version: recorded in run.json. Raise it when the template, the label words or the splits change.
        template: the prompt of objective mlm: `{column}` is a text, `{mask}` the mask. null: the task has no labels.
        labels: the names of the labels; empty for a task with `task.generate` alone.
        label_words: one word per label, each one token, in the order of `task.labels`.
        columns: the texts of a row, in order (`sent_0`, `sent_1` of an LM-BFF template).
        rename: column name in the source -> name used in `task.columns`.
        label_column: the column with the label.
        skip_labels: rows with one of these labels are dropped, e.g. rows without an agreed label.
        max_length: tokens of a row; the end of a longer one is cut. A row whose mask would be cut is refused.
        first_limit: tokens kept of the first sentence; null: no limit of its own.
        other_limit: tokens kept of every other sentence; null: no limit of its own.
        bos_token_id: the first token of a decoder's prompt; null: what the tokenizer itself puts before a text. The
            MeZO paper's code gave OPT 0 in place of 2 (docs/reference/decoders.md).
        metric: the metric of the task (`registry.METRICS`), which picks the best checkpoint; null: the objective's
            first, which is the accuracy for objectives that score labels.
        demonstrations: rows of train that are put before each row of dev and test, solved (in-context learning;
            docs/how-to/large-models.md): for an evaluation (`steps=0`) by objective lm, choice or generate.
    """

    name: Text = MISSING
    version: Positive = 1
    template: Text | None = None
    labels: list[Entry] = field(default_factory=list)
    label_words: list[Entry] = field(default_factory=list)
    columns: list[Entry] = field(default_factory=list)
    rename: dict[Entry, Entry] = field(default_factory=dict)
    label_column: Text = "label"
    skip_labels: list[Entry] = field(default_factory=list)
    max_length: Annotated[Whole, Field(ge=8)] = 128
    first_limit: Positive | None = None
    other_limit: Positive | None = None
    bos_token_id: NotNegative | None = None
    metric: Text | None = None
    demonstrations: NotNegative = 0
    lm: LmPrompt = field(default_factory=LmPrompt)
    generate: GeneratePrompt = field(default_factory=GeneratePrompt)
    choice: ChoicePrompt = field(default_factory=ChoicePrompt)
    hub: HubSource = field(default_factory=HubSource)
    files: FileSource = field(default_factory=FileSource)

    @property
    def offered(self) -> str:
        """The objectives that the task has a prompt for, as the end of an error line; empty if there is none."""
        own = {"mlm": self.template, "lm": self.lm.template}
        own |= {"choice": self.choice.prompt, "generate": self.generate.prompt}
        names = [f"objective={name}" for name, prompt in own.items() if prompt is not None]
        return f"; or use {' or '.join(names)}, for which the task has a prompt" if names else ""


@dataclass(frozen=True)
class ObjectiveConfig(Settings):
    """The objective, which scores the labels, and the loss of its scores. An objective may have a class of its own.

    Class attributes:
        needs_labels: whether label words or a head score the task's labels.
        differentiable_loss: a loss that has a gradient, for the line that refuses one without.

    Attributes:
        name: how labels are scored (`registry.OBJECTIVES`); chosen by `objective=`.
        loss: the loss that is minimised (`registry.LOSSES`). accuracy and f1 have no gradient.
    """

    needs_labels: ClassVar[bool] = True
    differentiable_loss: ClassVar[str] = "cross_entropy"
    name: Text = MISSING
    loss: Text = "cross_entropy"

    @property
    def default_metric(self) -> str:
        """The metric that picks the best checkpoint where neither `metric` nor `task.metric` names one."""
        return "accuracy"

    @property
    def metric_names(self) -> list[str] | None:
        """The metrics of its evaluations besides the loss; None if they are not known before there is one."""
        from mezo_cli.config.registry import METRICS  # it reads this module

        return METRICS.names

    @property
    def lower_is_better(self) -> frozenset[str]:
        """The metrics of which the lowest value is the best."""
        return frozenset({"loss"})

    def data_task(self, task: TaskConfig) -> TaskConfig:
        """Return the task as its rows are read: without labels a row is all of its columns, for its `generate`."""
        return task if self.needs_labels else replace(task, labels=[], choice=ChoicePrompt())

    def check_task(self, task: TaskConfig) -> None:
        """Reject a task without what the objective reads, before its data is read."""
        name = task.name
        if self.name == "mlm" and task.template is None:
            raise SettingError("task.template", f"task.template is not set: give task.template=...{task.offered}")
        if self.needs_labels and not task.labels:
            why = f"task '{name}': task.labels is empty; give two or more names"
            raise SettingError("task.labels", f"{why}{task.offered}")
        if not self.needs_labels and task.generate.prompt is None:
            why = f"task '{name}' has no prompt to continue (objective={self.name}): set task.generate.prompt"
            column = task.columns[0] if task.columns else "question"
            raise SettingError("task.generate.prompt", f"{why}, e.g. '{{{column}}}\\nAnswer:'{task.offered}")

    def check(self, config: "Config") -> None:
        """Reject combinations with other settings that are individually valid but incompatible."""

    def check_new_run(self, config: "Config") -> None:
        """Reject what a new run cannot start with, though a stored config may have it. It may start a process."""

    def check_resumed(self, config: "Config", info: Mapping[str, Any], new_reward: bool) -> None:
        """Reject a run that would go on with something else than it began with.

        Args:
            config: of the run, with what the user has given to this process.
            info: the content of its run.json.
            new_reward: accept another function as `objective.reward`.
        """
        change = self.describe_change(config, info)
        if change and not new_reward:
            raise UserError(f"{change}; --new-reward goes on with it")

    def describe_change(self, config: "Config", info: Mapping[str, Any]) -> str:
        """Return how what the user has given to this process differs from what run.json says; "" if it does not."""
        return ""

    def completion_tokens(self, config: "Config") -> int:
        """Return the tokens to leave free after a prompt for a completion; 0 for a run that completes nothing."""
        return 0

    @property
    def shares_rows(self) -> bool:
        """Whether ranks may share the rows of a step."""
        return True

    @property
    def is_differentiable(self) -> bool:
        """Whether the loss has a gradient."""
        from mezo_cli.config.registry import LOSSES  # as above

        return bool(getattr(LOSSES.load(self.loss), "differentiable", True))


@dataclass(frozen=True)
class OptimizerConfig(Settings):
    """The chosen optimizer and its settings; the class of each is in its module (`mezo_cli.optim`).

    Attributes:
        name: the method (`registry.OPTIMIZERS`); chosen by `optimizer=`.
        lr: learning rate.
    """

    name: Text = MISSING
    lr: Annotated[Number, Field(ge=0.0, le=3e38)] = 1e-6  # float32, as the trajectory stores it


@dataclass(frozen=True)
class PeftConfig(Settings):
    """Which parameters are trained: the method and its settings.

    Attributes:
        name: which parameters are trained (`registry.PEFT`); chosen by `peft=`.
    """

    name: Text = MISSING


EMBEDDED_MODELS = {"demo": "model", "demo-decoder": "decoder"}  # values of model.path -> their folders in mezo_cli/demo


@dataclass(frozen=True)
class ModelConfig(Settings):
    """The pretrained model: a hub id or a local folder, its dtypes and device.

    Attributes:
        name: the model's name in tables; chosen by `model=`.
        path: a hub id, a local folder, or an embedded model (`demo`, `demo-decoder`).
        revision: a branch, tag or commit on the hub; null: the newest.
        dtype: how the weights are stored. In half precision, updates are rounded stochastically
            (docs/how-to/low-memory.md).
        compute_dtype: the dtype of the forwards.
        quantize: how the matrices of a frozen base are stored: int8 (own; a scale per row), or nf4 (4 bits, by
            bitsandbytes; a scale per 64 weights). Needs a `peft` (docs/how-to/low-memory.md).
        tie_embeddings: whether the decoder over the vocabulary is the matrix of the input embeddings. null: as the
            model's config says. false: it starts as a copy, unless the checkpoint has one, and is trained by itself.
            true: for a checkpoint without a decoder of its own. objective=cls has no decoder.
        matmul_precision: of products of float32 matrices. high: TF32, on a GPU that has it.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`. auto: cuda where there is one, else cpu.
        paired_tokens: the most tokens of a batch for which one forward computes both signs of a step, 0: always a
            forward per sign. null: 1024 on a CPU, 16384 on other devices.
        cache_frozen: auto computes the layers below the first trained tensor once per batch, for both signs.
        cache_bytes: memory in which their output is kept between steps, for all rows of train and then of dev, if all
            of a split's fit; 0 keeps none.
    """

    name: Text = MISSING
    path: Text = MISSING
    revision: Text | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    quantize: Literal["none", "int8", "nf4"] = "none"
    tie_embeddings: Flag | None = None
    matmul_precision: Literal["highest", "high"] = "highest"
    device: Text = "auto"
    paired_tokens: NotNegative | None = None
    cache_frozen: Literal["auto", "off"] = "auto"
    cache_bytes: NotNegative = 256_000_000

    @property
    def is_embedded(self) -> bool:
        """Whether the model is part of this package."""
        return self.path in EMBEDDED_MODELS


@dataclass(frozen=True)
class EngineConfig(Settings):
    """The inference engine that computes the forwards (docs/how-to/engines.md).

    Attributes:
        name: none: the model's own forwards; openai: a server's, for objectives lm, choice and generate; vllm is
            refused in this version; chosen by `engine=`.
    """

    name: Text = "none"


@dataclass(frozen=True)
class VllmConfig(EngineConfig):
    """vLLM in a process of its own, which this version refuses to start.

    Attributes:
        python: the interpreter of an environment with vLLM, never stored; null: MEZO_ENGINE_PYTHON.
        tensor_parallel: over how many processes the engine's weights are sharded.
        dtype: of the engine's weights and forwards.
        memory: bytes for the engine's keys and values, in each process.
        max_loras: the most LoRA members that are computed in one call.
        timeout: seconds to wait for an answer of the engine, its start included.
    """

    python: Text | None = None
    tensor_parallel: Positive = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    memory: Positive = 1_000_000_000
    max_loras: Annotated[Positive, Field(le=256)] = 8
    timeout: Annotated[Number, Field(gt=0.0)] = 600.0


@dataclass(frozen=True)
class OpenAiConfig(EngineConfig):
    """A vLLM server that the user has started, by its HTTP interface; for LoRA members.

    Attributes:
        url: its address, never stored; null: MEZO_ENGINE_URL.
        adapter_dir: a folder that the server sees by the same path, for the adapters; never from a file and never
            stored; null: MEZO_ENGINE_ADAPTER_DIR.
        allow_remote: whether the server may be on another machine.
        server: whose paths it has; sglang was never run.
        dtype: of the server's weights and forwards, for the check at the start.
        max_loras: the most LoRA members that are computed at once: the server's --max-loras.
        timeout: seconds to wait for an answer.
    """

    url: Text | None = None
    adapter_dir: Text | None = None
    allow_remote: Flag = False
    server: Literal["vllm", "sglang"] = "vllm"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_loras: Annotated[Positive, Field(le=256)] = 8
    timeout: Annotated[Number, Field(gt=0.0)] = 600.0


@dataclass(frozen=True)
class DataConfig(Settings):
    """The source of the rows, and how many are used.

    Attributes:
        name: the source (`registry.SOURCES`); chosen by `data=`.
        shots: k rows per class for train and again for dev; null: all rows.
        seed: the seed that rows are drawn with; null: the run's `seed`.
        train_size: rows drawn for train from all classes together; null: all.
        dev_size: rows of train, at most a tenth of them (with `train_size`: at most half, if there are too few for
            both), that become dev unless the data have both dev and test.
        test_size: the most rows drawn from the test set; where the data are train alone, such as a single file, rows
            held out for one. null: all, none.
        as_released: dev has its `dev_size` rows whatever is left for train, as in the code that the MeZO paper's OPT
            runs were made with: of WSC's 554 rows, 54; and a completion ends at the token of a stop text alone
            (docs/reference/decoders.md).
        eval_limit: rows of dev and of test that are used; null: all.
        batches: shuffled: each epoch is a new shuffle. balanced: as many rows of each label in each batch, a remainder
            rotating over the labels. replacement: each row is drawn by itself.
        weights: of rows in balanced batches. mean: the loss estimates the mean over the training rows, whatever the
            labels' shares are. none: it is that of equally frequent labels.
        keep: a file of rows with `prompt` and `answer` that a run on generated text must not forget: the answers'
            log-probability, and the KL divergence from the start, at each evaluation; null: none.
    """

    name: Text = MISSING
    shots: Positive | None = None
    seed: Seed | None = None
    train_size: Positive | None = None
    dev_size: Positive = 1000
    test_size: Positive | None = None
    as_released: Flag = False
    eval_limit: Positive | None = None
    batches: Literal["shuffled", "balanced", "replacement"] = "shuffled"
    weights: Literal["mean", "none"] = "mean"
    keep: Text | None = None


@dataclass(frozen=True)
class FilesConfig(DataConfig):
    """The user's own files.

    Attributes:
        dir: a folder with train, dev and test files, or one file.
    """

    dir: Text | None = None


def data_dir(data: DataConfig) -> str | None:
    """Return the folder or file of the rows; None for other sources."""
    return data.dir if isinstance(data, FilesConfig) else None


def without_dir(data: DataConfig) -> DataConfig:
    """Return the settings of the source without the places of files, as another machine may have them."""
    return replace(data, dir=None, keep=None) if isinstance(data, FilesConfig) else replace(data, keep=None)


@dataclass(frozen=True)
class LoggerConfig(Settings):
    """The loggers that receive the scalars, besides metrics.jsonl.

    Attributes:
        names: the loggers (`mezo_cli.training.loggers.LOGGERS`); chosen by `logger=`, several by `logger=[one,two]`.
        project: the project's name in Weights & Biases and Trackio.
        tags: tags of the run, besides its task, objective, optimizer, peft, model and data.
    """

    names: list[Entry] = field(default_factory=list)
    project: Text = "mezo"
    tags: list[Entry] = field(default_factory=list)


@dataclass(frozen=True)
class DistributedConfig(Settings):
    """How the processes (ranks) of a `torchrun` share a run; read by them alone (docs/how-to/scaling.md).

    Attributes:
        split: directions gives each rank whole directions of a step, rows gives it rows of the batch. null: directions
            if `optimizer.samples` is at least the number of ranks, else rows.
        timeout: seconds that a rank waits for the others before the run ends.
    """

    split: Literal["directions", "rows"] | None = None
    timeout: Annotated[Number, Field(gt=0.0, le=1e6)] = 120.0


@dataclass(frozen=True)
class Config(Settings):
    """The whole config of a run.

    Attributes:
        init: linear_probe fits the output layer by logistic regression before the first step.
        probe_c: C of the probe's regression; null: chosen by cross-validation on train.
        seed: the seed of z, of the batches, of new weights, and (if `data.seed` is null) of the rows.
        steps: training steps; 0: evaluate only.
        forwards: in place of steps: the most steps whose forwards (and backwards) of the batch do not exceed this
            number; steps follow from it, and a step takes the batch of half the forwards before it. null: steps.
        batch_size: rows per training step.
        micro_batch_size: most rows per forward, in evaluations too; the loss stays that of the whole batch; null: all.
        eval_batch_size: rows per forward of an evaluation.
        eval_every: steps between evaluations on dev; 0: only before the first step and after the last.
        eval_at_forwards: in place of eval_every: numbers of forwards, [250, 500]: dev is evaluated after the first step
            that ends at or past each.
        log_every: steps between lines of metrics.jsonl; null: max(1, steps // 1000).
        test_at_start: evaluate on test, and on 1,000 rows of train, before the first step too: the result is compared
            with the untrained model's (docs/reference/compare.md).
        checkpoint: full writes weights; trajectory writes none: best and last are replayed from trajectory.bin.
        checkpoint_every: steps between saves of the checkpoint `last`; 0: it is saved at every evaluation.
        metric: the metric on dev that picks the best checkpoint, `loss` for the loss; null: `task.metric`, or the
            objective's first.
        max_seconds: seconds from a process's second step on after which it stops (the first compiles); null: no limit.
        at_limit: what happens at max_seconds. stop leaves a run to resume, with exit status 130; finish evaluates it,
            tests it at its best step and ends it.
        patience: evaluations without a better dev score after which the run ends; null: any number.
        stop_on_divergence: end a run that has diverged (docs/reference/run-directory.md), and test it at its best step;
            null: true.
    """

    task: TaskConfig = field(default_factory=TaskConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    data: DataConfig = field(default_factory=DataConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    init: Literal["none", "linear_probe"] = "none"
    probe_c: Annotated[Number, Field(gt=0.0)] | None = None
    seed: Seed = 42
    steps: Annotated[Whole, Field(ge=0, le=2**32 - 1)] = 100_000
    forwards: Annotated[Whole, Field(ge=1, le=2**32 - 1)] | None = None
    batch_size: Positive = 64
    micro_batch_size: Positive | None = None
    eval_batch_size: Positive = 64
    eval_every: NotNegative = 10_000
    eval_at_forwards: list[Positive] = field(default_factory=list)
    log_every: Positive | None = None
    test_at_start: Flag = True
    checkpoint: Literal["full", "trajectory"] = "full"
    checkpoint_every: NotNegative = 0
    metric: Text | None = None
    max_seconds: Annotated[Number, Field(gt=0.0)] | None = None
    at_limit: Literal["stop", "finish"] = "stop"
    patience: Positive | None = None
    stop_on_divergence: Flag | None = None

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
        own = self.task.metric or self.objective.default_metric
        return own if self.chosen_metric == "loss" else self.chosen_metric

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

    def evaluates_at(self, step: int) -> bool:
        """Return whether the run is evaluated on dev after `step` steps: 0, the last, and those that are asked for."""
        if self.eval_at_forwards:
            return step in (0, self.steps) or step in self.steps_at_forwards
        return step in (0, self.steps) or (self.eval_every > 0 and step % self.eval_every == 0)

    @cached_property
    def steps_at_forwards(self) -> frozenset[int]:
        """The steps that `eval_at_forwards` names."""
        from mezo_cli.config.budget import steps_at  # an optimizer counts its forwards, which this module cannot load

        return steps_at(self, self.eval_at_forwards)

    @property
    def log_interval(self) -> int:
        """The steps between lines of metrics.jsonl: `log_every`; null gives about 1,000 lines, or one per step."""
        return max(1, self.steps // 1000) if self.log_every is None else self.log_every

    def logs_at(self, step: int) -> bool:
        """Whether the run writes a line on step `step` (from 1) to metrics.jsonl."""
        return step % self.log_interval == 0 or step == self.steps


def to_dict(config: Config) -> dict[str, Any]:
    """Return the config as plain nested values, in the order of config.yaml, without a callable as reward."""
    objective: Any = config.objective
    if callable(getattr(objective, "reward", None)):
        config = replace(config, objective=replace(objective, reward=None))
    return asdict(config)


# One step of a trajectory: the step (from 0), its projected gradients (one per sample), its learning rate.
StepRecord = tuple[int, list[float], float]


@dataclass(frozen=True, slots=True)
class Example:
    """One row.

    Attributes:
        texts: in the order of `task.columns`; empty for a row without a label.
        label: the index of its label; -1 for a row of a task without labels.
        where: its file and line, for error lines: "train.tsv:17".
        columns: all columns of a row of a task without labels, lists and records included; None for every other row.
        demonstrations: rows of train that are put before it (`task.demonstrations`).
    """

    texts: tuple[str, ...]
    label: int
    where: str = ""
    columns: Mapping[str, Any] | None = None
    demonstrations: "tuple[Example, ...]" = ()


@dataclass(frozen=True)
class Splits:
    """The rows of a run. `test` is None if the data have none; `notes` are warnings to show."""

    train: list[Example]
    dev: list[Example]
    test: list[Example] | None
    fingerprint: str = ""  # sha256 over all texts and labels, or over all columns of rows without labels
    notes: list[str] = field(default_factory=list)
    revision: str | None = None  # the commit of a data set on the hub

    def format_sizes(self) -> str:
        """Return the numbers of rows for the log."""
        test = "no test split" if self.test is None else f"{len(self.test)} test"
        return f"{len(self.train)} train, {len(self.dev)} dev, {test}"


@dataclass(frozen=True, slots=True)
class TokenizedExample:
    """One tokenized row. It stores its ids in arrays: 5 bytes per token, where lists of Python ints take 44.

    Attributes:
        input_ids: the token ids (int32).
        token_type_ids: the segment of each token, 0 or 1 (int8).
        position: the token whose hidden state is scored: the mask token's (mlm), the last one's (lm), -1 (cls).
        label: the label's index.
    """

    input_ids: Sequence[int]
    token_type_ids: Sequence[int]
    position: int
    label: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_ids", array("i", self.input_ids))
        object.__setattr__(self, "token_type_ids", array("b", self.token_type_ids))
