"""What the rooms share: the frozen, typed config and the plain records of the data.

No room has to import another, Hydra or a tensor library to speak of these. Ranges stand in the field's metadata
(`low`, `high`, `above`: an open lower bound; `choices`) and are enforced in `checks.py`; nan and inf are outside
every range.
"""

from dataclasses import dataclass, field
from typing import Any

MISSING = "???"  # OmegaConf's mark for a value that has to be given


def ranged(
    default: Any, *, low: float | None = None, above: float | None = None, high: float | None = None, of: str = ""
) -> Any:
    """A number with its range: `low <= x <= high`, or `above < x`. `of`: see `one_of`."""
    return field(default=default, metadata={"low": low, "above": above, "high": high, "of": of})


def one_of(default: str | None, *choices: str, of: str = "") -> Any:
    """A name out of a short list. With `of`, only that choice of the group has the setting; it is null for others."""
    return field(default=default, metadata={"choices": choices, "of": of})


@dataclass(frozen=True)
class HubSource:
    """Where a task's data lie on the Hugging Face hub: `datasets.load_dataset(path, name)`.

    `labels` are the data set's own class names (or values), in the order of `task.labels`: labels are mapped by
    name, never by the hub's integers (RTE, MNLI and TREC number their classes differently there).
    """

    path: str | None = None
    name: str | None = None
    revision: str | None = None
    train: str = "train"
    dev: str | None = None  # null: dev is held out of train
    test: str | None = "validation"
    labels: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FileSource:
    """How a task's own files are written (GLUE and LM-BFF folders)."""

    folder: str | None = None  # LM-BFF's name of the folder, e.g. SST-2
    columns: list[str] = field(default_factory=list)  # names of the fields of a file without a header
    labels: list[str] = field(default_factory=list)  # spellings of the labels in files, in the order of `task.labels`
    dev: str = "dev"  # stem of the official dev file: dev, or dev_matched for MNLI
    test: str = "test"


@dataclass(frozen=True)
class LmPrompt:
    """A task's prompt for decoders (objective lm): its template ends in `{mask}`, the label word's place."""

    template: str | None = None
    label_words: list[str] = field(default_factory=list)  # where they differ from `task.label_words`
    max_length: int | None = ranged(None, low=8)  # in tokens; null: what the model takes


@dataclass(frozen=True)
class TaskConfig:
    """One classification task: its template, its labels with their words, and where its columns are found."""

    name: str = MISSING
    template: str = MISSING
    labels: list[str] = field(default_factory=list)
    label_words: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)  # the texts, in order: sent_0, sent_1 of an LM-BFF template
    rename: dict[str, str] = field(default_factory=dict)  # a source's column name -> the name used here
    label_column: str = "label"
    skip_labels: list[str] = field(default_factory=list)  # values of rows without an agreed label; they are left out
    max_length: int = ranged(128, low=8)
    first_limit: int | None = ranged(None, low=1)  # tokens kept of the first sentence
    other_limit: int | None = ranged(None, low=1)  # tokens kept of every other one
    metric: str = one_of("accuracy", "accuracy", "f1", "matthews")
    lm: LmPrompt = field(default_factory=LmPrompt)
    hub: HubSource = field(default_factory=HubSource)
    files: FileSource = field(default_factory=FileSource)


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is minimised: `mlm` label words at the mask, `cls` a classification head, `lm` label words that follow."""

    name: str = one_of(MISSING, "mlm", "cls", "lm")
    loss: str = one_of("cross_entropy", "cross_entropy", "accuracy", "f1")


@dataclass(frozen=True)
class Method:
    """What the loop has to know of a method before it loads anything."""

    reads: tuple[str, ...]  # the keys of `optimizer` that it reads; another one that is set is the user's mistake
    trajectory: bool = True  # its steps can be rebuilt from scalars; else it resumes from the checkpoint `last` alone
    backward: bool = False  # it differentiates the loss


_MEZO = ("lr", "eps", "weight_decay", "samples", "sample_schedule", "noise", "schedule")
_FIRST_ORDER = ("lr", "weight_decay", "schedule", "max_grad_norm", "dropout")
METHODS = {
    "mezo": Method(_MEZO),
    "mezo_momentum": Method((*_MEZO, "momentum", "window")),
    "mezo_adam": Method((*_MEZO, "beta1", "beta2", "adam_eps", "window")),
    "adamw": Method((*_FIRST_ORDER, "beta1", "beta2", "adam_eps"), trajectory=False, backward=True),
    "sgd": Method((*_FIRST_ORDER, "momentum"), trajectory=False, backward=True),
    "linear_probe": Method(()),  # no step, so nothing to read: all of it is done by `init`
}


@dataclass(frozen=True)
class OptimizerConfig:
    """A method and its hyperparameters, with the paper's names. `METHODS` says which method reads which."""

    name: str = one_of(MISSING, *METHODS)
    lr: float = ranged(1e-6, low=0.0, high=3e38)  # float32, as the trajectory stores it
    eps: float = ranged(1e-3, above=0.0)
    weight_decay: float = ranged(0.0, low=0.0)
    samples: int = ranged(1, low=1)  # n of n-SPSA
    sample_schedule: str = one_of("constant", "constant", "linear")  # linear: from 1 to `samples` over the run
    noise: str = one_of("gaussian", "gaussian", "rademacher", "torch")
    schedule: str = one_of("constant", "constant", "linear")
    momentum: float = ranged(0.9, low=0.0, high=0.9999)
    beta1: float = ranged(0.9, low=0.0, high=0.9999)  # of Adam's first moment
    beta2: float = ranged(0.999, low=0.0, high=0.999999)  # of its second
    adam_eps: float = ranged(1e-8, above=0.0)  # added to the root of the second
    window: int | None = ranged(None, low=1)  # steps a moment of MeZO looks back, redrawn; null: all, in a buffer
    max_grad_norm: float | None = ranged(1.0, above=0.0)  # a longer gradient is scaled down to this; null: never
    dropout: float | None = ranged(None, low=0.0, high=0.9)  # while training by backpropagation; null: the model's own


@dataclass(frozen=True)
class PeftConfig:
    """Which parameters are tuned. The values are in the method's YAML; a method has only the settings of its own."""

    name: str = one_of(MISSING, "none", "lora", "prefix", "head", "bias")
    r: int | None = ranged(None, low=1, of="lora")  # rank of B A
    alpha: int | None = ranged(None, low=1, of="lora")  # B A is scaled by alpha / r
    targets: str | None = one_of(None, "query_value", "attention_feed_forward", of="lora")
    length: int | None = ranged(None, low=1, of="prefix")  # tokens


@dataclass(frozen=True)
class ModelConfig:
    """A checkpoint, a hub id or a local folder, with the head that the objective reads."""

    name: str = MISSING
    path: str = MISSING
    revision: str | None = None
    dtype: str = one_of("float32", "float32")
    compute_dtype: str = one_of("float32", "float32", "bfloat16")
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps


@dataclass(frozen=True)
class DataConfig:
    """Where the rows come from and how many of them are used."""

    name: str = one_of(MISSING, "hub", "files", "demo")
    dir: str | None = None
    shots: int | None = ranged(None, low=1)  # k rows per class for train and again for dev; null: all rows
    seed: int | None = ranged(None, low=0, high=2**32 - 1)  # null: the run's seed
    train_size: int | None = ranged(None, low=1)  # rows drawn for train, whatever their class; null: all
    dev_size: int = ranged(1000, low=1)  # rows held out for dev where the data come without one
    eval_limit: int | None = ranged(None, low=1)


@dataclass(frozen=True)
class LoggerConfig:
    """A further place to send the scalars to."""

    name: str = one_of("none", "none", "tensorboard", "wandb")
    project: str = "mezo"


@dataclass(frozen=True)
class Config:
    """One run, whole."""

    task: TaskConfig = field(default_factory=TaskConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    data: DataConfig = field(default_factory=DataConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    init: str = one_of("none", "none", "linear_probe")  # what is done to the base model before the first step
    probe_c: float | None = ranged(None, above=0.0)  # C of the probe's regression; null: cross-validated on train
    seed: int = ranged(42, low=0, high=2**32 - 1)
    steps: int = ranged(100_000, low=0, high=2**32 - 1)
    batch_size: int = ranged(64, low=1)
    eval_batch_size: int = ranged(64, low=1)
    eval_every: int = ranged(10_000, low=0)  # 0: only before the first step and after the last
    log_every: int = ranged(10, low=1)
    checkpoint: str = one_of("full", "full", "trajectory")
    checkpoint_every: int = ranged(0, low=0)  # 0: at every evaluation

    @property
    def method(self) -> Method:
        """What the chosen optimizer is like."""
        return METHODS[self.optimizer.name]

    def evaluates_at(self, step: int) -> bool:
        """Whether the run is evaluated on dev after `step` steps: before the first, after the last, and between."""
        return step in (0, self.steps) or (self.eval_every > 0 and step % self.eval_every == 0)


@dataclass(frozen=True, slots=True)
class Example:
    """One row: its texts in the order of `task.columns`, its label's index, and where it was read."""

    texts: tuple[str, ...]
    label: int
    where: str = ""  # "train.tsv:17", for error lines


@dataclass(frozen=True)
class Splits:
    """The rows of a run. `test` is None when there is none; `notes` are warnings worth showing."""

    train: list[Example]
    dev: list[Example]
    test: list[Example] | None
    fingerprint: str = ""  # sha256 over all texts and labels
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One tokenised row. `mask` is the position that is judged: the mask token's (mlm), the last (lm), -1 (cls)."""

    ids: list[int]
    segments: list[int]
    mask: int
    label: int
