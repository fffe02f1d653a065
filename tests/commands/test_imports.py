"""How little a command loads. The clock depends on the machine; what makes a command slow does not."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import environment

CODE = """
import sys
from mezo_cli.__main__ import main
heavy = sys.argv.pop(1).split()
try:
    main()
except SystemExit as end:
    print("\\nloaded", end.code, [name for name in heavy if name in sys.modules])
"""
MODELS = "torch transformers datasets"
PAGES = "matplotlib jinja2"
ALL = f"{MODELS} {PAGES} hydra omegaconf numpy sklearn yaml pyarrow pandas"
# `import transformers` needs none of these, and each takes a tenth of a second or more
NOT_FOR_A_MODEL = (
    "datasets hydra matplotlib omegaconf optuna pandas peft pyarrow sklearn tensorboard wandb transformers.pipelines "
    "transformers.trainer torch._inductor.codecache torch._inductor.compile_fx"
)


@pytest.mark.parametrize(
    ("words", "heavy", "status"),
    [
        ("--help", ALL, 0),
        ("train --help", ALL, 0),
        ("nosuch", ALL, 2),
        ("data data=files data.dir={movies} data.shots=3 --export out", f"{MODELS} tokenizers", 0),
        ("compare --paper", f"{MODELS} {PAGES}", 0),
        pytest.param("compare {run}", f"{MODELS} {PAGES}", 0, marks=pytest.mark.slow),
        pytest.param("predict {run} --text dull", NOT_FOR_A_MODEL, 0, marks=pytest.mark.slow),
    ],
)
def test_a_command_loads_no_more(words: str, heavy: str, status: int, run: Path, movies: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CODE, heavy, *words.format(run=run, movies=movies).split()]
    env = {name: value for name, value in environment().items() if name != "MEZO_EAGER"}  # nothing is compiled
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == f"loaded {status} []", done
