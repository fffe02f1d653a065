"""The objectives and the losses, by name. An objective scores labels, a loss compares the scores with the right labels.

    mlm   the logits of the label words at the mask
    cls   the logits of a classification head
    lm    the log-likelihood of the label words after a prompt, by a decoder

Cross-entropy over the labels' scores is continuous, which gives MeZO its signal. Accuracy on a small batch seldom
differs between theta + eps z and theta - eps z, and the projected gradient is then exactly zero (paper, section 3.3:
it trains on accuracy with large batches).

The tables hold the names. Nothing here imports torch: the command line needs the names before it needs a model.
"""

from mezo_cli.config.registry import Registry

OBJECTIVES = Registry(
    "objective",
    {
        "mlm": "mezo_cli.objectives.mlm:MaskedLabelScorer",
        "cls": "mezo_cli.objectives.cls:ClassHeadScorer",
        "lm": "mezo_cli.objectives.lm:CausalLabelScorer",
    },
    "mezo.objectives",
)
LOSSES = Registry(
    "objective.loss",
    {
        "cross_entropy": "mezo_cli.objectives.losses:cross_entropy",
        "accuracy": "mezo_cli.objectives.losses:accuracy_loss",
        "f1": "mezo_cli.objectives.losses:f1_loss",
    },
    "mezo.losses",
)
NOT_DIFFERENTIABLE = ("accuracy", "f1")  # losses for optimizers that need no gradient

__all__ = ["LOSSES", "NOT_DIFFERENTIABLE", "OBJECTIVES"]
