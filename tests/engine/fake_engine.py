"""A program in the place of an engine's: transformers computes the scores, by the protocol of the real one.

Its first argument is a mode. `dies=N` kills the process when it is asked for the N-th score of perturbed weights.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from mezo_cli.engine import worker
from mezo_cli.engine.layout import as_matrix, digest


class FakeModel:
    """The methods of `vllm_model.VllmModel`, with transformers."""

    def __init__(
        self,
        folder: str,
        tensors: Any,
        noise: str,
        rank: int | None,
        raw_logits: bool,
        max_length: int,
        dtype: str,
        adapters: int,
        **_: Any,
    ) -> None:
        from transformers import AutoModelForCausalLM

        from mezo_cli.perturb.noise import make_noise

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.params = dict(self.model.named_parameters())
        self.theta = {name: self.params[name].detach().float().clone() for name, _ in tensors}
        self.noise, self.shapes, self.raw_logits, self.scored = make_noise(noise), tensors, raw_logits, 0
        self.asked, self.max_length, self.adapters = 0, max_length, adapters

    def describe(self) -> dict[str, Any]:
        blocks = [[i, 0, 0, *as_matrix(shape), 0, 0] for i, (_, shape) in enumerate(self.shapes)]
        return {"version": "0", "blocks": blocks[1:] if MODE == "misses a tensor" else blocks}

    def _add(self, weights: Any) -> None:
        import torch

        from mezo_cli.perturb.noise import Direction

        if "adapter" in weights:
            from safetensors.torch import load_file

            state = load_file(Path(weights["adapter"]) / "adapter_model.safetensors")
            for name, a in state.items():
                if "lora_A" in name:
                    base = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
                    b = state[name.replace("lora_A", "lora_B")]
                    self.theta.setdefault(base, self.params[base].detach().float().clone())
                    self.params[base].data = (self.theta[base] + 2.0 * b @ a).to(self.model.dtype)  # alpha / r
            return
        direction = weights.get("direction")
        for name, theta in self.theta.items():
            z = 0.0 if direction is None else self.noise.z(Direction(*direction), name, theta.shape, "cpu")
            c = torch.tensor(weights.get("c", 0.0), dtype=torch.float32)
            perturbed = theta + (z * c).view(theta.shape) if direction is not None else theta
            self.params[name].data = perturbed.to(self.model.dtype)

    def _with_each(self, weights: Any) -> Any:
        """Let the model have each of the weights in turn."""
        self.asked += 1
        assert len(weights) <= self.adapters
        for one in weights:
            self.scored += bool(one)
            if f"dies={self.scored}" == MODE:
                print("out of luck", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if f"hangs={self.scored}" == MODE:
                time.sleep(60)
            if MODE != "misses perturbations":
                self._add(one)
            yield

    def _logits(self, ids: Any) -> Any:
        import torch

        assert len(ids) <= self.max_length
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].float()

    def score(self, prompts: Any, tokens: Any, weights: Any) -> Any:
        found = []
        for _ in self._with_each(weights):
            rows = [self._logits(prompt)[-1] for prompt in prompts]
            rows = rows if self.raw_logits else [row.log_softmax(-1) for row in rows]
            found.append([row[list(of)].tolist() for row, of in zip(rows, tokens, strict=True)])
        return found

    def generate(
        self,
        prompts: Any,
        seeds: Any,
        max_new_tokens: int,
        temperature: float,
        stop: Any,
        ends: Any,
        weights: Any,
    ) -> Any:
        """Complete up to the limit or an end; a stop text is left to mezo, as an engine may find it later."""
        import torch

        found = []
        for _ in self._with_each(weights):
            of_prompts = []
            for prompt, seed in zip(prompts, seeds, strict=True):
                ids, generator = list(prompt), torch.Generator().manual_seed(seed)
                while len(ids) - len(prompt) < max_new_tokens and (ids == prompt or ids[-1] not in ends):
                    logits = self._logits(ids)[-1]
                    if temperature:
                        drawn = torch.rand(logits.shape, generator=generator)
                        logits = logits / temperature - torch.log(-torch.log(drawn))
                    ids.append(int(logits.argmax()))
                of_prompts.append(ids[len(prompt) :])
            found.append(of_prompts)
        return found

    def update(self, terms: Any, decays: Any, decay_in_float64: bool) -> None:
        import numpy as np

        from mezo_cli.perturb.noise import Direction
        from mezo_cli.perturb.noise.kernels import add_to_decayed

        for (direction, c), decay in zip(terms, decays, strict=True):
            for name, theta in self.theta.items():
                z = self.noise.z(Direction(*direction), name, theta.shape, "cpu").view(theta.shape)
                cz = z * float(np.float32(c))
                theta.copy_(add_to_decayed(theta, cz, decay, decay_in_float64))

    def load(self, path: str) -> None:
        from safetensors.torch import load_file

        for name, value in load_file(path).items():
            self.theta[name].copy_(value)

    def digests(self) -> Any:
        blocks = [[i, 0, 0, *as_matrix(shape), 0, 0] for i, (_, shape) in enumerate(self.shapes)]
        return [(b, digest(self.theta[name].numpy())) for b, (name, _) in zip(blocks, self.shapes, strict=True)]

    def counts(self) -> dict[str, int]:
        return {"prompt": 10 * self.asked, "cached": 8 * self.asked}

    def remove(self, folders: list[str]) -> None:
        assert all(Path(folder).is_dir() for folder in folders)


def fails(**_: Any) -> Any:
    raise RuntimeError("no memory\nfor the weights")


MODE = sys.argv[1] if __name__ == "__main__" else ""

if __name__ == "__main__":
    stream = socket.socket(fileno=int(sys.argv[2])).makefile("rwb")
    worker.die_with_parent(int(sys.argv[3]))
    if MODE == "ends":
        sys.exit("no module named vllm")
    worker.serve(stream, fails if MODE == "fails" else FakeModel)
