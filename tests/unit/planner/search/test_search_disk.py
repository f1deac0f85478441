"""Plans from a disk on a model of real shape: near their bound, and no slower than GreedySnake's would be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from hightide.cli.workload import load_workload
from hightide.doctor.known import load_machine
from hightide.ir.action import Op
from hightide.ir.block import ModelProfile
from hightide.ir.plan import GradientDtype, Update
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner.advice.helpful import Circumstances, improvements
from hightide.planner.chunk_place import Buffer
from hightide.planner.lower import lower_step
from hightide.planner.placement import Placement
from hightide.planner.predict.bounds import disk_s, least_step_s
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.step_seconds import seconds_of
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.candidate import Candidate
from hightide.planner.search.ladders import Kind
from hightide.planner.search.moves import Moves
from hightide.planner.search.search import search
from hightide.planner.search.space import MOST_LATE
from hightide.planner.search.trials import Trials
from hightide.planner.solution import Searched
from hightide.planner.verify.check_plan import check_plan

GIB = 2**30


NUM_REFEREED = 6  # so many plans of a program's are simulated, of those that it finds best


@cache
def profile_of(model: str, num_samples: int) -> ModelProfile:
    return load_workload(model, num_samples, 2048, None, None).profile()


@cache
def problem(num_samples: int, host: int, model: str = "llama-3.2-3b", preset: str = "h200", gpu: int = 24) -> Problem:
    """Sequences of 2048."""
    machine, profile = load_machine(preset), profile_of(model, num_samples)
    terms = Terms(gpu * GIB, host * GIB, Update.IN_BACKWARD, gradients=GradientDtype.PARAM, disk_bytes=200 * GIB)
    return Problem(profile, estimate(profile, machine), machine, terms)


@cache
def searched(*point: Any) -> Searched:
    return search(problem(*point))


@pytest.mark.parametrize(
    ("num_samples", "host", "most"),
    [
        (96, 30, 1.15),
        *(
            pytest.param(*point, marks=pytest.mark.long)
            for point in ((64, 30, 1.1), (64, 40, 1.02), (32, 30, 1.02), (32, 40, 1.02), (96, 40, 1.05))
        ),
    ],
)
def test_steps_are_near_their_bound(num_samples: int, host: int, most: float) -> None:
    """What their longest lane needs alone, and nearer to what also counts the turn of the step, at which the disk has
    nothing to do. Of the last in 30 GiB, inputs alone are 32 GiB."""
    found = searched(num_samples, host)
    moved = {lane: found.passes.moved_bytes(lane) for lane in (Lane.DISK_READ, Lane.DISK_WRITE)}
    alone_s = max(disk_s(found.problem.machine, *moved.values()), found.step.simulated.action_s[Lane.COMPUTE])
    assert found.step.step_s <= most * alone_s
    assert found.step.step_s <= (1.04 if most < 1.1 else 1.1) * least_step_s(found.problem, found.placement)
    check_plan(found.profile, found.plan)
    found.verify()  # within the limits


@dataclass(frozen=True)
class Layer:
    """What GreedySnake measures: seconds and bytes of one layer, all of them alike."""

    forward_s: float
    backward_s: float
    param_bytes: int
    state_bytes: int
    update_s: float


Row = tuple[tuple[float, ...], float]  # factors of variables, and what their sum may be at most


def maximised(gains: tuple[float, ...], rows: list[Row]) -> list[float]:
    """The variables, none below zero, for which the sum of gains is largest: the simplex method, from all at zero, as
    every row must allow. The first column that gains enters (Bland), so that it ends."""
    number, height = len(gains), len(rows)
    table = [[*factors, *(float(at == row) for at in range(height)), most] for row, (factors, most) in enumerate(rows)]
    assert all(row[-1] >= 0 for row in table)
    goal = [*(-gain for gain in gains), *[0.0] * (height + 1)]
    basis = [number + row for row in range(height)]
    while (enters := next((at for at, value in enumerate(goal[:-1]) if value < -1e-12), None)) is not None:
        ratios = [(row[-1] / row[enters], basis[at], at) for at, row in enumerate(table) if row[enters] > 1e-12]
        assert ratios, "nothing bounds it"
        leaves = min(ratios)[2]
        basis[leaves] = enters
        table[leaves] = [value / table[leaves][enters] for value in table[leaves]]
        for row in (*(row for at, row in enumerate(table) if at != leaves), goal):
            factor = row[enters]
            row[:] = [value - factor * pivot for value, pivot in zip(row, table[leaves], strict=True)]
    found = dict(zip(basis, (row[-1] for row in table), strict=True))
    return [found.get(at, 0.0) for at in range(number)]


def test_the_simplex_method_finds_what_is_known() -> None:
    """Of a textbook's two products, and one whose first row holds at zero."""
    assert maximised((3.0, 5.0), [((1.0, 0.0), 4.0), ((0.0, 2.0), 12.0), ((3.0, 2.0), 18.0)]) == pytest.approx([2, 6])
    assert maximised((1.0, 1.0), [((-1.0, 1.0), 0.0), ((1.0, 1.0), 2.0)]) == pytest.approx([2, 0])


@dataclass(frozen=True)
class GreedySnake:
    """Its linear program, one for each α: shares of parameters and of states on the host, within its memory, and the
    seconds of forward and backward, whose sum is to be least, bounded from below by compute, link, disk and update.
    Nothing stays on the GPU, everything is recomputed, inputs wait on the host."""

    problem: Problem
    layer: Layer
    num_layers: int

    def shares(self, free_bytes: int, num_away: int, alpha: float) -> tuple[float, float, float]:
        """Seconds of a step, and the shares of parameters and of states that are on the host. `num_away`: layers that
        are not on the GPU. What is asked for is by how much the two times are below `most_s`: at zero all rows hold."""
        one, machine, count = self.layer, self.problem.machine, self.num_layers
        speeds = machine.speeds_of({Lane.DISK_READ, Lane.DISK_WRITE})
        params, states = num_away * one.param_bytes, num_away * one.state_bytes
        compute = count * one.forward_s, count * one.backward_s
        rates = speeds[Lane.DISK_READ], speeds[Lane.DISK_WRITE], machine.best_speed(Lane.H2D)
        most_s = sum(compute) + 4 * (params + states) / min(rates) + num_away * one.update_s
        rows: list[Row] = [((1, 0, 0, 0), 1.0), ((-1, 1, 0, 0), 0.0), ((params, states, 0, 0), float(free_bytes))]
        for at, share in enumerate((alpha, 1 - alpha)):
            saved = (1.0, 0.0) if at == 0 else (0.0, 1.0)
            read, written = (1 + share) * params / rates[0], share * params / rates[1]
            for per_params, per_states in ((read, states / rates[0]), (written, states / rates[1])):
                rows.append(((-per_params, -share * per_states, *saved), most_s - per_params - share * per_states))
            for least_s in (compute[at], params / rates[2], share * num_away * one.update_s):
                rows.append(((0.0, 0.0, *saved), most_s - least_s))
        on_host, states_on_host, forward, backward = maximised((0.0, 0.0, 1.0, 1.0), rows)
        return 2 * most_s - forward - backward, on_host, states_on_host

    def plans(self, trials: Trials, fills_gpu: bool) -> Iterator[tuple[float, Candidate]]:
        """Of each program its best shares, in whole layers. `fills_gpu`: it may do more than GreedySnake, and keep what
        fits there."""
        moves = Moves(trials.space, trials.may_fit, (4, 2, 1))
        for micro_batch, late in product(moves.micro_batches, range(0, MOST_LATE + 1, 2)):
            bare = Candidate(micro_batch, Tier.HOST, 1, disk=True, state_buffers=2, read_buffers=2, late=late)
            bare = moves.fill(bare, (Kind.WHOLE,)) if fills_gpu else bare
            away = [block for block in trials.space.movable if block not in bare.whole]
            free_bytes = self.problem.terms.host_bytes - trials.guess(bare).host_bytes
            if not trials.may_fit(bare):
                continue
            step_s, *shares = self.shares(free_bytes, min(len(away), self.num_layers), late / MOST_LATE)
            params, states = (away[: round(share * len(away))] for share in shares)
            while not trials.may_fit(made := _with(bare, params, states)):
                params, states = (params, states[:-1]) if states else (params[:-1], states)
            yield step_s, made


def _with(candidate: Candidate, params: list[int], states: list[int]) -> Candidate:
    return replace(candidate, host_params=frozenset(params) | frozenset(states), host_states=frozenset(states))


def referee(asked: Problem) -> GreedySnake:
    """Times of the widest of its layers."""
    trials = Trials(asked)
    placement = trials.space.placed(Candidate(1, Tier.HOST, 1, disk=True, state_buffers=2, read_buffers=2))
    plan = placement.plan
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


THREE, ONE = "llama-3.2-3b", "llama-3.2-1b"
POINTS = ((THREE, "h200", 64, 24, 40),)
MORE_POINTS = ((ONE, "h200", 32, 8, 12), (THREE, "rtx-4090", 32, 22, 24), (THREE, "h200", 32, 24, 30))
MORE_POINTS += ((ONE, "rtx-4090", 32, 12, 8), (ONE, "rtx-4090", 16, 8, 10))


@pytest.mark.parametrize(
    ("model", "machine", "num_samples", "gpu", "host"),
    [*POINTS, *(pytest.param(*point, marks=pytest.mark.long) for point in MORE_POINTS)],
)
def test_no_slower_than_the_plan_of_greedysnakes_program(
    model: str, machine: str, num_samples: int, gpu: int, host: int
) -> None:
    """Of what the programs find best, with the GPU as GreedySnake leaves it and filled first, simulated as ours is."""
    asked = problem(num_samples, host, model, machine, gpu)
    found = searched(num_samples, host, model, machine, gpu)
    assert any(block.states is Tier.DISK for block in found.plan.blocks), "no question for a disk"
    trials, program = Trials(asked), referee(asked)
    best = math.inf
    for fills_gpu in (False, True):
        ranked = sorted(program.plans(trials, fills_gpu), key=lambda one: one[0])
        best = min([best, *(trials.step_s(one) for _, one in ranked[:NUM_REFEREED])])
    assert best < math.inf, "none of its plans fits to the byte"
    assert found.step.step_s <= 1.03 * best


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
