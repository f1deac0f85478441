"""The arrays that an optimizer keeps of a parameter, as data. Chunk layouts, byte counts, allocation, the ranges of an
update and state dicts follow from the list that an update rule declares, so a new rule changes nothing but itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hightide.ir.block import DTYPE_BYTES

STATE_DTYPE_BYTES = DTYPE_BYTES | {"int32": 4, "int16": 2, "int8": 1, "uint8": 1}
STATE_DTYPE_BYTES |= {"float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class StateSpec:
    """One such array. All begin as zeros."""

    name: str  # by which the plain optimizer's state dict calls it
    dtype: str  # a key of STATE_DTYPE_BYTES
    per_numel: int = 1  # elements of the parameter that share one of the state, counted from the parameter's first

    def __post_init__(self) -> None:
        if self.dtype not in STATE_DTYPE_BYTES:
            raise ValueError(
                f"the state {self.name!r} has the dtype {self.dtype!r}; it must be one of "
                f"{', '.join(STATE_DTYPE_BYTES)}"
            )
        if self.per_numel < 1:
            raise ValueError(f"the state {self.name!r} has per_numel={self.per_numel}; it must be at least 1")

    def numel(self, numel: int) -> int:
        """Of a parameter with so many elements."""
        return -(-numel // self.per_numel)

    def num_bytes(self, numel: int) -> int:
        return self.numel(numel) * STATE_DTYPE_BYTES[self.dtype]

    def shape(self, shape: tuple[int, ...], numel: int) -> tuple[int, ...]:
        """In a state dict: the parameter's, or flat."""
        return shape if self.per_numel == 1 else (self.numel(numel),)

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype}{f', one per {self.per_numel}' if self.per_numel > 1 else ''})"


StateSpecs = tuple[StateSpec, ...]
ADAM_STATES: StateSpecs = (StateSpec("exp_avg", "float32"), StateSpec("exp_avg_sq", "float32"))
# Beside a rule's own, for parameters that are not fp32: the fp32 master copy, or what a bf16 parameter lacks of it. See
# [Note: masters in two parts] in runtime/chunks/remainder.py.
MASTER = StateSpec("master", "float32")
REMAINDER = StateSpec("remainder", "int16")


def with_master(states: StateSpecs, dtype: str) -> StateSpecs:
    """All that is kept of a parameter of this dtype."""
    taken = {MASTER.name, REMAINDER.name} & {state.name for state in states}
    if taken:
        raise ValueError(f"an update rule may not call a state {taken.pop()!r}: that is what hightide keeps of its own")
    if dtype == "float32":
        return states
    return (*states, REMAINDER if dtype == "bfloat16" else MASTER)


def summary(states: StateSpecs) -> str:
    """How many of each dtype."""
    counts = Counter((state.dtype, state.per_numel) for state in states)
    texts = (f"{count} in {dtype}" + (f" per {per}" if per > 1 else "") for (dtype, per), count in counts.items())
    return ", ".join(texts) or "none"
