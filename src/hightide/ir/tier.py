"""Where bytes live, and which serial queues of work move or use them."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """A place where bytes live. On a machine without a GPU, GPU is the simulated accelerator."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"


class Lane(StrEnum):
    """A serial queue of work. Work on different lanes overlaps; work on one lane does not."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    CPU = "cpu"
    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"


class Rule(StrEnum):
    """How a lane picks its next action."""

    IN_ORDER = "in order"
    DUE_FIRST = "due first"  # among the actions whose dependencies are done, the one due first


LANE_RULES: dict[Lane, Rule] = {
    Lane.COMPUTE: Rule.IN_ORDER,
    Lane.H2D: Rule.IN_ORDER,
    Lane.D2H: Rule.IN_ORDER,
    Lane.CPU: Rule.DUE_FIRST,
    Lane.DISK_READ: Rule.DUE_FIRST,
    Lane.DISK_WRITE: Rule.DUE_FIRST,
}


DISK_LANES = (Lane.DISK_READ, Lane.DISK_WRITE)  # priced in plans; no runtime has them yet


class ChunkKind(StrEnum):
    """What the bytes of a chunk are. The three kinds of one chunk share its element layout."""

    PARAM = "param"
    GRAD = "grad"
    STATE = "state"
