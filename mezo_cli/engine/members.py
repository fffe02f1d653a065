"""What a server is asked for the members of a step, and how it gets their weights: as adapters, or by its own updates.

An objective asks for one member after the other, under `PerturbedForward.losses_of`. Several are asked for in one
request, and the requests for the next members are sent before the answers of this one are used, so that the server
computes while mezo rewards completions.

mezo's own copy of theta is the authoritative one: checkpoints and the trajectory come from it.
"""

import contextlib
import copy
import json
import os
import secrets
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor

from mezo_cli.adapters.adapter import WEIGHTS
from mezo_cli.config.schema import StepRecord
from mezo_cli.engine.layout import Block, LayoutError, as_matrix, check_whole, digest
from mezo_cli.engine.server import TOKENS, Server
from mezo_cli.errors import RunFailed, UserError, join
from mezo_cli.models import LoadedModel
from mezo_cli.optim import Optimizer
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import Direction
from mezo_cli.perturb.params import Params, Term
from mezo_cli.perturb.plan import Perturbation

SCORED_AT_ONCE = 20  # tokens that are scored after one prompt: the most that a server of vLLM allows, as it is started
AHEAD = 2  # requests that are sent and not answered: the server begins the second while the answer of the first is read


class Member(NamedTuple):
    """The weights theta + c z; theta where there is no direction."""

    direction: Direction | None
    c: float


THETA = Member(None, 0.0)
Prompts: TypeAlias = list[Sequence[int]]
Settings: TypeAlias = list[Mapping[str, Any]]  # of each prompt
Wait = Callable[[], list[list[Any]]]  # waits for the answers to a request: [members][prompts]


class Members:
    """The answers to a request for a step's members: those that `forward` computes losses with now, and next."""

    at_once = 1  # the most members of a request

    def __init__(self, server: Server, forward: PerturbedForward) -> None:
        self._server, self._forward, self._params = server, forward, forward.params
        self._request: tuple[Prompts, Settings] = [], []
        self._left: list[Member] = []  # not sent yet
        self._sent, self._answers = deque[tuple[Sequence[Member], Wait]](), dict[Member, list[Any]]()

    def ask(self, prompts: Prompts, settings: Settings) -> list[list[Any]]:
        """Return the answers to each prompt for each member whose weights are active: [signs][prompts]."""
        wanted = _members(self._forward.perturbation)
        begun = {*self._answers, *self._left, *(member for members, _ in self._sent for member in members)}
        if self._request != (prompts, settings) or not begun.issuperset(wanted):
            self.forget()
            self._request = prompts, settings
            upcoming = [member for point in self._forward.upcoming for member in _members(point)]
            self._left = upcoming[upcoming.index(wanted[0]) :] if wanted[0] in upcoming else wanted
        while any(member not in self._answers for member in wanted):
            self._fill()
            members, wait = self._sent.popleft()
            self._answers |= zip(members, wait(), strict=True)
        self._fill()
        return [self._answers.pop(member) for member in wanted]

    def _fill(self) -> None:
        while self._left and len(self._sent) < AHEAD:
            members, self._left = self._left[: self.at_once], self._left[self.at_once :]
            self._sent.append((members, self.send(*self._request, members)))

    def forget(self) -> None:
        """Drop what has not been used: it was asked for other weights, or for another batch."""
        self._left = []
        while self._sent:
            self._sent.popleft()[1]()
        self._answers.clear()

    def send(self, prompts: Prompts, settings: Settings, members: Sequence[Member]) -> Wait:
        """Send requests for some members; return a function that waits for the answers: [members][prompts]."""
        raise NotImplementedError

    def follow(self, optimizer: Optimizer, record: StepRecord) -> None:
        """Follow an update of theta by the record of its step."""
        raise NotImplementedError

    def check(self, params: Params) -> None:
        """Check that the server's weights, where it keeps some, are bitwise identical to `params`."""

    def close(self) -> None:
        """Remove what the server has of this."""

    def token_scores(self, texts: Sequence[tuple[Sequence[int], int]]) -> Tensor:
        """Return the log-probabilities of the last tokens of each text, one text after the other: [signs, tokens].

        Each is scored after a prompt of all before it, of which the server keeps the keys and values; tokens that
        follow the same prompt share its request. vLLM's own log-probabilities of a prompt's tokens fail on a CPU where
        it has adapters.

        Args:
            texts: token ids, and how many of them, at the end, are scored.
        """
        places = [(tuple(ids[:n]), ids[n]) for ids, count in texts for n in range(len(ids) - count, len(ids))]
        following: dict[tuple[int, ...], set[int]] = {}
        for prompt, token in places:
            following.setdefault(prompt, set()).add(token)
        prompts, settings = list[Sequence[int]](), list[Mapping[str, Any]]()
        for prompt, after in following.items():
            for first in range(0, len(after), SCORED_AT_ONCE):
                prompts.append(prompt)
                tokens = sorted(after)[first : first + SCORED_AT_ONCE]
                settings.append({"max_tokens": 1, "temperature": 0.0, TOKENS: tokens})
        of_signs = []
        for answers in self.ask(prompts, settings):
            asked = zip(prompts, answers, strict=True)
            by_place = {(prompt, token): score for prompt, of in asked for token, score in of.items()}
            of_signs.append([by_place[place] for place in places])
        return torch.tensor(of_signs)


def _members(perturbation: Perturbation | None) -> list[Member]:
    if perturbation is None:
        return [THETA]
    return [Member(perturbation.direction, sign * perturbation.eps) for sign in perturbation.signs]


class Adapters(Members):
    """A LoRA: each member is a folder in the layout of `peft`, which the server loads as an adapter.

    A folder's name is the adapter's too, and never used again. Theta's is kept until theta changes.
    """

    def __init__(self, server: Server, forward: PerturbedForward, loaded: LoadedModel) -> None:
        super().__init__(server, forward)
        self.at_once, self._count, self._theta, self._loaded = server.settings.max_loras, 0, "", set[str]()
        self._root = tempfile.TemporaryDirectory(prefix="mezo-adapters-", dir=server.folder)
        os.chmod(self._root.name, 0o755)  # a server may be another user's process
        self._template = Path(self._root.name) / "template"
        loaded.adapter.save(self._template)
        # peft leaves the adapter's own name out of the names of its tensors
        self._names = {name: f"base_model.model.{name.replace('.default.', '.')}" for name in self._params.tensors}
        (self._template / WEIGHTS).unlink()

    def send(self, prompts: Prompts, settings: Settings, members: Sequence[Member]) -> Wait:
        """Send requests, for which the members' adapters are written."""
        if THETA in members and not self._theta:
            self._theta = self._write(THETA)
        folders = [self._theta if member == THETA else self._write(member) for member in members]
        return self._server.in_order(self._complete, prompts, settings, folders, self._theta)

    def _complete(self, prompts: Prompts, settings: Settings, folders: Sequence[str], theta: str) -> list[list[Any]]:
        for folder in folders:
            if folder not in self._loaded:
                self._server.ask("POST", self._server.paths.load, {"lora_name": Path(folder).name, "lora_path": folder})
                self._loaded.add(folder)
        asked = list(zip(prompts, settings, strict=True))
        answers = self._server.complete_all([(Path(folder).name, *one) for folder in folders for one in asked])
        self._remove([folder for folder in folders if folder != theta])
        return [answers[i : i + len(asked)] for i in range(0, len(answers), len(asked))]

    def _write(self, member: Member) -> str:
        self._count += 1
        root, tensors = Path(self._root.name), dict[str, Tensor]()
        folder = root / f"{root.name}-{self._count}"
        shutil.copytree(self._template, folder)
        for name, name_in_file in self._names.items():
            if member.direction is None:
                out = self._params.tensors[name].detach().clone()  # of the storage that all tensors share
            else:
                out = self._params.perturbed(name, member.direction, member.c)[0]
            tensors[name_in_file] = out.cpu()
        save_file(tensors, folder / WEIGHTS)
        (folder / WEIGHTS).chmod(0o644)  # which is written for its owner alone
        return str(folder)

    def _remove(self, folders: Sequence[str]) -> None:
        for folder in folders:
            self._server.ask("POST", self._server.paths.unload, {"lora_name": Path(folder).name})
            self._loaded.remove(folder)
            shutil.rmtree(folder)

    def follow(self, optimizer: Optimizer, record: StepRecord) -> None:
        """Let go of the adapter at the theta that was."""
        self.forget()
        self._remove(list(self._loaded))
        self._theta = ""

    def close(self) -> None:
        """Unload what is loaded, and remove the folders."""
        with self._root, contextlib.suppress(UserError, RunFailed):  # the server may have ended
            self._remove(list(self._loaded))


class WorkerWeights(Members):
    """All parameters: the workers of vLLM hold, perturb and update them as mezo does, bitwise identically (`Shards`).

    Requests of other weights have another `cache_salt`: keys and values hold for those that computed them alone.
    """

    def __init__(self, server: Server, forward: PerturbedForward, loaded: LoadedModel) -> None:
        super().__init__(server, forward)
        params = forward.params
        self._decay = copy.deepcopy(params.decay)
        if not server.is_started:  # the workers find what they hold: all that is trained
            tensors = [(name, list(p.shape)) for name, p in params.tensors.items()]
            of_workers = self._call("lay_out", tensors=tensors, noise=params.noise.name)
            try:
                check_whole(tensors, [Block(*block) for of_worker in of_workers for block in of_worker])
            except LayoutError as error:
                family = type(loaded.model).__name__
                raise UserError(f"engine={server.settings.name} does not support {family}: {error}") from error
        path = server.folder / "theta.safetensors"
        save_file({name: p.detach().cpu().clone() for name, p in params.tensors.items()}, path)
        self._call("load", path=str(path))
        path.unlink()
        self._change_to(THETA)

    def _call(self, method: str, **params: Any) -> list[Any]:
        """Call a method of `Shards` in every worker, with arguments as a text in JSON; return their results."""
        body = {"method": "mezo", "args": [method, json.dumps(params)]}
        return list(self._server.ask("POST", "/collective_rpc", body)["results"])

    def _change_to(self, member: Member) -> None:
        self._active, self._salt = member, secrets.token_hex(8)

    def send(self, prompts: Prompts, settings: Settings, members: Sequence[Member]) -> Wait:
        """Send requests for one member."""
        return self._server.in_order(self._complete, prompts, settings, *members)

    def _complete(self, prompts: Prompts, settings: Settings, member: Member) -> list[list[Any]]:
        if member != self._active:
            self._change_to(member)
            self._call("perturb", **member._asdict())
        name, salt = self._server.model, {"cache_salt": self._salt}
        asked = zip(prompts, settings, strict=True)
        return [self._server.complete_all([(name, prompt, {**of_prompt, **salt}) for prompt, of_prompt in asked])]

    def follow(self, optimizer: Optimizer, record: StepRecord) -> None:
        """Let the workers apply the scalars of the record."""
        self.forget()
        assert optimizer.replayable
        optimizer.apply_updates(self, [record])  # type: ignore[arg-type]  # it calls `update` alone

    def update(self, terms: Sequence[Term], decays: Sequence[float]) -> None:
        """Apply theta <- decay theta + coefficient z for each (direction, coefficient) in order, as `Params.update`."""
        self._change_to(THETA)
        self._call("update", terms=list(terms), decays=list(self._decay.take_each(terms, decays)))

    def check(self, params: Params) -> None:
        """Check that the workers' weights are bitwise identical to `params`."""
        tensors, wrong = list(params.tensors.items()), set()
        for numbers, sha256 in (block for of_worker in self._call("digests") for block in of_worker):
            block = Block(*numbers)
            name, p = tensors[block.tensor]
            held = p.detach().view(as_matrix(p.shape))[block.source]
            if digest(held.cpu().numpy()) != sha256:
                wrong.add(name)
        if wrong:
            raise RunFailed(f"the engine's weights are not those of the trajectory: {join(sorted(wrong)[:3])}")
