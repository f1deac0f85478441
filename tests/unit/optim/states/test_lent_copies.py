"""Moments that are no memory, in users' hands."""

from __future__ import annotations

import gc

import pytest
import torch

from file_store import FileStore
from hightide.ir.refusal import Refused
from hightide.optim.states import lent_copies
from hightide.optim.states.lent_copies import LentCopies
from hightide.stores.array import Array

settled = set[str]().add  # notes for whom it was asked
MOMENTS = [(key, index) for key in ("a", "b") for index in range(2)]


@pytest.fixture
def places() -> dict[tuple[str, int], Array]:
    store = FileStore(2**16)
    return {moment: Array(store, store.allocate(64, "states"), torch.float32, (16,)) for moment in MOMENTS}


def test_what_was_changed_is_written_once_and_the_rest_is_not(
    places: dict[tuple[str, int], Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = LentCopies(places.__getitem__, settled)
    copies.lend(("a", 0)).add_(2.0)  # nobody keeps it
    copies.lend(("b", 1))
    written = []
    put = Array.put
    monkeypatch.setattr(Array, "put", lambda self, values: (written.append(self), put(self, values)))
    copies.write()
    copies.write()
    assert written == [places["a", 0]]
    assert places["a", 0].get().eq(2.0).all()


def test_the_same_tensor_is_lent_until_an_update(places: dict[tuple[str, int], Array]) -> None:
    copies = LentCopies(places.__getitem__, settled)
    held = copies.lend(("a", 0))
    assert copies.lend(("a", 0)) is held
    copies.age()
    assert copies.lend(("a", 0)) is not held


def test_a_write_that_comes_too_late_is_refused_once(places: dict[tuple[str, int], Array]) -> None:
    copies = LentCopies(places.__getitem__, settled)
    held = copies.lend(("a", 0))
    copies.age()
    copies.write()
    held.add_(1.0)
    with pytest.raises(Refused, match="'a'"):
        copies.write()
    copies.write()
    assert not places["a", 0].get().any()


def test_what_a_reset_leaves_to_the_user_is_his(places: dict[tuple[str, int], Array]) -> None:
    copies = LentCopies(places.__getitem__, settled)
    old = copies.lend(("a", 0))
    copies.age()
    young = copies.lend(("a", 0))
    copies.drop("a")
    old.add_(1.0)
    young.add_(1.0)
    copies.write()
    assert not places["a", 0].get().any()


def test_many_that_nobody_has_are_let_go(places: dict[tuple[str, int], Array], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_copies, "MOST_BYTES", 64)
    copies = LentCopies(places.__getitem__, settled)
    held = copies.lend(("a", 0))
    for moment in MOMENTS[1:]:
        copies.lend(moment).add_(3.0)
    gc.collect()
    assert len(copies._copies) <= 3
    copies.write()
    assert copies.lend(("a", 0)) is held
    assert all(places[moment].get().eq(3.0).all() for moment in MOMENTS[1:])
