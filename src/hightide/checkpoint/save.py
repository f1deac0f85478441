"""`hightide.save`: a checkpoint of a model and its optimizer, written beside training.

[Note: what belongs to a save] All that is small is taken at the moment of the call: buffers, options of groups,
counters, random numbers, the plan, `extra`. Values of parameters and states are those after the last step(), whatever
training does meanwhile: a run's snapshot hands them out in a thread of its own, which writes them to two streams of
files, of the model and of the optimizer. Gradients are no part of it: a save between backward and step() has the values
of before. Where updates run in backward there is no such moment between the two, and the save is refused.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hightide.checkpoint.files.keeping import check_keeping
from hightide.checkpoint.files.names import check_step, step_name, trainer_name
from hightide.checkpoint.load import pair_of
from hightide.checkpoint.ranked_training import Prepared, own_state, prepared_by_all
from hightide.checkpoint.saving import OnError, Saving, await_turn
from hightide.checkpoint.shared_content import SharedContent
from hightide.checkpoint.training import STEP, TRAINING, OfRank, Training, is_value, names_of, taken, to_files
from hightide.checkpoint.writing import CheckpointContent, SavedValues
from hightide.integrations.model_files import model_files, tensors_of
from hightide.ir.foreign import user_path
from hightide.ir.plan import Plan, Update
from hightide.ir.refusal import Refused
from hightide.ir.units import format_bytes
from hightide.optim.optimizer import WrappedOptimizer
from hightide.process.interrupts import deferred
from hightide.runtime.run import Run
from hightide.runtime.saving.tiles import PARAM, SaveCost, SavedTensor, Wanted
from hightide.shard.collectives import Collectives

PART_BYTES = 16 * 1024**2  # of plain values, handed out at once
BESIDE_A_STEP = (
    "another thread makes a step while the values for a checkpoint are taken: call hightide.save in the thread that "
    "trains, after step(). It is written beside training anyway"
)

_latest: weakref.WeakKeyDictionary[nn.Module, Saving] = weakref.WeakKeyDictionary()


def save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    extra: Any = None,
    rank_extra: Any = None,
    wait: bool = False,
    keep: int | None = None,
    keep_every: int | None = None,
    on_error: str = "warn",
    busy: str = "wait",
) -> Saving:
    """Writes `folder/step-N`: the model as its library would, states, options and counters of the optimizer by the
    names of parameters, random numbers, the plan, and `extra` (what schedulers, scalers and dataloaders give as
    state_dict()).

    Returns at once, and training goes on: the checkpoint has the values of this moment. With `wait`, and for a pair
    that is not wrapped, it is there when this returns. `step`: by default the optimizer's count of updates; one that is
    there already is replaced. `keep`: so many of the newest checkpoints stay, and every `keep_every`-th step.
    `on_error`: "warn", or "raise" at the end of the next step() or at the next save, or "hold": what is returned tells
    whoever asks. `busy`: while another save of this model runs, "wait" for it or "refuse".

    A model with adapters of PEFT is saved as they are: frozen parameters are not written, all that train are. Gradients
    are not saved: call this after step().

    Of several ranks all call it, and write one folder together, which all must see; it fails on all or on none. `extra`
    and buffers are those of the first rank; `rank_extra` is each rank's own (where its loader stands).
    """
    _check("on_error", on_error, tuple(OnError))
    _check("busy", busy, ("wait", "refuse"))
    check_keeping(keep, keep_every)
    form = _Form(step_name, {}, keep, keep_every)
    return _saved(model, optimizer, user_path(folder), form, step, extra, rank_extra, wait, OnError(on_error), busy)


def save_for_trainer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    folder: str | os.PathLike[str],
    step: int,
    files: Mapping[str, bytes],
    extra: Any,
    wait: bool,
) -> Saving:
    """As `folder/checkpoint-N`, with small files of the caller's own, and `extra` as of `save`. What goes wrong is
    raised at the next step() or save."""
    form = _Form(trainer_name, files, None, None)
    return _saved(model, optimizer, user_path(folder), form, step, extra, None, wait, OnError.RAISE, "wait")


@dataclass(frozen=True)
class _Form:
    """What a folder is called and has beside values, and which others stay."""

    name: Callable[[int], str]
    files: Mapping[str, bytes]
    keep: int | None
    keep_every: int | None


def _saved(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    folder: Path,
    form: _Form,
    step: int | None,
    extra: Any,
    rank_extra: Any,
    wait: bool,
    on_error: OnError,
    busy: str,
) -> Saving:
    run = pair_of(model, optimizer)
    between = None if run is None else run.between
    with deferred, torch.device("cpu"):  # whatever device is the default

        def prepare() -> Prepared:
            await_turn(_latest.get(model), refuses=busy == "refuse")
            its_extra = extra if between is None or between.is_first else None
            return _prepared(model, optimizer, run, folder, step, its_extra, on_error, form)

        if run is None or between is None:
            found, failure = prepare(), ""
            if rank_extra is not None:
                found = _with_ranks(found, [own_state(run, rank_extra)])
        else:
            found, states, failure = prepared_by_all(between.collectives, run, rank_extra, prepare)
            found = _with_ranks(found, states if between.is_first else [], between.collectives)
        saving, content = found.saving, found.content
        if found.failure is not None or failure:
            if content is not None:
                content.values.close()
            saving.perform(partial(_raise, found.failure or OSError(failure)))
        else:
            assert content is not None
            _begin(saving, content, run, optimizer)
        _latest[model] = saving
    if wait or run is None or saving.done:
        saving.join()
        saving.raise_if_failed()
    return saving


def _prepared(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    run: Run | None,
    folder: Path,
    step: int | None,
    extra: Any,
    on_error: OnError,
    form: _Form,
) -> Prepared:
    if run is not None:
        run.check_values()
    moment = _moment(run)
    if isinstance(optimizer, WrappedOptimizer):
        optimizer.updates.refuse_if_issued("a checkpoint is saved")
    training = taken(model, optimizer, run, extra)
    training = replace(training, step=_step(step, training))
    path, told = folder.absolute() / form.name(training.step), None if run is None else run.save_forecast
    saving = Saving(path, training.step, on_error, told)
    try:
        content = _content(model, optimizer, run, training, form)
    except OSError as error:  # small files are made in the system's folder for them, whose disk may be full too
        return Prepared(saving, training, None, error)
    if _moment(run) != moment:
        content.values.close()
        raise Refused(BESIDE_A_STEP)
    return Prepared(saving, training, content)


def _with_ranks(found: Prepared, ranks: Sequence[OfRank], collectives: Collectives | None = None) -> Prepared:
    """Also what each rank has of its own; and with `collectives` the ranks write it together."""
    content = found.content
    if content is None:
        return found
    if ranks:
        text, kept = to_files(replace(found.training, ranks=tuple(ranks)))
        content = replace(content, small={**content.small, TRAINING: text}, training=kept)
    if collectives is not None:
        told = {one.name: getattr(content, one.name) for one in fields(content)}
        content = SharedContent(**told, collectives=collectives)
    return replace(found, content=content)


def _moment(run: Run | None) -> tuple[int, bool]:
    """Values belong to one, and so does all that is taken with them."""
    updates = None if run is None else run.performer.updating.updates
    if run is None or updates is None:
        return 0, False
    number, is_issuing = updates.moment
    if is_issuing and run.plan.update is Update.DEFERRED:
        raise Refused(BESIDE_A_STEP)
    return number, is_issuing


def _begin(
    saving: Saving, content: CheckpointContent, run: Run | None, optimizer: torch.optim.Optimizer | None
) -> None:
    if run is None:
        saving.perform(content.write)
        if saving.error is not None and not isinstance(saving.error, Exception):
            raise saving.error  # Ctrl-C
        return
    try:
        saving.perform_beside(content.write)
    except BaseException:
        content.values.close()
        raise
    if run.between is not None:
        run.save_under_way = saving.join  # it needs the other ranks up to its end
    if saving.on_error is OnError.RAISE and optimizer is not None:
        saving.raise_after_step(optimizer)


def _raise(error: Exception, _: Saving) -> None:
    raise error


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r}; use {' or '.join(repr(str(one)) for one in known)}")


def _step(step: int | None, training: Training) -> int:
    if step is None:
        its = training.optimizer
        if its is None or not its.counts or not its.updates:
            raise ValueError(
                "the optimizer does not count its updates, or has made none; say which step this is: step="
            )
        step = max(its.updates.values())
    check_step(step)
    return step


def _content(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    run: Run | None,
    training: Training,
    form: _Form,
) -> CheckpointContent:
    its = training.optimizer
    grouped = {} if its is None else {name: None for group in its.groups for name in group.params}
    files = model_files(model, [] if its is None else list(its.updates))
    params, tensors = dict(model.named_parameters()), tensors_of(model)
    written = {name for one in files.written for name in one.sources}
    buffers = {
        name: tensor.detach().to("cpu", copy=True).resolve_conj().resolve_neg().contiguous()
        for name, tensor in tensors.items()
        if name in written and name not in params
    }
    text, kept = to_files(training)
    facts = {
        "parameters": sum(param.numel() for param in params.values()),
        "trained": sum(params[name].numel() for name in grouped if params[name].requires_grad),
        "left_out": len(files.left_out),
        "loss": _loss(training.extra),
        "plan": None if run is None else _described(run.plan),
    }

    def wanted(key: str, kind: str) -> bool:
        return key in written if kind == PARAM else optimizer is not None

    values: SavedValues = PlainValues(model, optimizer, wanted) if run is None else run.snapshot(wanted)
    plan = None if run is None else run.plan
    small = {**form.files, **files.small, TRAINING: text}
    return CheckpointContent(model, values, files, buffers, small, plan, kept, facts, form.keep, form.keep_every)


def _loss(extra: Any) -> float | None:
    loss = extra.get("loss") if isinstance(extra, Mapping) else None
    if isinstance(loss, bool) or not isinstance(loss, int | float) or not math.isfinite(loss):
        return None
    return float(loss)


def _described(plan: Plan) -> str:
    disk = f", {format_bytes(plan.disk_limit_bytes)} disk" if plan.uses_disk else ""
    limits = f"{format_bytes(plan.gpu_limit_bytes)} GPU, {format_bytes(plan.host_limit_bytes)} host{disk}"
    return f"{limits}, micro-batch {plan.micro_batch}, {plan.update.value}"


class PlainValues:
    """Of a plain PyTorch pair, handed out as by a run's snapshot. Nobody watches its updates: it is read at once."""

    cost = SaveCost()
    lend = None  # no limit counts here

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, wanted: Wanted) -> None:
        names = names_of(model)
        found = [(name, PARAM, param.data) for name, param in model.named_parameters()]
        for param, state in ({} if optimizer is None else optimizer.state).items():
            if id(param) in names:
                found += [
                    (names[id(param)], kind, value)
                    for kind, value in state.items()
                    if kind != STEP and is_value(param, value)
                ]
        self._found = [
            (SavedTensor(key, kind, value.dtype, tuple(value.shape)), value)
            for key, kind, value in found
            if wanted(key, kind)
        ]
        self.tensors = tuple(tensor for tensor, _ in self._found)

    def tiles(self) -> Iterator[tuple[Sequence[tuple[SavedTensor, int, Tensor]], Callable[[], object]]]:
        for tensor, value in self._found:
            flat, first = value.detach().resolve_conj().resolve_neg().contiguous().view(-1), 0
            for part in flat.split(max(1, PART_BYTES // value.dtype.itemsize)) or (flat,):
                yield [(tensor, first, part.cpu())], lambda: None
                first += len(part)

    def close(self) -> None:
        self._found = []
