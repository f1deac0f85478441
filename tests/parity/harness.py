"""One training loop for plain and for wrapped models, and what "equal" means between the two."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import hightide
import models
from hightide.ir.activation import Activation
from hightide.ir.tier import Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.profiler.needs import token_tiles

EPS = 1e-4  # with AdamW's default of 1e-8, biases whose true gradient is zero random-walk on rounding
HOST = "64MiB"
NUM_STEPS = 20
Batch = Any
Step = Callable[["Loop", Batch], Tensor]


@dataclass(frozen=True)
class Subject:
    """A model of the zoo with a stream of batches that fits it."""

    build: Callable[..., models.Pair]
    batch: Callable[..., Batch]

    def batches(self, num_steps: int = NUM_STEPS, num_samples: int = 7, seed: int = 10, **options: Any) -> list[Batch]:
        return [self.batch(seed=seed + step, num_samples=num_samples, **options) for step in range(num_steps)]


def _maskless(**options: Any) -> Batch:
    return models.token_batch(mask=False, **options)


SUBJECTS = {
    "llama": Subject(partial(models.llama, tied=False, num_layers=3), models.token_batch),
    "llama_tied": Subject(partial(models.llama, tied=True, num_layers=3), models.token_batch),
    "gpt2": Subject(partial(models.gpt2, tied=True, num_layers=3), models.token_batch),
    "gpt2_untied": Subject(partial(models.gpt2, tied=False, num_layers=3), models.token_batch),
    "vit": Subject(models.vit, models.image_batch),
    "plain": Subject(partial(models.plain, tied=False), _maskless),
    "plain_tied": Subject(partial(models.plain, tied=True), _maskless),
    "hand_written": Subject(models.hand_written, models.vector_batch),
}


@dataclass
class Loop:
    """What a training step may touch. The same step runs on the plain and on the wrapped model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    wrapped: bool
    index: int = 0
    norms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Trained:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    stats: hightide.Stats | None  # None: plain
    samples_seen: list[int]  # by a norm inside a block, one number per call of it


def make_optimizer(model: nn.Module, groups: int = 1, lr: float = 3e-3, weight_decay: float = 0.1) -> torch.optim.AdamW:
    """One group, or two: matrices decay, vectors do not and learn slower."""
    if groups == 1:
        return torch.optim.AdamW(model.parameters(), lr=lr, eps=EPS, weight_decay=weight_decay)
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0, "lr": lr / 3}],
        lr=lr,
        eps=EPS,
    )


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Rises for 5 steps, then falls: no two steps have the same learning rate."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 5, 5 / (step + 1)))


def wrap(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, *, room: float = 1.02, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`hightide.wrap`, by default with `room` times the smallest GPU for which there is a plan.

    A refusal names the bytes that are needed and touches nothing, so a few rounds find that GPU."""
    if "plan" in options or "limits" in options:
        return hightide.wrap(model, optimizer, batch, **options)
    case = _case(model, optimizer, batch, options)
    for _ in range(6):
        gpu_bytes = _needed_bytes.setdefault(case, 1)
        try:
            limits = hightide.Limits(gpu=int(room * gpu_bytes), host=HOST)
            return hightide.wrap(model, optimizer, batch, limits=limits, **options)
        except InfeasiblePlan as refusal:
            assert refusal.num_bytes > gpu_bytes, f"refused at {gpu_bytes} bytes: {refusal}"
            _needed_bytes[case] = refusal.num_bytes
    raise AssertionError(f"no plan at {_needed_bytes[case]} bytes, which an earlier refusal named")


def streamed(plan: hightide.Plan, activation: Activation, inputs: Tier = Tier.GPU) -> hightide.Plan:
    """The same plan with every block moving, through slots for two."""
    inputs = Tier.GPU if activation is Activation.KEEP else inputs
    moving = {"params": Tier.HOST, "states": Tier.HOST, "activation": activation, "inputs": inputs}
    blocks = tuple(replace(block, **moving) if block.name else block for block in plan.blocks)
    slots = 2 * max(plan.layout.num_slots(chunk) for chunk in plan.layout.chunks) + 2
    return replace(
        plan, blocks=blocks, num_slots=slots, num_grad_slots=slots, loss_kept_tokens=0, loss_in_forward=False
    )


_needed_bytes: dict[object, int] = {}  # of cases seen before: saves a round


def _case(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, options: dict[str, Any]) -> object:
    """What the smallest GPU depends on."""
    params = tuple((name, param.shape, param.requires_grad) for name, param in model.named_parameters())
    groups = tuple(len(group["params"]) for group in optimizer.param_groups)
    arguments = batch.items() if isinstance(batch, dict) else enumerate([batch] if isinstance(batch, Tensor) else batch)
    shapes = tuple(
        (name, value.shape, int(value.sum())) if isinstance(value, Tensor) else (name, value)
        for name, value in arguments
    )
    how = token_tiles.LONG, token_tiles.TILE, *options.items()
    return type(model).__qualname__, str(getattr(model, "order", "")), params, groups, shapes, how


def make_step(clip: str | None = None, accumulate: int = 1, zero_grad: str = "after", max_norm: float = 0.5) -> Step:
    """One step of the loop. `zero_grad`: "before" forward, "between" forward and backward, or "after" step().

    With `accumulate` a batch is a sequence of that many batches, each with its own backward."""

    def step(loop: Loop, batch: Batch) -> Tensor:
        parts = [batch] if accumulate == 1 else batch
        assert len(parts) == accumulate
        if zero_grad == "before":
            loop.optimizer.zero_grad()
        total = torch.zeros(())
        for number, part in enumerate(parts):
            loss = models.loss_of(loop.model, part) / accumulate
            if zero_grad == "between" and number == 0:
                loop.optimizer.zero_grad()
            loss.backward()
            total += loss.detach()
        if clip is not None:
            loop.norms.append(clip_gradients(loop, clip, max_norm))
        loop.optimizer.step()
        if zero_grad == "after":
            loop.optimizer.zero_grad()
        return total

    return step


def clip_gradients(loop: Loop, how: str, max_norm: float) -> float:
    if how == "optimizer" and loop.wrapped:
        return float(loop.optimizer.clip_grad_norm_(max_norm))  # type: ignore[attr-defined]
    return float(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), max_norm))


def train(
    pair: models.Pair,
    batches: Iterable[Batch],
    *,
    wrap: dict[str, Any] | None = None,
    step: Step | None = None,
    groups: int = 1,
    scheduler: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **loop_options: Any,
) -> Trained:
    """Trains a fresh (model, example batch), plain or wrapped. `scheduler`: made "before" or "after" wrapping."""
    model, example = pair
    assert scheduler in (None, "before", "after")
    optimizer = optimizer or make_optimizer(model, groups)
    rates = make_scheduler(optimizer) if scheduler == "before" else None
    if wrap is not None:
        model, optimizer = globals()["wrap"](model, optimizer, example, **wrap)
    rates = make_scheduler(optimizer) if scheduler == "after" else rates
    step = step or make_step(**loop_options)
    loop = Loop(model, optimizer, wrap is not None)
    losses: list[float] = []
    with samples_seen(model) as seen:
        for index, batch in enumerate(batches):
            loop.index = index
            losses.append(step(loop, batch).detach().item())
            if rates is not None:
                rates.step()
    weights = {name: value.clone() for name, value in model.state_dict().items()}  # waits for the last updates
    stats = hightide.stats(model) if wrap is not None else None
    return Trained(model, optimizer, losses, loop.norms, weights, stats, seen)


def compare(
    build: Callable[[], models.Pair], batches: Callable[[], Iterable[Batch]], *, wrap: dict[str, Any], **options: Any
) -> tuple[Trained, Trained]:
    """Trains one model plain and wrapped and asserts parity. Returns both."""
    plain = train(build(), batches(), **options)
    wrapped = train(build(), batches(), wrap=wrap, **options)
    assert_parity(plain, wrapped)
    return plain, wrapped


def assert_parity(plain: Trained, wrapped: Trained) -> None:
    assert len(plain.losses) == len(wrapped.losses) > 0
    for index, (expected, loss) in enumerate(zip(plain.losses, wrapped.losses, strict=True)):
        assert abs(loss - expected) <= 1e-6 * abs(expected), f"step {index}: loss {loss!r}, plain {expected!r}"
    for index, (expected, norm) in enumerate(zip(plain.norms, wrapped.norms, strict=True)):
        assert abs(norm - expected) <= 1e-5 * expected, f"step {index}: norm {norm!r}, plain {expected!r}"
    assert_close_weights(plain.weights, wrapped.weights)


def assert_close_weights(plain: dict[str, Tensor], wrapped: dict[str, Tensor]) -> None:
    assert list(plain) == list(wrapped)
    for name, expected in plain.items():
        allowed = 1e-5 * float(expected.abs().max()) + 1e-6
        error = float((wrapped[name] - expected).abs().max())
        assert error <= allowed, f"{name}: off by {error:.3g}, allowed {allowed:.3g}"  # a NaN fails too


def assert_same_bits(first: Trained, other: Trained) -> None:
    assert first.losses == other.losses
    assert first.norms == other.norms
    assert list(first.weights) == list(other.weights)
    for name, value in first.weights.items():
        assert torch.equal(value, other.weights[name]), f"{name} differs"


def assert_streamed(trained: Trained, micro_batches: Sequence[int] | None = None, deviations: int = 0) -> None:
    """The run was worth its name: several micro-batches, evictions in every step, within limits, as planned."""
    stats = trained.stats
    assert stats is not None and stats.num_steps > 0
    assert stats.evictions >= 2 * stats.num_steps, f"{stats.evictions} evictions in {stats.num_steps} steps"
    assert -(-stats.plan.num_samples // stats.plan.micro_batch) >= 3
    if micro_batches is not None:
        assert len(micro_batches) >= 3
        assert trained.samples_seen[: len(micro_batches)] == list(micro_batches), trained.samples_seen[:8]
    assert stats.peak_bytes["gpu"] <= stats.plan.gpu_limit_bytes
    assert stats.peak_bytes["host"] <= stats.plan.host_limit_bytes
    assert stats.peak_bytes["gpu"] <= stats.forecast.gpu_peak_bytes, "the forecast is an upper bound"
    assert stats.deviations == deviations


@contextmanager
def samples_seen(model: nn.Module) -> Iterator[list[int]]:
    """Samples in each call of a norm inside a repeated block: what the block really ran on, call by call."""
    seen: list[int] = []
    norms = [
        module for name, module in model.named_modules() if "norm" in type(module).__name__.lower() and ".1." in name
    ]

    def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        if not isinstance(args[0], FakeTensor):  # else a probe
            seen.append(len(args[0]))

    handle = norms[0].register_forward_pre_hook(note) if norms else None
    try:
        yield seen
    finally:
        if handle is not None:
            handle.remove()


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
