"""Seconds of what ranks do together.

[Note: what a collective takes] Of B whole bytes among R ranks each receives, and sends, B (R-1)/R to gather them, as
much to reduce them to shards, and both one after the other to reduce them for all. Inside a node that goes at the rate
of its links. Across n nodes of G GPUs each node receives B (n-1)/n, which its G GPUs share, each by its part of the
network; the rest goes round inside at the same time, so the slower of the two counts. Where shards are of one group of
ranks and other groups have replicas, a reduced shard is averaged over them afterwards, each rank with those that have
the same shard: B/S bytes among so many, by its own part of the network.

The GPU's own time for them (they run on a few of its multiprocessors) is not counted."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from hightide.ir.action import Op
from hightide.ir.machine import CollectiveRates, Links, Machine
from hightide.ir.plan import Plan
from hightide.planner.chunk_place import ChunkPlace

Rate = Callable[[CollectiveRates], float]
_GATHER: Rate = attrgetter("gather_bytes_per_s")
_REDUCE: Rate = attrgetter("reduce_bytes_per_s")
_ALL_REDUCE: Rate = attrgetter("all_reduce_bytes_per_s")


def links_of(machine: Machine, plan: Plan) -> Links | None:
    """Between the ranks of a plan. None: it has one, which exchanges nothing."""
    if not plan.has_collectives:
        return None
    links = machine.links
    if links is None or links.gpus_per_node * links.num_nodes != plan.ranks:
        known = "no GPUs that are linked" if links is None else f"{links.num_nodes} x {links.gpus_per_node} of them"
        raise ValueError(
            f"the plan is for {plan.ranks} ranks, the machine {machine.name!r} says something about {known}; name a "
            "machine with links between GPUs, such as 8x-h100, and how many of them"
        )
    return links


def collective_s(links: Links, plan: Plan, op: Op, place: ChunkPlace) -> float:
    """Of a GATHER or REDUCE of a chunk."""
    if op is Op.GATHER:
        return _among(links, plan.num_shards, place.chunk.param_bytes, _GATHER)
    if place.is_averaged_whole:
        return _among(links, plan.ranks, place.chunk.grad_bytes, _ALL_REDUCE, passes=2)
    seconds = _among(links, plan.num_shards, place.chunk.grad_bytes, _REDUCE)
    if plan.replicas == 1:
        return seconds
    rates, latency_s = _between_groups(links)
    among = (plan.replicas - 1) / plan.replicas
    return seconds + latency_s + 2 * among * place.shard.grad_bytes / rates.all_reduce_bytes_per_s


def _between_groups(links: Links) -> tuple[CollectiveRates, float]:
    """Of ranks that have the same shard: in different nodes, if there are several."""
    if links.across is None or links.num_nodes == 1:
        return links.inside, links.latency_s
    return links.across, links.across_latency_s


def _among(links: Links, ranks: int, num_bytes: int, rate: Rate, passes: int = 1) -> float:
    inside_s = passes * num_bytes * (ranks - 1) / ranks / rate(links.inside)
    if ranks <= links.gpus_per_node:
        return links.latency_s + inside_s
    assert links.across is not None
    nodes = ranks / links.gpus_per_node
    received = num_bytes * (nodes - 1) / nodes / links.gpus_per_node
    return links.across_latency_s + max(inside_s, passes * received / rate(links.across))
