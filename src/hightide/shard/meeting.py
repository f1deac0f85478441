"""How the ranks that train one model come together, and part.

[Note: one rank that talks to itself] One rank exchanges nothing. With HIGHTIDE_COLLECTIVES_ALONE=1 in the environment
it does all that each of several ranks does: its plan gathers and reduces (`Plan.even_alone`), on the same lanes and
streams, over NCCL or gloo, in a process group of one that it makes for itself. Its shards are whole chunks, and its
means are of one, so results are what they were: what is left is what collectives cost beside the bytes.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from weakref import WeakSet

import torch
import torch.distributed as dist

from hightide.process.forks import Birthplace
from hightide.process.interrupts import safe_point
from hightide.process.system import usable_cpus
from hightide.shard.attempt import fresh, is_kept
from hightide.shard.communicators import ACROSS, CONTROL, GLOO, LANES, NCCL, SAVE, break_off, make_groups
from hightide.shard.own_rank import OwnRank
from hightide.shard.ranks import Ranks
from hightide.shard.signs import Patience
from hightide.shard.watchman import RankFailure, Watchman

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # that torchrun sets
LOOK_S = 0.02
EVEN_ALONE_SWITCH = "HIGHTIDE_COLLECTIVES_ALONE"  # "1": see [Note: one rank that talks to itself]
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_num_made: Counter[tuple[int, ...]] = Counter()  # by members: all of them count the same
_met: WeakSet[OwnRank] = WeakSet()  # for each model of this process


@dataclass(frozen=True)
class Facts:
    """What a rank tells of itself before anything else."""

    host: str
    boot_id: str
    backend: str
    gpu: str  # its identity; "": none
    cpus: tuple[int, ...] = ()  # that it may run on


def find_ranks(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    patience: Patience | None = None,
    even_alone: bool = False,
) -> Ranks:
    """Those of `group`, of the default group, or of torchrun's environment, whichever is there first. One rank
    alone exchanges nothing, unless asked to (`even_alone`)."""
    patience = patience or Patience()
    is_ours = False
    if group is None and not (dist.is_available() and dist.is_initialized()):
        world = _world_of_environment()
        if world == 1 and not even_alone:
            return Ranks.alone(_device(device))
        _initialise(_device(device), world, timedelta(seconds=patience.timeout_s))
        is_ours = world == 1
    members = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"process {dist.get_rank()} is not in the group that was passed, which has {members}")
    own_device = _device(device)
    if len(members) == 1 and not even_alone:
        return Ranks.alone(own_device)
    try:
        return _meet(group, members, rank, own_device, patience, is_ours)
    except BaseException:
        if is_ours:
            dist.destroy_process_group()
        raise


def _meet(
    group: dist.ProcessGroup | None,
    members: tuple[int, ...],
    rank: int,
    device: torch.device,
    patience: Patience,
    is_ours: bool,
) -> Ranks:
    _num_made[members] += 1
    prefix = f"hightide/{'-'.join(map(str, members))}/{_num_made[members]}"
    shared = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(prefix, shared.clone())  # type: ignore[attr-defined]  # a connection of our own
    cpus = tuple(sorted(usable_cpus()))
    own = Facts(socket.gethostname(), _boot_id(), _backend(group, device), _gpu(device), cpus)
    watchman = Watchman(
        store, rank, len(members), (*LANES, ACROSS), patience, *_host(shared, members), CONTROL, (SAVE,), members
    )
    _met.add(watchman.own)
    watchman.own.beside, watchman.own.title = _met, f"model number {_num_made[members]} of these ranks"
    watchman.give_first_sign()
    facts = _facts_of_all(store, own, rank, len(members), patience)
    try:
        groups = make_groups(members, own.backend, patience)
    except RuntimeError as error:
        raise RankFailure(
            f"rank {rank} was not connected with all others, of which one may be dead: {error}"
        ) from error
    watchman.break_off = lambda: break_off(groups, device)
    watchman.begin()
    birthplace = Birthplace()
    return Ranks(
        rank,
        len(members),
        device,
        own.backend,
        _nodes(facts),
        watchman,
        groups,
        lambda: _close(watchman, groups, is_ours, birthplace),
        members,
        _portion_of_cores(facts, rank),
    )


def talks_even_alone() -> bool:
    """See [Note: one rank that talks to itself]."""
    return os.environ.get(EVEN_ALONE_SWITCH, "0") == "1"


def are_several() -> bool:
    """Whether `find_ranks` would find others, in the default group or by torchrun's environment."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return _world_of_environment() > 1


def _world_of_environment() -> int:
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return 1
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    world = int(os.environ["WORLD_SIZE"])
    if world > 1 and missing:
        raise ValueError(
            f"WORLD_SIZE={world} is in the environment, but not {', '.join(missing)}: start with torchrun, or call "
            "torch.distributed.init_process_group before"
        )
    return world


def _initialise(device: torch.device, world: int, timeout: timedelta) -> None:
    backend = GLOO
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if dist.is_nccl_available():
            backend = "cpu:gloo,cuda:nccl"
    if world == 1:  # and forced to talk
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    elif is_kept():
        rank, (host, port) = int(os.environ["RANK"]), (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
        kept = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
        store = fresh(kept, rank, world, timeout.total_seconds())
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world)
        atexit.register(_destroy_all)
    else:  # it stays: a second one would find in the store what the first has left there, and wait for ever
        dist.init_process_group(backend, timeout=timeout)
        atexit.register(_destroy_all)


def _destroy_all() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _device(device: torch.device | str | None) -> torch.device:
    """With its number: that of `torch.cuda.set_device`, else that of the process on its node."""
    found = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    if found.type != "cuda" or found.index is not None:
        return found
    if chosen := torch.cuda.current_device():
        return torch.device("cuda", chosen)
    local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if num_gpus == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):  # a launcher may show each process its own
        return torch.device("cuda", 0)
    if local_rank >= num_gpus:
        raise ValueError(
            f"this is process {local_rank} of its node, counted from 0, but it has {num_gpus} GPUs: start at most "
            f"{num_gpus} (torchrun --nproc-per-node {num_gpus})"
        )
    return torch.device("cuda", local_rank)


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Over which tensors of this device travel. gloo carries those of a GPU too, through the host."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return NCCL if device.type == "cuda" and backends.get("cuda") == NCCL else GLOO


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:  # another system than Linux
        return ""


def _gpu(device: torch.device) -> str:
    return "" if device.type != "cuda" else str(torch.cuda.get_device_properties(device).uuid)


def _host(store: dist.Store, members: tuple[int, ...]) -> tuple[str, int | None]:
    """Of the store, in words, and which rank that is, if any."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return type(store).__name__, None
    if is_kept():
        return "torchrun", None
    return (f"rank {members.index(0)}", members.index(0)) if 0 in members else ("process 0", None)


def _nodes(facts: Sequence[Facts]) -> list[int]:
    """By host name and boot: containers of one machine, which have limits of their own, are nodes of their own."""
    numbers: dict[tuple[str, str], int] = {}
    return [numbers.setdefault((one.host, one.boot_id), len(numbers)) for one in facts]


def _portion_of_cores(facts: Sequence[Facts], rank: int) -> float:
    """Of the cores that a rank may use, where those that several may use are divided evenly."""
    own, nodes = facts[rank].cpus, _nodes(facts)
    there = [one.cpus for one, node in zip(facts, nodes, strict=True) if node == nodes[rank]]
    shares = [1 / sum(cpu in cpus for cpus in there) for cpu in own]
    return sum(shares) / len(shares) if shares else 1 / len(there)


def _check(facts: Sequence[Facts]) -> None:
    """All ranks see the same facts, so all raise."""
    if len({one.backend for one in facts}) > 1:
        told = ", ".join(f"rank {rank} {one.backend}" for rank, one in enumerate(facts))
        raise ValueError(f"ranks would talk over different backends ({told}): give all of them the same kind of device")
    first: dict[tuple[str, str], int] = {}
    for rank, one in enumerate(facts):
        other = first.setdefault((one.boot_id, one.gpu), rank)
        if one.backend == NCCL and one.gpu and other != rank:
            raise ValueError(
                f"ranks {other} and {rank} have the same GPU ({one.gpu}), which NCCL does not allow: give each rank a "
                "GPU of its own (LOCAL_RANK of torchrun does, or torch.cuda.set_device in each; a CUDA_VISIBLE_DEVICES "
                "of one GPU must name another one in each), or initialise torch.distributed with gloo"
            )


def _facts_of_all(store: dist.Store, own: Facts, rank: int, world: int, patience: Patience) -> list[Facts]:
    """With which all ranks can go together; else each of them raises why not."""
    store.set(f"facts/{rank}", json.dumps(asdict(own)))
    _wait_for_all(store, "facts", range(world), rank, patience)
    facts = [Facts(**json.loads(store.get(f"facts/{other}"))) for other in range(world)]
    store.set(f"known/{rank}", "")
    try:
        _wait_for_all(store, "known", range(world), rank, patience)  # who raises may take the store with it
    except dist.DistError:
        _check(facts)  # which one has done already
        raise
    _check(facts)
    return facts


def _wait_for_all(store: dist.Store, what: str, members: Sequence[int], rank: int, patience: Patience) -> None:
    """Until each rank has told it. A wait of the store itself could not be interrupted."""
    since_s, has_warned = time.monotonic(), False
    missing = list(members)
    while missing := [other for other in missing if not store.check([f"{what}/{other}"])]:
        waited_s = time.monotonic() - since_s
        ranks = ", ".join(map(str, missing))
        if waited_s > patience.timeout_s:
            raise ValueError(
                f"rank {rank} has waited {waited_s:.0f} s for rank(s) {ranks}, which have not come to hightide.wrap: "
                f"all ranks must call it. One that may take longer needs a larger timeout_s than {patience.timeout_s:g}"
            )
        if waited_s > patience.warn_s and not has_warned:
            has_warned = True
            warnings.warn(f"rank {rank} waits for rank(s) {ranks} to come to hightide.wrap", stacklevel=2)
        safe_point()
        time.sleep(LOOK_S)


def _close(watchman: Watchman, groups: dict[str, dist.ProcessGroup], is_ours: bool, birthplace: Birthplace) -> None:
    if not birthplace.is_here:
        return
    watchman.end()
    # torch names groups of some ranks by how many there are, and finds what others of that name have left in the store:
    # so these stay until the process ends.
    if dist.is_initialized() and watchman.world == dist.get_world_size():
        for group in groups.values():
            with suppress(ValueError):  # the user has destroyed all groups
                dist.destroy_process_group(group)
    groups.clear()
    if is_ours and dist.is_initialized():
        dist.destroy_process_group()
