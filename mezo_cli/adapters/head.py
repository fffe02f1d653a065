"""The output head alone: a copy is trained, so the input embeddings that it may be tied to stay unchanged."""

from typing import Any

from mezo_cli.adapters.base import LoadedModel, PeftMethod, classifier_modules, head_modules, without_targets


class Head(PeftMethod):
    """The classification head and new poolers, or the head over the vocabulary."""

    stands_alone = False

    def library_config(self, loaded: LoadedModel, name: str) -> Any:
        """Return the library's config."""
        return without_targets(loaded, modules_to_save=classifier_modules(loaded) or head_modules(loaded))
