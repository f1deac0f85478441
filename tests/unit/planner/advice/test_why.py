"""Other ways to plan one block."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hightide.ir.action import Mode
from hightide.ir.activation import Activation
from hightide.ir.block import Affine, Selective, Work
from hightide.ir.costs import Costs
from hightide.ir.machine import SIMULATED, Machine
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.planner.advice.why import Alternative, why
from hightide.planner.lower import lower
from hightide.planner.placement import Placement
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.peaks import peaks, reserved_bytes
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.candidate import Candidate
from hightide.planner.solution import Searched
from unit.planner.predict.test_step_seconds import with_gpu
from unit.planner.profiles import forecast_of, plan_with, stack

REAL = with_gpu(1e16, 1e12)  # with links of 1 MB/s
GPU = replace(REAL, gpu=replace(REAL.gpu, name=SIMULATED))  # where torch reserves nothing beside tensors
PROFILE = stack(dtype="bfloat16")
COSTS = estimate(PROFILE, GPU)


def planned(**decisions: object) -> Plan:
    plan = replace(plan_with(PROFILE, **decisions), profile=PROFILE)  # type: ignore[arg-type]
    peak = peaks(lower(PROFILE, plan, Mode.TRAIN))
    return replace(plan, gpu_limit_bytes=peak.gpu_peak_bytes + 100, host_limit_bytes=peak.host_peak_bytes + 2**20)


def solved(plan: Plan, costs: Costs = COSTS, machine: Machine = GPU) -> Searched:
    """As if a search had found it."""
    assert plan.profile is not None
    problem = Problem(plan.profile, costs, machine, Terms.of(plan))
    return Searched.made(problem, Candidate(plan.micro_batch), Placement(plan), num_simulated=0)


def alternatives(plan: Plan, block: str = "layers.2") -> dict[str, Alternative]:
    return {one.text: one for one in why(solved(plan), block).alternatives}


def test_differences_are_those_of_the_changed_plan() -> None:
    plan = planned()
    found = alternatives(plan)
    assert set(found) == {
        "params and states on the GPU",
        "params on the GPU, states on host",
        "activations kept",
        "inputs on host",
    }
    blocks = tuple(replace(b, params=Tier.GPU, states=Tier.GPU) if b.name == "layers.2" else b for b in plan.blocks)
    changed, one = replace(plan, blocks=blocks), found["params and states on the GPU"]
    before, after = (peaks(lower(PROFILE, each, Mode.TRAIN)) for each in (plan, changed))
    assert one.step_s == forecast_of(PROFILE, changed, COSTS, GPU).step_s
    assert one.step_difference_s == one.step_s - forecast_of(PROFILE, plan, COSTS, GPU).step_s < 0
    assert one.gpu_difference_bytes == after.gpu_peak_bytes - before.gpu_peak_bytes > 100
    assert one.host_difference_bytes == after.host_peak_bytes - before.host_peak_bytes < 0
    assert one.too_many_bytes == one.gpu_difference_bytes - 100
    assert found["inputs on host"].too_many_bytes == 0
    assert [each.step_s for each in found.values()] == sorted(each.step_s for each in found.values())


def test_what_fits_a_real_gpu_is_what_torch_reserves() -> None:
    plan = planned()
    reserved = reserved_bytes(lower(PROFILE, plan, Mode.TRAIN))
    assert reserved > plan.gpu_limit_bytes
    for limit, fits in ((plan.gpu_limit_bytes, False), (2 * reserved, True)):
        limited = solved(replace(plan, gpu_limit_bytes=limit), machine=REAL)
        found = {one.text: one for one in why(limited, "layers.2").alternatives}
        assert (found["inputs on host"].too_many_bytes == 0) == fits
    moved = tuple(replace(one, inputs=Tier.HOST) if one.name == "layers.2" else one for one in plan.blocks)
    then = reserved_bytes(lower(PROFILE, replace(plan, blocks=moved), Mode.TRAIN))
    assert found["inputs on host"].gpu_difference_bytes == then - reserved


def test_a_kept_block_may_be_recomputed() -> None:
    found = alternatives(planned(params=Tier.GPU, states=Tier.GPU, activation=Activation.KEEP))
    assert found["activations recomputed"].step_difference_s > 0
    assert "params streamed, states on host" in found and "recomputed, inputs on host" in found
    assert found["params streamed, states on host"].step_difference_s > 0


def test_levels_are_named_in_words() -> None:
    rule = Selective(Affine(0, 512), Work(), flop_per_byte=1, num_held=1)
    profile = replace(PROFILE, calls=tuple(replace(call, selective=rule) for call in PROFILE.calls))
    costs = estimate(profile, GPU)
    swapping = planned(activation=Activation.SELECTIVE)
    heads = {block.name for block in PROFILE.blocks if block.lazy_head}
    blocks = tuple(block if block.name in heads else replace(block, held=Tier.HOST) for block in swapping.blocks)
    reasons = {
        name: why(solved(replace(plan, profile=profile), costs), "layers.2")
        for name, plan in (("lean", planned()), ("swapping", replace(swapping, blocks=blocks)))
    }
    assert "; activations recomputed; " in reasons["lean"].planned
    assert "; activations swapped to the host; " in reasons["swapping"].planned
    texts = {name: {one.text for one in found.alternatives} for name, found in reasons.items()}
    assert {"activations kept", "activations kept in part", "activations swapped to the host"} <= texts["lean"]
    assert {"activations recomputed", "activations kept in part", "activations kept"} <= texts["swapping"]


def test_what_is_no_way_to_plan_a_block_is_left_out() -> None:
    assert not any("frozen" in text for text in alternatives(planned()))  # all of it is trained


def test_a_tied_head_is_planned_with_its_owner() -> None:
    profile = stack(tied=True, dtype="bfloat16")
    costs = estimate(profile, GPU)
    on_gpu = plan_with(profile, Tier.GPU, Tier.GPU)
    head = replace(on_gpu.blocks[-1], params=Tier.HOST, states=Tier.HOST)
    plan = replace(on_gpu, blocks=(*on_gpu.blocks[:-1], head), profile=profile)
    reasons = why(solved(plan, costs), "head")
    assert reasons.planned.startswith("params and states on the GPU, with embed; ")
    assert not [one for one in reasons.alternatives if "params" in one.text or "states" in one.text]
    owner = why(solved(plan, costs), "embed")
    assert "with" not in owner.planned and "params streamed, states on host" in {one.text for one in owner.alternatives}


def test_what_changes_nothing_is_left_out() -> None:
    for block in ("embed", "layers.2", "norm", "head"):
        for decisions in ({}, {"params": Tier.GPU, "states": Tier.GPU, "activation": Activation.KEEP}):
            for one in alternatives(planned(**decisions), block).values():
                assert one.gpu_difference_bytes or one.host_difference_bytes or abs(one.step_difference_s) > 1e-9


def test_a_block_is_found_by_the_end_of_its_name() -> None:
    assert why(solved(planned()), "2").block == "layers.2"
    with pytest.raises(ValueError, match=r"none of the 7 blocks is called 'layer.2'; near are 'layers.2'"):
        why(solved(planned()), "layer.2")
