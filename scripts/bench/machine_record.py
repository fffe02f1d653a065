"""One JSON file per machine with what bench_step.py measured on it: describe the machine, read, merge, write."""

import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

FORMAT = 1
FOLDER = Path(__file__).resolve().parents[2] / "docs" / "measurements" / "machines"
# Flags of /proc/cpuinfo (x86: flags, Arm: Features) that decide how fast matrix products and the noise are.
INSTRUCTION_SETS = (
    *("avx", "fma", "f16c", "avx2", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "svebf16", "sme"),
)
MACHINE_KEYS = ("cpu", "instruction_sets", "cores", "memory_gib", "gpu", "system")
RESULT_KEYS = (
    *("shape", "batch", "tokens", "rounds", "rows"),
    *("threads", "device", "load", "commit", "dirty", "versions", "date", "command"),
)
ROW_KEYS = ("name", "seconds", "reference_over_this", "this_over_floor")
SPREAD = ("min", "median", "max")
LIMITS = ("MEZO_SIMD", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def limits() -> list[str]:
    """Return the environment variables that keep instruction sets from being used, as NAME=value."""
    return [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]


def describe(device: torch.device) -> dict[str, Any]:
    """Return what decides the speed of this machine: names of CPU and GPU, instruction sets, cores, memory in GiB."""
    name, sets = read_cpuinfo(Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else "")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": name or platform.processor() or platform.machine(),
        "instruction_sets": sets,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(pages / 2**30),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


def read_cpuinfo(text: str) -> tuple[str, list[str]]:
    """Return the CPU's name and those of its instruction sets that are in `INSTRUCTION_SETS`, from /proc/cpuinfo.

    A virtual machine may hide the model's name: then family and model tell the generation.
    """
    fields = dict(re.findall(r"^([^\n:]*?)\s*: (.*)$", text, re.M))
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    name = fields.get("model name", "")
    if name and "cpu family" in fields:
        name += f", family {fields['cpu family']} model {fields.get('model', '?')}"
    return name, [one for one in INSTRUCTION_SETS if one in flags]


def load_records() -> dict[str, dict[str, Any]]:
    """Return name -> record, of every file in docs/measurements/machines.

    Raises:
        ValueError: when a record lacks something.
    """
    return {path.stem: check(json.loads(path.read_text()), path.name) for path in sorted(FOLDER.glob("*.json"))}


def check(record: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a record that has all that is asked of one.

    Raises:
        ValueError: when it lacks something; says what.
    """
    if record.get("format") != FORMAT:
        raise ValueError(f"{name}: format is {record.get('format')!r}, not {FORMAT}")
    missing = [f"machine.{key}" for key in MACHINE_KEYS if key not in record["machine"]]
    for result in record["results"]:
        missing += [f"results.{key}" for key in RESULT_KEYS if key not in result]
        for row in result["rows"]:
            missing += [f"{row.get('name')}.{key}" for key in ROW_KEYS if key not in row]
            spreads = [row[key] for key in ROW_KEYS[1:] if row.get(key) is not None]
            missing += [f"{row['name']}.{part}" for spread in spreads for part in SPREAD if part not in spread]
    if missing:
        raise ValueError(f"{name} lacks {', '.join(missing)}")
    return record


def merge(path: Path, machine: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a record with these results, and those of other shapes, batches and limits that the file at `path` has.

    Raises:
        ValueError: when the file is of another machine.
    """
    if path.exists():
        before = check(json.loads(path.read_text()), path.name)
        if before["machine"] != machine:
            raise ValueError(f"{path} is of another machine ({before['machine']['cpu']}): choose another file")
        made = [identity(result) for result in results]
        results = [result for result in before["results"] if identity(result) not in made] + results
    ordered = sorted(results, key=identity)
    return check({"format": FORMAT, "machine": machine, "results": ordered}, path.name)


def identity(result: dict[str, Any]) -> tuple[str, str, list[str]]:
    """Return what tells the results of a machine apart: shape, batch and limits."""
    return result["shape"], result["batch"], result.get("limits", [])


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
