"""What a refusal says of the moment at which most is needed."""

from __future__ import annotations

import pytest

from hightide.doctor.known import load_machine
from hightide.ir.action import ActionKey, Op
from hightide.ir.tier import ChunkKind, Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.predict.estimate import estimate
from hightide.planner.problem import Problem, Terms
from hightide.report.outlook import refusal
from unit.planner.profiles import stack

PROFILE = stack(4)
LAST = len(PROFILE.calls) - 1
IN_BACKWARD, UPDATED = ActionKey(Op.BACKWARD, LAST), "when parameters are updated"


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        ("", "all the time"),
        (ActionKey(Op.FORWARD, 0), f"in forward of {PROFILE.blocks[0].name}"),
        (IN_BACKWARD, f"in backward of {PROFILE.blocks[PROFILE.calls[LAST].block].name}"),
        (
            ActionKey(Op.WRITE_BACK, 0, at=IN_BACKWARD),  # a gradient comes to the host
            f"in backward of {PROFILE.blocks[PROFILE.calls[LAST].block].name}",
        ),
        (ActionKey(Op.FETCH, 0, ChunkKind.PARAM, at=ActionKey(Op.STEP)), UPDATED),
        (ActionKey(Op.UPDATE, 0), UPDATED),
    ],
)
def test_when_most_is_needed_is_told_with_the_block(moment: str, words: str) -> None:
    machine = load_machine("rtx-3090")
    problem = Problem(PROFILE, estimate(PROFILE, machine), machine, Terms(gpu_bytes=10, host_bytes=20))
    error = InfeasiblePlan("no plan fits", moment, Tier.GPU, 15, ({Tier.GPU: 15},))
    told = refusal(error, problem)
    assert (told.when, told.moment) == (words, moment)
    assert [short.missing_bytes for short in told.shortages] == [5]
