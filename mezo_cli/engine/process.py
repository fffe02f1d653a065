"""A server of vLLM that mezo starts: it listens on a Unix socket in a folder of its own, and ends with mezo."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mezo_cli.config.schema import VllmConfig
from mezo_cli.config.stored import of_server
from mezo_cli.engine import supervisor
from mezo_cli.engine.server import Server, UnixConnection

PROGRAM = "vllm.entrypoints.openai.api_server"
BLOCK = 32  # tokens: whole blocks are kept and shared. On a CPU vLLM's default is 128
MAX_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM allows for --max-lora-rank
VARIABLES = {
    "PYTHONSAFEPATH": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a local folder
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # for the sampled token after a prompt of the model's greatest length
}
BIND, GPUS = "VLLM_CPU_OMP_THREADS_BIND", "CUDA_VISIBLE_DEVICES"
# What torchrun and the like set for a rank: vLLM would take them for its own.
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMP_NUM_THREADS")


class VllmServer(Server):
    """A server of vLLM, as soon as it listens; `rank` is that of the LoRA, or None if all parameters are trained."""

    def __init__(self, settings: VllmConfig, model: Path, max_length: int, rank: int | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mezo-engine-")  # of mode 0700
        folder = Path(self._folder.name)
        self.socket, self._log = folder / "socket", folder / "log"
        super().__init__(settings, partial(UnixConnection, self.socket, settings.timeout), "vLLM", folder)
        (folder / "packages").mkdir()  # of mezo's environment the server sees this package alone
        (folder / "packages" / "mezo_cli").symlink_to(Path(__file__).resolve().parents[1])
        command = [of_server(settings, "python"), "-m", PROGRAM, *self._arguments(settings, model, max_length, rank)]
        variables = {**VARIABLES, "PYTHONPATH": str(folder / "packages"), "VLLM_RPC_BASE_PATH": str(folder)}
        variables["VLLM_SERVER_DEV_MODE" if rank is None else "VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", supervisor.__file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment(settings.tensor_parallel) | variables,
                start_new_session=True,  # Ctrl-C is mezo's alone
            )
        until = time.monotonic() + settings.timeout
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() >= until:
                why = self.describe_end() or f"it did not listen within engine.timeout={settings.timeout:g} s"
                self.close()
                self.fail(why)
            time.sleep(0.1)

    def _arguments(self, settings: VllmConfig, model: Path, max_length: int, rank: int | None) -> list[str]:
        options: dict[str, object] = {
            "model": model,
            "uds": self.socket,
            "served-model-name": "mezo",
            "tensor-parallel-size": settings.tensor_parallel,
            "dtype": settings.dtype,
            "kv-cache-memory-bytes": settings.memory,
            "max-model-len": max_length + 1,  # one token is sampled, and never read
            "block-size": BLOCK,
            # a logit rounded to bfloat16 would move by more than a step does
            "hf-overrides": json.dumps({"head_dtype": "float32"}),
            "seed": 0,
        }
        flags = ["--enforce-eager", "--disable-uvicorn-access-log", "--no-enable-log-requests"]
        if rank is None:
            options["worker-extension-cls"] = "mezo_cli.engine.shards.Shards"
        else:
            options |= {"max-loras": settings.max_loras, "max-cpu-loras": settings.max_loras + 1}
            options["max-lora-rank"] = next((allowed for allowed in MAX_RANKS if allowed >= rank), rank)
            flags.append("--enable-lora")
        return [*(f"--{name}={value}" for name, value in options.items()), *flags]

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:  # vLLM makes the file before it loads the model
            return connection.connect_ex(str(self.socket)) == 0

    def start(self, max_length: int) -> str:
        """Return vLLM's version."""
        super().start(max_length)
        return str(self.ask("GET", "/version")["version"])

    def describe_end(self) -> str:
        """Return how the process ended, with the first error that it wrote, or else its last line; "" if it runs."""
        status = self._process.poll()
        if status is None:
            return ""
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = (re.search(r"\b\w*(Error|Exception): .*", line) for line in lines if " WARNING " not in line)
        first = next((error.group() for error in errors if error), lines[-1] if lines else "")
        return f"its process ended with status {status}" + (f": {first}" if first else "")

    def close(self) -> None:
        """End the server and all that it started."""
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()


def environment(tensor_parallel: int) -> dict[str, str]:
    """Return the variables for the engine of this rank, or of a process without ranks.

    Of the GPUs that it may see a rank gets the next `tensor_parallel` after those of the ranks before it on this
    machine, and so many groups of CPUs. Without ranks vLLM chooses, but for CPUs: it wants a NUMA node per process.
    """
    before, cpus = os.environ, sorted(os.sched_getaffinity(0))
    left_out = ("PYTHON", "VIRTUAL_ENV", *(OF_RANKS if "RANK" in before else ()))
    kept = {key: value for key, value in before.items() if not key.startswith(left_out)}
    if "RANK" not in before:
        return kept if tensor_parallel == 1 else {BIND: "|".join(cpu_groups(cpus, tensor_parallel))} | kept
    rank = int(before.get("LOCAL_RANK", before["RANK"]))
    count = int(before.get("LOCAL_WORLD_SIZE", before["WORLD_SIZE"])) * tensor_parallel
    share = slice(rank * tensor_parallel, (rank + 1) * tensor_parallel)
    gpus = before[GPUS].split(",") if GPUS in before else list(map(str, range(count)))
    return kept | {BIND: "|".join(cpu_groups(cpus, count)[share]), GPUS: ",".join(gpus[share])}


def cpu_groups(cpus: Sequence[int], count: int) -> list[str]:
    """Share CPUs among processes: one text per process, `0,1`. With fewer CPUs than processes some are shared."""
    size = max(1, len(cpus) // count)
    return [",".join(map(str, cpus[i * size % len(cpus) :][:size])) for i in range(count)]
