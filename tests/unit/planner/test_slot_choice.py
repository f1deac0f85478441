import math

import pytest

from hightide.planner.slot_choice import choose_window, choose_windows

NEVER = math.inf


def test_an_empty_window_is_taken_before_any_occupied_one():
    assert choose_window([7, None, 8], 1, {7: NEVER, 8: 3}.get, {7: 0, 8: 1}.get, set()) == 1


def test_the_occupant_needed_again_last_goes():
    assert choose_window([1, 2, 3], 1, {1: 5, 2: 9, 3: 7}.get, {1: 0, 2: 0, 3: 0}.get, set()) == 1


def test_of_equals_the_one_idle_longest_goes_then_the_lowest_slot():
    assert choose_window([1, 2, 3], 1, lambda _: NEVER, {1: 2, 2: 1, 3: 1}.get, set()) == 1


def test_a_pinned_chunk_never_goes():
    assert choose_window([1, 2], 1, {1: 9, 2: 3}.get, lambda _: 0, {1}) == 1
    assert choose_window([1, 2], 1, lambda _: 9, lambda _: 0, {1, 2}) is None


def test_a_wide_window_counts_its_most_urgent_occupant():
    next_use = {1: 100, 2: 4, 3: 6, 4: 7}.get
    assert choose_window([1, 2, 3, 4], 2, next_use, lambda _: 0, set()) == 2


def test_windows_of_one_tick_do_not_push_each_other_out():
    windows = choose_windows([5, 6, 7], {1: 2, 2: 1}, lambda _: NEVER, lambda _: 0)
    assert sorted([windows[1], windows[1] + 1, windows[2]]) == [0, 1, 2]


def test_chunks_that_are_in_stay():
    assert choose_windows([1, None, None], {1: 1, 2: 2}, lambda _: NEVER, lambda _: 0) == {2: 1}


def test_fragmentation_is_resolved_by_placing_all_afresh():
    assert choose_windows([None, 1, None], {1: 1, 2: 2}, lambda _: NEVER, lambda _: 0) == {2: 0, 1: 2}


def test_too_few_slots_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"needs 3 slots at once .* the plan has 2"):
        choose_windows([None, None], {1: 1, 2: 2}, lambda _: NEVER, lambda _: 0)
