"""Readers of snapshots beside training, and what they must have read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import hightide
import models
from hightide.ir.plan import Plan
from hightide.planner.predict.peaks import peaks
from hightide.planner.solution import Solution
from hightide.runtime.run import Run
from hightide.runtime.saving.snapshot import Snapshot
from hightide.runtime.saving.tiles import PARAM, SavedTensor
from hightide.runtime.surgery import run_of

Values = dict[tuple[str, str], Tensor]  # by parameter and kind
JOIN_S = 60.0


class Reader(threading.Thread):
    """Takes a pause after each part it reads; after `num_parts` of them it waits until it is told to `go_on`."""

    def __init__(self, snapshot: Snapshot, pause_s: float = 0.0, num_parts: int | None = None) -> None:
        super().__init__(name="reader", daemon=True)
        self.snapshot, self.tensors = snapshot, snapshot.tensors
        self.go_on = threading.Event()
        self.num_read = 0
        self.error: BaseException | None = None
        self._pause_s, self._num_parts = pause_s, num_parts
        self._parts: dict[SavedTensor, list[Tensor]] = {}
        self.start()

    def run(self) -> None:
        try:
            for tensor, part in self.snapshot.values():
                assert part.dtype == tensor.dtype and part.ndim == 1 and part.is_contiguous()
                before = part.clone()
                if self.num_read == self._num_parts:
                    assert self.go_on.wait(JOIN_S)
                time.sleep(self._pause_s)
                assert torch.equal(part.view(torch.uint8), before.view(torch.uint8)), "it changed in the reader's hands"
                self._parts.setdefault(tensor, []).append(before)
                self.num_read += 1
        except BaseException as error:
            self.error = error

    def values(self) -> Values:
        self.go_on.set()
        self.join(JOIN_S)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        assert tuple(self._parts) == self.tensors, "in the order that was told"
        assert all(part.numel() or not tensor.num_bytes for tensor, parts in self._parts.items() for part in parts)
        return {(tensor.key, tensor.kind): torch.cat(parts).view(tensor.shape) for tensor, parts in self._parts.items()}


def at_rest(run: Run, has_states: Callable[[str], bool] = lambda key: True) -> Values:
    """All values, read one by one with nothing under way."""
    run.executor.wait_for_updates()
    found: Values = {}
    for key in run.parameters:
        spec = run.chunks.specs[run.chunks.places[key][0]]
        found[key, PARAM] = run.value_of(key)
        if run.chunks.places[key][1].offset_numel < spec.optimised_numel:
            kept = [state for state in spec.states if state not in spec.rule_states or has_states(key)]
            found |= {(key, state.name): run.chunks.state_of(key, state).get() for state in kept}
    return found


def assert_same_bits(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name


def with_spare(plan: Plan, num_bytes: int) -> Plan:
    """With so much host memory beyond what it needs."""
    assert plan.profile is not None
    solution = Solution.of(plan.profile, plan)
    needed = max(peaks(schedule).host_peak_bytes for schedule in solution.schedules.values())
    return replace(plan, host_limit_bytes=max(512, -(-needed // 512) * 512 + num_bytes))


@dataclass
class Case:
    """A training run, always the same: with the same seed, its values after each step are the same bits."""

    make: Callable[[], tuple[nn.Module, Any]]
    edit: Callable[[Plan], Plan]
    options: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.AdamW(
        model.parameters(), lr=1e-2, eps=1e-4
    )
    accumulate: int = 1
    device: str = "cpu"

    def begin(self) -> Training:
        torch.manual_seed(0)
        model, batch = self.make()
        optimizer = self.optimizer(model)
        limits = hightide.Limits(gpu="64MiB" if self.device == "cpu" else "1GiB", host="64MiB")
        promised = {"accumulate": self.accumulate} if self.accumulate > 1 else {}
        options = {"micro_batch": 2, "device": self.device, **promised, **self.options}
        plan = hightide.plan(model, optimizer, batch, limits=limits, **options)
        disks = hightide.Limits(**self.limits)
        wrapped, optimizer = hightide.wrap(
            model, optimizer, batch, plan=self.edit(plan), limits=disks, device=self.device
        )
        return Training(wrapped, optimizer, batch, self.accumulate)


@dataclass
class Training:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    accumulate: int

    @property
    def run(self) -> Run:
        run = run_of(self.model)
        assert run is not None
        return run

    def steps(self, number: int) -> None:
        for _ in range(number):
            for _ in range(self.accumulate):
                models.loss_of(self.model, self.batch).backward()
            self.optimizer.step()
            self.model.zero_grad()

    def at_rest(self) -> Values:
        moments = self.optimizer.updates.moments  # type: ignore[attr-defined]
        return at_rest(self.run, moments.__contains__)

    def close(self) -> None:
        hightide.unwrap(self.model)
