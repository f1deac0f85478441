"""Bytes for many choices at once are those of the plans that would be made."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hightide.ir.chunk import region_bytes
from hightide.ir.plan import GradientDtype, Update
from hightide.planner.lower.count_effects import base_bytes
from hightide.planner.placement import Placement
from hightide.planner.problem import Terms
from hightide.planner.search.candidate import Candidate
from hightide.planner.search.space import Space
from hightide.planner.search.standing_bytes import Needs, StandingBytes
from unit.planner.profiles import UNLIMITED, profiles


@st.composite
def choices(draw: st.DrawFn, space: Space) -> Candidate:
    def some() -> frozenset[int]:
        return frozenset(draw(st.sets(st.integers(0, len(space.profile.blocks) - 1))))

    disk = draw(st.booleans())
    params = some()
    return Candidate(
        micro_batch=1,
        spare_slots=draw(st.integers(0, 2)),
        spare_grad_slots=draw(st.sampled_from([None, 0, 1])),
        whole=some(),
        params=some(),
        trained=some() & frozenset(space.adapted),
        slot_numel=draw(st.sampled_from([None, 256, 1024])),
        disk=disk,
        host_params=params,
        host_states=params & some(),
        host_sums=some(),
        sums=some(),
        state_buffers=draw(st.integers(1, 3)) if disk else 0,
        read_buffers=draw(st.integers(1, 3)) if disk else 0,
        grad_buffers=draw(st.integers(0, 3)),
        late=draw(st.integers(0, 12)) if disk else 0,
    )


@given(st.data())
def test_bases_are_those_of_the_plan(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    update, gradients = data.draw(st.sampled_from(Update)), data.draw(st.sampled_from(GradientDtype))
    terms = Terms(UNLIMITED, UNLIMITED, update, gradients=gradients, disk_bytes=UNLIMITED)
    space = Space(profile, replace(terms, accumulate=data.draw(st.sampled_from([1, 3]))))
    bases = StandingBytes(space)
    for _ in range(3):
        candidate = data.draw(choices(space))
        plan = space.build(candidate)
        expected = Needs(*base_bytes(profile, Placement(plan)).values())
        found = bases.of(candidate)
        assert Needs(found.gpu_bytes, found.host_bytes, found.disk_bytes) == expected
        parking = [place for place in space.placed(candidate).chunks if place.parks]
        assert sum(found.parked_bytes) == sum(region_bytes(place.grad_bytes) for place in parking)
