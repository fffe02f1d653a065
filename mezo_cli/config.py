"""The bridge to Hydra: overrides in, a checked frozen `Config` out. Only this room and the doors know Hydra.

Hydra composes plain nodes; `checks.build` lays the schema over the result, so that types, unknown keys (also those
added with `+`) and ranges are all judged in one place and told in the same words.
"""

import dataclasses
import itertools
import math
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import MarkedYAMLError

from mezo_cli import checks, overrides
from mezo_cli.errors import UserError, did_you_mean
from mezo_cli.schema import Config

VERSION_BASE = "1.3"


def conf_dir() -> Path:
    """Return the folder of the built-in configs: inside an installed package, beside it in a checkout."""
    here = Path(__file__).resolve().parent
    return here / "conf" if (here / "conf").is_dir() else here.parent / "conf"


def register() -> None:
    """Tell Hydra the schema's defaults, so that every key can be overridden, and the run directory's unique part."""
    ConfigStore.instance().store(name="mezo_schema", node=_defaults(Config))
    OmegaConf.register_new_resolver("mezo_unique", lambda: uuid.uuid4().hex[:6], use_cache=True, replace=True)


def search_path(config_dir: str | None) -> list[str]:
    """Return the override that puts the user's own config folder (`--config-dir`) before Hydra."""
    if config_dir is None:
        return []
    folder = Path(config_dir).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"--config-dir {config_dir}: no such folder")
    return [f"hydra.searchpath=[{overrides.quoted(f'file://{folder}')}]"]


def choices(config_dir: str | None = None) -> dict[str, dict[str, Path]]:
    """Return group -> choice -> file, over the built-in folder and the user's."""
    search_path(config_dir)
    return overrides.choices_in([conf_dir(), *([Path(config_dir).expanduser()] if config_dir else [])])


def check(given: Sequence[str], config_dir: str | None = None, multirun: bool = False) -> int:
    """Compose and check every job that the overrides name, before any of them starts; return the number of jobs.

    Raises:
        UserError: with one line for the first override that does not hold.
    """
    known = choices(config_dir)
    parsed = [overrides.read(text, known) for text in given]
    if not multirun:
        _refuse_sweeps(parsed)
    jobs = [overrides.alternatives(o, known) for o in parsed]
    first = [alternatives[0] for alternatives in jobs]
    build(first, config_dir)
    # One job for each value of each key, not for each combination: what is checked stands on single keys.
    for i, alternatives in enumerate(jobs):
        for other in alternatives[1:]:
            build([*first[:i], other, *first[i + 1 :]], config_dir)
    return math.prod(len(alternatives) for alternatives in jobs)


def with_grid(given: Sequence[str], config_dir: str | None = None) -> list[str]:
    """Return a sweep's overrides with the grid of its experiment file (`hydra.sweeper.params`) written out before them.

    What the command line names itself, a value or a choice, is not swept over by the file.

    Raises:
        UserError: for a key or a choice of the grid that does not exist, and for several experiments of unlike grids.
    """
    known = choices(config_dir)
    parsed = [overrides.read(text, known) for text in given]
    named = {override.key_or_group for override in parsed}
    plain = [text for text, override in zip(given, parsed, strict=True) if not override.is_sweep_override()]
    swept = [overrides.alternatives(o, known) for o in parsed if o.key_or_group == "experiment"]
    grids = [_grid([*plain, *([text] if swept else [])], config_dir) for text in (swept[0] if swept else [""])]
    if any(grid != grids[0] for grid in grids):
        raise UserError(f"{', '.join(swept[0])}: their files sweep over unlike grids; run one experiment at a time")
    words = [f"{key}={value}" for key, value in grids[0].items() if key not in named]
    for text in words:
        try:
            overrides.read(text, known)
        except UserError as error:
            raise UserError(f"{error} (hydra.sweeper.params of {swept[0][0] if swept else 'a file'})") from error
    return [*words, *given]


def varied(given: Sequence[str], config_dir: str | None = None) -> set[str]:
    """Return the keys that a sweep gives several values."""
    known = choices(config_dir)
    return {o.get_key_element() for o in (overrides.read(text, known) for text in given) if o.is_sweep_override()}


def _grid(given: Sequence[str], config_dir: str | None) -> dict[str, str]:
    """Return what the composed files sweep over by themselves: key or group -> values, as on the command line."""
    params = OmegaConf.select(_composed(given, config_dir), "hydra.sweeper.params") or {}
    return {str(key): str(value) for key, value in params.items()}


def build(given: Sequence[str], config_dir: str | None = None) -> Config:
    """Compose overrides over the defaults and return the checked config.

    Raises:
        UserError: for an unknown key or choice, a wrong type, a value out of range, a file that cannot be composed.
    """
    known = choices(config_dir)
    _refuse_sweeps([overrides.read(text, known) for text in given])
    node = _composed(given, config_dir)
    picked = dict(node.hydra.runtime.choices)
    try:
        made = typed(node)
        _directories(node)
    except checks.SettingError as error:
        groups = ["experiment", error.key.split(".")[0]]  # the files that can have said so, the stronger first
        files = [known[group][picked[group]] for group in groups if picked.get(group) in known.get(group, {})]
        raise UserError(f"{error}{_place(error.key, given, files)}") from error
    return made


def _composed(given: Sequence[str], config_dir: str | None) -> DictConfig:
    """Let Hydra compose overrides over the files; its own node is in it."""
    path = search_path(config_dir)
    register()
    with _hydra_kept():
        try:
            with initialize_config_dir(config_dir=str(conf_dir()), version_base=VERSION_BASE):
                node = compose(config_name="config", overrides=[*path, *given], return_hydra_config=True)
            return node
        except Exception as error:  # whatever goes wrong here, it is in what the user wrote: overrides and YAML files
            raise UserError(_composing(error)) from error


def _refuse_sweeps(parsed: Sequence[Override]) -> None:
    for override in parsed:
        if override.is_sweep_override():
            raise UserError(
                f"'{override.input_line}' names several values: add -m to sweep over them, or quote them to mean one"
            )


def typed(node: DictConfig | Any) -> Config:
    """Lay the schema over a composed node and return it checked, resolved and frozen.

    `data.seed`, when null, becomes the run's `seed`; local folders become absolute, so that a run can be repeated from
    anywhere.
    """
    config = _checked(node, resolve=True)
    seed, folder, model = config.data.seed, config.data.dir, Path(config.model.path).expanduser()
    data = dataclasses.replace(
        config.data,
        seed=config.seed if seed is None else seed,
        dir=None if folder is None else str(Path(folder).expanduser().absolute()),
    )
    path = str(model.absolute()) if model.is_dir() and config.model.path != "demo" else config.model.path
    return dataclasses.replace(config, data=data, model=dataclasses.replace(config.model, path=path))


def read(path: Path) -> Config:
    """Read a run's own `config.yaml` without composing again.

    Raises:
        UserError: when the file is missing or damaged; the line names it.
    """
    try:
        return _checked(OmegaConf.load(path), resolve=False)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except Exception as error:  # YAML has several error families; each means a damaged file
        raise UserError(f"{path} is damaged: {_first_line(error)}") from error


def to_yaml(config: Config) -> str:
    """Return the config as the text of `config.yaml`."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _checked(node: Any, resolve: bool) -> Config:
    try:
        plain = OmegaConf.to_container(OmegaConf.masked_copy(node, [k for k in node if k != "hydra"]), resolve=resolve)
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        raise checks.SettingError(key, f"{key}: {_unresolved(error)}") from error
    config = checks.build(plain)
    assert isinstance(config, Config)
    checks.check_together(config)
    return config


def _directories(node: DictConfig) -> None:
    """Check that the run's directory, and a sweep's, can be named."""
    for key in overrides.HYDRA_KEYS[:2]:
        try:
            OmegaConf.select(node, key)
        except OmegaConfBaseException as error:
            raise checks.SettingError(key, f"{key}: {_unresolved(error)}") from error


def _defaults(kind: Any) -> dict[str, Any]:
    """Return a dataclass's defaults as plain nested values; unlike OmegaConf's own, these take a value of any type."""
    made = {}
    for item in dataclasses.fields(kind):
        value = checks.default_of(item)
        made[item.name] = _defaults(type(value)) if dataclasses.is_dataclass(value) else value
    return made


@contextmanager
def _hydra_kept() -> Iterator[None]:
    """Leave Hydra's global state as it was: `finetune` may be called inside a program that uses Hydra itself."""
    ours: tuple[type, ...] = (GlobalHydra, VersionBase, JobRuntime)
    kept: dict[type, Singleton] = {
        kind: Singleton._instances.pop(kind) for kind in ours if kind in Singleton._instances
    }
    try:
        yield
    finally:
        for kind in ours:
            Singleton._instances.pop(kind, None)
        Singleton._instances.update(kept)


# --- what went wrong, in one line ---


def _place(key: str, given: Sequence[str], files: Sequence[Path]) -> str:
    """Return ` (FILE:LINE)` for a key that no override gives, where one of the chosen files names it."""
    if any(re.split("=", text.lstrip("~+"), maxsplit=1)[0] == key for text in given):
        return ""
    leaf = re.compile(rf"\s*[\"']?{re.escape(key.split('.')[-1])}[\"']?\s*:")
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if leaf.match(line):
                return f" ({path}:{number})"
    return ""


def _composing(error: BaseException) -> str:
    """Say what Hydra could not compose."""
    while error.__cause__ is not None and not isinstance(error, MarkedYAMLError):
        error = error.__cause__
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}:{mark.line + 1}: not YAML: {error.problem}"
    line = re.sub(r"\w+ raised while composing config: ", "", _first_line(error))
    line = line.replace("Cannot merge DictConfig with ListConfig", "a mapping stands where a list is wanted")
    return line.replace("Cannot merge ListConfig with DictConfig", "a list stands where a mapping is wanted")


def _unresolved(error: OmegaConfBaseException) -> str:
    """Say what an interpolation asked for in vain."""
    line = _first_line(error)
    if isinstance(error, InterpolationResolutionError) or "nterpolation" in type(error).__name__:
        name = re.search(r"Interpolation key '([^']+)'", line)
        near = did_you_mean(name[1], checks.all_keys()) if name else ""
        return f"an interpolation does not resolve: {line}{near} (a plain ${{ is written \\${{)"
    return line


def _first_line(error: BaseException) -> str:
    """Return the innermost telling lines of an error: Hydra wraps the cause and spreads it over several."""
    while isinstance(error.__cause__, (HydraException, OmegaConfBaseException)):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type="))]
    return " ".join(itertools.islice(lines, 2)) if lines else type(error).__name__
