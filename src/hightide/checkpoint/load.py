"""`hightide.load`: a checkpoint into a model and its optimizer, wherever their values live.

[Note: a load that fails] Names, shapes, dtypes, groups and options are compared before anything changes. Values are
read once, from front to back, and each piece is checked before a byte of it is used; a second read of all files, only
to know beforehand that they are whole, would take as long as the load. So what fails in the middle (a damaged file, a
disk, Ctrl-C) leaves a wrapped model with some values of before and some of the checkpoint: it then refuses to train and
to be saved until a whole checkpoint has been loaded. A plain model refuses nothing, so all files are read for it first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hightide.checkpoint.choosing import chosen
from hightide.checkpoint.files import folder as folders
from hightide.checkpoint.files.checked import DamagedFile, Needed, all_of, verified_parts
from hightide.checkpoint.files.folder import GoneCheckpoint, held
from hightide.checkpoint.fitting import OPTIMIZER, Checkpoint, StateKey, Targets, check_optimizer, targets_of
from hightide.checkpoint.places import Places, PlainPlaces, RunPlaces
from hightide.checkpoint.ranked_training import set_own_state
from hightide.checkpoint.state_dicts import as_state_dict, load_torch_file, state_of
from hightide.checkpoint.training import STEP, Group, OptimizerState, optimizer_state
from hightide.integrations.model_files import MODEL, TRAINED, tensors_of
from hightide.ir.foreign import kind_of, shown, user_path
from hightide.loading.tensor_file import StoredTensor
from hightide.optim.optimizer import WrappedOptimizer
from hightide.process.interrupts import deferred, safe_point
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of
from hightide.shard.agreement import of_each
from hightide.shard.collectives import Collectives

TRIES = 5  # of a folder in which checkpoints come and go


@dataclass(frozen=True)
class Loaded:
    step: int | None  # None: a file of torch.save that does not say
    extra: Any  # what was given to `save`; of a file of torch.save: what it has beside the state dicts
    path: Path
    rank_extra: Any = None  # what this rank has told as its own, if as many ranks have saved
    rank_extras: tuple[Any, ...] = ()  # what each rank has, however many there were


def load(model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: str | Path) -> Loaded:
    """Values, states, options of groups and random numbers of a checkpoint, into a pair that `hightide.wrap` returned,
    under any plan, or into a plain one.

    `folder`: of checkpoints (the newest whole one is taken), or one of them (`folder/step-N`), or a file in which
    torch.save has put state dicts. `optimizer=None` loads the weights alone: an optimizer that is there keeps its
    states, a fresh one begins with the weights. Schedulers, scalers and dataloaders get theirs from `.extra`.
    """
    run, path = pair_of(model, optimizer), user_path(folder)
    if path.is_file():
        rest = load_torch_file(model, optimizer, path)
        step = rest.get("step")
        return Loaded(step if type(step) is int else None, rest, path)
    if run is not None and run.between is not None:
        return _loaded(model, optimizer, run, path, run.between.collectives)
    for left in reversed(range(TRIES)):
        one = chosen(path)
        try:
            return _loaded(model, optimizer, run, one)
        except GoneCheckpoint:  # another process saves into this folder
            if one == path or not left:
                raise
    raise AssertionError("the last one returns or raises")


def _loaded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    run: Run | None,
    path: Path,
    collectives: Collectives | None = None,
) -> Loaded:
    """`path`: a checkpoint; with `collectives` what the user has named, from which the first rank chooses."""
    with ExitStack() as stack, deferred, torch.no_grad(), torch.device("cpu"):  # whatever device is the default

        def opened(of: Path) -> tuple[Checkpoint, Targets]:
            stack.enter_context(held(of))
            checkpoint = Checkpoint.open(of)
            targets = targets_of(model, run, checkpoint)
            if optimizer is not None:
                check_optimizer(model, optimizer, run, checkpoint)
            return checkpoint, targets

        if collectives is None:
            checkpoint, targets = opened(path)
        else:
            checkpoint, targets = _opened_by_all(collectives, path, opened)
        try:
            if run is None:
                _fill_plain(model, optimizer, checkpoint, targets)
            else:
                _fill_run(run, optimizer, checkpoint, targets)
        except DamagedFile as error:
            raise folders.refusal(checkpoint.path, str(error)) from error
        training = checkpoint.training
        for name, state in training.state.items():
            model.get_submodule(name).set_extra_state(state)
        rank, world = (0, 1) if collectives is None else (collectives.ranks.rank, collectives.ranks.world)
        own = set_own_state(training, run, rank, world)
    extras = tuple(one.extra for one in training.ranks)
    return Loaded(training.step, training.extra, checkpoint.path, own, extras)


def _opened_by_all(
    collectives: Collectives, path: Path, opened: Callable[[Path], tuple[Checkpoint, Targets]]
) -> tuple[Checkpoint, Targets]:
    """The one that the first rank chooses. It fits on all ranks, or all refuse it and nothing has changed."""
    is_first = collectives.ranks.rank == 0
    name, *_ = of_each(
        collectives, "choosing a checkpoint", lambda: str(chosen(path).absolute()).encode() if is_first else b""
    )
    found: list[tuple[Checkpoint, Targets]] = []

    def open_it() -> bytes:
        found.append(opened(Path(name.decode())))
        return hashlib.sha256(found[0][0].manifest.to_bytes()).digest()

    if len(set(of_each(collectives, "opening a checkpoint", open_it))) > 1:
        raise ValueError(
            f"{shown(name.decode())} is not the same checkpoint on all ranks: name one that all of them see"
        )
    return found[0]


def pair_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Run | None:
    """The run of a wrapped pair; None for a plain one. ValueError for anything else."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {kind_of(model)}; pass a torch.nn.Module")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer is {kind_of(optimizer)}; pass a torch.optim.Optimizer, or None")
    run = run_of(model)
    if run is not None and run.model is not model:
        raise ValueError("this is a part of a wrapped model; pass the model that hightide.wrap returned")
    if optimizer is not None:
        home = optimizer._home if isinstance(optimizer, WrappedOptimizer) else None
        if home is not run:
            raise ValueError("model and optimizer do not belong together; pass both as hightide.wrap returned them")
    if run is None and any(param.is_meta for param in model.parameters()):
        raise ValueError("the model has parameters without values (on the meta device); wrap it first, then load")
    return run


# -- wrapped ---------------------------------------------------------------------------------------------------------


def _fill_run(run: Run, optimizer: torch.optim.Optimizer | None, checkpoint: Checkpoint, targets: Targets) -> None:
    with run.rewriting() as chunks:
        if run.between is None:
            _fill_chunks(run, chunks, optimizer, checkpoint, targets)
            return

        def fill() -> bytes:
            _fill_chunks(run, chunks, optimizer, checkpoint, targets)
            return b""

        of_each(run.between.collectives, "loading a checkpoint", fill)  # if it fails on one rank, all are half loaded


def _fill_chunks(
    run: Run, chunks: Chunks, optimizer: torch.optim.Optimizer | None, checkpoint: Checkpoint, targets: Targets
) -> None:
    saved = checkpoint.training.optimizer
    others: dict[str, dict[str, Any]] = {}
    thawed: dict[str, dict[str, Tensor]] = {}
    if optimizer is not None:
        assert isinstance(optimizer, WrappedOptimizer) and saved is not None
        counts, beside, thawed = _divided(run, optimizer, saved)
        optimizer.renew([group.options for group in saved.groups], counts, beside)
        others = optimizer.others
    places = RunPlaces(chunks, others, _shapes(checkpoint))
    _fill_values(run.model, places, checkpoint, targets)
    if optimizer is not None:
        _fill_states(places, checkpoint)
    for key, state in thawed.items():
        for name, value in state.items():
            places.state(key, name, 0, value.reshape(-1))


def _divided(
    run: Run, optimizer: WrappedOptimizer, saved: OptimizerState
) -> tuple[dict[str, int], dict[str, dict[str, Any]], dict[str, dict[str, Tensor]]]:
    """Counts of updates, what lies beside states, and states that lay there: a parameter that is frozen when a model is
    wrapped has no room for its states. They and their count lie beside, until it trains again."""
    own = {spec.name for spec in optimizer.rule.states}
    counts, thawed = dict(saved.updates), {}
    beside: dict[str, dict[str, Any]] = {}
    for name, state in saved.others.items():
        has_room = run.chunks.has_room(name)
        if has_room and name not in counts and own and own <= state.keys():
            thawed[name] = {key: state[key] for key in own}
            counts[name] = int(state.get(STEP, 1))
        beside[name] = {key: value for key, value in state.items() if not has_room or key not in own | {STEP}}
    for name, count in saved.updates.items():
        if saved.counts and not run.chunks.has_room(name):
            beside.setdefault(name, {})[STEP] = torch.tensor(float(count))
    return counts, {name: state for name, state in beside.items() if state}, thawed


def _shapes(checkpoint: Checkpoint) -> dict[str, dict[str, tuple[int, ...]]]:
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, tensor in checkpoint.states.items():
        shapes.setdefault(key.param, {})[key.name] = tensor.shape
    return shapes


# -- plain -----------------------------------------------------------------------------------------------------------


def _fill_plain(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, checkpoint: Checkpoint, targets: Targets
) -> None:
    folders.verify(checkpoint.path)
    places = PlainPlaces(dict(model.named_parameters()), _shapes(checkpoint))
    _fill_values(model, places, checkpoint, targets)
    _fill_states(places, checkpoint)  # what they know of masters belongs to the values
    saved = checkpoint.training.optimizer
    if optimizer is not None:
        assert saved is not None
        here = optimizer_state(model, optimizer)
        groups = [
            Group(ours.params, {**ours.options, **its.options})
            for ours, its in zip(here.groups, saved.groups, strict=True)
        ]
        optimizer.load_state_dict(as_state_dict(saved, groups, places.states))
        grouped = {name for group in groups for name in group.params}
        for name, param in model.named_parameters():  # torch's state dicts have no states of those in no group
            if name not in grouped and (state := state_of(saved, name, places.states)) is not None:
                optimizer.state[param] = {
                    key: value.to(param.device) if isinstance(value, Tensor) and value.ndim else value
                    for key, value in state.items()
                }


# -- both ------------------------------------------------------------------------------------------------------------


def _fill_values(model: nn.Module, places: Places, checkpoint: Checkpoint, targets: Targets) -> None:
    tensors = tensors_of(model)
    buffers = PlainPlaces({name: one for name, one in tensors.items() if not isinstance(one, nn.Parameter)}, {})

    def put(name: str, start: int, part: Tensor) -> None:
        (places if isinstance(tensors[name], nn.Parameter) else buffers).value(name, start, part)

    def needed(stem: str, stored: StoredTensor) -> range:
        name = targets.direct.get((stem, stored.name))
        if targets.converted or name is None or not isinstance(tensors[name], nn.Parameter):
            return all_of(stored)
        return places.needed_of_value(name)

    for stem in (MODEL, *checkpoint.adapters, TRAINED):
        for stored, start, part in _parts(checkpoint, stem, partial(needed, stem)):
            if (stem, stored.name) in targets.direct:
                put(targets.direct[stem, stored.name], start, part)
    for name, origin in targets.converted.items():  # their files have been read, and are whole
        safe_point()
        whole = torch.empty(tensors[name].shape, dtype=tensors[name].dtype)
        origin.fill(whole)
        put(name, 0, whole.view(-1))


def _fill_states(places: Places, checkpoint: Checkpoint) -> None:
    def needed(stored: StoredTensor) -> range:
        return places.needed_of_state(*StateKey.parse(stored.name))

    for stored, start, part in _parts(checkpoint, OPTIMIZER, needed):
        places.state(*StateKey.parse(stored.name), start, part)


def _parts(checkpoint: Checkpoint, stem: str, needed: Needed) -> Iterator[tuple[StoredTensor, int, Tensor]]:
    for shard in checkpoint.shards.get(stem, ()):
        for found in verified_parts(checkpoint.path, checkpoint.manifest, shard.file.name, shard.tensors, needed):
            safe_point()
            yield found
