"""What most tests compose in place of Hydra is what Hydra composes."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mezo_cli.config import compose
from mezo_cli.config.choices import find_choices
from tests import compositions

CASES = [
    [],
    ["model.path=x/y", "data=files", "data.dir=a", "hydra.run.dir=b c", "steps=6", "optimizer.lr=1e-2"],
    ["optimizer=mezo_adam", "optimizer.window=3", "seed=7", "data.seed=3", "optimizer.window=null", "steps=${seed}"],
    ["task=rte", "++task.rename.sentence1=b", "~task.rename.sentence2", "+task.rename.c=d", "task.hub={path: x}"],
    ["experiment=paper/mezo_lora", "task.label_words=[Yes,No]", "logger=[tensorboard,wandb]", "hydra.sweep.dir=s"],
    ["optimizer=es", "optimizer.anchor={l1: 1e-3}", "task.template='{sentence} costs \\${mask}, {mask}'"],
]


@pytest.mark.parametrize("words", CASES)
def test_a_composition_is_hydras(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = compositions.composing_once()
    with compose.hydra_session():
        overrides = [override.text for override in compose.parse(words, find_choices())]
        for folder in ("first", "second"):  # the second time from what is kept
            (tmp_path / folder).mkdir()
            monkeypatch.chdir(tmp_path / folder)
            ours, hydras = (function(overrides, None) for function in (once, compositions.whole))
            for node in (ours, hydras):
                node.hydra.overrides.hydra, node.hydra.job.override_dirname = [], ""  # the folders that are set
            assert OmegaConf.to_container(ours) == OmegaConf.to_container(hydras)
