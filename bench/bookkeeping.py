"""What the bookkeeping alone costs: Python time per block and step, without any computation, by number of blocks.

    python bench/bookkeeping.py [--json] [--blocks 8 16 32 64 128] [--passes 30]

A model of N trivial blocks is wrapped; then the executor is driven through whole passes (forward, backward, step) as
autograd would drive it, but no block computes and the update is an empty function. What is left: finding ticks, issuing
actions, lanes, slots, binding parameters and gradients, the ledger of gradients, copies of 1 KiB. Ends with status 1
if the cost per block grows with N.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

import hightide
from hightide.ir.action import Mode, Op
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.optim.optimizer import WrappedOptimizer
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of

WIDTH = 8
NUM_BLOCKS = (8, 16, 32, 64, 128)
NUM_PASSES = 30
BOUND = 1.5  # the cost per block may grow by this factor from BOUND_FROM to BOUND_TO blocks: noise, not growth
BOUND_FROM, BOUND_TO = 16, 128
PLACEMENTS = {"streamed": Tier.HOST, "resident": Tier.GPU}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Stack(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class NoArithmetic:
    """An update rule whose update costs nothing; all else is the real rule's."""

    def __init__(self, rule: Any) -> None:
        self._rule = rule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def update(self, *args: Any) -> None:
        pass


@dataclass(frozen=True)
class Row:
    placement: str
    num_blocks: int
    wrap_s: float  # probing, planning, lowering and verifying; once per run
    pass_us: float  # of one step: median of processor time over all threads, which other programs hardly disturb
    block_us: float  # of one step, per block
    wall_us: float  # of one step, per block, by the clock


def wrapped(num_blocks: int, tier: Tier) -> tuple[Run, WrappedOptimizer]:
    model, batch = Stack(num_blocks), torch.zeros(2, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    limits = hightide.Limits(gpu="64MiB", host="64MiB")
    made = hightide.plan(model, optimizer, batch, limits=limits, micro_batch=1)
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=_placed(made, tier))
    run = run_of(model)
    assert run is not None and isinstance(optimizer, WrappedOptimizer)
    optimizer._updates._rule = NoArithmetic(optimizer._rule)
    return run, optimizer


def _placed(plan: Plan, tier: Tier) -> Plan:
    """All blocks alike, so that the number of blocks is all that changes."""
    blocks = [
        replace(block, params=tier, states=tier, inputs=Tier.GPU, activation=Activation.RECOMPUTE)
        for block in plan.blocks
    ]
    num_slots = 4 if tier is Tier.HOST else 0
    return replace(plan, blocks=tuple(blocks), num_slots=num_slots, num_grad_slots=num_slots // 2)


def one_pass(run: Run, optimizer: WrappedOptimizer) -> None:
    """What a training step does around the computation."""
    calls = run.profile.calls
    run.begin_pass(Mode.TRAIN)
    for call in calls:
        with run.tick(Op.FORWARD, call.block):
            pass
    for index in reversed(range(len(calls))):
        with run.tick(Op.BACKWARD, calls[index].block, index, accumulate=True):
            for key in run.profile.blocks[calls[index].block].params:
                run.parameters[key].grad.zero_()  # counts as received: its version changes
    run.executor.finish_backward()
    optimizer.step()
    optimizer.zero_grad()
    run.executor.wait_for_updates()


def measure(placement: str, num_blocks: int, num_passes: int) -> Row:
    started_s = time.perf_counter()
    run, optimizer = wrapped(num_blocks, PLACEMENTS[placement])
    wrap_s = time.perf_counter() - started_s
    for _ in range(3):
        one_pass(run, optimizer)
    cpu_s, wall_s = [], []
    for _ in range(num_passes):
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        one_pass(run, optimizer)
        cpu_s.append(time.process_time() - started_cpu_s)
        wall_s.append(time.perf_counter() - started_s)
    assert run.executor.num_deviations == 0, "the passes left the plan: this would measure demand fetches"
    hightide.unwrap(run.model)
    pass_us = statistics.median(cpu_s) * 1e6
    return Row(
        placement, num_blocks, wrap_s, pass_us, pass_us / num_blocks, statistics.median(wall_s) * 1e6 / num_blocks
    )


def growth(rows: list[Row]) -> float:
    """The exponent of the cost of a pass over the number of blocks: 1 is linear. By least squares on logarithms."""
    x = torch.tensor([float(row.num_blocks) for row in rows]).log()
    y = torch.tensor([row.pass_us for row in rows]).log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def ratio(rows: list[Row], few: int, many: int) -> float:
    cost = {row.num_blocks: row.block_us for row in rows}
    return cost[many] / cost[few]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--blocks", type=int, nargs="+", default=list(NUM_BLOCKS))
    parser.add_argument("--passes", type=int, default=NUM_PASSES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {name: [measure(name, number, options.passes) for number in options.blocks] for name in PLACEMENTS}
    exponents = {name: growth(found) if len(found) > 1 else 1.0 for name, found in rows.items()}
    bounded = {BOUND_FROM, BOUND_TO} <= set(options.blocks)
    ratios = {name: ratio(found, BOUND_FROM, BOUND_TO) for name, found in rows.items()} if bounded else {}
    linear = all(value <= BOUND for value in ratios.values())
    if options.json:
        table = [asdict(row) for found in rows.values() for row in found]
        print(json.dumps({"rows": table, "exponents": exponents, "ratios": ratios, "linear": linear}, indent=1))
    else:
        _print(rows, exponents, ratios, linear)
    return 0 if linear else 1


def _print(rows: dict[str, list[Row]], exponents: dict[str, float], ratios: dict[str, float], linear: bool) -> None:
    for name, found in rows.items():
        print(f"{name}: blocks  us per block and step  by the clock  us per step  wrap s")
        for row in found:
            figures = f"{row.block_us:21.1f}  {row.wall_us:12.1f}  {row.pass_us:11.0f}  {row.wrap_s:6.2f}"
            print(f"{'':{len(name)}}  {row.num_blocks:6d}  {figures}")
        print(f"{'':{len(name)}}  a step costs blocks^{exponents[name]:.2f}")
        if name in ratios:
            print(f"{'':{len(name)}}  a block of {BOUND_TO} costs {ratios[name]:.2f} times one of {BOUND_FROM}")
    if ratios:
        print("linear" if linear else f"NOT linear: more than {BOUND:g} times")


if __name__ == "__main__":
    sys.exit(main())
