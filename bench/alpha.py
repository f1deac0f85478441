"""What a chosen α would gain: the share of blocks whose updates in backward are held back until the next forward.

    python bench/alpha.py

Simulates the searched plan of a few problems on the preset h200, as it is (an update begins when its gradient is at
home; what is due first goes first) and with the updates of a share of the streamed blocks held back to the end of the
step: of the first blocks, of the last, and of every so-manyth. Then, for steps that are limited by a disk, what parked
gradients and late updates are worth: the searched plan, the same with other shares of late updates, and with gradients
in a ring of buffers instead, each beside the least that the disk or compute needs alone, and the least with the turn
of the step (planner/predict/bounds.py). Needs no GPU."""

from __future__ import annotations

import argparse
from dataclasses import replace

from hightide.cli.workload import load_workload
from hightide.doctor.known import load_machine
from hightide.ir.action import Action, Op, Schedule
from hightide.ir.plan import GradientDtype, Update
from hightide.ir.tier import Lane, Tier
from hightide.planner.predict.bounds import disk_s, least_step_s
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.simulator import NUM_STEPS, simulated_step_s
from hightide.planner.predict.step_seconds import seconds_of
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.search import search
from hightide.planner.search.trials import Trials

GIB = 2**30
PROBLEMS = (("llama-3.2-3b", 16, 24), ("llama-3.2-3b", 16, 8), ("llama-3.2-3b", 4, 24), ("llama-3.1-8b", 4, 24))
ALPHAS = (0.1, 0.25, 0.5, 0.75, 1.0)
ON_DISK = ((32, 30), (64, 30), (96, 30), (32, 40), (64, 40), (96, 40))  # sequences of llama-3.2-3b in 24 GiB, host GiB
TWELFTHS = (0, 2, 3, 4, 6, 8, 12)


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


def problem_of(model: str, num_samples: int, gpu: int, host: int, disk: int = 0) -> Problem:
    machine = load_machine("h200")
    profile = load_workload(model, num_samples, 2048, None, None).profile()
    limits = gpu * GIB, host * GIB
    terms = Terms(*limits, Update.IN_BACKWARD, gradients=GradientDtype.PARAM, disk_bytes=disk * GIB)
    return Problem(profile, estimate(profile, machine), machine, terms)


def print_chosen() -> None:
    print(f"{'':32}  no α   " + "  ".join(f"{alpha:7}" for alpha in ALPHAS))
    for model, num_samples, gpu in PROBLEMS:
        problem = problem_of(model, num_samples, gpu, 118)
        found = search(problem)
        schedule, seconds = found.passes.last, seconds_of(problem.profile, found.plan, problem.costs)
        chunks = [action.chunk for action in schedule.actions if action.op is Op.UPDATE and action.lane is Lane.CPU]
        ordered = sorted(chunk for chunk in chunks if chunk is not None)
        before_s = simulated_step_s(schedule, seconds, problem.machine, NUM_STEPS)
        cells = []
        for alpha in ALPHAS:
            steps = [
                simulated_step_s(held_back(schedule, chosen), seconds, problem.machine, NUM_STEPS)
                for chosen in subsets(ordered, alpha)
            ]
            cells.append(f"{min(steps) / before_s - 1:+7.1%}")
        print(f"{f'{model}, {num_samples} x 2048, {gpu} GiB':32}  {before_s:.3f}  " + "  ".join(cells), flush=True)


def print_on_disk() -> None:
    heads = "  ".join(f"{f'{late}/12':>6}" for late in TWELFTHS)
    first = f"{'step':>7}  {'alone':>7}  {'above':>6}  {'bound':>7}  {'above':>6}  {'blocks':>6}  {'late':>5}"
    print(f"{'':22}  {first}  {heads}  {'ring':>6}")
    for num_samples, host in ON_DISK:
        problem = problem_of("llama-3.2-3b", num_samples, 24, host, 200)
        found = search(problem)
        bound_s, step_s = least_step_s(problem, found.placement), found.step.step_s
        moved = [found.passes.moved_bytes(lane) for lane in (Lane.DISK_READ, Lane.DISK_WRITE)]
        alone_s = max(disk_s(problem.machine, *moved), found.step.simulated.action_s[Lane.COMPUTE])
        trials, plan = Trials(problem), found.plan
        on_disk, late = (sum(map(test, plan.blocks)) for test in (lambda b: b.states is Tier.DISK, lambda b: b.late))
        others = [replace(found.candidate, late=late) for late in TWELFTHS]
        others.append(replace(found.candidate, late=0, grad_buffers=max(1, plan.num_state_buffers)))
        cells = "  ".join(f"{trials.step_s(one) / step_s - 1:+6.1%}" for one in others)
        row = "  ".join(f"{least_s:7.3f}  {step_s / least_s - 1:6.1%}" for least_s in (alone_s, bound_s))
        row = f"{step_s:7.3f}  {row}  {on_disk:6}  {late:5}"
        print(f"{f'{num_samples} x 2048, host {host} GiB':22}  {row}  {cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk-only", action="store_true", help="only the steps from a disk")
    if not parser.parse_args().disk_only:
        print_chosen()
    print_on_disk()


if __name__ == "__main__":
    main()
