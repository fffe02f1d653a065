"""The trainable parameters theta, seen where they are or displaced along a direction: theta + c z.

MeZO asks for the loss at theta + eps z and at theta - eps z. The paper's Algorithm 1 adds z to the weights in place,
subtracts it twice and adds it again: three passes whose rounding never cancels. Here theta is not touched: while a
displacement is in force, each module's weights are written, displaced, into one scratch buffer the moment the module
runs, and read from there by its arithmetic while they are still in cache. The update is the only write to theta, so
restoring is exact, a step makes one pass over the parameters besides the two forwards, and the peak of memory is that
of a forward and the largest module. The same path rounds the weights to the compute dtype.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mezo_cli.errors import UserError
from mezo_cli.noise import Direction, Noise

Probe = Callable[[], Tensor]  # runs one small forward and returns its logits


class Params:
    """Trainable tensors by name, with the noise that moves them.

    Args:
        model: a transformers model; its own `named_parameters()` give the names (tied tensors once).
        noise: draws z for a direction, a name and a shape.
        compute_dtype: what the forward computes in; theta itself stays in float32.

    Attributes:
        tensors: name -> parameter, the trainable ones, in the model's order. All of them until `keep` is called.
    """

    def __init__(self, model: nn.Module, noise: Noise, compute_dtype: torch.dtype = torch.float32) -> None:
        self.noise = noise
        self.compute_dtype = compute_dtype
        self.tensors: dict[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._names: dict[int, str] = {id(p): n for n, p in model.named_parameters()}
        self._at: tuple[Direction, float] | None = None
        self._read: set[str] = set()  # what modules read through this lens
        self._loose: list[str] = []  # what the loss depends on but no module reads through it
        self._scratch = torch.empty(0)
        self._tops: list[int] = [0]  # a stack: a module that owns parameters may hold modules that do
        self._handles: dict[nn.Module, list[RemovableHandle]] = {}
        self._hook(model)

    def keep_live(self, probe: Probe) -> list[str]:
        """Keep only the tensors that can reach the loss; return the names of those left out (poolers, unused heads).

        The graph of one small forward tells which: no backward is run. Tensors that the graph holds but that no
        module reads through the lens (weights used from outside their own module) are displaced as a whole instead.

        Raises:
            UserError: when nothing trainable reaches the loss.
        """
        self._read.clear()
        with torch.enable_grad():
            found = _leaves(probe())
        live = {name: p for name, p in self.tensors.items() if id(p) in found}
        if not live:
            raise UserError("no trainable parameter reaches the loss: there is nothing to tune")
        dead = [name for name in self.tensors if name not in live]
        self.tensors = live
        self._loose = [name for name in live if name not in self._read]
        return dead

    @property
    def count(self) -> int:
        """Number of trainable scalars."""
        return sum(p.numel() for p in self.tensors.values())

    @contextmanager
    def at(self, direction: Direction, c: float) -> Iterator[None]:
        """Let every forward inside see theta + c z, z drawn for `direction`; theta itself stays as it is."""
        kept = {name: self.tensors[name].data for name in self._loose}
        try:
            self._at = (direction, c)
            for name, theta in kept.items():
                out = torch.empty_like(theta)
                self.noise.shift(direction, name, theta, c, out)
                self.tensors[name].data = out
            yield
        finally:
            self._at = None
            for name, theta in kept.items():
                self.tensors[name].data = theta

    def update(self, terms: Sequence[tuple[Direction, float]], decays: Sequence[float]) -> None:
        """Write theta <- decay theta + coeff z for each (direction, coeff) in order; the only write to theta."""
        for name, p in self.tensors.items():
            self.noise.update_(name, p.data, terms, decays)

    def read(self, p: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return a parameter (or only its `rows`) as the forward should see it now: displaced, in the compute dtype.

        Args:
            p: a parameter of the model.
            rows: row numbers, shape [n], int64; None for the whole tensor.

        Returns:
            shape [n, ...] or p's own; fresh memory, not the scratch buffer.
        """
        name = self._names[id(p)]
        if torch.is_grad_enabled() and p.requires_grad:
            self._read.add(name)
            return (p if rows is None else p[rows]).to(self.compute_dtype)
        if self._at is None or not self._moves(p):
            return (p.data if rows is None else p.data[rows]).to(self.compute_dtype)
        direction, c = self._at
        if rows is None or p.dim() == 1:
            out = torch.empty(p.shape, dtype=self.compute_dtype, device=p.device)
            self.noise.shift(direction, name, p.data, c, out)
            return out if rows is None else out[rows]
        out = torch.empty((len(rows), *p.shape[1:]), dtype=self.compute_dtype, device=p.device)
        self.noise.shift_rows(direction, name, p.data, rows, c, out)
        return out

    def leave(self, module: nn.Module) -> None:
        """Stop displacing a module's parameters when it runs: its caller uses `read` for the part that it needs."""
        for handle in self._handles.pop(module, []):
            handle.remove()

    # --- the lens over the modules ---

    def _hook(self, model: nn.Module) -> None:
        for module in model.modules():
            own = [key for key, p in module.named_parameters(recurse=False)]
            if not own:
                continue
            # A subclass with a forward of its own may scale, or compute positions: it is displaced as a whole.
            if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
                self._hook_embedding(module)
            else:
                self._handles[module] = [
                    module.register_forward_pre_hook(self._enter),
                    module.register_forward_hook(self._leave, always_call=True),
                ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        """Shadow the module's parameters by displaced copies in the scratch buffer."""
        own = [(key, p) for key, p in module._parameters.items() if p is not None]
        if torch.is_grad_enabled():
            self._read.update(self._names[id(p)] for _, p in own if p.requires_grad)
            if self.compute_dtype != torch.float32:
                for key, p in own:
                    module.__dict__[key] = p.to(self.compute_dtype)
            return
        same = self.compute_dtype == torch.float32
        shadowed = [(key, p) for key, p in own if not same or self._moves(p)]
        if not shadowed:
            return
        start = self._tops[-1]
        self._tops.append(start + sum(p.numel() for _, p in shadowed))
        scratch = self._room(self._tops[-1], own[0][1])
        for key, p in shadowed:
            out = scratch[start : start + p.numel()].view(p.shape)
            start += p.numel()
            if self._at is not None and self._moves(p):
                self.noise.shift(self._at[0], self._names[id(p)], p.data, self._at[1], out)
            else:
                out.copy_(p.data)
            module.__dict__[key] = out  # found before the registered parameter of the same name

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        shadowed = [module.__dict__.pop(key, None) is not None for key in module._parameters]
        if any(shadowed) and len(self._tops) > 1:
            self._tops.pop()

    def _moves(self, p: Tensor) -> bool:
        """Whether a module should see this parameter displaced now."""
        name = self._names[id(p)]
        return self._at is not None and name in self.tensors and name not in self._loose

    def _hook_embedding(self, module: nn.Embedding) -> None:
        """Displace only the rows that a batch looks up."""
        plain = module.forward

        def forward(ids: Tensor) -> Tensor:
            if self._at is None and self.compute_dtype == torch.float32 and not torch.is_grad_enabled():
                return plain(ids)
            rows, where = torch.unique(ids, return_inverse=True)
            return self.read(module.weight, rows)[where]

        module.forward = forward  # type: ignore[method-assign,assignment]

    def _room(self, size: int, like: Tensor) -> Tensor:
        """Return the one scratch buffer, as large as the largest module: modules run one after another."""
        if self._scratch.numel() < size or self._scratch.device != like.device:
            # Views into the old buffer stay valid: they hold its storage.
            self._scratch = torch.empty(size, dtype=self.compute_dtype, device=like.device)
        return self._scratch


def _leaves(output: Tensor) -> set[int]:
    """Return the ids of the leaf tensors in the graph behind `output`."""
    found: set[int] = set()
    seen: set[Any] = set()
    stack: list[Any] = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        stack.extend(parent for parent, _ in node.next_functions)
    return found
