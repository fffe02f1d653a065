"""Reject combinations of settings that are individually valid but incompatible."""

import importlib.util
from collections.abc import Iterable

from mezo_cli.config.base import SettingError
from mezo_cli.config.registry import ENGINE_OBJECTIVES, LOGGERS, OBJECTIVES, PEFT
from mezo_cli.config.schema import Config
from mezo_cli.errors import UserError, did_you_mean, install, join, without_credentials


def check_rules(config: Config) -> None:
    """Apply every rule in turn."""
    _check_values(config)
    _check_task(config)
    _check_objective(config)
    _check_optimizer(config)
    _check_storage(config)
    _check_forwards(config)
    _check_batches(config)
    _check_quantize(config)
    _check_linear_probe(config)
    _check_demonstrations(config)
    _check_engine(config)


def _noise(config: Config) -> str | None:
    """Return the distribution of z; None for an optimizer that draws none."""
    return getattr(config.optimizer, "noise", None)


def _check_values(config: Config) -> None:
    """Reject values that are never valid.

    config.yaml and sweep.json would keep the password in an address; both loggers of one name would write to one
    folder.
    """
    values = {"model.path": config.model.path, "task.hub.path": config.task.hub.path}
    for key, value in values.items():
        if value is not None and without_credentials(value) != value:
            why = "the address has a user name, a password or a key, which the run would store"
            raise SettingError(key, f"{key}={without_credentials(value)}: {why}; log in by hf auth login or HF_TOKEN")
    names = config.logger.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SettingError("logger.names", f"logger.names=[{join(names)}]: {twice} is named twice")


def _check_objective(config: Config) -> None:
    """Reject what the objective does not compute."""
    config.objective.check(config)
    if config.data.keep is not None and config.objective.name != "generate":
        why = f"objective={config.objective.name} does not read it, only objective=generate"
        raise SettingError("data.keep", f"data.keep={config.data.keep}: {why}")
    for key, name in (("metric", config.metric), ("task.metric", config.task.metric)):
        known = config.objective.metric_names
        if name is not None and known is not None and name not in (*known, "loss"):
            names = known if key == "task.metric" else [*known, "loss"]
            raise SettingError(key, f"{key}={name}: not one of {join(names)}{did_you_mean(name, names)}")


def _check_optimizer(config: Config) -> None:
    optimizer, chosen = config.optimizer, f"optimizer={config.optimizer.name}"
    if config.checkpoint == "trajectory" and not optimizer.replayable:
        raise SettingError("checkpoint", f"checkpoint=trajectory: {chosen} leaves no trajectory; use checkpoint=full")
    optimizer.check()
    if optimizer.needs_backward and config.micro_batch_size is not None:
        raise SettingError(
            "micro_batch_size",
            f"micro_batch_size={config.micro_batch_size}: {chosen} keeps the activations of all rows for its gradient; "
            "micro-batches save memory only with forward passes",
        )
    objective = config.objective
    if optimizer.needs_backward and not objective.is_differentiable:
        why = f"has no gradient, and {chosen} needs one; use {objective.differentiable_loss}"
        raise SettingError("objective.loss", f"objective.loss={objective.loss} {why}")


def _check_storage(config: Config) -> None:
    """Reject methods whose update of weights in half precision would be lost, or rounded in another way by a replay."""
    if config.model.dtype == "float32":
        return
    key, shown = "model.dtype", f"model.dtype={config.model.dtype}"
    if not config.optimizer.replayable:
        why = f"optimizer={config.optimizer.name} rounds its updates to the nearest value, and most would be lost"
        raise SettingError(key, f"{shown}: {why}; use float32, with model.compute_dtype=bfloat16 for the forwards")
    if _noise(config) == "torch":
        raise SettingError(key, f"{shown}: optimizer.noise=torch repeats the steps of the published code, in float32")


def _check_forwards(config: Config) -> None:
    """Reject evaluations after the last step."""
    asked = max(config.eval_at_forwards, default=0)
    total = (config.forwards or config.calls(config.steps)) if asked else 0
    if asked > total:
        why = f"the run has {total} forwards"
        raise SettingError("eval_at_forwards", f"eval_at_forwards=[..., {asked}]: {why}: give at most {total}")


def _check_batches(config: Config) -> None:
    """Reject balanced batches where there is no fixed set of labels, or no room for one row of each."""
    key, labels = "data.batches", len(config.task.labels)
    if config.data.weights == "none" and config.data.batches != "balanced":
        raise SettingError("data.weights", f"data.weights=none: data.batches={config.data.batches} has no weights")
    if config.data.batches != "balanced":
        return
    if not config.objective.needs_labels:
        why = f"objective={config.objective.name} has no fixed set of labels; use data.batches=shuffled"
        raise SettingError(key, f"{key}=balanced: {why}")
    if config.batch_size < labels:
        why = f"data.batches=balanced takes a row of each of {labels} labels: give {labels} or more"
        raise SettingError("batch_size", f"batch_size={config.batch_size}: {why}")


def _check_quantize(config: Config) -> None:
    """Reject a quantised base that would be trained, or not be float32 otherwise, and what the peft method rejects."""
    config.peft.check(config)
    how = config.model.quantize
    if how == "none":
        return
    key, shown = "model.quantize", f"model.quantize={how}"
    if config.peft.name == "none":
        others = join(name for name in PEFT.names if name != "none")
        why = "peft=none trains all weights, and a quantised base is frozen"
        raise SettingError(key, f"{shown}: {why}; use one of peft={others}, or model.quantize=none")
    if config.model.dtype != "float32":
        why = f"model.dtype={config.model.dtype} is how the weights of a base that is not quantised are stored"
        raise SettingError("model.dtype", f"{shown}: {why}; use float32, in which the other weights stay")
    if config.engine.name != "none":
        raise SettingError(key, f"{shown}: engine={config.engine.name} computes with the float weights; use none")


def _check_linear_probe(config: Config) -> None:
    if config.optimizer.name == "linear_probe":
        if config.init != "linear_probe":
            raise SettingError("init", f"init={config.init}: optimizer=linear_probe needs init=linear_probe")
        if config.steps:
            other = "to train on from the probe, choose another optimizer and keep init=linear_probe"
            raise SettingError("steps", f"steps={config.steps}: optimizer=linear_probe takes no step: give 0; {other}")
    if config.init == "linear_probe" and not config.objective.needs_labels:
        raise SettingError("init", f"init=linear_probe: objective={config.objective.name} scores no labels")
    if config.probe_c is not None and config.init != "linear_probe":
        raise SettingError("probe_c", f"probe_c={config.probe_c:g}: only init=linear_probe reads it")
    if config.init == "linear_probe" and not (config.peft.trains_output_layer or config.objective.has_head):
        why = f"peft={config.peft.name} neither trains nor saves the decoder that the probe is written into"
        raise SettingError(
            "init", f"init=linear_probe: {why}; use peft=none, head or lora with peft.head=true, or objective=cls"
        )


def _check_task(config: Config) -> None:
    """Reject a task without what the objective reads, before its data is read, and a name that would break tables."""
    task, name = config.task, config.task.name
    config.objective.check_task(task)
    if task.generate.system is not None and not task.generate.chat:
        raise SettingError("task.generate.system", "task.generate.system is read with task.generate.chat=true only")
    if task.bos_token_id is not None and task.generate.chat:
        why = "is not read with task.generate.chat=true, whose template begins the prompt"
        raise SettingError("task.bos_token_id", f"task.bos_token_id={task.bos_token_id} {why}")
    if len(name.splitlines()) > 1 or name.startswith("/") or ".." in name.split("/"):
        raise SettingError("task.name", f"task.name={name!r}: a name is one line, and no path that leads elsewhere")
    twice = next((column for column in task.columns if task.columns.count(column) > 1), None)
    if twice is not None:
        raise SettingError("task.columns", f"task.columns=[{join(task.columns)}]: {twice} is named twice")
    prompts = [task.generate.prompt, task.generate.answer, task.generate.gold, *task.choice.candidates]
    read = " ".join(filter(None, [*prompts, task.choice.prompt, task.choice.each, task.choice.right]))
    for target in task.rename.values():
        if target not in (*task.columns, task.label_column) and target not in read:
            why = f"the task reads no column {target}, only {join([*task.columns, task.label_column])}"
            raise SettingError("task.rename", f"task.rename: {why}{did_you_mean(target, task.columns)}")
    for source, labels in (("files", task.files.labels), ("hub", task.hub.labels)):
        if labels and len(labels) != len(task.labels):
            why = f"{len(labels)} names for {len(task.labels)} labels: give one for each, in the order of the labels"
            raise SettingError(f"task.{source}.labels", f"task.{source}.labels has {why}")


def _check_demonstrations(config: Config) -> None:
    """Reject demonstrations for what does not read them: training, and inputs that are no text to continue."""
    key, count = "task.demonstrations", config.task.demonstrations
    if not count:
        return
    if config.steps or config.init != "none":
        other = f"steps={config.steps}" if config.steps else f"init={config.init}"
        raise SettingError(key, f"{key}={count} is for an evaluation of the model, not with {other}; give steps=0")
    if not config.objective.demonstrates:
        reading = join(name for name, kind in OBJECTIVES.all() if kind.demonstrates)
        raise SettingError(key, f"{key}={count}: objective={config.objective.name} reads none, only {reading}")
    if config.objective.name == "generate" and (config.task.generate.chat or config.task.generate.answer is None):
        why = "task.generate.chat=true" if config.task.generate.chat else "no task.generate.answer to show"
        raise SettingError(key, f"{key}={count}: the task has {why}")


def _check_engine(config: Config) -> None:
    """Reject what an engine does not compute: it takes prompts, and follows a LoRA, or updates that are sums of c z."""
    engine, optimizer, peft = config.engine, config.optimizer, config.peft.name
    if engine.name == "none":
        return
    chosen = f"engine={engine.name}"
    if config.objective.name not in ENGINE_OBJECTIVES.names:
        objectives = join(f"objective={name}" for name in ENGINE_OBJECTIVES.names)
        why = f"objective={config.objective.name} has no engine, only {objectives} have one"
        raise SettingError("engine", f"{chosen}: {why}")
    if peft not in ("none", "lora"):
        raise SettingError("engine", f"{chosen}: peft={peft} has no engine, only peft=none and peft=lora")
    if engine.name == "openai" and peft != "lora":
        raise SettingError("engine", f"{chosen}: peft={peft}: a server takes adapters alone; use peft=lora")
    if config.data.as_released and config.objective.name == "generate":
        why = f"{chosen} ends completions at texts, not at tokens"
        raise SettingError("data.as_released", f"data.as_released=true: {why}; give false")
    if getattr(config.peft, "head", False):
        raise SettingError("peft.head", f"peft.head=true: {chosen} takes the matrices of a LoRA alone")
    if config.init != "none":
        raise SettingError("init", f"init={config.init}: {chosen} computes no hidden states; use init=none")
    name = optimizer.name
    if optimizer.needs_backward or not optimizer.replayable:
        raise SettingError("optimizer", f"optimizer={name}: {chosen} computes no gradients; use optimizer=mezo")
    if not optimizer.has_engine:
        why = "an engine has not computed its forwards yet"
        raise SettingError("optimizer", f"optimizer={name}: {chosen}: {why}; use optimizer=mezo, es or fzoo")
    if peft == "none" and not optimizer.adds_directions:
        why = "with all parameters the engine follows updates that are sums of c z alone, those of mezo, es and fzoo"
        raise SettingError("optimizer", f"optimizer={name}: {chosen}: {why}, without an anchor; or use peft=lora")
    if _noise(config) == "torch":
        raise SettingError("optimizer.noise", f"optimizer.noise=torch: {chosen} draws z by element; use gaussian")
    for key in ("dtype", "compute_dtype"):
        value = getattr(config.model, key)
        if value != "float32":
            why = "is that of mezo's own copy, which is float32 beside an engine; use engine.dtype"
            raise SettingError(f"model.{key}", f"model.{key}={value}: it {why}")
    if config.micro_batch_size is not None:
        why = f"{chosen} makes its batches itself"
        raise SettingError("micro_batch_size", f"micro_batch_size={config.micro_batch_size}: {why}; leave it out")
    if engine.name == "vllm":
        why = "this version starts no vLLM; start a server yourself, and use engine=openai peft=lora"
        raise SettingError("engine", f"engine=vllm: {why} (docs/how-to/engines.md)")


def check_quantizer(how: str) -> None:
    """Check that the package that quantises is there. It is located, not imported."""
    if how == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"model.quantize=nf4 needs bitsandbytes: {install('quantized')}")


def check_installed(names: Iterable[str]) -> None:
    """Check that the package of every logger is there. It is located, not imported."""
    for name in names:
        package = LOGGERS.load(name).package
        if importlib.util.find_spec(package) is None:
            how = install(name) if name in LOGGERS.built_in else f"pip install {package}"
            raise UserError(f"logger={name} needs a package: {how}")
