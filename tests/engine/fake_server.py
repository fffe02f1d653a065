"""A server in the place of vLLM's: its paths, with the fake engine's model in this process."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.engine.fake_engine import FakeModel

MAX_RANK = 16


class FakeServer(ThreadingHTTPServer):
    """Serves one model; `names` are those of all adapters that it has loaded, `adapters` those that it has."""

    request_queue_size = 128

    def __init__(self, model: Path | None, *, loads: bool = True, key: str = "", room: int = 1000) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.loads, self.key, self.room, self.lock = loads, key, room, threading.Lock()
        self.names: list[str] = []
        self.adapters: dict[str, str] = {}
        if model is not None:
            self.model = FakeModel(str(model), [], "gaussian", 8, False, room, "float32", 1)

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
                return 200, self._complete(body)
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

    def _complete(self, body: Any) -> Any:
        weights = [{"adapter": self.adapters[body["model"]]}]
        if "logprob_token_ids" in body:
            tokens = body["logprob_token_ids"]
            assert body["logprobs"] == len(tokens)
            (((*scores,),),) = self.model.score([body["prompt"]], [tokens], weights)
            top = {f"token_id:{token}": score for token, score in zip(tokens, scores, strict=True)}
            return {"choices": [{"logprobs": {"top_logprobs": [top]}}]}
        names = {"max_tokens": "max_new_tokens", "temperature": "temperature", "stop": "stop", "stop_token_ids": "ends"}
        settings = {name: body[key] for key, name in names.items()}
        (ids,) = self.model.generate([body["prompt"]], [body["seed"]], weights=weights, **settings)[0]
        return {"choices": [{"token_ids": ids}]}


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
