"""The runs of one verification: a model plain, and in hightide in up to three ways, each held against the plain one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hightide import api
from hightide.ir.activation import Activation
from hightide.ir.limits import Limits
from hightide.ir.plan import Plan
from hightide.ir.refusal import Refused
from hightide.ir.tier import Tier
from hightide.ir.units import counted
from hightide.loading.first_values import first_values
from hightide.loading.initial import lacks_values
from hightide.optim.registry import rule_for
from hightide.planner.infeasible import InfeasiblePlan
from hightide.process.interrupts import in_a_line
from hightide.process.progress import tell
from hightide.profiler.model.call_tree import Arguments, flatten_call
from hightide.profiler.model.samples import samples_along_first
from hightide.verification.copies import (
    HALF,
    copied_model,
    copied_optimizer,
    hooked_parameters,
    nudge,
    seed_all,
    steady,
    twins_of,
)
from hightide.verification.observed_training import (
    OF_GRADIENT,
    Loop,
    LossOf,
    ObservedTraining,
    call,
    changed_batch,
    dense,
    recorded_warnings,
    train,
    values_of,
)
from hightide.verification.randomness import drawing_blocks, switch_off
from hightide.verification.smaller import MemoryBudget, SmallerTask, TooLarge, fitted
from hightide.verification.tolerances import Comparison, Reference
from hightide.verification.verdict import ComparedRow, few

MUCH_BYTES = 2**28  # of parameters: to look for garbage takes as long as to train a small model
OWN_ERROR = "raised by the plain model, in PyTorch alone: hightide has no part in it"


@dataclass(frozen=True)
class _Case:
    """One way to train it in hightide."""

    micro_batch: int | None  # None: the plan decides
    streams: bool  # everything that can move does; else as the user's limits have it
    asks_more: str = ""  # why it may need more than what the user will train


class NotTrained(Exception):
    """hightide refuses the model."""


@dataclass
class SideBySide:
    """Options are those of `wrap`; `shared` has those that are passed on as they are."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Arguments
    loss: LossOf
    steps: int
    limits: Limits | None
    micro_batch: int | None
    device: torch.device
    shared: dict[str, Any]
    # What is found, as in Verdict.
    rows: list[ComparedRow] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    unsplit: list[tuple[str, str]] = field(default_factory=list)
    refusal: str = ""
    failure: str = ""

    def prepare(self, room: MemoryBudget) -> None:
        with _refusals(ValueError):
            rule_for(self.optimizer)
            first_values(self.model)
            tell("profiling the model")
            blocks = self.shared["blocks"]
            task = fitted(self.model, self.optimizer, self.batch, blocks, self.steps, room, self.device)
        self._task = task
        self._hooked = hooked_parameters(self.model)
        self.changed += _changes(task, self._hooked)
        self.unsplit += _unsplit(task)
        example = changed_batch(task.batch, _widened)
        batches = tuple(_rolled(example, step) for step in range(self.steps))
        names = [block.name for block in task.profile.blocks if not block.loose]
        self._loop = Loop(batches, self.loss, tuple(names), _in_backward_order(task))
        self._num_samples = samples_along_first(task.batch)
        self._largest_gradient = 0.0
        self._has_dropout = False

    def run(self, tolerance: float) -> None:
        tell("plain steps")
        self._try_plain()
        size, asked = self._num_samples, self.micro_batch
        several = min(asked, size) if asked is not None else max(1, size // 3)
        drawing, left = self._random_blocks() if size > 1 else ([], [])
        if not left:
            more = "too small for a copy in fp32" if _is_half(self._task.model) else ""
            cases = [_Case(several, streams=True), _Case(asked and several, streams=False, asks_more=more)]
            self._compare(tolerance, cases, with_dropout=not drawing)
        if drawing:
            as_planned = [_Case(size, streams=False, asks_more="too small for one micro-batch")] if left else []
            self._compare(tolerance, [_Case(size, streams=True), *as_planned], with_dropout=True)

    def _copies(self, with_dropout: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = copied_model(self._task.model)
        if not with_dropout:
            switch_off(model)
        optimizer = copied_optimizer(self._task.optimizer, twins_of(self._task.model, model))
        changes = steady(optimizer, self._largest_gradient)
        self.changed += [text for text in changes if text not in self.changed]
        return model, optimizer

    def _plain(self, with_dropout: bool = True, change: Callable[[nn.Module], None] | None = None) -> ObservedTraining:
        model, optimizer = self._copies(with_dropout)
        model.to(self.device)  # the optimizer's references stay good
        if change is not None:
            change(model)
        return ObservedTraining(model, optimizer)

    def _try_plain(self) -> None:
        """One forward and backward: whether it works at all, and how large gradients are."""
        subject = self._plain()
        with _own_errors():
            seed_all(self.device)
            loss = self._loop.loss(call(subject.model, subject.placed(self._loop.batches[0])))
            if not loss.requires_grad:
                raise ValueError("the loss does not depend on any parameter that requires a gradient")
            if not bool(loss.isfinite()):
                raise ValueError(f"the loss is {float(loss)}: nothing can be compared")
            loss.backward()
        gradients = [dense(param.grad) for param in subject.model.parameters() if param.grad is not None]
        largest = [float(gradient.abs().max()) for gradient in gradients if gradient.numel()]
        self._largest_gradient = max(largest, default=0.0)

    def _random_blocks(self) -> tuple[list[str], list[str]]:
        """Those that draw random numbers, and those that do without dropout too."""
        blocks, batch = self._loop.blocks, self._loop.batches[0]
        subject = self._plain()
        drawing = drawing_blocks(subject.model, blocks, subject.placed(batch))
        if not drawing:
            return [], []
        self._has_dropout = True
        switch_off(subject.model)
        left = drawing_blocks(subject.model, blocks, subject.placed(batch))
        text = "dropout switched off, except in the run with one micro-batch: in several, masks differ by design"
        if left:
            text = (
                f"only one micro-batch: {few(left)} draw random numbers that cannot be switched off, and in several "
                "micro-batches these differ by design"
            )
        self.changed.append(text)
        return drawing, left

    def _compare(self, tolerance: float, cases: list[_Case], with_dropout: bool) -> None:
        reference = Reference(tolerance)
        with _own_errors():
            train(self._plain(with_dropout), self._loop, reference.keep)
            self._let_go()
            train(self._plain(with_dropout, nudge), self._loop, reference.feel)
            self._let_go()
        for case in cases:
            if not self.failure:
                self._train_wrapped(case, with_dropout, reference)

    def _train_wrapped(self, case: _Case, with_dropout: bool, reference: Reference) -> None:
        tell("steps in hightide", self._spoken(case))
        with self._failures(), _refusals(ValueError, Refused):
            subject = self._wrapped(case, with_dropout)
        if self.failure or subject is None:
            return
        run = subject.run
        assert run is not None
        num_micro = -(-run.plan.num_samples // run.plan.micro_batch)
        steps = counted(len(self._loop.batches), "step")
        text = f"{steps}, {counted(num_micro, 'micro-batch', 'micro-batches')}, {self._spoken(case)}"
        if self._has_dropout:
            text += ", random as it is" if with_dropout else ", without dropout"
        self.trained.append(text)
        comparison = Comparison(reference, text)
        unread = () if subject.shows_gradients else OF_GRADIENT
        is_complete = False
        try:
            with self._failures(), _refusals(Refused):
                train(subject, self._loop, comparison.note)
                is_complete = True
        finally:
            run.discard()
            self.rows += comparison.rows(unread, is_complete)
            del subject, run
            self._let_go()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Whatever it is: plain PyTorch has run the same without it."""
        try:
            yield
        except NotTrained:
            raise
        except Exception as error:
            self.failure = in_a_line(error)

    def _check_limits(self) -> None:
        """InfeasiblePlan where they are too small for the user's own model too."""
        task, size = self._task, self.micro_batch and min(self.micro_batch, self._num_samples)
        api.plan(task.model, task.optimizer, task.batch, limits=self.limits, micro_batch=size, **self.shared)

    def _let_go(self) -> None:
        """Of what a copy's own cycles of references keep."""
        if sum(param.nbytes for param in self._task.model.parameters()) > MUCH_BYTES:
            gc.collect()

    def _spoken(self, case: _Case) -> str:
        if case.streams:
            return "everything streamed"
        return "as wrap plans it" if self.limits is None else "within your limits"

    def _wrapped(self, case: _Case, with_dropout: bool) -> ObservedTraining | None:
        """None: there is no plan for the user's limits, where verify itself asks for more than the user would."""
        model, optimizer = self._copies(with_dropout)
        for name, param in model.named_parameters():
            if name in self._hooked:
                param.register_hook(lambda gradient: None)  # so that wrap says what it thinks of them
        begin, example = values_of(model), self._loop.batches[0]
        if case.streams:
            made = _all_streamed(api.plan(model, optimizer, example, micro_batch=case.micro_batch, **self.shared))
            return ObservedTraining(*api.wrap(model, optimizer, example, plan=made, **self.shared), begin)
        try:
            limits, size = self.limits, case.micro_batch
            wrapped = api.wrap(model, optimizer, example, limits=limits, micro_batch=size, **self.shared)
        except InfeasiblePlan as error:
            if not case.asks_more:
                raise
            self._check_limits()
            self.changed.append(f"not run within your limits, {case.asks_more}: {error}")
            return None
        return ObservedTraining(*wrapped, begin)


def _all_streamed(plan: Plan) -> Plan:
    """Every block moves, through slots for two of the widest, and is computed again for backward, whatever fits."""
    away: dict[str, Any] = {
        "params": Tier.HOST,
        "states": Tier.HOST,
        "inputs": Tier.HOST,
        "activation": Activation.RECOMPUTE,
    }
    blocks = tuple(replace(block, **away) if block.name else block for block in plan.blocks)
    widest = max(plan.layout.num_slots(chunk) for chunk in plan.layout.chunks)
    plan = replace(plan, loss_kept_tokens=0, loss_in_forward=False)
    return replace(plan, blocks=blocks, num_slots=2 * widest + 1, num_grad_slots=2 * widest + 1)


@contextmanager
def _refusals(*kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except TooLarge:
        raise
    except kinds as error:
        raise NotTrained(str(error)) from error


@contextmanager
def _own_errors() -> Iterator[None]:
    try:
        with recorded_warnings():  # those of plain PyTorch tell nothing about hightide
            yield
    except Exception as error:
        error.add_note(OWN_ERROR)
        raise


def _is_half(model: nn.Module) -> bool:
    return any(param.dtype in HALF for param in model.parameters())


def _changes(task: SmallerTask, hooked: list[str]) -> Iterator[str]:
    yield from task.changed
    if lacks_values(task.model):
        yield "parameters without values were given some, by the model's own initialisers or at random"
    if _is_half(task.model):
        yield "16-bit parameters as fp32: their own rounding would hide errors"
    if hooked:
        yield f"gradient hooks were not run: of {few(hooked)}"


def _unsplit(task: SmallerTask) -> list[tuple[str, str]]:
    names = [block.name for block in task.profile.blocks]
    calls = [(names[call.block], call.note) for call in task.profile.calls if not call.splittable]
    return list(dict.fromkeys(calls))


def _in_backward_order(task: SmallerTask) -> tuple[str, ...]:
    """Backward is through with a parameter when the first block that uses it is. Blocks are in the order of calls."""
    found: dict[str, None] = {}
    for block in sorted(task.profile.blocks, key=lambda block: not block.loose):
        found.update({name: None for name in block.params if name not in found})
    found.update({spec.name: None for spec in task.profile.params if spec.name not in found})
    return tuple(reversed(found))


def _widened(tensor: Tensor) -> Tensor:
    wide = tensor.detach().float() if tensor.dtype in HALF else tensor.detach()
    return wide.requires_grad_(tensor.requires_grad)


def _rolled(batch: Arguments, by: int) -> Arguments:
    """The same samples in another order, so that each is in another micro-batch. What is in a dataclass may have no
    samples: then it is the same batch."""
    size = samples_along_first(batch)
    if flatten_call(batch.args, batch.kwargs)[1].records:
        return batch
    return changed_batch(
        batch, lambda tensor: tensor.roll(by, 0) if tensor.ndim and tensor.shape[0] == size else tensor
    )
