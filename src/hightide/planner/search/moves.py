"""Ways from one candidate to others that fill the memory too.

[Note: ladders] What can be put on the GPU for speed is of a few kinds, and of each kind some gain more than others for
the same bytes: blocks from the front become persistent (nothing hides their fetch and their update), activations are
kept from the back (for the shortest time), sums of gradients stay from the back (they are needed first). So every kind
has a ladder; filling climbs it as far as memory goes, giving up steps down again. One step that is too high (an
embedding as wide as four layers) is left out. From the disk, blocks come to the host from the front too: of the last
ones the gradient is there first and the update due last; but those that are far wider than others before all.

A move changes one thing, then gives up what no longer fits, or fills what has become free, kind by kind in some order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import product
from typing import Any

from hightide.ir.tier import Tier
from hightide.planner.search.candidate import Candidate
from hightide.planner.search.space import Space

MOST_SPARE = 3  # slots beyond what the widest block needs
INPUT_BUFFERS = 2  # through which block inputs go to disk, at first
LATE = (4, 6, 3, 2, 0)  # twelfths of the blocks on disk whose updates are tried to be late
NUM_SLOT_SIZES = 3  # so many slot sizes, of least waste, are tried
NUM_RING_SIZES = 2  # and from a disk so many, of the smallest buffers, beside the one of least waste
FEW_BLOCKS = 8
SPACINGS = (1, 2, 3, 4, 6)  # of blocks that swap


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
    HOST_PARAMS = "host_params"
    HOST_SUMS = "host_sums"
    HOST_STATES = "host_states"


LEVELS = (Kind.KEEP, Kind.SELECTIVE, Kind.SWAPPED)  # a block has one of them at most

Order = tuple[Kind, ...]

_T, _W, _P, _G, _L, _S, _K, _N, _A, *_HOST = Kind
# Adapters first: they cost next to nothing. What lives on disk comes to the host when it is known what is on the GPU:
# first what crosses most often per byte, which are parameters, then sums between passes.
# Before anything is kept, all is held selectively: that saves nearly as much time with fewer bytes.
ORDERS: tuple[Order, ...] = (
    (_T, _L, _W, _P, _G, _S, _K, _N, *_HOST),
    (_T, _G, _W, _P, _L, _S, _K, _N, *_HOST),
    (_T, _L, _S, _K, _G, _P, _W, _N, *_HOST),
    (_T, _N, _G, _P, _L, _S, _K, _W, *_HOST),
)


# Where the disk is the limit, computing twice costs nothing.
DISK_ORDERS: tuple[Order, ...] = (
    (_T, _G, _W, _N, *_HOST, _P, _L, _S, _K),
    (_T, _N, _W, _G, *_HOST, _P, _L, _S, _K),
    ORDERS[0],
    ORDERS[2],
)

_HOST_FIRST: Order = (*_HOST[::-1], _A, _K, _S, _N, _L, _G, _P, _W)


@dataclass(frozen=True)
class Form:
    """What a candidate is cast in before anything is filled."""

    slot_numel: int | None = None
    loss_tile_tokens: int | None = None

    def of(self, candidate: Candidate) -> Candidate:
        return replace(candidate, slot_numel=self.slot_numel, loss_tile_tokens=self.loss_tile_tokens)


PLAIN = Form()


@dataclass(frozen=True)
class Moves:
    space: Space
    may_fit: Callable[[Candidate], bool]
    micro_batches: tuple[int, ...]  # that may be chosen, descending

    @property
    def few(self) -> bool:
        """Whether there is time to look at each block for itself."""
        return len(self.space.movable) <= FEW_BLOCKS

    def starts(self, spare: int, form: Form = PLAIN, disk: bool = False) -> Iterator[Candidate]:
        """Everything streamed, from the host or the disk, and recomputed; the plainest first."""
        if disk and not self.space.terms.disk_bytes:
            return
        buffers = 1 + spare if disk else 0
        for inputs, micro_batch in product((Tier.GPU, Tier.HOST), self.micro_batches):
            plain = Candidate(micro_batch, inputs, spare, spare_grad_slots=spare, disk=disk)
            gradients = 0 if self.space.updates_in_backward else buffers
            yield form.of(replace(plain, state_buffers=buffers, read_buffers=2 * disk, grad_buffers=gradients))

    def disk_starts(self, spare: int, form: Form, host_fits: Callable[[Candidate], bool]) -> Iterator[Candidate]:
        """From the disk, as plain as the host allows: of inputs for which it has no room, the last wait on the GPU; and
        so that rings need not be as wide as a block that is far wider than others, that is on the GPU."""
        late = LATE[0] if self.space.updates_in_backward else 0
        form = replace(form, slot_numel=form.slot_numel or self.space.ring_sizes[0])
        for start in self.starts(spare, form, disk=True):
            for one in dict.fromkeys((replace(start, whole=self.space.wide), start)):
                waiting = self._backwards if start.inputs is Tier.HOST else ()
                count = _fewest(self._fits_with(one, Kind.NEAR, waiting, host_fits), len(waiting))
                if count is not None:
                    yield replace(self._with(one, Kind.NEAR, waiting[:count]), state_buffers=2, late=late)

    def lean_starts(self, spare: int, form: Form = PLAIN, disk: bool = False) -> Iterator[Candidate]:
        """The same where the host is short: gradients go through a ring, and inputs of the last blocks, of which some
        wait on the host, wait on the GPU."""
        waiting = self._backwards
        for start in self.starts(spare, form, disk):
            ways = [start, replace(start, grad_buffers=1 + spare)] if self.space.updates_in_backward else [start]
            yield from ways[1:]
            for way, quarters in product(ways, (1, 2, 3) if start.inputs is Tier.HOST else ()):
                yield replace(way, near=frozenset(waiting[: len(waiting) * quarters // 4]))

    def far_starts(self, spare: int, form: Form = PLAIN) -> Iterator[Candidate]:
        """Where it is too short even for that: inputs of the first blocks, or of all, wait on the disk."""
        for start in self.starts(spare, form, disk=True):
            for far in self._shares_of_inputs(start, (2, 1)):
                yield replace(start, far=far, input_buffers=1 + spare, grad_buffers=1 + spare)

    def leanest(self) -> Iterator[Candidate]:
        """If none of these fits, nothing is known that does."""
        for form in self.forms:
            for start in self.starts(0, form, disk=True):
                if start.micro_batch == self.micro_batches[-1]:
                    yield self.fill(start, ORDERS[0])
                    yield from self._mixed(start) if start.loss_tile_tokens is None else ()
            for start in (*self.lean_starts(0, form), *self.lean_starts(0, form, disk=True)):
                if start.micro_batch == self.micro_batches[-1]:
                    yield self.fill(start, ORDERS[0])
            yield from self.last_resorts(form)
        for start in (start for form in self.forms for start in self.far_starts(0, form)):
            if start.micro_batch == self.micro_batches[-1]:
                yield self.fill(start, ORDERS[0])

    def last_resorts(self, form: Form = PLAIN) -> Iterator[Candidate]:
        """From all on the host to all on the GPU, in several orders, without spare slots. Where slots cost more than
        what goes through them, something persistent fits and the leanest stream does not; where the host is small, only
        states on the GPU fit."""
        movable, by_width = self.space.movable, self._by_width
        sizes = self.micro_batches if self.few else self.micro_batches[-1:]
        rings = (0, 1) if self.space.updates_in_backward else (0,)
        for inputs, micro_batch, ring in product((Tier.HOST, Tier.GPU), sizes, rings):
            lean = form.of(Candidate(micro_batch, inputs, spare_slots=0, spare_grad_slots=0, grad_buffers=ring))
            yield lean
            if self.space.tables:
                yield self._looked_up(lean)
            yield replace(lean, trained=frozenset(self.space.adapted))
            for front, rest in self._fronts(movable, movable[::-1], by_width, by_width[::-1]):
                yield replace(lean, whole=front)
                yield replace(lean, params=front)
                yield replace(lean, whole=front, params=rest)

    def relieved(self, spare: int, form: Form, host_fits: Callable[[Candidate], bool]) -> Iterator[Candidate]:
        """Plain starts of which the host cannot hold all: so much is on the GPU that it can, of sums that wait between
        passes first, then of whole blocks."""
        for start in self.starts(spare, form):
            for kind in (Kind.SUMS, Kind.WHOLE):
                ladder = self._ladder(kind)
                count = _fewest(self._fits_with(start, kind, ladder, host_fits), len(ladder))
                start = self._with(start, kind, ladder if count is None else ladder[:count])
                if count is not None:
                    yield start
                    break

    def _fits_with(
        self, start: Candidate, kind: Kind, ladder: Sequence[int], fits: Callable[[Candidate], bool]
    ) -> Callable[[int], bool]:
        return lambda count: fits(self._with(start, kind, ladder[:count]))

    def _mixed(self, lean: Candidate) -> Iterator[Candidate]:
        """From the disk: with ever more on the GPU and as much as fits on the host, and the other way round."""
        on_gpu, on_host = self.fill(lean, (Kind.WHOLE,)), self.fill(lean, tuple(_HOST))
        for front, rest in self._fronts(self._by_width[::-1], self.space.movable):
            yield replace(lean, whole=front)
            yield self._with(on_host, Kind.WHOLE, sorted(front))
            host = front - on_gpu.whole
            yield replace(on_gpu, host_params=host, host_states=host)
            yield replace(lean, whole=front, host_params=rest)

    def _fronts(self, *orders: Sequence[int]) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
        """Some blocks, and the others: ever more of them."""
        for order in orders:
            for count in range(1, len(order) + 1):
                yield frozenset(order[:count]), frozenset(order[count:])

    @cached_property
    def _by_width(self) -> tuple[int, ...]:
        return tuple(sorted(self.space.movable, key=self.space.block_numel))

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        """The plain one first. Others take less of the GPU: slots of the size that takes least, a loss in smaller
        tiles. Neither is as fast."""
        tiles = (None, *self.space.smaller_tiles)
        sizes = self.space.slot_sizes[1:] if self.few else (self.space.leanest_slot_numel,)
        slots = (None, *(size for size in sizes if size != self.space.slot_numel))
        return tuple(Form(slot_numel, tile) for tile, slot_numel in product(tiles, slots))

    def resident(self) -> Iterator[Candidate]:
        """Everything on the GPU, nothing recomputed."""
        everything = {kind: set(self._ladder(kind)) for kind in (Kind.WHOLE, Kind.KEEP)}
        tokens = max(self.space.keepable_tokens, default=0)
        sizes = (None, *self.space.slot_sizes[1:NUM_SLOT_SIZES]) if self.few else (None,)
        for micro_batch, slot_numel in product(self.micro_batches, sizes):
            yield Candidate(
                micro_batch,
                slot_numel=slot_numel,
                spare_slots=0,
                whole=frozenset(everything[Kind.WHOLE]),
                keep=frozenset(everything[Kind.KEEP]),
                loss_kept_tokens=tokens,
            )

    def recast(self, filled: Candidate) -> Iterator[Candidate]:
        """Fillings of its kind with less for slots, which leaves room for more that stays; and from the back: where the
        host's update is the limit, that of the last blocks is due first."""
        if filled.disk:  # see other_rings
            return
        start = Candidate(
            filled.micro_batch, filled.inputs, filled.spare_slots, spare_grad_slots=filled.spare_grad_slots
        )
        bare = replace(start, spare_slots=0, spare_grad_slots=0)
        sizes = (None, *self.space.slot_sizes[1:NUM_SLOT_SIZES])
        for slot_numel, candidate in product(sizes, dict.fromkeys((start, bare))):
            one = Form(slot_numel, filled.loss_tile_tokens).of(candidate)
            if self.may_fit(one):
                yield from (self.fill(one, order) for order in ORDERS[:2])
                yield self.fill(one, ORDERS[0], from_back=True)

    def other_rings(self, filled: Candidate, parks: bool) -> Iterator[Candidate]:
        """Fillings of its kind in other chunks, which need smaller buffers and leave more of the host; and where
        gradients park, or go through a ring, because parked ones would take more than inputs do."""
        emptied: dict[str, Any] = dict.fromkeys((*_HOST, Kind.PARAMS, Kind.KEEP, Kind.SELECTIVE), frozenset())
        bare = replace(filled, loss_kept_tokens=0, whole=filled.whole & self.space.wide, **emptied)
        if self.space.updates_in_backward:
            bare = replace(bare, grad_buffers=0, late=LATE[0]) if parks else replace(bare, grad_buffers=2, late=0)
        for size in dict.fromkeys((self.space.slot_numel, *self.space.ring_sizes[:NUM_RING_SIZES])):
            one = replace(bare, slot_numel=size, state_buffers=2, read_buffers=2)
            if self.may_fit(one):
                yield from (self.fill(one, order) for order in DISK_ORDERS)

    def swaps(self, filled: Candidate) -> Iterator[Candidate]:
        """Fillings of its kind in which blocks swap: from the front, whose activations wait longest, all or every so
        many-th, so that a copy has the blocks in between to hide behind (lower/move_inputs.py)."""
        if filled.disk or not self.space.selectable:
            return
        empty = replace(filled, keep=frozenset(), selective=frozenset(), swapped=frozenset(), loss_kept_tokens=0)
        bare = replace(empty, whole=frozenset(), params=frozenset(), near=frozenset())
        ladder = self._ladder(Kind.SWAPPED)
        for spacing, share in product(SPACINGS, (4, 3, 2, 1)):
            units = ladder[: len(ladder) * share // 4 : spacing]
            for start in dict.fromkeys(replace(one, swapped=frozenset(units)) for one in (empty, bare) if units):
                if self.may_fit(start):
                    yield from (self.fill(start, order) for order in ORDERS[:3])

    def stored(self, filled: Candidate) -> Iterator[Candidate]:
        """Fillings of its kind in which inputs of the first blocks, which wait longest, do so on disk: what they had of
        the host is there for others, and in forward the disk may have nothing else to do."""
        for far in self._shares_of_inputs(filled, (8, 4, 2, 1)):
            start = replace(filled, far=far, input_buffers=INPUT_BUFFERS)
            if self.may_fit(start):
                yield self.fill(start, ORDERS[0])

    def _shares_of_inputs(self, candidate: Candidate, parts: Sequence[int]) -> Iterator[frozenset[int]]:
        """So many parts of the blocks whose inputs wait on the host, from the front."""
        if candidate.disk and candidate.inputs is Tier.HOST:
            waiting = [block for block in self._backwards[::-1] if block not in candidate.near | candidate.keep]
            yield from (frozenset(waiting[: -(-len(waiting) // part)]) for part in parts if waiting)

    def lookups(self, filled: Candidate) -> Iterator[Candidate]:
        """Fillings of its kind in which embeddings are looked up on the host: what they had of the GPU, or of the link,
        is there for others. Slots need not be as wide as they are."""
        if filled.disk or not self.space.tables:
            return
        for slot_numel in dict.fromkeys((filled.slot_numel, None)):
            here = self._looked_up(replace(filled, slot_numel=slot_numel))
            bare = Candidate(filled.micro_batch, filled.inputs, filled.spare_slots, looked_up=here.looked_up)
            bare = Form(slot_numel, filled.loss_tile_tokens).of(bare)
            for start in (here, bare, replace(bare, spare_slots=0, spare_grad_slots=0)):
                if self.may_fit(start):
                    yield from (self.fill(start, order) for order in ORDERS[:2])

    def _looked_up(self, candidate: Candidate) -> Candidate:
        """All embeddings, or if it does so already none."""
        tables = frozenset(self.space.tables) - candidate.looked_up
        kinds = (Kind.WHOLE, Kind.PARAMS, Kind.TRAINED, Kind.SUMS, Kind.KEEP, Kind.NEAR)
        return replace(candidate, looked_up=tables, **{kind: getattr(candidate, kind) - tables for kind in kinds})

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

    def shed(self, candidate: Candidate, order: Order) -> Candidate | None:
        """Gives up what fills memory until the candidate fits: the last rungs first. None: it never does."""
        for kind in order:
            have = self._rungs(candidate, kind)
            left = _fewest(self._fits_without(candidate, kind, have), len(have))
            if left is not None:
                return self._with(candidate, kind, have[: len(have) - left])
            candidate = self._with(candidate, kind, [])
        return candidate if self.may_fit(candidate) else None

    def _fits_without(self, candidate: Candidate, kind: Kind, have: list[int]) -> Callable[[int], bool]:
        return lambda count: self.may_fit(self._with(candidate, kind, have[: len(have) - count]))

    def around(self, candidate: Candidate) -> Iterator[Candidate]:
        """Neighbours that fit, or nearly so."""
        if candidate.disk:
            yield from self._other_buffers(candidate)
        yield from self._exchanges(candidate)
        for changed in self._changes(candidate):
            yield from self._balanced(changed)

    def _other_buffers(self, candidate: Candidate) -> Iterator[Candidate]:
        """What is late makes others early; and what buffers take is taken from the rest."""
        counts, at_once = (2, 3, 1), self.space.updates_in_backward
        together = ("state_buffers",) if at_once else ("state_buffers", "read_buffers", "grad_buffers")
        changes: list[dict[str, int]] = [{"late": late} for late in LATE] if at_once else []
        changes += [dict.fromkeys(together, count) for count in (3, 4, 2)]
        changes += [{"grad_buffers": count, "late": 0} for count in counts]
        rings = ["read_buffers", *(["input_buffers"] if candidate.far else [])]
        changes += [{ring: count} for ring in rings for count in counts]
        yield from self.refilled(replace(candidate, **change) for change in changes)  # type: ignore[arg-type]

    def gradient_rings(self, filled: Candidate) -> Iterator[Candidate]:
        """Fillings of its kind in which gradients go through a ring, but for those of late updates: what they leave of
        the host when they do not park is there for states."""
        if filled.disk and self.space.updates_in_backward:
            ways = product(LATE, (1, 2))
            yield from self.refilled(replace(filled, late=late, grad_buffers=count) for late, count in ways)

    def refilled(self, changes: Iterable[Candidate]) -> Iterator[Candidate]:
        """Those with a disk give up what they have elsewhere first: it is where that goes."""
        for changed in changes:
            fitting = changed if self.may_fit(changed) else self.shed(changed, _HOST_FIRST)
            if fitting is not None:
                yield self.fill(fitting, ORDERS[0])

    def _exchanges(self, candidate: Candidate) -> Iterator[Candidate]:
        """Less of one kind, in favour of another."""
        for kind in Kind:
            have = self._rungs(candidate, kind)
            for count in dict.fromkeys([len(have) // 2, 1, len(have)]):
                if not 0 < count <= len(have):
                    continue
                less = self._with(candidate, kind, have[: len(have) - count])
                for other in Kind:
                    if other is not kind and len(self._rungs(candidate, other)) < len(self._ladder(other)):
                        yield self.fill(less, _first(other, last=kind))

    def _balanced(self, changed: Candidate) -> Iterator[Candidate]:
        if self.may_fit(changed):
            for order in ORDERS:
                yield self.fill(changed, order)
            return
        bare = replace(changed, spare_slots=0, spare_grad_slots=0)
        if self.may_fit(bare):
            yield self.fill(bare, ORDERS[0])
        for kind in Kind:
            for much in self._to_shed(changed, bare, kind):
                fitting = self.shed(much, _first(kind)) if self._rungs(changed, kind) else None
                if fitting is not None:
                    yield self.fill(fitting, ORDERS[0])

    def _to_shed(self, changed: Candidate, bare: Candidate, kind: Kind) -> Iterator[Candidate]:
        yield changed
        if self.few:
            yield bare
            if kind is Kind.WHOLE:  # their parameters may stay
                yield from (_demoted(one, replace(one, whole=frozenset())) for one in (changed, bare))

    def _changes(self, candidate: Candidate) -> Iterator[Candidate]:
        """One thing is another."""
        if self.space.tables and not candidate.disk:
            yield self._looked_up(candidate)
        for spare in (candidate.spare_slots + 1, candidate.spare_slots - 1):
            if 0 <= spare <= MOST_SPARE:
                yield replace(candidate, spare_slots=spare)
        grads = candidate.spare_grad_slots or 0
        for spare in (grads + 1, grads - 1):
            if 0 <= spare <= MOST_SPARE:
                yield replace(candidate, spare_grad_slots=spare)
        at = self.micro_batches.index(candidate.micro_batch)
        for near in (at - 1, at + 1):
            if 0 <= near < len(self.micro_batches):
                yield replace(candidate, micro_batch=self.micro_batches[near])
        yield replace(candidate, inputs=Tier.HOST if candidate.inputs is Tier.GPU else Tier.GPU, near=frozenset())
        if candidate.far:  # else see `stored`
            front, count = self._backwards[::-1], len(candidate.far)
            for other in (count + 1, count - 1, count + len(front) // 8, count - len(front) // 8):
                if 0 < other <= len(front) and other != count:
                    yield replace(candidate, far=frozenset(front[:other]))
        yield from self._other_slots(candidate, self.space.slot_sizes[:NUM_SLOT_SIZES])
        for kind in (Kind.WHOLE, Kind.PARAMS, Kind.SELECTIVE, Kind.KEEP, Kind.NEAR):
            for units in self._other_units(candidate, kind):
                changed = self._with(candidate, kind, units)
                yield changed
                if self.few and not candidate.whole <= changed.whole:
                    yield _demoted(candidate, changed)
        if self.few:
            yield from self._other_slots(candidate, self.space.slot_sizes[NUM_SLOT_SIZES:])

    def _other_slots(self, candidate: Candidate, sizes: Sequence[int]) -> Iterator[Candidate]:
        for slot_numel in sizes:
            if slot_numel != (candidate.slot_numel or self.space.slot_numel):
                yield replace(candidate, slot_numel=slot_numel)

    def _other_units(self, candidate: Candidate, kind: Kind) -> Iterator[list[int]]:
        """Not only the lowest rungs. Of many blocks only the first two are tried for being left out."""
        have = self._rungs(candidate, kind)
        for unit in have if self.few else have[:2]:
            yield [other for other in have if other != unit]
        for unit in self._ladder(kind) if self.few else ():
            if unit not in have:
                yield [*have, unit]
                for left in have:
                    yield [*(other for other in have if other != left), unit]

    def _climb(self, candidate: Candidate, kind: Kind, from_back: bool) -> Candidate:
        """As far as memory goes; over one rung that is too high."""
        have = self._rungs(candidate, kind)
        ladder = self._whole_from_back if from_back else self._ladder(kind)
        above = [unit for unit in ladder if unit not in have and self._gains(candidate, kind, unit)]
        if not above:
            return candidate
        count = self._most(candidate, kind, have, above)
        have, above = [*have, *above[:count]], above[count + 1 :]
        have += above[: self._most(candidate, kind, have, above)]
        return self._with(candidate, kind, have)

    def _most(self, candidate: Candidate, kind: Kind, have: Sequence[int], above: Sequence[int]) -> int:
        def fits(count: int) -> bool:
            return self.may_fit(self._with(candidate, kind, [*have, *above[:count]]))

        low, high = 0, len(above) if above and fits(1) else 0
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    def _gains(self, candidate: Candidate, kind: Kind, unit: int) -> bool:
        """Whether there is anything left to gain by it."""
        if kind is not Kind.LOGITS and unit in candidate.looked_up:
            return False
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
        return not (kind in (Kind.PARAMS, Kind.TRAINED, Kind.SUMS) and unit in candidate.whole)

    def _ladder(self, kind: Kind) -> tuple[int, ...]:
        space = self.space
        if kind is Kind.TRAINED:
            return space.adapted
        if kind is Kind.LOGITS:
            return space.keepable_tokens
        if kind in (Kind.KEEP, Kind.SELECTIVE):
            return space.keepable if kind is Kind.KEEP else space.selectable
        if kind is Kind.SWAPPED:
            return space.selectable[::-1]
        if kind in (Kind.HOST_PARAMS, Kind.HOST_STATES):
            return self._from_disk if space.terms.disk_bytes else ()
        if kind is Kind.HOST_SUMS and not space.terms.disk_bytes:
            return ()
        if kind in (Kind.SUMS, Kind.HOST_SUMS):
            return self.space.summed
        return self._backwards if kind is Kind.NEAR else space.movable

    @cached_property
    def _from_disk(self) -> tuple[int, ...]:
        """Every buffer of a ring is as wide as the widest block that goes through it: those come to the host first."""
        return tuple(sorted(self.space.movable, key=lambda block: block not in self.space.wide))

    @cached_property
    def _whole_from_back(self) -> tuple[int, ...]:
        """A head may be as wide as many layers: the widest comes last."""
        movable = self.space.movable[::-1]
        widest = max(movable, key=self.space.block_numel, default=None)
        return tuple(sorted(movable, key=lambda block: block == widest))

    @cached_property
    def _backwards(self) -> tuple[int, ...]:
        """Blocks whose inputs wait, from the back: those wait for the shortest time."""
        profile = self.space.profile
        waiting = {call.block for call in profile.calls if call.needs_backward and call.saved_inputs.at(1)}
        return tuple(sorted(waiting, reverse=True))

    def _rungs(self, candidate: Candidate, kind: Kind) -> list[int]:
        """Those that it has, in the ladder's order."""
        if kind is Kind.LOGITS:
            return [tokens for tokens in self._ladder(kind) if tokens <= candidate.loss_kept_tokens]
        have: frozenset[int] = getattr(candidate, kind)
        return [unit for unit in self._ladder(kind) if unit in have]

    def _with(self, candidate: Candidate, kind: Kind, units: Sequence[int]) -> Candidate:
        """With exactly these. What a block has wholly, or keeps, it does not have in part as well."""
        if kind is Kind.LOGITS:
            return replace(candidate, loss_kept_tokens=max(units, default=0))
        chosen = frozenset(units)
        if kind is Kind.WHOLE:
            parts = {part: getattr(candidate, part) - chosen for part in (Kind.PARAMS, Kind.TRAINED, Kind.SUMS)}
            return replace(candidate, whole=chosen, **parts)
        if kind is Kind.PARAMS:
            return replace(candidate, params=chosen, whole=candidate.whole - chosen)
        if kind in LEVELS:
            levels = {level: getattr(candidate, level) - chosen for level in LEVELS}
            near = candidate.near - chosen if kind is Kind.KEEP else candidate.near
            return replace(candidate, near=near, **{**levels, kind: chosen})
        if kind is Kind.NEAR:
            return replace(candidate, near=chosen, keep=candidate.keep - chosen)
        if kind is Kind.HOST_PARAMS:
            return replace(candidate, host_params=chosen, host_states=candidate.host_states & chosen)
        if kind is Kind.HOST_STATES:
            return replace(candidate, host_states=chosen, host_params=candidate.host_params | chosen)
        if kind is Kind.HOST_SUMS:
            return replace(candidate, host_sums=chosen)
        return replace(candidate, sums=chosen) if kind is Kind.SUMS else replace(candidate, trained=chosen)


def _demoted(before: Candidate, after: Candidate) -> Candidate:
    """What was whole before keeps its parameters."""
    return replace(after, params=after.params | (before.whole - after.whole))


def _first(kind: Kind, last: Kind | None = None) -> Order:
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
