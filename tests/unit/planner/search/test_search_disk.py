"""Plans from a disk on a model of real shape: near their bound, and no slower than GreedySnake's would be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest

from hightide.cli.workload import load_workload
from hightide.doctor.known import load_machine
from hightide.ir.action import Op
from hightide.ir.plan import GradientDtype, Update
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner.advice.helpful import Circumstances, improvements
from hightide.planner.lower import lower_step
from hightide.planner.placement import Buffer, Placement
from hightide.planner.predict.bounds import least_step_s
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.step_seconds import seconds_of
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.candidate import Candidate
from hightide.planner.search.moves import Kind, Moves
from hightide.planner.search.search import search
from hightide.planner.search.space import MOST_LATE
from hightide.planner.search.trials import Trials
from hightide.planner.solution import Searched
from hightide.planner.verify.check_plan import check_plan

GIB = 2**30


@cache
def problem(num_samples: int, host: int, model: str = "llama-3.2-3b") -> Problem:
    """Sequences of 2048, in 24 GiB of an h200."""
    machine = load_machine("h200")
    profile = load_workload(model, num_samples, 2048, None, None).profile()
    terms = Terms(24 * GIB, host * GIB, Update.IN_BACKWARD, gradients=GradientDtype.PARAM, disk_bytes=200 * GIB)
    return Problem(profile, estimate(profile, machine), machine, terms)


@cache
def searched(num_samples: int, host: int) -> Searched:
    return search(problem(num_samples, host))


@pytest.mark.parametrize(
    ("num_samples", "host", "most"),
    [
        (64, 30, 1.15),
        (96, 30, 1.25),
        (64, 40, 1.05),
        *(pytest.param(*point, marks=pytest.mark.long) for point in ((32, 30, 1.05), (32, 40, 1.05), (96, 40, 1.1))),
    ],
)
def test_steps_are_near_their_bound(num_samples: int, host: int, most: float) -> None:
    """Of the last in 30 GiB, inputs alone are 32 GiB: parameters are on disk too."""
    found = searched(num_samples, host)
    assert found.step.step_s <= most * least_step_s(found.problem, found.placement)
    check_plan(found.profile, found.plan)
    found.verify()  # within the limits


OTHERWISE = ((32, 30, False), (64, 40, True))  # of samples, host and whether the GPU is filled


@dataclass(frozen=True)
class Layer:
    """What GreedySnake measures: seconds and bytes of one layer, all of them alike."""

    forward_s: float
    backward_s: float
    param_bytes: int
    state_bytes: int
    update_s: float


@dataclass(frozen=True)
class GreedySnake:
    """Its linear program, one for each α: the least forward and backward under the bounds of compute, disk, update and
    host memory, for shares of parameters and states on the host. Nothing stays on the GPU, everything is recomputed,
    inputs wait on the host. Shares are whole layers, as a plan has them, so that all vertices can be looked at."""

    problem: Problem
    layer: Layer
    num_layers: int

    def step_s(self, on_host: int, states_on_host: int, alpha: float) -> float:
        disk, one, count = self.problem.machine.disk, self.layer, self.num_layers
        assert disk is not None
        speeds = self.problem.machine.speeds_of({Lane.DISK_READ, Lane.DISK_WRITE})
        read, written = (speeds[lane] for lane in (Lane.DISK_READ, Lane.DISK_WRITE))
        fetched_s = (count - on_host) * one.param_bytes / read
        stored = one.state_bytes * (count - states_on_host) + one.param_bytes * (count - on_host)
        states_s = max(stored / read, stored / written)
        forward = max(count * one.forward_s, fetched_s + alpha * states_s, alpha * count * one.update_s)
        backward = max(count * one.backward_s, fetched_s + (1 - alpha) * states_s, (1 - alpha) * count * one.update_s)
        return forward + backward

    def plans(self, trials: Trials, fills_gpu: bool) -> Iterator[tuple[float, Candidate]]:
        """With what the host can hold beside inputs and buffers. `fills_gpu`: it may do more than GreedySnake, and keep
        what fits there."""
        moves = Moves(trials.space, trials.may_fit, (4, 2, 1))
        for micro_batch, late in product(moves.micro_batches, range(0, MOST_LATE + 1, 2)):
            bare = Candidate(micro_batch, Tier.HOST, 1, disk=True, state_buffers=2, read_buffers=2, late=late)
            bare = moves.fill(bare, (Kind.WHOLE,)) if fills_gpu else bare
            movable = [block for block in trials.space.movable if block not in bare.whole]
            for on_host in range(len(movable) + 1):
                params = replace(bare, host_params=frozenset(movable[:on_host]))
                fits = [count for count in range(on_host + 1) if trials.may_fit(_with_states(params, movable[:count]))]
                if fits:
                    counts = (count + self.num_layers - len(movable) for count in (on_host, max(fits)))
                    yield self.step_s(*counts, late / MOST_LATE), _with_states(params, movable[: max(fits)])


def _with_states(candidate: Candidate, blocks: list[int]) -> Candidate:
    return replace(candidate, host_states=frozenset(blocks))


def referee(asked: Problem) -> GreedySnake:
    """Times of the widest of its layers."""
    trials = Trials(asked)
    plan = trials.space.build(Candidate(4, Tier.HOST, 1, disk=True, state_buffers=2, read_buffers=2))
    placement = trials.space.placement(plan)
    seconds = seconds_of(asked.profile, plan, asked.costs, placement)
    ticks = lower_step(asked.profile, plan, placement).last.ticks
    place = placement.by_block[2][0]
    layers = [
        at for at, places in enumerate(placement.by_block) if [p.chunk.numel for p in places] == [place.chunk.numel]
    ]
    forward, backward = (
        sum(seconds(tick) for tick in ticks if tick.op is op) / len(layers) for op in (Op.FORWARD, Op.BACKWARD)
    )
    update_s = place.update_bytes / asked.machine.best_speed(Lane.CPU)
    layer = Layer(forward, backward, place.chunk.param_bytes, place.chunk.state_bytes, update_s)
    return GreedySnake(asked, layer, len(layers))


@pytest.mark.parametrize(
    ("num_samples", "host", "fills_gpu"),
    [(32, 30, True), (64, 40, False), *(pytest.param(*case, marks=pytest.mark.long) for case in OTHERWISE)],
)
def test_no_slower_than_the_plan_of_greedysnakes_program(num_samples: int, host: int, fills_gpu: bool) -> None:
    asked = problem(num_samples, host)
    trials = Trials(asked)
    ranked = sorted(referee(asked).plans(trials, fills_gpu), key=lambda one: one[0])
    fitting = [step_s for _, one in ranked[:40] if (step_s := trials.step_s(one)) < math.inf]
    assert fitting, "none of its plans fits to the byte"
    theirs_s = min(fitting)  # of those that it finds best
    assert searched(num_samples, host).step.step_s <= 1.03 * theirs_s


def test_a_wide_head_does_not_widen_the_buffers_of_all_layers() -> None:
    """As wide as two layers and a half: from a disk it would take 5 GiB more of the host, for buffers."""
    found = search(problem(16, 64, "llama-3.1-8b"))
    head, layer = found.profile.blocks[-1].index, found.profile.blocks[-3].index
    states = [place.chunk.state_bytes for place in found.placement.by_block[layer]]
    assert found.plan.blocks[layer].states is Tier.DISK and found.plan.blocks[head].states is not Tier.DISK
    assert found.placement.buffer_bytes[Buffer.UPDATED] <= max(states) + 2 * GIB // 100
    rings = replace(found.candidate, grad_buffers=0)
    assert found.step.step_s < 0.9 * Trials(found.problem).step_s(_that_fits(found.problem, rings))


def _that_fits(asked: Problem, candidate: Candidate) -> Candidate:
    """With less of the host for states: gradients of all blocks park."""
    trials = Trials(asked)
    return next(Moves(trials.space, trials.may_fit, (candidate.micro_batch,)).refilled([candidate]))


def test_more_samples_are_proposed_where_the_disk_is_the_limit() -> None:
    """Parameters and states move as often for many samples as for few."""
    asked = problem(32, 30)
    few = search(asked.with_samples(4).with_terms(host_bytes=12 * GIB))
    busy_s = few.step.simulated.busy_s
    assert max(busy_s, key=lambda lane: busy_s[lane]) in (Lane.DISK_READ, Lane.DISK_WRITE)
    found = improvements(few, Circumstances(gpu_memory_bytes=0), _first(2))
    by_option = {one.change.option: one.speedup for one in found.found}
    assert by_option["--sequences 8"] > 1.3 and by_option["--sequences 16"] > by_option["--sequences 8"]
    assert few.plan.num_samples == 4, "proposed, not imposed"


def _first(number: int):  # type: ignore[no-untyped-def]
    answers = iter([True] * number)
    return lambda: next(answers, False)


def test_one_call_reads_parameters_twice_and_several_calls_twice_each() -> None:
    asked = problem(32, 30).with_terms(update=Update.DEFERRED)
    trials = Trials(asked)
    plan = trials.space.build(Candidate(2, Tier.HOST, 1, disk=True, state_buffers=1, read_buffers=1, grad_buffers=1))

    def read_bytes(calls: int) -> int:
        step = replace(plan, accumulate=calls, num_samples=32 // calls)
        profile = replace(asked.profile, num_samples=32 // calls)
        runs = lower_step(profile, step, Placement(step)).runs
        reads = [(one, count) for schedule, count in runs for one in schedule.lane(Lane.DISK_READ)]
        return sum(count * one.num_bytes for one, count in reads if one.kind is ChunkKind.PARAM)

    once = sum(chunk.param_bytes for chunk in plan.layout.chunks)
    kept = 2 * max(chunk.param_bytes for chunk in plan.layout.chunks) + once // 8  # that each turn finds in slots
    for calls in (1, 4):
        assert 2 * calls * once - calls * kept <= read_bytes(calls) <= 2 * calls * once
