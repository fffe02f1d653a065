"""A server in the place of vLLM's: its paths, and a model whose scores transformers computes. Or a program: `main`."""

import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

MAX_RANK = 16


class FakeModel:
    """What an engine holds: a model of a checkpoint, with an adapter of each request."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.params = dict(self.model.named_parameters())
        self.theta: dict[str, torch.Tensor] = {}

    def apply(self, weights: Any) -> None:
        """Let forwards compute with these weights."""
        if "adapter" in weights:
            state = load_file(Path(weights["adapter"]) / "adapter_model.safetensors")
            for name, a in state.items():
                if "lora_A" in name:
                    base = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
                    b = state[name.replace("lora_A", "lora_B")]
                    self.theta.setdefault(base, self.params[base].detach().float().clone())
                    self.params[base].data = (self.theta[base] + 2.0 * b @ a).to(self.model.dtype)  # alpha / r

    def _last(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0, -1].float()

    def scores(self, prompt: list[int], tokens: list[int]) -> list[float]:
        return self._last(prompt).log_softmax(-1)[tokens].tolist()

    def completion(self, prompt: list[int], seed: int, max_tokens: int, temperature: float, ends: list[int]) -> Any:
        """Complete up to the limit or an end; a stop text is left to mezo, as an engine may find it later."""
        ids, generator = list(prompt), torch.Generator().manual_seed(seed)
        while len(ids) - len(prompt) < max_tokens and (ids == prompt or ids[-1] not in ends):
            logits = self._last(ids)
            if temperature:
                drawn = torch.rand(logits.shape, generator=generator)
                logits = logits / temperature - torch.log(-torch.log(drawn))
            ids.append(int(logits.argmax()))
        return ids[len(prompt) :]


class Worker:
    """A worker of vLLM, as `Shards` sees it: its own model runner, whose model loads weights by their names."""

    def __init__(self, model: Any) -> None:
        self._model, self.model_runner = model, self
        model.load_weights = self._load_weights

    def get_model(self) -> Any:
        return self._model

    def _load_weights(self, weights: Any) -> None:
        params = dict(self._model.named_parameters())
        for name, value in weights:
            params[name].data.copy_(value)


class FakeServer(ThreadingHTTPServer):
    """Serves one model; `names` are those of all adapters that it has loaded, `adapters` those that it has.

    `mode` is a fault: `fails=N` or `hangs=N` at the N-th completion, or `misses perturbations`.
    """

    request_queue_size = 128

    def __init__(
        self,
        model: Path | None,
        *,
        loads: bool = True,
        key: str = "",
        room: int = 1000,
        dtype: str = "float32",
        mode: str = "",
    ) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.worker: Any = None  # with `Shards`
        self.loads, self.key, self.room, self.lock = loads, key, room, threading.Lock()
        self.mode, self.asked = mode, 0
        self.names: list[str] = []
        self.adapters: dict[str, str] = {}
        if model is not None:
            self.model = FakeModel(model, dtype=dtype)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny", "parent": None, "max_model_len": self.room}]}
        if path == "/v1/load_lora_adapter" and self.loads:
            return self._load(body["lora_name"], Path(body["lora_path"]))
        if path == "/v1/unload_lora_adapter" and self.loads:
            del self.adapters[body["lora_name"]]
            return 200, "removed"
        if path == "/version":
            return 200, {"version": "0"}
        with self.lock:
            if path == "/collective_rpc" and self.worker is not None:
                assert all(isinstance(arg, str) for arg in body["args"])
                return 200, {"results": [getattr(self.worker, body["method"])(*body["args"])]}
            if path == "/v1/completions" and self.worker is not None:
                assert body["cache_salt"]
                return self._complete(body)
            if path == "/v1/completions":
                return self._complete(body) if body["model"] in self.adapters else (404, {"detail": "no such model"})
        return 404, {"detail": "Not Found"}

    def _load(self, name: str, folder: Path) -> tuple[int, Any]:
        file = folder / "adapter_config.json"
        if not file.is_file():
            return 404, {"error": {"message": f"Loading lora {name} failed: No adapter found for {folder}"}}
        rank = json.loads(file.read_text())["r"]
        if rank > MAX_RANK:
            return 400, {"error": {"message": f"LoRA rank {rank} is greater than max_lora_rank {MAX_RANK}."}}
        assert name not in self.names
        self.names.append(name)
        self.adapters[name] = str(folder)
        return 200, "loaded"

    def _complete(self, body: Any) -> tuple[int, Any]:
        self.asked += 1
        if self.mode == f"fails={self.asked}":
            return 500, {"error": {"message": "out of luck"}}
        if self.mode == f"hangs={self.asked}":
            time.sleep(2)
        if self.worker is None and (self.mode != "misses perturbations" or self.asked == 1):
            self.model.apply({"adapter": self.adapters[body["model"]]})
        if "logprob_token_ids" in body:
            tokens = body["logprob_token_ids"]
            assert body["logprobs"] == len(tokens)
            scores = self.model.scores(body["prompt"], tokens)
            top = {f"token_id:{token}": score for token, score in zip(tokens, scores, strict=True)}
            return 200, {"choices": [{"logprobs": {"top_logprobs": [top]}}]}
        settings = [body[key] for key in ("seed", "max_tokens", "temperature", "stop_token_ids")]
        return 200, {"choices": [{"token_ids": self.model.completion(body["prompt"], *settings)}]}


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        status, document = self.server.answer(self.path, body)
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            status, document = 401, {"error": "Unauthorized"}
        text = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(model: Path | None = None, **settings: Any) -> Iterator[FakeServer]:
    with FakeServer(model, **settings) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class UnixServer(FakeServer):
    address_family = socket.AF_UNIX

    def __init__(self, path: str, model: Path, **settings: Any) -> None:
        self._path = path
        super().__init__(model, **settings)

    def server_bind(self) -> None:
        self.socket.bind(self._path)
        self.server_name, self.server_port = "localhost", 0

    def get_request(self) -> Any:
        request, _ = super().get_request()
        return request, ("localhost", 0)


def main() -> None:
    """Take the place of `python -m vllm...`, started by mezo."""
    words = [word.removeprefix("--").partition("=") for word in sys.argv[1:]]
    options = {name: value for name, _, value in words}
    subprocess.Popen(["sleep", "600"])  # the processes of the engine and its workers
    server = UnixServer(options["uds"], Path(options["model"]), dtype=options["dtype"])
    if "worker-extension-cls" in options:
        for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.utils"):
            sys.modules[name] = MagicMock()
        module, _, extension = options["worker-extension-cls"].rpartition(".")
        server.worker = type("Mixed", (Worker, getattr(importlib.import_module(module), extension)), {})(
            server.model.model
        )
    server.serve_forever()


def program(folder: Path) -> Path:
    """Write a program in the place of the python of vLLM's environment."""
    path, root = folder / "python", Path(__file__).parents[2]
    packages = os.pathsep.join([str(root), *sys.path])
    path.write_text(f"#!/bin/sh\nPYTHONPATH='{packages}' exec {sys.executable} -m tests.engine.fake_server \"$@\"\n")
    path.chmod(0o755)
    return path


if __name__ == "__main__":
    main()
