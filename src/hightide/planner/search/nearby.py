"""A quick look instead of a search, for a problem that is like one which has been answered."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from hightide.ir.tier import Tier
from hightide.planner.advice.missing import refusal
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.problem import Problem
from hightide.planner.search.candidate import Candidate
from hightide.planner.search.ladders import DISK_ORDERS, ORDERS
from hightide.planner.search.moves import Moves
from hightide.planner.search.trials import Trials

MOST_DISK_BYTES = 1 << 60


def nearby_step_s(problem: Problem, known: Candidate, below_s: float) -> float:
    """The step time of the best of a few plans around a known candidate: a search would find it or better. Infinite:
    none of them fits and takes less than `below_s`."""
    trials = Trials(problem)
    num_samples = problem.profile.num_samples
    size = known.micro_batch
    sizes = {-(-size // 2), size, min(2 * size, num_samples), num_samples}
    if problem.terms.micro_batch is not None:
        sizes = {problem.terms.micro_batch}
    moves = Moves(trials.space, trials.may_fit, tuple(sorted(sizes, reverse=True)))
    best_s = below_s
    for candidate in dict.fromkeys(_around(moves, trials, known)):
        best_s = min(best_s, trials.step_s(candidate, best_s))
    return best_s if best_s < below_s else math.inf


_OF_DISKS = ("state_buffers", "read_buffers", "grad_buffers", "far", "input_buffers", "late")


def _around(moves: Moves, trials: Trials, known: Candidate) -> Iterator[Candidate]:
    yield from moves.resident()
    if known.micro_batch in moves.micro_batches:
        if trials.may_fit(known):
            yield from (moves.fill(known, order) for order in ORDERS)
        elif (fitting := moves.shed(known, ORDERS[0])) is not None:
            yield fitting
    if known.disk:
        yield from moves.refilled(known.changed(micro_batch=size) for size in moves.micro_batches)
    orders = DISK_ORDERS if known.disk else ORDERS
    for micro_batch in moves.micro_batches:
        for inputs in (Tier.GPU, Tier.HOST):
            plain = Candidate(micro_batch, inputs, known.spare_slots, slot_numel=known.slot_numel, disk=known.disk)
            if known.disk:
                plain = plain.changed(whole=known.whole & moves.space.wide, near=known.near)
            plain = plain.changed(**{name: getattr(known, name) for name in _OF_DISKS})
            fewest = min(1, known.state_buffers), min(1, known.read_buffers)
            bare = plain.changed(spare_slots=0, spare_grad_slots=0, state_buffers=fewest[0], read_buffers=fewest[1])
            start = next((one for one in (plain, bare) if trials.may_fit(one)), None)
            if start is not None:
                yield from (moves.fill(start, order) for order in orders)


def fits(problem: Problem) -> bool:
    """Whether a plan is there at all, by the leanest ones."""
    trials = Trials(problem)
    if trials.is_too_much():
        return False
    leanest = _leanest(problem, trials).leanest(trials.host_fits)
    return any(trials.may_fit(one) and trials.within(trials.needs(one)) for one in leanest)


def why_not(problem: Problem) -> InfeasiblePlan:
    """What the search would say of a problem that `fits` has denied."""
    trials = Trials(problem)
    return refusal(trials, _leanest(problem, trials).leanest(trials.host_fits))


def _leanest(problem: Problem, trials: Trials) -> Moves:
    smallest = 1 if problem.terms.micro_batch is None else problem.terms.micro_batch
    return Moves(trials.space, trials.may_fit, (smallest,))


def least_disk_bytes(problem: Problem) -> int | None:
    """So much of a disk would make it fit; None: no disk would."""
    trials = Trials(problem.with_limit(Tier.DISK, MOST_DISK_BYTES))
    moves = _leanest(problem, trials)
    starts = [start for start in moves.starts(spare=0, disk=True) if trials.may_fit(start)]
    filled = dict.fromkeys(moves.fill(start, order) for start in starts for order in ORDERS)
    found = _least_disk_bytes(trials, filled)
    return _least_disk_bytes(trials, dict.fromkeys(moves.leanest(trials.host_fits))) if found is None else found


def _least_disk_bytes(trials: Trials, candidates: Iterable[Candidate]) -> int | None:
    fitting = [one for one in candidates if one.disk and trials.may_fit(one)]
    for candidate in sorted(fitting, key=lambda one: trials.guess(one).disk_bytes):
        needs = trials.needs(candidate)
        if trials.within(needs):
            return needs.disk_bytes
    return None
