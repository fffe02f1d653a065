"""docs/how-to/extending.md: each plug-in of its package does what it is for, from outside mezo."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mezo_cli.config import choices, registry
from mezo_cli.config.explain import key_owners
from mezo_cli.runs import Run
from tests.command_line import environment, error_line, mezo, ok
from tests.interruption import interrupt_and_resume, last_weights
from tests.models.test_loading import SERVED, family
from tests.optim.test_mezo import SENTENCES, ready

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples" / "extending"
PACKAGE = "mezo-parts"
DEMO = ["model=demo", "data=demo", "model.device=cpu", "steps=4", "batch_size=4", "data.eval_limit=20", "log_every=1"]
DEMO += ["data.train_size=40", "test_at_start=false"]
TABLES = [table for table in vars(registry).values() if isinstance(table, registry.Registry)]

pytestmark = pytest.mark.usefixtures("eager_kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the page's package, and add an objective that neither scores labels nor generates."""
    folder = tmp_path_factory.mktemp("extending")
    shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True)
    parts = folder / PACKAGE / "mezo_parts"
    shutil.copy(ROOT / "tests" / "perplexity.py", parts)
    (parts / "conf" / "objective" / "perplexity.yaml").write_text("name: perplexity\nloss: nll\n")
    points = folder / PACKAGE / "pyproject.toml"
    more = '[project.entry-points."mezo.objectives"]\nperplexity = "mezo_parts.perplexity:PerplexityConfig"'
    points.write_text(points.read_text().replace('[project.entry-points."mezo.objectives"]', more))
    return folder


@pytest.fixture(scope="module")
def plugins(folder: Path) -> Iterator[Path]:
    """Let this process see the package as if it were installed: its folder and its entry points."""
    project = tomllib.loads((folder / PACKAGE / "pyproject.toml").read_text())["project"]
    with installed(folder / PACKAGE, PACKAGE, project["entry-points"]):
        yield folder


@contextmanager
def installed(folder: Path, package: str, groups: dict[str, dict[str, str]]) -> Iterator[None]:
    """Let this process see a package in a folder as if it were installed there, with its entry points."""
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    info = folder / f"{package.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {package}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        forget()
        yield
    forget()


def forget() -> None:
    """Let every table look for plug-ins again."""
    importlib.invalidate_caches()
    choices.plugin_dirs.cache_clear()
    registry.plug_ins.cache_clear()
    key_owners.cache_clear()
    for table in TABLES:
        vars(table).pop("targets", None)
        vars(table).pop("built_in", None)


def train(run: Path, *words: str) -> dict[str, Any]:
    """Train on the demo; return the summary."""
    ok("train", *DEMO, *words, f"hydra.run.dir={run}")
    return Run(run).read_summary()


def replay(run: Path, out: Path, name: str = "model.safetensors") -> bool:
    """Replay the last step; return whether its weights are bitwise identical to the checkpoint's."""
    assert mezo("replay", run, "--step", "4", "--out", out).code == 0
    return (out / name).read_bytes() == (run / "checkpoints" / "last" / name).read_bytes()


def page(run: Path, out: Path) -> str:
    assert mezo("report", run, "--out", out).code == 0
    return out.read_text(encoding="utf-8")


def test_every_table_for_plug_ins_is_on_the_page() -> None:
    text = (ROOT / "docs" / "how-to" / "extending.md").read_text()
    assert [table.group for table in TABLES if table.group and table.group not in text] == []


def test_an_optimizer(plugins: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, "optimizer=mezo_rms", "optimizer.lr=1e-3", "optimizer.decay=0.9")
    assert replay(run, tmp_path / "replayed")
    assert "  decay: 0.9\n" in (run / "config.yaml").read_text()
    assert "MeZO-RMS" in mezo("compare", run).out
    assert "MeZO-RMS" in page(run, tmp_path / "page.html")
    for words, key in {
        ("optimizer=mezo_rms", "optimizer.decay=2"): "optimizer.decay=2",
        ("optimizer=mezo_rms", "optimizer.momentum=0.5"): "optimizer.momentum",
        ("optimizer=mezo_rsm",): "did you mean 'mezo_rms'?",
    }.items():
        assert key in error_line(mezo("train", *words))


def test_a_method_of_mezos_own_is_the_same_from_another_package(tmp_path: Path) -> None:
    """A copy of methods/lozo under another name, with its own entry point: the same bits, also resumed."""
    copied = tmp_path / "copied"
    shutil.copytree(ROOT / "mezo_cli" / "methods" / "lozo", copied)
    for file in copied.glob("*.py"):
        file.write_text(file.read_text().replace("mezo_cli.methods.lozo", "copied"))
    (copied / "conf" / "optimizer").mkdir(parents=True)
    text = (choices.CONF / "optimizer" / "lozo_m.yaml").read_text().replace("name: lozo_m", "name: elsewhere")
    (copied / "conf" / "optimizer" / "elsewhere.yaml").write_text(text)
    words = [*DEMO, "optimizer.interval=2", "checkpoint_every=1"]
    train(tmp_path / "own", *words, "optimizer=lozo_m")
    with installed(tmp_path, "copied", {"mezo.optimizers": {"elsewhere": "copied.settings:LozoMConfig"}}):
        _, whole = interrupt_and_resume([*words, "optimizer=elsewhere"], tmp_path, "elsewhere")
        assert registry.OPTIMIZERS.load("elsewhere").__module__ == "copied.settings"
    assert last_weights(whole) == last_weights(tmp_path / "own")


def test_without_pytest_the_suites_name_it() -> None:
    code = "import sys; sys.modules['pytest'] = None; import mezo_cli.testing.optimizers"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert "mezo_cli.testing needs pytest: pip install pytest" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_an_objective(plugins: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, "objective=null_prompt")
    assert replay(run, tmp_path / "replayed")
    assert "label words at a mask after the text" in " ".join(mezo("show", run).out.split())
    assert "label words at a mask after the text" in page(run, tmp_path / "page.html")
    checked = mezo("doctor", *DEMO, "objective=null_prompt", "--seconds", "0.1")
    assert "terrible" in checked.out  # the label words are judged
    assert mezo("export", run, "--out", tmp_path / "exported").code == 0
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "terrible" in card
    assert "import torch" not in card  # its encoder writes no code


def test_an_objective_of_a_third_family(plugins: Path, tmp_path: Path) -> None:
    words = [word for word in DEMO if word != "model=demo"] + ["model=demo-decoder", "task=demo-arithmetic"]
    run, _ = interrupt_and_resume([*words, "objective=perplexity", "objective.context=2", "eval_every=2"], tmp_path)
    assert replay(run, tmp_path / "replayed")
    summary = Run(run).read_summary()
    assert "perplexity" in summary["best"]
    assert json.loads(mezo("eval", run, "--json").out)["perplexity"] == summary["test"]["perplexity"]
    predicted = mezo("predict", run, "--text", "numbers=[3,5,7]", "--text", "target=9", "--json")
    assert json.loads(predicted.out)["rows"][0]["record"]["perplexity"] > 1
    assert mezo("predict", run, "--text", "numbers=[3,5,7]", "--text", "target=9", "-q").out.startswith("perplexity ")
    rows = Run(run).predictions()
    assert rows is not None
    assert rows[0]["perplexity"] > 1
    for command in ("show", "compare", "runs"):
        assert "perplexity" in mezo(command, run).out
    assert "perplexity" in page(run, tmp_path / "page.html")


@pytest.mark.slow
def test_a_peft_method(plugins: Path, tmp_path: Path) -> None:
    run, _ = interrupt_and_resume([*DEMO, "peft=ia3", "optimizer.lr=1e-2", "optimizer.eps=1e-2"], tmp_path)
    assert replay(run, tmp_path / "replayed", "adapter_model.safetensors")
    names = json.loads((run / "run.json").read_text())["trainable"]["names"]
    assert "ia3_l" in names[0]
    assert all("ia3_l" in name for name in names)
    assert "MeZO (IA)3" in page(run, tmp_path / "page.html")
    assert mezo("export", run, "--out", tmp_path / "exported").code == 0
    assert mezo("predict", run, "--text", "a dull film", "-q").code == 0
    assert transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "exported").num_parameters() > 0  # merged
    assert "peft.target_modules" in error_line(mezo("train", "peft=ia3", "peft.target_modules=key"))
    other = ["peft=ia3", "peft.target_modules=[nowhere]", "peft.feedforward_modules=[]"]
    assert "peft=ia3 does not support" in error_line(mezo("train", *DEMO, *other, f"hydra.run.dir={tmp_path / 'no'}"))


@pytest.mark.slow
def test_a_loss_and_a_metric(plugins: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["objective.loss=hinge", "task.metric=balanced_accuracy"]
    summary = train(run, *words)
    assert {"balanced_accuracy", "accuracy", "loss"} <= set(summary["dev"])
    assert summary["best"]["step"] in (0, 4)
    assert replay(run, tmp_path / "replayed")
    assert "balanced_accuracy" in page(run, tmp_path / "page.html")
    assert "balanced_accuracy" in mezo("show", run).out
    assert mezo("export", run, "--out", tmp_path / "exported").code == 0
    assert "balanced_accuracy" in (tmp_path / "exported" / "README.md").read_text()
    train(tmp_path / "backward", *words, "optimizer=sgd", "steps=1")  # it has a gradient
    assert "did you mean 'hinge'?" in error_line(mezo("train", *DEMO, "objective.loss=hinges"))
    assert "task.metric=f2" in error_line(mezo("train", *DEMO, "task.metric=f2"))


def test_a_model_family(plugins: Path, tmp_path: Path) -> None:
    ours = ready(family(tmp_path, SERVED["electra"]), "objective=mlm")  # the start has compared its scores
    assert ours.objective.frozen is not None
    batch = ours.objective.collate(ours.encoder.encode_all(SENTENCES))
    assert ours.objective.fits_paired_forward(batch)
    with torch.no_grad():
        assert ours.objective.logits(batch).isfinite().all()


@pytest.mark.slow
def test_the_package_is_built_installed_and_passes_its_conformance_tests(folder: Path) -> None:
    target = folder / "site-packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), f"./{PACKAGE}"], cwd=folder, check=True, capture_output=True)
    path = os.pathsep.join(map(str, (target, ROOT)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{PACKAGE}/tests"]
    done = subprocess.run(command, cwd=folder, env=environment(PYTHONPATH=path), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
