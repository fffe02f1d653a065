#!/usr/bin/env python3
"""Measure the tokens per second of a population's completions by vLLM and by the model itself, and how they agree.

    mezo engine install
    python scripts/measure/measure_engine_generation.py --model FOLDER [--members 1 4 16] [--tensor-parallel 2]

Each member is a LoRA at theta + eps z (or with --peft none all parameters), and completes the same prompts greedily.
The two ways take turns; medians are printed, by the clock and by the time of the CPUs (which other work on the machine
changes less), and the shares of equal texts. The engine's scores are compared with the model's own when it starts (the
line `engine its scores`).
"""

import argparse
import logging
import os
import statistics
import time
from pathlib import Path

import torch

from mezo_cli import data
from mezo_cli.config.compose import build_config
from mezo_cli.engine.answers import EngineAnswers
from mezo_cli.engine.engine import Engine
from mezo_cli.engine.process import EngineProcess
from mezo_cli.models.decoding import Completion
from mezo_cli.objectives.generation import Generation
from mezo_cli.perturb.noise import Direction
from mezo_cli.training.load import encode_rows, load_session


def settings(given: argparse.Namespace) -> list[str]:
    """Return the words of a run's config."""
    words = ["task=demo-arithmetic", "data=demo", "model=smollm2-135m", f"model.path={given.model.resolve()}"]
    words += [
        "model.device=cpu",
        "objective=generate",
        f"objective.max_new_tokens={given.tokens}",
        "task.generate.stop=[]",
    ]
    words += ["objective.reward=contains", f"peft={given.peft}", "optimizer=es", f"optimizer.eps={given.eps}"]
    words += [
        "engine=vllm",
        f"engine.max_loras={max(given.members)}",
        f"engine.tensor_parallel={given.tensor_parallel}",
    ]
    return [*words, "engine.memory=400000000"]


def cpu_seconds(session: int) -> float:
    """Return the CPU time of the processes of a session, an engine's: user and system."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@torch.no_grad()
def main() -> None:
    """Start the engine and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder of a decoder")
    parser.add_argument("--members", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--peft", default="lora")
    parser.add_argument("--eps", type=float, default=0.01)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="that are generated for each prompt")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("mezo").setLevel(logging.INFO)
    config = build_config(settings(given))
    session = load_session(config, trains=True)
    rows = encode_rows(session.encoder, data.load_splits(config)).train[: given.rows]
    session.exclude_unreachable(rows[0], rows)
    assert isinstance(session.objective, Generation)
    objective, completer = session.objective, session.objective.completer
    batch = objective.collate(rows)

    def complete() -> torch.Tensor:
        said.append([one for (one,) in objective._complete(batch)])
        return torch.zeros(())

    def member_texts(count: int, step: int) -> list[list[Completion]]:
        said.clear()
        session.forward.losses_of([Direction(1, step, k) for k in range(count)], given.eps, complete, (1,))
        return list(said)

    said: list[list[Completion]] = []
    engine = Engine(config, EngineAnswers.longest(session.objective, rows))
    try:
        EngineAnswers.attach(session.objective, engine, rows[:2])
        by_engine = completer.engine
        assert isinstance(engine._process, EngineProcess)
        session_number = engine._process.pid
        for count in given.members:
            seconds: dict[str, list[float]] = {"model": [], "engine": []}
            of_cpus: dict[str, list[float]] = {"model": [], "engine": []}
            equal, total = 0, 0
            for step in range(given.repeats + 1):
                texts = {}
                for way in seconds:
                    completer.engine = by_engine if way == "engine" else None
                    began, cpu_began = time.perf_counter(), time.process_time() + cpu_seconds(session_number)
                    texts[way] = member_texts(count, step)
                    if step:  # the first is not timed
                        seconds[way].append(time.perf_counter() - began)
                        of_cpus[way].append(time.process_time() + cpu_seconds(session_number) - cpu_began)
                pairs = [
                    (a.ids, b.ids) for x, y in zip(*texts.values(), strict=True) for a, b in zip(x, y, strict=True)
                ]
                equal, total = equal + sum(a == b for a, b in pairs), total + len(pairs)
            tokens = sum(len(one.ids) for of_member in texts["model"] for one in of_member)
            print(f"{count:3} members, {given.peft}, TP {given.tensor_parallel}: {equal} of {total} texts are equal")
            for unit, times in (("second", seconds), ("CPU second", of_cpus)):
                rates = {way: tokens / statistics.median(of_way) for way, of_way in times.items()}
                ratio = f"ratio {rates['engine'] / rates['model']:.2f}"
                shown = f"model {rates['model']:8.1f}, engine {rates['engine']:8.1f}, {ratio}"
                print(f"    tokens per {unit:10}  {shown}", flush=True)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
