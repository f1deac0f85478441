"""The states of all random number generators that a training loop draws from, as plain data and tensors."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch


def generator_states() -> dict[str, Any]:
    """Of torch on the CPU and on every GPU that is in use, of Python, and of numpy where somebody uses it."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    return states


def set_generator_states(states: dict[str, Any]) -> None:
    """Those that there are here. A GPU more or less than at the save keeps its own."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if torch.cuda.is_available():
        for index, state in enumerate(states.get("cuda", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, index)
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])


def seed_generators(states: dict[str, Any], rank: int) -> None:
    """Of a rank that was not there at the save: from the first one's states, and its own number. Always the same."""
    content = states["torch"].numpy().tobytes() + repr(states["python"]).encode() + f"/{rank}".encode()
    digest = hashlib.sha256(content).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    random.seed(digest)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int.from_bytes(digest[8:12], "little"))
