"""Check the rewards: do members of one step differ in them, on how many rows, and are completions cut at the limit."""

import time

import torch

from mezo_cli.config.optimizers import zeroth_order
from mezo_cli.data.sampling import make_sampler
from mezo_cli.diagnosis.findings import NOTE, OK, Deadline, Section, count, percent
from mezo_cli.objectives.generation import Generation
from mezo_cli.objectives.settings import GenerateConfig
from mezo_cli.perturb.noise import Direction
from mezo_cli.session.opening import Prepared

MEMBERS, ROWS = 8, 16
AGREEING = 0.9  # of the rows, on which all members have the same reward
TRUNCATED = 0.5  # of the completions


@torch.no_grad()
def check(prepared: Prepared, deadline: Deadline) -> Section:
    """Reward the completions of members on rows of the first batches, while there is time; theta is not changed.

    The members are theta + eps z and theta - eps z of one direction or more: what a step of any method compares.
    """
    section, session, train = Section("rewards"), prepared.session, prepared.rows["train"]
    config, objective = session.config, session.config.objective
    if config.steps == 0:
        section.add(OK, "not_needed", "steps=0: no step is taken, so members need not differ")
        return section
    assert isinstance(session.objective, Generation)
    assert isinstance(objective, GenerateConfig)
    rows = [train[i] for i in make_sampler(config.replace(batch_size=ROWS), train).batch(0)]
    loss_of, eps = session.loss_of(rows), zeroth_order(config.optimizer).eps
    session.objective.begin_step(0)
    members, seconds, start = 0, 0.0, time.perf_counter()
    while members < MEMBERS and (not members or deadline.allows(2 * seconds / members)):
        with session.forward.perturbed(Direction(config.seed, 0, members // 2), eps):
            loss_of()
        members, seconds = members + 2, time.perf_counter() - start
    figures = session.objective.step_scalars(session.optimizer.count_forwards)
    figures |= {"members": members, "rows": len(rows), "seconds": seconds}
    mean, among = figures["reward"], f"{members} members at optimizer.eps={eps:g} on {count(len(rows), 'row')}"
    text = (
        f"{among} have the mean reward {mean:.4g}, from {figures['reward_min']:.4g} to {figures['reward_max']:.4g}"
        f" (standard deviation {figures['reward_std']:.2g})"
    )
    if equal := figures["reward_std"] == 0:
        text = f"no signal: all of {among} have the mean reward {mean:.4g}"
    advice = (
        f"a step with equal members changes nothing: raise optimizer.eps ({eps:g} changes no completion enough), or"
        " soften the reward: add parts that also count what is nearly right, objective.reward={NAME: WEIGHT, ...}"
    )
    section.judge("spread", equal, text, advice, eps=eps, **figures)
    fraction = figures["agreeing_rows"]
    text = f"on {percent(fraction)} of the rows all members have the same reward: they give no signal"
    advice = "use a larger batch_size, a larger optimizer.eps, or a reward with more levels"
    section.add(NOTE if fraction >= AGREEING else OK, "agreement", text, advice, agreeing_rows=fraction)
    fraction = figures["truncated"]
    text = (
        f"{percent(fraction)} of the completions are cut at objective.max_new_tokens={objective.max_new_tokens};"
        f" they have {figures['length']:.3g} tokens in the mean"
    )
    advice = "raise objective.max_new_tokens if an answer needs more, or end it by task.generate.stop"
    section.judge("truncated", fraction > TRUNCATED, text, advice, truncated=fraction, length=figures["length"])
    return section
