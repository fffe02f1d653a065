"""Measure what a step costs on this machine: in each compute dtype, with the whole run's time, and beside its rival.

    python -m mezo_cli.diagnosis.cost < config.yaml     # in a child process: three steps, and one line of JSON

The honest rival of MeZO's memory is backpropagation with checkpointed activations. Each method takes its steps in a
process of its own, so that none sees the memory of another. The peak is that of the process (of the allocator on a GPU)
beyond what it had after the imports, loading included.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from mezo_cli.adapters.settings import LoraConfig
from mezo_cli.config.base import SettingError
from mezo_cli.config.optimizers import AdamWConfig
from mezo_cli.config.schema import Config
from mezo_cli.config.stored import from_yaml, to_yaml
from mezo_cli.config.validation import check_rules
from mezo_cli.console import format_duration
from mezo_cli.diagnosis.findings import DOUBT, NOTE, OK, UNKNOWN, Deadline, Section, count, percent
from mezo_cli.errors import UserError, join
from mezo_cli.models.loading import DTYPES, worth_measuring
from mezo_cli.models.quantized import count_parameters
from mezo_cli.models.stored_tensors import format_names
from mezo_cli.objectives.collate import batches_by_length
from mezo_cli.optim import OPTIMIZERS, Optimizer
from mezo_cli.process.memory import free_memory, peak_memory, reset_peak_memory, trim_malloc
from mezo_cli.process.signals import import_libraries, import_torch
from mezo_cli.session.opening import Prepared, opened
from mezo_cli.session.session import Session
from mezo_cli.training.loop import TRAIN_ROWS

STEPS = 5  # that are timed in each dtype, after one that is not
CLEARLY = 1.15  # times the seconds of the other dtype
RIVAL_STEPS = 3
MOST_SECONDS = 120.0  # for all processes of the rival
ADAM_BYTES = 12  # of a trained parameter: its gradient and two moments, in float32
LATE = "was not measured: too little time"


def check(prepared: Prepared, loading: float, deadline: Deadline) -> Section:
    """Measure steps and an evaluation of the run, which was prepared in `loading` seconds; add them up."""
    section, session, config = Section("cost"), prepared.session, prepared.session.config
    train, dev, step = prepared.rows["train"], prepared.rows["dev"], dict[str, Any]()
    report_trainable(section, session, prepared.unreachable)
    if config.steps:
        costs = measure_steps(prepared, deadline)
        judge_speed(section, costs, config)
        step = costs[config.model.computes_in]
    session.forward.set_compute_dtype(session.loaded.compute_dtype)
    first, row_seconds = measure_rows(prepared)
    passes = Counter(config.optimizer.count_forwards(config.steps, config.steps))
    seconds = sum(passes.values()) * (step["seconds"] / step["passes"] if step else 0.0)
    if config.init == "linear_probe":
        passes["forwards"] += -(-len(train) // config.batch_size)
    evaluations = sum(map(config.evaluates_at, range(config.steps + 1)))
    rows = evaluations * len(dev) + min(TRAIN_ROWS, len(train))
    seconds += rows * row_seconds + len(prepared.rows.get("test", ())) * first
    seconds += sum(len(prepared.rows[name]) for name in ("train", "dev") if keeps(prepared, name)) * (
        first - row_seconds
    )
    seconds = loading + (seconds if config.max_seconds is None else min(seconds, config.max_seconds))
    back = f" and {passes['backwards']:,} backwards" if passes["backwards"] else ""
    text = (
        f"the whole run: {config.steps:,} steps, {passes['forwards']:,} forwards{back}, {evaluations:,} evaluations of"
        f" {len(dev):,} dev rows: about {format_duration(seconds)} on this machine"
    )
    figures: dict[str, Any] = {"steps": config.steps, "evaluations": evaluations, **passes}
    section.add(OK, "plan", text, seconds=seconds, **figures)
    return section


def keeps(prepared: Prepared, split: str) -> bool:
    """Return whether what frozen layers compute for the rows of a split is kept; not every split has to fit."""
    frozen = prepared.session.objective.frozen
    return frozen is not None and frozen.keeps(prepared.rows[split][0])


def measure_rows(prepared: Prepared) -> tuple[float, float]:
    """Return the seconds per row of an evaluation: of the first, which computes states that are kept, and of the next.

    The same number twice where none are kept.
    """
    session, dev, kept = prepared.session, prepared.rows["dev"], keeps(prepared, "dev")
    size = min(session.config.eval_batch_size, len(dev))
    rows = [dev[i * len(dev) // size] for i in range(size)]
    if kept:  # those of a batch of an evaluation: their states are computed together
        batches = batches_by_length(dev, size)
        rows = [dev[i] for i in batches[len(batches) // 2]]
    seconds = []
    for _ in range(2 if kept else 1):
        start = time.perf_counter()
        with torch.no_grad():
            session.objective.measure(session.objective.collate(rows))[0].cpu()
        seconds.append((time.perf_counter() - start) / len(rows))
    return seconds[0], seconds[-1]


def report_trainable(section: Section, session: Session, unreachable: Mapping[str, int]) -> None:
    """Report the trainable tensors; doubt those that would be trained, but that the loss does not depend on."""
    trainable, total = session.trainable(), count_parameters(session.loaded.model)
    names = [name.removeprefix(f"{session.loaded.model.base_model_prefix}.") for name in trainable["names"]]
    shown = "" if session.loaded.adapter is None else f": {format_names(names)}"
    text = (
        f"peft={session.config.peft.name} trains {trainable['count']:,} of {total:,} parameters"
        f" ({percent(trainable['share'])}), {count(len(names), 'tensor')}{shown}"
    )
    section.add(OK, "trainable", text, count=trainable["count"], share=trainable["share"], tensors=len(names))
    if unreachable:
        scalars = sum(unreachable.values())
        advice = "right for a pooler or an unused head; if you meant to train them, choose another objective or peft"
        tensors = f"{count(len(unreachable), 'tensor')} ({percent(scalars / total)} of the model)"
        text = f"the loss does not depend on {tensors}, which stay as they are: {format_names(unreachable)}"
        section.add(DOUBT, "unreachable", text, advice, tensors=list(unreachable), count=scalars)


def measure_steps(prepared: Prepared, deadline: Deadline) -> dict[str, dict[str, Any]]:
    """Return the cost of a step in each compute dtype for which there is time, the run's own first.

    The dtypes take turns, so that other work on the machine slows both. The steps have lr 0, so theta stays as it is.
    Where states of train are kept, in the run's dtype, no other is measured, and all steps have the rows of the first.

    Returns:
        dtype -> `seconds` of a step (the median of `steps` that are timed), `passes`: its forwards and backwards,
        `peak_bytes` of the process, or of the GPU.
    """
    config, sampler, train = prepared.session.config, prepared.sampler, prepared.rows["train"]
    chosen = config.optimizer.replace(lr=0.0)
    optimizer: Optimizer = OPTIMIZERS.implementation(chosen.name)(chosen, config.seed, config.steps)
    if optimizer.replayable:
        optimizer.keep_start(prepared.session.params)
    session = dataclasses.replace(prepared.session, optimizer=optimizer)
    kept, own = keeps(prepared, "train"), config.model.computes_in
    dtypes = [own] if kept else sorted(worth_measuring(session.loaded.device, own), key=lambda name: name != own)
    times: dict[str, list[float]] = {}
    peaks, passes = Counter[str](), Counter[str]()
    step = 0
    for turn in range(1 + STEPS):
        numbers = sampler.batch(0 if kept else turn)
        rows, weights = [train[i] for i in numbers], sampler.weights(numbers)
        for dtype in dtypes:
            expected = min(times.get(dtype) or [taken[-1] for taken in times.values()], default=0.0)
            if times and not deadline.allows(expected):
                continue
            session.forward.set_compute_dtype(DTYPES[dtype])
            reset_peak_memory()
            start = time.perf_counter()
            with torch.enable_grad() if config.optimizer.needs_backward else torch.no_grad():
                session.step(rows, step, weights)
            trim_malloc()
            if session.loaded.device.type == "cuda":
                torch.cuda.synchronize(session.loaded.device)
            times.setdefault(dtype, []).append(time.perf_counter() - start)
            peaks[dtype] = max(peaks[dtype], peak_memory(session.loaded.device))
            before, after = (sum(optimizer.count_forwards(n).values()) for n in (step, step + 1))
            passes[dtype] = after - before
            step += 1
    costs = {}
    for dtype, seconds in times.items():
        timed = seconds[1:] or seconds  # the first step allocates buffers
        figures = {"passes": passes[dtype], "peak_bytes": peaks[dtype], "steps": len(timed)}
        costs[dtype] = {"seconds": statistics.median(timed), **figures}
    return costs


def judge_speed(section: Section, costs: Mapping[str, dict[str, Any]], config: Config) -> None:
    """Report the cost of a step in each dtype; doubt a dtype that is rounded and slower."""
    steps = [f"{name} {c['seconds']:.2g} s per step, peak {c['peak_bytes'] / 1e9:.2f} GB" for name, c in costs.items()]
    text = f"batch_size={config.batch_size}: {'; '.join(steps)}"
    figures: dict[str, Any] = {"costs": costs}
    verdict, advice = OK, ""
    if len(costs) > 1:
        faster = min(costs, key=lambda dtype: costs[dtype]["seconds"])
        ratio = max(measured["seconds"] for measured in costs.values()) / costs[faster]["seconds"]
        figures |= {"faster": faster, "ratio": ratio}
        text += f". {faster} is faster here, {ratio:.2f} times"
        if faster != config.model.computes_in and ratio >= CLEARLY:
            verdict, advice = NOTE, f"model.compute_dtype={faster} saves time if the signal allows it"
            if faster == "float32":
                verdict, advice = DOUBT, "model.compute_dtype=float32 is exact, too"
            finer = costs.get("float16", costs[config.model.computes_in])
            if faster == "bfloat16" and CLEARLY * costs[faster]["seconds"] > finer["seconds"]:
                advice += "; float16, about as fast, keeps 10 bits of a number where bfloat16 keeps 7"
    section.add(verdict, "step", text, advice, **figures)


# --- beside backpropagation ---


def judge_rival(section: Section, prepared: Prepared, deadline: Deadline) -> None:
    """Add the finding: memory and time of a step by the run's optimizer, by AdamW with the run's peft, with a LoRA."""
    session, run = prepared.session, prepared.session.config
    if not run.steps or run.optimizer.needs_backward or run.engine.name != "none":
        return
    end, name = Deadline(min(MOST_SECONDS, deadline.left)), run.optimizer.name
    cached = run.model if keeps(prepared, "train") else run.model.replace(cache_bytes=0)
    of_run = _measured(run.replace(model=cached), end)
    if isinstance(of_run, dict):  # which keeps the states of its three steps' rows
        of_run["peak_bytes"] += prepared.states_bytes
    found = {name: of_run}
    # AdamW with checkpointed activations: with the run's peft, and with a LoRA
    model = run.model.replace(checkpoint_activations=True, dtype="float32", stream=False, stream_memory=0)
    changed = run.replace(model=model, optimizer=AdamWConfig(name="adamw", lr=1e-5), init="none", checkpoint="full")
    lora = changed.replace(peft=run.peft if isinstance(run.peft, LoraConfig) else LoraConfig(name="lora"))
    for rival, config in {f"adamw peft={run.peft.name}": changed, "adamw peft=lora": lora}.items():
        found[rival] = _too_large(config, session) or _measured(config, end)
    measured = {one: figures for one, figures in found.items() if not isinstance(figures, str)}
    texts, fits = [], []
    for one, figures in found.items():
        if isinstance(figures, str):
            texts.append(f"{one} {figures}")
            continue
        texts.append(f"{one} {figures['peak_bytes'] / 1e9:.2g} GB, {figures['seconds']:.2g} s per step")
        if isinstance(of_run, dict) and one != name:
            texts[-1] += f" (the time of {figures['seconds'] / of_run['seconds']:.1f} steps of {name})"
            fits += [one] if figures["peak_bytes"] <= of_run["peak_bytes"] else []
    verdict, advice = (NOTE, f"{join(fits)} fits in that memory, and learns more per step") if fits else (OK, "")
    if len(measured) < 2:
        verdict, advice = UNKNOWN, "give more --seconds" if any(LATE in one for one in found.values()) else ""
    text = f"backpropagation with checkpointed activations beside it, memory beyond the imports: {'; '.join(texts)}"
    section.add(verdict, "backprop", text, advice, measured=measured)


def _too_large(config: Config, session: Session) -> str:
    """Return why a rival is not run; empty if weights, gradient and moments fit in free memory."""
    total = count_parameters(session.loaded.model)
    trained = session.params.count if config.peft == session.config.peft else 0
    needed, device = 4 * total + ADAM_BYTES * trained, session.loaded.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    return f"needs about {needed / 1e9:.2g} GB, and {free / 1e9:.2g} GB are free" if needed > free else ""


def _measured(config: Config, deadline: Deadline) -> dict[str, float] | str:
    """Return `peak_bytes` beyond the imports, and `seconds` per step; or why they were not measured."""
    command, left = [sys.executable, "-m", "mezo_cli.diagnosis.cost"], max(deadline.left, 0.01)
    try:
        check_rules(config)
        done = subprocess.run(command, input=to_yaml(config), capture_output=True, text=True, timeout=left, check=False)
    except SettingError as error:
        return f"was not measured: {error}"
    except subprocess.TimeoutExpired:
        return LATE
    if done.returncode:
        return f"was not measured: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Read a config, take its first steps, and print what they took as a line of JSON; nothing is written."""
    import_torch()
    import_libraries()  # what is imported later is no memory of the steps
    from mezo_cli.data import load_splits
    from mezo_cli.data.sampling import BatchSampler

    config, seconds = from_yaml(sys.stdin.read()), []
    reset_peak_memory()
    before = peak_memory(torch.device("cpu"))
    try:
        train = load_splits(config).train
        session = opened(config, trains=True)  # until the process ends
        sampler = BatchSampler(len(train), config.batch_size, config.seed)
        batches = [session.encoder.encode_all([train[i] for i in sampler.batch(step)]) for step in range(RIVAL_STEPS)]
        session.exclude_unreachable(batches[0][0])
        if session.keep_states(batches[0]):  # as all are, later in the run
            batches = [batches[0]] * RIVAL_STEPS
        if session.optimizer.replayable:
            session.optimizer.keep_start(session.params)
        for step, rows in enumerate(batches):
            start = time.perf_counter()
            with torch.no_grad():
                session.step(rows, step)
            trim_malloc()
            seconds.append(time.perf_counter() - start)
    except UserError as error:
        sys.exit(str(error))
    device = session.loaded.device
    peak = peak_memory(device) - (before if device.type != "cuda" else 0)
    print(json.dumps({"peak_bytes": peak, "seconds": statistics.median(seconds[1:])}))


if __name__ == "__main__":
    main()
