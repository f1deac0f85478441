"""A schedule: the actions of one pass over the model, each with lane, dependencies and memory effect.

Its text, one action a line (fields that are empty are left out):

    h2d fetch fetch.param.3@fwd.3 tick=3 opens=0 block=3 chunk=3 kind=param from=host to=gpu[1] bytes=4096
    after=evict.param.0@fwd.3 prev=update.3
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any

from hightide.ir.tier import ChunkKind, Lane, Tier


class Op(StrEnum):
    FORWARD = "forward"  # tick: one call of a block, all its micro-batches
    BACKWARD = "backward"  # tick
    STEP = "step"  # tick: the user called optimizer.step(); or, before more passes of a step, only the end of this one
    FETCH = "fetch"  # PARAM or GRAD towards the GPU; GRAD from its place there to a grad slot
    EVICT = "evict"  # drop a clean copy
    CLEAR = "clear"  # open a gradient at zero
    # A dirty gradient away from the GPU, or from its grad slot to its place there, rounded; of a table on the host, the
    # rows' gradients
    WRITE_BACK = "write_back"
    LOOK_UP = "look_up"  # rows of a table that stays on the host, to the GPU
    SUM = "sum"  # gradients of rows, on the host, into that of their table
    STASH = "stash"  # block inputs and what a block holds, GPU to host, after forward
    UNSTASH = "unstash"  # the same, host to GPU, before backward
    UPDATE = "update"  # the optimizer's update of one chunk
    SETTLE = "settle"  # its second part, of a chunk whose update writes parameters first: its states
    READ = "read"  # from disk into a buffer on the host
    WRITE = "write"  # from a buffer on the host to disk
    GATHER = "gather"  # of a chunk from the shards of all ranks, on the GPU: in a slot, or where its parameters stay
    REDUCE = "reduce"  # a gradient to its mean over all ranks, on the GPU: each keeps its shard, or all of it


TICK_OPS = frozenset({Op.FORWARD, Op.BACKWARD, Op.STEP})
_SHORT = {Op.FORWARD: "fwd", Op.BACKWARD: "bwd"}  # in keys


class ActionKey(str):
    """Which action of a schedule: what it does (`op`), to which chunk or call (`number`), of which `kind` where the op
    alone does not say, and for which tick (`at`) where there may be one for each.

    It is its own text, so that it can be printed, saved and compared with what was; nobody else makes or reads such
    texts. Lowering makes the same ones thousands of times, so the latest are kept."""

    __slots__ = ("at", "kind", "number", "op")
    op: Op
    number: int | None
    kind: ChunkKind | None
    at: ActionKey | None

    def __new__(
        cls, op: Op, number: int | None = None, kind: ChunkKind | None = None, at: ActionKey | None = None
    ) -> ActionKey:
        return _key(op, number, kind, at)

    def __getnewargs__(self) -> Any:
        return self.op, self.number, self.kind, self.at


@lru_cache(maxsize=1 << 16)
def _key(op: Op, number: int | None, kind: ChunkKind | None, at: ActionKey | None) -> ActionKey:
    words = [_SHORT.get(op, op), *([] if kind is None else [kind]), *([] if number is None else [str(number)])]
    key = str.__new__(ActionKey, ".".join(words) + ("" if at is None else f"@{at}"))
    key.op, key.number, key.kind, key.at = op, number, kind, at
    return key


class Mode(StrEnum):
    """Which pass over the model a schedule describes. A step that was planned as several passes has FIRST, MIDDLE and
    LAST ones."""

    TRAIN = "train"  # forward, backward, step; gradients start at zero
    ACCUMULATE = "accumulate"  # the same, on top of gradients that exist already
    FIRST = "first"  # forward and backward; gradients start at zero, and more will be added
    MIDDLE = "middle"  # the same, on top of these
    LAST = "last"  # the same, and then the step
    EVAL = "eval"  # forward only

    @property
    def trains(self) -> bool:
        return self is not Mode.EVAL

    @property
    def is_alone(self) -> bool:
        """The passes before and after it are taken to be like it."""
        return self in (Mode.TRAIN, Mode.ACCUMULATE, Mode.EVAL)

    @property
    def starts_sums(self) -> bool:
        """Gradients start at zero."""
        return self in (Mode.TRAIN, Mode.FIRST)

    @property
    def continues_step(self) -> bool:
        """Nothing was updated since the pass before: its parameters are still good."""
        return self in (Mode.MIDDLE, Mode.LAST)

    @property
    def ends_step(self) -> bool:
        """Its gradients are final: the update follows."""
        return self in (Mode.TRAIN, Mode.ACCUMULATE, Mode.LAST)


@dataclass(frozen=True)
class Place:
    """A tier, and on the GPU a slot, on the host a buffer of what lives on disk. Without one, the place is the
    chunk's own."""

    tier: Tier
    slot: int | None = None

    def __str__(self) -> str:
        return str(self.tier) if self.slot is None else f"{self.tier}[{self.slot}]"


@dataclass(frozen=True)
class Action:
    id: ActionKey
    op: Op
    lane: Lane
    tick: int  # the tick that needs it (its own index, if it is a tick). Past the last tick: needed by the next pass
    opens: int = -1  # it may be issued when this tick has been left; -1: from the beginning of the pass
    block: int | None = None
    call: int | None = None  # index of the block's call in the model's forward, for ticks and block inputs
    chunk: int | None = None
    kind: ChunkKind | None = None
    source: Place | None = None
    target: Place | None = None
    num_bytes: int = 0  # bytes moved, or touched by an update; of a collective: those that this rank receives
    after: tuple[ActionKey, ...] = ()  # actions of this pass
    after_prev: tuple[ActionKey, ...] = ()  # actions of the latest earlier pass that had them
    gpu_takes: int = 0  # bytes of GPU memory alive from its start on
    gpu_gives: int = 0  # bytes of GPU memory released at its end
    gpu_transient: int = 0  # further bytes alive only while it runs
    gpu_kept: int = 0  # what kept graphs and logits are of the bytes that it takes (forward, unstash), or gives
    gpu_holes: int = 0  # further bytes that torch reserves on a real GPU, because the tensors inside differ in size
    host_takes: int = 0
    host_gives: int = 0

    @property
    def runs_when_open(self) -> bool:
        """Of inline actions: those that never wait run as soon as they open, others on entry of the tick that needs
        them. An update that is due in the next pass waits for nothing but the block before it, and so does a gradient
        that stays on the GPU, whatever has room for the next one."""
        is_later = self.op is Op.UPDATE and self.tick > self.opens + 1
        return is_later or self.op is Op.EVICT or (self.op is Op.WRITE_BACK and self.lane is Lane.COMPUTE)

    def changed(self, **changes: Any) -> Action:
        """As dataclasses.replace. Lowering makes thousands, so that this counts."""
        other = object.__new__(Action)
        other.__dict__.update(self.__dict__)
        other.__dict__.update(changes)
        return other

    def __str__(self) -> str:
        words = [str(self.lane), str(self.op), self.id, f"tick={self.tick}"]
        for label, name in _FIELDS.items():
            value = getattr(self, name)
            if value not in (None, (), _DEFAULTS[name]):
                words.append(f"{label}={','.join(value) if isinstance(value, tuple) else value}")
        return " ".join(words)


_FIELDS = {  # as the text calls them
    "opens": "opens",
    "block": "block",
    "call": "call",
    "chunk": "chunk",
    "kind": "kind",
    "from": "source",
    "to": "target",
    "bytes": "num_bytes",
    "after": "after",
    "prev": "after_prev",
    "gpu+": "gpu_takes",
    "gpu-": "gpu_gives",
    "gpu~": "gpu_transient",
    "kept": "gpu_kept",
    "holes": "gpu_holes",
    "host+": "host_takes",
    "host-": "host_gives",
}
_DEFAULTS: dict[str, object] = {name: Action.__dataclass_fields__[name].default for name in _FIELDS.values()}


@dataclass(frozen=True)
class Schedule:
    """Actions in an order in which they could run one by one. The order on a lane is the order here."""

    mode: Mode
    gpu_base_bytes: int  # slots, persistent chunks, batch, buffers: alive during the whole pass
    host_base_bytes: int
    actions: tuple[Action, ...]
    disk_base_bytes: int = 0  # nothing comes and goes there
    standing: tuple[tuple[int, int], ...] = ()  # chunks that are in slots when it begins: (chunk, first slot)

    @cached_property
    def ticks(self) -> tuple[Action, ...]:
        return tuple(action for action in self.actions if action.op in TICK_OPS)

    @cached_property
    def by_id(self) -> dict[str, Action]:
        return {action.id: action for action in self.actions}

    def lane(self, lane: Lane) -> tuple[Action, ...]:
        return tuple(action for action in self.actions if action.lane is lane)

    def to_text(self) -> str:
        rules = " ".join(f"{lane}:{lane.picking.replace(' ', '_')}" for lane in Lane)
        bases = f"gpu_base={self.gpu_base_bytes} host_base={self.host_base_bytes} disk_base={self.disk_base_bytes}"
        standing = ",".join(f"{chunk}:{slot}" for chunk, slot in self.standing)
        head = f"# schedule mode={self.mode} {bases} rules={rules}" + (f" standing={standing}" if standing else "")
        return "\n".join([head, *(str(action) for action in self.actions)]) + "\n"
