"""Measurements of several ranks, as one: a step of all of them is as slow as the slowest of each part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hightide.ir.block import ModelProfile
from hightide.ir.costs import CallCost, CallPeaks, Costs, Curve, LossCost, Point, SelectiveCost
from hightide.ir.machine import CollectiveRates, Disk, Gpu, Links, Machine, MatmulRates, SmallRequests, Speeds
from hightide.planner.predict.step_seconds import with_peaks
from hightide.planner.problem import Problem

T = TypeVar("T")


def slowest_problem(own: Problem, profile: ModelProfile, of_all: Sequence[tuple[Costs, Machine]]) -> Problem:
    """One that all ranks have in common but for what they have measured. `profile`: without that."""
    costs = slowest_costs([costs for costs, _ in of_all])
    machine = slowest_machine([machine for _, machine in of_all])
    return replace(own, profile=with_peaks(profile, costs), costs=costs, machine=machine)


def slowest_costs(found: Sequence[Costs]) -> Costs:
    """Of one model. Where one of them was estimated, all are."""
    numbers = {len(costs.calls) for costs in found}
    if len(numbers) > 1:
        raise ValueError(f"ranks have costs of {sorted(numbers)} kinds of calls; give all of them the same model")
    first = next((costs for costs in found if not costs.is_measured), found[0])
    return replace(
        first,
        calls=tuple(map(_call, zip(*(costs.calls for costs in found), strict=True))),
        loss=_unless_missing(_loss, [costs.loss for costs in found]),
        memory_bytes_per_s=min(costs.memory_bytes_per_s for costs in found),
        update_bytes_per_s=min(costs.update_bytes_per_s for costs in found),
        glue_s=max(costs.glue_s for costs in found),
        peaks=_peaks(found),
        load_factor=max(costs.load_factor for costs in found),
    )


def slowest_machine(found: Sequence[Machine]) -> Machine:
    """What one of them does not say, nobody knows."""
    first = found[0]
    known = [{frozenset(row.busy): row for row in machine.speeds} for machine in found]
    busy = [row.busy for row in first.speeds if all(frozenset(row.busy) in rows for rows in known)]
    estimates = {estimate.of: estimate for machine in found for estimate in machine.estimates}
    return replace(
        first,
        speeds=tuple(_speeds(lanes, [rows[frozenset(lanes)] for rows in known]) for lanes in busy),
        latency_s=max(machine.latency_s for machine in found),
        gpu=_unless_missing(_gpu, [machine.gpu for machine in found]),
        unpinned=_unless_missing(_least, [machine.unpinned for machine in found]),
        host=_unless_missing(_least, [machine.host for machine in found]),
        disk=_unless_missing(_disk, [machine.disk for machine in found]),
        links=_unless_missing(_links, [machine.links for machine in found]),
        estimates=tuple(estimates.values()),
    )


def _unless_missing(join: Callable[[Sequence[T]], T], found: Sequence[T | None]) -> T | None:
    there = [one for one in found if one is not None]
    return join(there) if len(there) == len(found) else None


# -- costs ---------------------------------------------------------------------------------------------------------


def _highest(curves: Iterable[Curve]) -> Curve:
    """At every size that one of them has."""
    found = list(curves)
    sizes = sorted({point.num_samples for curve in found for point in curve.points})
    return Curve(tuple(Point(size, max(curve.at(size) for curve in found)) for size in sizes))


def _call(found: Sequence[CallCost]) -> CallCost:
    names = ("forward_s", "forward_kept_s", "recompute_s", "backward_s")
    curves: dict[str, Any] = {name: _highest(getattr(cost, name) for cost in found) for name in names}
    selective = _unless_missing(_selective, [cost.selective for cost in found])
    return CallCost(**curves, issue_s=max(cost.issue_s for cost in found), selective=selective)


def _selective(found: Sequence[SelectiveCost]) -> SelectiveCost:
    return SelectiveCost(
        _highest(cost.forward_s for cost in found),
        _highest(cost.recompute_s for cost in found),
        is_measured=all(cost.is_measured for cost in found),
    )


def _loss(found: Sequence[LossCost]) -> LossCost:
    """Per token: ranks may have measured tiles of different sizes."""
    tokens = found[0].tile_tokens
    names = ("forward_s", "backward_s", "project_s")
    return LossCost(tokens, *(max(getattr(one, name) * tokens / one.tile_tokens for one in found) for name in names))


def _peaks(found: Sequence[Costs]) -> tuple[CallPeaks, ...]:
    if not all(costs.peaks for costs in found):
        return ()
    names = ("forward_bytes", "kept_bytes", "backward_bytes", "selective_bytes")
    return tuple(
        CallPeaks(*(_highest(getattr(one, name) for one in peaks) for name in names))
        for peaks in zip(*(costs.peaks for costs in found), strict=True)
    )


# -- machines ------------------------------------------------------------------------------------------------------


def _speeds(busy: tuple[Any, ...], rows: Sequence[Speeds]) -> Speeds:
    tables = [dict(zip(row.busy, row.bytes_per_s, strict=True)) for row in rows]
    return Speeds(busy, tuple(min(table[lane] for table in tables) for lane in busy))


def _least(found: Sequence[Any]) -> Any:
    """Of records of rates, sizes and names: the least of each number."""
    first = found[0]
    numbers = [name for name in vars(first) if all(isinstance(getattr(one, name), int | float) for one in found)]
    return replace(first, **{name: min(getattr(one, name) for one in found) for name in numbers})


def _gpu(found: Sequence[Gpu]) -> Gpu:
    rates: MatmulRates = _least([gpu.matmul_flop_per_s for gpu in found])
    least: Gpu = _least(found)
    return replace(least, matmul_flop_per_s=rates)


def _disk(found: Sequence[Disk]) -> Disk:
    """How it is asked is the first one's way."""
    least: Disk = _least(found)
    first = found[0]
    small = [one for one in first.small if all(len(disk.small) == len(first.small) for disk in found)]
    rows: tuple[SmallRequests, ...] = tuple(_least([disk.small[at] for disk in found]) for at in range(len(small)))
    return replace(least, small=rows, request_bytes=first.request_bytes, depth=first.depth)


def _links(found: Sequence[Links]) -> Links:
    least: Links = _least(found)
    inside: CollectiveRates = _least([links.inside for links in found])
    return replace(
        least,
        inside=inside,
        across=_unless_missing(_least, [links.across for links in found]),
        latency_s=max(links.latency_s for links in found),
        across_latency_s=max(links.across_latency_s for links in found),
    )
