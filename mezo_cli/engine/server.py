"""A server that the user has started computes the forwards of LoRA members: its HTTP interface.

Adapters are folders that both see. Each is loaded by a name that is never used again, and unloaded after its requests.
What is sent are tokens and settings; nothing that the server would unpickle.
"""

import contextlib
import ipaddress
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from mezo_cli.config.schema import OpenAiConfig

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


class EngineServer:
    """A server at work, at an address like `http://127.0.0.1:8000`.

    Raises:
        EngineFailed: for an address that is not one, or of another machine.
    """

    def __init__(self, config: OpenAiConfig, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
            raise EngineFailed(f"engine.url: give http://HOST:PORT, without a name or a password ({KEY} has a key)")
        if not (config.allow_remote or _is_loopback(parts.hostname)):
            raise EngineFailed(f"{parts.hostname} is another machine: it needs engine.allow_remote=true")
        self._connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._path, self._place = parts.path.rstrip("/").removesuffix("/v1"), f"{parts.hostname}:{parts.port}"
        self._timeout, self._dialect = config.timeout, DIALECTS[config.server]
        self._prefix, self._count = f"mezo-{secrets.token_hex(4)}", 0
        self._names: dict[str, str] = {}  # folder -> the name of its adapter
        self._model = ""
        self._order = ThreadPoolExecutor(1)  # calls are answered in their order
        self._requests = ThreadPoolExecutor(REQUESTS)

    def submit(self, method: str, **params: Any) -> Callable[[], Any]:
        """Begin a call; return a function that waits for its result, or raises `EngineFailed`."""
        methods: dict[str, Callable[..., Any]] = {
            "start": self._start,
            "score": self._score,
            "generate": self._generate,
            "remove": self._remove,
        }
        future: Future[Any] = self._order.submit(methods[method], **params)
        return future.result

    def close(self) -> None:
        """Unload what is loaded, and begin nothing more."""
        self._order.shutdown(cancel_futures=True)
        with contextlib.suppress(EngineFailed):  # it may have ended
            self._remove(list(self._names))
        self._requests.shutdown(cancel_futures=True)

    def _start(self, max_length: int, **_: Any) -> dict[str, Any]:
        served = self._ask("GET", self._dialect.models)
        self._model, room = self._dialect.name(served), self._dialect.room(served)
        if room is not None and room < max_length:
            raise EngineFailed(f"{self._place} takes texts of {room} tokens, and this run has some of {max_length}")
        return {"version": f"server at {self._place}, {self._model}", "blocks": []}

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
        adapters = [self._load(own["adapter"]) for own in weights]
        of_all = [
            self._requests.submit(self._complete, adapter, prompt, own)
            for adapter in adapters
            for prompt, own in zip(prompts, settings, strict=True)
        ]
        answers = [future.result() for future in of_all]
        self._remove([own["adapter"] for own in weights if not own["keep"]])
        return [answers[i : i + len(prompts)] for i in range(0, len(answers), len(prompts))]

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
        connection = self._connect(self._host, self._port, timeout=self._timeout)
        try:
            connection.request(verb, self._path + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except TimeoutError:
            raise EngineFailed(f"{self._place} did not answer within engine.timeout={self._timeout:g} s") from None
        except (OSError, HTTPException) as error:
            raise EngineFailed(f"{self._place} cannot be reached: {_one_line(str(error))}") from error
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
