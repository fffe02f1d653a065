"""The output head alone: a copy is trained, so the input embeddings that it may be tied to stay unchanged."""

from typing import TYPE_CHECKING, Any

from mezo_cli.adapters.base import PeftMethod, classifier_modules, head_modules

if TYPE_CHECKING:
    from mezo_cli.models import LoadedModel


class Head(PeftMethod):
    """The classification head and new poolers, or the head over the vocabulary."""

    trains_output_layer = True

    def library_config(self, loaded: "LoadedModel", name: str) -> Any:
        """Return the library's config."""
        return without_targets(loaded, modules_to_save=classifier_modules(loaded) or head_modules(loaded))


def without_targets(loaded: "LoadedModel", **settings: Any) -> Any:
    """Return a config that trains biases or whole modules: in `peft`, options of a LoRA, here of one of no matrices."""
    import peft
    from peft.utils.constants import DUMMY_TARGET_MODULES

    return peft.LoraConfig(task_type=loaded.model_kind.task_type, target_modules=DUMMY_TARGET_MODULES, **settings)
