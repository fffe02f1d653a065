"""Buffers of an optimizer: a moment, one number per element of theta; and memory for one span at a time."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from mezo_cli.perturb.noise.spans import Segment, Span


class Moment:
    """A buffer like theta, float32, zero at first; memory is taken when a span of it is first asked for."""

    def __init__(self) -> None:
        self._flat: dict[Segment, Tensor] = {}
        self._views: dict[Span, Tensor] = {}
        self._loaded: dict[str, Tensor] = {}  # from a file, until their segment is asked for

    def view(self, span: "Span") -> "Tensor":
        """Return the part for a span of theta, [span.numel], to be written in place."""
        if span not in self._views:
            self._views[span] = span.slice_of(self._segment(span.segment))
        return self._views[span]

    def _segment(self, segment: "Segment") -> "Tensor":
        import torch

        if segment not in self._flat:
            flat = torch.zeros(segment.flat.shape, dtype=torch.float32, device=segment.flat.device)
            self._flat[segment] = flat
            for piece in segment.whole.pieces:
                if piece.name in self._loaded:
                    loaded = self._loaded.pop(piece.name)[piece.start : piece.start + piece.numel]
                    flat[piece.offset : piece.offset + piece.numel] = loaded.to(flat.device)
        return self._flat[segment]

    def load(self, tensors: "dict[str, Tensor]") -> None:
        """Take over what `tensors` returned."""
        self._flat, self._views, self._loaded = {}, {}, tensors

    def tensors(self) -> "dict[str, Tensor]":
        """Return parameter name -> its part, flat, on the CPU: of the tensors that have been asked for."""
        names = {piece.name for span in self._views for piece in span.pieces}
        views = {
            piece.name: flat[piece.offset : piece.offset + piece.numel].cpu()
            for segment, flat in self._flat.items()
            for piece in segment.whole.pieces
            if piece.name in names
        }
        return {name: part.cpu() for name, part in self._loaded.items()} | views


class Scratch:
    """Uninitialized memory for a span at a time, the same at every step."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def view(self, span: "Span") -> "Tensor":
        """Return float32 [span.numel]; the one before is no longer valid."""
        import torch

        if self._buffer is None or len(self._buffer) < span.numel or self._buffer.device != span.theta.device:
            self._buffer = torch.empty(span.numel, dtype=torch.float32, device=span.theta.device)
        return self._buffer[: span.numel]
