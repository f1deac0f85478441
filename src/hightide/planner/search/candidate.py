"""One point of the search: the few decisions from which a plan follows. A search makes them, or a person."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hightide.ir.activation import Activation
from hightide.ir.tier import Tier
from hightide.planner.mechanism import Mechanism, Mechanisms

NO_BLOCKS: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Candidate:
    """What is decided; everything else in a plan follows."""

    micro_batch: int
    inputs: Tier = Tier.GPU
    spare_slots: int = 1
    whole: frozenset[int] = NO_BLOCKS  # blocks with params and states on the GPU
    params: frozenset[int] = NO_BLOCKS  # blocks with params only
    copied: frozenset[int] = NO_BLOCKS  # of `whole`, those with whole params on each of the ranks
    keep: frozenset[int] = NO_BLOCKS
    selective: frozenset[int] = NO_BLOCKS  # no block is in two of these three
    swapped: frozenset[int] = NO_BLOCKS  # selective, and what they hold waits on the host
    sums: frozenset[int] = NO_BLOCKS  # blocks whose sums stay on the GPU from pass to pass
    trained: frozenset[int] = NO_BLOCKS  # blocks whose adapters stay while the rest streams
    looked_up: frozenset[int] = NO_BLOCKS  # embeddings on the host, whatever else is said of them
    settles: bool = False  # updates on the host write states later than parameters
    loss_kept_tokens: int = 0
    near: frozenset[int] = NO_BLOCKS  # blocks whose inputs stay on the GPU, whatever `inputs` is
    spare_grad_slots: int | None = None  # None: as many as spare_slots
    slot_numel: int | None = None  # None: the size that wastes least
    loss_tile_tokens: int | None = None  # None: large tiles, which are fastest
    disk: bool = False  # what is neither on the GPU nor in the next two lives on disk
    host_params: frozenset[int] = NO_BLOCKS
    host_states: frozenset[int] = NO_BLOCKS  # some of host_params: params are read twice a step
    host_sums: frozenset[int] = NO_BLOCKS  # whose sums wait there between passes, states or not
    state_buffers: int = 0  # on the host; one more than it takes lets the disk go on while another is in use
    read_buffers: int = 0
    grad_buffers: int = 0  # 0: gradients of updates in backward park; else those that can go through so many buffers
    far: frozenset[int] = NO_BLOCKS  # blocks whose inputs wait on disk, not on the host
    input_buffers: int = 0  # through which these pass
    late: int = 0  # so many twelfths of the blocks on disk are updated late, and their gradients park

    @property
    def mechanisms(self) -> Mechanisms:
        """Those of which a candidate decides whether they are used."""
        uses = {
            Mechanism.PERSISTENT: self.whole | self.params | self.trained,
            Mechanism.SPARE_SLOTS: self.spare_slots or self.spare_grad_slots,
            Mechanism.LEVELS: self.selective | self.swapped,
            Mechanism.SWAP: self.swapped,
            Mechanism.LOOKUP: self.looked_up,
            Mechanism.STATES_LATER: self.settles,
        }
        return frozenset(mechanism for mechanism, used in uses.items() if used)

    def changed(self, **changes: Any) -> Candidate:
        """As dataclasses.replace. Searches make thousands, so that this counts."""
        other = object.__new__(Candidate)
        other.__dict__.update(self.__dict__)
        other.__dict__.pop("_hash", None)
        other.__dict__.update(changes)
        return other

    def __hash__(self) -> int:
        """Counted once: a search looks each of them up many times over."""
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = hash(tuple(self.__dict__.values()))
        return known

    def activation(self, block: int) -> Activation:
        if block in self.keep:
            return Activation.KEEP
        return Activation.SELECTIVE if block in self.selective | self.swapped else Activation.RECOMPUTE

    def num_slots(self, widest: int) -> int:
        """A spare slot lets the next fetch run beside compute; beside a chunk that is wider than one slot and stays for
        its next use, that takes one more. Nothing streamed: no slots."""
        if not widest:
            return 0
        return widest + (self.spare_slots + 1 if self.spare_slots and widest > 1 else self.spare_slots)

    def num_grad_slots(self, widest: int, has_leaving: bool) -> int:
        """A spare one lets a block begin while the gradient before it leaves; one that is used up is gone by then."""
        spare = self.spare_slots if self.spare_grad_slots is None else self.spare_grad_slots
        return widest + (spare if has_leaving else 0)
