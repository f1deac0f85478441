"""Ways from one candidate to others that fill the memory too.

A move changes one thing, then gives up what no longer fits, or fills what has become free, kind by kind in some order
(ladders.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from hightide.ir.tier import Tier
from hightide.planner.search.candidate import Candidate
from hightide.planner.search.ladders import DISK_ORDERS, HOST, HOST_FIRST, ORDERS, Kind, Ladders, first

MOST_SPARE = 3  # slots beyond what the widest block needs
INPUT_BUFFERS = 2  # through which block inputs go to disk, at first
LATE = (4, 6, 3, 2, 0)  # twelfths of the blocks on disk whose updates are tried to be late
NUM_SLOT_SIZES = 3  # so many slot sizes, of least waste, are tried
NUM_RING_SIZES = 2  # and from a disk so many, of the smallest buffers, beside the one of least waste
FEW_BLOCKS = 8
MOST_FRONTS = 12  # shares of the blocks that are tried where each is filled up
SPACINGS = (1, 2, 3, 4, 6)  # of blocks that swap


@dataclass(frozen=True)
class Form:
    """What a candidate is cast in before anything is filled."""

    slot_numel: int | None = None
    loss_tile_tokens: int | None = None

    def of(self, candidate: Candidate) -> Candidate:
        return candidate.changed(slot_numel=self.slot_numel, loss_tile_tokens=self.loss_tile_tokens)


PLAIN = Form()


@dataclass(frozen=True)
class Moves(Ladders):
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
            yield form.of(plain.changed(state_buffers=buffers, read_buffers=2 * disk, grad_buffers=gradients))

    def disk_starts(self, spare: int, form: Form, host_fits: Callable[[Candidate], bool]) -> Iterator[Candidate]:
        """From the disk, as plain as the host allows: of inputs for which it has no room, the last wait on the GPU; and
        so that rings need not be as wide as a block that is far wider than others, that is on the GPU."""
        late = LATE[0] if self.space.updates_in_backward else 0
        form = replace(form, slot_numel=form.slot_numel or self.space.ring_sizes[0])
        for start in self.starts(spare, form, disk=True):
            for one in dict.fromkeys((start.changed(whole=self.space.wide), start)):
                waiting = self.backwards if start.inputs is Tier.HOST else ()
                count = self.fewest(one, Kind.NEAR, waiting, host_fits)
                if count is not None:
                    yield self.having(one, Kind.NEAR, waiting[:count]).changed(state_buffers=2, late=late)

    def lean_starts(self, form: Form, disk: bool = False) -> Iterator[Candidate]:
        """The same where the host is short: gradients go through a ring, and inputs of the last blocks, of which some
        wait on the host, wait on the GPU."""
        waiting = self.backwards
        for start in self.starts(0, form, disk):
            ways = [start, start.changed(grad_buffers=1)] if self.space.updates_in_backward else [start]
            yield from ways[1:]
            for way, quarters in product(ways, (1, 2, 3) if start.inputs is Tier.HOST else ()):
                yield way.changed(near=frozenset(waiting[: len(waiting) * quarters // 4]))

    def far_starts(self, spare: int, form: Form = PLAIN) -> Iterator[Candidate]:
        """Where it is too short even for that: inputs of the first blocks, or of all, wait on the disk."""
        for start in self.starts(spare, form, disk=True):
            for far in self._shares_of_inputs(start, (2, 1)):
                yield start.changed(far=far, input_buffers=1 + spare, grad_buffers=1 + spare)

    def leanest(self, host_fits: Callable[[Candidate], bool]) -> Iterator[Candidate]:
        """If none of these fits, nothing is known that does."""
        lean = replace(self, micro_batches=self.micro_batches[-1:])
        by_host = replace(self, may_fit=host_fits)
        for form in self.forms:
            for start in lean.starts(0, form, disk=True):
                yield self.fill(start, ORDERS[0])
                yield from self._mixed(start) if start.loss_tile_tokens is None else ()
        sizes = (self.space.slot_numel, self.space.ring_sizes[0]) if self.space.terms.disk_bytes else ()
        for size in dict.fromkeys(sizes):
            for start in lean.starts(0, Form(size), disk=True):
                yield from self._beside_full_host(start, by_host)
        for form in self.forms:
            for start in (*lean.lean_starts(form), *lean.lean_starts(form, disk=True)):
                yield self.fill(start, ORDERS[0])
            yield from self.last_resorts(form)
        for form in self.forms:
            yield from (self.fill(start, ORDERS[0]) for start in lean.far_starts(0, form))

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
            yield lean.changed(trained=frozenset(self.space.adapted))
            for front, rest in self._fronts(movable, movable[::-1], by_width, by_width[::-1]):
                yield lean.changed(whole=front)
                yield lean.changed(params=front)
                yield lean.changed(whole=front, params=rest)

    def relieved(self, spare: int, form: Form, host_fits: Callable[[Candidate], bool]) -> Iterator[Candidate]:
        """Plain starts of which the host cannot hold all: so much is on the GPU that it can, of sums that wait between
        passes first, then of whole blocks."""
        for start in self.starts(spare, form):
            for kind in (Kind.SUMS, Kind.WHOLE):
                ladder = self.ladder(kind)
                count = self.fewest(start, kind, ladder, host_fits)
                start = self.having(start, kind, ladder if count is None else ladder[:count])
                if count is not None:
                    yield start
                    break

    def _mixed(self, lean: Candidate) -> Iterator[Candidate]:
        """From the disk: with ever more on the GPU and as much as fits on the host, and the other way round."""
        on_gpu, on_host = self.fill(lean, (Kind.WHOLE,)), self.fill(lean, tuple(HOST))
        for front, rest in self._fronts(self._by_width[::-1], self.space.movable):
            yield lean.changed(whole=front)
            yield self.having(on_host, Kind.WHOLE, sorted(front))
            host = front - on_gpu.whole
            yield on_gpu.changed(host_params=host, host_states=host)
            yield lean.changed(whole=front, host_params=rest)

    def _beside_full_host(self, lean: Candidate, by_host: Ladders) -> Iterator[Candidate]:
        """From the disk: with ever more on the GPU, whether it has room or not, as much on the host as fits there. What
        is far wider than others is there in any case, or not on the disk at least, so that rings are small."""
        wide = self.space.wide
        starts = [lean.changed(host_params=wide, host_states=wide)]
        for order in (self._by_width[::-1], self.space.movable):
            counts = range(1, len(order) + 1, -(-len(order) // MOST_FRONTS) or 1)
            starts += [lean.changed(whole=frozenset(order[:count])) for count in counts]
        for start in dict.fromkeys(starts):
            filled = by_host.fill(start, tuple(HOST))
            for tile in (None, *self.space.smaller_tiles):
                yield filled.changed(loss_tile_tokens=tile)

    def _fronts(self, *orders: Sequence[int]) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
        """Some blocks, and the others: ever more of them."""
        for order in orders:
            for count in range(1, len(order) + 1):
                yield frozenset(order[:count]), frozenset(order[count:])

    @cached_property
    def _by_width(self) -> tuple[int, ...]:
        return tuple(sorted(self.space.movable, key=self.space.block_numel))

    @property
    def forms(self) -> Iterator[Form]:
        """The plain one first. Others take less of the GPU: slots of the size that takes least, a loss in smaller
        tiles. Neither is as fast."""
        for tile in (None, *self.space.smaller_tiles):
            yield Form(None, tile)
            sizes = self.space.slot_sizes[1:] if self.few else (self.space.leanest_slot_numel,)
            yield from (Form(size, tile) for size in sizes if size != self.space.slot_numel)

    def resident(self) -> Iterator[Candidate]:
        """Everything on the GPU, nothing recomputed."""
        everything = {kind: set(self.ladder(kind)) for kind in (Kind.WHOLE, Kind.KEEP)}
        tokens = max(self.space.keepable_tokens, default=0)
        sizes = (None, *self.space.slot_sizes[1:NUM_SLOT_SIZES]) if self.few else (None,)
        whole = frozenset(everything[Kind.WHOLE])
        # Of several ranks, with whole parameters if they fit; else slots for them, and one more.
        ways = ((0, whole), (1, frozenset[int]())) if self.space.is_cut else ((0, frozenset[int]()),)
        for micro_batch, slot_numel, (spare, copied) in product(self.micro_batches, sizes, ways):
            yield Candidate(
                micro_batch,
                slot_numel=slot_numel,
                spare_slots=spare,
                whole=whole,
                copied=copied,
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
        bare = start.changed(spare_slots=0, spare_grad_slots=0)
        sizes = (None, *self.space.slot_sizes[1:NUM_SLOT_SIZES])
        for slot_numel, candidate in product(sizes, dict.fromkeys((start, bare))):
            one = Form(slot_numel, filled.loss_tile_tokens).of(candidate)
            if self.may_fit(one):
                yield from (self.fill(one, order) for order in ORDERS[:2])
                yield self.fill(one, ORDERS[0], from_back=True)

    def other_rings(self, filled: Candidate, parks: bool) -> Iterator[Candidate]:
        """Fillings of its kind in other chunks, which need smaller buffers and leave more of the host; and where
        gradients park, or go through a ring, because parked ones would take more than inputs do."""
        emptied: dict[str, Any] = dict.fromkeys((*HOST, Kind.PARAMS, Kind.KEEP, Kind.SELECTIVE), frozenset())
        bare = filled.changed(loss_kept_tokens=0, whole=filled.whole & self.space.wide, **emptied)
        if self.space.updates_in_backward:
            bare = bare.changed(grad_buffers=0, late=LATE[0]) if parks else bare.changed(grad_buffers=2, late=0)
        for size in dict.fromkeys((self.space.slot_numel, *self.space.ring_sizes[:NUM_RING_SIZES])):
            one = bare.changed(slot_numel=size, state_buffers=2, read_buffers=2)
            if self.may_fit(one):
                yield from (self.fill(one, order) for order in DISK_ORDERS)

    def swaps(self, filled: Candidate) -> Iterator[Candidate]:
        """Fillings of its kind in which blocks swap: from the front, whose activations wait longest, all or every so
        many-th, so that a copy has the blocks in between to hide behind (lower/move_inputs.py)."""
        if filled.disk or not self.space.selectable:
            return
        empty = filled.changed(keep=frozenset(), selective=frozenset(), swapped=frozenset(), loss_kept_tokens=0)
        bare = empty.changed(whole=frozenset(), params=frozenset(), near=frozenset())
        ladder = self.ladder(Kind.SWAPPED)
        for spacing, share in product(SPACINGS, (4, 3, 2, 1)):
            units = ladder[: len(ladder) * share // 4 : spacing]
            for start in dict.fromkeys(one.changed(swapped=frozenset(units)) for one in (empty, bare) if units):
                if self.may_fit(start):
                    yield from (self.fill(start, order) for order in ORDERS[:3])

    def settled(self, filled: Candidate) -> Iterator[Candidate]:
        """Fillings of its kind in which updates on the host write parameters first: fewer states need be on the GPU so
        that forward does not wait for them."""
        if filled.disk or not self._may_settle:
            return
        yield filled.changed(settles=True)
        bare = Candidate(filled.micro_batch, filled.inputs, filled.spare_slots, settles=True)
        start = Form(filled.slot_numel, filled.loss_tile_tokens).of(bare)
        if self.may_fit(start):
            yield from (self.fill(start, order) for order in ORDERS)

    @property
    def _may_settle(self) -> bool:
        return self.space.terms.in_parts and not self.space.updates_in_backward

    def stored(self, filled: Candidate) -> Iterator[Candidate]:
        """Fillings of its kind in which inputs of the first blocks, which wait longest, do so on disk: what they had of
        the host is there for others, and in forward the disk may have nothing else to do."""
        for far in self._shares_of_inputs(filled, (8, 4, 2, 1)):
            start = filled.changed(far=far, input_buffers=INPUT_BUFFERS)
            if self.may_fit(start):
                yield self.fill(start, ORDERS[0])

    def _shares_of_inputs(self, candidate: Candidate, parts: Sequence[int]) -> Iterator[frozenset[int]]:
        """So many parts of the blocks whose inputs wait on the host, from the front."""
        if candidate.disk and candidate.inputs is Tier.HOST:
            waiting = [block for block in self.backwards[::-1] if block not in candidate.near | candidate.keep]
            yield from (frozenset(waiting[: -(-len(waiting) // part)]) for part in parts if waiting)

    def lookups(self, filled: Candidate) -> Iterator[Candidate]:
        """Fillings of its kind in which embeddings are looked up on the host: what they had of the GPU, or of the link,
        is there for others. Slots need not be as wide as they are."""
        if filled.disk or not self.space.tables:
            return
        for slot_numel in dict.fromkeys((filled.slot_numel, None)):
            here = self._looked_up(filled.changed(slot_numel=slot_numel))
            bare = Candidate(filled.micro_batch, filled.inputs, filled.spare_slots, looked_up=here.looked_up)
            bare = Form(slot_numel, filled.loss_tile_tokens).of(bare)
            for start in (here, bare, bare.changed(spare_slots=0, spare_grad_slots=0)):
                if self.may_fit(start):
                    yield from (self.fill(start, order) for order in ORDERS[:2])

    def _looked_up(self, candidate: Candidate) -> Candidate:
        """All embeddings, or if it does so already none."""
        tables = frozenset(self.space.tables) - candidate.looked_up
        kinds = (Kind.WHOLE, Kind.PARAMS, Kind.TRAINED, Kind.SUMS, Kind.KEEP, Kind.NEAR)
        return candidate.changed(looked_up=tables, **{kind: getattr(candidate, kind) - tables for kind in kinds})

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
        yield from self.refilled(candidate.changed(**change) for change in changes)

    def gradient_rings(self, filled: Candidate) -> Iterator[Candidate]:
        """Fillings of its kind in which gradients go through a ring, but for those of late updates: what they leave of
        the host when they do not park is there for states."""
        if filled.disk and self.space.updates_in_backward:
            ways = product(LATE, (1, 2))
            yield from self.refilled(filled.changed(late=late, grad_buffers=count) for late, count in ways)

    def refilled(self, changes: Iterable[Candidate]) -> Iterator[Candidate]:
        """Those with a disk give up what they have elsewhere first: it is where that goes."""
        for changed in changes:
            fitting = changed if self.may_fit(changed) else self.shed(changed, HOST_FIRST)
            if fitting is not None:
                yield self.fill(fitting, ORDERS[0])

    def _exchanges(self, candidate: Candidate) -> Iterator[Candidate]:
        """Less of one kind, in favour of another."""
        for kind in Kind:
            have = self.rungs(candidate, kind)
            for count in dict.fromkeys([len(have) // 2, 1, len(have)]):
                if not 0 < count <= len(have):
                    continue
                less = self.having(candidate, kind, have[: len(have) - count])
                for other in Kind:
                    if other is not kind and len(self.rungs(candidate, other)) < len(self.ladder(other)):
                        yield self.fill(less, first(other, last=kind))

    def _balanced(self, changed: Candidate) -> Iterator[Candidate]:
        if self.may_fit(changed):
            for order in ORDERS:
                yield self.fill(changed, order)
            return
        bare = changed.changed(spare_slots=0, spare_grad_slots=0)
        if self.may_fit(bare):
            yield self.fill(bare, ORDERS[0])
        for kind in Kind:
            for much in self._to_shed(changed, bare, kind):
                fitting = self.shed(much, first(kind)) if self.rungs(changed, kind) else None
                if fitting is not None:
                    yield self.fill(fitting, ORDERS[0])

    def _to_shed(self, changed: Candidate, bare: Candidate, kind: Kind) -> Iterator[Candidate]:
        yield changed
        if self.few:
            yield bare
            if kind is Kind.WHOLE:  # their parameters may stay
                yield from (_demoted(one, one.changed(whole=frozenset())) for one in (changed, bare))

    def _changes(self, candidate: Candidate) -> Iterator[Candidate]:
        """One thing is another."""
        if self.space.tables and not candidate.disk:
            yield self._looked_up(candidate)
        if self._may_settle and not candidate.disk:
            yield candidate.changed(settles=not candidate.settles)
        for spare in (candidate.spare_slots + 1, candidate.spare_slots - 1):
            if 0 <= spare <= MOST_SPARE:
                yield candidate.changed(spare_slots=spare)
        grads = candidate.spare_grad_slots or 0
        for spare in (grads + 1, grads - 1):
            if 0 <= spare <= MOST_SPARE:
                yield candidate.changed(spare_grad_slots=spare)
        at = self.micro_batches.index(candidate.micro_batch)
        for near in (at - 1, at + 1):
            if 0 <= near < len(self.micro_batches):
                yield candidate.changed(micro_batch=self.micro_batches[near])
        yield candidate.changed(inputs=Tier.HOST if candidate.inputs is Tier.GPU else Tier.GPU, near=frozenset())
        if candidate.far:  # else see `stored`
            front, count = self.backwards[::-1], len(candidate.far)
            for other in (count + 1, count - 1, count + len(front) // 8, count - len(front) // 8):
                if 0 < other <= len(front) and other != count:
                    yield candidate.changed(far=frozenset(front[:other]))
        yield from self._other_slots(candidate, self.space.slot_sizes[:NUM_SLOT_SIZES])
        for kind in (Kind.WHOLE, Kind.PARAMS, Kind.SELECTIVE, Kind.KEEP, Kind.NEAR):
            for units in self._other_units(candidate, kind):
                changed = self.having(candidate, kind, units)
                yield changed
                if self.few and not candidate.whole <= changed.whole:
                    yield _demoted(candidate, changed)
        if self.few:
            yield from self._other_slots(candidate, self.space.slot_sizes[NUM_SLOT_SIZES:])

    def _other_slots(self, candidate: Candidate, sizes: Sequence[int]) -> Iterator[Candidate]:
        for slot_numel in sizes:
            if slot_numel != (candidate.slot_numel or self.space.slot_numel):
                yield candidate.changed(slot_numel=slot_numel)

    def _other_units(self, candidate: Candidate, kind: Kind) -> Iterator[list[int]]:
        """Not only the lowest rungs. Of many blocks only the first two are tried for being left out."""
        have = self.rungs(candidate, kind)
        for unit in have if self.few else have[:2]:
            yield [other for other in have if other != unit]
        for unit in self.ladder(kind) if self.few else ():
            if unit not in have:
                yield [*have, unit]
                for left in have:
                    yield [*(other for other in have if other != left), unit]


def _demoted(before: Candidate, after: Candidate) -> Candidate:
    """What was whole before keeps its parameters."""
    return after.changed(params=after.params | (before.whole - after.whole))
