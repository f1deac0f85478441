from __future__ import annotations

import itertools

import pytest

from hightide.runtime.chunks.residency import TRANSITIONS, Copy, IllegalTransition, Residency

# Written out by hand, so that a change of the table is a decision and not a slip.
LEGAL = {
    ("absent", "arriving"),
    ("absent", "clean"),
    ("arriving", "clean"),
    ("arriving", "absent"),
    ("clean", "held"),
    ("clean", "arriving"),
    ("clean", "absent"),
    ("held", "clean"),
    ("held", "dirty"),
    ("dirty", "held"),
    ("dirty", "leaving"),
    ("leaving", "absent"),
    ("leaving", "dirty"),
}


def test_every_state_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(Residency)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Residency, Residency)))
def test_transitions(before: Residency, after: Residency) -> None:
    copy = Copy("chunk 3 on gpu", before)
    if (before.value, after.value) in LEGAL:
        copy.move(after)
        assert copy.state is after
        return
    with pytest.raises(IllegalTransition, match=f"chunk 3 on gpu: {before} cannot become {after}"):
        copy.move(after)
    assert copy.state is before


def test_nothing_dirty_is_ever_dropped_directly() -> None:
    """A path from DIRTY to ABSENT goes through LEAVING, unless a hold ends clean: that is a bug of the holder."""
    assert Residency.ABSENT not in TRANSITIONS[Residency.DIRTY] | TRANSITIONS[Residency.HELD]
    assert Residency.ARRIVING not in TRANSITIONS[Residency.DIRTY] | TRANSITIONS[Residency.HELD]


def test_a_copy_starts_absent_and_holds_nothing_but_its_state() -> None:
    copy = Copy("x")
    assert copy.state is Residency.ABSENT and Copy.__slots__ == ("label", "state")
