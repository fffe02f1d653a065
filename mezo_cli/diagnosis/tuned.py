"""Report what is tuned: the trainable tensors that reach the loss, those that do not, and the decoder's weight."""

from typing import Any

from mezo_cli.diagnosis.findings import DOUBT, Section, count, percent
from mezo_cli.diagnosis.prepared import Prepared
from mezo_cli.models.output_head import vocabulary_head
from mezo_cli.models.parameter_names import count_parameters, format_names

TITLE = "what is tuned"


def check(prepared: Prepared) -> Section:
    """Report the trainable tensors of a session whose unreachable ones are excluded."""
    section, session = Section(TITLE), prepared.session
    trainable, total = session.trainable(), count_parameters(session.loaded.model)
    prefix = f"{session.loaded.model.base_model_prefix}."
    names = [name.removeprefix(prefix) for name in trainable["names"]]
    shown = "" if session.loaded.adapter is None else f": {format_names(names)}"
    section.ok(
        "trainable",
        f"peft={session.config.peft.name} trains {trainable['count']:,} of {total:,} parameters"
        f" ({percent(trainable['share'])}), {count(len(names), 'tensor')}{shown}",
        count=trainable["count"],
        share=trainable["share"],
        tensors=len(names),
    )
    judge_unreachable(section, prepared.unreachable, total)
    _report_decoder(section, session.loaded.model)
    return section


def judge_unreachable(section: Section, unreachable: dict[str, int], total: int) -> None:
    """Doubt tensors that would be trained, but that the loss does not depend on.

    Args:
        section: gets the finding.
        unreachable: name -> number of scalars.
        total: number of scalars in the model.
    """
    scalars = sum(unreachable.values())
    if not unreachable:
        section.ok("unreachable", "the loss depends on every one of them", tensors=[], count=0)
        return
    section.add(
        DOUBT,
        "unreachable",
        f"the loss does not depend on {count(len(unreachable), 'tensor')} ({percent(scalars / total)} of the model):"
        f" {format_names(unreachable)}",
        "they stay as they are, which is right for a pooler or an unused head; if you meant to train them, choose"
        " another objective or peft",
        tensors=list(unreachable),
        count=scalars,
    )


def _report_decoder(section: Section, model: Any) -> None:
    head = vocabulary_head(model)
    if head is None:
        section.ok("decoder", "the model has no decoder over the vocabulary: a head scores the classes", tied=None)
        return
    tied = head.weight is model.get_input_embeddings().weight
    text = (
        "the decoder is tied to the input embeddings: what changes a word's embedding changes its score"
        if tied
        else "the decoder has a weight of its own, apart from the input embeddings"
    )
    section.ok("decoder", text, tied=tied)
