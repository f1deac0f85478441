"""What a chosen α would gain: the share of blocks whose updates in backward are held back until the next forward.

    python bench/alpha.py

Simulates the searched plan of a few problems on the preset h200, as it is (an update begins when its gradient is at
home; what is due first goes first) and with the updates of a share of the streamed blocks held back to the end of the
step: of the first blocks, of the last, and of every so-manyth. Needs no GPU."""

from __future__ import annotations

import argparse
from dataclasses import replace

from hightide.cli.workload import load_workload
from hightide.doctor.known import load_machine
from hightide.ir.action import Action, Op, Schedule
from hightide.ir.plan import GradientDtype, Update
from hightide.ir.tier import Lane
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.simulator import NUM_PASSES, simulated_step_s
from hightide.planner.predict.step_seconds import seconds_of
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.search import search

GIB = 2**30
PROBLEMS = (("llama-3.2-3b", 16, 24), ("llama-3.2-3b", 16, 8), ("llama-3.2-3b", 4, 24), ("llama-3.1-8b", 4, 24))
ALPHAS = (0.1, 0.25, 0.5, 0.75, 1.0)


def held_back(schedule: Schedule, chunks: set[int]) -> Schedule:
    """The updates of these begin when the step ends."""
    step = next(action.id for action in schedule.actions if action.op is Op.STEP)

    def later(action: Action) -> Action:
        is_one = action.op is Op.UPDATE and action.lane is Lane.CPU and action.chunk in chunks
        return replace(action, after=(*action.after, step)) if is_one else action

    return replace(schedule, actions=tuple(map(later, schedule.actions)))


def subsets(chunks: list[int], alpha: float) -> list[set[int]]:
    count = max(1, round(alpha * len(chunks)))
    spread = [chunks[at * len(chunks) // count] for at in range(count)]
    return [set(chunks[:count]), set(chunks[-count:]), set(spread)]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    machine = load_machine("h200")
    print(f"{'':32}  no α   " + "  ".join(f"{alpha:7}" for alpha in ALPHAS))
    for model, num_samples, gpu in PROBLEMS:
        profile = load_workload(model, num_samples, 2048, None, None).profile()
        costs = estimate(profile, machine)
        limits = gpu * GIB, 118 * GIB
        terms = Terms(*limits, Update.IN_BACKWARD, gradients=GradientDtype.PARAM)
        found = search(Problem(profile, costs, machine, terms))
        schedule, seconds = found.passes.last, seconds_of(profile, found.plan, costs)
        chunks = [action.chunk for action in schedule.actions if action.op is Op.UPDATE and action.lane is Lane.CPU]
        ordered = sorted(chunk for chunk in chunks if chunk is not None)
        before_s = simulated_step_s(schedule, seconds, machine, NUM_PASSES)
        cells = []
        for alpha in ALPHAS:
            steps = [
                simulated_step_s(held_back(schedule, chosen), seconds, machine, NUM_PASSES)
                for chosen in subsets(ordered, alpha)
            ]
            cells.append(f"{min(steps) / before_s - 1:+7.1%}")
        print(f"{f'{model}, {num_samples} x 2048, {gpu} GiB':32}  {before_s:.3f}  " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
