"""Where bytes live, and which serial queues of work move or use them."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import ClassVar


class Tier(StrEnum):
    """A place where bytes live. On a machine without a GPU, GPU is the simulated accelerator."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"


class Picking(StrEnum):
    """How a lane picks its next action."""

    IN_ORDER = "in order"
    DUE_FIRST = "due first"  # among the actions whose dependencies are done, the one due first


class _Lanes(type):
    """Iterating over `Lane` gives the lanes that there are, in the order in which they are shown."""

    known: dict[str, Lane]

    def __iter__(cls) -> Iterator[Lane]:
        return iter(tuple(cls.known.values()))


class Lane(str, metaclass=_Lanes):
    """A serial queue of work. Work on different lanes overlaps; work on one lane does not.

    A lane is a record of data under its name, and `Lane.add` makes one more: whoever checks, simulates, records or
    shows a schedule asks the record and knows no names. There is one object for each name, so `is` compares them. How
    lanes slow each other down is a fact of the machine (`ir/machine.py`)."""

    known: ClassVar[dict[str, Lane]] = {}
    COMPUTE: ClassVar[Lane]
    H2D: ClassVar[Lane]
    D2H: ClassVar[Lane]
    CPU: ClassVar[Lane]
    DISK_READ: ClassVar[Lane]
    DISK_WRITE: ClassVar[Lane]
    GATHER: ClassVar[Lane]
    REDUCE: ClassVar[Lane]
    SAVE: ClassVar[Lane]

    picking: Picking
    meaning: str  # in a few words, for people
    shares: str  # what it has in common with other lanes, which are slower for it; "": nothing
    on_host: bool  # its work is done by the host; that of others is put on a stream of the GPU
    has_latency: bool  # its transfers begin after the machine's latency
    always_shown: bool  # else only where it is busy: not every machine has it

    def __new__(cls, name: str) -> Lane:
        if not isinstance(name, str) or name not in cls.known:
            raise ValueError(f"there is no lane {name!r}; known are {', '.join(cls.known)}")
        return cls.known[name]

    @classmethod
    def add(
        cls,
        name: str,
        picking: Picking,
        meaning: str,
        shares: str = "",
        on_host: bool = False,
        has_latency: bool = False,
        always_shown: bool = False,
    ) -> Lane:
        if name in cls.known:
            raise ValueError(f"there is a lane {name!r} already")
        lane = cls.known[name] = str.__new__(cls, name)
        lane.picking, lane.meaning, lane.shares = picking, meaning, shares
        lane.on_host, lane.has_latency, lane.always_shown = on_host, has_latency, always_shown
        return lane

    @property
    def is_in_order(self) -> bool:
        return self.picking is Picking.IN_ORDER

    def __reduce__(self) -> tuple[type[Lane], tuple[str]]:
        return Lane, (str(self),)


_HOST_MEMORY, _DISK = "host memory", "disk"
Lane.COMPUTE = Lane.add("compute", Picking.IN_ORDER, "GPU kernels", always_shown=True)
Lane.H2D = Lane.add("h2d", Picking.IN_ORDER, "host to GPU", _HOST_MEMORY, has_latency=True, always_shown=True)
Lane.D2H = Lane.add("d2h", Picking.IN_ORDER, "GPU to host", _HOST_MEMORY, has_latency=True, always_shown=True)
Lane.CPU = Lane.add("cpu", Picking.DUE_FIRST, "updates on the host", _HOST_MEMORY, on_host=True, always_shown=True)
Lane.DISK_READ = Lane.add("disk_read", Picking.DUE_FIRST, "disk to host", _DISK, on_host=True)
Lane.DISK_WRITE = Lane.add("disk_write", Picking.DUE_FIRST, "host to disk", _DISK, on_host=True)
# Between ranks. All ranks issue the same in the same order, because these lanes work in order; each has a communicator
# of its own, so that neither waits for the other.
Lane.GATHER = Lane.add("gather", Picking.IN_ORDER, "parameters between GPUs")
Lane.REDUCE = Lane.add("reduce", Picking.IN_ORDER, "gradients between GPUs")
Lane.SAVE = Lane.add("save", Picking.IN_ORDER, "values of a checkpoint", on_host=True)  # no schedule has it: a reader's


COLLECTIVES = (Lane.GATHER, Lane.REDUCE)


class ChunkKind(StrEnum):
    """What the bytes of a chunk are. The three kinds of one chunk share its element layout."""

    PARAM = "param"
    GRAD = "grad"
    STATE = "state"
