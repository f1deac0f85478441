"""Loops and blocks that are hard on what waits on the host: bits and memory are as if nothing had moved."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import hightide
import models
from each_value import each_value
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane, Tier
from hightide.planner.solution import Solution
from hightide.runtime.blocks import compiled
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of

WIDTH = 16
HELD = (Activation.SELECTIVE, Activation.KEEP)
LIMITS = hightide.Limits(gpu="64MiB", host="64MiB")


def swapping(plan: Plan, activation: Activation, held: Tier, params: Tier = Tier.HOST) -> Plan:
    assert plan.profile is not None
    inputs = held if activation is Activation.KEEP else Tier.GPU
    changes = {"activation": activation, "params": params, "states": params}
    away = {"held": held, "inputs": inputs}
    blocks = tuple(
        replace(block, **changes, **({} if spec.lazy_head else away)) if block.name else block
        for spec, block in zip(plan.profile.blocks, plan.blocks, strict=True)
    )
    slots = {"num_slots": 3, "num_grad_slots": 3} if params is Tier.HOST else {}
    return replace(plan, blocks=blocks, gpu_limit_bytes=2**25, host_limit_bytes=2**25, **slots)


def wrapped(
    make: Callable[[], nn.Module],
    activation: Activation,
    held: Tier,
    params: Tier = Tier.HOST,
    micro_batch: int = 2,
    compile: bool = False,
) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Run]:
    torch.manual_seed(0)
    model, batch = make(), torch.randn(4, 6, WIDTH)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)
    plan = hightide.plan(model, optimizer, batch, limits=LIMITS, micro_batch=micro_batch, compile=compile)
    plan = swapping(plan, activation, held, params)
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=plan, compile=compile)
    run = run_of(model)
    assert run is not None
    return model, optimizer, batch, run


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class _Product(torch.autograd.Function):
    """Asks for what it has saved more than once, as many do."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]


class AsksTwice(Two):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(_Product.apply(torch.tanh(self.a(x)), torch.sigmoid(x)))


class Conjugated(Two):
    """Complex tensors, read conjugated, and their negated parts: bits that no byte of theirs says."""

    def forward(self, x: Tensor) -> Tensor:
        f, g = torch.fft.fft(self.a(x), dim=-1), torch.fft.fft(self.b(x), dim=-1)
        scores = (g.conj() @ f.transpose(-1, -2)).abs().softmax(-1)
        turned = f.conj()
        return x + (scores.to(f.dtype) @ turned).real * 0.01 + (turned.imag * turned.imag) * 0.001


class InputAsComplex(Two):
    """Saves its input as another type, which has other offsets."""

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], WIDTH // 2, 2)
        own = torch.view_as_complex(x.reshape(shape))[..., 1:]
        other = torch.view_as_complex(self.a(x).reshape(shape))[..., 1:]
        return x + self.b(nn.functional.pad(torch.view_as_real(own * other).flatten(-2), (0, 2))) * 0.1


class WeightAsComplex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2, WIDTH // 2, 2) * 0.1)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        own = torch.view_as_complex(x.reshape(*x.shape[:-1], WIDTH // 2, 2).contiguous())
        return x + self.last(torch.view_as_real(own @ torch.view_as_complex(self.weight).conj()).flatten(-2))


class Abandons(Two):
    """Computes something large whose graph is gone when the block returns."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        aside = torch.exp(h.repeat(1, 1, 64)).sigmoid().mean()
        del aside
        return x + self.b(h * h)


class Odd(Two):
    """Expanded, empty, strided, double, integer and boolean tensors are saved, and views of weights."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        wide = h.mean(-1, keepdim=True).expand(-1, -1, WIDTH)
        best = torch.gather(h * wide, -1, h.argsort(-1)) * torch.where(h > 0, h, -h)
        apart = h.double()[:, ::2]
        some = torch.cat([h[:, :0].exp(), h], 1) * self.b.weight[0] * self.a.weight.t()[1]
        return x + best @ self.b.weight.t() + some * 0.1 + (apart * apart).float().repeat_interleave(2, 1) * 0.1


class InPlace(Two):
    """Writes over what a product has made, and returns a view."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.b(torch.relu_(self.a(x)))
        return y.view(y.shape)


class Answers(Two):
    """Returns more than tensors."""

    def forward(self, x: Tensor) -> dict[str, object]:
        return {"x": x + self.b(torch.tanh(self.a(x))), "count": 3, "name": "answers", "none": None}


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            out = block(x)
            x = out["x"] if isinstance(out, dict) else out
        return x


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


BLOCKS = (Conjugated, InputAsComplex, WeightAsComplex, Abandons, Odd, InPlace, Answers)


@pytest.mark.parametrize("block", BLOCKS)
def test_any_block_gives_the_bits_of_recomputation_within_the_forecast(block: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain, batch = Stack(block), torch.randn(4, 6, WIDTH)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-4)
    expected = [step(plain, plain_optimizer, batch) for _ in range(2)]
    plans = [(Activation.RECOMPUTE, Tier.GPU, Tier.HOST)]
    plans += [(level, held, Tier.HOST) for level in HELD for held in (Tier.GPU, Tier.HOST)]
    plans += [(Activation.KEEP, Tier.HOST, Tier.GPU)]
    results = []
    for activation, held, params in plans:
        model, optimizer, batch, _ = wrapped(lambda: Stack(block), activation, held, params)
        losses = [step(model, optimizer, batch) for _ in range(2)]
        stats = hightide.stats(model)
        assert stats.peak_bytes["gpu"] <= stats.plan.forecast.gpu_peak_bytes, (activation, held, params)
        assert stats.peak_bytes["host"] <= stats.plan.forecast.host_peak_bytes, (activation, held, params)
        results.append((losses, {key: value.clone() for key, value in model.state_dict().items()}))
        hightide.unwrap(model)
    assert results[0][0] == pytest.approx(expected, rel=1e-6)
    for (losses, weights), plan in zip(results, plans, strict=True):
        assert losses == results[0][0], plan
        assert all(torch.equal(value, results[0][1][key]) for key, value in weights.items()), plan


@pytest.mark.parametrize("held", [Tier.GPU, Tier.HOST])
def test_what_was_saved_may_be_asked_for_again_in_one_backward(held: Tier) -> None:
    torch.manual_seed(0)
    plain, batch = Stack(AsksTwice), torch.randn(4, 6, WIDTH)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-4)
    expected = [step(plain, plain_optimizer, batch) for _ in range(2)]
    model, optimizer, batch, _ = wrapped(lambda: Stack(AsksTwice), Activation.KEEP, held)
    assert [step(model, optimizer, batch) for _ in range(2)] == pytest.approx(expected, rel=1e-6)


class Dropping(Two):
    """Random numbers; and it fails, or Ctrl-C comes, when it is told to, in forward or in backward."""

    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(torch.tanh(self.a(x)), 0.3)
        if self.fails == "forward":
            raise ArithmeticError("in mid-forward")
        if self.fails == "interrupted forward":
            signal.raise_signal(signal.SIGINT)
        if self.fails in HOOKS and h.requires_grad:
            h.register_hook(HOOKS[self.fails])
        return x + nn.functional.dropout(self.b(h * h), 0.2)


def _fail(grad: Tensor) -> Tensor:
    raise ArithmeticError("in mid-backward")


def _interrupt(grad: Tensor) -> None:
    signal.raise_signal(signal.SIGINT)


HOOKS = {"backward": _fail, "interrupted backward": _interrupt}


class Loops(nn.Module):
    """One block runs twice, one is frozen, two share a weight, and one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dropping() for _ in range(5))
        self.blocks[1].requires_grad_(False)
        self.blocks[3].b.weight = self.blocks[0].b.weight
        self.leaves_out = False

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 2, 2, 3, 4):
            if not (self.leaves_out and index == 3):
                x = self.blocks[index](x)
        return x


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> list[float]:
    losses = []
    for part in (batch, batch[:3], batch[:, :4]):  # the last batch of an epoch is smaller; another is shorter
        loss = model(part).square().mean()
        loss.backward()
        losses.append(loss.item())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return [*losses, step(model, optimizer, batch)]


def evaluated(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> list[float]:
    loss = model(batch).square().mean()
    with torch.no_grad():
        between = model(batch[:2]).square().mean().item()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        after = model.eval()(batch).square().mean().item()
    model.train()
    return [loss.item(), between, after, step(model, optimizer, batch)]


def left_out(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> list[float]:
    losses = [step(model, optimizer, batch)]
    model.leaves_out = True
    losses.append(step(model, optimizer, batch))
    model.leaves_out = False
    return [*losses, step(model, optimizer, batch)]


def in_a_thread(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> list[float]:
    loss = model(batch).square().mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item(), step(model, optimizer, batch)]


def failing(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> list[float]:
    losses = []
    for where in ("forward", "backward", "interrupted forward", "interrupted backward"):
        model.blocks[2].fails = where
        with pytest.raises(KeyboardInterrupt if where.startswith("interrupted") else ArithmeticError):
            step(model, optimizer, batch)
        model.blocks[2].fails = ""
        optimizer.zero_grad()
        losses.append(step(model, optimizer, batch))
    return losses


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    losses = []
    for part in (batch, batch * 1e37, batch):  # the second has no finite gradient, and its step is skipped
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(part).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert scaler.get_scale() == 2048.0
    return losses


LOOPS = (accumulated, evaluated, left_out, in_a_thread, failing, scaled)


@pytest.mark.parametrize(("loop", "activation"), each_value(LOOPS, list(HELD)))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_loops_do_not_depend_on_where_things_wait(loop: Callable[..., list[float]], activation: Activation) -> None:
    results = []
    for held in (Tier.GPU, Tier.HOST):
        model, optimizer, batch, run = wrapped(Loops, activation, held)
        torch.manual_seed(1)
        losses = [step(model, optimizer, batch)]
        gc.collect()
        before = run.gpu.used_bytes, run.host.used_bytes
        losses += loop(model, optimizer, batch)
        losses.append(step(model, optimizer, batch))  # what copies under way had held is gone with the next pass
        gc.collect()
        assert (run.gpu.used_bytes, run.host.used_bytes) == before
        results.append((losses, {key: value.clone() for key, value in model.state_dict().items()}))
        hightide.unwrap(model)
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[0][1][key]) for key, value in results[1][1].items())


@pytest.mark.parametrize("activation", HELD)
def test_many_forwards_without_a_backward_leave_nothing(activation: Activation) -> None:
    model, optimizer, batch, run = wrapped(Loops, activation, Tier.HOST)
    step(model, optimizer, batch)
    gc.collect()
    before = run.gpu.used_bytes, run.host.used_bytes
    peaks = []
    for _ in range(12):
        model(batch)
        peaks.append((run.gpu.peak_bytes, run.host.peak_bytes))
    assert peaks[-1] == peaks[2]
    step(model, optimizer, batch)
    step(model, optimizer, batch)
    gc.collect()
    assert (run.gpu.used_bytes, run.host.used_bytes) == before


@pytest.mark.parametrize("activation", HELD)
def test_a_second_backward_is_refused_and_the_next_step_is_as_ever(activation: Activation) -> None:
    results = []
    for refuses in (False, True):
        model, optimizer, batch, _ = wrapped(Loops, activation, Tier.HOST)
        torch.manual_seed(1)
        loss = model(batch).square().mean()
        loss.backward(retain_graph=refuses)
        if refuses:
            with pytest.raises(hightide.Refused, match="one backward per forward"):
                loss.backward()
        optimizer.zero_grad()
        results.append([step(model, optimizer, batch) for _ in range(2)])
    assert results[0] == results[1]


@pytest.mark.parametrize("activation", HELD)
def test_a_move_to_another_plan_while_things_wait_on_the_host(activation: Activation) -> None:
    results = []
    for moves in (False, True):
        model, optimizer, batch, run = wrapped(Loops, activation, Tier.HOST)
        torch.manual_seed(1)
        losses = [step(model, optimizer, batch)]
        loss = model(batch).square().mean()
        losses.append(loss.item())
        if moves:
            plan = swapping(run.plan, activation, Tier.GPU, Tier.GPU)
            run.move_to(Solution.of(run.profile, plan))
            with pytest.raises(hightide.Refused, match="the plan was changed"):
                loss.backward()
        del loss
        optimizer.zero_grad()
        losses += [step(model, optimizer, batch) for _ in range(2)]
        gc.collect()
        results.append((losses, {key: value.clone() for key, value in model.state_dict().items()}))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[0][1][key]) for key, value in results[1][1].items())


class Gated(Two):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(nn.functional.gelu(torch.tanh(self.a(x)) * x))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("activation", HELD)
def test_compiled_blocks_swap_without_a_bit_changed(
    monkeypatch: pytest.MonkeyPatch, activation: Activation, backend: str
) -> None:
    """Inductor writes over what was saved: what comes back has one reader and the strides of before."""
    made = torch.compile
    monkeypatch.setattr(compiled.torch, "compile", lambda fn, **options: made(fn, backend=backend, **options))
    results = []
    for held in (Tier.GPU, Tier.HOST):
        model, optimizer, batch, run = wrapped(lambda: Stack(Gated), activation, held, compile=True)
        before = dict(run.performer.moved_bytes)
        losses = [step(model, optimizer, part) for part in (batch, batch, batch[:3])]
        moved = run.performer.moved_bytes[Lane.D2H] - before.get(Lane.D2H, 0)
        results.append((losses, {key: value.clone() for key, value in model.state_dict().items()}, moved))
        hightide.unwrap(model)
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[0][1][key]) for key, value in results[1][1].items())
    assert results[1][2] > results[0][2], "nothing was swapped"


class Wide(nn.Module):
    """Under autocast its weights are as many bytes as what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(nn.functional.dropout(self.up(x), 0.2))
        return x + nn.functional.dropout(self.down(h), 0.1)


def in_vectors() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Stack(Wide), torch.randn(4, 6, WIDTH)


MODELS = {
    "dropout": in_vectors,
    "attention with dropout": lambda: models.gpt2(dropout=0.2, num_layers=2),
    "tapped routers": lambda: models.qwen3_moe(num_layers=2),
}


@pytest.mark.parametrize("held", [Tier.GPU, Tier.HOST])
@pytest.mark.parametrize(("name", "autocast"), [*((name, False) for name in MODELS), ("dropout", True)])
def test_bytes_of_what_is_held_in_part_are_never_above_the_forecast(name: str, autocast: bool, held: Tier) -> None:
    model, batch = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    plan = hightide.plan(model, optimizer, batch, limits=LIMITS, micro_batch=2)
    plan = swapping(plan, Activation.SELECTIVE, held)
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=plan)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch).float().square().mean() if isinstance(batch, Tensor) else models.loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = hightide.stats(model)
    assert stats.peak_bytes["gpu"] <= stats.plan.forecast.gpu_peak_bytes
    assert stats.peak_bytes["host"] <= stats.plan.forecast.host_peak_bytes
