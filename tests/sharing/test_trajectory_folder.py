"""Trajectory folders: they rebuild the run elsewhere bitwise, say nothing of this machine, and are not trusted."""

import gzip
import json
import os
import shutil
import socket
import zlib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import yaml

from mezo_cli import load
from mezo_cli.config.compose import build_config
from mezo_cli.config.stored import read_config
from mezo_cli.errors import UserError
from mezo_cli.runs.checksums import add_checksum
from mezo_cli.runs.trajectory import _FIXED
from mezo_cli.sharing.trajectory_folder import FILES, METRICS, START, check_rebuildable
from mezo_cli.training.load import load_session
from tests import tiny
from tests.command_line import error_line, mezo, small
from tests.hub_server import COMMIT, Hub

TEXTS = ["a fine film", "dull", "not bad at all"]
INTERRUPTED = Path(__file__).parents[1] / "fixtures" / "runs" / "mezo-interrupted"


@pytest.fixture
def shared(run: Path, tmp_path: Path) -> Path:
    """A copy of the trajectory folder, for a test to change."""
    return Path(shutil.copytree(run.parent / "shared", tmp_path / "shared"))


def change(folder: Path, manifest: Callable[[Any], object] = lambda _: None, **config: Any) -> None:
    """Change keys of config.yaml (`data__dir=...`) and the manifest, and seal the files again, as an attacker would."""
    values = yaml.safe_load((folder / "config.yaml").read_text())
    for key, value in config.items():
        inner = values
        *groups, name = key.split("__")
        for group in groups:
            inner = inner[group]
        inner[name] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    info = json.loads((folder / "run.json").read_text())
    info["config_sha256"] = sha256((folder / "config.yaml").read_bytes()).hexdigest()
    (folder / "run.json").write_text(json.dumps(info))
    sealed = json.loads((folder / "export.json").read_text())
    del sealed["crc"]
    sealed["sha256"] = {name: sha256((folder / name).read_bytes()).hexdigest() for name in sealed["sha256"]}
    manifest(sealed)
    (folder / "export.json").write_text(json.dumps(add_checksum(sealed)))


def predictions(*words: Any, **options: Any) -> list[Any]:
    return [(one.predicted, one.probabilities) for one in load(*words, **options).predict(TEXTS)]


# --- the folder ---


def test_it_says_nothing_of_this_machine(run: Path, roberta: Path, shared: Path) -> None:
    assert {path.name for path in shared.iterdir()} == {*FILES, METRICS[2], START, "export.json", "README.md"}
    for path in shared.iterdir():
        data = path.read_bytes()
        for secret in (run.parent, roberta, Path.cwd(), Path.home(), socket.gethostname()):
            assert os.fsencode(str(secret)) not in data, path.name
    info = json.loads((shared / "run.json").read_text())
    assert not {"pid", "host", "argv", "prompt"} & set(info)
    config = yaml.safe_load((shared / "config.yaml").read_text())
    assert (config["data"]["dir"], config["model"]["path"]) == (None, roberta.name)
    card, manifest = (shared / "README.md").read_text(), json.loads((shared / "export.json").read_text())
    for name in ("best", "last"):
        assert f"| {name} | {manifest['weights'][name]['step']} | `{manifest['weights'][name]['sha256']}` |" in card
    assert "mezo predict . --base DIR --text" in card
    assert "mezo eval . --base DIR data.dir=DIR\n" in card


def test_only_finished_runs_with_a_trajectory_that_others_can_draw(run: Path, tmp_path: Path) -> None:
    for words, said in (
        (["optimizer=adamw"], "optimizer=adamw writes no trajectory"),
        (["optimizer=sgd"], "optimizer=sgd writes no trajectory"),
        (["optimizer.noise=torch"], "optimizer.noise=torch takes z from torch's generator"),
    ):
        with pytest.raises(UserError, match=f"^here: {said}"):
            check_rebuildable(build_config(words), "here")
    cut = shutil.copytree(INTERRUPTED, tmp_path / "cut")
    line = error_line(mezo("export", cut, "--trajectory", "--out", tmp_path / "out"))
    assert "is interrupted: only the trajectory of a finished run" in line
    line = error_line(mezo("export", run, "--trajectory", "--checkpoint", "3", "--out", tmp_path / "out"))
    assert "leave one of them out" in line
    assert not (tmp_path / "out").exists()


# --- the way back ---


def test_a_copy_of_the_bases_own_head_is_referred_to(roberta: Path, movies: Path, tmp_path: Path) -> None:
    """And a folder of before, which has the copy, gives the same."""
    run, folder = tmp_path / "run", tmp_path / "folder"
    assert mezo("train", *small(roberta, movies, run, "peft=head", "optimizer.lr=0.1")).code == 0
    assert mezo("export", run, "--trajectory", "--out", folder).code == 0
    assert sum(path.stat().st_size for path in folder.iterdir()) < 50_000
    with safetensors.safe_open(folder / START, "pt") as file:
        names, copies = list(file.keys()), json.loads(file.metadata()["rows"])
    assert copies
    assert not names
    expected = predictions(run)
    assert predictions(folder, base=roberta) == expected
    state = load_session(read_config(run / "config.yaml")).loaded.model.state_dict()
    whole = {name: state[name].clone() for name in copies}
    safetensors.torch.save_file(whole, folder / START, {"rows": "{}"})
    packed = folder / METRICS[2]
    (folder / METRICS[1]).write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    manifest = json.loads((folder / "export.json").read_text())
    manifest["sha256"][METRICS[1]] = manifest["sha256"].pop(METRICS[2])
    (folder / "export.json").write_text(json.dumps(manifest))
    change(folder, lambda sealed: sealed.update(format=1))
    assert predictions(folder, base=roberta) == expected
    safetensors.torch.save_file({}, folder / START, {"rows": json.dumps({next(iter(copies)): "no.such.tensor"})})
    change(folder)
    with pytest.raises(UserError, match=r"has no tensors .* and no\.such\.tensor of one shape"):
        predictions(folder, base=roberta)


def test_it_gives_the_bits_of_the_run(run: Path, roberta: Path, shared: Path, tmp_path: Path) -> None:
    moved = shutil.move(shared, tmp_path / "elsewhere")
    for checkpoint in ("best", "last", 3):
        assert predictions(moved, checkpoint, base=roberta) == predictions(run, checkpoint)
    data = ["data=files", f"data.dir={run.parent / 'movies'}"]
    ours, theirs = mezo("eval", run), mezo("eval", moved, "--base", roberta, *data)
    assert theirs.code == 0, theirs
    assert theirs.out.splitlines()[-2:] == ours.out.splitlines()[-2:]
    for name, words in (("ours", [run]), ("theirs", [moved, "--base", roberta])):
        assert mezo("replay", *words, "--step", "5", "--out", tmp_path / name).code == 0
    ours, theirs = (tmp_path / name / "model.safetensors" for name in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()
    again = tmp_path / "again"
    assert mezo("export", moved, "--base", roberta, "--trajectory", "--out", again).code == 0
    assert all(
        (again / name).read_bytes() == (moved / name).read_bytes()
        for name in (*FILES, METRICS[2], START, "export.json")
    )


def test_over_the_hub(hub: Hub, movies: Path, tmp_path: Path) -> None:
    """Train on a base of the hub, push the trajectory, and use it from the hub alone."""
    base = tiny.roberta(tmp_path / "hub" / "models" / "org" / "base")
    run = tmp_path / "run"
    assert mezo("train", *small(Path("org/base"), movies, run, "checkpoint=trajectory", "peft=bias")).code == 0
    result = mezo("export", run, "--trajectory", "--out", tmp_path / "out", "--push", "me/tiny")
    assert result.code == 0, result
    assert sum(file.stat().st_size for file in (tmp_path / "out").iterdir()) < 40_000
    stored = tmp_path / "hub" / "models" / "me" / "tiny"
    assert all((stored / file.name).read_bytes() == file.read_bytes() for file in (tmp_path / "out").iterdir())
    words = [word for text in TEXTS for word in ("--text", text)]
    ours, theirs = mezo("predict", run, *words), mezo("predict", "hub:me/tiny", *words)
    assert (theirs.code, theirs.out) == (0, ours.out)
    assert theirs.err == (  # what is downloaded
        f"files  me/tiny at commit {COMMIT}, from {hub.url} or the local cache\n"
        f"base   org/base at commit {COMMIT}, from the local cache\n"
    )
    assert predictions(f"hub:me/tiny@{COMMIT}", 3) == predictions(run, 3)
    result = mezo("export", "hub:me/tiny", "--out", tmp_path / "model")
    assert (result.code, result.out) == (0, f"step {step_of(run)} of hub:me/tiny written to {tmp_path / 'model'}\n")
    assert json.loads((tmp_path / "model" / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/base"
    # what is not there, or is something else
    for name, said in (
        ("hub:me/tini", f"{hub.url} has no such repository, or it is private"),
        ("hub:org/base", "it is no trajectory folder, made by `mezo export --trajectory`"),
        ("hub:me/tiny@v9", "there is no such revision"),
        ("hub:tiny", "give hub:USER/REPO"),
    ):
        assert said in error_line_last(mezo("predict", name, "--text", "a"))
    other = tiny.roberta(tmp_path / "other", seed=1)
    shutil.copytree(other, base, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "cache")
    result = mezo("predict", "hub:me/tiny", "--text", "a")
    assert "started from other weights than these" in error_line_last(result)
    size = sum(path.stat().st_size for path in base.iterdir() if path.name != "generation_config.json") / 1e6
    assert f"base   org/base at commit {COMMIT}, from {hub.url}, {size:,.1f} MB\n" in result.err


def step_of(run: Path) -> int:
    return int(json.loads((run / "summary.json").read_text())["best"]["step"])


def error_line_last(result: Any) -> str:
    """Return the error line, which may come after lines of the log: what is downloaded, a new head."""
    assert result.code == 2, result
    *others, line = result.err.splitlines()
    assert line.startswith("error: ")
    assert not [one for one in others if one.startswith(("error", "Traceback", " "))]
    return str(line)


# --- a stranger's folder ---


@pytest.mark.parametrize("name", [*FILES, METRICS[2], START, "export.json"])
def test_any_damage_is_named(name: str, shared: Path, roberta: Path) -> None:
    data = bytearray((shared / name).read_bytes())
    data[len(data) // 2] ^= 1
    (shared / name).write_bytes(data)
    line = error_line(mezo("predict", shared, "--base", roberta, "--text", "a"))
    assert str(shared / name) in line
    (shared / name).unlink()
    if name != "export.json":
        assert f"{shared / name} is missing" in error_line(mezo("predict", shared, "--base", roberta, "--text", "a"))


def test_other_weights_than_those_it_names_are_refused(shared: Path, roberta: Path) -> None:
    def lie(manifest: Any) -> None:
        manifest["weights"]["last"]["sha256"] = "0" * 64

    change(shared, lie)
    line = error_line_last(mezo("predict", shared, "--base", roberta, "--checkpoint", "last", "--text", "a"))
    assert "the rebuilt weights of step 6 (last) are not those of the run" in line
    wrong = tiny.roberta(shared.parent / "wrong", seed=1)
    line = error_line_last(mezo("predict", shared, "--base", wrong, "--text", "a"))
    assert "started from other weights than these" in line


def test_its_paths_loggers_and_device_are_ignored(shared: Path, run: Path, roberta: Path) -> None:
    secret = shared.parent / "secret"
    change(
        shared,
        data__dir=str(run.parent / "movies"),
        logger__names=["wandb"],
        model__device="cuda:7",
        model__path=str(secret),
    )
    assert predictions(shared, base=roberta) == predictions(run)
    line = error_line(mezo("eval", shared, "--base", roberta))
    assert "its data were files, which a trajectory folder does not contain: give data.dir=DIR" in line
    line = error_line(mezo("eval", shared, "--base", roberta, "steps=3"))
    assert "'steps=3': of a trajectory folder only these can be given: data, data.dir" in line
    assert not secret.exists()
    assert {path.name for path in shared.iterdir()} == {
        *FILES,
        METRICS[2],
        START,
        "export.json",
        "README.md",
    }  # nothing written


@pytest.mark.parametrize(
    ("base", "config", "said"),
    [
        ({"kind": "folder", "path": "/etc", "revision": None}, {}, "its base model '/etc' is not on the hub: give"),
        ({"kind": "hub", "path": "/etc", "revision": "0" * 40}, {}, "its base model /etc is not a name on the hub"),
        ({"kind": "hub", "path": "../x", "revision": "0" * 40}, {}, "its base model ../x is not a name on the hub"),
        ({"kind": "hub", "path": "here", "revision": "0" * 40}, {}, "here is also the name of a folder here"),
        ({"kind": "hub", "path": "org/base", "revision": "main"}, {}, "org/base is not pinned to a commit"),
        ({"kind": "hub"}, {}, "its files do not fit together (KeyError"),
        (None, {"task__files__folder": "../../etc"}, "task.files.folder=../../etc is a path"),
        (None, {"data__name": "hub", "task__hub__path": "/etc"}, "task.hub.path=/etc is not a name on the hub"),
        (None, {"optimizer__noise": "torch"}, "optimizer.noise=torch takes z from torch's generator"),
        (None, {"optimizer__name": "no_such"}, "optimizer.name=no_such: not one of"),
    ],
)
def test_what_it_may_not_name(
    base: Any, config: dict[str, Any], said: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared.parent / "here").mkdir()
    monkeypatch.chdir(shared.parent)
    change(shared, lambda manifest: base is not None and manifest.update(base=base), **config)
    assert said in error_line(mezo("predict", shared, "--text", "a"))


def test_it_is_never_resumed(shared: Path) -> None:
    """Resuming would train with a stranger's paths and loggers."""
    assert "is a trajectory folder" in error_line(mezo("resume", shared, "steps=9"))
    assert {path.name for path in shared.iterdir()} == {*FILES, METRICS[2], START, "export.json", "README.md"}


def test_a_sealed_trajectory_of_another_content_is_one_line(shared: Path, roberta: Path) -> None:
    data = (shared / "trajectory.bin").read_bytes()
    magic, version, length, _ = _FIXED.unpack_from(data)
    for packed in (b"no zlib", zlib.compress(b"{}"), zlib.compress(b"[" * 99_999)):
        header = _FIXED.pack(magic, version, len(packed), zlib.crc32(packed))
        (shared / "trajectory.bin").write_bytes(header + packed + data[_FIXED.size + length :])
        change(shared)
        line = error_line(mezo("predict", shared, "--base", roberta, "--text", "a"))
        assert "its files do not fit together" in line or "trajectory.bin" in line


def test_mistakes(run: Path, shared: Path, roberta: Path, tmp_path: Path) -> None:
    assert "needs a trajectory folder" in error_line(mezo("predict", run, "--base", roberta, "--text", "a"))
    assert "no such folder" in error_line(mezo("predict", shared, "--base", tmp_path / "none", "--text", "a"))
    assert "holds steps 0 to 6" in error_line(
        mezo("replay", shared, "--base", roberta, "--step", "9", "--out", tmp_path / "out")
    )
    assert "HF_HUB_OFFLINE is set, and it is not in the local cache" in error_line(
        mezo("predict", "hub:me/it", "--text", "a")
    )
