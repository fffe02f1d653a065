"""Which trainable tensors reach the loss, and by which module each of them is read."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from mezo_cli.perturb.params import Params


class Reach:
    """The trainable tensors of a model that can change the loss; all of them until `select`.

    Attributes:
        names: id of a parameter -> its name.
        lists: the paths of the model's ModuleLists.
        outside: names of those in the graph of the loss that no patched forward reads: other modules read them.
        read: names of those that patched forwards have read; they add to it while `select` runs.
    """

    def __init__(self, model: nn.Module, params: Params) -> None:
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
        self.outside: Sequence[str] = ()
        self.read: set[str] = set()

    def select(self, params: Params, run: Callable[[], Tensor]) -> list[str]:
        """Keep as trainable only the tensors that can change what `run` returns; return the names of the others.

        Left out are poolers and unused heads. The autograd graph of one small forward shows which; no backward is run.
        Of a mixture of experts it runs a few: another entry of a ModuleList stays where one reaches the loss, unless it
        ran without an effect.
        """
        self.read, everything = set(), params.tensors
        unreachable = params.select_reachable(run())
        reached = params.tensors
        entries = {self._entry(name) for name in reached} - {""}
        others = {name for name in unreachable if name not in self.read and self._entry(name) in entries}
        params.tensors = {name: p for name, p in everything.items() if name in reached or name in others}
        self.outside = [name for name in params.tensors if name not in self.read | others]
        return [name for name in unreachable if name not in others]

    def _entry(self, name: str) -> str:
        """Return a tensor's name without its number in the innermost ModuleList; "" if it is in none."""
        parts = name.split(".")
        for depth in range(len(parts) - 1, 0, -1):
            if ".".join(parts[:depth]) in self.lists:
                return ".".join([*parts[:depth], "*", *parts[depth + 1 :]])
        return ""


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters, without those that a module inside it owns too: that one reads them."""
    parameters = {key: p for key, p in module._parameters.items() if p is not None}
    if parameters and any(True for _ in module.children()):
        inside = {id(p) for child in module.children() for p in child.parameters()}
        parameters = {key: p for key, p in parameters.items() if id(p) not in inside}
    return parameters
