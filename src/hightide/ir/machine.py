"""Abilities of a machine: measured by `hightide doctor`, or estimated. Facts as JSON; no decisions."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hightide.ir import codec
from hightide.ir.codec import check_numbers
from hightide.ir.foreign import quoted
from hightide.ir.tier import COLLECTIVES, Lane

SHARING = tuple(lane for lane in Lane if lane.shares == Lane.CPU.shares)  # of which every set is measured
UPDATE_BYTES = 14  # touched per parameter: bf16 gradient and parameter, the master's other 16 bits, two fp32 moments
UPDATE_TRAFFIC_BYTES = 26  # of these, through host memory: all are read, and all but the gradient written
FIRST_TRAFFIC_BYTES = 18  # where moments are written later: the first part reads all, and leaves them as they are
MIN_RATE, MAX_RATE = 1e-6, 1e24  # of whatever a machine has per second, and of its bytes and cores: nothing is zero
MAX_LATENCY_S = 3600.0
DISK_REQUEST_BYTES = 16 << 20  # of one request, and how many are under way of each kind, where nobody has measured
DISK_DEPTH = 4
SIMULATED = "simulated accelerator"  # the name of the GPU on a machine without one


@dataclass(frozen=True)
class Speeds:
    """How fast lanes are while exactly these are busy: bytes moved per second, and for the cpu lane bytes that an
    update touches (each array once)."""

    busy: tuple[Lane, ...]
    bytes_per_s: tuple[float, ...]


@dataclass(frozen=True)
class MatmulRates:
    """Floating point operations per second of a large square product, by what its operands are."""

    bfloat16: float
    float16: float
    float32: float
    tf32: float | None  # fp32 operands, rounded on the way in. None: the device does not do this

    def of(self, dtype: str) -> float | None:
        """None: nobody has measured it."""
        return vars(self).get(dtype)


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int  # all of it, whoever uses it
    memory_bytes_per_s: float  # of a copy: read and written bytes together
    matmul_flop_per_s: MatmulRates


@dataclass(frozen=True)
class Unpinned:
    """Links from and to memory that is not pinned, each alone."""

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float


@dataclass(frozen=True)
class Host:
    processor: str
    num_cores: int  # that the process may use
    memory_bytes: int  # all of it, or what the control group allows if that is less
    copy_bytes_per_s: float  # read and written bytes together
    read_bytes_per_s: float
    update_params_per_s: float  # AdamW alone: bf16 gradient in, bf16 parameter out, fp32 states
    update_kernel: str  # "c" or "torch"


@dataclass(frozen=True)
class SmallRequests:
    request_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True)
class Disk:
    """With large requests, several at a time, unless it says otherwise."""

    name: str
    is_direct: bool  # past the system's page cache
    read_bytes_per_s: float
    write_bytes_per_s: float
    sustained_write_bytes_per_s: float  # at the end of `written_bytes`, when caches are full
    written_bytes: int
    read_while_writing_bytes_per_s: float
    write_while_reading_bytes_per_s: float
    small: tuple[SmallRequests, ...]
    request_bytes: int = DISK_REQUEST_BYTES  # with which reads and writes together are fastest,
    depth: int = DISK_DEPTH  # so many of each at a time
    rated_bytes: int | None = None  # that may be written in its life, by its maker. None: nobody has said

    @property
    def speeds(self) -> tuple[Speeds, ...]:
        """Sustained: a step writes more than a disk's cache holds."""
        sustained = min(1.0, self.sustained_write_bytes_per_s / self.write_bytes_per_s)
        return (
            Speeds((Lane.DISK_READ,), (self.read_bytes_per_s,)),
            Speeds((Lane.DISK_WRITE,), (self.write_bytes_per_s * sustained,)),
            Speeds(
                (Lane.DISK_READ, Lane.DISK_WRITE),
                (self.read_while_writing_bytes_per_s, self.write_while_reading_bytes_per_s * sustained),
            ),
        )


@dataclass(frozen=True)
class CollectiveRates:
    """Bytes that each GPU receives per second, and sends, while all do the same: of B bytes among R ranks a gather or a
    reduce-scatter moves B (R-1)/R, an all-reduce twice as many."""

    gather_bytes_per_s: float
    reduce_bytes_per_s: float
    all_reduce_bytes_per_s: float


@dataclass(frozen=True)
class Links:
    """Between GPUs: collectives alone, and what is left of them, and of copies between host and GPU, beside others."""

    gpus_per_node: int
    num_nodes: int
    inside: CollectiveRates  # of a node
    # Of each GPU's share of its node's network. None: there is one node
    across: CollectiveRates | None
    latency_s: float  # of one collective inside a node,
    across_latency_s: float  # and across nodes
    # Shares of the rates alone. 1: NVLink, which copies do not use; about a half: all of it goes over PCIe
    beside_copies: float  # of a collective, while h2d or d2h is busy
    copies_beside: float  # of these, while a collective is under way
    together: float  # of each, while a gather and a reduce are under way
    backend: str = ""  # over which it was measured: nccl, or gloo, through the host. "": nobody has

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1 or self.num_nodes < 1 or (self.num_nodes > 1 and self.across is None):
            raise ValueError(
                f"links of {self.gpus_per_node} GPUs in each of {self.num_nodes} nodes, "
                f"{'without' if self.across is None else 'with'} rates across nodes; name at least one of each, and "
                "rates where there are several nodes"
            )
        for name in ("beside_copies", "copies_beside", "together"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"links: {name} is {getattr(self, name)}; it is a share, above 0 and at most 1")


@dataclass(frozen=True)
class Fingerprint:
    """What a measurement depends on: if one of these is another, it is another machine."""

    gpu: str
    gpu_uuid: str
    driver: str
    processor: str
    num_cores: int
    memory_gib: int
    torch: str

    def differences(self, other: Fingerprint) -> list[str]:
        return [
            f"{name} was {mine!r} and is {getattr(other, name)!r}"
            for name, mine in vars(self).items()
            if mine != getattr(other, name)
        ]


@dataclass(frozen=True)
class Estimate:
    """Where numbers come from that were not measured."""

    of: str  # a field, such as "gpu.memory_bytes_per_s", or a section with all its fields, such as "disk"
    source: str


@dataclass(frozen=True)
class Machine:
    name: str
    source: str  # "measured", or where an estimate comes from
    speeds: tuple[Speeds, ...]  # from and to pinned memory: every set of SHARING, and whatever else was measured
    latency_s: float  # of one transfer, from when it is asked for to its first byte
    date: str = ""  # of the measurement, ISO 8601 in UTC
    # None: only the lanes are known.
    gpu: Gpu | None = None
    unpinned: Unpinned | None = None  # also None where there is nothing to pin for: the simulated accelerator
    host: Host | None = None
    disk: Disk | None = None
    fingerprint: Fingerprint | None = None
    estimates: tuple[Estimate, ...] = ()  # empty if all was measured
    links: Links | None = None  # None: one GPU, or nobody has said
    # Seconds of the first part of an update, over those that its bytes take in an update as a whole: it moves less of
    # them, and computes as much. None: nobody has measured it
    first_part: float | None = None

    def __post_init__(self) -> None:
        missing = [busy for busy in subsets() if frozenset(busy) not in self._table]
        if missing:
            names = "; ".join("+".join(busy) for busy in missing)
            raise ValueError(f"the machine {quoted(self.name)} has no speeds for: {names}; measure it again")
        for speeds in self.speeds:
            if len(speeds.busy) != len(speeds.bytes_per_s):
                raise ValueError(
                    f"the machine {quoted(self.name)} has speeds {quoted(speeds)}; each busy lane needs one above zero"
                )
        where = f"the machine {quoted(self.name)}"
        check_numbers(self.latency_s, f"{where}: latency_s", 0, MAX_LATENCY_S)
        check_numbers(self.fingerprint, f"{where}: fingerprint")
        check_numbers(self.first_part, f"{where}: first_part", 1, MAX_RATE)
        if self.links is not None:
            for latency_s in (self.links.latency_s, self.links.across_latency_s):
                check_numbers(latency_s, f"{where}: links: latency_s", 0, MAX_LATENCY_S)
            for rates in (self.links.inside, self.links.across):
                check_numbers(rates, f"{where}: links", MIN_RATE, MAX_RATE)
        for part in ("speeds", "gpu", "unpinned", "host", "disk"):
            check_numbers(getattr(self, part), f"{where}: {part}", MIN_RATE, MAX_RATE)

    @cached_property
    def _table(self) -> dict[frozenset[Lane], dict[Lane, float]]:
        rows = (*self.speeds, *(() if self.disk is None else self.disk.speeds))
        return {frozenset(row.busy): dict(zip(row.busy, row.bytes_per_s, strict=False)) for row in rows}

    def speeds_of(self, busy: Set[Lane]) -> dict[Lane, float]:
        """Of each busy lane: as measured in the largest set of busy lanes that it is part of. What was measured alone
        only is not slowed down: the disk takes little of host memory's bandwidth. Of collectives: the share that is
        left of their speed alone."""
        known = self._speeds.get(frozenset(busy))
        if known is None:
            others = {lane for lane in busy if lane not in COLLECTIVES}
            known = {lane: self._speed(lane, others) for lane in others}
            if len(others) < len(busy):
                known |= self._beside_collectives(known, busy - others)
            self._speeds[frozenset(busy)] = known
        return known

    def _beside_collectives(self, known: dict[Lane, float], collectives: Set[Lane]) -> dict[Lane, float]:
        """Their own speed is a share of what they do alone, which depends on who takes part."""
        links, copies = self.links, [lane for lane in (Lane.H2D, Lane.D2H) if lane in known]
        if links is None:
            return dict.fromkeys(collectives, 1.0)
        share = (links.beside_copies if copies else 1.0) * (links.together if len(collectives) > 1 else 1.0)
        return {lane: known[lane] * links.copies_beside for lane in copies} | dict.fromkeys(collectives, share)

    def _speed(self, lane: Lane, busy: Set[Lane]) -> float:
        measured = [speeds for together, speeds in self._table.items() if lane in together and together <= busy]
        if not measured:
            option = " --disk FOLDER" if lane.shares == Lane.DISK_READ.shares else ""
            raise ValueError(
                f"the machine {quoted(self.name)} says nothing about its {lane.shares or lane} (0 known rates); "
                f"measure it with `hightide doctor{option}`, or name a preset"
            )
        most = max(map(len, measured))
        return min(speeds[lane] for speeds in measured if len(speeds) == most)

    def best_speed(self, lane: Lane) -> float:
        """Whatever others do beside it."""
        return max(speeds[lane] for speeds in self._table.values() if lane in speeds)

    @cached_property
    def _speeds(self) -> dict[frozenset[Lane], dict[Lane, float]]:
        return {}

    @property
    def is_measured(self) -> bool:
        return not self.estimates

    @property
    def measured_products(self) -> MatmulRates | None:
        """None: without a GPU, or they are estimates."""
        estimated = {"gpu", "gpu.matmul_flop_per_s"} & {estimate.of for estimate in self.estimates}
        return None if self.gpu is None or self.is_simulated or estimated else self.gpu.matmul_flop_per_s

    @property
    def is_simulated(self) -> bool:
        """Without a GPU: copies to and from the accelerator are copies inside host memory, by the cores."""
        return self.gpu is not None and self.gpu.name == SIMULATED

    def save(self, path: str | Path) -> None:
        codec.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        return codec.load(cls, path, "machine")


def subsets() -> list[tuple[Lane, ...]]:
    """Every set of lanes that can be busy at once."""
    found: list[tuple[Lane, ...]] = [()]
    for lane in SHARING:
        found += [(*busy, lane) for busy in found]
    return [busy for busy in found if busy]
