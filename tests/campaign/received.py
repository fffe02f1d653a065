"""Folders from somebody else, which would run code or write elsewhere, and every command that reads them.

Every payload leaves a file in `marks` when it runs. Every command is run in the folder that was received.
"""

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mezo_cli.runs.checksums import add_checksum
from tests import tiny
from tests.campaign.cases import Job, Outcome
from tests.campaign.server import ForkServer
from tests.command_line import small

MODULES = ("joblib", "submitit", "tensorboard", "datasets", "torch", "sitecustomize", "hydra_plugins", "mezo_cli")
ENGINE = {"name": "vllm", "tensor_parallel": 1, "dtype": "float32", "memory": 1_000_000}
WAYS = ("engine", "grid", "forced", "reference", "node")  # to name a program in a file of configs
CHECKPOINT = "finished/checkpoints/best"
NAMES_A_PROGRAM, NOT_INSTALLED = "names a program", "is not installed"


@dataclass(frozen=True)
class Case:
    """A command on a received folder, the exit status that it must have, and what its error line must contain."""

    words: list[str]
    code: int = 0
    says: str = ""
    change: Callable[[Path], None] = lambda _: None  # of the received folder, before


@dataclass(frozen=True)
class Received:
    """The received folder, and beside it what must stay as it is: `marks` (empty), `victim` and `home`."""

    root: Path

    @property
    def folder(self) -> Path:
        return self.root / "received"


def build(server: ForkServer, root: Path) -> Received:
    """Make the folder: runs `finished` and `interrupted`, exports `weights` and `rebuilt`, and configs `conf`."""
    made = Received(root)
    folder, data = made.folder, made.folder / "data"
    for name in ("marks", "victim", "home"):
        (root / name).mkdir(parents=True)
    (root / "victim" / "kept").write_text("kept\n")
    tiny.decoder(folder / "model", "gpt2")
    tiny.movie_folder(data)
    for name, more in (("finished", "steps=4"), ("interrupted", "max_seconds=0.001")):
        words = small(folder / "model", data, folder / name, "objective=lm", "model=gpt2", "optimizer.lr=1e-4", more)
        (done,) = server.run(["train", *words], cwd=folder)
        assert done.code == (0 if name == "finished" else 130), done
    for option, name in (("", "weights"), ("--trajectory", "rebuilt")):
        (done,) = server.run(["export", "finished", *option.split(), "--out", name], cwd=folder)
        assert done.code == 0, done
    _poison(made)
    return made


def cases(made: Received) -> list[Case]:
    """Return every command on every part of the folder."""
    conf, mine = ["--config-dir", "conf", "experiment=fine"], ["hydra.run.dir=out"]
    weights = ["eval", "weights", "task=sst2", "objective=lm", "data=files", "data.dir=data"]
    found = [
        Case(["train", *conf, "hydra.run.dir=interrupted"], 2, "resume"),
        Case(["train", *conf, *mine]),
        Case(["train", *conf, *mine, "logger=trackio", "logger.project=../../../victim/project"]),
        Case(["train", "-m", *conf, "seed=1,2", "hydra.sweep.dir=out"]),
        Case(["train", *conf[:2], "experiment=elsewhere"], 2, "would not be in outputs/"),
        Case(["data", *conf]),
        Case(["doctor", *conf, *mine, "--seconds", "0.1"]),
        Case(["train", *conf, *mine, "model.path=coded"], 2, "such code is never run"),
        Case(["eval", "finished"], 2, "such code is never run", lambda folder: _add_classes(folder / CHECKPOINT)),
        Case([*weights, "--config-dir", "conf"]),
        Case(["resume", "interrupted"], 2, NOT_INSTALLED),
        Case(["resume", "interrupted", "max_seconds=null", "steps=8"], 2, NOT_INSTALLED),
        Case(["resume", "finished"]),
        Case(["resume", "finished", "steps=8"], 2, NOT_INSTALLED),
        Case(["resume", "rebuilt"], 2, "never resumed"),
        *(Case(["export", "finished", *more, "--out", "out"]) for more in ([], ["--trajectory"])),
        *(Case([name, *more]) for name in ("runs", "compare") for more in (["."], ["finished"])),
        *(Case(["show", run]) for run in ("finished", "interrupted")),
        Case(["report", ".", "--out", "page.html"]),
        Case(["prune", "finished"]),
    ]
    for run, base in (("finished", []), ("rebuilt", ["--base", "model"])):
        own = [] if run == "finished" else ["data=files", "data.dir=data"]
        found += [Case(["eval", run, *own, "--checkpoint", one, *base]) for one in ("best", "last", "2")]
        found += [Case(["predict", run, "--text", "a fine film", *base])]
        found += [Case(["replay", run, "--step", "2", "--out", "out", *base])]
    hostile = Case([*weights, "--config-dir", "hostile-engine", "experiment=bad"], 2, NAMES_A_PROGRAM)
    return [*found, hostile, *_hostile_configs(), *_hostile_sweeps(made)]


def jobs(made: Received) -> list[Job]:
    """Return a job for each command: it works on a copy of the folder."""
    return [lambda server, folder, case=case: _run(made, case, server, folder) for case in cases(made)]  # type: ignore[misc]


def _run(made: Received, case: Case, server: ForkServer, folder: Path) -> Outcome:
    """Run a command in a copy of the folder that has the place of the original."""
    kept = folder / "kept"
    shutil.copytree(made.folder, kept, symlinks=True)
    case.change(made.folder)
    before = _outside(made)
    home = {"HOME": str(made.root / "home"), "XDG_CACHE_HOME": str(made.root / "home" / ".cache")}
    try:
        (done,) = server.run(case.words, cwd=made.folder, env={**home, "MPLCONFIGDIR": str(folder)})
        changed = sorted(set(_outside(made).items()) ^ set(before.items()))
    finally:
        shutil.rmtree(made.folder)
        shutil.copytree(kept, made.folder, symlinks=True)
        for mark in (made.root / "marks").iterdir():
            mark.unlink()
    what = ""
    if changed:
        what = f"changed outside: {[name for name, _ in changed]}"
    elif done.code != case.code or (case.code == 2 and case.says not in done.err.splitlines()[-1]):
        what = f"expected {case.code} and {case.says!r}: {done}"
    elif "Traceback" in done.out + done.err:
        what = f"a traceback: {done}"
    return Outcome("received", f"mezo {' '.join(case.words)}", not what, what)


def _outside(made: Received) -> dict[str, str]:
    """Return the files beside the received folder, with a digest of each."""
    found = {}
    for path in made.root.rglob("*"):
        if made.folder not in (path, *path.parents) and "home" not in path.parts:
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    return found


# --- payloads ---


def _poison(made: Received) -> None:
    """Put what runs code, if anything reads it as code, into every part of the folder."""
    folder, python = made.folder, made.folder / "finished" / "python.sh"
    python.write_text(f"#!/bin/sh\ntouch {made.root}/marks/engine\n")
    python.chmod(0o755)
    for run in ("finished", "interrupted"):
        _edit_config(folder / run, {"engine": {**ENGINE, "python": str(python)}})
    _edit_config(folder / "rebuilt", {"engine": {**ENGINE, "python": "finished/python.sh"}})
    for model in (folder / "model", folder / "weights", *folder.glob("*/checkpoints/*")):
        (model / "evil.py").write_text(_touch(made, "remote"))
        for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin"):
            (model / name).write_bytes(pickle.dumps(_Payload(made.root / "marks" / "pickle")))
    _add_classes(Path(shutil.copytree(folder / "model", folder / "coded")))
    for place in (folder, folder / "data", folder / "finished", folder / "conf"):
        place.mkdir(exist_ok=True)
        for name in MODULES:
            (place / f"{name}.py").write_text(_touch(made, name))
    _write_configs(made, python)


def _touch(made: Received, name: str) -> str:
    return f"open({str(made.root / 'marks' / name)!r}, 'w')\n"


class _Payload:
    """What runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def _add_classes(model: Path) -> None:
    """Let a folder of weights name classes of its own (`auto_map`); the checksums of a checkpoint are right again."""
    for name, classes in (("config.json", {"AutoModelForCausalLM": "evil.Evil"}), ("tokenizer_config.json", {})):
        if (model / name).exists():
            content = json.loads((model / name).read_text())
            content["auto_map"] = classes or {"AutoTokenizer": ["evil.Evil", None]}
            (model / name).write_text(json.dumps(content))
    if (model / "mezo.json").exists():
        values = json.loads((model / "mezo.json").read_text())
        values["sha256"] = {name: _sha256(model / name) for name in values["sha256"]}
        _write_checked(model / "mezo.json", values)


def _edit_config(run: Path, values: dict[str, Any]) -> None:
    """Change settings of a stored run as its sender can: every checksum is right again."""
    path, info = run / "config.yaml", json.loads((run / "run.json").read_text())
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **values}, sort_keys=False))
    info["config_sha256"] = _sha256(path)
    _write_checked(run / "run.json", info)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _write_checked(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(add_checksum({key: value for key, value in values.items() if key != "crc"})))


# --- configs and sweeps ---


def _write_configs(made: Received, python: Path) -> None:
    """Write experiments: `fine`, and in `hostile/NAME` one for each way to name a program."""
    fine = {
        "objective": {"name": "lm"},
        "model": {"name": "gpt2", "path": "model"},
        "data": {"name": "files", "dir": "data", "eval_limit": 4},
        "steps": 1,
        "batch_size": 4,
    }
    engine = {**ENGINE, "python": str(python)}
    kinds: dict[str, dict[str, Any]] = {
        "engine": {"engine": engine},
        "grid": {"hydra": {"sweeper": {"params": {"engine": "vllm", "engine.python": str(python)}}}},
        "forced": {"hydra": {"sweeper": {"params": {"engine": "vllm", "++engine.python": str(python)}}}},
        "reference": {"logger": {"project": str(python)}, "engine": {**ENGINE, "python": "${logger.project}"}},
        "node": {"task": {"rename": engine}, "engine": "${task.rename}"},
    }
    experiments = made.folder / "conf" / "experiment"
    experiments.mkdir()
    elsewhere = fine | {"task": {"name": "x/../../../../../victim/x"}}
    (experiments / "elsewhere.yaml").write_text("# @package _global_\n" + yaml.safe_dump(elsewhere))
    (experiments / "fine.yaml").write_text("# @package _global_\n" + yaml.safe_dump(fine))
    for name, values in kinds.items():
        hostile = made.folder / f"hostile-{name}" / "experiment"
        hostile.mkdir(parents=True)
        (hostile / "bad.yaml").write_text("# @package _global_\n" + yaml.safe_dump({**fine, **values}))


def _hostile_configs() -> list[Case]:
    """Return the commands that compose a file of configs, with each way to name a program in it."""
    found = []
    for way in WAYS:
        words = ["--config-dir", f"hostile-{way}", "experiment=bad"]
        says = "task.rename" if way == "node" else "engine"  # whose values are not those of that key
        found.append(Case(["train", "-m", *words, "hydra.sweep.dir=out"], 2, says))
        if way not in ("grid", "forced"):
            found.append(Case(["train", *words, "hydra.run.dir=out"], 2, says))
    words = ["--config-dir", "hostile-engine", "experiment=bad"]
    return [*found, *(Case([name, *words], 2, NAMES_A_PROGRAM) for name in ("doctor", "data", "tune"))]


def _hostile_sweeps(made: Received) -> list[Case]:
    """Return `mezo resume` of sweeps whose record, with all else in order, has one thing that it may not have."""
    python, victim = f"engine.python={made.folder}/finished/python.sh", made.root / "victim"
    setup = f"hydra.launcher.setup=[touch {made.root}/marks/setup]"
    engine = ["objective=lm", "engine=vllm"]
    search = {"ranges": ["optimizer.lr=1e-4:1e-3"], "trials": 1, "goal": "score"}
    of_engine = {"overrides": ["objective=lm", "engine=vllm", "experiment=bad"], "config_dir": "hostile-engine"}

    def sweep(says: str, directory: str = "0", link: Path | None = None, code: int = 2, **record: Any) -> Case:
        return Case(["resume", "sweep"], code, says, lambda folder: _write_sweep(folder, directory, link, record))

    return [
        sweep("", code=0),
        sweep("", overrides=["hydra/launcher=submitit_local"], code=0),  # their processes start in the folder, where
        sweep("", overrides=["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"], code=0),  # MODULES lie
        sweep(NAMES_A_PROGRAM, overrides=[*engine, python]),
        sweep(NAMES_A_PROGRAM, overrides=[*engine, f"++{python}"]),
        sweep(NAMES_A_PROGRAM, overrides=engine, job=[*engine, python], tune=search),
        sweep(NAMES_A_PROGRAM, **of_engine),
        sweep(NAMES_A_PROGRAM, **of_engine, tune=search),
        sweep("not in sweep", directory=str(victim / "x")),
        sweep("not in sweep", directory="../../victim/x"),
        sweep("not in sweep", directory=str(victim / "x"), tune=search),
        sweep("not in sweep", link=victim),
        sweep("not in", overrides=["hydra.sweep.subdir=../../victim/${hydra.job.num}"]),
        sweep("not in", overrides=[f"hydra.sweep.subdir={victim}/x"]),
        sweep("not in", overrides=[f"hydra.sweep.dir={victim}"], code=0),
        sweep("may run a program", overrides=["hydra/launcher=submitit_slurm", setup]),
        sweep("may run a program", overrides=["hydra/launcher=submitit_local", "hydra.launcher.submitit_folder=/x"]),
        sweep("may run a program", overrides=["hydra/sweeper=optuna", "hydra.sweeper.custom_search_space=evil.run"]),
        sweep("damaged", overrides=[1]),
        sweep("damaged", directory=3),  # type: ignore[arg-type]
    ]


def _write_sweep(folder: Path, directory: str, link: Path | None, changes: dict[str, Any]) -> None:
    """Write the folder `sweep` with a record of one job, which has not started."""
    (folder / "sweep").mkdir()
    overrides = changes.pop("overrides", [])
    mine = ["experiment=fine", *overrides] if "config_dir" not in changes else overrides
    own = [text for text in mine if not str(text).startswith("hydra")]
    record = {
        "overrides": mine,
        "argv": ["mezo"],
        "cwd": str(folder),
        "config_dir": "conf",
        "jobs": [{"number": 0, "overrides": changes.pop("job", own), "directory": directory}],
    }
    (folder / "sweep" / "sweep.json").write_text(json.dumps(record | changes))
    if link is not None:
        (folder / "sweep" / "0").symlink_to(link)
