"""Start a server of vLLM that listens on a Unix socket in a folder of its own, and ends with mezo."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mezo_cli
from mezo_cli.config.own_code import PYTHON, of_server
from mezo_cli.config.schema import VllmConfig
from mezo_cli.engine import supervisor
from mezo_cli.engine.placement import variables_of_rank

PROGRAM = "vllm.entrypoints.openai.api_server"
EXTENSION = "mezo_cli.engine.shards.Shards"
BLOCK = 32  # tokens: whole blocks are kept and shared. On a CPU vLLM's default is 128
MAX_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM allows for --max-lora-rank
VARIABLES = {
    "PYTHONSAFEPATH": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a local folder
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # for the sampled token after a prompt of the model's greatest length
}


class ServerProcess:
    """A server of vLLM.

    Args:
        settings: of the engine.
        model: the checkpoint's folder.
        max_length: tokens of the longest text.
        rank: of the LoRA that is trained; None if all parameters are.
    """

    def __init__(self, settings: VllmConfig, model: Path, max_length: int, rank: int | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mezo-engine-")  # of mode 0700
        folder = Path(self._folder.name)
        self.socket, self._log = folder / "socket", folder / "log"
        (folder / "packages").mkdir()  # of mezo's environment the server sees this package alone
        (folder / "packages" / "mezo_cli").symlink_to(Path(mezo_cli.__file__).resolve().parent)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        environment |= {**VARIABLES, "PYTHONPATH": str(folder / "packages"), "VLLM_RPC_BASE_PATH": str(folder)}
        environment["VLLM_SERVER_DEV_MODE" if rank is None else "VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        for name, value in variables_of_rank(settings.tensor_parallel).items():
            environment.pop(name, None)
            environment |= {} if value is None else {name: value}
        command = [of_server(settings, PYTHON), "-m", PROGRAM, *self._arguments(settings, model, max_length, rank)]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", supervisor.__file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,  # Ctrl-C is mezo's alone
            )

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
            options["worker-extension-cls"] = EXTENSION
        else:
            options |= {"max-loras": settings.max_loras, "max-cpu-loras": settings.max_loras + 1}
            options["max-lora-rank"] = next((allowed for allowed in MAX_RANKS if allowed >= rank), rank)
            flags.append("--enable-lora")
        return [*(f"--{name}={value}" for name, value in options.items()), *flags]

    def wait(self, timeout: float) -> bool:
        """Wait until the server listens; return whether it does."""
        until = time.monotonic() + timeout
        while self._process.poll() is None and time.monotonic() < until:
            with socket.socket(socket.AF_UNIX) as connection:  # vLLM makes the file before it loads the model
                if connection.connect_ex(str(self.socket)) == 0:
                    return True
            time.sleep(0.1)
        return False

    def describe_end(self) -> str:
        """Return how the process ended, with the first error that it wrote, or else its last line; "" if it runs."""
        status = self._process.poll()
        if status is None:
            return ""
        how = f"its process ended with status {status}"
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = (re.search(r"\b\w*(Error|Exception): .*", line) for line in lines if " WARNING " not in line)
        first = next((error.group() for error in errors if error), lines[-1] if lines else "")
        return f"{how}: {first}" if first else how

    def close(self) -> None:
        """End the server and all that it started."""
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()
