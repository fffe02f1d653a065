"""The types that all packages share: the frozen, typed config, and the records of data and of a trajectory.

Every package may import this module; it imports neither Hydra nor torch. The range or the choices of a field are in its
metadata, and config/validation.py enforces them.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mezo_cli.errors import UserError

MISSING = "???"  # as in OmegaConf: a value has to be given


@dataclass(frozen=True)
class Setting:
    """One setting: its type and range. An optimizer declares those that it reads.

    Attributes:
        name: the key after the group: `lr` for `optimizer.lr`.
        type: float, int or str; `int | None` if null is allowed.
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


def ranged(
    default: Any, *, low: float | None = None, above: float | None = None, high: float | None = None, of: str = ""
) -> Any:
    """Return the field of a number with its range, as in `Setting`. `of`: see `one_of`."""
    return field(default=default, metadata={"low": low, "above": above, "high": high, "of": of})


def one_of(default: str | None, *choices: str, of: str = "") -> Any:
    """Return the field of a text with its choices. With `of`, only that choice of the group has it; else it is null."""
    return field(default=default, metadata={"choices": choices, "of": of})


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

    `labels` are the data set's own class names (or values), in the order of `task.labels`. Labels are mapped by name,
    never by the hub's integers: RTE, MNLI and TREC number their classes differently there.
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
    """The format of a task's files in GLUE and LM-BFF folders."""

    folder: str | None = None  # LM-BFF's name of the folder, e.g. SST-2
    columns: list[str] = field(default_factory=list)  # names of the fields of a file without a header
    labels: list[str] = field(default_factory=list)  # spellings of the labels in files, in the order of `task.labels`
    dev: str = "dev"  # stem of the official dev file: dev, or dev_matched for MNLI
    test: str = "test"


@dataclass(frozen=True)
class LmPrompt:
    """A task's prompt for decoders (objective lm). Its template ends in `{mask}`, where the label word goes."""

    template: str | None = None
    label_words: list[str] = field(default_factory=list)  # empty: `task.label_words`
    max_length: int | None = ranged(None, low=8)  # in tokens; null: the model's limit


@dataclass(frozen=True)
class TaskConfig:
    """A classification task: its template, its labels and their words, its columns, and its data sources."""

    name: str = MISSING
    version: int = ranged(1, low=1)  # raise it when the template, the label words or the splits change
    template: str = MISSING
    labels: list[str] = field(default_factory=list)
    label_words: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)  # the texts, in order: sent_0, sent_1 of an LM-BFF template
    rename: dict[str, str] = field(default_factory=dict)  # column name in the source -> name used here
    label_column: str = "label"
    skip_labels: list[str] = field(default_factory=list)  # labels of rows to drop: those without an agreed label
    max_length: int = ranged(128, low=8)
    first_limit: int | None = ranged(None, low=1)  # tokens kept of the first sentence
    other_limit: int | None = ranged(None, low=1)  # tokens kept of every other one
    metric: str = one_of("accuracy", "accuracy", "f1", "matthews")
    lm: LmPrompt = field(default_factory=LmPrompt)
    hub: HubSource = field(default_factory=HubSource)
    files: FileSource = field(default_factory=FileSource)


@dataclass(frozen=True)
class ObjectiveConfig:
    """The objective, which scores the labels, and the loss of its scores."""

    name: str = MISSING  # a name in mezo_cli.objectives.OBJECTIVES
    loss: str = "cross_entropy"  # a name in mezo_cli.objectives.LOSSES


@dataclass(frozen=True)
class OptimizerConfig:
    """The chosen optimizer and its settings, which are attributes too: `config.optimizer.lr`.

    The optimizer classes declare the settings (`mezo_cli.optim`). `settings` has those of all built-in optimizers, in
    config.yaml's order, and then those of a plug-in.
    """

    name: str = MISSING  # a name in mezo_cli.optim.OPTIMIZERS
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, key: str) -> Any:
        settings = self.__dict__.get("settings", {})  # unpickling looks attributes up before they are set
        if key not in settings:
            raise AttributeError(f"optimizer has no setting {key!r}")
        return settings[key]


@dataclass(frozen=True)
class PeftConfig:
    """Which parameters are trained. conf/peft/NAME.yaml has the values; a setting of another choice is null."""

    name: str = one_of(MISSING, "none", "lora", "prefix", "head", "bias")
    r: int | None = ranged(None, low=1, of="lora")  # rank of B A
    alpha: int | None = ranged(None, low=1, of="lora")  # B A is scaled by alpha / r
    targets: str | None = one_of(None, "query_value", "attention_feed_forward", of="lora")
    length: int | None = ranged(None, low=1, of="prefix")  # tokens


@dataclass(frozen=True)
class ModelConfig:
    """The pretrained model: a hub id or a local folder, its dtypes and device."""

    name: str = MISSING
    path: str = MISSING
    revision: str | None = None
    dtype: str = one_of("float32", "float32")
    compute_dtype: str = one_of("float32", "float32", "bfloat16")
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps


@dataclass(frozen=True)
class DataConfig:
    """The source of the rows, and how many are used."""

    name: str = one_of(MISSING, "hub", "files", "demo")
    dir: str | None = None
    shots: int | None = ranged(None, low=1)  # k rows per class for train and again for dev; null: all rows
    seed: int | None = ranged(None, low=0, high=2**32 - 1)  # null: the run's seed
    train_size: int | None = ranged(None, low=1)  # rows drawn for train from all classes together; null: all
    dev_size: int = ranged(1000, low=1)  # rows of train that become dev where the data have none
    eval_limit: int | None = ranged(None, low=1)  # rows of dev and of test; null: all


@dataclass(frozen=True)
class LoggerConfig:
    """A logger that receives the scalars, besides metrics.jsonl."""

    name: str = "none"  # a name in mezo_cli.training.loggers.LOGGERS
    project: str = "mezo"


@dataclass(frozen=True)
class Config:
    """The whole config of a run."""

    task: TaskConfig = field(default_factory=TaskConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    data: DataConfig = field(default_factory=DataConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    init: str = one_of("none", "none", "linear_probe")  # linear_probe: fit the output layer before the first step
    probe_c: float | None = ranged(None, above=0.0)  # C of the probe's regression; null: cross-validated on train
    seed: int = ranged(42, low=0, high=2**32 - 1)
    steps: int = ranged(100_000, low=0, high=2**32 - 1)
    batch_size: int = ranged(64, low=1)
    eval_batch_size: int = ranged(64, low=1)
    eval_every: int = ranged(10_000, low=0)  # 0: only before the first step and after the last
    log_every: int = ranged(10, low=1)
    checkpoint: str = one_of("full", "full", "trajectory")
    checkpoint_every: int = ranged(0, low=0)  # 0: at every evaluation
    max_seconds: float | None = ranged(None, above=0.0)  # of training by one process, then it stops; null: no limit
    patience: int | None = ranged(None, low=1)  # evaluations without a better dev score, then the run ends; null: any

    @property
    def data_seed(self) -> int:
        """The seed that rows are drawn with: `data.seed`, or the run's seed if that is null."""
        return self.seed if self.data.seed is None else self.data.seed

    def evaluates_at(self, step: int) -> bool:
        """Return whether the run is evaluated on dev after `step` steps: 0, the last, and every `eval_every`."""
        return step in (0, self.steps) or (self.eval_every > 0 and step % self.eval_every == 0)

    def logs_at(self, step: int) -> bool:
        """Whether the run writes a line on step `step` (from 1) to metrics.jsonl."""
        return step % self.log_every == 0 or step == self.steps


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
