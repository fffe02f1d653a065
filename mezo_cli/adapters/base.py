"""The interface of a method of parameter-efficient fine-tuning, and the modules of a model that each of them trains."""

import re
from typing import TYPE_CHECKING, Any, ClassVar

from mezo_cli.config.registry import PEFT
from mezo_cli.config.schema import PeftConfig
from mezo_cli.errors import UserError

if TYPE_CHECKING:
    from mezo_cli.models import LoadedModel
else:
    LoadedModel = Any  # its module imports torch


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

    library: ClassVar[str] = ""
    size_setting: ClassVar[str] = ""
    merges: ClassVar[bool] = True
    stands_alone: ClassVar[bool] = True

    def __init__(self, config: Any) -> None:
        self.config = config

    def library_config(self, loaded: LoadedModel, name: str) -> Any:
        """Return the library's config for a model; `name` is the model's, for error lines."""
        import peft

        settings = {
            key: value for key, value in self.config.model_dump().items() if key != "name" and value is not None
        }
        return getattr(peft, self.library)(
            task_type=loaded.model_kind.task_type, modules_to_save=classifier_modules(loaded), **settings
        )

    def insert(self, loaded: LoadedModel, name: str) -> Any:
        """Insert the tensors into the model, and return it in the library's wrapper.

        Trained is what requires a gradient then: new tensors, and what the method leaves or sets so. New tensors may be
        drawn from torch's generator, which the caller has seeded. `name` is the model's, for error lines.
        """
        import peft

        return peft.get_peft_model(loaded.model, self.library_config(loaded, name))


class WholeModel(PeftMethod):
    """No method: all parameters are trained."""

    stands_alone = False


def find_method(config: PeftConfig) -> PeftMethod:
    """Return the method that `peft.name` names, with its settings."""
    method: PeftMethod = PEFT.implementation(config.name)(config)
    return method


def head_modules(loaded: LoadedModel) -> list[str]:
    """Return the paths of the modules with parameters outside the body."""
    body = loaded.model.base_model_prefix
    return [
        path
        for path, child in loaded.model.named_children()
        if path != body and next(child.parameters(), None) is not None
    ]


def classifier_modules(loaded: LoadedModel) -> list[str] | None:
    """Return the paths of the classification head and of new poolers; None for a model without such a head."""
    if not loaded.model_kind.has_classifier:
        return None
    body = f"{loaded.model.base_model_prefix}."
    poolers = {".".join(name.split(".")[:2]) for name in loaded.fresh if name.startswith(body)}
    return [*head_modules(loaded), *sorted(poolers)]


def without_targets(loaded: LoadedModel, **settings: Any) -> Any:
    """Return a config that trains biases or whole modules: in `peft`, options of a LoRA, here of one of no matrices."""
    import peft
    from peft.utils.constants import DUMMY_TARGET_MODULES

    return peft.LoraConfig(task_type=loaded.model_kind.task_type, target_modules=DUMMY_TARGET_MODULES, **settings)


def first_trained_layer(model: Any, layers: int, name: str) -> int:
    """Return the number of the lowest of the top `layers` layers."""
    count: int = model.config.num_hidden_layers
    if layers > count:
        raise UserError(f"peft.layers={layers}: {name} has {count} layer{'' if count == 1 else 's'}")
    return count - layers


def is_below(parameter: str, layer: int) -> bool:
    """Return whether a parameter is in a lower layer, or in the embeddings before the layers."""
    number = re.search(r"\.(\d+)\.", parameter)
    return int(number[1]) < layer if number else "embed" in parameter
