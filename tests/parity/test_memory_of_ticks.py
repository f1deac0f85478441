"""What the simulated accelerator holds in each tick of a step and between two, against what the plan's schedule says of
it. The peak of a step alone would hide what is told too low anywhere else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equal_or_refused import WIDTH, Block, Net, Way, sequences, wrap
from harness import make_optimizer
from torch import Tensor, nn
from torch.nn import functional as F

import hightide
import models
from hightide.ir.action import TICK_OPS, Schedule
from hightide.ir.tier import Lane, Tier
from hightide.planner.verify.precedence import Precedence
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of

NUM_STEPS = 2


def told(schedule: Schedule) -> dict[str, int]:
    """By tick: the most in it, and until the next begins."""
    precedence, found, now, latest = Precedence(schedule), {"": 0}, schedule.gpu_base_bytes, ""
    in_flight = []
    for action in schedule.actions:
        if action.op in TICK_OPS:
            latest = action.id
            found[latest] = 0
            for done in [other for other in in_flight if precedence.before(other.id, action.id)]:
                in_flight.remove(done)
                now -= done.gpu_gives
        now += action.gpu_takes
        found[latest] = max(found[latest], now + action.gpu_transient)
        if action.lane is Lane.COMPUTE:
            now -= action.gpu_gives
        else:
            in_flight.append(action)
    return found


class Measured:
    """The most that the accelerator held between any two moments at which a tick begins or ends, in the last step."""

    def __init__(self, run: Run) -> None:
        self._run, self._executor = run, run.executor
        self._enter, self._leave = run.executor.enter, run.executor.leave
        self.inside: dict[str, int] = {}
        self.before: dict[str, int] = {}
        self._now = ""

    def enter(self, *args: Any, **kwargs: Any) -> Any:
        between_bytes = self._run.gpu.lap().tensor_bytes
        tick = self._enter(*args, **kwargs)
        assert tick.index is not None and self._executor._pass is not None
        self._now = self._executor._pass.program.ticks[tick.index].id
        self.before[self._now] = between_bytes
        self._run.gpu.lap()
        return tick

    def leave(self, tick: Any) -> None:
        self.inside[self._now] = self._run.gpu.lap().tensor_bytes
        self._leave(tick)


def check_ticks(
    model: nn.Module,
    batch: Callable[[int], Any],
    way: Way,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> hightide.Plan:
    """`around`: what forwards run in."""
    with around():
        model, optimizer = wrap(model, make_optimizer(model), batch(0), way)
    run = run_of(model)
    assert run is not None
    run.observer = None  # it would plan again
    run.gpu.capacity_bytes *= 4
    measured = Measured(run)
    run.executor.enter, run.executor.leave = measured.enter, measured.leave  # type: ignore[method-assign]
    for step in range(NUM_STEPS):
        with around():
            loss = models.loss_of(model, batch(step + 1))
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
    schedule = next(one.schedule for one in run.executor.programs.values() if one.schedule.mode.trains)
    levels = told(schedule)
    ids = [tick.id for tick in schedule.ticks if tick.id in measured.inside]
    inside = {one: (measured.inside[one], levels[one]) for one in ids if measured.inside[one] > levels[one]}
    assert not inside, "in a tick: measured, told"
    between = {
        one: (measured.before[one], max(levels[other], levels[one]))
        for other, one in itertools.pairwise(["", *ids])
        if measured.before[one] > max(levels[other], levels[one])
    }
    assert not between, "before a tick: measured, told"
    plan = run.plan
    hightide.unwrap(model)
    return plan


class Attributes(torch.autograd.Function):
    """Keeps what it needs in a way that autograd does not know of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.wide = torch.cat([x] * 6, -1)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1 - ctx.wide[..., :WIDTH].tanh().square())


class KeepsInItsGraph(Block):
    def mix(self, h: Tensor) -> Tensor:
        return Attributes.apply(h)


class KeepsInAnAttribute(Block):
    def mix(self, h: Tensor) -> Tensor:
        self.seen = torch.cat([h.detach()] * 6, -1)
        return h


class OtherKernelWithGradients(Block):
    """A mask that has a gradient is one that fused attention does not take."""

    def mix(self, h: Tensor) -> Tensor:
        heads = h.unsqueeze(1).expand(-1, 4, -1, -1)
        mask = (h @ h.transpose(1, 2)).unsqueeze(1)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).sum(1)


class TakesAGradient(Block):
    """In its forward, of what it has saved."""

    def mix(self, h: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = h.detach().requires_grad_()
            (slope,) = torch.autograd.grad(inner.sin().square().sum(), inner)
        return h * slope


class SaysWhyItFails(TakesAGradient):
    """With an error of its own."""

    def mix(self, h: Tensor) -> Tensor:
        try:
            return super().mix(h)
        except Exception as error:
            raise ValueError("no slope") from error


@pytest.mark.parametrize(
    "kind",
    [KeepsInItsGraph, KeepsInAnAttribute, OtherKernelWithGradients, TakesAGradient, SaysWhyItFails],
    ids=lambda kind: kind.__name__,
)
@pytest.mark.parametrize("micro_batch", [2, 6])
def test_blocks(kind: type[Block], micro_batch: int) -> None:
    torch.manual_seed(0)
    check_ticks(Net(kind(), kind(), kind()), sequences, Way(micro_batch))


class SeveralWeights(Block):
    """Larger than what it computes: under autocast its graph keeps casts of them."""

    def make(self) -> None:
        self.wide, self.narrow = nn.Linear(WIDTH, 12 * WIDTH), nn.Linear(12 * WIDTH, WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        return self.narrow(self.wide(h))


@pytest.mark.parametrize("micro_batch", [1, 6])
def test_weights_that_autocast_casts(micro_batch: int) -> None:
    torch.manual_seed(0)
    around = partial(torch.autocast, "cpu", torch.bfloat16)
    check_ticks(Net(*(SeveralWeights() for _ in range(3))), sequences, Way(micro_batch), around)


class WideByAFlag(Block):
    """Built and printed like the others."""

    is_wide = False

    def mix(self, h: Tensor) -> Tensor:
        return torch.cat([h] * 12, -1).sin()[..., :WIDTH].clone() if self.is_wide else h


def test_a_block_that_takes_more_because_of_a_flag() -> None:
    torch.manual_seed(0)
    blocks = [WideByAFlag() for _ in range(3)]
    blocks[1].is_wide = True
    check_ticks(Net(*blocks), sequences, Way(2))


class PrintsAValue(Block):
    def make(self) -> None:
        self.register_buffer("seen", torch.zeros(1))

    def extra_repr(self) -> str:
        return f"seen={self.seen.item():.2f}"


def test_a_block_that_prints_a_value() -> None:
    torch.manual_seed(0)
    check_ticks(Net(PrintsAValue(), PrintsAValue()), sequences, Way(2))


class Masked(Block):
    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x) * mask
        return y, torch.cat([y] * 3, -1)


class MaskAndResults(nn.Module):
    """Blocks share a tensor that has no gradient, and the code around keeps the first one's input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Masked() for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        given = self.first(x)
        h, mask = self.second(given), x * 2
        for block in self.blocks:
            h, _ = block(h, mask)
        del mask  # the blocks have it
        return {"loss": F.mse_loss(self.head(h + 0 * given), labels)}


class Between(nn.Module):
    """Code that saves tensors beside blocks, which come back while the gradients of others are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = F.gelu(block(x))
        return {"loss": F.mse_loss(self.head(x), labels)}


class SometimesWithoutGradients(Net):
    """A round of its blocks under no_grad first: the runtime does not split it."""

    def forward(self, x: Tensor, labels: Tensor | None = None, **others: Any) -> dict[str, Any]:
        h = self.first(x)
        with torch.no_grad():
            for block in self.blocks:
                h = block(h)
        return super().forward(h, labels, **others)


@pytest.mark.parametrize("micro_batch", [1, 6])
@pytest.mark.parametrize(
    "build",
    [MaskAndResults, Between, lambda: SometimesWithoutGradients(Block(), Block())],
    ids=["MaskAndResults", "Between", "SometimesWithoutGradients"],
)
def test_what_is_around_blocks(build: Callable[[], nn.Module], micro_batch: int) -> None:
    torch.manual_seed(0)
    check_ticks(build(), sequences, Way(micro_batch))


class Language(nn.Module):
    """Its loss is fused with its head, and code between blocks holds tensors meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.config = SimpleNamespace(vocab_size=64)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.table(x)
        for block in self.blocks:
            h = torch.cat([block(h)] * 12, -1).sin()[..., :WIDTH].contiguous()
        logits = self.head(h)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def tokens(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(64, (6, 5), generator=torch.Generator().manual_seed(seed))
    return {"x": ids, "labels": ids.roll(1, -1)}


def test_backward_of_a_fused_head() -> None:
    torch.manual_seed(0)
    plan = check_ticks(Language(), tokens, Way(2))
    assert plan.profile is not None and plan.profile.blocks[plan.profile.calls[-1].block].lazy_head


class Tables(nn.Module):
    """Several, which are looked up on the host; the code around holds their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(512, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = sum(table(x) for table in self.tables)
        return {"loss": F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten() % 4)}


def test_tables_on_the_host() -> None:
    """The copies of their indices there are on no GPU."""
    torch.manual_seed(0)
    plan = check_ticks(Tables(), tokens, Way(2))
    assert any(block.compute is Tier.HOST for block in plan.blocks)


class Tells(Block):
    """Its last state is read from outside, and is there until the next one."""

    def mix(self, h: Tensor) -> Tensor:
        self.state = torch.cat([h] * 8, -1)
        return h


class ReadsStates(Net):
    def forward(self, x: Tensor, labels: Tensor | None = None, **others: Any) -> dict[str, Any]:
        found = super().forward(x, labels, **others)
        return {**found, "loss": found["loss"] + sum(block.state.square().mean() for block in self.blocks)}


def test_states_that_are_read_from_outside() -> None:
    torch.manual_seed(0)
    plan = check_ticks(ReadsStates(Tells(), Tells(), Tells()), sequences, Way(2))
    assert plan.profile is not None and any(call.tapped.per_sample for call in plan.profile.calls)
