"""One rank's share of a machine with several: the host, its cores and the disk are a node's."""

from __future__ import annotations

from dataclasses import replace

from hightide.ir.machine import UPDATE_BYTES, UPDATE_TRAFFIC_BYTES, Disk, Host, Machine, SmallRequests, Speeds
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane
from hightide.ir.units import counted

_TRAFFIC = {
    Lane.H2D: 1.0,
    Lane.D2H: 1.0,
    Lane.CPU: UPDATE_TRAFFIC_BYTES / UPDATE_BYTES,
}  # through host memory, per byte


def machine_of_rank(machine: Machine, gpus: int, nodes: int = 1) -> Machine:
    """While all ranks of a node, one for each of so many GPUs, do the same. Machine files tell what one GPU has when it
    is alone: with one nothing changes."""
    if gpus * nodes == 1:
        return machine
    links = machine.links
    if links is None or not 1 <= gpus <= links.gpus_per_node or not 1 <= nodes <= links.num_nodes:
        known = "1 GPU" if links is None else _counted(links.num_nodes, links.gpus_per_node)
        raise ValueError(
            f"{_counted(nodes, gpus)}: the machine {machine.name!r} has {known}; name one that has them, such as "
            "--machine 8x-h100 or 4-nodes-8x-h100, or ask for fewer"
        )
    return replace(
        machine,
        speeds=tuple(_shared(machine, row, gpus) for row in machine.speeds),
        host=None if machine.host is None else _host(machine.host, gpus),
        disk=None if machine.disk is None else _disk(machine.disk, gpus),
        links=replace(links, gpus_per_node=gpus, num_nodes=nodes),
    )


def _counted(nodes: int, gpus: int) -> str:
    return f"{counted(nodes, 'node')} of {counted(gpus, 'GPU')}"


def machine_of_plan(machine: Machine, plan: Plan) -> Machine:
    """The same for the ranks of a plan, in as few nodes as hold them."""
    gpus = plan.ranks if machine.links is None else min(plan.ranks, machine.links.gpus_per_node)
    return machine_of_rank(machine, gpus, -(-plan.ranks // gpus))


def _shared(machine: Machine, row: Speeds, gpus: int) -> Speeds:
    """Cores are divided. Every GPU has a link of its own, but all go through host memory: it takes no more than it does
    for one GPU with whatever of its lanes takes most."""
    most = max(_traffic(dict(zip(one.busy, one.bytes_per_s, strict=True))) for one in machine.speeds)
    alone = dict(zip(row.busy, row.bytes_per_s, strict=True))
    divided = {lane: speed / gpus if lane is Lane.CPU else speed for lane, speed in alone.items()}
    share = min(1.0, most / (gpus * _traffic(divided)))
    return Speeds(row.busy, tuple(share * speed for speed in divided.values()))


def _traffic(speeds: dict[Lane, float]) -> float:
    return sum(_TRAFFIC[lane] * speed for lane, speed in speeds.items())


def _host(host: Host, gpus: int) -> Host:
    return replace(
        host,
        num_cores=max(1, host.num_cores // gpus),
        memory_bytes=host.memory_bytes // gpus,
        copy_bytes_per_s=host.copy_bytes_per_s / gpus,
        read_bytes_per_s=host.read_bytes_per_s / gpus,
        update_params_per_s=host.update_params_per_s / gpus,
    )


def _disk(disk: Disk, gpus: int) -> Disk:
    rates = {name: getattr(disk, name) / gpus for name in vars(disk) if name.endswith("_bytes_per_s")}
    small = (
        SmallRequests(one.request_bytes, one.read_bytes_per_s / gpus, one.write_bytes_per_s / gpus)
        for one in disk.small
    )
    rated = None if disk.rated_bytes is None else disk.rated_bytes // gpus
    return replace(disk, small=tuple(small), rated_bytes=rated, **rates)
