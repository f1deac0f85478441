"""Keys of our own in an optimizer's state dict: master copies, and word to Accelerate that states stay.

[Note: masters in a state dict] A 16-bit parameter is updated in fp32, on a master copy of which it is the rounded
image. Plain PyTorch has no such thing, so it has no place in the layout of its states; but `load_state_dict` ignores
what else lies beside them. There the masters go, under MASTERS: a wrapped run resumes with the same bits, a plain one
takes the rest. A master counts only while it rounds to the parameter's present values: one that other training has
made obsolete is dropped, and the parameter itself becomes the master, as in `wrap`. Before the first update the masters
are the parameters, and MASTERS is there but empty: whoever moves a new optimizer's state dict moves nothing.

[Note: states that stay] The constructor of Accelerate's optimizer takes a state dict, sends it to the accelerator and
loads it again, so that states are where the parameters are. Here they are where the plan has put them, and a GPU that
the model does not fit has no room for all of them at once. To this one caller a state dict with nothing to send is
handed out, and loading it changes nothing. It is told by its code and by nothing else: whoever asks by another way,
`AcceleratedOptimizer.state_dict()` too, gets the states.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import Tensor

from hightide.runtime.run import Run

MASTERS = "hightide_masters"  # parameter index, as in "state" -> fp32 tensor
STATES_STAY = "hightide_states_stay"


def add_masters(state_dict: dict[str, Any], run: Run, params: Sequence[Tensor], differ: bool) -> dict[str, Any]:
    """With copies of the masters of all `params`, in the order of the state dict's own indices; with none while the
    masters do not `differ` from the parameters."""
    if not any(spec.has_master for spec in run.chunks.specs):
        return state_dict
    masters = {}
    for index, param in zip(_indices(state_dict), params, strict=True):
        master = run.master_of(run.keys[id(param)]) if differ else None
        if master is not None:
            masters[index] = master.detach().to("cpu", copy=True)
    return {**state_dict, MASTERS: masters}


def take_masters(state_dict: Mapping[str, Any], run: Run, params: Sequence[Tensor]) -> bool:
    """Whether there were any. Those whose parameters have other values now may fit later: a model's own state may be
    loaded after this one."""
    saved: Mapping[int, Tensor] = state_dict.get(MASTERS, {})
    run.loaded_masters.clear()
    keys = {index: run.keys[id(param)] for index, param in zip(_indices(state_dict), params, strict=True)}
    given = {key: saved[index] for index, key in keys.items() if index in saved}
    misfits = run.misfits(given)
    for key in keys.values():
        if key in misfits:
            run.loaded_masters[key] = given[key]
        elif key in given or MASTERS in state_dict:  # none of it: the state of a run that had not begun
            run.chunks.restore_master(key, given.get(key))
    return bool(saved)


def _indices(state_dict: Mapping[str, Any]) -> Iterator[int]:
    for group in state_dict["param_groups"]:
        yield from group["params"]


def asks_to_place(caller: FrameType | None) -> bool:
    """Whether this is Accelerate's constructor. Nothing is imported: where it is not in use, nobody places anything."""
    accelerate = sys.modules.get("accelerate.optimizer")
    constructor = getattr(getattr(accelerate, "AcceleratedOptimizer", None), "__init__", None)
    return caller is not None and constructor is not None and caller.f_code is getattr(constructor, "__code__", None)


def nothing_to_place() -> dict[str, Any]:
    return {STATES_STAY: True}


def is_nothing_to_place(state_dict: Mapping[str, Any]) -> bool:
    return set(state_dict) == {STATES_STAY}
