"""Mistakes that users make: each must end in one line, status 2, with nothing half-written.

In the words, MODEL and DATA are a sound model and sound data, RUN a finished run in the working directory.
"""

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.campaign.cases import Job, Lab, Outcome, complaint, copy
from tests.campaign.server import ForkServer

KIND = "mistakes"
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
    base = ["model.path=MODEL", "data=files", "data.dir=DATA", "hydra.run.dir=out", "steps=2", "batch_size=4"]
    given = {word.split("=")[0].lstrip("+~") for word in words}
    return ["train", *(word for word in base if word.split("=")[0] not in given), *words]


# --- what is made before a command ---


def text(name: str, content: str | bytes) -> Make:
    """Make a file."""

    def make(here: Path, lab: Lab) -> None:
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def data(name: str, content: str | bytes | None) -> Make:
    """Make a data folder `d` in which one file is replaced (None: removed)."""

    def make(here: Path, lab: Lab) -> None:
        shutil.copytree(lab.folder / "data", here / "d", dirs_exist_ok=True)
        split = name.split(".")[0]
        (here / "d" / f"{split}.jsonl").unlink()
        if content is not None:
            text(f"d/{name}", content)(here, lab)

    return make


def model(name: str, **changes: object) -> Make:
    """Copy the model to `m` and change keys of one of its JSON files."""

    def make(here: Path, lab: Lab) -> None:
        path = shutil.copytree(lab.folder / "model", here / "m") / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return make


def model_file(name: str, content: str | bytes | None) -> Make:
    """Copy the model to `m` and replace one of its files (None: remove it)."""

    def make(here: Path, lab: Lab) -> None:
        path = shutil.copytree(lab.folder / "model", here / "m") / name
        path.unlink()
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def task(content: str | bytes, name: str = "mine") -> Make:
    """Make a task file in the config folder `c`."""
    return text(f"c/task/{name}.yaml", content)


def both(*makes: Make) -> Make:
    """Do one after the other."""

    def make(here: Path, lab: Lab) -> None:
        for one in makes:
            one(here, lab)

    return make


def run(change: Callable[[Path], object] = lambda run: None, case: str = "mezo", which: str = "finished") -> Make:
    """Copy a run to `run` and change it."""

    def make(here: Path, lab: Lab) -> None:
        change(copy(lab.folder / case / which, here / "run"))

    return make


def remove(*names: str) -> Callable[[Path], object]:
    """Remove files of a run."""

    def change(run: Path) -> None:
        for name in names:
            (shutil.rmtree if (run / name).is_dir() else os.unlink)(run / name)

    return change


def put(name: str, content: str | bytes) -> Callable[[Path], object]:
    """Write a file of a run anew."""
    return lambda run: (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def put_before(name: str, content: str) -> Callable[[Path], object]:
    """Write something before the first line of a run's file."""
    return lambda run: (run / name).write_text(content + (run / name).read_text())


def complex_weights(here: Path, lab: Lab) -> None:
    """Copy the model to `m` with a weight of complex numbers, of which torch warns on standard error."""
    import torch
    from safetensors.torch import load_file, save_file

    path = shutil.copytree(lab.folder / "model", here / "m") / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if name.endswith("LayerNorm.bias"))
    save_file({**tensors, name: tensors[name].to(torch.complex64)}, path, {"format": "pt"})


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
GOOD = '{"sentence": "a film", "label": "positive"}\n{"sentence": "a bore", "label": "negative"}\n'
MINE = train("--config-dir", "c", "task=mine")
THERE = train("data.dir=d")
ODD = train("model.path=m")
EXPORT = ["data", "data=files", "data.dir=DATA", "--export", "closed/x"]

# Wrong settings, alone; the error line names the key, or the value.
SETTINGS = """
nosuch=1 step=5 optimiser.lr=1e-5 lr=1e-5 optimizer.learning_rate=1 task.nosuch=1 steps steps= steps=ten
steps=1.5 steps=-1 steps=1e3 steps=true steps=null steps=99999999999999999999 steps=${nosuch} steps=${ +steps=1
++nosuch=1 ~steps ~optimizer +task=rte batch_size=0 batch_size=x log_every=0 eval_batch_size=0 seed=-1 seed=abc
seed=1,2 task=sst2,rte task=nosuch task= task=../task/sst2 objective=mlmm objective.loss=ce optimizer=adam
optimizer=mezo_sgd optimizer.lr=nan optimizer.lr=-1 optimizer.lr=fast optimizer.eps=0 optimizer.samples=0
optimizer.samples=1000000000 optimizer.sample_schedule=square optimizer.noise=uniform optimizer.schedule=exponential
optimizer.weight_decay=-1 optimizer.momentum=0.5 checkpoint=fulll init=probe peft=loras peft.r=8 model=nosuch
model.path=nowhere/at/all model.path=/etc/passwd model.path=. model.path= model.path=~nobodyhere/x
model.dtype=float64 model.compute_dtype=int8 model.device=gpu model.device=cuda:99 model.nosuch=1 data=file
data.dir=nowhere data.dir=null data.dir=MODEL data.shots=0 data.train_size=0 data.eval_limit=0 logger=tensorbord
logger=[tensorboard,wand] logger.names=[wandb,wandb] logger=[tensorboard,tensorboard] experiment=nosuch
experiment=paper hydra.run.dir= hydra.run.dir=${nope} hydra.job.chdir=true hydra/launcher=nosuch
hydra.callbacks.x._target_=os.getcwd +optimizer._target_=os.getcwd hydra.searchpath=[x] task.labels=[]
task.label_words=[terrible]
task.metric=f2 task.max_length=0
task.columns=[] task.label_column=gold
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
            ("=5", ""),
            ("task.labels=[a]", "allowed: a"),
            ("task.label_words=[terrible,terrible]", "terrible"),
            ("task.label_words=[terrible,unpronounceability]", "unpronounceability"),
            ("task.label_words=[terrible,'']", "label word"),
            ("task.columns=[review]", "review"),
            ("steps:5", ""),
            ("optimizer=mezo_momentum optimizer.momentum=1", "optimizer.momentum"),
            ("optimizer=mezo_adam optimizer.beta2=1", "optimizer.beta2"),
            ("optimizer=mezo_adam optimizer.window=0", "optimizer.window"),
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
            ("data.shots=16 data.train_size=20", "data"),
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
DATA = [
    Mistake(THERE, data(name, content), says)
    for name, content, says in [
        ("train.jsonl", "\n\n", r"train\.jsonl"),
        ("train.jsonl", '{"sentence": null, "label": "positive"}\n', r"train\.jsonl:1"),
        ("train.jsonl", '{"sentence": ["a"], "label": "positive"}\n', r"train\.jsonl:1"),
        ("train.jsonl", '{"sentence": "fine", "label": null}\n', r"train\.jsonl:1"),
        ("train.jsonl", '{"sentence": "fine", "label": 7}\n', r"train\.jsonl:1"),
        ("train.jsonl", '{"sentence": "fine", "label": NaN}\n', r"train\.jsonl:1"),
        ("train.jsonl", "[" * 100_000, r"train\.jsonl"),
        ("train.parquet", b"PAR1" + bytes(64) + b"PAR1", r"train\.parquet"),
        ("test.jsonl", '{"sentence": "fine", "label": "neutral"}\n', r"test\.jsonl:1.*neutral"),
        ("dev.jsonl", "{", r"dev\.jsonl:1"),
    ]
]
MODELS = [
    *(
        Mistake(ODD, make, says)
        for make, says in [
            (model_file("config.json", ""), r"config\.json"),
            (model_file("config.json", "[" * 100_000), r"config\.json is damaged"),
            (model("config.json", num_hidden_layers=100_000), "num_hidden_layers=100000"),
            (complex_weights, "stores .* as C64; allowed are F64"),
            (model_file("config.json", b"\xff\xfe\x00"), r"config\.json"),
            (model("config.json", quantization_config={"quant_method": "gptq", "bits": 4}), "quantiz"),
            (model("config.json", hidden_size=24), "m"),
            (model("config.json", vocab_size=10), "m"),
            (model("config.json", num_attention_heads=5), "m"),
            (model("config.json", num_hidden_layers=-1), "num_hidden_layers|m"),
            (model("config.json", num_hidden_layers=9), "m"),
            (model_file("tokenizer.json", None), "tokenizer"),
            (model_file("tokenizer.json", "["), "tokenizer"),
            (model_file("tokenizer_config.json", "{"), "tokenizer"),
            (model("tokenizer_config.json", mask_token=None), "mask"),
            (model_file("model.safetensors", "nonsense"), "safetensors"),
            (model_file("model.safetensors", (2**62).to_bytes(8, "little")), "safetensors"),
            (both(model_file("config.json", None), text("m/adapter_config.json", "{}")), "adapter"),
        ]
    )
]
TASKS = [
    *(
        Mistake(MINE, task(content), says)
        for content, says in [
            ("5\n", "mine"),
            ("\tname: x\n", r"mine\.yaml"),
            ("name: !!python/object/apply:os.getcwd []\n", r"mine\.yaml"),
            (TASK + "metric: bleu\n", "metric"),
            (TASK.replace("label_words: [terrible, great]", "label_words: terrible"), "label_words"),
            (TASK.replace("columns: [sentence]", "columns: [5]"), "columns|5"),
            (TASK.replace("{mask}", "{Mask}"), "mask|Mask"),
            (TASK.replace("name: mine\n", ""), "name"),
            (TASK.replace("labels: [negative, positive]\n", ""), "labels"),
            (TASK + "name: twice\n", "name|mine"),
            (TASK + "\0", r"mine\.yaml: not YAML"),
            (TASK + "defaults: 5\n", r"mine\.yaml:6: defaults: expected a list"),
            (TASK + "files: {labels: [x]}\n", "files.labels has 1 names for 2 labels"),
            (TASK.replace("name: mine", 'name: "a\\nb"'), "task.name=.*a name is one line"),
        ]
    ),
    Mistake(train("--config-dir", "f", "task=mine"), text("f", ""), "f"),
    Mistake(train("--config-dir", "loop"), lambda here, lab: (here / "loop").symlink_to("loop"), "--config-dir loop"),
    Mistake(
        train("--config-dir", "c", "task=mine"),
        lambda here, lab: (here / "c/task/mine.yaml").mkdir(parents=True),
        "mine",
    ),
]
RUNS = [
    *(
        Mistake(words.split(), run(change, case, which), says)
        for words, change, case, which, says in [
            ("replay run --step 7 --out o", put("x", ""), "mezo", "finished", "0 to 6"),
            ("replay run --step -1 --out o", put("x", ""), "mezo", "finished", "0 to 6|-1"),
            ("replay run --step a --out o", put("x", ""), "mezo", "finished", "--step"),
            ("replay run --step 1 --out run", put("x", ""), "mezo", "finished", "--out"),
            ("replay run --step 1 --out run/x", put("x", ""), "mezo", "finished", "--out"),
            ("eval run --checkpoint 99", put("x", ""), "mezo", "finished", "99"),
            ("eval run --checkpoint nosuch", put("x", ""), "mezo", "finished", "best"),
            ("eval run --split nosuch", put("x", ""), "mezo", "finished", "test"),
            ("eval run task=rte", put("x", ""), "mezo", "finished", "task=rte"),
            ("eval run", remove("config.yaml"), "mezo", "finished", "config.yaml|run"),
            ("eval run", remove("run.json"), "mezo", "finished", r"run\.json"),
            ("eval run", put("config.yaml", "steps: 3\n"), "mezo", "finished", r"config\.yaml"),
            ("eval run", put("config.yaml", ""), "mezo", "finished", r"config\.yaml"),
            ("eval run", put("run.json", "{"), "mezo", "finished", r"run\.json"),
            ("eval run", put("run.json", "[]"), "mezo", "finished", r"run\.json"),
            ("eval run", remove("checkpoints/best/mezo.json"), "mezo", "finished", r"mezo\.json"),
            ("eval run", remove("checkpoints/best/model.safetensors"), "mezo", "finished", "model.safetensors"),
            ("eval run", put("checkpoints/best/model.safetensors", b""), "mezo", "finished", "model.safetensors"),
            ("eval run", put("checkpoints/best/config.json", "{}"), "mezo", "finished", r"config\.json"),
            ("replay run --step 1 --out o", remove("trajectory.bin"), "mezo", "finished", r"trajectory\.bin"),
            ("replay run --step 1 --out o", put("trajectory.bin", b""), "mezo", "finished", r"trajectory\.bin"),
            ("replay run --step 1 --out o", put("trajectory.bin", b"x" * 99), "mezo", "finished", r"trajectory\.bin"),
            ("replay run --step 1 --out o", put("x", ""), "adamw", "finished", "trajectory"),
            ("resume run", remove("trajectory.bin"), "mezo", "interrupted", r"trajectory\.bin"),
            ("resume run", put_before("metrics.jsonl", "nonsense\n"), "mezo", "interrupted", r"metrics\.jsonl"),
            ("resume run", put_before("metrics.jsonl", '{"kind": "eval"}\n'), "mezo", "interrupted", r"metrics\.jsonl"),
            ("resume run", remove("checkpoints/last"), "adamw", "interrupted", "last"),
            ("resume run", put("checkpoints/last/mezo.json", "{}"), "adamw", "interrupted", r"mezo\.json"),
            ("resume run", put("config.yaml", b"\xff"), "mezo", "interrupted", r"config\.yaml"),
            ("resume run/config.yaml", put("x", ""), "mezo", "interrupted", "config.yaml"),
            ("resume run/checkpoints", put("x", ""), "mezo", "interrupted", "no run"),
            ("train hydra.run.dir=run model=demo data=demo steps=1", put("x", ""), "mezo", "finished", "already"),
            ("train hydra.run.dir=run model=demo data=demo steps=1", put("x", ""), "mezo", "interrupted", "already"),
            ("compare run --out nowhere/x.md", put("x", ""), "mezo", "finished", "nowhere"),
            ("compare run --out run", put("x", ""), "mezo", "finished", "run"),
            ("runs run/config.yaml", put("x", ""), "mezo", "finished", "config.yaml"),
        ]
    )
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
        (THERE, both(data("train.jsonl", GOOD), deny("d/train.jsonl")), r"train\.jsonl"),
        (THERE, both(data("train.jsonl", GOOD), deny("d")), "d"),
        (ODD, both(model("config.json"), deny("m/config.json")), r"config\.json"),
        (ODD, both(model("config.json"), deny("m/model.safetensors")), "model"),
        (ODD, both(model("config.json"), deny("m/tokenizer.json")), "tokenizer"),
        (MINE, both(task(TASK), deny("c/task/mine.yaml")), "mine"),
        (EXPORT, both(text("closed/x", ""), deny("closed", 0o500)), "closed"),
    ]
]
GROUPS = {
    "words": WORDS,
    "data": DATA,
    "models": MODELS,
    "tasks": TASKS,
    "runs": RUNS,
    "denied": DENIED,
}


def jobs(lab: Lab, seed: int, each: int | None = None) -> list[Job]:
    """Return mistakes: all, or so many of each group, drawn."""
    rng, chosen = random.Random(f"{KIND} {seed}"), []
    for group, many in GROUPS.items():
        numbered = [(f"{group} {number}", one) for number, one in enumerate(many, 1)]
        chosen += numbered if each is None else rng.sample(numbered, min(each, len(numbered)))
    return [_job(lab, name, one) for name, one in chosen]


def _job(lab: Lab, name: str, mistake: Mistake) -> Job:
    def job(server: ForkServer, folder: Path) -> Outcome:
        here = folder / "here"
        here.mkdir()
        if mistake.make is not None:
            mistake.make(here, lab)
        places = {"MODEL": str(lab.folder / "model"), "DATA": str(lab.folder / "data")}
        words = [re.sub("MODEL|DATA", lambda found: places[found[0]], word) for word in mistake.words]
        before = _files(here)
        (ended,) = server.run(words, cwd=here, powerless=mistake.powerless, timeout=30, env={"COLUMNS": "200"})
        wrong, said = complaint(ended, (2,)), ended.err
        if not wrong and not re.search(mistake.says.replace("MODEL", re.escape(places["MODEL"])), said):
            wrong = f"does not say {mistake.says}: {said.strip()[:300]}"
        if not wrong and re.search(r"[\x00-\x08\x0b-\x1f\x7f]", said):
            wrong = f"control characters: {said.strip()[:300]!r}"
        wrong = wrong or _half_written(here, before)
        case = f"{name}: mezo {' '.join(mistake.words)}"
        return Outcome(KIND, case[:200], not wrong, wrong or said.strip()[:200])

    return job


def _files(here: Path) -> dict[str, str]:
    """Return every file of a folder with its content; those that may not be read count by name.

    A checkpoint that was being replaced as the run stopped (`.last.old`) is left out: any command may remove it.
    """
    found = {}
    for path in sorted(here.rglob("*")) if here.exists() else ():
        if any(part.startswith(".") and part.endswith(".old") for part in path.parts):
            continue
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(here))] = hashlib.sha256(content).hexdigest()
    return found


def _half_written(here: Path, before: dict[str, str]) -> str:
    """Name what a command has changed."""
    now = _files(here)
    changed = {name for name in {*now, *before} if now.get(name) != before.get(name)}
    return f"left behind or changed: {', '.join(sorted(changed))}" if changed else ""
