"""Check the rewards: do members of one step differ in them, on how many rows, and are completions cut at the limit."""

import time
from typing import Any

import torch

from mezo_cli.config.objectives import GenerateConfig
from mezo_cli.config.optimizers import zeroth_order
from mezo_cli.data.batch_sampler import make_sampler
from mezo_cli.diagnosis.findings import NOTE, OK, Deadline, Section, count, percent, short
from mezo_cli.objectives.generation import Generation
from mezo_cli.perturb.noise import Direction
from mezo_cli.tasks.generate import PromptRow
from mezo_cli.training.session import Session

TITLE = "rewards"
MEMBERS, ROWS = 8, 16
AGREEING = 0.9  # of the rows, on which all members have the same reward
TRUNCATED = 0.5  # of the completions


def check(session: Session, train: list[PromptRow], deadline: Deadline) -> Section:
    """Reward the completions of some members on rows of the first batches; theta is not changed.

    The members are theta + eps z and theta - eps z of some directions: what a step of any method compares.

    Raises:
        RunFailed: when the reward fails.
    """
    section, config, own = Section(TITLE), session.config, session.config.objective
    if config.steps == 0:
        section.add(OK, "not_needed", "steps=0: no step is taken, so members need not differ")
        return section
    assert isinstance(session.objective, Generation)
    assert isinstance(own, GenerateConfig)
    rows = [train[i] for i in make_sampler(config.replace(batch_size=ROWS), train).batch(0)]
    members, seconds = _complete(session, rows, deadline)
    figures = session.objective.step_scalars(session.optimizer.count_forwards) | {
        "members": members,
        "rows": len(rows),
        "seconds": seconds,
    }
    if members < MEMBERS:
        section.cut.append(f"{MEMBERS - members} of {MEMBERS} members")
    judge_spread(section, figures, zeroth_order(config.optimizer).eps, own.samples)
    judge_agreement(section, figures)
    judge_length(section, figures, own.max_new_tokens)
    return section


@torch.no_grad()
def _complete(session: Session, rows: list[PromptRow], deadline: Deadline) -> tuple[int, float]:
    """Let members complete rows as in a step while there is time, two at least; return how many did, and the seconds.

    The objective has their figures.
    """
    loss_of, eps = session.loss_of(rows), zeroth_order(session.config.optimizer).eps
    session.objective.begin_step(0)
    start = time.perf_counter()
    for pair in range(MEMBERS // 2):
        seconds = time.perf_counter() - start
        if pair and not deadline.allows(seconds / pair):
            return 2 * pair, seconds
        with session.forward.perturbed(Direction(session.config.seed, 0, pair), eps):
            loss_of()
    return MEMBERS, time.perf_counter() - start


def judge_spread(section: Section, figures: dict[str, Any], eps: float, samples: int) -> None:
    """Report the rewards of the members; doubt equal ones.

    Args:
        figures: of a step, as in metrics.jsonl, with the numbers of `members` and `rows`, and their `seconds`.
        eps: the run's.
        samples: completions per row and member.
    """
    mean, tokens = figures["reward"], figures["length"] * figures["members"] * figures["rows"] * samples
    among = f"{figures['members']} members at optimizer.eps={eps:g} on {count(figures['rows'], 'row')}"
    speed = f"{short(tokens / figures['seconds'])} tokens per second" if figures["seconds"] else ""
    equal = figures["reward_std"] == 0
    text = (
        f"no signal: all of {among} have the mean reward {mean:.4g}"
        if equal
        else (
            f"{among} have the mean reward {mean:.4g}, from {figures['reward_min']:.4g} to {figures['reward_max']:.4g}"
            f" (standard deviation {figures['reward_std']:.2g})"
        )
    )
    ways = f"raise optimizer.eps ({eps:g} changes no completion enough)"
    soften = "soften the reward: add parts that also count what is nearly right, objective.reward={NAME: WEIGHT, ...}"
    advice = f"a step with equal members changes nothing: {ways}, or {soften}"
    section.judge("spread", equal, f"{text}; {speed}", advice, eps=eps, **figures)


def judge_agreement(section: Section, figures: dict[str, Any]) -> None:
    """Report the fraction of rows on which all members have the same reward: they tell nothing."""
    fraction = figures["agreeing_rows"]
    text = f"on {percent(fraction)} of the rows all members have the same reward: they give no signal"
    advice = "use a larger batch_size, a larger optimizer.eps, or a reward with more levels"
    section.add(NOTE if fraction >= AGREEING else OK, "agreement", text, advice, agreeing_rows=fraction)


def judge_length(section: Section, figures: dict[str, Any], limit: int) -> None:
    """Report how long completions are; doubt a limit that most of them reach."""
    fraction = figures["truncated"]
    text = (
        f"{percent(fraction)} of the completions are cut at objective.max_new_tokens={limit};"
        f" they have {figures['length']:.3g} tokens in the mean"
    )
    advice = "raise objective.max_new_tokens if an answer needs more, or end it by task.generate.stop"
    section.judge("truncated", fraction > TRUNCATED, text, advice, truncated=fraction, length=figures["length"])
