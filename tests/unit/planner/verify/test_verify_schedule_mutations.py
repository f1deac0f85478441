"""Planted errors of every kind, in every place of real schedules: verify objects to all of them.

Some changes are not always errors. There an independent witness decides: what verify lets pass must run through on
lanes of random speed, with no chunk overwritten, read too early or left behind, and within the forecast peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from hightide.ir.action import Mode, Schedule
from hightide.ir.activation import Activation
from hightide.ir.block import Affine, ModelProfile
from hightide.ir.plan import BlockPlan, GradientDtype, Plan, Update
from hightide.ir.tier import Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.lower import lower
from hightide.planner.predict.peaks import peaks
from unit.planner import mutations
from unit.planner.profiles import (
    UNLIMITED,
    Sketch,
    build,
    call,
    finish,
    looked_up,
    param,
    plan_with,
    rounded_on_gpu,
    stack,
    verify_within,
    with_tables,
)
from unit.planner.random_lanes import RandomLanes


def adapters() -> ModelProfile:
    """Frozen blocks with little ones that are trained, and parameters that no block owns."""
    params, sketches = [param("loose", 64)], [Sketch("", ["loose"], loose=True)]
    for layer in range(3):
        params += [param(f"{layer}.frozen", 2048, trainable=False, group=None), param(f"{layer}.adapter", 64)]
        sketches.append(Sketch(f"layers.{layer}", [f"{layer}.frozen", f"{layer}.adapter"]))
    return build(params, sketches, [call(block, first=block == 1) for block in (1, 2, 3)])


def mixed(profile: ModelProfile, update: Update, slot_numel: int = 1024) -> Plan:
    """Each block another way."""
    ways = [
        (Tier.GPU, Tier.GPU, Activation.RECOMPUTE, Tier.GPU),
        (Tier.HOST, Tier.HOST, Activation.RECOMPUTE, Tier.HOST),
        (Tier.GPU, Tier.HOST, Activation.RECOMPUTE, Tier.GPU),
        (Tier.HOST, Tier.HOST, Activation.KEEP, Tier.GPU),
    ]
    blocks = [BlockPlan(block.name, *ways[block.index % len(ways)]) for block in profile.blocks]
    return replace(finish(profile, blocks, update, 2, 1, 1, slot_numel), gradients=GradientDtype.PARAM)


def settling(plan: Plan) -> Plan:
    """Whose states are written after parameters."""
    return replace(plan, blocks=tuple(replace(block, settles=True) for block in plan.blocks))


def twice() -> ModelProfile:
    """An embedding that is called twice."""
    profile = stack(2)
    again = replace(profile.calls[0], kind=4, new_inputs=Affine())
    return with_tables(replace(profile, calls=(profile.calls[0], again, *profile.calls[1:])), 0)


def parked(profile: ModelProfile, states: Tier, of: Callable[[int], tuple[bool, bool]]) -> Plan:
    """Whose gradients park, and who is late, by block."""
    plan = plan_with(profile, states=states, inputs=Tier.HOST, update=Update.IN_BACKWARD)
    blocks = [replace(block, parks=of(at)[0], late=of(at)[1]) for at, block in enumerate(plan.blocks)]
    return finish(profile, blocks, plan.update, plan.micro_batch, 1, 1)


STACK, TIED, ADAPTERS, TABLES = stack(4), stack(3, tied=True), adapters(), twice()
NARROW = stack(6, dtype="bfloat16")  # as many as are worth grad slots
RESIDENT = rounded_on_gpu(NARROW, plan_with(NARROW, params=Tier.GPU, states=Tier.GPU))
CASES: dict[str, tuple[ModelProfile, Plan, Mode]] = {
    "streamed": (STACK, plan_with(STACK, inputs=Tier.HOST, slot_numel=3200), Mode.TRAIN),
    "streamed, in backward": (STACK, plan_with(STACK, update=Update.IN_BACKWARD, spare=2), Mode.TRAIN),
    "streamed, accumulating": (STACK, plan_with(STACK, inputs=Tier.HOST), Mode.ACCUMULATE),
    "streamed, evaluating": (STACK, plan_with(STACK), Mode.EVAL),
    "persistent": (STACK, plan_with(STACK, params=Tier.GPU, states=Tier.GPU), Mode.TRAIN),
    "persistent, in backward": (
        STACK,
        plan_with(STACK, params=Tier.GPU, states=Tier.GPU, update=Update.IN_BACKWARD),
        Mode.TRAIN,
    ),
    "parameters only": (STACK, plan_with(STACK, params=Tier.GPU, activation=Activation.KEEP), Mode.TRAIN),
    "tied": (TIED, plan_with(TIED, slot_numel=1024), Mode.TRAIN),
    "tied, accumulating": (TIED, plan_with(TIED), Mode.ACCUMULATE),
    "mixed": (STACK, mixed(STACK, Update.DEFERRED), Mode.TRAIN),
    "rounded on the gpu": (NARROW, RESIDENT, Mode.TRAIN),
    "rounded on the gpu, accumulating": (NARROW, RESIDENT, Mode.ACCUMULATE),
    "mixed, rounded on the gpu": (NARROW, rounded_on_gpu(NARROW, mixed(NARROW, Update.DEFERRED, 3200)), Mode.TRAIN),
    "mixed, in backward": (STACK, mixed(STACK, Update.IN_BACKWARD), Mode.TRAIN),
    "disk": (STACK, plan_with(STACK, Tier.DISK, Tier.DISK), Mode.TRAIN),
    "disk, in backward": (STACK, plan_with(STACK, states=Tier.DISK, update=Update.IN_BACKWARD), Mode.TRAIN),
    "disk, tied": (TIED, plan_with(TIED, Tier.DISK, Tier.DISK, update=Update.IN_BACKWARD), Mode.TRAIN),
    "disk, late": (STACK, parked(STACK, Tier.DISK, lambda at: (at % 3 != 1, at % 3 == 2)), Mode.TRAIN),
    "rings, in backward": (STACK, parked(STACK, Tier.HOST, lambda at: (at == 2, False)), Mode.TRAIN),
    "disk, accumulating": (TIED, plan_with(TIED, Tier.DISK, Tier.DISK, num_buffers=1), Mode.ACCUMULATE),
    "looked up": (TABLES, looked_up(TABLES, plan_with(TABLES)), Mode.TRAIN),
    "looked up, in backward": (TABLES, looked_up(TABLES, plan_with(TABLES, update=Update.IN_BACKWARD)), Mode.TRAIN),
    "looked up, accumulating": (TABLES, looked_up(TABLES, plan_with(TABLES)), Mode.ACCUMULATE),
    "looked up, evaluating": (TABLES, looked_up(TABLES, plan_with(TABLES)), Mode.EVAL),
    "settling": (STACK, settling(mixed(STACK, Update.DEFERRED)), Mode.TRAIN),
    "settling, tied, accumulating": (TIED, settling(plan_with(TIED)), Mode.ACCUMULATE),
    "adapters": (ADAPTERS, plan_with(ADAPTERS, states=Tier.GPU), Mode.TRAIN),
}


@cache
def lowered(name: str) -> tuple[ModelProfile, Plan, Schedule]:
    profile, plan, mode = CASES[name]
    schedule = lower(profile, plan, mode)
    verify_within(profile, plan, schedule, UNLIMITED, UNLIMITED)
    return profile, plan, schedule


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[ModelProfile, Plan, Schedule]:
    return lowered(request.param)


def by_turns(kinds: Sequence[Callable[..., mutations.Mutants]]) -> list[Any]:
    """Each kind in every second schedule, and in each schedule every second kind; the rest is `long`."""
    return [
        pytest.param(
            name, kind, marks=() if (row + column) % 2 == 0 else pytest.mark.long, id=f"{name}-{kind.__name__}"
        )
        for row, name in enumerate(CASES)
        for column, kind in enumerate(kinds)
    ]


def accepted(
    case: tuple[ModelProfile, Plan, Schedule], mutants: mutations.Mutants, limit_bytes: int = UNLIMITED
) -> tuple[list[tuple[str, Schedule]], int]:
    """Those that verify lets pass, and how many there were."""
    profile, plan, _ = case
    passed, count = [], 0
    for what, mutant in mutants:
        count += 1
        try:
            verify_within(profile, plan, mutant, limit_bytes, limit_bytes)
        except InfeasiblePlan:
            continue
        passed.append((what, mutant))
    return passed, count


@pytest.mark.parametrize(("name", "kind"), by_turns(mutations.ERRORS))
def test_every_planted_error_is_found(name: str, kind: Callable[..., mutations.Mutants]) -> None:
    case = lowered(name)
    passed, _ = accepted(case, kind(case[2]))
    assert [what for what, _ in passed] == []


def test_capacity_is_checked_at_every_moment_on_every_tier(case: tuple[ModelProfile, Plan, Schedule]) -> None:
    schedule = case[2]
    peak = peaks(schedule)
    limit_bytes = max(peak.gpu_peak_bytes, peak.host_peak_bytes)
    passed, count = accepted(case, mutations.too_much_memory(schedule, limit_bytes), limit_bytes)
    expected = 0 if schedule.mode is not Mode.EVAL else count  # an evaluation's capacity is left to the stores
    assert len(passed) == expected, passed[0][0]


@pytest.mark.parametrize(("name", "kind"), by_turns(mutations.CHANGES))
def test_what_passes_runs_at_any_speed(name: str, kind: Callable[..., mutations.Mutants]) -> None:
    case = lowered(name)
    plan = case[1]
    passed, _ = accepted(case, kind(case[2]))
    for seed, (what, mutant) in enumerate(passed):
        peak = peaks(mutant)
        try:
            lanes = RandomLanes(plan, mutant, seed).run()
        except AssertionError as error:
            raise AssertionError(f"verify lets pass: {what}; on lanes of random speed: {error}") from error
        assert lanes.gpu_peak_bytes <= peak.gpu_peak_bytes and lanes.host_peak_bytes <= peak.host_peak_bytes, what


def test_the_kinds_are_not_empty() -> None:
    """Every kind plants many errors, and verify objects to many of the changes too."""
    schedules = [lower(profile, plan, mode) for profile, plan, mode in CASES.values()]
    planted = {kind.__name__: sum(len(list(kind(schedule))) for schedule in schedules) for kind in mutations.ERRORS}
    assert min(planted.values()) >= 100, planted
    profile, plan, _ = CASES["streamed"]
    for kind in mutations.CHANGES:
        passed, count = accepted((profile, plan, schedules[0]), kind(schedules[0]))
        assert count - len(passed) >= 10, (kind.__name__, count, len(passed))
