"""A model in vLLM: completions of prompts, and the scores of given tokens, with adapters or with perturbed weights.

With a LoRA, vLLM's public interface is enough: each member of a step is an adapter in a file, and several are computed
in one call. Where all parameters are trained, `shards.Shards` is mixed into vLLM's workers.

vLLM keeps the keys and values of the beginnings of prompts. They hold only for the weights that computed them, so every
request has a salt that is never used again once the weights have changed.
"""

import multiprocessing.connection
import os
from collections.abc import Sequence
from threading import Thread
from typing import Any

from mezo_cli.engine.placement import cpu_groups

Tokens = Sequence[Sequence[int]]
Weights = dict[str, Any]
Request = tuple[Sequence[int], dict[str, Any], Any]

BLOCK = 32  # tokens: whole blocks are kept and shared. On a CPU vLLM's default is 128
MAX_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM allows for `max_lora_rank`


class VllmModel:
    """A model in vLLM, in this process and its workers.

    Args:
        folder: the checkpoint.
        tensor_parallel: over how many processes it is sharded.
        dtype: of the engine's weights and forwards.
        memory: bytes for keys and values.
        max_length: tokens of the longest prompt.
        raw_logits: whether scores are logits; else they are log-probabilities.
        prefix_cache: whether the keys and values of common beginnings are computed once.
        stops: whether completions end at texts, for which the tokenizer is loaded.
        adapters: the most adapters of a call.
        rank: of the LoRA that is trained; None if all of `tensors` are.
        tensors: name and shape of each trained tensor.
        noise: the kind of the noise.
    """

    def __init__(
        self,
        folder: str,
        tensor_parallel: int,
        dtype: str,
        memory: int,
        max_length: int,
        raw_logits: bool,
        prefix_cache: bool,
        stops: bool,
        adapters: int,
        rank: int | None,
        tensors: Sequence[tuple[str, Sequence[int]]],
        noise: str,
    ) -> None:
        _set_environment(tensor_parallel)
        import vllm

        if rank is None:
            options: dict[str, Any] = {"worker_extension_cls": "mezo_cli.engine.shards.Shards"}
        else:
            allowed = next((allowed for allowed in MAX_RANKS if allowed >= rank), rank)
            options = {"enable_lora": True, "max_loras": adapters, "max_cpu_loras": adapters + 1}
            options["max_lora_rank"] = allowed
        self._llm = vllm.LLM(
            folder,
            tensor_parallel_size=tensor_parallel,
            dtype=dtype,
            kv_cache_memory_bytes=memory,
            max_model_len=max_length + 1,  # one token is sampled, and never read
            logprobs_mode="raw_logits" if raw_logits else "raw_logprobs",
            enable_prefix_caching=prefix_cache,
            block_size=BLOCK,
            enforce_eager=True,
            skip_tokenizer_init=not stops,
            trust_remote_code=False,
            hf_overrides={"head_dtype": "float32"},  # a logit rounded to bfloat16 would move by more than a step does
            seed=0,
            **options,
        )
        Thread(target=_end_with_workers, daemon=True).start()
        self._version = vllm.__version__
        self._weights = 0  # counts how often the weights that forwards see have changed: the salt of requests
        self._adapters: dict[str, int] = {}  # folder -> id, unique in this process
        self._last_adapter = 0
        self._tokens = {"prompt": 0, "cached": 0}
        self._blocks: list[list[int]] = []
        if rank is None:
            self._blocks = [block for of in self._all("mezo_lay_out", tensors, noise) for block in of]

    def describe(self) -> dict[str, Any]:
        """Return the version of vLLM, and the blocks of the trained tensors that its workers hold."""
        return {"version": self._version, "blocks": self._blocks}

    def score(self, prompts: Tokens, tokens: Tokens, weights: Sequence[Weights]) -> list[list[list[float]]]:
        """Return the scores of some tokens after each prompt, with each of some weights.

        Args:
            prompts: token ids.
            tokens: for each prompt the tokens to score.
            weights: each is {} for theta, {"adapter": folder, "keep": whether it is used again}, or
                {"direction": [seed, step, sample], "c": float} for theta + c z.

        Returns:
            [weights][prompts][tokens].
        """
        params = [{"max_tokens": 1, "logprob_token_ids": list(of_prompt)} for of_prompt in tokens]
        outputs = self._with_each(weights, prompts, params)
        return [
            [
                [output.outputs[0].logprobs[0][token].logprob for token in of_prompt]
                for output, of_prompt in zip(of_weights, tokens, strict=True)
            ]
            for of_weights in outputs
        ]

    def generate(
        self,
        prompts: Tokens,
        seeds: Sequence[int],
        max_new_tokens: int,
        temperature: float,
        stop: Sequence[str],
        ends: Sequence[int],
        weights: Sequence[Weights],
    ) -> list[list[list[int]]]:
        """Return the tokens that continue each prompt with each of some weights: [weights][prompts][tokens].

        Args:
            prompts: token ids.
            seeds: of the random numbers of each prompt.
            max_new_tokens: the most tokens of a completion.
            temperature: 0 for the likeliest token each time.
            stop: a completion ends after a token with which one of these texts is in it.
            ends: it ends with one of these tokens.
            weights: as for `score`.
        """
        common = {
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "stop": list(stop),
            "stop_token_ids": list(ends),
            "ignore_eos": True,  # `ends` has what ends a completion
            "detokenize": bool(stop),
        }
        outputs = self._with_each(weights, prompts, [{**common, "seed": seed} for seed in seeds])
        return [[list(output.outputs[0].token_ids) for output in of_weights] for of_weights in outputs]

    def _with_each(self, weights: Sequence[Weights], prompts: Tokens, params: Sequence[dict[str, Any]]) -> list[Any]:
        """Run each prompt with each of some weights, adapters in one call; return the outputs: [weights][prompts]."""
        if all("adapter" in own for own in weights):
            adapters = [self._adapter(own["adapter"]) for own in weights]
            outputs = self._run([(p, own, a) for a in adapters for p, own in zip(prompts, params, strict=True)])
            self.remove([own["adapter"] for own in weights if not own["keep"]])
            return [outputs[i : i + len(prompts)] for i in range(0, len(outputs), len(prompts))]
        return [self._with(own, [(p, of, None) for p, of in zip(prompts, params, strict=True)]) for own in weights]

    def _with(self, weights: Weights, requests: Sequence[Request]) -> list[Any]:
        """Run requests with theta, or theta + c z."""
        if not weights:
            return self._run(requests)
        try:
            self._weights += 1
            self._all("mezo_perturb", weights["direction"], weights["c"])
            return self._run(requests)
        finally:
            self._all("mezo_restore")
            self._weights += 1

    def _run(self, requests: Sequence[Request]) -> list[Any]:
        """Run (prompt, settings, adapter) requests in one call."""
        from vllm import SamplingParams

        prompts, params = [], []
        for prompt, own, adapter in requests:
            salt = f"{self._weights} {adapter.lora_int_id if adapter else 0}"
            prompts.append({"prompt_token_ids": list(prompt), "cache_salt": salt})
            params.append(SamplingParams(**{"temperature": 0.0, "detokenize": False, **own}))
        adapters = [adapter for _, _, adapter in requests]
        outputs = self._llm.generate(prompts, params, lora_request=adapters if any(adapters) else None, use_tqdm=False)
        for output in outputs:
            self._tokens["prompt"] += len(output.prompt_token_ids)
            self._tokens["cached"] += output.num_cached_tokens or 0
        return list(outputs)

    def _adapter(self, folder: str) -> Any:
        from vllm.lora.request import LoRARequest

        if folder not in self._adapters:
            self._last_adapter += 1
            self._adapters[folder] = self._last_adapter
        number = self._adapters[folder]
        return LoRARequest(f"step-{number}", number, folder)

    def remove(self, folders: Sequence[str]) -> None:
        """Remove adapters that are not needed any more."""
        for folder in folders:
            self._llm.llm_engine.remove_lora(self._adapters.pop(folder))

    def update(self, terms: Sequence[tuple[Sequence[int], float]], decays: Sequence[float]) -> None:
        """Apply theta <- decay theta + coefficient z for each (direction, coefficient) in order (`Noise.update_`)."""
        self._weights += 1
        self._all("mezo_update", terms, decays)

    def load(self, path: str) -> None:
        """Set theta from a safetensors file of whole tensors."""
        self._weights += 1
        self._all("mezo_load", path)

    def digests(self) -> list[tuple[list[int], str]]:
        """Return the SHA-256 of each block of theta that the workers hold."""
        return [block for of in self._all("mezo_digests") for block in of]

    def counts(self) -> dict[str, int]:
        """Return how many tokens the prompts had so far, and how many of them were read from the prefix cache."""
        return dict(self._tokens)

    def _all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `Shards` in every worker; return their results."""
        return list(self._llm.collective_rpc(method, args=args))


def _end_with_workers() -> None:
    """End this process when one of vLLM's workers has ended: a call would wait for its answer for ever."""
    workers = [process.sentinel for process in multiprocessing.active_children()]
    if workers:
        multiprocessing.connection.wait(workers)
        os.write(2, b"a worker of vLLM has ended\n")  # the last line that mezo reports
        os._exit(1)


def _set_environment(tensor_parallel: int) -> None:
    """Set what vLLM reads from the environment when it is imported."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler runs in this process
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # for the sampled token after a prompt of the model's greatest length
        "HF_HUB_OFFLINE": "1",  # the model is a local folder
    }
    if tensor_parallel > 1:
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(cpu_groups(sorted(os.sched_getaffinity(0)), tensor_parallel))
    for name, value in settings.items():
        os.environ.setdefault(name, value)
