"""Measurements of several ranks, as one: a step of all of them is as slow as the slowest of each part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any

from hightide.ir.block import ModelProfile
from hightide.ir.costs import Costs, Curve, LossCost, Point
from hightide.ir.machine import Disk, Machine, Speeds
from hightide.ir.records import joined, unruled
from hightide.planner.predict.step_seconds import with_peaks
from hightide.planner.problem import Problem

# Of numbers, by how their names end.
RATES = ("_per_s", "bfloat16", "float16", "float32", "tf32")
SIZES = ("_bytes", "num_cores", "gpus_per_node", "num_nodes")
SHARES = ("beside_copies", "copies_beside", "together")


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
    return joined(found, _slowest, source=first.source)


def slowest_machine(found: Sequence[Machine]) -> Machine:
    """What one of them does not say, nobody knows."""
    first = found[0]
    known = [{frozenset(row.busy): row for row in machine.speeds} for machine in found]
    busy = [row.busy for row in first.speeds if all(frozenset(row.busy) in rows for rows in known)]
    estimates = {estimate.of: estimate for machine in found for estimate in machine.estimates}
    return joined(
        found,
        _slowest,
        speeds=tuple(_speeds(lanes, [rows[frozenset(lanes)] for rows in known]) for lanes in busy),
        fingerprint=first.fingerprint,
        estimates=tuple(estimates.values()),
        first_part=max((one.first_part for one in found if one.first_part is not None), default=None),
    )


def _slowest(name: str, values: Sequence[Any]) -> Any:
    """Of one field of several records. What is no number is the first one's."""
    first = values[0]
    if None in values:
        return None
    if isinstance(first, str):
        return first
    if isinstance(first, tuple):
        return _each(values)
    if isinstance(first, Curve):
        return _highest(values)
    if isinstance(first, LossCost):
        return _loss(values)
    if isinstance(first, Disk):  # how it is asked is the first one's way
        return joined(values, _slowest, request_bytes=first.request_bytes, depth=first.depth)
    if is_dataclass(first):
        return joined(values, _slowest)
    if name.endswith((*RATES, *SIZES, *SHARES)) or isinstance(first, bool):
        return min(values)
    if name.endswith(("_s", "load_factor")):
        return max(values)
    raise unruled(name, first)


def _each(rows: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Of records in rows, unless one has others than the rest."""
    if any(len(row) != len(rows[0]) for row in rows):
        return ()
    return tuple(joined(records, _slowest) for records in zip(*rows, strict=True))


def _highest(curves: Sequence[Curve]) -> Curve:
    """At every size that one of them has."""
    sizes = sorted({point.num_samples for curve in curves for point in curve.points})
    return Curve(tuple(Point(size, max(curve.at(size) for curve in curves)) for size in sizes))


def _loss(found: Sequence[LossCost]) -> LossCost:
    """Per token: ranks may have measured tiles of different sizes."""
    tokens = found[0].tile_tokens
    names = ("forward_s", "backward_s", "project_s")
    return LossCost(tokens, *(max(getattr(one, name) * tokens / one.tile_tokens for one in found) for name in names))


def _speeds(busy: tuple[Any, ...], rows: Sequence[Speeds]) -> Speeds:
    tables = [dict(zip(row.busy, row.bytes_per_s, strict=True)) for row in rows]
    return Speeds(busy, tuple(min(table[lane] for table in tables) for lane in busy))
