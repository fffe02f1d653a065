"""Compose YAML files and overrides into a validated `Config`. With overrides.py and sweep/ all that knows Hydra.

Hydra composes plain nodes; `validation.build` then checks them, so that types, unknown keys and ranges are judged in
one place and reported in the same words, wherever a value comes from.
"""

import copy
import dataclasses
import logging
import os
import re
import shlex
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra import __version__ as hydra_version
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra, Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from mezo_cli.config.base import SettingError, show
from mezo_cli.config.choices import CONF, Choices, config_dirs, find_choices
from mezo_cli.config.explain import GROUPS, key_owners, key_schema
from mezo_cli.config.overrides import NO_SWEEPERS, Override, parse, quote
from mezo_cli.config.registry import CHOICES
from mezo_cli.config.schema import Config
from mezo_cli.config.validation import build, check_installed, defaults
from mezo_cli.errors import UserError, did_you_mean

log = logging.getLogger("mezo")

MAIN = "config"
# Hydra 1.4 and OmegaConf 2.4 warn of what 1.3 and 2.3 need.
BEFORE_1_4 = hydra_version.startswith("1.3.")
VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if BEFORE_1_4 else {}
register_resolver: Any = OmegaConf.register_new_resolver if BEFORE_1_4 else OmegaConf.register_resolver
OF_A_SESSION = (GlobalHydra, HydraConfig, JobRuntime, VersionBase)  # what Hydra keeps for the process
INSTEAD = {"steps": "forwards", "eval_every": "eval_at_forwards"}  # a key, and the one that is given in its place
# Resolvers are registered when this module is imported: a sweep's jobs may run in processes of their own.
register_resolver("mezo_unique", lambda: uuid.uuid4().hex[:6], use_cache=True, replace=True)
# ${mezo_name:FILE,DATA_SET}: the name of a task whose file has none
register_resolver(
    "mezo_name",
    lambda file, data_set: re.sub(r"[^\w.-]+", "-", Path(str(file or data_set or "own")).stem),
    replace=True,
)
# ${mezo_by:${task},{squad:generate},choice}: a value that depends on another
register_resolver("mezo_by", lambda key, values, otherwise: values.get(key, otherwise), replace=True)


@dataclasses.dataclass(frozen=True)
class Job:
    """A run to start: its validated config and its directory; in a sweep also the overrides that make the job."""

    config: Config
    directory: Path
    overrides: tuple[str, ...] = ()


# --- one run ---


def load(overrides: Sequence[str], config_dir: str | None = None) -> Job:
    """Return the run that a command line means: its config, and its directory by `hydra.run.dir`."""
    choices = find_choices(config_dir)
    parsed = parse(overrides, choices)
    for override in parsed:
        if override.sweeps:
            name, _, values = override.text.partition("=")
            is_list = name == "logger" or (name in key_owners() and key_schema(name)["type"] == "array")
            other = f"write {shlex.quote(f'{name}=[{values}]')} for a list" if is_list else "quote them to mean one"
            raise UserError(f"'{override.text}' names several values: add -m to sweep over them, or {other}")
        if override.name.startswith(("hydra/", "hydra.launcher.", "hydra.sweep")):
            raise UserError(f"'{override.text}' is about how a sweep is run: add -m")
    with hydra_session():
        node = compose_node([override.text for override in parsed], config_dir)
        with locating(node, parsed, choices):
            begun = begin(node, parsed)
            job = Job(config_of(node, parsed), _directory(node, "hydra.run.dir").absolute())
        if begun:  # said of what is valid: a mistake is one line
            name, values = job.config.model.name, " ".join(f"{key}={show(value)}" for key, value in begun.items())
            log.info("model  %s begins with %s; an experiment, or a key given here, wins", name, values)
        return job


def build_config(overrides: Sequence[str], config_dir: str | None = None) -> Config:
    """Return the config that a command line means."""
    return load(overrides, config_dir).config


def config_of(node: DictConfig, overrides: Sequence[Override] = (), tolerated: Collection[str] = ()) -> Config:
    """Return a composed node as a config: validated, resolved and frozen. The node gets the defaults that it lacks.

    `data.seed`, when null, becomes the run's `seed`; local folders become absolute, so that a run can be repeated from
    any working directory. `tolerated` are keys of overrides that another job of the sweep reads.
    """
    try:
        names = {group: node[group].get("name") for group in CHOICES if OmegaConf.is_dict(node.get(group))}
        _fill(node, defaults(names))
        settings = OmegaConf.masked_copy(node, [str(key) for key in node if key != "hydra"])
        plain: Any = OmegaConf.to_container(settings, resolve=True)
    except OmegaConfBaseException as error:
        raise _explained(error) from error
    overridden = {override.name for override in overrides}
    config = build(plain, overridden - set(tolerated))
    if "task.labels" in overridden and not config.task.reordered():
        _check_order(node, config, overridden)
    for override in overrides:
        other = INSTEAD.get(override.name)
        if other is not None and getattr(config, other):
            why = f"{other}={show(getattr(config, other))} is given in place of {override.name}"
            nothing = f"{other}={show(Config.model_fields[other].default)}"
            raise SettingError(override.name, f"'{override.text}': {why}; leave one of them out, or give {nothing}")
    check_installed(config.logger.names, config.model.quantize)
    files = {key: getattr(config.data, key, None) for key in ("dir", "keep")}
    absolute = {key: str(Path(file).expanduser().absolute()) for key, file in files.items() if file is not None}
    data, model = config.data.replace(seed=config.data_seed, **absolute), Path(config.model.path).expanduser()
    path = str(model.absolute()) if model.is_dir() and not config.model.is_embedded else config.model.path
    return config.replace(data=data, model=config.model.replace(path=path))


def begin(node: DictConfig, overrides: Sequence[Override]) -> dict[str, Any]:
    """Set what the model's file has as `begin`, for optimizer=mezo by peft, and return it: key -> value.

    A key of an override keeps its value, and with an experiment, which is a whole setup, nothing is set.
    """
    with read_write(node), open_dict(node):
        suited = node.model.pop("begin", None) if OmegaConf.is_dict(node.get("model")) else None
        chosen = [OmegaConf.select(node, key) for key in ("optimizer.name", "peft.name")]
        if not suited or chosen[0] != "mezo" or node.hydra.runtime.choices.get("experiment") is not None:
            return {}
        keys = {override.name for override in overrides}
        keys |= {key for key, other in INSTEAD.items() if other in keys}
        begun = {key: value for key, value in suited.get(chosen[1], {}).items() if key not in keys}
        for key, value in begun.items():
            OmegaConf.update(node, key, value, force_add=True)
    return begun


def _check_order(node: DictConfig, config: Config, overridden: Collection[str]) -> None:
    """Refuse `task.labels` in another order than its file has, without the lists beside it that go by it."""
    runtime = node.hydra.runtime
    files = (Path(source.path, "task", f"{runtime.choices.task}.yaml") for source in runtime.config_sources)
    before = next((OmegaConf.select(OmegaConf.load(file), "labels") for file in files if file.is_file()), None) or []
    if {*before} == {*config.task.labels} and before != config.task.labels:
        lists = config.task.lists(config.objective.per_label).items()
        if left := [f"{key} [{', '.join(each)}]" for key, each in lists if each and key not in overridden]:
            raise SettingError("task.labels", f"task.labels has a new order: put {' and '.join(left)} into it, too")


def _fill(node: Any, values: Mapping[str, Any]) -> None:
    """Give a composed node the values of keys that it lacks, so that `${KEY}` finds them."""
    with read_write(node), open_dict(node):
        for key, value in values.items():
            if key not in node and not OmegaConf.is_interpolation(node, key):
                node[key] = value
            elif isinstance(value, dict) and isinstance(node._get_node(key), DictConfig) and node[key] is not None:
                _fill(node[key], value)


# --- what a sweep needs ---


def sweeper_of(node: DictConfig) -> tuple[str, dict[str, str]]:
    """Return the launcher that the composed files choose, and their grid, `hydra.sweeper.params`."""
    chosen, params = node.hydra.runtime.choices, OmegaConf.select(node, "hydra.sweeper.params") or {}
    if chosen["hydra/sweeper"] != "basic":
        raise UserError(f"hydra/sweeper={chosen['hydra/sweeper']}: {NO_SWEEPERS}")
    return str(chosen["hydra/launcher"]), {str(key): str(value) for key, value in params.items()}


def with_values(node: DictConfig, overrides: Iterable[Override]) -> DictConfig:
    """Return a copy of a composed node with plain values set, as Hydra sets them after it has merged the files."""
    changed = copy.deepcopy(node)
    for override in overrides:
        try:
            OmegaConf.update(changed, override.name, override.value, force_add=True)
        except OmegaConfBaseException as error:
            raise _explained(error) from error
    return changed


def sweep_directories(node: DictConfig, number: int) -> tuple[Path, Path]:
    """Return the directory of the sweep, and in it that of job `number`."""
    with read_write(node.hydra.job), open_dict(node.hydra.job):
        node.hydra.job.num = node.hydra.job.id = number
    HydraConfig.instance().set_config(node)  # what ${hydra:...} reads
    folder = _directory(node, "hydra.sweep.dir").absolute()
    return folder, Path(os.path.normpath(folder / _directory(node, "hydra.sweep.subdir")))


# --- Hydra ---


@contextmanager
def hydra_session() -> Iterator[Hydra]:
    """Initialize Hydra on the built-in configs, and leave its global state as it was found.

    `finetune` may be called inside a program that uses Hydra itself.
    """
    before: dict[type, Any] = {
        kind: Singleton._instances.pop(kind) for kind in OF_A_SESSION if kind in Singleton._instances
    }
    try:
        with initialize_config_dir(config_dir=str(CONF), job_name="mezo", **VERSION_BASE):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            yield hydra
    finally:
        for kind in OF_A_SESSION:
            Singleton._instances.pop(kind, None)
        Singleton._instances.update(before)


def words_for_hydra(overrides: Iterable[str], config_dir: str | None) -> list[str]:
    """Return the overrides so that Hydra reads the config folders of plug-ins and of the user, and takes new keys.

    A value of one of mezo's own keys, which no file need have set, is given by `++KEY=`.
    """
    folders = [quote(f"file://{folder}") for folder in config_dirs(config_dir)[1:]]
    words = [f"hydra.searchpath=[{','.join(folders)}]"] if folders else []
    plain = re.compile(r"(?!hydra)[^+~@]+")
    for text in overrides:
        name = text.partition("=")[0]
        words.append(f"++{text}" if plain.fullmatch(name) and name not in GROUPS else text)
    return words


def compose_node(overrides: Sequence[str], config_dir: str | None) -> DictConfig:
    """Let Hydra compose the overrides over the files. The node contains Hydra's own settings too."""
    words = words_for_hydra(overrides, config_dir)
    try:
        node = compose(config_name=MAIN, overrides=words, return_hydra_config=True)
    except Exception as error:  # whatever goes wrong here is in what the user wrote: overrides and YAML files
        raise _explained(error) from error
    with read_write(node.hydra):  # as they were given
        node.hydra.overrides.task = [text for text in overrides if not text.startswith("hydra")]
        job: Any = OmegaConf.to_container(node.hydra.job, resolve=False)  # an override may contain an interpolation
        node.hydra.job.override_dirname = job["override_dirname"].replace("++", "")
    return node


# --- what went wrong, in one line ---


def _directory(node: DictConfig, key: str) -> Path:
    try:
        value = OmegaConf.select(node, key)
    except OmegaConfBaseException as error:
        raise _explained(error, key) from error
    if value in (None, ""):
        raise SettingError(key, f"{key} needs a folder")
    return Path(str(value))


@contextmanager
def locating(node: DictConfig, overrides: Sequence[Override], choices: Choices) -> Iterator[None]:
    """Add ` (FILE:LINE)` to an error about a key that no override gives, where one of the chosen files names it."""
    try:
        yield
    except SettingError as error:
        if any(override.name == error.key for override in overrides):
            raise
        names = error.key.split(".")
        leaf = re.compile(rf"[\s{{,-]*[\"']?{re.escape(names[-1])}[\"']?\s*:")
        for group in ("experiment", names[0]):  # an experiment wins over the group's own file
            path = choices.get(group, {}).get(node.hydra.runtime.choices.get(group))
            lines = path.read_text(encoding="utf-8").splitlines() if path else []
            for number, line in enumerate(lines, 1):
                if leaf.match(line):
                    raise UserError(f"{error} ({path}:{number})") from error
        raise UserError(str(error)) from error


def _explained(error: BaseException, key: str = "") -> SettingError:
    """Return an error of Hydra or OmegaConf as one line: the key, the cause, and the key that was meant.

    Hydra wraps the cause, and spreads it over several lines.
    """
    does_not_resolve = isinstance(error, InterpolationResolutionError)
    while True:
        key = key or getattr(error, "full_key", None) or ""
        if error.__cause__ is None:
            break
        error = error.__cause__
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        opened = re.search("flow|quoted", error.context or "") and error.context_mark  # a bracket or a quote left open
        mark: Any = opened or error.problem_mark
        file = Path(mark.name).read_text(encoding="utf-8").splitlines() if Path(mark.name).is_file() else []
        match = re.match(r"\s*(?:- )?([\w.]+):\s+(?!['\"|>])(.*[{}:].*)", "".join(file[mark.line : mark.line + 1]))
        how = f"; quote it: {match[1]}: '{match[2]}'" if match else ""
        return SettingError(key, f"{mark.name}:{mark.line + 1}: {error.problem}{how}")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type="))]
    text = re.sub(r"\w+ raised while composing config: ", "", " ".join(lines[:3])) or type(error).__name__
    if does_not_resolve:
        name = re.search(r"Interpolation key '([^']+)'", text)
        near = did_you_mean(name[1], key_owners()) if name else ""
        text = f"an interpolation does not resolve: {text}{near} (a plain ${{ is written \\${{)"
    return SettingError(key, f"{key}: {text}" if key and (does_not_resolve or key not in text) else text)
