"""The search on W1 (llama-3.2-3b), estimated for an H200: against plans written by hand, and when the world changes.
The arguments for the directions are in docs/planning.md. All times are simulated."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from hightide.cli.workload import load_workload
from hightide.doctor.known import load_machine
from hightide.ir.action import Mode
from hightide.ir.block import ModelProfile
from hightide.ir.machine import Machine
from hightide.ir.plan import GradientDtype, Plan, Update
from hightide.ir.tier import Lane
from hightide.planner.lower import lower
from hightide.planner.mechanism import NONE, Mechanism, Mechanisms
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.peaks import reserved_bytes
from hightide.planner.problem import Problem, Terms
from hightide.planner.search import moves
from hightide.planner.search.candidate import Candidate
from hightide.planner.search.search import search
from hightide.planner.search.trials import Trials
from hightide.planner.solution import Searched
from unit.planner.profiles import forecast_of

PLANS = Path(__file__).parents[4] / "bench" / "plans"
GIB = 1024**3
HOST_BYTES = 112 * GIB
BASE = "w1-24gib"  # 32,768 tokens, in backward
FEWER_TOKENS = "w1-8k-24gib"  # 8,192


@cache
def hand_written(name: str) -> tuple[Plan, ModelProfile]:
    plan = Plan.load(PLANS / f"{name}.json")
    profile = load_workload("llama-3.2-3b", plan.num_samples, 2048, None, None).profile()
    assert profile.fingerprint == plan.fingerprint
    return replace(plan, profile=profile), profile


@cache
def found(name: str, machine: Machine, gpu_bytes: int | None = None, without: Mechanisms = NONE) -> Searched:
    plan, profile = hand_written(name)
    limit_bytes = gpu_bytes or plan.gpu_limit_bytes
    costs = estimate(profile, load_machine("h200"))
    terms = Terms(limit_bytes, HOST_BYTES, plan.update, gradients=GradientDtype.PARAM, in_parts=True, without=without)
    result = search(Problem(profile, costs, machine, terms))
    assert reserved_bytes(lower(profile, result.plan, Mode.TRAIN)) == result.plan.forecast.gpu_bytes <= limit_bytes
    assert result.plan.forecast.host_peak_bytes <= HOST_BYTES
    return result


def slowed(machine: Machine, lanes: set[Lane], factor: float) -> Machine:
    speeds = []
    for entry in machine.speeds:
        pairs = zip(entry.busy, entry.bytes_per_s, strict=True)
        speeds.append(replace(entry, bytes_per_s=tuple(s * factor if lane in lanes else s for lane, s in pairs)))
    return replace(machine, speeds=tuple(speeds))


def base() -> Searched:
    return found(BASE, load_machine("h200"))


def moved_bytes(result: Searched) -> int:
    assert result.plan.profile is not None
    schedule = lower(result.plan.profile, result.plan, Mode.TRAIN)
    return sum(action.num_bytes for lane in (Lane.H2D, Lane.D2H) for action in schedule.lane(lane))


def num_whole(result: Searched) -> int:
    """Blocks with their states on the GPU."""
    return len(result.candidate.whole)


def kept_bytes(result: Searched) -> int:
    """Activations and logits that are not made twice."""
    assert result.plan.profile is not None
    return sum(tick.gpu_kept for tick in lower(result.plan.profile, result.plan, Mode.TRAIN).ticks) // 2


@pytest.mark.parametrize(
    "name", ["w1-24gib", "w1-24gib-clip", pytest.param("w1-8gib", marks=pytest.mark.long), "w1-8k-24gib"]
)
def test_no_slower_than_the_plan_that_a_person_wrote(name: str) -> None:
    plan, profile = hand_written(name)
    machine = load_machine("h200")
    hand = forecast_of(profile, plan, estimate(profile, machine), machine)
    assert found(name, machine).step.step_s <= 1.01 * hand.step_s


def test_a_slow_link_moves_fewer_bytes() -> None:
    slow = found(BASE, slowed(load_machine("h200"), {Lane.H2D, Lane.D2H}, 0.1))
    assert moved_bytes(slow) < 0.7 * moved_bytes(base())
    assert slow.step.step_s > base().step.step_s


def test_slow_host_memory_moves_states_to_the_gpu() -> None:
    """At half its speed the update nearly hides behind compute; at a third it does not."""
    third = found(BASE, slowed(load_machine("h200"), {Lane.CPU}, 1 / 3))
    assert num_whole(third) > num_whole(base())
    assert third.step.step_s > 1.03 * base().step.step_s


@pytest.mark.long
def test_host_memory_of_half_the_speed_changes_little() -> None:
    half = found(BASE, slowed(load_machine("h200"), {Lane.CPU}, 1 / 2))
    assert num_whole(half) >= num_whole(base())
    assert half.step.step_s == pytest.approx(base().step.step_s, rel=0.03)


def test_more_gpu_memory_keeps_more_and_is_faster() -> None:
    less = found(BASE, load_machine("h200"), gpu_bytes=16 * GIB)
    assert kept_bytes(less) < kept_bytes(base())
    assert less.step.step_s > base().step.step_s


def test_more_tokens_hide_updates_so_memory_goes_to_activations() -> None:
    few = found(FEWER_TOKENS, load_machine("h200"))
    assert num_whole(few) > num_whole(base())
    assert kept_bytes(few) < kept_bytes(base())


def test_clipping_leaves_only_forward_to_hide_updates() -> None:
    clipped = found("w1-24gib-clip", load_machine("h200"))
    assert clipped.plan.update is Update.DEFERRED
    assert num_whole(clipped) > num_whole(base())
    assert clipped.step.step_s > base().step.step_s


def test_states_are_written_later_where_forward_waits_for_updates() -> None:
    """With clipping; an update in backward has all of backward and of the next forward."""
    machine = load_machine("h200")
    chosen = found("w1-24gib-clip", machine)
    at_once = found("w1-24gib-clip", machine, without=frozenset({Mechanism.STATES_LATER}))
    assert chosen.candidate.settles and not at_once.candidate.settles
    assert chosen.step.step_s < 0.95 * at_once.step.step_s
    assert not base().candidate.settles


def clipped_on_a_4090(machine: Machine, without: Mechanisms = NONE) -> Searched:
    """W1 with exact clipping on a card that computes five times slower than an H200, behind half the link."""
    _, profile = hand_written(BASE)
    costs = estimate(profile, load_machine("rtx-4090"))
    terms = Terms(24 * GIB, HOST_BYTES, Update.DEFERRED, gradients=GradientDtype.PARAM, without=without)
    return search(Problem(profile, costs, machine, terms))


def test_swap_is_chosen_where_the_link_hides_it_and_is_worth_its_while() -> None:
    chosen = clipped_on_a_4090(load_machine("rtx-4090"))
    stalled = chosen.step.simulated.stall_s
    assert len(chosen.candidate.swapped) >= 14
    assert sum(stalled.get(lane, 0.0) for lane in (Lane.H2D, Lane.D2H)) < 0.05 * chosen.step.step_s
    without = clipped_on_a_4090(load_machine("rtx-4090"), frozenset({Mechanism.SWAP}))
    assert not without.candidate.swapped
    assert without.step.step_s > 1.03 * chosen.step.step_s


def test_swap_is_not_chosen_behind_a_slow_link() -> None:
    slow = slowed(load_machine("rtx-4090"), {Lane.H2D, Lane.D2H}, 0.1)
    assert not clipped_on_a_4090(slow).candidate.swapped


def swapping(machine: Machine, spacing: int) -> float:
    """The step with seven layers that swap, so far apart, and all others recomputed."""
    _, profile = hand_written(BASE)
    terms = Terms(40 * GIB, 4 * HOST_BYTES, Update.IN_BACKWARD, gradients=GradientDtype.PARAM)
    trials = Trials(Problem(profile, estimate(profile, load_machine("h200")), machine, terms))
    blocks = frozenset(range(1, 1 + 7 * spacing, spacing))
    return trials.step_s(Candidate(profile.num_samples // 2, swapped=blocks))


def test_blocks_that_swap_hide_their_copies_behind_those_between_them() -> None:
    """A layer computes for 11 ms forward, and what it holds takes 33 ms to leave."""
    steps = [swapping(load_machine("h200"), spacing) for spacing in (1, 2, 3, 4)]
    assert steps == sorted(steps, reverse=True)
    assert steps[3] < 0.9 * steps[0]


@pytest.mark.long  # that it wins is above
def test_the_search_spaces_swap_where_that_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = slowed(load_machine("rtx-4090"), {Lane.H2D, Lane.D2H}, 0.6)
    chosen = clipped_on_a_4090(slower)
    blocks = sorted(chosen.candidate.swapped)
    assert len(blocks) >= 4 and min(after - before for before, after in pairwise(blocks)) >= 3
    monkeypatch.setattr(moves, "SPACINGS", (1,))
    assert clipped_on_a_4090(slower).step.step_s > chosen.step.step_s


def test_what_a_compiled_block_repeats_without_products_is_fused_too() -> None:
    _, profile = hand_written(BASE)
    layer = next(call for call in profile.calls if call.selective is not None)
    assert layer.selective is not None and not layer.selective.recompute.flop.at(1)
    cost = estimate(profile, load_machine("rtx-4090")).calls[layer.kind]
    assert cost.selective is not None
    assert cost.selective.recompute_s.at(16) < 0.1 * cost.recompute_s.at(16)
