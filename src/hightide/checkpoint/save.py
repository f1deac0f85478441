"""`hightide.save`: a checkpoint of a model and its optimizer, written beside training.

[Note: what belongs to a save] Everything small is taken at the moment of the call: buffers, options of groups, counters,
random numbers, the plan, `extra`. Values of parameters and states are those after the last `step()`, whatever training
does meanwhile: a run's snapshot hands them out in a thread of its own, which writes them to two streams of files, of the
model and of the optimizer. Gradients are no part of it: a save between backward and step() has the values of before.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hightide.checkpoint.fitting import OPTIMIZER, StateKey
from hightide.checkpoint.keeping import check_keeping, keep_only
from hightide.checkpoint.load import pair_of
from hightide.checkpoint.names import check_step, step_name
from hightide.checkpoint.plain_values import PlainValues
from hightide.checkpoint.shards import ModelShards, Shards
from hightide.checkpoint.tensor_layout import Entry
from hightide.checkpoint.training import PLAN, TENSORS, TRAINING, Training, taken, to_files
from hightide.checkpoint.writer import CheckpointWriter
from hightide.integrations.model_files import ModelFiles, Named, model_files, tensors_of
from hightide.ir import codec
from hightide.ir.foreign import shown
from hightide.ir.plan import Plan
from hightide.ir.refusal import Refused
from hightide.ir.units import format_bytes
from hightide.optim.optimizer import WrappedOptimizer
from hightide.process.forks import Birthplace
from hightide.process.interrupts import deferred
from hightide.runtime.lanes.lanes import background
from hightide.runtime.run import Run
from hightide.runtime.saving.saved_tensor import PARAM, SaveCost, SavedTensor

THREAD = "hightide-save"  # writes a checkpoint while training goes on
IDLE_S = 120.0  # a process that ends waits for a save that is under way, unless nothing is written for so long
LOOK_S = 0.1


class Values(Protocol):
    tensors: tuple[SavedTensor, ...]

    @property
    def cost(self) -> SaveCost: ...

    def values(self) -> Any: ...

    def close(self) -> None: ...


class Saving:
    """A checkpoint that is being written, or was."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step  # where it is, once it is done
        self.num_bytes = 0  # written so far
        self.seconds = 0.0  # that it took
        self.error: BaseException | None = None
        self._cost: Callable[[], SaveCost] = SaveCost
        self._done = threading.Event()
        self._birthplace = Birthplace()
        self.is_abandoned = False

    @property
    def done(self) -> bool:
        """Whether it was written or has failed."""
        return self._done.is_set()

    @property
    def waited_s(self) -> float:
        """That training has waited for it, so far."""
        return self._cost().waited_s

    @property
    def copied_bytes(self) -> int:
        """That went to free host memory first."""
        return self._cost().copied_bytes

    def wait(self, timeout_s: float | None = None) -> Path:
        """Until it is on the disk. Raises what went wrong, or TimeoutError."""
        self._birthplace.check()
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._done.wait(min(LOOK_S, max(0.0, deadline_s - time.monotonic()))):
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"{shown(self.path)} is still being written after {timeout_s:g} s")
        if self.error is not None:
            raise self.error
        return self.path

    def abandon(self) -> None:
        """Gives it up: what was written is removed, and nobody waits for it, not at the end of the process either."""
        self.is_abandoned = True

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "done" if self.done else "being written"
        return f"Saving({str(self.path)!r}, {state})"


class Abandoned(Exception):
    """By the user: no failure."""


_latest: weakref.WeakKeyDictionary[nn.Module, Saving] = weakref.WeakKeyDictionary()
_under_way: set[Saving] = set()


def save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    extra: Any = None,
    wait: bool = False,
    keep: int | None = None,
    keep_every: int | None = None,
    on_error: str = "warn",
    busy: str = "wait",
) -> Saving:
    """Writes `folder/step-N`: the model as its library would, states, options and counters of the optimizer by the names
    of parameters, random numbers, the plan, and `extra` (what schedulers, scalers and dataloaders give as state_dict()).

    Returns at once, and training goes on: the checkpoint has the values of this moment. With `wait`, and for a pair that
    is not wrapped, it is there when this returns. `step`: by default the optimizer's count of updates. `keep`: so many
    of the newest checkpoints stay, and every `keep_every`-th step. `on_error`: "warn", or "raise" at the end of the next
    step() or at the next save. `busy`: while another save of this model runs, "wait" for it or "refuse".

    A model with adapters of PEFT is saved as they are: frozen parameters are not written, all that train are. Gradients
    are not saved: call this after step().
    """
    _check(on_error, ("warn", "raise"), "on_error")
    _check(busy, ("wait", "refuse"), "busy")
    check_keeping(keep, keep_every)
    run = pair_of(model, optimizer)
    with deferred:
        _await(_latest.get(model), busy)
        if isinstance(optimizer, WrappedOptimizer):
            optimizer.updates.refuse_if_issued("a checkpoint is saved")
        job = _taken(model, optimizer, run, Path(folder), step, extra)
        job.keep, job.keep_every, job.warns = keep, keep_every, on_error == "warn"
        saving = _latest[model] = job.saving
        if run is None:
            job.perform()
        else:
            _begin(job)
            if on_error == "raise" and optimizer is not None:
                _raise_after_step(optimizer, saving)
    if wait or run is None:
        _raise_or_pass(saving, job.warns)
    return saving


def _check(value: str, known: tuple[str, ...], name: str) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r}; use {' or '.join(map(repr, known))}")


def _await(before: Saving | None, busy: str) -> None:
    """One save of a model at a time: what the plan leaves free is for one."""
    if before is None:
        return
    if not before.done and busy == "refuse":
        raise Refused(f"{shown(before.path)} is still being written; save later, or with busy='wait'")
    while not before._done.wait(LOOK_S):
        pass
    if before.error is not None and before.raises:
        before.raises = False
        raise before.error


# -- what is taken at the call ---------------------------------------------------------------------------------------


def _taken(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    run: Run | None,
    folder: Path,
    step: int | None,
    extra: Any,
) -> _Job:
    if run is not None:
        run.check_values()
    training = taken(model, optimizer, run, 0, extra)
    number = _step(step, training)
    training = Training(**{**vars(training), "step": number})
    grouped = [] if training.optimizer is None else [name for group in training.optimizer.groups for name in group.params]
    files = model_files(model, grouped)
    params = dict(model.named_parameters())
    written = {name for one in files.written for name in one.sources}
    tensors = tensors_of(model)
    buffers = {name: tensors[name].detach().to("cpu", copy=True).contiguous() for name in written - params.keys()}

    def wanted(key: str, kind: str) -> bool:
        return key in written if kind == PARAM else optimizer is not None

    facts = {
        "parameters": sum(param.numel() for param in params.values()),
        "trained": sum(params[name].numel() for name in set(grouped) if name in params),
        "left_out": len(files.left_out),
        "loss": _loss(extra),
        "plan": None if run is None else _described(run.plan),
    }
    small = dict(files.small)
    text, kept = to_files(training)
    small[TRAINING] = text
    if run is not None:
        small[PLAN] = (codec.to_json(run.plan) + "\n").encode()
    values: Values = PlainValues(model, optimizer, wanted) if run is None else run.snapshot(wanted)
    return _Job(Saving(folder / step_name(number), number), values, files, buffers, small, kept, facts)


def _step(step: int | None, training: Training) -> int:
    if step is None:
        its = training.optimizer
        if its is None or not its.counts or not its.updates:
            raise ValueError("this optimizer does not count its updates, or has had none; say which step this is: step=")
        step = max(its.updates.values())
    check_step(step)
    return step


def _loss(extra: Any) -> float | None:
    loss = extra.get("loss") if isinstance(extra, Mapping) else None
    is_number = isinstance(loss, int | float) and not isinstance(loss, bool)
    return float(loss) if is_number and math.isfinite(loss) else None  # type: ignore[arg-type]


def _described(plan: Plan) -> str:
    disk = f", {format_bytes(plan.disk_limit_bytes)} disk" if plan.uses_disk else ""
    limits = f"{format_bytes(plan.gpu_limit_bytes)} GPU, {format_bytes(plan.host_limit_bytes)} host{disk}"
    return f"{limits}, micro-batch {plan.micro_batch}, {plan.update.value}"


# -- the work --------------------------------------------------------------------------------------------------------


@dataclass
class _Job:
    saving: Saving
    values: Values
    files: ModelFiles
    buffers: Mapping[str, Tensor]
    small: dict[str, bytes]
    kept: Mapping[str, Tensor]  # those of the training's state
    facts: dict[str, Any]
    keep: int | None = None
    keep_every: int | None = None
    warns: bool = True

    def perform(self) -> None:
        saving, began_s = self.saving, time.perf_counter()
        saving._cost = lambda: self.values.cost
        try:
            self._write()
            keep_only(saving.path.parent, self.keep, self.keep_every, saving.step)
        except BaseException as error:
            saving.error = error
        finally:
            self.values.close()
            cost = self.values.cost
            saving._cost = lambda: cost
            saving.seconds = time.perf_counter() - began_s
            saving._done.set()

    def _write(self) -> None:
        tensors = self.values.tensors
        states = [Entry(str(StateKey(one.key, one.kind)), one.dtype, one.shape) for one in tensors if one.kind != PARAM]
        order = [Named(name, value.dtype, tuple(value.shape)) for name, value in self.buffers.items()]
        order += [Named(one.key, one.dtype, one.shape) for one in tensors if one.kind == PARAM]
        expected_bytes = sum(entry.num_bytes for entry in states) + sum(Entry(*one).num_bytes for one in order)
        with CheckpointWriter(self.saving.path.parent, self.saving.step, expected_bytes) as writer:
            for name, content in self.small.items():
                writer.bytes(name, content)
            _write_whole(writer, TENSORS, self.kept)
            model, optimizer = ModelShards(writer, self.files.written, order), Shards(writer, OPTIMIZER, states)
            for name, value in self.buffers.items():
                model.put(name, value.view(-1))
            for tensor, part in self.values.values():
                if self.saving.is_abandoned:
                    raise Abandoned(f"{self.saving.path} was given up")
                if tensor.kind == PARAM:
                    model.put(tensor.key, part)
                else:
                    optimizer.put(str(StateKey(tensor.key, tensor.kind)), part)
                self.saving.num_bytes += part.nbytes
            for name, content in model.finish(self.files.num_parameters).items():
                writer.bytes(name, content)
            optimizer.finish()
            writer.commit(self.facts)


def _write_whole(writer: CheckpointWriter, name: str, tensors: Mapping[str, Tensor]) -> None:
    shards = sorted(tensors.items(), key=lambda one: -one[1].dtype.itemsize)  # each at a multiple of its size
    file = writer.tensors(name, [Entry(key, value.dtype, tuple(value.shape)) for key, value in shards])
    for _, value in shards:
        file.put(value.contiguous().view(-1))
