"""A server in the place of vLLM's: its paths, and a model in this process whose scores transformers computes."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mezo_cli.engine.layout import as_matrix, digest
from mezo_cli.perturb.noise import Direction, make_noise
from mezo_cli.perturb.noise.kernels import add_to_decayed

MAX_RANK = 16


class FakeModel:
    """What an engine holds: a model, with an adapter of each request, or with theta + c z.

    Args:
        folder: the checkpoint.
        tensors: name and shape of each trained tensor, where an engine perturbs all parameters itself.
        dtype: of the forwards.
    """

    def __init__(self, folder: Path, tensors: Any = (), dtype: str = "float32") -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.params, self.shapes = dict(self.model.named_parameters()), tensors
        self.theta = {name: self.params[name].detach().float().clone() for name, _ in tensors}
        self.noise = make_noise("gaussian")

    def blocks(self) -> list[list[int]]:
        return [[i, 0, 0, *as_matrix(shape), 0, 0] for i, (_, shape) in enumerate(self.shapes)]

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
            return
        for name, theta in self.theta.items():
            z = self._z(weights["direction"], name) * weights["c"] if weights else 0.0
            self.params[name].data = (theta + z).to(self.model.dtype)

    def _z(self, direction: Any, name: str) -> torch.Tensor:
        theta = self.theta[name]
        return self.noise.z(Direction(*direction), name, theta.shape, "cpu").view(theta.shape)

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

    def update(self, terms: Any, decays: Any) -> None:
        for (direction, c), decay in zip(terms, decays, strict=True):
            for name, theta in self.theta.items():
                cz = self._z(direction, name) * float(torch.tensor(c))
                theta.copy_(add_to_decayed(theta, cz, decay, in_float64=True))

    def load(self, path: str) -> None:
        for name, value in load_file(path).items():
            self.theta[name].copy_(value)

    def digests(self) -> Any:
        return [(b, digest(self.theta[name].numpy())) for b, (name, _) in zip(self.blocks(), self.shapes, strict=True)]


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
        if path == "/v1/completions":
            with self.lock:
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
        if self.mode != "misses perturbations" or self.asked == 1:
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
    """Answers with JSON."""

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
    """Run a fake server."""
    with FakeServer(model, **settings) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
