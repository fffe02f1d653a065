"""The types that all packages share: the frozen, typed config, and the records of data and of a trajectory.

Every package may import this module; it imports neither Hydra nor torch. The range or the choices of a field are in its
metadata, and config/validation.py enforces them. The meaning of a field is under `Attributes` in its class's docstring;
scripts/make_reference.py makes docs/reference/config.md of it.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from mezo_cli.errors import UserError

MISSING = "???"  # as in OmegaConf: a value has to be given


@dataclass(frozen=True)
class Setting:
    """One setting: its type and range. An optimizer declares those that it reads.

    Attributes:
        name: the key after the group: `lr` for `optimizer.lr`.
        type: float, int, bool or str; `int | None` if null is allowed.
        default: the value if none is given.
        help: its meaning in one line.
        low, high: bounds, inclusive. nan and inf are outside every range.
        above: a lower bound, exclusive.
        choices: the values allowed.
    """

    name: str
    type: Any
    default: Any
    help: str = ""
    low: float | None = None
    above: float | None = None
    high: float | None = None
    choices: Sequence[str] = ()


class Owners(NamedTuple):
    """The choices of a group that have a setting. With every other choice the setting is null.

    Attributes:
        choices: their names.
        required: whether the setting may not be null with them.
    """

    choices: tuple[str, ...]
    required: bool


def ranged(
    default: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    of: str | tuple[str, ...] = (),
    required: bool = True,
) -> Any:
    """Return the field of a number with its range, as in `Setting`. `of`, `required`: see `one_of`."""
    return field(default=default, metadata={"low": low, "above": above, "high": high, "of": _owners(of, required)})


def one_of(default: str | None, *choices: str, of: str | tuple[str, ...] = (), required: bool = True) -> Any:
    """Return the field of a text with its choices. With `of`, only these choices of the group have it (`Owners`)."""
    return field(default=default, metadata={"choices": choices, "of": _owners(of, required)})


def _owners(of: str | tuple[str, ...], required: bool) -> Owners | None:
    choices = (of,) if isinstance(of, str) else of
    return Owners(choices, required) if choices else None


class SettingError(UserError):
    """A setting that is not valid.

    Attributes:
        key: its dotted name.
    """

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


@dataclass(frozen=True)
class HubSource:
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

    path: str | None = None
    name: str | None = None
    revision: str | None = None
    train: str = "train"
    dev: str | None = None  # null: a part of train
    test: str | None = "validation"
    labels: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FileSource:
    """The format of a task's files in GLUE and LM-BFF folders.

    Attributes:
        folder: LM-BFF's name of the folder, e.g. `SST-2`; null: the task has none.
        columns: names of the fields of a file without a header.
        labels: spellings of the labels in files, in the order of `task.labels`, which are read as well.
        dev: stem of the official dev file: `dev`, or `dev_matched` for MNLI.
        test: stem of the official test file.
    """

    folder: str | None = None
    columns: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    dev: str = "dev"
    test: str = "test"


@dataclass(frozen=True)
class LmPrompt:
    """A task's prompt for decoders (objective lm).

    Attributes:
        template: the prompt; it ends in `{mask}`, where the label word goes. null: the task has none.
        label_words: one word or phrase per label, of any number of tokens; empty: `task.label_words`.
        max_length: tokens of prompt and word; a longer prompt loses its start. null: the model's limit.
    """

    template: str | None = None
    label_words: list[str] = field(default_factory=list)
    max_length: int | None = ranged(None, low=8)


@dataclass(frozen=True)
class TaskConfig:
    """A classification task: its template, its labels and their words, its columns, and its data sources.

    Attributes:
        name: the task's name in tables and run directories.
        version: recorded in run.json. Raise it when the template, the label words or the splits change.
        template: the prompt of objective mlm: `{column}` is a text, `{mask}` the mask.
        labels: the names of the labels.
        label_words: one word per label, each one token, in the order of `task.labels`.
        columns: the texts of a row, in order (`sent_0`, `sent_1` of an LM-BFF template).
        rename: column name in the source -> name used in `task.columns`.
        label_column: the column with the label.
        skip_labels: rows with one of these labels are dropped, e.g. rows without an agreed label.
        max_length: tokens of a row; the end of a longer one is cut. A row whose mask would be cut is refused.
        first_limit: tokens kept of the first sentence; null: no limit of its own.
        other_limit: tokens kept of every other sentence; null: no limit of its own.
        metric: the score that picks the best checkpoint.
    """

    name: str = MISSING
    version: int = ranged(1, low=1)
    template: str = MISSING
    labels: list[str] = field(default_factory=list)
    label_words: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    rename: dict[str, str] = field(default_factory=dict)
    label_column: str = "label"
    skip_labels: list[str] = field(default_factory=list)
    max_length: int = ranged(128, low=8)
    first_limit: int | None = ranged(None, low=1)
    other_limit: int | None = ranged(None, low=1)
    metric: str = one_of("accuracy", "accuracy", "f1", "matthews")
    lm: LmPrompt = field(default_factory=LmPrompt)
    hub: HubSource = field(default_factory=HubSource)
    files: FileSource = field(default_factory=FileSource)


@dataclass(frozen=True)
class ObjectiveConfig:
    """The objective, which scores the labels, and the loss of its scores.

    Attributes:
        name: how labels are scored (`mezo_cli.objectives.OBJECTIVES`); chosen by `objective=`.
        loss: the loss that is minimised (`mezo_cli.objectives.LOSSES`). accuracy and f1 have no gradient.
    """

    name: str = MISSING
    loss: str = "cross_entropy"


@dataclass(frozen=True)
class OptimizerConfig:
    """The chosen optimizer and its settings.

    Settings are attributes too: `config.optimizer.lr`. The optimizer classes declare them (`mezo_cli.optim`).
    `settings` has those of all built-in optimizers, in config.yaml's order, and then those of a plug-in.

    Attributes:
        name: the method (`mezo_cli.optim.OPTIMIZERS`); chosen by `optimizer=`.
    """

    name: str = MISSING
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, key: str) -> Any:
        settings = self.__dict__.get("settings", {})  # unpickling looks attributes up before they are set
        if key not in settings:
            raise AttributeError(f"optimizer has no setting {key!r}")
        return settings[key]


@dataclass(frozen=True)
class PeftConfig:
    """Which parameters are trained. conf/peft/NAME.yaml has the values; a setting of another choice is null.

    Attributes:
        name: which parameters are trained; chosen by `peft=`.
        r: rank of LoRA's B A.
        alpha: LoRA's B A is scaled by alpha / r.
        targets: the matrices that get a LoRA: queries and values, or every matrix of the layers.
        length: tokens of the prefix.
        layers: a LoRA, or biases, of the top k layers only; of biases also those above the layers. null: all layers.
    """

    name: str = one_of(MISSING, "none", "lora", "prefix", "head", "bias")
    r: int | None = ranged(None, low=1, of="lora")
    alpha: int | None = ranged(None, low=1, of="lora")
    targets: str | None = one_of(None, "query_value", "attention_feed_forward", of="lora")
    length: int | None = ranged(None, low=1, of="prefix")
    layers: int | None = ranged(None, low=1, of=("lora", "bias"), required=False)


@dataclass(frozen=True)
class ModelConfig:
    """The pretrained model: a hub id or a local folder, its dtypes and device.

    Attributes:
        name: the model's name in tables; chosen by `model=`.
        path: a hub id, a local folder, or `demo`.
        revision: a branch, tag or commit on the hub; null: the newest.
        dtype: how the weights are stored. In two bytes, updates are rounded stochastically (docs/storage.md).
        compute_dtype: the dtype of the forwards.
        matmul_precision: of products of float32 matrices. high: TF32, on a GPU that has it.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`. auto: cuda where there is one, else cpu.
        paired_tokens: the most tokens of a batch for which one forward computes both signs of a step, 0: always a
            forward per sign. null: 1024 on a CPU, 16384 on other devices.
        cuda_graphs: record a step once and run it again as a CUDA graph. Only false: it has not run on a GPU yet.
        cache_frozen: auto computes the layers below the first trained tensor once per batch, for both signs.
        cache_bytes: memory in which their output is kept between steps, for all rows of train and then of dev, if all
            of a split's fit; 0 keeps none.
    """

    name: str = MISSING
    path: str = MISSING
    revision: str | None = None
    dtype: str = one_of("float32", "float32", "bfloat16", "float16")
    compute_dtype: str = one_of("float32", "float32", "bfloat16")
    matmul_precision: str = one_of("highest", "highest", "high")
    device: str = "auto"
    paired_tokens: int | None = ranged(None, low=0)
    cuda_graphs: bool = False
    cache_frozen: str = one_of("auto", "auto", "off")
    cache_bytes: int = ranged(256_000_000, low=0)


@dataclass(frozen=True)
class EngineConfig:
    """The inference engine that computes the forwards (docs/engines.md). A setting of another choice is null.

    Attributes:
        name: none: the model's own forwards; vllm: vLLM's, for objective lm; chosen by `engine=`.
        python: the interpreter of an environment with vLLM, never from a file and never stored; null:
            MEZO_ENGINE_PYTHON, else the environment that `mezo engine install` makes.
        tensor_parallel: over how many processes the engine's weights are sharded.
        dtype: of the engine's weights and forwards.
        memory: bytes for the engine's keys and values, in each process.
    """

    name: str = one_of("none", "none", "vllm")
    python: str | None = None
    tensor_parallel: int | None = ranged(None, low=1, of="vllm")
    dtype: str | None = one_of(None, "float32", "bfloat16", of="vllm")
    memory: int | None = ranged(None, low=1, of="vllm")


@dataclass(frozen=True)
class DataConfig:
    """The source of the rows, and how many are used.

    Attributes:
        name: the source; chosen by `data=`.
        dir: with `data=files`, a folder with train, dev and test files, or one file.
        shots: k rows per class for train and again for dev; null: all rows.
        seed: the seed that rows are drawn with; null: the run's `seed`.
        train_size: rows drawn for train from all classes together; null: all.
        dev_size: rows of train, at most a tenth of them, that become dev unless the data have both dev and test.
        test_size: rows held out for test where the data are train alone, such as a single file; null: none.
        eval_limit: rows of dev and of test that are used; null: all.
    """

    name: str = one_of(MISSING, "hub", "files", "demo")
    dir: str | None = None
    shots: int | None = ranged(None, low=1)
    seed: int | None = ranged(None, low=0, high=2**32 - 1)
    train_size: int | None = ranged(None, low=1)
    dev_size: int = ranged(1000, low=1)
    test_size: int | None = ranged(None, low=1)
    eval_limit: int | None = ranged(None, low=1)


@dataclass(frozen=True)
class LoggerConfig:
    """The loggers that receive the scalars, besides metrics.jsonl.

    Attributes:
        names: the loggers (`mezo_cli.training.loggers.LOGGERS`); chosen by `logger=`, several by `logger=[one,two]`.
        project: the project's name in Weights & Biases and Trackio.
        tags: tags of the run, besides its task, objective, optimizer, peft, model and data.
    """

    names: list[str] = field(default_factory=list)
    project: str = "mezo"
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class DistributedConfig:
    """How the processes (ranks) of a `torchrun` share a run; read by them alone (docs/scaling.md).

    Attributes:
        split: directions gives each rank whole directions of a step, rows gives it rows of the batch. null: directions
            if `optimizer.samples` is at least the number of ranks, else rows.
        shard: full gives each rank a part of the weights, which are put together module by module; every rank computes
            the whole batch. none: every rank holds all of them.
        timeout: seconds that a rank waits for the others before the run ends.
    """

    split: str | None = one_of(None, "directions", "rows")
    shard: str = one_of("none", "none", "full")
    timeout: float = ranged(120.0, above=0.0, high=1e6)


@dataclass(frozen=True)
class Config:
    """The whole config of a run.

    Attributes:
        init: linear_probe fits the output layer by logistic regression before the first step.
        probe_c: C of the probe's regression; null: chosen by cross-validation on train.
        seed: the seed of z, of the batches, of new weights, and (if `data.seed` is null) of the rows.
        steps: training steps; 0: evaluate only.
        batch_size: rows per training step.
        micro_batch_size: most rows per forward, in evaluations too; the loss stays that of the whole batch; null: all.
        eval_batch_size: rows per forward of an evaluation.
        eval_every: steps between evaluations on dev; 0: only before the first step and after the last.
        log_every: steps between lines of metrics.jsonl; null: max(1, steps // 1000).
        test_at_start: evaluate on test, and on 1,000 rows of train, before the first step too: the result is compared
            with the untrained model's (docs/compare.md).
        checkpoint: full writes weights; trajectory writes none: best and last are replayed from trajectory.bin.
        checkpoint_every: steps between saves of the checkpoint `last`; 0: it is saved at every evaluation.
        max_seconds: seconds from a process's second step on after which it stops (the first compiles); null: no limit.
        at_limit: what happens at max_seconds. stop leaves a run to resume, with exit status 130; finish evaluates it,
            tests it at its best step and ends it.
        patience: evaluations without a better dev score after which the run ends; null: any number.
        stop_on_divergence: end a run that has diverged (docs/reliability.md), and test it at its best step; null: true
            in a sweep and in `mezo tune`, else false.
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
    init: str = one_of("none", "none", "linear_probe")
    probe_c: float | None = ranged(None, above=0.0)
    seed: int = ranged(42, low=0, high=2**32 - 1)
    steps: int = ranged(100_000, low=0, high=2**32 - 1)
    batch_size: int = ranged(64, low=1)
    micro_batch_size: int | None = ranged(None, low=1)
    eval_batch_size: int = ranged(64, low=1)
    eval_every: int = ranged(10_000, low=0)
    log_every: int | None = ranged(None, low=1)
    test_at_start: bool = True
    checkpoint: str = one_of("full", "full", "trajectory")
    checkpoint_every: int = ranged(0, low=0)
    max_seconds: float | None = ranged(None, above=0.0)
    at_limit: str = one_of("stop", "stop", "finish")
    patience: int | None = ranged(None, low=1)
    stop_on_divergence: bool | None = None

    @property
    def data_seed(self) -> int:
        """The seed that rows are drawn with: `data.seed`, or the run's seed if that is null."""
        return self.seed if self.data.seed is None else self.data.seed

    def evaluates_at(self, step: int) -> bool:
        """Return whether the run is evaluated on dev after `step` steps: 0, the last, and every `eval_every`."""
        return step in (0, self.steps) or (self.eval_every > 0 and step % self.eval_every == 0)

    @property
    def log_interval(self) -> int:
        """The steps between lines of metrics.jsonl: `log_every`, or what null stands for."""
        return log_interval(self.steps, self.log_every)

    def logs_at(self, step: int) -> bool:
        """Whether the run writes a line on step `step` (from 1) to metrics.jsonl."""
        return step % self.log_interval == 0 or step == self.steps


def log_interval(steps: int, log_every: int | None) -> int:
    """Return the steps between lines of metrics.jsonl; null gives about 1,000 lines, or one per step."""
    return max(1, steps // 1000) if log_every is None else log_every


def to_dict(config: Config) -> dict[str, Any]:
    """Return the config as plain nested values, in the order of config.yaml."""
    return {**asdict(config), "optimizer": {"name": config.optimizer.name, **config.optimizer.settings}}


# One step of a trajectory: the step (from 0), its projected gradients (one per sample), its learning rate.
StepRecord = tuple[int, list[float], float]


@dataclass(frozen=True, slots=True)
class Example:
    """One row: its texts in the order of `task.columns`, the index of its label, and its file and line."""

    texts: tuple[str, ...]
    label: int
    where: str = ""  # "train.tsv:17", for error lines


@dataclass(frozen=True)
class Splits:
    """The rows of a run. `test` is None if the data have none; `notes` are warnings to show."""

    train: list[Example]
    dev: list[Example]
    test: list[Example] | None
    fingerprint: str = ""  # sha256 over all texts and labels
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
