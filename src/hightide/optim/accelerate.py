"""Who asks for a state dict.

[Note: states that stay] The constructor of Accelerate's optimizer takes a state dict, sends it to the accelerator and
loads it again, so that states are where the parameters are. Here they are where the plan has put them, and a GPU that
the model does not fit has no room for all of them at once. To this one caller a state dict with nothing to send is
handed out, and loading it changes nothing. It is told by its code and by nothing else: whoever asks by another way,
`AcceleratedOptimizer.state_dict()` too, gets the states.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

KEY = "hightide_states_stay"


def asks_to_place(caller: FrameType | None) -> bool:
    """Whether this is the constructor. Nothing is imported: where Accelerate is not in use, nobody places anything."""
    accelerate = sys.modules.get("accelerate.optimizer")
    constructor = getattr(getattr(accelerate, "AcceleratedOptimizer", None), "__init__", None)
    return caller is not None and constructor is not None and caller.f_code is getattr(constructor, "__code__", None)


def nothing_to_place() -> dict[str, Any]:
    return {KEY: True}


def is_nothing_to_place(state_dict: Mapping[str, Any]) -> bool:
    return set(state_dict) == {KEY}
