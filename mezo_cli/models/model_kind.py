"""The kinds of transformers models that objectives train."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelKind:
    """What the loader and the adapters need to know about the model that an objective scores labels with.

    Attributes:
        auto_class: the transformers class that loads it, by name.
        description: the kind in words, for error lines.
        pipeline: the task of `transformers.pipeline` that such a model is for.
        task_type: peft's name for the task; None where peft has none.
        has_classifier: whether the output layer is a classification head over the task's labels. A checkpoint without
            one gets a new head, drawn from the run's seed. Without a classifier the output layer is over the
            vocabulary, and a checkpoint that lacks it is refused.
        is_decoder: whether a token attends only to the tokens before it. The tokenizer then needs no padding token.
    """

    auto_class: str
    description: str
    pipeline: str
    task_type: str | None = None
    has_classifier: bool = False
    is_decoder: bool = False


MASKED_LM = ModelKind("AutoModelForMaskedLM", "masked-LM", "fill-mask")
SEQUENCE_CLASSIFIER = ModelKind(
    "AutoModelForSequenceClassification",
    "sequence-classification",
    "text-classification",
    "SEQ_CLS",
    has_classifier=True,
)
CAUSAL_LM = ModelKind("AutoModelForCausalLM", "causal-LM", "text-generation", "CAUSAL_LM", is_decoder=True)
