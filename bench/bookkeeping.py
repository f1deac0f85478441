"""What the bookkeeping alone costs: Python time per block and step, without any computation, by number of blocks.

    python bench/bookkeeping.py [--json] [--blocks 8 16 32 64 128] [--passes 30] [--variants streamed resident]

A model of N trivial blocks is wrapped; then the executor is driven through whole passes (forward, backward, step) as
autograd would drive it, but no block computes and the update is an empty function. What is left: finding ticks, issuing
actions, lanes, slots, binding parameters and gradients, the ledger of gradients, copies of 1 KiB. Ends with status 1
if the cost per block grows with N.

Variants `trained-*` run the model itself, so that blocks as autograd functions are in it too: N tiny layers with the
nine tensors of a Llama's, and beside them the same in plain PyTorch, recomputed by torch's checkpoint where they are
recomputed. Nothing counts allocations meanwhile, as on a GPU. Processor time is told by thread: that of the loop, which
runs forward and backward (on a GPU it issues the work), and of all others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Layer(nn.Module):
    """As many tensors and products as in a layer of a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(7)
        )
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.before(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y), attn_mask=mask))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Stack(nn.Module):
    def __init__(self, num_blocks: int, block: type[nn.Module] = Block, recomputes: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


@dataclass(frozen=True)
class Variant:
    params: Tier
    block: type[nn.Module] = Block
    trains: bool = False  # blocks compute
    activation: Activation = Activation.RECOMPUTE
    inputs: Tier = Tier.GPU
    compiles: bool = False


VARIANTS = {
    "streamed": Variant(Tier.HOST),
    "resident": Variant(Tier.GPU),
    "streamed-nine": Variant(Tier.HOST, Layer),
    "resident-nine": Variant(Tier.GPU, Layer),
    "trained-streamed": Variant(Tier.HOST, Layer, trains=True),
    "trained-resident": Variant(Tier.GPU, Layer, trains=True),
    "trained-kept": Variant(Tier.HOST, Layer, trains=True, activation=Activation.KEEP),
    "trained-stashed": Variant(Tier.HOST, Layer, trains=True, inputs=Tier.HOST),
    "trained-compiled": Variant(Tier.HOST, Layer, trains=True, compiles=True),
}


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
    variant: str
    num_blocks: int
    wrap_s: float  # probing, planning, lowering and verifying; once per run
    pass_us: float  # of one step: median of processor time over all threads, which other programs hardly disturb
    block_us: float  # of one step, per block
    wall_us: float  # of one step, per block, by the clock
    loop_us: float = 0.0  # of one step, per block, of the thread that runs the loop
    plain_us: float = 0.0  # the same in plain PyTorch, of a variant that trains: it is a part of `loop_us`


def wrapped(num_blocks: int, variant: Variant) -> tuple[Run, WrappedOptimizer]:
    model, batch = Stack(num_blocks, variant.block), torch.randn(2, 4, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    limits = hightide.Limits(gpu="64MiB", host="64MiB")
    made = hightide.plan(model, optimizer, batch, limits=limits, micro_batch=2 if variant.trains else 1)
    model, optimizer = hightide.wrap(
        model, optimizer, batch, plan=_placed(made, variant), **({"compile": True} if variant.compiles else {})
    )
    run = run_of(model)
    assert run is not None and isinstance(optimizer, WrappedOptimizer)
    optimizer.updates._rule = NoArithmetic(optimizer.rule)
    if variant.trains:  # a dispatch mode would cost more than all else, and a GPU has none
        nothing: dict[str, Callable[..., Any]] = {"meter": lambda _: nullcontext(), "unmetered": nullcontext}
        vars(run.gpu).update(nothing, adopt=lambda *_: None)
    return run, optimizer


def _placed(plan: Plan, variant: Variant) -> Plan:
    """All blocks alike, so that the number of blocks is all that changes."""
    tier = variant.params
    blocks = [
        replace(block, params=tier, states=tier, inputs=variant.inputs, activation=variant.activation)
        for block in plan.blocks
    ]
    num_slots = 4 if tier is Tier.HOST else 0
    return replace(plan, blocks=tuple(blocks), num_slots=num_slots, num_grad_slots=num_slots // 2)


def one_pass(run: Run, optimizer: WrappedOptimizer) -> None:
    """What a training step does around the computation."""
    calls = run.profile.calls
    run.passes.begin(Mode.TRAIN)
    for call in calls:
        with run.passes.tick(Op.FORWARD, call.block):
            pass
    for index in reversed(range(len(calls))):
        with run.passes.tick(Op.BACKWARD, calls[index].block, index, accumulate=True):
            for key in run.profile.blocks[calls[index].block].params:
                run.parameters[key].grad.zero_()  # counts as received: its version changes
    run.executor.finish_backward()
    optimizer.step()
    optimizer.zero_grad()
    run.executor.wait_for_updates()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A training step."""
    model(torch.randn(2, 4, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def plain_us(variant: Variant, num_blocks: int, num_passes: int) -> float:
    """Of one step in plain PyTorch, but for the update."""
    model = Stack(num_blocks, variant.block, variant.activation is Activation.RECOMPUTE)
    if variant.compiles:
        for block in model.blocks:
            block.compile(dynamic=False)

    def one() -> None:
        model(torch.randn(2, 4, WIDTH)).sum().backward()
        model.zero_grad()

    return _timed(one, num_passes)[2] * 1e6


def _timed(one: Callable[[], None], num_passes: int) -> tuple[float, float, float]:
    """Medians, in seconds: by the clock, processor time of all threads, and of this one."""
    for _ in range(3):
        one()
    clocks = (time.perf_counter, time.process_time, time.thread_time)
    times = []
    for _ in range(num_passes):
        before = [clock() for clock in clocks]
        one()
        times.append([clock() - at for clock, at in zip(clocks, before, strict=True)])
    wall_s, cpu_s, loop_s = (statistics.median(column) for column in zip(*times, strict=True))
    return wall_s, cpu_s, loop_s


def measure(name: str, num_blocks: int, num_passes: int) -> Row:
    variant, started_s = VARIANTS[name], time.perf_counter()
    run, optimizer = wrapped(num_blocks, variant)
    wrap_s = time.perf_counter() - started_s
    one = (lambda: trained(run.model, optimizer)) if variant.trains else (lambda: one_pass(run, optimizer))
    wall_s, cpu_s, loop_s = _timed(one, num_passes)
    assert run.executor.num_deviations == 0, "the passes left the plan: this would measure demand fetches"
    hightide.unwrap(run.model)
    per_block = [seconds * 1e6 / num_blocks for seconds in (cpu_s, wall_s, loop_s)]
    plain = plain_us(variant, num_blocks, num_passes) / num_blocks if variant.trains else 0.0
    return Row(name, num_blocks, wrap_s, cpu_s * 1e6, *per_block, plain)


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
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["streamed", "resident"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {name: [measure(name, number, options.passes) for number in options.blocks] for name in options.variants}
    exponents = {name: growth(found) if len(found) > 1 else 1.0 for name, found in rows.items()}
    bounded = {BOUND_FROM, BOUND_TO} <= set(options.blocks)
    ratios = {name: ratio(found, BOUND_FROM, BOUND_TO) for name, found in rows.items()} if bounded else {}
    linear = all(value <= BOUND for value in ratios.values())
    if options.json:
        table = [asdict(row) for found in rows.values() for row in found]
        print(json.dumps({"rows": table, "exponents": exponents, "ratios": ratios, "linear": linear}))
    else:
        _print(rows, exponents, ratios, linear)
    return 0 if linear else 1


def _print(rows: dict[str, list[Row]], exponents: dict[str, float], ratios: dict[str, float], linear: bool) -> None:
    for name, found in rows.items():
        print(f"{name}: blocks  us per block and step  of the loop  plain  by the clock  us per step  wrap s")
        for row in found:
            threads = f"{row.block_us:21.1f}  {row.loop_us:11.1f}  {row.plain_us:5.0f}"
            figures = f"{threads}  {row.wall_us:12.1f}  {row.pass_us:11.0f}  {row.wrap_s:6.2f}"
            print(f"{'':{len(name)}}  {row.num_blocks:6d}  {figures}")
        print(f"{'':{len(name)}}  a step costs blocks^{exponents[name]:.2f}")
        if name in ratios:
            print(f"{'':{len(name)}}  a block of {BOUND_TO} costs {ratios[name]:.2f} times one of {BOUND_FROM}")
    if ratios:
        print("linear" if linear else f"NOT linear: more than {BOUND:g} times")


if __name__ == "__main__":
    sys.exit(main())
