"""An inference server computes the forwards: its HTTP interface, on a port or a Unix socket.

Adapters are folders that both see. Each is loaded by a name that is never used again, and unloaded after its requests.
Where all parameters are trained, methods of `shards.Shards` are called in its workers, with texts in JSON.
What is sent are tokens and settings; nothing that the server would unpickle.
"""

import contextlib
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from mezo_cli.config.schema import OpenAiConfig, VllmConfig
from mezo_cli.engine.process import ServerProcess

KEY = "MEZO_ENGINE_KEY"
REQUESTS = 64  # at a time
START_IT = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"


class EngineFailed(Exception):  # noqa: N818 (it names what happened)
    """The engine reported an error, or cannot be reached. The text is one line."""


@dataclass(frozen=True)
class Dialect:
    """What differs between servers.

    Attributes:
        models, load, unload, complete: paths.
        name: where the answer of `models` has the name of the model that is served.
        room: where it has the most tokens of a text; None: nowhere.
        body: makes the request for a completion, of (model, adapter, prompt, settings).
        tokens, scores: read the tokens, and token -> log-probability, of its answer.
    """

    models: str
    load: str
    unload: str
    complete: str
    name: Callable[[Any], str]
    room: Callable[[Any], int | None]
    body: Callable[[str, str, Sequence[int], Mapping[str, Any]], dict[str, Any]]
    tokens: Callable[[Any], list[int]]
    scores: Callable[[Any], dict[int, float]]


def _vllm_body(model: str, adapter: str, prompt: Sequence[int], settings: Mapping[str, Any]) -> dict[str, Any]:
    tokens = settings.get("logprob_token_ids")
    scored = {"logprobs": len(tokens), "return_tokens_as_token_ids": True} if tokens else {}
    common = {"model": adapter, "prompt": list(prompt), "ignore_eos": True, "return_token_ids": True}
    return {**common, **scored, **settings}


def _vllm_scores(answer: Any) -> dict[int, float]:
    (of_words,) = answer["choices"][0]["logprobs"]["top_logprobs"]
    return {int(word.removeprefix("token_id:")): float(value) for word, value in of_words.items()}


def _sglang_body(model: str, adapter: str, prompt: Sequence[int], settings: Mapping[str, Any]) -> dict[str, Any]:
    names = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
    sampling = {names.get(name, name): value for name, value in settings.items() if name != "logprob_token_ids"}
    tokens = settings.get("logprob_token_ids")
    scored = {"return_logprob": True, "token_ids_logprob": tokens} if tokens else {}
    return {
        "input_ids": list(prompt),
        "lora_path": adapter,
        "sampling_params": {**sampling, "ignore_eos": True},
        **scored,
    }


DIALECTS = {
    "vllm": Dialect(
        models="/v1/models",
        load="/v1/load_lora_adapter",
        unload="/v1/unload_lora_adapter",
        complete="/v1/completions",
        name=lambda answer: str(next(card["id"] for card in answer["data"] if card.get("parent") is None)),
        room=lambda answer: answer["data"][0].get("max_model_len"),
        body=_vllm_body,
        tokens=lambda answer: list(answer["choices"][0]["token_ids"]),
        scores=_vllm_scores,
    ),
    "sglang": Dialect(  # read in its documentation and source, never run
        models="/get_model_info",
        load="/load_lora_adapter",
        unload="/unload_lora_adapter",
        complete="/generate",
        name=lambda answer: str(answer["model_path"]),
        room=lambda answer: None,
        body=_sglang_body,
        tokens=lambda answer: list(answer["output_ids"]),
        scores=lambda answer: {token: value for value, token, _ in answer["meta_info"]["output_token_ids_logprobs"][0]},
    ),
}


class UnixConnection(HTTPConnection):
    """A connection to a server that listens on a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class EngineServer:
    """A server at work.

    Args:
        timeout: seconds to wait for an answer.
        dialect: of its requests and answers.
        place: its name in messages.
        connect: opens a connection.
        prefix: of its paths.
        process: that of the server, if mezo has started it.
    """

    def __init__(
        self,
        timeout: float,
        dialect: Dialect,
        place: str,
        connect: Callable[[], HTTPConnection],
        prefix: str = "",
        process: ServerProcess | None = None,
    ) -> None:
        self._timeout, self._dialect, self._place, self._path = timeout, dialect, place, prefix
        self._connect, self._process = connect, process
        self._prefix, self._count = f"mezo-{secrets.token_hex(4)}", 0
        self._names: dict[str, str] = {}  # folder -> the name of its adapter
        self._model = ""
        self._active: Any = None  # what the workers' weights are perturbed by
        self._changes = 0  # of the weights that forwards see: the salt of the prefix cache
        self._order = ThreadPoolExecutor(1)  # calls are answered in their order
        self._requests = ThreadPoolExecutor(REQUESTS)

    @classmethod
    def at(cls, config: OpenAiConfig, url: str) -> "EngineServer":
        """Return the server at an address like `http://127.0.0.1:8000`.

        Raises:
            EngineFailed: for an address that is not one, or of another machine.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
            raise EngineFailed(f"engine.url: give http://HOST:PORT, without a name or a password ({KEY} has a key)")
        if not (config.allow_remote or _is_loopback(parts.hostname)):
            raise EngineFailed(f"{parts.hostname} is another machine: it needs engine.allow_remote=true")
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connect = partial(kind, parts.hostname, parts.port, timeout=config.timeout)
        place, prefix = f"{parts.hostname}:{parts.port}", parts.path.rstrip("/").removesuffix("/v1")
        return cls(config.timeout, DIALECTS[config.server], place, connect, prefix)

    @classmethod
    def started(cls, settings: VllmConfig, process: ServerProcess) -> "EngineServer":
        """Return the server of a process, as soon as it listens."""
        connect = partial(UnixConnection, str(process.socket), settings.timeout)
        server = cls(settings.timeout, DIALECTS["vllm"], "vLLM", connect, process=process)
        if not process.wait(settings.timeout):
            why = process.describe_end() or f"it did not listen within engine.timeout={settings.timeout:g} s"
            server.close()
            raise EngineFailed(_one_line(why))
        return server

    def submit(self, method: str, **params: Any) -> Callable[[], Any]:
        """Begin a call; return a function that waits for its result, or raises `EngineFailed`."""
        methods: dict[str, Callable[..., Any]] = {
            "start": self._start,
            "score": self._score,
            "generate": self._generate,
            "remove": self._remove,
            "update": self._update,
            "load": self._load_theta,
            "digests": self._digests,
        }
        future: Future[Any] = self._order.submit(methods[method], **params)
        return future.result

    def close(self) -> None:
        """Unload what is loaded, and begin nothing more."""
        self._order.shutdown(cancel_futures=True)
        with contextlib.suppress(EngineFailed):  # it may have ended
            self._remove(list(self._names))
        self._requests.shutdown(cancel_futures=True)
        if self._process is not None:
            self._process.close()

    def _start(self, max_length: int, tensors: Sequence[Any] = (), noise: str = "") -> dict[str, Any]:
        served = self._ask("GET", self._dialect.models)
        self._model, room = self._dialect.name(served), self._dialect.room(served)
        if room is not None and room < max_length:
            raise EngineFailed(f"{self._place} takes texts of {room} tokens, and this run has some of {max_length}")
        blocks = [block for of in self._all("lay_out", tensors=tensors, noise=noise) for block in of] if tensors else []
        version = f"server at {self._place}, {self._model}"
        if self._process is not None:
            version = str(self._ask("GET", "/version")["version"])
        return {"version": version, "blocks": blocks}

    def _all(self, method: str, **params: Any) -> list[Any]:
        """Call a method of `Shards` in every worker; return their results."""
        body = {"method": "mezo", "args": [method, json.dumps(params)]}
        answer: dict[str, list[Any]] = self._ask("POST", "/collective_rpc", body)
        return answer["results"]

    def _update(self, terms: Any, decays: Any) -> None:
        self._changed(None)
        self._all("update", terms=terms, decays=decays)

    def _load_theta(self, path: str) -> None:
        self._changed(None)
        self._all("load", path=path)

    def _digests(self) -> list[Any]:
        return [block for of in self._all("digests") for block in of]

    def _changed(self, active: Any) -> None:
        """Note other weights: keys and values of the prefix cache hold for those that computed them alone."""
        self._active, self._changes = active, self._changes + 1

    def _perturb(self, own: Mapping[str, Any]) -> None:
        """Let the workers compute with theta, or theta + c z."""
        wanted = (tuple(own["direction"]), own["c"]) if own else None
        if wanted != self._active:
            self._changed(wanted)
            self._all("perturb", **own) if own else self._all("restore")

    def _score(self, prompts: Any, tokens: Any, weights: Any) -> Any:
        settings = [{"max_tokens": 1, "temperature": 0.0, "logprob_token_ids": list(own)} for own in tokens]
        return [
            [
                [scores[token] for token in own]
                for scores, own in zip(map(self._dialect.scores, of_weights), tokens, strict=True)
            ]
            for of_weights in self._with_each(weights, prompts, settings)
        ]

    def _generate(
        self, prompts: Any, seeds: Any, max_new_tokens: int, temperature: float, stop: Any, ends: Any, weights: Any
    ) -> Any:
        common = {"max_tokens": max_new_tokens, "temperature": temperature, "stop": stop, "stop_token_ids": ends}
        settings = [{**common, "seed": seed} for seed in seeds]
        return [list(map(self._dialect.tokens, of)) for of in self._with_each(weights, prompts, settings)]

    def _with_each(self, weights: Any, prompts: Any, settings: Any) -> list[list[Any]]:
        """Return the server's answers to each prompt with each adapter: [weights][prompts]."""
        if not all("adapter" in own for own in weights):
            return [self._with_theta(own, prompts, settings) for own in weights]
        adapters = [self._load(own["adapter"]) for own in weights]
        of_all = [
            self._requests.submit(self._complete, adapter, prompt, own)
            for adapter in adapters
            for prompt, own in zip(prompts, settings, strict=True)
        ]
        answers = [future.result() for future in of_all]
        self._remove([own["adapter"] for own in weights if not own["keep"]])
        return [answers[i : i + len(prompts)] for i in range(0, len(answers), len(prompts))]

    def _with_theta(self, own: Mapping[str, Any], prompts: Any, settings: Any) -> list[Any]:
        """Return the server's answers to each prompt with theta, or theta + c z: [prompts]."""
        self._perturb(own)
        salted = [{**of_prompt, "cache_salt": f"{self._prefix}-{self._changes}"} for of_prompt in settings]
        return list(self._requests.map(self._complete, [self._model] * len(salted), prompts, salted))

    def _complete(self, adapter: str, prompt: Sequence[int], settings: Mapping[str, Any]) -> Any:
        return self._ask("POST", self._dialect.complete, self._dialect.body(self._model, adapter, prompt, settings))

    def _load(self, folder: str) -> str:
        if folder not in self._names:
            self._count += 1
            name = f"{self._prefix}-{self._count}"
            self._ask("POST", self._dialect.load, {"lora_name": name, "lora_path": folder})
            self._names[folder] = name
        return self._names[folder]

    def _remove(self, folders: Sequence[str]) -> None:
        for folder in folders:
            self._ask("POST", self._dialect.unload, {"lora_name": self._names.pop(folder)})

    def _ask(self, verb: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request and return the answer, as JSON where it is JSON."""
        key = os.environ.get(KEY)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection = self._connect()
        try:
            connection.request(verb, self._path + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except TimeoutError:
            raise EngineFailed(f"{self._place} did not answer within engine.timeout={self._timeout:g} s") from None
        except (OSError, HTTPException) as error:
            ended = self._process and self._process.describe_end()
            raise EngineFailed(_one_line(ended or f"{self._place} cannot be reached: {error}")) from error
        finally:
            connection.close()
        if response.status >= 400:
            raise EngineFailed(self._refusal(path, response, text))
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _refusal(self, path: str, response: HTTPResponse, text: str) -> str:
        if response.status in (401, 403):
            return f"{self._place} asks for a key, or for another one: give it as {KEY}"
        if response.status in (404, 405) and path == self._dialect.load and "adapter" not in text:
            return f"{self._place} loads no adapters: {START_IT}"
        try:
            document = json.loads(text)
            message = document.get("error", document)
            text = message["message"] if isinstance(message, dict) else str(message)
        except (ValueError, KeyError, AttributeError):
            pass
        hint = (
            "; engine.adapter_dir is a folder that both see" if path == self._dialect.load and "found" in text else ""
        )
        return _one_line(f"{self._place} refused {path} with status {response.status}: {text}{hint}")


def _one_line(text: str, limit: int = 500) -> str:
    """Return a text as one line, cut to a number of characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}..."


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
