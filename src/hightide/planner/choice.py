"""What is decided about a model on a machine, and the plan that follows. Who decides: a search, or a person."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property

from hightide.ir.block import BlockSpec, ModelProfile
from hightide.ir.chunk import Layout
from hightide.ir.plan import PLAN_VERSION, Activation, BlockPlan, Forecast, GradientDtype, Plan, Update
from hightide.ir.state_spec import ADAM_STATES, StateSpecs
from hightide.ir.tier import Tier
from hightide.planner.layout import adapters, pack, slot_sizes, tiny_blocks
from hightide.planner.loss import loss_tile_tokens, num_rows, smaller_tiles
from hightide.planner.placement import Buffer, ChunkPlaces, Placement


@dataclass(frozen=True)
class Choice:
    """What is decided; everything else in a plan follows."""

    micro_batch: int
    inputs: Tier = Tier.GPU
    spare_slots: int = 1
    whole: frozenset[int] = field(default_factory=frozenset)  # blocks with params and states on the GPU
    params: frozenset[int] = field(default_factory=frozenset)  # blocks with params only
    keep: frozenset[int] = field(default_factory=frozenset)
    trained: frozenset[int] = field(default_factory=frozenset)  # blocks whose adapters stay while the rest streams
    loss_kept_tokens: int = 0
    near: frozenset[int] = field(default_factory=frozenset)  # blocks whose inputs stay on the GPU, whatever `inputs` is
    spare_grad_slots: int | None = None  # None: as many as spare_slots
    slot_numel: int | None = None  # None: the size that wastes least
    loss_tile_tokens: int | None = None  # None: large tiles, which are fastest
    disk: bool = False  # what is neither on the GPU nor in the next two lives on disk
    host_params: frozenset[int] = field(default_factory=frozenset)
    host_states: frozenset[int] = field(default_factory=frozenset)  # some of host_params: params are read twice a step
    disk_buffers: int = 0  # of each kind; one more than it takes lets the disk go on while another is in use


@dataclass(frozen=True)
class Problem:
    """What a plan is made for."""

    profile: ModelProfile
    gpu_bytes: int
    host_bytes: int
    update: Update
    states: StateSpecs = ADAM_STATES
    gradients: GradientDtype = GradientDtype.FLOAT32
    disk_bytes: int = 0

    def build(self, choice: Choice) -> Plan:
        """Without a forecast and an explanation."""
        plan = Plan(
            version=PLAN_VERSION,
            fingerprint=self.profile.fingerprint,
            num_samples=self.profile.num_samples,
            micro_batch=choice.micro_batch,
            update=self.update,
            num_slots=0,
            num_grad_slots=0,
            loss_tile_tokens=choice.loss_tile_tokens or self._loss_tile_tokens,
            gpu_limit_bytes=self.gpu_bytes,
            host_limit_bytes=self.host_bytes,
            blocks=tuple(self._block_plan(block, choice) for block in self.profile.blocks),
            layout=self.layout(choice.slot_numel),
            forecast=Forecast(0, 0),
            explanation="",
            gradients=self.gradients,
            loss_kept_tokens=choice.loss_kept_tokens,
            disk_limit_bytes=self.disk_bytes,
            profile=self.profile,
        )
        placement = self.placement(plan)
        slots, grad_slots = placement.widest_tick(self.called)
        return replace(
            plan,
            num_slots=slots_of(choice, slots),
            num_grad_slots=grad_slots_of(choice, grad_slots, placement.has_leaving),
            num_disk_buffers=choice.disk_buffers if placement.uses_disk else 0,
        )

    def placement(self, plan: Plan) -> Placement:
        """Of a plan that was built here."""
        return Placement(plan, self.places(plan.layout.slot_numel))

    def places(self, slot_numel: int) -> ChunkPlaces:
        if slot_numel not in self._places:
            layout = pack(self.profile, slot_numel, self.states)
            self._places[slot_numel] = ChunkPlaces(layout, self.update, self.gradients)
        return self._places[slot_numel]

    def home(self, block: BlockSpec, choice: Choice) -> tuple[Tier, Tier]:
        """Of a block's parameters and states."""
        index = block.index
        if block.loose or index in choice.whole:
            return Tier.GPU, Tier.GPU
        params = Tier.DISK if choice.disk and index not in choice.host_params else Tier.HOST
        states = Tier.DISK if choice.disk and index not in choice.host_states else Tier.HOST
        return Tier.GPU if index in choice.params else params, Tier.GPU if index in choice.trained else states

    def _block_plan(self, block: BlockSpec, choice: Choice) -> BlockPlan:
        params, states = self.home(block, choice)
        keep = block.index in choice.keep
        near = keep or block.loose or block.index in choice.near
        activation = Activation.KEEP if keep else Activation.RECOMPUTE
        return BlockPlan(block.name, params, states, activation, Tier.GPU if near else choice.inputs)

    def layout(self, slot_numel: int | None = None) -> Layout:
        return self.places(slot_numel or self.slot_numel).layout

    @property
    def slot_numel(self) -> int:
        return self.slot_sizes[0]

    @cached_property
    def slot_sizes(self) -> tuple[int, ...]:
        """The one that wastes least first."""
        return slot_sizes(self.profile)

    @cached_property
    def leanest_slot_numel(self) -> int:
        """The size whose slots take least of the GPU."""
        return min(self.slot_sizes, key=self._slots_bytes)

    def _slots_bytes(self, slot_numel: int) -> int:
        plan = self.build(Choice(1, spare_slots=0, slot_numel=slot_numel))
        sizes = self.placement(plan).buffer_bytes
        return plan.num_slots * sizes[Buffer.SLOT] + plan.num_grad_slots * sizes[Buffer.GRAD_SLOT]

    @cached_property
    def movable(self) -> tuple[int, ...]:
        """Called blocks in the order in which they become persistent: tiny ones, then as they run."""
        tiny = tiny_blocks(self.profile)
        blocks = [block.index for block in self.profile.blocks if not block.loose and block.index in self.called]
        return tuple(sorted(blocks, key=lambda block: block not in tiny))

    def block_numel(self, block: int) -> int:
        """Of the chunks that it owns."""
        return self._numels[block]

    @cached_property
    def adapted(self) -> tuple[int, ...]:
        """Blocks with adapters, as they run. They cost little and save the way of gradients to the host and back."""
        apart = adapters(self.profile)
        blocks = self.profile.blocks
        return tuple(b.index for b in blocks if b.index in self.called and not apart.isdisjoint(b.params))

    @cached_property
    def keepable(self) -> tuple[int, ...]:
        """From the back. A lazy head recomputes its logits anyway."""
        blocks = {call.block for call in self.profile.calls if call.needs_backward}
        return tuple(block for block in sorted(blocks, reverse=True) if not self.profile.blocks[block].lazy_head)

    @cached_property
    def keepable_tokens(self) -> tuple[int, ...]:
        """How many tokens' logits can be kept, tile by tile, ascending. Only of a head that is a plain product."""
        heads = {block.index for block in self.profile.blocks if block.lazy_head and block.plain_linear}
        if not any(call.block in heads and call.needs_backward for call in self.profile.calls):
            return ()
        rows, tile = num_rows(self.profile), self._loss_tile_tokens
        return tuple(min(rows, count * tile) for count in range(1, -(-rows // tile) + 1))

    @cached_property
    def smaller_tiles(self) -> tuple[int, ...]:
        """For the fused loss, where memory is short: descending."""
        return smaller_tiles(self.profile)

    @cached_property
    def _numels(self) -> Counter[int]:
        numels: Counter[int] = Counter()
        for chunk in self.layout().chunks:
            numels[chunk.block] += chunk.numel
        return numels

    @cached_property
    def _places(self) -> dict[int, ChunkPlaces]:
        return {}

    @cached_property
    def called(self) -> set[int]:
        return {call.block for call in self.profile.calls}

    @cached_property
    def _loss_tile_tokens(self) -> int:
        return loss_tile_tokens(self.profile)


def check_micro_batch(profile: ModelProfile, micro_batch: int | None) -> None:
    if micro_batch is not None and not 1 <= micro_batch <= profile.num_samples:
        raise ValueError(
            f"micro_batch={micro_batch} does not fit the batch of {profile.num_samples} samples; "
            f"choose a number from 1 to {profile.num_samples}, or None"
        )


def slots_of(choice: Choice, widest: int) -> int:
    """A spare slot lets the next fetch run beside compute; beside a chunk that is wider than one slot and stays for its
    next use, that takes one more. Nothing streamed: no slots."""
    spare = choice.spare_slots
    if not widest:
        return 0
    return widest + (spare + 1 if spare and widest > 1 else spare)


def grad_slots_of(choice: Choice, widest: int, has_leaving: bool) -> int:
    """A spare one lets a block begin while the gradient before it leaves; one that is used up is gone by then."""
    spare = choice.spare_slots if choice.spare_grad_slots is None else choice.spare_grad_slots
    return widest + (spare if has_leaving else 0)
