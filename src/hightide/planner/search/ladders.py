"""Ladders: in which order what fills memory is put there, kind by kind.

[Note: ladders] What can be put on the GPU for speed is of a few kinds, and of each kind some gain more than others for
the same bytes: blocks from the front become persistent (nothing hides their fetch and their update), activations are
kept from the back (for the shortest time), sums of gradients stay from the back (they are needed first). So every kind
has a ladder; filling climbs it as far as memory goes, giving up steps down again. One step that is too high (an
embedding as wide as four layers) is left out. From the disk, blocks come to the host from the front too: of the last
ones the gradient is there first and the update due last; but those that are far wider than others before all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from hightide.ir.tier import Tier
from hightide.planner.search.candidate import Candidate
from hightide.planner.search.space import Space


class Kind(StrEnum):
    """What fills memory. The values are fields of `Candidate`."""

    TRAINED = "trained"
    WHOLE = "whole"
    PARAMS = "params"
    SUMS = "sums"
    LOGITS = "loss_kept_tokens"
    SELECTIVE = "selective"
    KEEP = "keep"
    NEAR = "near"
    SWAPPED = "swapped"
    COPIED = "copied"
    HOST_PARAMS = "host_params"
    HOST_SUMS = "host_sums"
    HOST_STATES = "host_states"


# What a block has of one kind, it does not have of these; and only with some has it those.
_INSTEAD_OF = {
    Kind.WHOLE: (Kind.PARAMS, Kind.TRAINED, Kind.SUMS),
    Kind.PARAMS: (Kind.WHOLE, Kind.COPIED),
    Kind.KEEP: (Kind.SELECTIVE, Kind.SWAPPED, Kind.NEAR),
    Kind.SELECTIVE: (Kind.KEEP, Kind.SWAPPED),
    Kind.SWAPPED: (Kind.KEEP, Kind.SELECTIVE),
    Kind.NEAR: (Kind.KEEP,),
}
_PART_OF = {Kind.WHOLE: Kind.COPIED, Kind.HOST_PARAMS: Kind.HOST_STATES}

Order = tuple[Kind, ...]

_T, _W, _P, _G, _L, _S, _K, _N, _A, _C, *HOST = Kind
# Adapters first: they cost next to nothing. What lives on disk comes to the host when it is known what is on the GPU:
# first what crosses most often per byte, which are parameters, then sums between passes.
# Before anything is kept, all is held selectively: that saves nearly as much time with fewer bytes.
ORDERS: tuple[Order, ...] = (
    (_T, _L, _W, _P, _G, _S, _K, _N, _C, *HOST),
    (_T, _G, _W, _C, _P, _L, _S, _K, _N, *HOST),
    (_T, _L, _S, _K, _G, _P, _W, _N, _C, *HOST),
    (_T, _N, _G, _P, _L, _S, _K, _W, _C, *HOST),
)


# Where the disk is the limit, computing twice costs nothing.
DISK_ORDERS: tuple[Order, ...] = (
    (_T, _G, _W, _N, *HOST, _P, _L, _S, _K, _C),
    (_T, _N, _W, _G, *HOST, _P, _L, _S, _K, _C),
    ORDERS[0],
    ORDERS[2],
)

HOST_FIRST: Order = (*HOST[::-1], _C, _A, _K, _S, _N, _L, _G, _P, _W)


@dataclass(frozen=True)
class Ladders:
    space: Space
    may_fit: Callable[[Candidate], bool]

    def fill(self, candidate: Candidate, order: Order, from_back: bool = False) -> Candidate:
        """`from_back`: the last blocks become persistent first."""
        for kind in order:
            key = candidate, kind, from_back and kind is Kind.WHOLE
            found = self._climbed.get(key)
            if found is None:
                found = self._climbed[key] = self._climb(*key)
            candidate = found
        return candidate

    @cached_property
    def _climbed(self) -> dict[tuple[Candidate, Kind, bool], Candidate]:
        """Remembered: neighbours of neighbours come back to the same."""
        return {}

    def _climb(self, candidate: Candidate, kind: Kind, from_back: bool) -> Candidate:
        """As far as memory goes; over one rung that is too high."""
        have = self.rungs(candidate, kind)
        ladder = self._whole_from_back if from_back else self.ladder(kind)
        above = [unit for unit in ladder if unit not in have and self._gains(candidate, kind, unit)]
        if not above:
            return candidate
        count = self._most(candidate, kind, have, above)
        have, above = [*have, *above[:count]], above[count + 1 :]
        have += above[: self._most(candidate, kind, have, above)]
        return self.having(candidate, kind, have)

    def _most(self, candidate: Candidate, kind: Kind, have: Sequence[int], above: Sequence[int]) -> int:
        def fits(count: int) -> bool:
            return self.may_fit(self.having(candidate, kind, [*have, *above[:count]]))

        low, high = 0, len(above) if above and fits(1) else 0
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    def shed(self, candidate: Candidate, order: Order) -> Candidate | None:
        """Gives up what fills memory until the candidate fits: the last rungs first. None: it never does."""
        for kind in order:
            have = self.rungs(candidate, kind)
            left = self._fewest_shed(candidate, kind, have)
            if left is not None:
                return self.having(candidate, kind, have[: len(have) - left])
            candidate = self.having(candidate, kind, [])
        return candidate if self.may_fit(candidate) else None

    def _fewest_shed(self, candidate: Candidate, kind: Kind, have: list[int]) -> int | None:
        return _fewest(lambda count: self.may_fit(self.having(candidate, kind, have[: len(have) - count])), len(have))

    def fewest(
        self, candidate: Candidate, kind: Kind, ladder: Sequence[int], fits: Callable[[Candidate], bool]
    ) -> int | None:
        """Rungs from the lowest with which it fits. None: not even with all."""
        return _fewest(lambda count: fits(self.having(candidate, kind, ladder[:count])), len(ladder))

    def rungs(self, candidate: Candidate, kind: Kind) -> list[int]:
        """Those that it has, in the ladder's order."""
        if kind is Kind.LOGITS:
            return [tokens for tokens in self.ladder(kind) if tokens <= candidate.loss_kept_tokens]
        have: frozenset[int] = getattr(candidate, kind)
        return [unit for unit in self.ladder(kind) if unit in have]

    def having(self, candidate: Candidate, kind: Kind, units: Sequence[int]) -> Candidate:
        """With exactly these. What a block has wholly, or keeps, it does not have in part as well."""
        if kind is Kind.LOGITS:
            return candidate.changed(loss_kept_tokens=max(units, default=0))
        chosen = frozenset(units)
        if kind is Kind.COPIED:
            return candidate.changed(copied=chosen & candidate.whole)
        changes = {other.value: getattr(candidate, other) - chosen for other in _INSTEAD_OF.get(kind, ())}
        if (part := _PART_OF.get(kind)) is not None:
            changes[part.value] = getattr(candidate, part) & chosen
        elif kind is Kind.HOST_STATES:
            changes["host_params"] = candidate.host_params | chosen
        return candidate.changed(**changes, **{kind.value: chosen})

    def _gains(self, candidate: Candidate, kind: Kind, unit: int) -> bool:
        """Whether there is anything left to gain by it."""
        if kind is not Kind.LOGITS and unit in candidate.looked_up:
            return False
        if kind is Kind.COPIED:
            return unit in candidate.whole
        if kind is Kind.NEAR:
            return candidate.inputs is Tier.HOST and unit not in candidate.keep
        if kind is Kind.LOGITS:
            return candidate.loss_tile_tokens is None  # tiles are small where memory is short
        if kind in (Kind.HOST_PARAMS, Kind.HOST_STATES):
            return candidate.disk and unit not in candidate.whole
        if kind is Kind.HOST_SUMS:
            return candidate.disk and unit not in candidate.whole | candidate.sums | candidate.host_states
        if kind in (Kind.SELECTIVE, Kind.SWAPPED):
            return unit not in candidate.keep | candidate.selective
        parts = (Kind.PARAMS, Kind.TRAINED, *(() if self.space.is_cut else (Kind.SUMS,)))
        return not (kind in parts and unit in candidate.whole)

    def ladder(self, kind: Kind) -> tuple[int, ...]:
        return self._ladders[kind]

    @cached_property
    def _ladders(self) -> dict[Kind, tuple[int, ...]]:
        space, has_disk = self.space, self.space.terms.disk_bytes > 0
        # Every buffer of a ring is as wide as the widest block that goes through it: those come to the host first.
        from_disk = tuple(sorted(space.movable, key=lambda block: block not in space.wide)) if has_disk else ()
        return {
            Kind.TRAINED: space.adapted,
            Kind.WHOLE: space.movable,
            Kind.PARAMS: space.movable,
            Kind.SUMS: space.summed,
            Kind.LOGITS: space.keepable_tokens,
            Kind.SELECTIVE: space.selectable,
            Kind.KEEP: space.keepable,
            Kind.NEAR: self.backwards,
            Kind.SWAPPED: space.selectable[::-1],
            Kind.COPIED: space.movable if space.is_cut else (),
            Kind.HOST_PARAMS: from_disk,
            Kind.HOST_SUMS: space.summed if has_disk else (),
            Kind.HOST_STATES: from_disk,
        }

    @cached_property
    def _whole_from_back(self) -> tuple[int, ...]:
        """A head may be as wide as many layers: the widest comes last."""
        movable = self.space.movable[::-1]
        widest = max(movable, key=self.space.block_numel, default=None)
        return tuple(sorted(movable, key=lambda block: block == widest))

    @cached_property
    def backwards(self) -> tuple[int, ...]:
        """Blocks whose inputs wait, from the back: those wait for the shortest time."""
        profile = self.space.profile
        waiting = {call.block for call in profile.calls if call.needs_backward and call.saved_inputs.at(1)}
        return tuple(sorted(waiting, reverse=True))


def first(kind: Kind, last: Kind | None = None) -> Order:
    rest = [other for other in ORDERS[0] if other not in (kind, last)]
    return (kind, *rest) if last is None else (kind, *rest, last)


def _fewest(fits: Callable[[int], bool], limit: int) -> int | None:
    """The smallest count from 0 that fits, if `limit` does."""
    if not fits(limit):
        return None
    low, high = 0, limit
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
