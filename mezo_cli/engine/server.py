"""An inference server computes the forwards: a client of its HTTP interface, on a port or a Unix socket.

What is sent are tokens, settings and names of files; nothing that the server would unpickle.
"""

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from mezo_cli.config.schema import OpenAiConfig, VllmConfig
from mezo_cli.config.stored import of_server
from mezo_cli.errors import RunFailed, UserError, shorten

KEY = "MEZO_ENGINE_KEY"
REQUESTS = 64  # at a time
START_IT = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
TOKENS = "logprob_token_ids"  # of a request for the log-probabilities of these tokens after the prompt


class Vllm:
    """The paths of vLLM's server, its requests and its answers."""

    models, complete = "/v1/models", "/v1/completions"
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

    def served(self, answer: Any) -> tuple[str, int | None]:
        """Return the name of the model that is served, and the most tokens of a text if that is told."""
        card = next(card for card in answer["data"] if card.get("parent") is None)
        return str(card["id"]), card.get("max_model_len")

    def request(self, name: str, prompt: Sequence[int], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request for a completion by a model or an adapter."""
        scored = {"logprobs": len(settings[TOKENS]), "return_tokens_as_token_ids": True} if TOKENS in settings else {}
        common = {"model": name, "prompt": list(prompt), "ignore_eos": True, "return_token_ids": True}
        return {**common, **scored, **settings}

    def read(self, answer: Any, is_scored: bool) -> Any:
        """Return the tokens of a completion, or token -> log-probability after the prompt."""
        (choice,) = answer["choices"]
        if not is_scored:
            return list(choice["token_ids"])
        (of_words,) = choice["logprobs"]["top_logprobs"]
        return {int(word.removeprefix("token_id:")): float(value) for word, value in of_words.items()}


class SGLang(Vllm):
    """The same of SGLang's. Seen with its server on a CPU (tests/engine/test_sglang.py)."""

    models, complete = "/model_info", "/generate"
    load, unload = "/load_lora_adapter", "/unload_lora_adapter"

    def served(self, answer: Any) -> tuple[str, int | None]:
        """Return the name of the model."""
        return str(answer["model_path"]), None

    def request(self, name: str, prompt: Sequence[int], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request for a completion by an adapter."""
        names = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
        sampling = {names.get(key, key): value for key, value in settings.items() if key != TOKENS}
        scored = {"return_logprob": True, "token_ids_logprob": settings[TOKENS]} if TOKENS in settings else {}
        sampling["ignore_eos"] = True
        return {"input_ids": list(prompt), "lora_path": name, "sampling_params": sampling, **scored}

    def read(self, answer: Any, is_scored: bool) -> Any:
        """Return the tokens of a completion, or token -> log-probability after the prompt."""
        if not is_scored:
            return list(answer["output_ids"])
        (of_tokens,) = answer["meta_info"]["output_token_ids_logprobs"]
        return {token: value for value, token, _ in of_tokens}


class UnixConnection(HTTPConnection):
    """A connection to a server that listens on a Unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Server:
    """A server at work.

    Args:
        place: its name in messages.
        folder: of files that both see.
        prefix: of its paths.

    Attributes:
        is_started: whether it has been found right; from then on its errors are `RunFailed`.
        model: the name of the model that it serves.
    """

    def __init__(
        self,
        settings: OpenAiConfig | VllmConfig,
        connect: Callable[[], HTTPConnection],
        place: str,
        folder: Path,
        prefix: str = "",
    ) -> None:
        self.settings, self._connect, self._place, self.folder, self._prefix = settings, connect, place, folder, prefix
        self.paths = SGLang() if getattr(settings, "server", "vllm") == "sglang" else Vllm()
        self.is_started, self.model = False, ""
        self._order, self._requests = ThreadPoolExecutor(1), ThreadPoolExecutor(REQUESTS)

    def start(self, max_length: int) -> str:
        """Check that the server takes texts of some length, and return what run.json says of its version."""
        self.model, room = self.paths.served(self.ask("GET", self.paths.models))
        if room is not None and room < max_length:
            self.fail(f"{self._place} takes texts of {room} tokens, and this run has some of {max_length}")
        return f"server at {self._place}, {self.model}"

    def in_order(self, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """Begin a call, after those before it; return a function that waits for its result, or raises its error."""
        return self._order.submit(function, *args).result

    def complete_all(self, requests: Sequence[tuple[str, Sequence[int], Mapping[str, Any]]]) -> list[Any]:
        """Send requests at once, each of (model or adapter, prompt, settings).

        Return of each the tokens of the completion; where settings have `TOKENS`, token -> log-probability.
        """
        return list(self._requests.map(self._complete, *zip(*requests, strict=True)))

    def _complete(self, name: str, prompt: Sequence[int], settings: Mapping[str, Any]) -> Any:
        answer = self.ask("POST", self.paths.complete, self.paths.request(name, prompt, settings))
        return self.paths.read(answer, TOKENS in settings)

    def ask(self, verb: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request and return the answer, as JSON where it is JSON."""
        key = os.environ.get(KEY)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection = self._connect()
        try:
            connection.request(verb, self._prefix + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            answer = text = response.read().decode(errors="replace")
        except TimeoutError:
            self.fail(f"{self._place} did not answer within engine.timeout={self.settings.timeout:g} s")
        except (OSError, HTTPException) as error:
            self.fail(self.describe_end() or f"{self._place} cannot be reached: {error}")
        finally:
            connection.close()
        with contextlib.suppress(ValueError):
            answer = json.loads(text)
        if response.status >= 400:
            self._refuse(path, response.status, answer)
        return answer

    def _refuse(self, path: str, status: int, answer: Any) -> NoReturn:
        message = answer.get("error", answer) if isinstance(answer, dict) else answer
        why = str(message.get("message", message) if isinstance(message, dict) else message)
        loads = path == self.paths.load
        if status in (401, 403):
            self.fail(f"{self._place} asks for a key, or for another one: give it as {KEY}")
        if status in (404, 405) and loads and "adapter" not in why:
            self.fail(f"{self._place} loads no adapters: {START_IT}")
        hint = "; engine.adapter_dir is a folder that both see" if loads and "found" in why else ""
        self.fail(f"{self._place} refused {path} with status {status}: {why}{hint}")

    def fail(self, why: str) -> NoReturn:
        """Report an error, in one line."""
        error = RunFailed if self.is_started else UserError
        raise error(f"engine={self.settings.name} failed: {shorten(' '.join(why.split()), 500)}") from None

    def describe_end(self) -> str:
        """Return how the server's process ended; "" if that is not known."""
        return ""

    def cancel(self) -> None:
        """Begin no further request."""
        self._order.shutdown(cancel_futures=True)
        self._requests.shutdown(cancel_futures=True)

    def close(self) -> None:
        """End the server, if mezo has started it."""


def server_at(settings: OpenAiConfig) -> Server:
    """Return the server at the user's address, like `http://127.0.0.1:8000`."""
    parts, folder = urlsplit(of_server(settings, "url")), Path(of_server(settings, "adapter_dir")).expanduser()
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
        raise UserError(f"engine.url: give http://HOST:PORT, without a name or a password ({KEY} has a key)")
    if not (settings.allow_remote or re.fullmatch(r"localhost|127(\.\d+){3}|::1", parts.hostname)):
        raise UserError(f"engine.url: {parts.hostname} is another machine: it needs engine.allow_remote=true")
    if not (folder.is_absolute() and folder.is_dir() and os.access(folder, os.W_OK)):
        raise UserError(f"engine.adapter_dir={folder}: give the absolute path of a folder that can be written to")
    kind, prefix = HTTPSConnection if parts.scheme == "https" else HTTPConnection, parts.path.rstrip("/")
    connect = partial(kind, parts.hostname, parts.port, timeout=settings.timeout)
    return Server(settings, connect, f"{parts.hostname}:{parts.port}", folder, prefix.removesuffix("/v1"))
