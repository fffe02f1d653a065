"""What a batch is judged by: label words at the mask (`mlm`), a classification head (`cls`), or label words that a
decoder goes on with (`lm`); and the losses.

All give logits of shape [rows, labels]; the loss reads them. Cross-entropy over the label words is continuous, which
is what gives MeZO a signal: accuracy, on a small batch, seldom changes between theta + eps z and theta - eps z, so
that its projected gradient is exactly zero (paper, section 3.3, trains on accuracy with large batches).
"""

from mezo_cli.objectives.batches import Batch
from mezo_cli.objectives.class_head import ClassHead
from mezo_cli.objectives.label_words import LabelWords
from mezo_cli.objectives.losses import LOSSES
from mezo_cli.objectives.next_words import NextWords
from mezo_cli.objectives.served import check_served

OBJECTIVES: dict[str, type[LabelWords] | type[ClassHead] | type[NextWords]] = {
    "mlm": LabelWords,
    "cls": ClassHead,
    "lm": NextWords,
}

__all__ = ["LOSSES", "OBJECTIVES", "Batch", "ClassHead", "LabelWords", "NextWords", "check_served"]
