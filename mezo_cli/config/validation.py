"""Turn plain nested values into the frozen `Config`, and say which settings do not go together."""

import importlib.util
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import reduce
from itertools import chain
from typing import Any

from mezo_cli.config.base import MISSING, Conflicts, SettingError, show
from mezo_cli.config.choices import CONF
from mezo_cli.config.explain import is_group, readers, unknown_key, validate
from mezo_cli.config.rates import ROWS
from mezo_cli.config.registry import CHOICES, ENGINE_OBJECTIVES, LOGGERS, OBJECTIVES, PEFT
from mezo_cli.config.schema import Config, to_dict
from mezo_cli.errors import UserError, did_you_mean, install, join, without_credentials


def build(values: Mapping[str, Any], overridden: Collection[str] = ()) -> Config:
    """Return the config made of plain nested values. A key that is not given takes its default.

    A setting of a choice that was not made (`optimizer.momentum` with `optimizer.name: mezo`) is dropped, or refused if
    its key is in `overridden`, those of the command line. So is one of `UNREAD`.
    """
    groups = {group: choose(group, values.get(group, {}), overridden) for group in CHOICES}
    config = validate(Config, {**values, **groups})
    if config.forwards is not None:
        chosen, first, most = f"optimizer={config.optimizer.name}", config.passes(1, 1), config.forwards
        if not first:
            raise SettingError("forwards", f"forwards={most}: {chosen} takes no step: leave it out")
        if first > most:
            why = f"a step of {chosen} takes {first} forwards"
            raise SettingError("forwards", f"forwards={most}: {why}: give {first} or more")
        config = config.replace(steps=bisect_right(range(most + 1), most, key=lambda n: config.passes(n, n)) - 1)
    if config.model.compute_dtype is None and config.model.dtype == "float32":  # that of theta on every device
        config = config.replace(model=config.model.replace(compute_dtype="float32"))
    check_rules(config)
    for key in UNREAD.keys() & {*overridden}:  # a file may set it for other choices
        if not reads(config, key):
            raise SettingError(key, f"'{key}={show(reduce(getattr, key.split('.'), config))}': {UNREAD[key][2]}")
    return config


def choose(group: str, values: Any, overridden: Collection[str] = ()) -> Any:
    """Return the settings of a group, of the class of the choice that `name` makes; see `build`."""
    if not isinstance(values, Mapping):
        raise SettingError(group, f"{group}={show(values)}: expected a group of keys")
    name = values.get("name", "none" if group == "engine" else MISSING)
    if name == MISSING:
        raise SettingError(f"{group}.name", f"{group}.name is not set: give {group}=...")
    if name not in CHOICES[group].targets and (CONF / group / f"{name}.yaml").is_file():
        raise UserError(f"{group}={name}: mezo was installed when it had no such {group}; reinstall: pip install -e .")
    kind: Any = CHOICES[group].load(name)  # that of a plug-in is imported here, when its name is chosen
    base: Any = Config.model_fields[group].annotation
    if not is_group(kind) or not issubclass(kind, base):
        why = f"the plug-in {CHOICES[group].targets[name]} is no class of settings, which names its implementation"
        raise UserError(f"{group}={name}: {why} (docs/how-to/extending.md)")
    for key in values.keys() - kind.model_fields.keys():
        full, having = f"{group}.{key}", readers(group, key)
        if not having:
            raise unknown_key(full, [f"{group}.{field}" for field in kind.model_fields])
        if full in overridden:
            others = join(f"{group}={other}" for other in having)
            raise SettingError(full, f"'{full}={show(values[key])}': {group}={name} does not read it, only {others}")
    return validate(kind, {key: value for key, value in values.items() if key in kind.model_fields}, f"{group}.")


def defaults(names: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Return the default of every key as plain nested values; of the choices of groups, where their names are given."""
    chosen = {group: choose(group, {"name": name}) for group, name in names.items() if name in CHOICES[group].names}
    return to_dict(Config().replace(**chosen))


def check_installed(loggers: Iterable[str] = (), quantize: str = "none") -> None:
    """Check that the packages of loggers, and of what quantises, are there. They are located, not imported."""
    if quantize == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"model.quantize=nf4 needs bitsandbytes: {install('quantized')}")
    for name in loggers:
        package = LOGGERS.load(name).package
        if importlib.util.find_spec(package) is None:
            how = install(name) if name in LOGGERS.built_in else f"pip install {package}"
            raise UserError(f"logger={name} needs a package: {how}")


# --- settings that are valid by themselves and do not go together ---


def check_rules(config: Config) -> None:
    """Raise the first conflict, as a line with the key, its value, and why it does not go with the others."""
    rules = [_task(config), config.objective.conflicts(config), config.optimizer.conflicts()]
    rules += [config.peft.conflicts(config), _objective(config), _training(config)]
    rules += [_streaming(config)] if config.model.stream else []
    rules += [_engine(config)] if config.engine.name != "none" else []
    for key, why in chain(*rules):
        value: Any = reduce(getattr, key.split("."), config)
        if value in (None, MISSING):
            raise SettingError(key, f"{key} is not set: {why}")
        shown = show(getattr(value, "name", value))
        raise SettingError(key, f"{key}={without_credentials(shown)}: {why}")


def reads(config: Config, key: str) -> bool:
    """Return whether a key `GROUP.NAME` has an effect in a config."""
    group, _, name = key.partition(".")
    return name in type(getattr(config, group)).model_fields and not (key in UNREAD and UNREAD[key][1](config))


UNREAD: dict[str, tuple[str, Callable[[Config], bool], str]] = {  # key -> another, with which it has no effect; why
    "model.tie_embeddings": ("objective", lambda config: config.objective.has_head, "objective=cls has no decoder"),
    "model.stream_memory": ("model.stream", lambda config: not config.model.stream, "only model.stream=true reads it"),
}


def _task(config: Config) -> Conflicts:
    """Reject what the task, its rows and the model are, before they are read.

    config.yaml and sweep.json would keep the password in an address.
    """
    task, model = config.task, config.model
    for key, value in {"task.name": task.name, "model.path": model.path}.items():
        if value == MISSING:
            yield key, f"give {key}=..."
    for key, address in {"model.path": model.path, "task.hub.path": task.hub.path}.items():
        if address is not None and without_credentials(address) != address:
            why = "the address has a user name, a password or a key, which the run would store"
            yield key, f"{why}; log in by hf auth login or HF_TOKEN"
    for key, names in {"task.columns": task.columns, "logger.names": config.logger.names}.items():
        for name in names:
            if names.count(name) > 1:
                yield key, f"{name} is named twice"
    words, count = config.objective.per_label, len(task.labels)
    if count and any(names and len(names) != count for names in task.lists().values()):
        lists = task.lists(words).items()
        wrong = [f"{key} has {len(names)}" for key, names in lists if names and len(names) != count]
        yield "task.labels", f"{' and '.join(wrong)}: give {count}, one for each label, in the same order"
    if words and (why := task.reordered(words)):
        yield "task.labels", f"{join(words)} go by their order: {why}"
    if task.generate.system is not None and not task.generate.chat:
        yield "task.generate.system", "it is read with task.generate.chat=true only"


def _objective(config: Config) -> Conflicts:
    """Reject what the objective does not read or compute: metrics, demonstrations, balanced batches, a probe."""
    data, objective, task, name = config.data, config.objective, config.task, config.objective.name
    if data.keep is not None and name != "generate":
        yield "data.keep", f"objective={name} does not read it, only objective=generate"
    for key, metric in {"metric": config.metric, "task.metric": task.metric}.items():
        metrics = objective.metric_names
        if metric is not None and metrics is not None and metric not in (*metrics, "loss"):
            names = metrics if key == "task.metric" else [*metrics, "loss"]
            yield key, f"not one of {join(names)}{did_you_mean(metric, names)}"
    if task.demonstrations:
        key = "task.demonstrations"
        if config.steps or config.init != "none":
            other = f"steps={config.steps}" if config.steps else f"init={config.init}"
            yield key, f"it is for an evaluation of the model, not with {other}; give steps=0"
        if not objective.demonstrates:
            others = join(other for other, kind in OBJECTIVES.all() if kind.demonstrates)
            yield key, f"objective={name} reads none, only {others}"
        if name == "generate" and (task.generate.chat or task.generate.answer is None):
            yield key, f"the task has {'a chat' if task.generate.chat else 'no task.generate.answer to show'}"
    if data.batches == "balanced" and not objective.needs_labels:
        yield "data.batches", f"objective={name} has no fixed set of labels; use data.batches=shuffled"
    if data.batches == "balanced" and config.batch_size < len(task.labels):
        count = len(task.labels)
        yield "batch_size", f"data.batches=balanced takes a row of each of {count} labels: give {count} or more"
    if config.init == "linear_probe" and not objective.needs_labels:
        yield "init", f"objective={name} scores no labels"
    saves_output = config.peft.trains_output or getattr(config.peft, "head", False) or objective.has_head
    if config.init == "linear_probe" and not saves_output:
        why = f"peft={config.peft.name} neither trains nor saves the decoder that the probe is written into"
        yield "init", f"{why}; use peft=none, head or lora with peft.head=true, or objective=cls"


def _training(config: Config) -> Conflicts:
    """Reject what the optimizer does not do, evaluations after the last step, and weights that would not be trained."""
    model, optimizer = config.model, config.optimizer
    chosen = f"optimizer={optimizer.name}"
    if config.checkpoint == "trajectory" and not optimizer.replayable:
        yield "checkpoint", f"{chosen} leaves no trajectory; use checkpoint=full"
    if optimizer.needs_backward and config.micro_batch_size is not None and config.objective.loss == "lm":
        yield "micro_batch_size", f"{chosen} takes the gradient of objective.loss=lm, a mean over tokens, at once"
    if model.checkpoint_activations and not optimizer.needs_backward:
        yield "model.checkpoint_activations", f"{chosen} takes no gradient, so it keeps no activations; use false"
    if model.checkpoint_activations and config.peft.name == "prefix":
        why = "peft=prefix gives each layer keys and values, which checkpointing drops"
        yield "model.checkpoint_activations", f"{why}; use false"
    if optimizer.needs_backward and not config.objective.is_differentiable:
        why = f"it has no gradient, and {chosen} needs one"
        yield "objective.loss", f"{why}; use {config.objective.differentiable_loss}"
    if optimizer.picks_rate:
        methods = sorted({row.peft for row in ROWS})
        if config.peft.name not in methods:
            having = join(f"peft={method}" for method in methods)
            yield "optimizer.lr", f"there are rates to begin with for {having} alone: give a number"
        for key, value in {"engine": config.engine.name, "init": config.init}.items():
            if value != "none":
                yield "optimizer.lr", f"rates are tried without {key}={value}: give a number"
    if optimizer.name == "linear_probe" and config.init != "linear_probe":
        yield "init", "optimizer=linear_probe needs init=linear_probe"
    if optimizer.name == "linear_probe" and config.steps:
        other = "to train on from the probe, choose another optimizer and keep init=linear_probe"
        yield "steps", f"optimizer=linear_probe takes no step: give 0; {other}"
    asked = max(config.eval_at_forwards, default=0)
    total = (config.forwards or config.passes(config.steps)) if asked else 0
    if asked > total:
        yield "eval_at_forwards", f"the run has {total} forwards: give at most {total}"
    if model.dtype != "float32":
        if not optimizer.replayable:
            why = f"{chosen} rounds its updates to the nearest value, and most would be lost"
            yield "model.dtype", f"{why}; use float32, with model.compute_dtype=bfloat16 or float16 for the forwards"
        if getattr(optimizer, "noise", None) == "torch":
            yield "model.dtype", "optimizer.noise=torch repeats the steps of the published code, in float32"
        if model.quantize != "none":
            why = "it is how the weights of a base that is not quantised are stored"
            yield "model.dtype", f"{why}; use float32, in which the other weights stay"
    if model.quantize != "none" and config.peft.name == "none":
        others = join(name for name in PEFT.names if name != "none")
        why = "peft=none trains all weights, and a quantised base is frozen"
        yield "model.quantize", f"{why}; use one of peft={others}, or model.quantize=none"
    if model.quantize != "none" and config.engine.name != "none":
        yield "model.quantize", f"engine={config.engine.name} computes with the float weights; use none"


def _streaming(config: Config) -> Conflicts:
    """Reject what would read the layers once per token, write them, or hold them in memory."""
    model, optimizer = config.model, config.optimizer
    if config.peft.name in ("none", "prefix"):
        others = join(name for name in PEFT.names if name not in ("none", "prefix"))
        yield "peft", f"with model.stream=true the base is only read; use one of peft={others}"
    if config.objective.name == "generate":
        yield "model.stream", "objective=generate reads all layers for each token; use false"
    if optimizer.needs_backward:
        yield "model.stream", f"optimizer={optimizer.name} keeps the layers for its gradient; use false"
    for key, value in {"engine": config.engine.name, "init": config.init}.items():
        if value != "none":
            yield key, "model.stream=true does not go with it; use none"
    if model.dtype != "float32":
        yield "model.dtype", "with model.stream=true the base stays as its file has it; use float32 for the rest"


def _engine(config: Config) -> Conflicts:
    """Reject what an engine does not compute: it takes prompts, and follows a LoRA, or updates that are sums of c z."""
    engine, optimizer, peft = config.engine, config.optimizer, config.peft.name
    if config.objective.name not in ENGINE_OBJECTIVES.names:
        objectives = join(f"objective={name}" for name in ENGINE_OBJECTIVES.names)
        yield "engine", f"objective={config.objective.name} has no engine, only {objectives} have one"
    if peft not in ("none", "lora"):
        yield "engine", f"peft={peft} has no engine, only peft=none and peft=lora"
    if engine.name == "openai" and peft != "lora":
        yield "engine", f"peft={peft}: a server takes adapters alone; use peft=lora"
    chosen = f"engine={engine.name}"
    if config.data.as_released and config.objective.name == "generate":
        yield "data.as_released", f"{chosen} ends completions at texts, not at tokens; give false"
    if getattr(config.peft, "head", False):
        yield "peft.head", f"{chosen} takes the matrices of a LoRA alone"
    if config.init != "none":
        yield "init", f"{chosen} computes no hidden states; use init=none"
    if optimizer.needs_backward or not optimizer.replayable:
        yield "optimizer", f"{chosen} computes no gradients; use optimizer=mezo"
    if not optimizer.has_engine:
        yield "optimizer", f"{chosen}: an engine has not computed its forwards yet; use optimizer=mezo, es or fzoo"
    if peft == "none" and not optimizer.adds_directions:
        why = "with all parameters the engine follows updates that are sums of c z alone, those of mezo, es and fzoo"
        yield "optimizer", f"{chosen}: {why}, without an anchor; or use peft=lora"
    if getattr(optimizer, "noise", None) == "torch":
        yield "optimizer.noise", f"{chosen} draws z by element; use gaussian"
    for key, dtype in {"model.dtype": config.model.dtype, "model.compute_dtype": config.model.compute_dtype}.items():
        if dtype != "float32":
            yield key, "it is that of mezo's own copy, which is float32 beside an engine; use engine.dtype"
    if config.micro_batch_size is not None:
        yield "micro_batch_size", f"{chosen} makes its batches itself; leave it out"
