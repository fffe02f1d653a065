"""Say what it costs here to read the layers as they run: bytes per step, and when the processor waits for the disk."""

import torch

from mezo_cli.diagnosis.findings import NOTE, OK, Section
from mezo_cli.objectives.streamed_forward import StreamedForward
from mezo_cli.training.prepare import Prepared

TITLE = "streaming"


@torch.no_grad()
def check(prepared: Prepared) -> Section:
    """Measure the disk and the processor by the last layer, before any other check goes through all of them."""
    section, session = Section(TITLE), prepared.session
    layers = session.objective.frozen
    assert isinstance(layers, StreamedForward)
    streamed, config = layers.streamed, session.config
    total, number = sum(streamed.sizes), len(streamed.sizes) - 1
    passes = 1 + streamed.bytes_read / total  # and one for the sha256
    batch = session.objective.collate([prepared.rows["train"][i] for i in prepared.sampler.batch(0)])
    tokens = batch.layout["input_ids"].numel()
    disk = streamed.sizes[number] / streamed.time_reading(number)
    layer_seconds = layers.time_layer(batch, number)
    forwards = max(1, config.optimizer.count_forwards(1, 1)["forwards"])
    reading, computing = total / disk, len(streamed.sizes) * layer_seconds * forwards
    groups = sum(1 for _ in layers.together([[row] for row in prepared.rows["dev"]]))
    free = tokens * reading / computing
    text = (
        f"{total / 1e9:.3g} GB of layers are read per step, {groups * total / 1e9:.3g} GB per evaluation of dev; the "
        f"start took {passes:.0f} times that. Per step the disk takes {reading:.2g} s ({disk / 1e9:.2g} GB/s), the "
        f"processor {computing:.2g} s for {forwards} x {tokens} tokens: from about {free:,.0f} tokens on reading costs "
        "nothing here"
    )
    section.add(
        OK if reading < computing else NOTE,
        "streaming",
        text,
        "larger batches and longer rows take no more time until then",
        bytes_per_step=total,
        passes_of_start=passes,
        bytes_per_second=disk,
        reading_seconds=reading,
        computing_seconds=computing,
        tokens=tokens,
        free_from_tokens=free,
    )
    return section
