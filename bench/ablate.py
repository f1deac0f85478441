"""What each mechanism is worth: the plan searched anew without it, against the plan with all of them.

    python bench/ablate.py --machine h200                    # told: simulated, no GPU needed
    python bench/ablate.py                                   # on a GPU: told by what was rehearsed there, and found
    python bench/ablate.py --model llama-3.2-1b --sequences 16 --update deferred  # for loops that clip

Without `--model`, W1 (llama-3.2-3b, 16 x 2048 tokens) and llama-3.2-1b with 4, 16 and 64 sequences, in 24 GiB. The
search is told what it must do without (`Terms.without`), or given other terms: updates that begin at `step()`,
micro-batches that are passes of their own. These add their gradients up over several backwards, so their updates are
deferred; of all sizes the one that is told to be fastest counts.

Found are medians of steps, as bench/varied.py takes them: one process per model, which is wrapped for each timing of
updates and moved from plan to plan. `--json` prints the rows and nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from plans import HOST
from shapes import batches, build
from throughput import LR
from torch import Tensor, nn
from varied import measure

import hightide
from hightide.cli.workload import load_workload
from hightide.doctor.known import load_machine
from hightide.integrations.shapes import SHAPES
from hightide.ir.plan import GradientDtype, Update
from hightide.ir.units import parse_bytes
from hightide.observe.watch import Watch
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.mechanism import NONE, Mechanism, Mechanisms
from hightide.planner.predict.estimate import estimate
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.calls import in_calls
from hightide.planner.search.search import search
from hightide.planner.solution import Searched
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of

WORKLOADS = (("llama-3.2-3b", 16), ("llama-3.2-1b", 4), ("llama-3.2-1b", 16), ("llama-3.2-1b", 64))
LENGTH = 2048


@dataclass(frozen=True)
class Ablation:
    name: str
    without: Mechanisms = NONE
    update: Update | None = None  # None: that of the plan with everything
    in_passes: bool = False  # micro-batches are calls of their own


def _without(*mechanisms: Mechanism, **options: Any) -> Ablation:
    names = [str(mechanism) for mechanism in mechanisms]
    return Ablation(f"no {' and no '.join(names)}", frozenset(mechanisms), **options)


FULL = Ablation("everything")
ABLATIONS = (
    FULL,
    _without(Mechanism.PERSISTENT),
    _without(Mechanism.SPARE_SLOTS),
    _without(Mechanism.SLOT_REUSE),
    _without(Mechanism.LEVELS),
    _without(Mechanism.SWAP),
    _without(Mechanism.LOSS_IN_FORWARD),
    _without(Mechanism.LOOKUP),
    _without(Mechanism.STATES_LATER),
    Ablation("updates begin at step()", update=Update.DEFERRED),
    _without(Mechanism.UPDATE_OVERLAP, update=Update.DEFERRED),
    Ablation("micro-batches as passes", update=Update.DEFERRED, in_passes=True),
)


def ablations(base: Update) -> list[Ablation]:
    """Those that are another question where the plan with everything has this timing."""
    return [one for one in ABLATIONS if one is FULL or one.without or one.in_passes or one.update is not base]


@dataclass(frozen=True)
class Row:
    model: str
    sequences: int
    name: str
    told_s: float | None  # None: nothing fits
    found_s: float | None  # None: not run
    num_calls: int
    micro_batch: int

    def loss(self, full: Row, which: str) -> float | None:
        mine, theirs = getattr(self, which), getattr(full, which)
        return None if mine is None or theirs is None else mine / theirs - 1


# -- told -------------------------------------------------------------------------------------------------------------


def told(problem: Problem, ablation: Ablation) -> Searched | None:
    """None: nothing fits without it."""
    problem = problem.with_terms(without=ablation.without, update=ablation.update or problem.terms.update)
    plans = in_passes(problem) if ablation.in_passes else filter(None, [searched(problem)])
    return min(plans, key=lambda one: one.step.step_s, default=None)


def in_passes(problem: Problem) -> Iterator[Searched]:
    """Every number of equal calls of which each is one micro-batch."""
    num_samples = problem.profile.num_samples
    for count in (count for count in range(1, num_samples + 1) if num_samples % count == 0):
        found = searched(in_calls(problem, count).with_terms(micro_batch=num_samples // count))
        if found is not None:
            yield found


def searched(problem: Problem) -> Searched | None:
    try:
        solution = search(problem)
        solution.verify()
    except InfeasiblePlan:
        return None
    return solution


def posed(options: argparse.Namespace, model: str, sequences: int) -> Problem:
    machine = load_machine(options.machine)
    profile = load_workload(model, sequences, options.length, None, None).profile()
    return Problem(profile, estimate(profile, machine), machine, _terms(options))


def _terms(options: argparse.Namespace) -> Terms:
    limits = parse_bytes(options.gpu, "--gpu"), parse_bytes(options.host, "--host")
    return Terms(*limits, Update(options.update), gradients=GradientDtype.PARAM, in_parts=True)


def simulated_rows(options: argparse.Namespace, model: str, sequences: int) -> Iterator[Row]:
    problem = posed(options, model, sequences)
    for ablation in ablations(problem.terms.update):
        yield _row(model, sequences, ablation, told(problem, ablation), None)


def _row(model: str, sequences: int, ablation: Ablation, plan: Searched | None, found_s: float | None) -> Row:
    if plan is None:
        return Row(model, sequences, ablation.name, None, None, 0, 0)
    chosen = plan.plan
    return Row(model, sequences, ablation.name, plan.step.step_s, found_s, chosen.accumulate, chosen.micro_batch)


# -- found ------------------------------------------------------------------------------------------------------------


def measured_rows(options: argparse.Namespace, model: str, sequences: int) -> Iterator[Row]:
    """One after the other in this process."""
    if options.device == "cuda":
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        share = parse_bytes(options.gpu, "--gpu") / total_bytes
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    module = build(model, options.length)
    base = Update(options.update)
    for update in dict.fromkeys((base, Update.DEFERRED)):
        trained = Trained(options, module, sequences, update)
        timed = [one for one in ablations(base) if (one.update or base) is update]
        for ablation in (one for one in timed if not one.in_passes):
            plan = told(trained.problem, ablation)
            yield _row(model, sequences, ablation, plan, None if plan is None else trained.found_s(plan, ablation))
        plans = [(ablation, told(trained.problem, ablation)) for ablation in timed if ablation.in_passes]
        trained.close()
        for ablation, plan in plans:
            found_s = None
            if plan is not None:
                apart = Trained(options, module, plan.plan.num_samples, update, plan.plan.accumulate)
                found_s = apart.found_s(plan, ablation)
                apart.close()
            yield _row(model, sequences, ablation, plan, found_s)


class Trained:
    """A wrapped model, with the problem that its plan was searched for."""

    def __init__(
        self, options: argparse.Namespace, module: nn.Module, sequences: int, update: Update, accumulate: int = 1
    ) -> None:
        self._steps = options.steps
        optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
        self._tokens = batches(module, sequences, options.length, count=1)[0]
        limits = hightide.Limits(gpu=options.gpu, host=options.host)
        self._model, self._optimizer = hightide.wrap(
            module,
            optimizer,
            {"input_ids": self._tokens, "labels": self._tokens},
            limits=limits,
            update=str(update),
            gradients="param",
            compile=options.device == "cuda",
            device=options.device,
            accumulate=accumulate,
        )
        run = run_of(self._model)
        assert run is not None and isinstance(run.observer, Watch)
        self.problem, run.observer = run.observer.problem, None  # here no other plan may take its place
        self._run: Run = run

    def found_s(self, plan: Searched, ablation: Ablation) -> float:
        waits = Mechanism.UPDATE_OVERLAP in ablation.without

        def step() -> Tensor:
            for _ in range(plan.plan.accumulate):
                loss = self._model(input_ids=self._tokens, labels=self._tokens).loss
                (loss / plan.plan.accumulate).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            if waits:
                self._run.executor.wait_for_updates()
            return loss.detach()

        self._run.move_to(plan)
        return measure(self._run, step, self._steps)

    def close(self) -> None:
        hightide.unwrap(self._model)


# -- the command ------------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--machine", help="a preset or a machine file: nothing is run, times are simulated from estimated costs")
    add("--model", choices=SHAPES, help="one model instead of W1 and llama-3.2-1b")
    add("--sequences", type=int, default=16, help="of --model, per step")
    add("--length", type=int, default=LENGTH, help="tokens per sequence")
    add("--gpu", default="24GiB")
    add("--host", default=HOST)
    add("--update", default="in_backward", choices=list(map(str, Update)), help="of the plan with everything")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu: the simulated accelerator")
    add("--steps", type=int, default=8)
    add("--json", action="store_true", help="one JSON object per row, and nothing else")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    if options.machine is None and options.device == "cpu" and options.model is None:
        print("there is no GPU here; name a machine, such as --machine h200, or a small --model", file=sys.stderr)
        return 2
    if options.model is not None:
        return show(options, options.model, options.sequences)
    if options.machine is not None:
        return max(show(options, *workload) for workload in WORKLOADS)
    return max(_apart(argv, *workload) for workload in WORKLOADS)


def _apart(argv: list[str], model: str, sequences: int) -> int:
    command = [sys.executable, __file__, *argv, "--model", model, "--sequences", str(sequences)]
    return subprocess.run(command).returncode


def show(options: argparse.Namespace, model: str, sequences: int) -> int:
    if not options.json:
        print(f"\n{model}, {sequences} x {options.length} tokens, {options.gpu}")
        print(f"{'':32}  told s  found s    told   found  micro-batch", flush=True)
    rows = (simulated_rows if options.machine is not None else measured_rows)(options, model, sequences)
    full = None
    for row in rows:
        full = row if row.name == FULL.name else full
        assert full is not None, "the plan with everything comes first"
        print(json.dumps(asdict(row)) if options.json else _line(row, full), flush=True)
    return 0


def _line(row: Row, full: Row) -> str:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:+.1%}"

    if row.told_s is None:
        return f"{row.name:32}  nothing fits"
    size = f"{row.num_calls} calls of {row.micro_batch}" if row.num_calls > 1 else f"{row.micro_batch}"
    losses = [percent(row.loss(full, which)) for which in ("told_s", "found_s")]
    return f"{row.name:32}  {seconds(row.told_s):>6}  {seconds(row.found_s):>7}  {losses[0]:>6}  {losses[1]:>6}  {size}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
