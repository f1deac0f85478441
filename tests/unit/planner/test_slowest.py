"""What several ranks have measured, as one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hightide.doctor.known import load_machine
from hightide.ir.costs import Curve, Point
from hightide.ir.machine import Estimate, Speeds
from hightide.planner.predict.estimate import estimate
from hightide.planner.slowest import slowest_costs, slowest_machine
from unit.planner.profiles import stack

MACHINE = load_machine("4x-rtx-4090")
COSTS = estimate(stack(), MACHINE)


def test_of_one_rank_nothing_changes() -> None:
    assert slowest_costs([COSTS]) == COSTS
    assert slowest_machine([MACHINE, MACHINE]) == MACHINE


def test_the_slowest_of_each_part_counts() -> None:
    first = COSTS.calls[0]
    curve = Curve(tuple(Point(point.num_samples, 2 * point.value) for point in first.forward_s.points))
    slower = replace(COSTS, calls=(replace(first, forward_s=curve), *COSTS.calls[1:]), glue_s=1.0)
    faster = replace(COSTS, memory_bytes_per_s=COSTS.memory_bytes_per_s / 3)
    found = slowest_costs([faster, slower])
    assert found.calls == slower.calls and found.glue_s == 1.0
    assert found.memory_bytes_per_s == faster.memory_bytes_per_s


def test_sizes_that_only_one_rank_has_measured_are_compared_in_between() -> None:
    def with_points(*points: tuple[int, float]) -> Curve:
        return Curve(tuple(Point(*point) for point in points))

    call = COSTS.calls[0]
    few = replace(COSTS, calls=(replace(call, backward_s=with_points((1, 1.0), (4, 4.0))), *COSTS.calls[1:]))
    many = replace(COSTS, calls=(replace(call, backward_s=with_points((1, 0.5), (2, 3.0), (4, 3.5))), *COSTS.calls[1:]))
    assert slowest_costs([few, many]).calls[0].backward_s == with_points((1, 1.0), (2, 3.0), (4, 4.0))


def test_costs_of_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="kinds of calls"):
        slowest_costs([COSTS, replace(COSTS, calls=COSTS.calls[:-1])])


def test_where_one_rank_has_estimates_all_have() -> None:
    measured = replace(COSTS, source="measured on this")
    assert slowest_costs([measured, measured]).is_measured and not slowest_costs([measured, COSTS]).is_measured
    told = Estimate("links", "taken for others")
    plain = replace(MACHINE, estimates=())
    assert slowest_machine([plain, plain]).is_measured
    assert slowest_machine([plain, replace(plain, estimates=(told,))]).estimates == (told,)


def test_machines_are_as_slow_as_the_slowest_in_each_way() -> None:
    assert MACHINE.links is not None and MACHINE.host is not None
    busy = MACHINE.speeds[0].busy
    halved = Speeds(busy, tuple(speed / 2 for speed in MACHINE.speeds[0].bytes_per_s))
    slow_copies = replace(MACHINE, speeds=(halved, *MACHINE.speeds[1:]), latency_s=1.0)
    inside = replace(MACHINE.links.inside, gather_bytes_per_s=7.0)
    slow_links = replace(MACHINE, links=replace(MACHINE.links, inside=inside, latency_s=2.0), disk=None)
    found = slowest_machine([slow_copies, slow_links])
    assert found.speeds == slow_copies.speeds and found.latency_s == 1.0
    assert found.links == slow_links.links and found.disk is None


def test_the_first_part_of_an_update_is_that_of_the_slowest_and_unknown_rates_stay_unknown() -> None:
    assert MACHINE.gpu is not None
    slow, fast, old = (replace(MACHINE, first_part=part) for part in (1.4, 1.1, None))
    assert slowest_machine([fast, slow]).first_part == slowest_machine([old, slow]).first_part == 1.4
    assert slowest_machine([old, old]).first_part is None
    assert MACHINE.gpu.matmul_flop_per_s.tf32 is not None
    rates = replace(MACHINE.gpu.matmul_flop_per_s, tf32=None)
    unknown = replace(MACHINE, gpu=replace(MACHINE.gpu, matmul_flop_per_s=rates))
    for found in (slowest_machine([MACHINE, unknown]), slowest_machine([unknown, MACHINE])):
        assert found.gpu is not None and found.gpu.matmul_flop_per_s == rates
