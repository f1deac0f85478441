"""`hightide.load`: a checkpoint into a model and its optimizer, wherever their values live.

[Note: a load that fails] Names, shapes, dtypes, groups and options are compared before anything changes. Values are
read once, from front to back, and each piece is checked before a byte of it is used; a second read of all files, only
to know beforehand that they are whole, would take as long as the load. So what fails in the middle (a damaged file, a
disk, Ctrl-C) leaves a wrapped model with some values of before and some of the checkpoint: it then refuses to train and
to be saved until a whole checkpoint has been loaded. A plain model refuses nothing, so all files are read for it first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hightide.checkpoint.files import folder as folders
from hightide.checkpoint.files.checked import DamagedFile
from hightide.checkpoint.files.verified import verified_parts
from hightide.checkpoint.fitting import OPTIMIZER, Checkpoint, StateKey, Targets, check_optimizer, targets_of
from hightide.checkpoint.generators import set_generator_states
from hightide.checkpoint.places import Places, PlainPlaces, RunPlaces
from hightide.checkpoint.state_dicts import as_state_dict, chosen, load_torch_file
from hightide.checkpoint.training import Group, optimizer_state
from hightide.integrations.model_files import ADAPTER, MODEL, TRAINED, tensors_of
from hightide.loading.tensor_file import StoredTensor
from hightide.optim.optimizer import WrappedOptimizer
from hightide.process.interrupts import deferred, safe_point
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of


@dataclass(frozen=True)
class Loaded:
    step: int | None  # None: a file of torch.save that does not say
    extra: Any  # what was given to `save`; of a file of torch.save: what it has beside the state dicts
    path: Path


def load(model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: str | Path) -> Loaded:
    """Values, states, options of groups and random numbers of a checkpoint, into a pair that `hightide.wrap` returned,
    under any plan, or into a plain one.

    `folder`: of checkpoints (the newest whole one is taken), or one of them (`folder/step-N`), or a file in which
    torch.save has put state dicts. `optimizer=None` loads the weights alone: an optimizer that is there keeps its
    states, a fresh one begins with the weights. Schedulers, scalers and dataloaders get theirs from `.extra`.
    """
    run = pair_of(model, optimizer)
    path = Path(folder)
    if path.is_file():
        rest = load_torch_file(model, optimizer, path)
        step = rest.get("step")
        return Loaded(step if type(step) is int else None, rest, path)
    with deferred, torch.no_grad():
        checkpoint = Checkpoint.open(chosen(path))
        targets = targets_of(model, run, checkpoint)
        if optimizer is not None:
            check_optimizer(model, optimizer, run, checkpoint)
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
        if run is not None:
            run.num_passes = training.passes
        set_generator_states(training.random)
    return Loaded(training.step, training.extra, checkpoint.path)


def pair_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Run | None:
    """The run of a wrapped pair; None for a plain one. ValueError for anything else."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer is a {type(optimizer).__name__}; pass a torch.optim.Optimizer, or None")
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
    saved = checkpoint.training.optimizer
    with run.rewriting() as chunks:
        others: dict[str, dict[str, Any]] = {}
        if optimizer is not None:
            assert isinstance(optimizer, WrappedOptimizer) and saved is not None
            optimizer.renew([group.options for group in saved.groups], saved.updates, saved.others)
            others = optimizer.others
        places = RunPlaces(chunks, others, _shapes(checkpoint))
        _fill_values(run.model, places, checkpoint, targets)
        if optimizer is not None:
            _fill_states(places, checkpoint)


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


# -- both ------------------------------------------------------------------------------------------------------------


def _fill_values(model: nn.Module, places: Places, checkpoint: Checkpoint, targets: Targets) -> None:
    tensors = tensors_of(model)
    buffers = PlainPlaces({name: one for name, one in tensors.items() if not isinstance(one, nn.Parameter)}, {})

    def put(name: str, start: int, part: Tensor) -> None:
        (places if isinstance(tensors[name], nn.Parameter) else buffers).value(name, start, part)

    for stem in (MODEL, ADAPTER, TRAINED):
        for stored, start, part in _parts(checkpoint, stem):
            if (stem, stored.name) in targets.direct:
                put(targets.direct[stem, stored.name], start, part)
    for name, origin in targets.converted.items():  # their files have been read, and are whole
        safe_point()
        whole = torch.empty(tensors[name].shape, dtype=tensors[name].dtype)
        origin.fill(whole)
        put(name, 0, whole.view(-1))


def _fill_states(places: Places, checkpoint: Checkpoint) -> None:
    for stored, start, part in _parts(checkpoint, OPTIMIZER):
        places.state(*StateKey.parse(stored.name), start, part)


def _parts(checkpoint: Checkpoint, stem: str) -> Iterator[tuple[StoredTensor, int, Tensor]]:
    for shard in checkpoint.shards.get(stem, ()):
        for found in verified_parts(checkpoint.path, checkpoint.manifest, shard.file.name, shard.tensors):
            safe_point()
            yield found
