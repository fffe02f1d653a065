"""What is published: the wheel, the demos embedded in it, and the runs in results/ are what they say."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForMaskedLM, AutoTokenizer

import mezo_cli
from mezo_cli.config.stored import read_config
from tests.command_line import ok, process

ROOT = Path(__file__).resolve().parents[1]


def test_the_sdist_has_what_the_makefile_needs() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"][
        "include"
    ]
    words = set(re.findall(r"[\w.]+", (ROOT / "Makefile").read_text()))
    tops = {f"/{path.name}" for path in ROOT.iterdir() if path.name in words and path.is_dir()} | {"/Makefile"}
    assert {"/scripts", "/constraints", "/tests", "/results"} <= tops
    tops -= {"/.ci", "/.venv", "/dist", "/outputs"}  # made by it
    assert [top for top in tops if not any(fnmatch(top, pattern) for pattern in patterns)] == []


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built and unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    assert wheel.stat().st_size < 20e6, "PyPI, uvx and a laptop are to have it quickly"
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_everything_a_run_needs_is_inside(installed: Path) -> None:
    inside = {str(path.relative_to(installed / "mezo_cli")) for path in (installed / "mezo_cli").rglob("*")}
    assert {"conf/config.yaml", "conf/task/sst2.yaml", "conf/experiment/demo.yaml"} <= inside
    assert {"conf/paper.yaml", "conf/experiment/paper/mezo.yaml"} <= inside
    assert {"report/paper.yaml", "report/templates/page.html", "report/templates/style.css"} <= inside
    assert {"perturb/noise/simd.cpp", "conf/engine/vllm.yaml"} <= inside
    assert {"demo/data/train.jsonl", "demo/model/model.safetensors", "demo/model/tokenizer.json"} <= inside
    assert {"demo/arithmetic/train.jsonl", "demo/decoder/model.safetensors", "conf/model/demo-decoder.yaml"} <= inside
    assert not any("tests" in name or name.endswith(".pyc") for name in inside)


@pytest.mark.slow
def test_it_composes_and_reads_the_demo_from_another_folder(installed: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    words = [sys.executable, "-m", "mezo_cli", "data", "experiment=demo"]
    seen = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert seen.returncode == 0, seen.stderr
    assert "<mask>" in seen.stdout
    where = [sys.executable, "-c", "import mezo_cli; print(mezo_cli.__file__)"]
    path = subprocess.run(where, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    assert path.startswith(str(installed))


DEMO = Path(mezo_cli.__file__).parent / "demo"


def test_the_weights_are_halves_in_safetensors_and_nothing_else_is_shipped() -> None:
    names = {path.name for path in (DEMO / "model").iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    with safe_open(DEMO / "model" / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}  # noqa: SIM118
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < 12e6


@pytest.mark.slow
def test_the_model_hears_the_difference() -> None:
    """Zero-shot, positive sentences lean to ` great` more than negative ones do: AUC well above one half."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    model = AutoModelForMaskedLM.from_pretrained(DEMO / "model", dtype=torch.float32).eval()
    terrible, great = (tokenizer(f" {w}", add_special_tokens=False)["input_ids"][0] for w in ("terrible", "great"))
    margins: dict[str, list[float]] = {"negative": [], "positive": []}
    with torch.inference_mode():
        for row in map(json.loads, (DEMO / "data" / "test.jsonl").read_text(encoding="utf-8").splitlines()):
            ids = tokenizer(f"{row['sentence']} It was<mask>.", return_tensors="pt")["input_ids"]
            scores = model(input_ids=ids).logits[0, ids[0].tolist().index(tokenizer.mask_token_id)]
            margins[row["label"]].append((scores[great] - scores[terrible]).item())
    wins = [p > n for p in margins["positive"] for n in margins["negative"]]
    assert sum(wins) / len(wins) > 0.65


@pytest.mark.slow
def test_the_demo_gains_what_the_readme_says(tmp_path: Path) -> None:
    """`mezo train experiment=demo`, one seed: 5 points of dev accuracy (63% before), test above 67% (61%)."""
    run = tmp_path / "run"
    words = ["train", "experiment=demo", "seed=42", f"hydra.run.dir={run}"]
    result = process(*words, cwd=tmp_path, MEZO_EAGER="")  # with the compiled noise, as users run it
    assert result.code == 0, result.err
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before = next(line["accuracy"] for line in lines if line["kind"] == "eval")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["dev"]["accuracy"] >= before + 0.05
    assert summary["test"]["accuracy"] > 0.67
    assert process("export", run, "--trajectory", "--out", tmp_path / "shared", cwd=tmp_path).code == 0
    assert sum(file.stat().st_size for file in (tmp_path / "shared").iterdir()) < 200_000  # half of it predictions


TRAIN = ["train", "experiment=demo-reward", "seed=42", "log_every=50"]


def last_dev(tmp_path: Path, *words: str) -> dict[str, float]:
    """Train, and return the figures of dev after the last step."""
    run = tmp_path / "run"
    result = process(*TRAIN, *words, f"hydra.run.dir={run}", cwd=tmp_path, MEZO_EAGER="")
    assert result.code == 0, result.err
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    dev = {line["step"]: line for line in lines if line["kind"] == "eval" and line["split"] == "dev"}
    return dev[50]


@pytest.mark.slow
def test_mezo_reaches_what_the_better_style_gives(tmp_path: Path) -> None:
    """It starts at 4% of dev; answers in parentheses are 8 tokens, and 37.5% of them are right."""
    dev = last_dev(tmp_path)
    assert dev["reward"] > 0.3
    assert dev["length"] > 7.9


@pytest.mark.slow
def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    dev = last_dev(tmp_path, "objective.reward=shuffled:countdown")
    assert dev["reward_countdown"] < 0.1
    assert dev["length"] < 7.1


RESULTS = Path(__file__).parents[1] / "results"
RUNS = sorted(path.parent for path in RESULTS.rglob("config.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run.relative_to(RESULTS)))
def test_a_published_run_is_true(run: Path) -> None:
    if not read_config(run / "config.yaml").model.is_embedded:
        pytest.skip("needs a model that is not in the package: make verify-results")
    ok("verify", run)


def test_published_runs_are_small_and_have_no_texts() -> None:
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 10_000_000
    for path in files:
        if path.name == "predictions.jsonl":
            assert '"columns"' not in path.read_text()
        assert path.name != "train.log"
