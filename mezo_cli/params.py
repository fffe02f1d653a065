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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mezo_cli.errors import UserError
from mezo_cli.lens import Scratch, half, leaves, linear_of_both, shadowed
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
        self._at: tuple[Direction, tuple[float, ...]] | None = None
        self._together = False  # a forward that carries both sides is running
        self._read: set[str] = set()  # what modules read through this lens
        self._loose: list[str] = []  # what the loss depends on but no module reads through it
        self._scratch = Scratch()
        self._plain: dict[nn.Module, Callable[..., Any]] = {}  # the forwards that are covered
        self._cover(model)

    def keep_live(self, probe: Probe) -> list[str]:
        """Keep only the tensors that can reach the loss; return the names of those left out (poolers, unused heads).

        The graph of one small forward tells which: no backward is run. Tensors that the graph holds but that no
        module reads through the lens (weights used from outside their own module) are displaced as a whole instead.

        Raises:
            UserError: when nothing trainable reaches the loss.
        """
        self._read.clear()
        with self.computing(torch.float32), torch.enable_grad():  # rounded copies would all be held by the graph
            found = leaves(probe())
        live = {name: p for name, p in self.tensors.items() if id(p) in found}
        if not live:
            raise UserError("no trainable parameter reaches the loss: there is nothing to tune")
        dead = [name for name in self.tensors if name not in live]
        self.tensors = live
        self._loose = [name for name in live if name not in self._read]
        return dead

    @contextmanager
    def computing(self, dtype: torch.dtype) -> Iterator[None]:
        """Let every forward inside compute in `dtype`."""
        before, self.compute_dtype = self.compute_dtype, dtype
        try:
            yield
        finally:
            self.compute_dtype = before

    @property
    def count(self) -> int:
        """Number of trainable scalars."""
        return sum(p.numel() for p in self.tensors.values())

    @property
    def sides(self) -> int:
        """How many displacements are in force: 2 inside `at(z, c, -c)`, else 1."""
        return 1 if self._at is None else len(self._at[1])

    @property
    def carries(self) -> bool:
        """Whether one forward may carry both sides: not where weights are read from outside their own module."""
        return not self._loose

    @contextmanager
    def at(self, direction: Direction, *cs: float) -> Iterator[None]:
        """Let every forward inside see theta + c z, z drawn for `direction`; theta itself stays as it is.

        Given c and -c, forwards inside are run by `each_side`, or by `together` in one.
        """
        assert len(cs) == 1 or (len(cs) == 2 and cs[1] == -cs[0])
        kept = {name: self.tensors[name].data for name in self._loose}
        before = self._at
        try:
            self._at = (direction, cs)
            if len(cs) == 1:
                for name, theta in kept.items():
                    out = torch.empty_like(theta)
                    self.noise.shift(direction, name, theta, cs[0], out)
                    self.tensors[name].data = out
            with torch.no_grad():  # forwards only: a graph would be one of theta, not of where it is seen
                yield
        finally:
            self._at = before
            for name, theta in kept.items():
                self.tensors[name].data = theta

    def each_side(self, forward: Callable[[], Tensor]) -> Tensor:
        """Run `forward` once for each side in force, one after the other; return the results stacked, [sides, ...]."""
        assert self._at is not None
        direction, cs = self._at
        seen = []
        for c in cs:
            with self.at(direction, c):
                seen.append(forward())
        return torch.stack(seen)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let a forward inside carry both sides: all its tensors are [2, ...], theta + c z's before theta - c z's.

        z is drawn once for both, and what is not displaced is computed for both at once.
        """
        assert self.sides == 2
        assert self.carries
        try:
            self._together = True
            yield
        finally:
            self._together = False

    def update(self, terms: Sequence[tuple[Direction, float]], decays: Sequence[float]) -> None:
        """Write theta <- decay theta + coeff z for each (direction, coeff) in order; beside `blocks` the only write."""
        for name, p in self.tensors.items():
            self.noise.update_(name, p.data, terms, decays)

    def blocks(self) -> Iterator[tuple[str, int, Tensor]]:
        """Cut theta into parts that stay in cache: (name, first element, its elements), to be written in place.

        For a method whose update is more than `update` can say: it draws z for a part by `noise.update_`.
        """
        for name, p in self.tensors.items():
            flat = p.data.view(-1)
            for start in range(0, flat.numel(), self.noise.block):
                yield name, start, flat[start : start + self.noise.block]

    def read(self, p: Tensor, rows: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a parameter (or only its `rows`) as the forward should see it now: displaced.

        Args:
            p: a parameter of the model.
            rows: row numbers, shape [n], int64; None for the whole tensor.
            dtype: what to round to; the compute dtype when None.

        Returns:
            shape [n, ...] or p's own, with the sides before it inside `together`; fresh memory, not the scratch buffer.
        """
        name, dtype = self._names[id(p)], dtype or self.compute_dtype
        if torch.is_grad_enabled() and p.requires_grad:
            self._read.add(name)
            return (p if rows is None else p[rows]).to(dtype)
        if self._at is None or not self._moves(p):
            seen = (p.data if rows is None else p.data[rows]).to(dtype)
            return torch.stack([seen, seen]) if self._together else seen
        direction, cs = self._at
        whole = rows is None or p.dim() == 1
        outs = torch.empty(
            len(cs), *(p.shape if rows is None or whole else (len(rows), *p.shape[1:])), dtype=dtype, device=p.device
        )
        if whole:
            self.noise.shift(direction, name, p.data, cs[0], *outs)
            outs = outs if rows is None else outs[:, rows]
        else:
            assert rows is not None
            self.noise.shift_rows(direction, name, p.data, rows, cs[0], *outs)
        return outs if self._together else outs[0]

    def leave(self, module: nn.Module) -> None:
        """Stop displacing a module's parameters when it runs: its caller uses `read` for the part that it needs."""
        module.forward = self._plain.pop(module)

    def compute_in(self, dtype: torch.dtype) -> None:
        """Let forwards compute in `dtype`, and store what is not trainable in it where modules read it whole.

        Nobody writes to that, so rounding it once gives what rounding it in every forward gives, in less room and
        time. Tables stay as they are: only rows of them are read.
        """
        self.compute_dtype = dtype
        for module, plain in self._plain.items():
            if not (isinstance(module, nn.Embedding) and plain == nn.Embedding.forward.__get__(module)):
                for p in self._own(module).values():
                    if not p.requires_grad:
                        p.data = p.data.to(dtype)

    # --- the lens over the modules ---

    def _cover(self, model: nn.Module) -> None:
        for module in model.modules():
            if not any(True for _ in module.parameters(recurse=False)):
                continue
            # A subclass with a forward of its own may scale, or compute positions: it is displaced as a whole.
            plain_table = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
            self._plain[module] = module.forward
            cover = self._look_up if plain_table else self._run
            module.forward = partial(cover, module, module.forward)

    def _look_up(self, module: nn.Module, plain: Callable[..., Tensor], ids: Tensor) -> Tensor:
        """Displace only the rows that a batch looks up."""
        weight = module.get_parameter("weight")
        if torch.is_grad_enabled():
            self._read.update([self._names[id(weight)]] if weight.requires_grad else [])
            return plain(ids).to(self.compute_dtype)
        if not self._moves(weight) and self.compute_dtype == weight.dtype:
            return plain(ids)
        rows, where = torch.unique(ids, return_inverse=True)
        table = self.read(weight, rows)
        if not self._together:
            return table[where]
        return torch.cat([side[i] for side, i in zip(table, where.chunk(2), strict=True)])

    def _run(self, module: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a module with its parameters shadowed by displaced copies in the scratch buffer."""
        own = self._own(module)
        if torch.is_grad_enabled():
            self._read.update(self._names[id(p)] for p in own.values() if p.requires_grad)
            shadows = [{key: p.to(self.compute_dtype) for key, p in own.items() if p.dtype != self.compute_dtype}]
            return shadowed(module, shadows[0], plain, args, kwargs)
        moving = [key for key, p in own.items() if self._moves(p)]
        own = {key: p for key, p in own.items() if key in moving or p.dtype != self.compute_dtype}
        if not own:
            return plain(*args, **kwargs)
        sides = self.sides if moving else 1
        size, device = sides * sum(p.numel() for p in own.values()), next(iter(own.values())).device
        with self._scratch.room(size, self.compute_dtype, device) as room:
            shadows = self._displaced(own, room, sides)
            if sides == 1:
                return shadowed(module, shadows[0], plain, args, kwargs)
            return self._both(module, shadows, plain, args, kwargs)

    def _own(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """A module's parameters; those that a module inside it owns too are displaced there."""
        own = {key: p for key, p in module._parameters.items() if p is not None}
        if own and any(True for _ in module.children()):
            inside = {id(p) for child in module.children() for p in child.parameters()}
            own = {key: p for key, p in own.items() if id(p) not in inside}
        return own

    def _displaced(self, own: dict[str, nn.Parameter], room: Tensor, sides: int) -> list[dict[str, Tensor]]:
        """Write the parameters, as each side sees them, into `room`."""
        shadows: list[dict[str, Tensor]] = [{} for _ in range(sides)]
        for key, p in own.items():
            outs = [part.view(p.shape) for part in room[: sides * p.numel()].chunk(sides)]
            room = room[sides * p.numel() :]
            for shadow, out in zip(shadows, outs, strict=True):
                shadow[key] = out
            if self._at is not None and self._moves(p):
                self.noise.shift(self._at[0], self._names[id(p)], p.data, self._at[1][0], *outs)
            else:
                for out in outs:
                    out.copy_(p.data)
        return shadows

    def _both(
        self, module: nn.Module, shadows: list[dict[str, Tensor]], plain: Callable[..., Any], args: Any, kwargs: Any
    ) -> Tensor:
        """Run a module on both sides of a batch, each with its own weights."""
        if not self._together:
            raise RuntimeError("both sides are in force: a forward here goes through `each_side` or `together`")
        if type(module) is nn.Linear:
            own = {"weight": module.weight, "bias": module.bias}
            return linear_of_both(args[0], [(seen["weight"], seen["bias"]) for seen in ({**own, **s} for s in shadows)])
        halves = [[half(value, side) for value in args] for side in range(2)]
        assert self._at is not None
        direction, cs = self._at
        seen = []
        for side, c in enumerate(cs):
            named = {key: half(value, side) for key, value in kwargs.items()}
            self._together = False  # what the module holds sees one side at a time
            try:
                with self.at(direction, c):
                    seen.append(shadowed(module, shadows[side], plain, halves[side], named))
            finally:
                self._together = True
        return torch.cat(seen)

    def _moves(self, p: Tensor) -> bool:
        """Whether a module should see this parameter displaced now."""
        name = self._names[id(p)]
        return self._at is not None and name in self.tensors and name not in self._loose
