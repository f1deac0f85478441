"""A quick look instead of a search, for a question that is like one which has been answered."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from hightide.ir.tier import Tier
from hightide.planner.choice import Choice, Problem
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.missing import refusal
from hightide.planner.moves import ORDERS, Moves
from hightide.planner.question import Question
from hightide.planner.trials import Trials

MOST_DISK_BYTES = 1 << 60


def nearby_step_s(question: Question, known: Choice, below_s: float) -> float:
    """The step time of the best of a few plans around a known choice: a search would find it or better. Infinite: none
    of them fits and takes less than `below_s`."""
    trials = _trials(question)
    num_samples = question.profile.num_samples
    size = known.micro_batch
    sizes = {-(-size // 2), size, min(2 * size, num_samples), num_samples}
    if question.micro_batch is not None:
        sizes = {question.micro_batch}
    moves = Moves(trials.problem, trials.may_fit, tuple(sorted(sizes, reverse=True)))
    best_s = below_s
    for choice in dict.fromkeys(_around(moves, trials, known)):
        best_s = min(best_s, trials.step_s(choice, best_s))
    return best_s if best_s < below_s else math.inf


def _around(moves: Moves, trials: Trials, known: Choice) -> Iterator[Choice]:
    yield from moves.resident()
    if known.micro_batch in moves.micro_batches:
        if trials.may_fit(known):
            yield from (moves.fill(known, order) for order in ORDERS)
        elif (fitting := moves.shed(known, ORDERS[0])) is not None:
            yield fitting
    for micro_batch in moves.micro_batches:
        for inputs in (Tier.GPU, Tier.HOST):
            plain = Choice(micro_batch, inputs, known.spare_slots, slot_numel=known.slot_numel, disk=known.disk)
            plain = replace(plain, disk_buffers=known.disk_buffers)
            bare = replace(plain, spare_slots=0, spare_grad_slots=0, disk_buffers=int(known.disk))
            start = next((one for one in (plain, bare) if trials.may_fit(one)), None)
            if start is not None:
                yield from (moves.fill(start, order) for order in ORDERS)


def fits(question: Question) -> bool:
    """Whether a plan is there at all, by the leanest ones."""
    trials = _trials(question)
    if not question.disk_bytes and trials.least_bytes() > question.gpu_bytes + question.host_bytes:
        return False
    leanest = _leanest(question, trials).leanest()
    return any(trials.may_fit(one) and trials.within(trials.needs(one)) for one in leanest)


def why_not(question: Question) -> InfeasiblePlan:
    """What the search would say of a question that `fits` has denied."""
    trials = _trials(question)
    return refusal(trials, _leanest(question, trials).leanest())


def _leanest(question: Question, trials: Trials) -> Moves:
    smallest = 1 if question.micro_batch is None else question.micro_batch
    return Moves(trials.problem, trials.may_fit, (smallest,))


def least_disk_bytes(question: Question) -> int | None:
    """So much of a disk would make it fit; None: no disk would."""
    trials = _trials(question.with_limit(Tier.DISK, MOST_DISK_BYTES))
    moves = _leanest(question, trials)
    starts = [start for start in moves.starts(spare=0, disk=True) if trials.may_fit(start)]
    filled = dict.fromkeys(moves.fill(start, order) for start in starts for order in ORDERS)
    for choice in sorted(filled, key=lambda one: trials.guess(one).disk_bytes):
        needs = trials.needs(choice)
        if trials.within(needs):
            return needs.disk_bytes
    return None


def _trials(question: Question) -> Trials:
    problem = Problem(
        question.profile,
        question.gpu_bytes,
        question.host_bytes,
        question.update,
        question.states,
        question.gradients,
        question.disk_bytes,
    )
    return Trials(problem, question.costs, question.machine)
