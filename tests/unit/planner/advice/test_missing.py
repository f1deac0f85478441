"""Limits that would be enough, in the words of whoever gives them."""

from __future__ import annotations

from hightide.ir.tier import Tier
from hightide.planner.advice.missing import of_node
from hightide.planner.infeasible import InfeasiblePlan


def test_limits_of_a_node_are_those_of_all_its_ranks() -> None:
    """A plan's limits of host memory and disk are one rank's share of those that the user gives."""
    enough = ({Tier.GPU: 30}, {Tier.HOST: 7}, {Tier.GPU: 20, Tier.DISK: 5})
    message = "no plan fits: 5 bytes are missing on the gpu; give it Limits(gpu=30), or Limits(host=7)"
    refused = InfeasiblePlan(message, "bwd.1", Tier.GPU, 30, enough)
    told = of_node(refused, 4)
    assert told.enough == ({Tier.GPU: 30}, {Tier.HOST: 28}, {Tier.GPU: 20, Tier.DISK: 20})
    assert str(told) == (
        "no plan fits: 5 bytes are missing on the gpu, each for one of the 4 ranks of a node; for all of them give it "
        "Limits(gpu=30), or Limits(host=28), or Limits(gpu=20, disk='FOLDER:20')"
    )
    assert (told.moment, told.tier, told.num_bytes) == ("bwd.1", Tier.GPU, 30)
    assert of_node(refused, 1) is refused
