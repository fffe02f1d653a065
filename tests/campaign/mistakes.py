"""Mistakes that users make: each must end in one line, status 2, with nothing half-written.

In the words, MODEL and DATA are a sound model and sound data, RUN a finished run in the working directory.
"""

import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.campaign.cases import Job, Lab, complaint
from tests.campaign.commands import run as run_commands

Make = Callable[[Path, Lab], object]


@dataclass(frozen=True)
class Mistake:
    """A command that cannot work, and what its line must say.

    Args:
        words: the command.
        make: what is made in the working directory before.
        says: a pattern that the error line must match.
        powerless: the command runs without root's rights.
    """

    words: list[str]
    make: Make | None = None
    says: str = ""
    powerless: bool = False


def train(*words: str) -> list[str]:
    """Return a short training with the given words in addition."""
    out = f"hydra.{'sweep' if '-m' in words else 'run'}.dir=out"
    base = ["model.path=MODEL", "data=files", "data.dir=DATA", out, "steps=2", "batch_size=4"]
    given = {word.split("=")[0].lstrip("+~") for word in words}
    return ["train", *(word for word in base if word.split("=")[0] not in given), *words]


def text(name: str, content: str) -> Make:
    def make(here: Path, lab: Lab) -> None:
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    return make


def data(here: Path, lab: Lab) -> None:
    """Copy the data to `d`."""
    shutil.copytree(lab.folder / "data", here / "d")


def model(here: Path, lab: Lab) -> None:
    """Copy the model to `m`."""
    shutil.copytree(lab.folder / "model", here / "m")


def both(*makes: Make) -> Make:
    def make(here: Path, lab: Lab) -> None:
        for one in makes:
            one(here, lab)

    return make


def run(which: str = "finished") -> Make:
    """Copy a run to `run`."""
    return lambda here, lab: shutil.copytree(lab.folder / "mezo" / which, here / "run")


def deny(name: str, mode: int = 0) -> Make:
    """Take away rights to a file or folder of the working directory."""
    return lambda here, lab: (here / name).chmod(mode)


TASK = """\
name: mine
template: "{sentence} It was {mask}."
columns: [sentence]
labels: [negative, positive]
label_words: [terrible, great]
"""
MINE = train("--config-dir", "c", "task=mine")
THERE = train("data.dir=d")
ODD = train("model.path=m")
EXPORT = ["data", "data=files", "data.dir=DATA", "--export", "closed/x"]

# Wrong settings, alone; the error line names the key, or the value.
SETTINGS = """
step=5 optimiser.lr=1e-5 lr=1e-5 optimizer.learning_rate=1 task.nosuch=1 steps steps= steps=ten steps=-1 steps=true
steps=null steps=99999999999999999999 steps=${nosuch} steps=${ +steps=1 ++nosuch=1 ~optimizer batch_size=0
batch_size=x log_every=0 eval_batch_size=0 seed=-1 seed=abc seed=1,2 task=sst2,rte task=nosuch task= task=../task/sst2
objective=mlmm objective.loss=ce optimizer=adam optimizer=mezo_sgd optimizer.lr=nan optimizer.lr=-1 optimizer.eps=0
optimizer.samples=0 optimizer.samples=1000000000 optimizer.sample_schedule=square optimizer.noise=uniform
optimizer.schedule=exponential optimizer.weight_decay=-1 optimizer.momentum=0.5 checkpoint=fulll init=probe peft=loras
peft.r=8 model=nosuch model.path=nowhere/at/all model.path=/etc/passwd model.path=. model.path=~nobodyhere/x
model.dtype=float64 model.compute_dtype=int8 model.device=gpu model.device=cuda:99 model.nosuch=1 data=file
data.dir=nowhere data.dir=null data.dir=MODEL data.shots=0 data.train_size=0 data.eval_limit=0 logger=tensorbord
logger=[tensorboard,wand] logger=[tensorboard,tensorboard] experiment=nosuch experiment=paper hydra.run.dir=${nope}
hydra.job.chdir=true hydra/launcher=nosuch hydra.callbacks.x._target_=os.getcwd +optimizer._target_=os.getcwd
task.labels=[] task.label_words=[terrible] task.metric=f2 task.max_length=0 task.columns=[] task.label_column=gold
"""


def _key_or_value(word: str) -> str:
    """Return a pattern of the key or the value of a setting."""
    key, _, value = word.lstrip("+~").partition("=")
    return "|".join(re.escape(part) for part in (key, value) if part)


WORDS = [
    *(
        Mistake(words.split(), says=says)
        for words, says in [
            ("train --steps 5", "No such option"),
            ("train --config-dir", "argument"),
            ("eval .", "task="),
            ("eval MODEL", "task="),
            ("eval MODEL task=sst2 data=files data.dir=DATA --split valid", "--split"),
            ("eval MODEL task=nosuch", "nosuch"),
            ("eval MODEL task=sst2 data=files data.dir=nowhere", "nowhere"),
            ("resume", "RUN"),
            ("resume .", "no run"),
            ("resume MODEL", "no run"),
            ("replay MODEL --step 0 --out o", "no run"),
            ("replay nowhere", "option"),
            ("data data=files data.dir=nowhere", "nowhere"),
            ("data steps", "steps"),
            ("env extra", "argument|unexpected"),
        ]
    ),
    *(Mistake(train(word), says=_key_or_value(word)) for word in SETTINGS.split()),
    *(
        Mistake(train(*words.split()), says=says)
        for words, says in [
            ("task.labels=[a]", "give 1, one for each label"),
            ("task.label_words=[terrible,terrible]", "terrible"),
            ("task.label_words=[terrible,unpronounceability]", "unpronounceability"),
            ("task.label_words=[terrible,'']", "label word"),
            ("task.columns=[review]", "review"),
            ("steps:5", ""),
            ("optimizer=mezo_momentum optimizer.momentum=1", "optimizer.momentum"),
            ("optimizer=mezo_adam optimizer.beta2=1", "optimizer.beta2"),
            ("optimizer=adamezo optimizer.window=0", "optimizer.window"),
            ("optimizer=adamw objective.loss=accuracy", "accuracy"),
            ("optimizer=adamw checkpoint=trajectory", "trajectory"),
            ("optimizer=adamw optimizer.eps=2e-3", "optimizer.eps"),
            ("optimizer=linear_probe peft=lora", "linear_probe|peft"),
            ("peft=lora peft.r=0", "peft.r"),
            ("peft=lora peft.r=1000000000", "peft.r"),
            ("peft=lora peft.targets=all", "peft.targets"),
            ("peft=lora peft.length=5", "peft.length"),
            ("peft=prefix peft.length=0", "peft.length"),
            ("peft=prefix peft.length=100000", "peft.length"),
            ("data=demo data.dir=x", "data.dir"),
        ]
    ),
    *(
        Mistake(train(*words), says=says)
        for words, says in [
            (["task.template={sentence}"], "mask|quote"),
            (["task.template='{sentence} {mask} {mask}'"], "mask"),
            (["task.template='{nosuch} {mask}'"], "nosuch"),
            (["task.template='{sentence {mask}'"], "template"),
            (["task.template=''"], "template"),
            (["hydra.run.dir=/proc/run"], "/proc"),
            (["hydra.run.dir=" + "x" * 300], "x"),
            (["steps=\x1b[31m5"], "steps"),
            (["model.path=a\nb"], "model.path"),
            (["-m", "seed=range(0)"], "seed"),
            (["-m", "seed=choice("], "seed"),
            (["-m", "seed="], "seed"),
        ]
    ),
]
DENIED = [
    Mistake(words, make, says, powerless=True)
    for words, make, says in [
        (train("hydra.run.dir=closed/run"), both(text("closed/x", ""), deny("closed", 0o500)), "closed"),
        (["runs", "closed"], both(text("closed/x", ""), deny("closed")), "closed"),
        (["resume", "run"], both(run(), deny("run/config.yaml")), r"config\.yaml"),
        (["resume", "run"], both(run(which="interrupted"), deny("run", 0o500)), "run"),
        (["eval", "run"], both(run(), deny("run/run.json")), r"run\.json"),
        (["eval", "run"], both(run(), deny("run/checkpoints/best/model.safetensors")), r"model\.safetensors"),
        (["replay", "run", "--step", "1", "--out", "o"], both(run(), deny("run/trajectory.bin")), r"trajectory\.bin"),
        (THERE, both(data, deny("d/train.jsonl")), r"train\.jsonl"),
        (THERE, both(data, deny("d")), "d"),
        (ODD, both(model, deny("m/config.json")), r"config\.json"),
        (ODD, both(model, deny("m/model.safetensors")), "model"),
        (ODD, both(model, deny("m/tokenizer.json")), "tokenizer"),
        (MINE, both(text("c/task/mine.yaml", TASK), deny("c/task/mine.yaml")), "mine"),
        (EXPORT, both(text("closed/x", ""), deny("closed", 0o500)), "closed"),
    ]
]


def jobs(lab: Lab, seed: int, count: int) -> list[Job]:
    """Return so many mistakes, drawn, with one without rights among them; 0 for all."""
    rng = random.Random(f"mistakes {seed}")
    chosen = [*rng.sample(DENIED, 1), *rng.sample(WORDS, count - 1)] if count else [*WORDS, *DENIED]
    return [partial(_make, lab, one) for one in chosen]


def _make(lab: Lab, mistake: Mistake, folder: Path) -> tuple[str, str]:
    here = folder / "here"
    here.mkdir()
    if mistake.make is not None:
        mistake.make(here, lab)
    places = {"MODEL": str(lab.folder / "model"), "DATA": str(lab.folder / "data")}
    words = [re.sub("MODEL|DATA", lambda found: places[found[0]], word) for word in mistake.words]
    before = _files(here)
    (ended,) = run_commands(words, cwd=here, powerless=mistake.powerless)
    wrong, said, now = complaint(ended, (2,)), ended.err, _files(here)
    if not re.search(mistake.says.replace("MODEL", re.escape(places["MODEL"])), said):
        wrong = wrong or f"does not say {mistake.says}: {said.strip()[:300]}"
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", said):
        wrong = wrong or f"control characters: {said.strip()[:300]!r}"
    changed = {name for name in {*now, *before} if now.get(name) != before.get(name)}
    wrong = wrong or (f"left behind or changed: {', '.join(sorted(changed))}" if changed else "")
    return f"mezo {' '.join(mistake.words)}"[:200], wrong


def _files(here: Path) -> dict[str, bytes]:
    """Return every file of a folder with its content; folders count by name.

    A checkpoint that was being replaced as the run stopped (`.last.old`) is left out: any command may remove it.
    """
    return {
        str(path.relative_to(here)): path.read_bytes() if path.is_file() else b""
        for path in here.rglob("*")
        if not any(part.startswith(".") and part.endswith(".old") for part in path.parts)
    }
