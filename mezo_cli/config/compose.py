"""Compose YAML files and overrides into a validated `Config`. With `sweep.jobs` the only module that knows Hydra.

Hydra composes plain nodes; `validation.build` then checks them, so that types, unknown keys and ranges are judged in
one place and reported in the same words, wherever a value comes from.
"""

import copy
import dataclasses
import itertools
import os
import re
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import __version__ as hydra_version
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra, Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from packaging.version import Version

from mezo_cli.config import files
from mezo_cli.config.base import SettingError, show
from mezo_cli.config.choices import Choices, conf_dir, config_dirs, find_choices
from mezo_cli.config.explain import GROUPS, all_keys
from mezo_cli.config.overrides import NO_SWEEPERS, Override, check_form, check_override, quote
from mezo_cli.config.own_code import with_absolute_paths
from mezo_cli.config.registry import CHOICES
from mezo_cli.config.rules import check_installed, check_quantizer
from mezo_cli.config.schema import Config, FilesConfig, to_dict
from mezo_cli.config.validation import build, defaults
from mezo_cli.errors import UserError, did_you_mean

MAIN = "config"
# Hydra 1.4 and OmegaConf 2.4 warn of what 1.3 and 2.3 need.
BEFORE_1_4 = hydra_version.startswith("1.3.")
VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if BEFORE_1_4 else {}
register_resolver: Any = OmegaConf.register_new_resolver if BEFORE_1_4 else OmegaConf.register_resolver
MAX_JOBS = 100_000  # of a sweep
INSTEAD = {"steps": "forwards", "eval_every": "eval_at_forwards"}  # a key, and the one that is given in its place
# Resolvers are registered when this module is imported: a sweep's jobs may run in processes of their own.
register_resolver("mezo_unique", lambda: uuid.uuid4().hex[:6], use_cache=True, replace=True)
# ${mezo_by:${task},{squad:generate},choice}: a value that depends on another
register_resolver("mezo_by", lambda key, values, otherwise: values.get(key, otherwise), replace=True)


@dataclasses.dataclass(frozen=True)
class Job:
    """A run to start: its validated config and its directory; in a sweep also the overrides that make the job."""

    config: Config
    directory: Path
    overrides: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sweeper:
    """How a sweep is run: the name of its launcher, and the grid of the experiment file."""

    launcher: str
    params: dict[str, str]  # `hydra.sweeper.params`: key or group -> values, as on the command line


# --- one run ---


def load(overrides: Sequence[str], config_dir: str | None = None) -> Job:
    """Return the run that a command line means: its config, and its directory by `hydra.run.dir`."""
    with hydra_session():
        return _load(overrides, config_dir)[1]


def build_config(overrides: Sequence[str], config_dir: str | None = None) -> Config:
    """Return the config that a command line means."""
    return load(overrides, config_dir).config


def show_config(overrides: Sequence[str], config_dir: str | None, what: str) -> str:
    """Return the composed config as YAML: `job` without Hydra's own part, `hydra` that alone, `all` both."""
    with hydra_session() as hydra:
        node, job = _load(overrides, config_dir)
        for key, value in to_dict(job.config).items():
            OmegaConf.update(node, key, value, merge=False, force_add=True)
        return OmegaConf.to_yaml(hydra.get_sanitized_cfg(node, what))


def _load(overrides: Sequence[str], config_dir: str | None) -> tuple[DictConfig, Job]:
    choices = find_choices(config_dir)
    parsed = parse(overrides, choices)
    for override in parsed:
        if override.sweeps:
            other = ", or write logger=[one,two]" if override.name == "logger" else ", or quote them to mean one"
            raise UserError(f"'{override.text}' names several values: add -m to sweep over them{other}")
        if override.name.startswith(("hydra/", "hydra.launcher.")):
            raise UserError(f"'{override.text}' is about how a sweep is run: add -m")
    node = compose_node([override.text for override in parsed], config_dir)
    with locating(node, parsed, choices):
        return node, Job(config_of(node, parsed), Path(_select(node, "hydra.run.dir")).absolute())


def parse(overrides: Sequence[str], choices: Choices) -> list[Override]:
    """Parse the overrides by Hydra's grammar and check each by itself. `logger=[one,two]` becomes `logger.names`."""
    parser, parsed = OverridesParser.create(), []
    for word in overrides:
        check_form(word, choices)
        text = re.sub(r"^logger=\[", "logger.names=[", word)  # Hydra would merge the files: one file's names are lost
        try:
            override = _converted(parser.parse_override(text), text, choices)
        except HydraException as error:
            name = re.split("[=@]", text.lstrip("~+"), maxsplit=1)[0]
            raise UserError(
                f"'{text}' cannot be read: quote a value with special characters, '{name}=\"...\"'"
            ) from error
        check_override(override, choices)
        parsed.append(override)
    return parsed


def _converted(override: Any, text: str, choices: Choices) -> Override:
    """Return Hydra's override as ours, with the values of a sweep as texts."""
    value, sweeps, element = override.value(), override.is_sweep_override(), override.get_key_element()
    values: list[str] | None = ["null" if value is None else str(value)]
    jobs = []
    if isinstance(value, Glob):
        values = value.filter(list(choices.get(override.key_or_group, {})))
    elif sweeps:
        enumerable = override.is_discrete_sweep()
        values = list(itertools.islice(override.sweep_string_iterator(), MAX_JOBS + 1)) if enumerable else None
    else:
        jobs = [f"{element}={override.get_value_element_as_str()}"]
    return Override(
        text=text,
        name=override.key_or_group,
        package=override.package,
        form=override.type.name,
        sweeps=sweeps,
        value=None if sweeps else value,
        values=None if values is None else tuple(values),
        jobs=tuple([f"{element}={text}" for text in values or ()] if sweeps else jobs),
    )


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
        raise _unresolved(error.full_key or "", error) from error
    config = with_absolute_paths(build(plain, {override.name for override in overrides} - set(tolerated)))
    for override in overrides:
        other = INSTEAD.get(override.name)
        if other is not None and getattr(config, other):
            nothing = f"{other}={show(Config.model_fields[other].default)}"
            why = f"{other}={show(getattr(config, other))} is given in place of {override.name}"
            raise SettingError(override.name, f"'{override.text}': {why}; leave one of them out, or give {nothing}")
    check_installed(config.logger.names)
    check_quantizer(config.model.quantize)
    data, model = config.data.replace(seed=config.data_seed), Path(config.model.path).expanduser()
    if isinstance(data, FilesConfig) and data.dir is not None:
        data = data.replace(dir=str(Path(data.dir).expanduser().absolute()))
    if data.keep is not None:
        data = data.replace(keep=str(Path(data.keep).expanduser().absolute()))
    path = str(model.absolute()) if model.is_dir() and not config.model.is_embedded else config.model.path
    return config.replace(data=data, model=config.model.replace(path=path))


def _fill(node: Any, values: Mapping[str, Any]) -> None:
    """Give a composed node the values of keys that it lacks, so that `${KEY}` finds them."""
    with read_write(node), open_dict(node):
        for key, value in values.items():
            if key not in node and not OmegaConf.is_interpolation(node, key):
                node[key] = value
            elif isinstance(value, dict) and isinstance(node._get_node(key), DictConfig) and node[key] is not None:
                _fill(node[key], value)


# --- what a sweep needs ---


def sweeper_of(node: DictConfig) -> Sweeper:
    """Return the launcher and the grid that the composed files choose."""
    chosen, params = node.hydra.runtime.choices, OmegaConf.select(node, "hydra.sweeper.params") or {}
    grid = {str(key): str(value) for key, value in params.items()}
    if chosen["hydra/sweeper"] != "basic":
        raise UserError(f"hydra/sweeper={chosen['hydra/sweeper']}: {NO_SWEEPERS}")
    return Sweeper(str(chosen["hydra/launcher"]), grid)


def with_values(node: DictConfig, overrides: Iterable[Override]) -> DictConfig:
    """Return a copy of a composed node with plain values set, as Hydra sets them after it has merged the files."""
    changed = copy.deepcopy(node)
    for override in overrides:
        try:
            OmegaConf.update(changed, override.name, override.value, force_add=True)
        except OmegaConfBaseException as error:
            raise UserError(_explain_composition(error)) from error
    return changed


def sweep_dir_uses_overrides(node: DictConfig) -> bool:
    """Whether the names of a sweep's directories are made of its overrides (`${hydra.job.override_dirname}`)."""
    return "override" in str(OmegaConf.to_container(node.hydra.sweep, resolve=False))


def sweep_directories(node: DictConfig, number: int) -> tuple[Path, Path]:
    """Return the directory of the sweep, and in it that of job `number`."""
    with read_write(node.hydra.job), open_dict(node.hydra.job):
        node.hydra.job.num = node.hydra.job.id = number
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(node)  # what ${hydra:...} reads
    try:
        folder = Path(_select(node, "hydra.sweep.dir")).absolute()
        return folder, Path(os.path.normpath(folder / _select(node, "hydra.sweep.subdir")))
    finally:
        HydraConfig.instance().cfg = before


def copy_times(source: DictConfig, node: DictConfig) -> None:
    """Let `${now:...}` and `${mezo_unique:}` give in `node` what they gave in `source`."""
    OmegaConf.copy_cache(from_config=source, to_config=node)


# --- Hydra ---


@contextmanager
def hydra_session() -> Iterator[Hydra]:
    """Initialize Hydra on the built-in configs, and leave its global state as it was found.

    `finetune` may be called inside a program that uses Hydra itself.
    """
    known, version, runtime = GlobalHydra.instance(), VersionBase.instance(), JobRuntime.instance()
    before = known.hydra, version.getbase(), runtime.get("name")
    known.clear()
    try:
        with initialize_config_dir(config_dir=str(conf_dir()), job_name="mezo", **VERSION_BASE):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            yield hydra
    finally:
        GlobalHydra.instance().clear()
        if before[0] is not None:
            GlobalHydra.instance().initialize(before[0])
        if isinstance(before[1], Version):
            version.setbase(before[1])
        runtime.set("name", before[2])


def search_path(config_dir: str | None) -> list[str]:
    """Return the override that adds the config folders of plug-ins and of the user (`--config-dir`) to Hydra's path."""
    folders = [quote(f"file://{folder}") for folder in config_dirs(config_dir)[1:]]
    return [f"hydra.searchpath=[{','.join(folders)}]"] if folders else []


def compose_node(overrides: Sequence[str], config_dir: str | None) -> DictConfig:
    """Let Hydra compose the overrides over the files. The node contains Hydra's own settings too."""
    path, choices = search_path(config_dir), find_choices(config_dir)
    words = with_new_keys(overrides)
    if config_dir is not None:
        files.check_folder(config_dirs(config_dir)[-1])
    try:
        node = compose(config_name=MAIN, overrides=[*path, *words], return_hydra_config=True)
    except Exception as error:  # whatever goes wrong here is in what the user wrote: overrides and YAML files
        raise UserError(next(files.problems(choices), None) or _explain_composition(error)) from error
    with read_write(node.hydra):  # as they were given
        node.hydra.overrides.task = [text for text in overrides if not text.startswith("hydra")]
        job: Any = OmegaConf.to_container(node.hydra.job, resolve=False)  # an override may contain an interpolation
        node.hydra.job.override_dirname = job["override_dirname"].replace("++", "")
    return node


def with_new_keys(overrides: Iterable[str]) -> list[str]:
    """Return the overrides so that Hydra takes mezo's own keys, which no file need have set."""
    return [f"++{text}" if _is_setting(text) else text for text in overrides]


def _is_setting(text: str) -> bool:
    name = text.partition("=")[0]
    return name[0] not in "+~" and name not in GROUPS and "@" not in name and not name.startswith("hydra")


# --- what went wrong, in one line ---


def _select(node: DictConfig, key: str) -> str:
    """Return the name of a directory that Hydra's config gives."""
    try:
        value = OmegaConf.select(node, key)
    except OmegaConfBaseException as error:
        raise _unresolved(key, error) from error
    if value in (None, ""):
        raise SettingError(key, f"{key} needs a folder")
    return str(value)


@contextmanager
def locating(node: DictConfig, overrides: Sequence[Override], choices: Choices) -> Iterator[None]:
    """Add ` (FILE:LINE)` to an error about a key that no override gives, where one of the chosen files names it."""
    try:
        yield
    except SettingError as error:
        if any(override.name == error.key for override in overrides):
            raise
        picked = node.hydra.runtime.choices
        groups = ["experiment", error.key.split(".")[0]]  # an experiment wins over the group's own file
        chosen = [choices[group][picked[group]] for group in groups if picked.get(group) in choices.get(group, {})]
        for path in chosen:
            location = files.locate(path, path.read_text(encoding="utf-8"), error.key.split(".")[-1])
            if location != str(path):
                raise UserError(f"{error} ({location})") from error
        raise


def _explain_composition(error: BaseException) -> str:
    """Return what Hydra could not compose."""
    while error.__cause__ is not None:  # which Hydra has wrapped
        error = error.__cause__
    line = re.sub(r"\w+ raised while composing config: ", "", _first_lines(error))
    key = re.search(r"full_key: (\S+)", str(error))
    return line if key is None or key[1] in line else f"{key[1]}: {line}"


def _unresolved(key: str, error: OmegaConfBaseException) -> SettingError:
    """Return the error for a value that does not resolve, with the nearest key for an interpolation."""
    line = _first_lines(error)
    if "nterpolation" in type(error).__name__:
        name = re.search(r"Interpolation key '([^']+)'", line)
        near = did_you_mean(name[1], all_keys()) if name else ""
        line = f"an interpolation does not resolve: {line}{near} (a plain ${{ is written \\${{)"
    return SettingError(key, f"{key}: {line}")


def _first_lines(error: BaseException) -> str:
    """Return the first two lines of the innermost error; Hydra wraps the cause and spreads it over several."""
    while isinstance(error.__cause__, (HydraException, OmegaConfBaseException)):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type="))]
    return " ".join(lines[:2]) or type(error).__name__
