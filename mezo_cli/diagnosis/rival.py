"""Measure backpropagation with checkpointed activations beside MeZO's step: the honest rival of its memory.

    python -m mezo_cli.diagnosis.rival < config.yaml     # in a child process: three steps, and one line of JSON

Each method takes its steps in a process of its own, so that none sees the memory of another. The peak is that of the
process (of the allocator on a GPU) beyond what it had after the imports, loading included.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping

import torch

from mezo_cli.adapters.settings import LoraConfig
from mezo_cli.config.base import SettingError
from mezo_cli.config.optimizers import AdamWConfig
from mezo_cli.config.schema import Config
from mezo_cli.config.stored import from_yaml, to_yaml
from mezo_cli.config.validation import check_rules
from mezo_cli.diagnosis.findings import NOTE, OK, UNKNOWN, Deadline, Section
from mezo_cli.errors import UserError, join
from mezo_cli.models.quantized import count_parameters
from mezo_cli.process.memory import free_memory, peak_memory, reset_peak_memory, trim_malloc
from mezo_cli.process.signals import import_libraries, import_torch
from mezo_cli.session.session import Session

STEPS = 3
MOST_SECONDS = 120.0  # for all of them
ADAM_BYTES = 12  # of a trained parameter: its gradient and two moments, in float32

LATE = "was not measured: too little time"
Measured = Mapping[str, float]  # `peak_bytes` beyond the imports, and `seconds` per step


def check(section: Section, session: Session, deadline: Deadline) -> None:
    """Add the finding: memory and time of a step by the run's optimizer, by AdamW with the run's peft, with a LoRA."""
    run = session.config
    if not run.steps or run.optimizer.needs_backward or run.engine.name != "none":
        return
    end, name = Deadline(min(MOST_SECONDS, deadline.left)), run.optimizer.name
    found = {name: _measured(run, end)}
    # AdamW with checkpointed activations: with the run's peft, and with a LoRA
    model = run.model.replace(checkpoint_activations=True, dtype="float32", stream=False, stream_memory=0)
    changed = run.replace(model=model, optimizer=AdamWConfig(name="adamw", lr=1e-5), init="none", checkpoint="full")
    lora = changed.replace(peft=run.peft if isinstance(run.peft, LoraConfig) else LoraConfig(name="lora"))
    for rival, config in {f"adamw peft={run.peft.name}": changed, "adamw peft=lora": lora}.items():
        found[rival] = _too_large(config, session) or _measured(config, end)
    measured = {one: figures for one, figures in found.items() if not isinstance(figures, str)}
    of_run, texts, fits = measured.get(name), [], []
    for one, figures in found.items():
        if isinstance(figures, str):
            texts.append(f"{one} {figures}")
            continue
        texts.append(f"{one} {figures['peak_bytes'] / 1e9:.2g} GB, {figures['seconds']:.2g} s per step")
        if of_run and one != name:
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


def _measured(config: Config, deadline: Deadline) -> Measured | str:
    command, left = [sys.executable, "-m", "mezo_cli.diagnosis.rival"], max(deadline.left, 0.01)
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
    from mezo_cli.data.batch_sampler import BatchSampler
    from mezo_cli.session.opening import opened

    config, seconds = from_yaml(sys.stdin.read()), []
    reset_peak_memory()
    before = peak_memory(torch.device("cpu"))
    try:
        train = load_splits(config).train
        session = opened(config, trains=True)  # until the process ends
        sampler = BatchSampler(len(train), config.batch_size, config.seed)
        batches = [session.encoder.encode_all([train[i] for i in sampler.batch(step)]) for step in range(STEPS)]
        session.exclude_unreachable(batches[0][0])
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
