"""Which copies of its parameters a module's forward sees, and where they are in the scratch buffer."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mezo_cli.perturb.noise.spans import Span
from mezo_cli.perturb.params import Params


class ModulePlan:
    """The perturbed and the rounded copies of a module's parameters. It is made once and used at every step.

    Args:
        params: the trainable tensors.
        perturbed: attribute of the module -> name of the tensor, of those that are perturbed.
        rounded: attribute -> parameter, of the others whose dtype is not the compute dtype.

    Attributes:
        names: `perturbed`, as given.
        perturbed: (span, outputs of each sign) in the buffer that `copies` was last given.
        rounded: (parameter, output), likewise.
    """

    def __init__(
        self,
        params: Params,
        perturbed: Mapping[str, str],
        rounded: Mapping[str, nn.Parameter],
    ) -> None:
        self.spans = params.spans(perturbed.values())
        self.names, self._rounded = dict(perturbed), dict(rounded)
        devices = [params.tensors[name].device for name in perturbed.values()]
        devices += [p.device for p in rounded.values()]
        self.device = next(iter(devices), torch.device("cpu"))
        self.perturbed: list[tuple[Span, list[Tensor]]] = []
        self.rounded: list[tuple[nn.Parameter, Tensor]] = []
        self._buffer: Tensor | None = None
        self._copies: list[dict[str, Tensor]] = []

    @property
    def has_unperturbed(self) -> bool:
        """Whether there are copies without a perturbation."""
        return bool(self._rounded)

    @property
    def is_empty(self) -> bool:
        """Whether the module sees its own parameters."""
        return not self.spans and not self.has_unperturbed

    def size(self, num_signs: int) -> int:
        """Return the number of elements of all copies."""
        others = sum(p.numel() for p in self._rounded.values())
        return num_signs * sum(span.numel for span in self.spans) + others

    def copies(self, buffer: Tensor, num_signs: int) -> list[dict[str, Tensor]]:
        """Return attribute -> its copy in `buffer`, one dict per sign; copies without a perturbation serve both."""
        if buffer is not self._buffer or num_signs != len(self._copies):
            self._buffer, self._copies = buffer, [{} for _ in range(num_signs)]
            self.perturbed, self.rounded = [], []
            begin = 0
            for span in self.spans:
                outs = list(buffer[begin : begin + num_signs * span.numel].chunk(num_signs))
                begin += num_signs * span.numel
                self.perturbed.append((span, outs))
                for copy, out in zip(self._copies, outs, strict=True):
                    parts = {p.name: out[p.offset : p.offset + p.numel].view(p.shape) for p in span.pieces}
                    copy.update({key: parts[name] for key, name in self.names.items() if name in parts})
            for key, p in self._rounded.items():
                out = buffer[begin : begin + p.numel()].view(p.shape)
                begin += p.numel()
                self.rounded.append((p, out))
                for copy in self._copies:
                    copy[key] = out
        return self._copies
