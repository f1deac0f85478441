"""What is told for workloads that LLMQ has published throughput of, beside its numbers. Needs no GPU.

    python bench/published.py                     # Qwen2.5 3B, 7B and 14B on the presets rtx-4090 and h100
    python bench/published.py --machine rtx-4090 --model qwen2.5-7b

A step has 524,288 tokens in sequences of 1024, in as many calls as the planner finds fastest (deferred: clipping stays
exact). Two rows for each: gradients and moments in fp32, which is what hightide does; and
both in bf16, as LLMQ has them, which shows what that is worth here. Told are simulations from estimated costs.

Where the host of a preset is too small, it is given `--more-host`, and the row says so.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace

from hightide.cli.workload import load_workload
from hightide.doctor.known import load_machine
from hightide.ir.machine import Machine
from hightide.ir.plan import GradientDtype
from hightide.ir.state_spec import ADAM_STATES
from hightide.ir.units import format_bytes, parse_bytes
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.light import light_s
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.calls import search_calls
from hightide.planner.solution import Searched

TOKENS, LENGTH = 524_288, 1024
HEADROOM = 0.95  # of GPU and host, as `hightide plan` leaves it
# Tokens per second on one GPU in bf16.
PUBLISHED = {
    "rtx-4090": {"qwen2.5-3b": 7_000, "qwen2.5-7b": 2_800, "qwen2.5-14b": 1_300},
    "h100": {"qwen2.5-3b": 30_900, "qwen2.5-7b": 13_900, "qwen2.5-14b": 6_300},
}
NARROW = tuple(replace(state, dtype="bfloat16") for state in ADAM_STATES)


@dataclass(frozen=True)
class Precision:
    name: str
    terms: dict[str, object]


PRECISIONS = (
    Precision("fp32", {}),
    Precision("bf16", {"gradients": GradientDtype.PARAM, "states": NARROW}),
)


def problem_of(model: str, machine: Machine, host_bytes: int | None = None) -> Problem:
    assert machine.gpu is not None and machine.host is not None
    profile = load_workload(model, TOKENS // LENGTH, LENGTH, None, None).profile()
    limits = int(HEADROOM * machine.gpu.memory_bytes), host_bytes or int(HEADROOM * machine.host.memory_bytes)
    return Problem(profile, estimate(profile, machine), machine, Terms(*limits, in_parts=True))


def best(problem: Problem) -> Searched | None:
    """In as many calls as are fastest. None: nothing fits."""
    try:
        return search_calls(problem)
    except InfeasiblePlan:
        return None


def show(machine: Machine, model: str, more_host_bytes: int) -> None:
    problem = problem_of(model, machine)
    fastest_s = light_s(problem.profile, problem.profile.num_samples, machine)
    assert fastest_s is not None
    for precision in PRECISIONS:
        asked, note = problem.with_terms(**precision.terms), ""
        found = best(asked)
        if found is None:
            asked, note = asked.with_terms(host_bytes=more_host_bytes), f", host {format_bytes(more_host_bytes)}"
            found = best(asked)
        published = PUBLISHED[machine.name][model]
        head = f"{machine.name:9} {model:12} {precision.name:5} {published:9,}"
        if found is None:
            print(f"{head}  nothing fits{note}", flush=True)
            continue
        told, plan = TOKENS / found.step.step_s, found.plan
        size = f"{plan.accumulate} x {plan.num_samples} sequences in micro-batches of {plan.micro_batch}{note}"
        print(f"{head} {told:9,.0f} {told / published:6.2f} {fastest_s / found.step.step_s:6.0%}  {size}", flush=True)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=PUBLISHED)
    parser.add_argument("--model", choices=PUBLISHED["h100"])
    parser.add_argument("--more-host", default="512GiB")
    options = parser.parse_args(argv)
    print(f"{'machine':9} {'model':12} {'sums':5} {'published':>9} {'told':>9} {'ratio':>6} {'light':>6}  one step")
    for machine in [options.machine] if options.machine else PUBLISHED:
        for model in [options.model] if options.model else PUBLISHED[machine]:
            show(load_machine(machine), model, parse_bytes(options.more_host, "--more-host"))


if __name__ == "__main__":
    main(sys.argv[1:])
