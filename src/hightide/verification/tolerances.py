"""How far two numbers may differ and be "equal".

[Note: what may differ] Nothing but rounding. A tensor may differ by `tolerance` of its largest entry; small entries of
one whose others are large are known no better. Where that is not enough depends on the model, so it is measured: a
second plain run has every weight changed in its last bit, and what changes by that may change as much in hightide,
which adds up in another order. A gradient that is zero but for rounding is judged rightly this way, and so is a router
that was about to choose another expert. On a GPU torch itself has two Adams, one of which takes 1 - beta2
in fp32: their second moments differ by 1.3e-5 with a beta2 of 0.999, and by more with one nearer to 1.
Of what is no floating-point number every bit counts, unless that second run differs in it too.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hightide.verification.observed_training import Key
from hightide.verification.verdict import MARGIN, ComparedRow

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")
MOMENT_TOLERANCE = 1e-4


@dataclass
class Reference:
    """The plain run, and what rounding does to it."""

    tolerance: float
    seen: dict[Key, Tensor] = field(default_factory=dict)
    floors: dict[Key, float] = field(default_factory=dict)
    rounding: dict[Key, float] = field(default_factory=dict)

    def keep(self, key: Key, tensor: Tensor | None, floor: float) -> None:
        assert tensor is not None, key
        self.seen[key] = tensor.detach().to("cpu", copy=True)
        self.floors[key] = floor

    def feel(self, key: Key, tensor: Tensor | None, _: float) -> None:
        """Of the second plain run. One that takes another path says nothing about the rest of it."""
        if tensor is not None and key in self.seen and self.seen[key].shape == tensor.shape:
            self.rounding[key] = _largest_difference(self.seen[key], tensor)[0]

    def allowed(self, key: Key, size: float) -> float:
        tolerance = max(self.tolerance, MOMENT_TOLERANCE) if key.what in SECOND_MOMENTS else self.tolerance
        relative = tolerance * size if self.seen[key].is_floating_point() and math.isfinite(size) else 0.0
        rounding = self.rounding.get(key, 0.0)
        return max(relative, MARGIN * rounding if math.isfinite(rounding) else 0.0) + self.floors[key]


class Comparison:
    """A run in hightide beside the plain one."""

    def __init__(self, reference: Reference, run: str) -> None:
        self._reference, self._run = reference, run
        self._rows: dict[Key, ComparedRow] = {}
        self._passed: set[Key] = set()  # not to be compared
        self._extra: list[ComparedRow] = []

    def note(self, key: Key, tensor: Tensor | None, _: float) -> None:
        expected = self._reference.seen.get(key)
        if tensor is None:
            self._passed.add(key)
        elif expected is not None:
            self._rows[key] = self._compared(key, expected, tensor)
        elif key.what != "output":  # a forward may be begun again: its blocks are called once more
            self._extra.append(self._missing(key, math.nan, _largest(tensor)))

    def rows(self, unread: Collection[str] = (), is_complete: bool = True) -> list[ComparedRow]:
        """In the order of the plain run. `unread`: what this run does not show; incomplete: it broke off."""
        found = []
        for key, expected in self._reference.seen.items():
            if key in self._rows:
                found.append(self._rows[key])
            elif is_complete and key not in self._passed and key.what not in unread:
                found.append(self._missing(key, _largest(expected), math.nan))
        return found + self._extra

    def _compared(self, key: Key, expected: Tensor, tensor: Tensor) -> ComparedRow:
        size = _largest(expected)
        if expected.shape != tensor.shape:
            return self._missing(key, size, _largest(tensor))
        difference, plain, hightide = _largest_difference(expected, tensor)
        allowed = self._reference.allowed(key, size)
        return ComparedRow(key.what, key.where, key.step, plain, hightide, difference, allowed, size, self._run)

    def _missing(self, key: Key, plain: float, hightide: float) -> ComparedRow:
        size = 0.0 if math.isnan(plain) else plain
        return ComparedRow(key.what, key.where, key.step, plain, hightide, math.inf, 0.0, size, self._run)


def _largest_difference(expected: Tensor, tensor: Tensor) -> tuple[float, float, float]:
    """The difference, and both entries there. Infinities and what is not a number are equal to their like."""
    if not expected.numel():
        return 0.0, 0.0, 0.0
    first, second = _real(expected), _real(tensor)
    same = (first == second) | (first.isnan() & second.isnan())
    differences = torch.where(same, 0.0, (first - second).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    at = int(differences.argmax())
    return float(differences[at]), float(first[at]), float(second[at])


def _largest(tensor: Tensor) -> float:
    """The largest finite entry."""
    if not tensor.numel():
        return 0.0
    values = _real(tensor).abs()
    return float(torch.where(values.isfinite(), values, 0.0).max())


def _real(tensor: Tensor) -> Tensor:
    """Flat, on the CPU, and able to hold the difference of two entries."""
    tensor = tensor.detach().to("cpu")
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    wide = tensor.dtype if tensor.dtype in (torch.float32, torch.float64) else None
    narrow = torch.float32 if tensor.is_floating_point() else torch.float64
    return tensor.reshape(-1).to(wide or narrow)
