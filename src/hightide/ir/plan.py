"""A plan: every decision about one model on one machine. JSON, editable, no tensors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import cast

from hightide.ir import codec
from hightide.ir.activation import Activation
from hightide.ir.block import ModelProfile
from hightide.ir.chunk import Layout
from hightide.ir.foreign import quoted, read_json, shown
from hightide.ir.tier import Tier

EDITED = (
    "EDITED since it was made; the lines below are about the plan as it was then.\n"
    "wrap verifies it as it is, and stats(model).plan.explain() is about that.\n\n"
)
PLAN_VERSION = 8  # raised whenever a file of before cannot be read, or would mean other bytes


class Update(StrEnum):
    """When the optimizer's update of a block runs."""

    DEFERRED = "deferred"  # begins at step(), runs beside the next forward; clipping and accumulation are exact
    # As soon as the gradient is final; the user promises one step per backward, no clipping.
    IN_BACKWARD = "in_backward"


class GradientDtype(StrEnum):
    """What a finished gradient is rounded to. Sums over micro-batches are fp32 in any case."""

    FLOAT32 = "float32"
    PARAM = "param"  # the dtype of its parameter: half the bytes on the link and on the host, for one rounding


class Sharing(StrEnum):
    """What each of several ranks has on its GPU of a block whose parameters are there. What lives elsewhere is always
    of shards."""

    SHARDED = "sharded"  # a shard of all; parameters are gathered into slots when they are used
    PARAMS_REPLICATED = "params_replicated"  # whole parameters, gathered after each update, and a shard of the states
    REPLICATED = "replicated"  # all of it; gradients are averaged as a whole, and updates repeated on each rank


@dataclass(frozen=True)
class BlockPlan:
    name: str
    params: Tier  # GPU: persistent. HOST: streamed through slots. DISK: the same, by way of a buffer on the host
    # Where gradients end up and the update runs. GPU with params on HOST: frozen chunks stream, trained ones stay.
    # DISK: the update runs on the host, through buffers.
    states: Tier
    activation: Activation
    inputs: Tier  # where the block's inputs wait for backward. DISK: they go there by way of a buffer on the host
    held: Tier = Tier.GPU  # where that waits which the block has computed and holds (`activation`). HOST: swapped
    # Where sums of gradients wait between the passes of one step. GPU: they stay, whatever `states` is. DISK: only if
    # the states are there; HOST otherwise
    sums: Tier = Tier.HOST
    # HOST: an embedding whose rows are looked up where its table lives. Nothing but rows and their gradients crosses
    compute: Tier = Tier.GPU
    # With updates in backward, of a gradient that leaves the GPU. True: it waits for its update at a place on the host
    # that it takes when it comes and gives back then. False: it goes through the ring of `num_grad_buffers`
    parks: bool = True
    late: bool = False  # its update, from the disk and in backward, comes after those of the others, in order of need
    sharing: Sharing = Sharing.SHARDED  # of several ranks
    # With deferred updates, of states on the host: parameters are written first, which the next forward waits for, and
    # states when nobody waits. More bytes in all
    settles: bool = False


@dataclass(frozen=True)
class Forecast:
    gpu_peak_bytes: int  # of tensors
    host_peak_bytes: int
    disk_peak_bytes: int = 0
    step_s: float = 0.0  # on the machine that the plan was searched for; 0: nobody has simulated it
    # By torch from the driver, at most. None: on the simulated accelerator, or nobody has said for which GPU
    gpu_reserved_bytes: int | None = None
    moving_host_bytes: int = 0  # while `wrap` moves values in, with the model as it was; 0: nobody has said where it is
    # Of the process itself beside all that: Python, torch, compiled code, as it was when blocks had been rehearsed on a
    # real GPU. No limit counts it. 0: nobody has looked
    process_bytes: int = 0

    @property
    def gpu_bytes(self) -> int:
        """What the limit of the GPU is held against: what is reserved where that is known, else what tensors take."""
        return self.gpu_peak_bytes if self.gpu_reserved_bytes is None else self.gpu_reserved_bytes

    @property
    def by_tier(self) -> dict[Tier, int]:
        return {Tier.GPU: self.gpu_bytes, Tier.HOST: self.host_peak_bytes, Tier.DISK: self.disk_peak_bytes}


class Shared:
    """How ranks share a model, in a plan and in what is asked of it."""

    ranks: int
    replicas: int
    even_alone: bool

    @property
    def num_shards(self) -> int:
        return self.ranks // self.replicas

    @property
    def has_collectives(self) -> bool:
        return self.ranks > 1 or self.even_alone

    @property
    def is_cut(self) -> bool:
        """Chunks are in shards."""
        return self.num_shards > 1 or self.even_alone


@dataclass(frozen=True)
class Plan(Shared):
    version: int
    fingerprint: str  # of the model it was made for
    num_samples: int  # in the largest batch it holds; a step has `accumulate` of them
    micro_batch: int
    update: Update
    num_slots: int
    num_grad_slots: int
    loss_tile_tokens: int  # rows that the head projects at once
    gpu_limit_bytes: int
    host_limit_bytes: int
    blocks: tuple[BlockPlan, ...]
    layout: Layout
    forecast: Forecast
    explanation: str  # the text of explain(), written by the planner when the plan was made
    gradients: GradientDtype = GradientDtype.FLOAT32
    accumulate: int = 1  # passes, each a forward and a backward, before every step
    loss_kept_tokens: int = 0  # whose logits stay on the GPU from forward to backward: the rest is projected twice
    loss_in_forward: bool = False  # the head's gradients are made with the loss, and wait for backward: no logits do
    # With deferred updates and one pass a step, of gradients that are rounded and updated on the GPU. True: they are
    # summed in grad slots and wait for the step in their own dtype. False: they wait where they are summed, in fp32
    rounded_on_gpu: bool = False
    disk_limit_bytes: int = 0
    # Buffers on the host. See [Note: rings of buffers] in planner/lower/pass_through_disk.py
    num_read_buffers: int = 0  # of what comes from the disk for the GPU
    num_grad_buffers: int = 0  # of gradients that do not park
    num_state_buffers: int = 0  # of what an update reads from the disk and writes to it
    num_input_buffers: int = 0  # of block inputs on their way to the disk and back: planner/disk_inputs.py
    ranks: int = 1  # processes, with a GPU and a batch each; the plan is the same for all, within the limits of one
    # Groups of ranks, one or several nodes each, that have a copy of everything: shards are of one group. 1: of all
    replicas: int = 1
    # One rank does what each of several does, and talks to itself: so its cost is measured. See shard/meeting.py
    even_alone: bool = False
    # The facts that it was made from. No decision depends on this copy: with it the file alone can be simulated.
    profile: ModelProfile | None = None
    described: str = ""  # a digest of the decisions that forecast and explanation are about; "": of these

    @property
    def decisions(self) -> Plan:
        """What it decides, without what is said about it."""
        return replace(self, forecast=Forecast(0, 0), explanation="", profile=None, described="")

    @property
    def limits(self) -> dict[Tier, int]:
        return {Tier.GPU: self.gpu_limit_bytes, Tier.HOST: self.host_limit_bytes, Tier.DISK: self.disk_limit_bytes}

    @property
    def uses_disk(self) -> bool:
        return any(Tier.DISK in (block.params, block.states, block.inputs) for block in self.blocks)

    def explained(self, explanation: str) -> Plan:
        """The same with this text, which is about its decisions and its forecast."""
        return replace(self, explanation=explanation, described=self.digest)

    @property
    def is_edited(self) -> bool:
        """Since it was explained: forecast and explanation are about other decisions."""
        return self.described not in ("", self.digest)

    @property
    def digest(self) -> str:
        """Of its decisions."""
        return hashlib.sha256(codec.to_json(self.decisions).encode()).hexdigest()[:16]

    def explain(self) -> str:
        return EDITED + self.explanation if self.is_edited else self.explanation

    def save(self, path: str | Path) -> None:
        codec.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """A file of another version is refused by its version, before any of its keys is missed."""
        data = read_json(path, "plan")
        version = data.get("version", PLAN_VERSION) if isinstance(data, dict) else PLAN_VERSION
        if version != PLAN_VERSION:
            raise ValueError(
                f"the plan {shown(path)} was made by version {quoted(version)}, this is version {PLAN_VERSION}; make a "
                "new plan with hightide.plan(model, optimizer, batch)"
            )
        plan = cast(Plan, codec.build(cls, data, shown(path)))
        for name, value in vars(plan.forecast).items():
            if value is not None and value < 0:
                raise ValueError(
                    f"{shown(path)}: forecast: {name} is {value}; it must be 0 or more, and finite; make a new "
                    "plan with hightide.plan(model, optimizer, batch)"
                )
        return plan
