"""The interface of a method of parameter-efficient fine-tuning. Nothing here imports torch."""

from typing import TYPE_CHECKING, Any, ClassVar, cast

from mezo_cli.config.registry import PEFT
from mezo_cli.config.schema import PeftConfig

if TYPE_CHECKING:
    from mezo_cli.models import LoadedModel


class PeftMethod:
    """A method that the `peft` library implements. Its class of settings names it.

    Most need no more than the class attributes: the settings are then passed on to the library's class by their names.

    Class attributes:
        library: the name of its config class in `peft`.
        size_setting: the setting to lower where memory runs out; empty: none.
        merges: whether its tensors can be added to the model's own weights, which `mezo export` then writes.
        stands_alone: whether plain `peft` loads its tensors by themselves, for `mezo export --adapter`.

    Args:
        config: of the class of settings that names it.
    """

    library: ClassVar[str] = "LoraConfig"
    size_setting: ClassVar[str] = ""
    merges: ClassVar[bool] = True
    stands_alone: ClassVar[bool] = True

    def __init__(self, config: Any) -> None:
        self.config = config

    def insert(self, loaded: "LoadedModel", name: str) -> Any:
        """Insert the tensors into the model, and return it in the library's wrapper.

        Trained is what requires a gradient then: new tensors, and what the method leaves or sets so. New tensors may be
        drawn from torch's generator, which the caller has seeded. `name` is the model's, for error lines.
        """
        return self.wrap(loaded, **self.config.model_dump(exclude={"name"}, exclude_none=True))

    def wrap(self, loaded: "LoadedModel", **settings: Any) -> Any:
        """Return the model in the library's wrapper, with these settings; a classification head is trained too."""
        import peft

        kind = loaded.model_kind
        modules = head_modules(loaded) if kind.has_classifier else None
        config = {"task_type": kind.task_type, "modules_to_save": modules, **settings}
        return peft.get_peft_model(loaded.model, getattr(peft, self.library)(**config))


def find_method(config: PeftConfig) -> PeftMethod:
    """Return the method that `peft.name` names, with its settings."""
    return cast("PeftMethod", PEFT.implementation(config.name)(config))


def head_modules(loaded: "LoadedModel") -> list[str]:
    """Return the paths of the modules with parameters outside the body; of a classifier also those of new poolers."""
    body = loaded.model.base_model_prefix
    children = [path for path, child in loaded.model.named_children() if next(child.parameters(), None) is not None]
    new = loaded.fresh if loaded.model_kind.has_classifier else []
    poolers = {".".join(name.split(".")[:2]) for name in new if name.startswith(f"{body}.")}
    return [*(path for path in children if path != body), *sorted(poolers)]
