"""Any model, plain and wrapped: equal in everything that a user can see, or refused before a wrong number.

A case is a builder of a model with batches and the outcome that it must have; `check` trains it plain and wrapped. What
is compared: each step's outputs and losses; then weights and buffers, attributes of modules (numbers, tensors,
generators), the generators of Python, numpy and torch, and the outputs of an evaluation.
"""

from __future__ import annotations

import random
import re
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from harness import HOST, make_optimizer
from torch import Tensor, nn
from torch.nn import functional as F

import hightide
from hightide.ir.refusal import Refused
from hightide.planner.infeasible import InfeasiblePlan

NUM_SAMPLES = 6
NUM_TOKENS = 5
WIDTH = 8
CLASSES = 4
NUM_STEPS = 3
EVALUATION = 99  # the seed of its batch
LOSS_TOLERANCE = 2e-6
_INTERNAL = frozenset(nn.Module().__dict__)
_NO_ATTRIBUTE = object()


@dataclass(frozen=True)
class Way:
    """How a model is wrapped. `tight`: within `room` times the smallest GPU for which there is a plan."""

    micro_batch: int | None
    tight: bool = True
    update: str = "deferred"
    room: float = 1.02

    def __str__(self) -> str:
        return f"{self.micro_batch or 'any'}-{'tight' if self.tight else 'free'}-{self.update}"


SPLIT = (Way(2), Way(4, tight=False))  # of 6 samples: even and uneven parts
ROOMY = (Way(2, room=1.6), Way(4, tight=False))  # for what no forecast knows of: tensors that stay in attributes
WHOLE = (Way(NUM_SAMPLES), Way(NUM_SAMPLES, tight=False))
IN_BACKWARD = (Way(2, update="in_backward"), Way(NUM_SAMPLES, tight=False, update="in_backward"))
AT_LENGTH = (*(Way(size) for size in (1, 2, 3, 6, None)), *(Way(size, False) for size in (1, 4, None)), *IN_BACKWARD)

Batch = Any
Step = Callable[[nn.Module, torch.optim.Optimizer, Batch, int], Any]


def vectors(seed: int, num_samples: int = NUM_SAMPLES) -> dict[str, Tensor]:
    return _floats(seed, num_samples)


def sequences(seed: int, num_samples: int = NUM_SAMPLES, num_tokens: int = NUM_TOKENS) -> dict[str, Tensor]:
    return _floats(seed, num_samples, num_tokens)


def time_major(seed: int, num_samples: int = NUM_SAMPLES, num_tokens: int = NUM_TOKENS) -> dict[str, Tensor]:
    return _floats(seed, num_tokens, num_samples)


def square(seed: int) -> dict[str, Tensor]:
    """As many tokens as samples."""
    return _floats(seed, NUM_SAMPLES, NUM_SAMPLES)


def images(seed: int, num_samples: int = NUM_SAMPLES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(num_samples, 3, 8, 8, generator=generator),
        "labels": torch.randn(num_samples, CLASSES, generator=generator),
    }


def _floats(seed: int, *leading: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(*leading, WIDTH, generator=generator),
        "labels": torch.randn(*leading, CLASSES, generator=generator),
    }


class Block(nn.Module):
    """A residual block; what is particular to a case is `mix`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.make()

    def make(self) -> None:
        """More parameters and state."""

    def mix(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Any:
        return x + self.mix(torch.tanh(self.linear(x)))


class Net(nn.Module):
    """A stack of blocks. What a block returns beside its output is reported, and a loss if it has a gradient."""

    def __init__(self, *blocks: nn.Module, first: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH) if first else nn.Identity()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor | None = None, **others: Any) -> dict[str, Any]:
        h, reported, auxiliary = self.first(x), [], 0.0
        for block in self.blocks:
            h = block(h, **others)
            if isinstance(h, tuple):
                h, *rest = h
                reported += rest
                auxiliary = auxiliary + sum(0.1 * r.mean() for r in rest if isinstance(r, Tensor) and r.requires_grad)
        prediction = self.head(h)
        if labels is None:
            return {"prediction": prediction, "reported": reported}
        return {"loss": mean_square(prediction, labels) + auxiliary, "prediction": prediction, "reported": reported}


def mean_square(prediction: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(prediction, labels, reduction="none").mean()


def call_arguments(batch: Batch) -> list[Tensor]:
    """Tensors of a batch that have rows."""
    values = batch.values() if isinstance(batch, dict) else batch
    return [value for value in values if isinstance(value, Tensor) and value.dim()]


def call(model: nn.Module, batch: Batch) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, index: int) -> Any:
    output = call(model, batch)
    loss_in(output).backward()
    optimizer.step()
    optimizer.zero_grad()
    return output


def loss_in(output: Any) -> Tensor:
    if isinstance(output, dict):
        return output["loss"]
    return output.square().mean() if isinstance(output, Tensor) else output[0]


@dataclass(frozen=True)
class Case:
    """`outcome` is "equal", or "refused" at wrapping or before the first wrong number, or "either"."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    outcome: str
    ways: tuple[Way, ...]
    step: Step
    example: Callable[[], Batch] | None = None  # None: the batch of seed 0
    prepare: Callable[[nn.Module], None] | None = None  # between building and wrapping
    after_wrap: Callable[[nn.Module], None] | None = None
    evaluate: bool = True
    split: bool = False  # no false alarm: no call may run unsplit
    slow: bool = False  # or nearly a copy of another one: only at length
    limit: str = ""  # why it is known to be wrong all the same
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = make_optimizer

    def __repr__(self) -> str:
        return self.name

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        return [pytest.mark.xfail(reason=self.limit, raises=AssertionError)] if self.limit else []


class Cases(list[Case]):
    """Those of a file, which decorators of builders and of blocks add to."""

    def __init__(self, ways: tuple[Way, ...] = SPLIT) -> None:
        super().__init__()
        self.ways = ways

    @property
    def quick(self) -> list[Any]:
        """Arguments of the test by default: in one way each, by turns."""
        return [
            pytest.param(case, case.ways[number % len(case.ways) :][:1], id=case.name, marks=case.marks)
            for number, case in enumerate(self)
            if not case.slow
        ]

    @property
    def at_length(self) -> list[Any]:
        """Arguments of the test at length: in many ways."""

        def ways(case: Case) -> tuple[Way, ...]:
            if case.outcome == "refused" or case.ways not in (SPLIT, WHOLE):
                return case.ways
            rows = min(len(value) for value in call_arguments(case.batch(0)))  # time may come first
            sizes = {NUM_SAMPLES} if case.ways == WHOLE else {None, *range(1, rows + 1)}
            return tuple(way for way in AT_LENGTH if way.micro_batch in sizes)

        return [pytest.param(case, ways(case), id=case.name, marks=case.marks) for case in self]

    def add(
        self,
        outcome: str = "equal",
        batch: Callable[[int], Batch] = vectors,
        ways: tuple[Way, ...] | None = None,
        step: Step = one_step,
        **options: Any,
    ) -> Callable[[Any], Any]:
        """A function builds the model; of a block's class two are stacked, between other blocks."""
        assert outcome in ("equal", "refused")

        def register(what: Any) -> Any:
            build = (lambda: Net(what(), what())) if isinstance(what, type) else what
            self.append(Case(what.__name__, build, batch, outcome, ways or self.ways, step, **options))
            return what

        return register


@dataclass
class Outcome:
    outputs: list[Any] = field(default_factory=list)  # of each step
    losses: list[float] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)  # what is compared at the end
    refusal: Exception | None = None
    stats: hightide.Stats | None = None
    warnings: list[str] = field(default_factory=list)


def train(case: Case, way: Way | None) -> Outcome:
    """Plain, or wrapped in a way."""
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    outcome = Outcome()
    model = case.build().train()
    optimizer = case.optimizer(model)
    if case.prepare is not None:
        case.prepare(model)
    if way is not None:
        example = case.batch(0) if case.example is None else case.example()
        try:
            model, optimizer = wrap(model, optimizer, example, way)
        except ValueError as refusal:
            if isinstance(refusal, InfeasiblePlan):
                raise
            outcome.refusal = refusal
            return outcome
    if case.after_wrap is not None:
        case.after_wrap(model)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            _train(case, model, optimizer, outcome)
        outcome.warnings = [str(warning.message) for warning in said]
    except (Refused, ValueError) as refusal:
        if way is None or isinstance(refusal, InfeasiblePlan) or not _is_ours(refusal):
            raise
        outcome.refusal = refusal
    if way is not None:
        outcome.stats = hightide.stats(model)
        with nullcontext() if outcome.refusal is None else _ignored():
            hightide.unwrap(model)
    return outcome


def _train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, outcome: Outcome) -> None:
    for index in range(NUM_STEPS):
        output = case.step(model, optimizer, case.batch(index + 1), index)
        outcome.outputs.append(dict(leaves(output)))
        outcome.losses.append(loss_in(output).item())
    outcome.state = dict(observed(model))
    if case.evaluate:
        model.eval()
        with torch.no_grad():
            outcome.state |= dict(leaves(call(model, case.batch(EVALUATION)), "evaluation"))


def _is_ours(refusal: Exception) -> bool:
    """A batch that does not fit the plan is a ValueError at run time."""
    where = refusal.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    return where is not None and "hightide" in where.tb_frame.f_globals["__name__"]


def wrap(
    model: nn.Module, optimizer: torch.optim.Optimizer, example: Batch, way: Way
) -> tuple[nn.Module, torch.optim.Optimizer]:
    options = {"micro_batch": way.micro_batch, "update": way.update}
    gpu: int | str = 1 if way.tight else HOST
    for _ in range(6):
        try:
            limits = hightide.Limits(gpu=gpu if isinstance(gpu, str) else int(way.room * gpu), host=HOST)
            return hightide.wrap(model, optimizer, example, limits=limits, **options)
        except InfeasiblePlan as refusal:
            gpu = refusal.num_bytes
    raise AssertionError(f"no plan at {gpu} bytes, which an earlier refusal named")


def check(case: Case, ways: tuple[Way, ...]) -> None:
    """In each way."""
    plain = train(case, None)
    wrong = {str(way): problem(case, plain, way) for way in ways}
    assert not any(wrong.values()), "\n".join(f"{way}: {text}" for way, text in wrong.items() if text)


def problem(case: Case, plain: Outcome, way: Way) -> str:
    """What is wrong, in words."""
    wrapped = train(case, way)
    for index, (expected, found) in enumerate(zip(plain.outputs, wrapped.outputs, strict=False)):
        for difference in differing(expected, found):
            return f"step {index}: {difference}"
    for index, (loss, other) in enumerate(zip(plain.losses, wrapped.losses, strict=False)):
        if not abs(loss - other) <= LOSS_TOLERANCE * abs(loss):
            return f"step {index}: loss {other!r}, plain {loss!r}"
    if wrapped.refusal is None:
        differences = list(differing(plain.state, wrapped.state))
        if differences:
            return "at the end: " + "; ".join(differences[:6])
        stats = wrapped.stats
        assert stats is not None
        if stats.peak_bytes["gpu"] > stats.plan.gpu_limit_bytes:
            return f"{stats.peak_bytes['gpu']} bytes on the GPU, limit {stats.plan.gpu_limit_bytes}"
        if stats.peak_bytes["host"] > stats.plan.host_limit_bytes:
            return f"{stats.peak_bytes['host']} bytes on the host, limit {stats.plan.host_limit_bytes}"
        late = [text for text in wrapped.warnings if "whole batch" in text]  # found while training
        if case.split and (reasons := unsplit(stats.plan) + late):
            return f"runs unsplit without need: {reasons}"
    elif not is_clear(str(wrapped.refusal), case):
        return f"a refusal that neither names the block nor says what to do: {wrapped.refusal}"
    outcome = "equal" if wrapped.refusal is None else "refused"
    return "" if case.outcome in (outcome, "either") else f"{outcome}, and not {case.outcome}: {wrapped.refusal}"


def unsplit(plan: hightide.Plan) -> list[str]:
    """Why calls run unsplit, as the plan explains it; an embedding does by design."""
    reasons = re.findall(r"calls? unsplit: (.*)", plan.explain())
    return [reason for reason in reasons if not reason.startswith("only integer inputs")]


ADVICE = (
    "micro_batch",
    "instead",
    "blocks=",
    "expand or drop",
    "one backward per forward",
    "call ",
    "use ",
    "give ",
    "pass ",
    "outside",
    "before wrap",
    "after wrap",
)


def is_clear(message: str, case: Case) -> bool:
    """It names the block, or says what to do."""
    modules = dict(case.build().named_modules())
    names = {name for name in modules if name} | {type(module).__name__ for module in modules.values()}
    return len(message) > 30 and any(word in message for word in (*names, *ADVICE))


def observed(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What training has left: weights, buffers, attributes and the states of generators."""
    for name, value in model.state_dict().items():
        yield f"state of {name}", value.detach().clone()
    for name, buffer in model.named_buffers():  # also those that are not saved
        yield f"buffer {name}", buffer.detach().clone()
    for name, module in model.named_modules():
        for key, value in list(vars(module).items()):
            if key not in _INTERNAL and not key.startswith("_hightide"):
                yield from leaves(value, f"{name}.{key}")
    yield "python's generator", random.getstate()
    yield "numpy's generator", np.random.get_state()[1:3]
    yield "torch's generator", torch.get_rng_state()


def leaves(value: Any, name: str = "output") -> Iterator[tuple[str, Any]]:
    """Numbers, texts and tensors of any nested value, and the states of generators; other objects are passed over."""
    if isinstance(value, Tensor):
        yield name, value.detach().clone()
    elif value is None or isinstance(value, bool | int | float | str):
        yield name, value
    elif isinstance(value, np.ndarray | np.number):
        yield name, torch.as_tensor(np.array(value))
    elif isinstance(value, torch.Generator):
        yield name, value.get_state()
    elif isinstance(value, random.Random):
        yield name, value.getstate()
    elif isinstance(value, np.random.RandomState | np.random.Generator):
        state = value.get_state() if isinstance(value, np.random.RandomState) else value.bit_generator.state
        yield name, repr(state)
    elif isinstance(value, dict | Counter):
        yield f"{name}, its length", len(value)
        for key, item in value.items():
            yield from leaves(item, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple | deque):
        yield f"{name}, its length", len(value)
        for index, item in enumerate(value):
            yield from leaves(item, f"{name}[{index}]")
    elif isinstance(value, set | frozenset):
        yield name, repr(sorted(value, key=repr))
    elif is_dataclass(value):
        for each in fields(value):
            yield from leaves(getattr(value, each.name), f"{name}.{each.name}")


def differing(expected: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """What is in `found` as it should not be. What is there in addition is no concern of the user."""
    for name, value in expected.items():
        other = found.get(name, _NO_ATTRIBUTE)
        if other is _NO_ATTRIBUTE:
            yield f"{name} is missing"
        elif isinstance(value, Tensor) and isinstance(other, Tensor):
            if (value.shape, value.dtype) != (other.shape, other.dtype):
                yield f"{name} is {tuple(other.shape)} {other.dtype}, plain {tuple(value.shape)} {value.dtype}"
            elif value.is_floating_point() and value.numel():
                allowed = 1e-5 * float(value.abs().nan_to_num(posinf=0.0).max()) + 1e-6
                error = float(torch.where(value == other, 0.0, value - other).abs().max())  # infinities may be equal
                if not error <= allowed:
                    yield f"{name} is off by {error:.3g}, allowed {allowed:.3g}"
            elif not torch.equal(value, other):
                yield f"{name} is {_short(other)}, plain {_short(value)}"
        elif isinstance(value, float) and isinstance(other, float):
            if not abs(value - other) <= 1e-5 * abs(value) + 1e-6:
                yield f"{name} is {other!r}, plain {value!r}"
        elif not _same(value, other):
            yield f"{name} is {_short(other)}, plain {_short(value)}"


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, tuple):
        return isinstance(other, tuple) and all(np.array_equal(a, b) for a, b in zip(value, other, strict=True))
    return type(value) is type(other) and bool(value == other)


def _short(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, Tensor) else value)
    return text if len(text) < 60 else f"{text[:56]} ..."


class _ignored:
    """A model that has been refused in the middle of a step may refuse to be unwrapped."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, Refused | ValueError)
