"""Who holds what has left a block is found, and not looked for where nobody can."""

from __future__ import annotations

import gc

import pytest
import torch

from hightide.profiler.probe.tap_search import Opening, Tap, _held


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("held", ["", "y", "z", "yz"])
def test_holders_are_found(held: str, saved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph has saved is not held."""
    made = {"y": torch.ones(3, requires_grad=True) * 2}
    made["z"] = made["y"] * 3
    graph = (made["y"] + made["z"]) * (made["z"] if saved else 1)
    ids = {id(tensor): name for name, tensor in made.items()}
    openings = [Opening(0, Tap("a"), [made["y"]]), Opening(0, Tap("b"), [made["y"], made["z"]])]
    holder = [made[name] for name in held]
    made.clear()
    if not saved and not holder:
        monkeypatch.delattr(gc, "get_referrers")  # which looks through everything
    assert {ids[one] for one in _held(openings, openings)} == set(held)
    assert graph.requires_grad  # it is there until here
