"""Exported folders: plain transformers and peft give our scores by the card's own code; nothing of this machine."""

import ast
import contextlib
import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import yaml

from mezo_cli import load
from mezo_cli.adapters.adapter import merge
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Example
from mezo_cli.runs import Run
from mezo_cli.session.opening import opened
from mezo_cli.session.session import Session
from mezo_cli.sharing import model_folder
from mezo_cli.sharing.model_folder import EXAMPLE, pipeline_task, read_terms, write_card, write_model_folder
from tests.command_line import HANGS, environment, error_line, mezo, ok
from tests.hub_server import Hub
from tests.report.run_directories import make_run

PAIR = [
    "task.columns=[premise,hypothesis]",
    "task.template='{premise|drop_last}? {mask}, {hypothesis|lower_first}'",
    "task.first_limit=3",
    "task.lm.template='{premise|strip} So {hypothesis} {mask}'",
]
SEGMENTS = ["task.columns=[premise,hypothesis]", "task.template='{premise} {mask} {sep} {hypothesis|upper_first}'"]
CASES = {
    "mlm": ("roberta", []),
    "mlm pair": ("roberta", PAIR),
    "mlm segments": ("bert", SEGMENTS),
    "mlm lora": ("roberta", ["peft=lora"]),
    "mlm lora and head": ("roberta", ["peft=lora", "peft.head=true"]),
    "mlm lora adapter": ("roberta", ["peft=lora"]),
    "mlm lora int8": ("roberta", ["peft=lora", "model.quantize=int8"]),
    "mlm scales": ("roberta", ["peft=scales", "model.quantize=int8"]),
    "mlm bias float16": ("roberta", ["peft=bias", "model.dtype=float16"]),
    "mlm bias in float16": ("roberta", ["peft=bias", "model.dtype=float16", "model.compute_dtype=float16"]),
    "mlm prefix": ("bert", ["peft=prefix"]),
    "mlm head": ("roberta", ["peft=head"]),
    "mlm bias": ("roberta", ["peft=bias"]),
    "cls": ("roberta", ["objective=cls"]),
    "cls pair lora": ("bert", ["objective=cls", "peft=lora", *PAIR]),
    "lm": ("gpt2", ["objective=lm"]),
    "lm pair prefix": ("gpt2", ["objective=lm", "peft=prefix", *PAIR]),
}

# What a pipeline opens: the demo's tokenizer adds the special tokens that the templates have, the tiny ones' do not.
PIPELINES = {
    "mlm": ("fill-mask", []),
    "mlm head": ("fill-mask", ["peft=head"]),
    "mlm lora": ("fill-mask", ["peft=lora"]),
    "cls": ("text-classification", ["objective=cls"]),
    "cls pair lora of three classes": ("text-classification", ["objective=cls", "peft=lora", "task=mnli"]),
}


def code_of(folder: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    return str(code)


def exported(folder: Path, base: str, *words: str, adapter: bool = False) -> tuple[Session, dict[str, float]]:
    """Export the weights of a session that differ from the base's; return it, and its probabilities before."""
    session = opened(build_config([f"model.path={base}", "data=demo", "task=sst2", *words]))
    with torch.no_grad():
        for number, tensor in enumerate(session.params.tensors.values()):
            tensor += 0.05 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
    expected, name = probabilities(session), pipeline_task(session)
    if session.loaded.adapter is not None and name is not None and not adapter:
        merge(session.loaded, "float32")
    run = make_run(folder.parent / f"run of {folder.name}", ended="interrupted")
    write_model_folder(folder, run, session, 3, str(folder), None)
    return session, expected


def probabilities(session: Session) -> dict[str, float]:
    (one,) = session.predict([Example((EXAMPLE,) * len(session.config.task.columns), 0)])
    return one.probabilities


def run_code(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Run a card's code in this process, in a folder that is not the exported one, and return what it prints."""
    monkeypatch.chdir(folder.parent)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {"__name__": "card"})
    found: dict[str, float] = ast.literal_eval(out.getvalue())
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES)
def test_the_code_gives_our_scores(case: str, tmp_path: Path, request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family, words = CASES[case]
    base: Path = request.getfixturevalue(family)
    adapter = "adapter" in case
    _, expected = exported(tmp_path / "out", str(base), *words, adapter=adapter)
    found = run_code(code_of(tmp_path / "out"), tmp_path / "out", monkeypatch)
    # The code computes in float32 from the stored weights.
    assert found == pytest.approx(expected, abs=1e-3 if "model.compute_dtype=float16" in words else 1e-5)
    assert abs(expected["positive"] - 0.5) > 1e-4  # it can fail: other weights give other numbers
    settings = tmp_path / "out" / "adapter_config.json"
    assert settings.exists() == (adapter or "prefix" in case)
    if settings.exists():
        assert json.loads(settings.read_text())["base_model_name_or_path"] == str(base)
        assert f"an adapter of the model `{base}`" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", PIPELINES)
def test_the_pipeline_of_the_card_gives_our_probabilities(case: str, tmp_path: Path) -> None:
    task, words = PIPELINES[case]
    session, expected = exported(tmp_path / "out", "demo", *words)
    card = (tmp_path / "out" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["pipeline_tag"] == task
    pipe = transformers.pipeline(task, model=str(tmp_path / "out"))
    if task == "fill-mask":
        found = pipe(f"{EXAMPLE} It was<mask>.", targets=[" terrible", " great"])
        scores = {one["token_str"]: one["score"] / sum(other["score"] for other in found) for one in found}
        assert scores == pytest.approx({" terrible": expected["negative"], " great": expected["positive"]}, abs=1e-5)
    else:
        texts = EXAMPLE if len(session.config.task.columns) == 1 else {"text": EXAMPLE, "text_pair": EXAMPLE}
        assert {one["label"]: one["score"] for one in pipe(texts, top_k=None)} == pytest.approx(expected, abs=1e-5)


def test_the_card_says_what_no_pipeline_loads(roberta: Path, tmp_path: Path) -> None:
    exported(tmp_path / "prefix", str(roberta), "peft=prefix")
    card = (tmp_path / "prefix" / "README.md").read_text()
    assert "`transformers.pipeline` cannot load this folder" in card
    assert "pipeline_tag" not in yaml.safe_load(card.split("---")[1])


@pytest.mark.slow  # a process of its own
def test_a_pushed_run_in_a_process_without_mezo(run: Path, hub: Hub, tmp_path: Path) -> None:
    """The card's code takes the model from the hub and gives our probabilities; the card's metadata are the run's."""
    out, stored = tmp_path / "out", tmp_path / "hub" / "models" / "me" / "first"
    for more in (["--private"], ["--checkpoint", "3"]):  # twice: an update is no mistake
        shutil.rmtree(out, ignore_errors=True)
        result = ok("export", run, "--out", out, "--push", "me/first", *more)
        assert result.out.endswith(f"uploaded to {hub.url}/me/first\n")
        assert {path.name for path in stored.iterdir()} == {path.name for path in out.iterdir()}
        assert all((stored / path.name).read_bytes() == path.read_bytes() for path in out.iterdir())
    assert f"step 3 of {run} written to {out}\n" in result.out
    assert hub.private == {"me/first"}
    card = (stored / "README.md").read_text()
    code = code_of(stored) + "import sys\nassert not [name for name in sys.modules if name.startswith('mezo')]\n"
    env = {key: value for key, value in environment().items() if key not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == 0, done.stderr
    (one,) = load(run, 3).predict([EXAMPLE])
    assert ast.literal_eval(done.stdout) == pytest.approx(one.probabilities, abs=1e-5)
    (model,) = yaml.safe_load(card.split("---")[1])["model-index"]
    values = {r["metrics"][0]["name"]: r["metrics"][0]["value"] for r in model["results"]}
    dev = {line["step"]: line for line in Run(run).evaluations("dev")}
    assert values["dev accuracy"] == pytest.approx(dev[3]["accuracy"], abs=1e-6)
    assert "| dev before training | 0 |" in card


def test_mistakes(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    out = tmp_path / "out"
    monkeypatch.delenv("HF_TOKEN", raising=False)
    cases = [
        (["--out", tmp_path / "full"], "it exists and is not an empty folder"),
        (["--out", tmp_path / "full" / "mine"], "it exists and is not an empty folder"),
        (["--out", out, "--checkpoint", "9"], "holds steps 0 to 6"),
        (["--out", out, "--push", "me"], "--push me: give USER/NAME"),
        (["--out", out, "--push", "me/it"], "HF_HUB_OFFLINE is set"),
        (["--out", out, "--private"], "--private needs --push"),
        (["--out", out, "--adapter"], "--adapter: peft=none has no adapter of its own"),
        (["--out", out, "--adapter", "--trajectory"], "give one of them"),
        (["--out", run / "out"], "is a run directory; choose another folder"),
    ]
    for words, said in cases:
        assert said in error_line(mezo("export", run, *words))
    assert "no such run directory" in error_line(mezo("export", run.parent / "nothing", "--out", out))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
    assert not (run / "out").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]


def test_a_push_that_is_refused(run: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    line = error_line(mezo("export", run, "--out", out, "--push", "me/it"))
    assert f"--push me/it: {hub.url}: the token may not write there; {out} is complete" in line
    assert (out / "model.safetensors").is_file()
    shutil.rmtree(out)
    monkeypatch.delenv("HF_TOKEN")
    line = error_line(mezo("export", run, "--out", out, "--push", "me/it"))
    assert f"no token for {hub.url}: log in by `hf auth login`, or set HF_TOKEN" in line
    assert not out.exists()
    assert not (tmp_path / "hub" / "models").exists()


def test_a_full_disk_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", full)
    result = mezo("export", run, "--trajectory", "--out", tmp_path / "out")
    assert result.code == 1
    assert f"error: --out {tmp_path / 'out'}: cannot be written: No space left on device" in result.err
    assert list(tmp_path.iterdir()) == []


def test_the_terms_of_the_base_model_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = build_config(["model=demo", "data=demo"])
    for text, licence in (
        ("---\nlicense: mit\n---\n# x", "mit"),
        ("---\nlicense: [\n---\n", ""),
        ("# x", ""),
        (None, ""),
    ):
        if text is not None:
            (tmp_path / "README.md").write_text(text)
        else:
            (tmp_path / "README.md").unlink()
        assert read_terms(tmp_path) == licence
    task = config.task.replace(name="<b>`x`", labels=["a\n# b", "<script>"])
    session: Any = SimpleNamespace(config=config.replace(task=task), loaded=SimpleNamespace(revision=None))
    monkeypatch.setattr(model_folder, "read_terms", lambda folder: "mit")
    run = make_run(tmp_path / "run", ended="interrupted")
    text = write_card(run, session, 0, "t\n# <i>", "", "mezo", base_card="BASE_MODEL.md")
    assert "\n# t \\# &lt;i&gt;\n" in text
    assert "the task `` <b>`x` `` (a \\# b, &lt;script&gt;)" in text
    assert "| task | &lt;b&gt;\\`x\\`, version 1 |" in text
    assert "<script>" not in text
    assert yaml.safe_load(text.split("---")[1])["license"] == "mit"
    assert "Its card names the licence `mit`. Its own card is in BASE_MODEL.md." in text
