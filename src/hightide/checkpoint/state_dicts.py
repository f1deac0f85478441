"""Plain PyTorch's own layouts: an optimizer's state dict out of a checkpoint, and files of torch.save into a run."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hightide.checkpoint.choosing import chosen
from hightide.checkpoint.files.checked import DamagedFile, verified_tensors
from hightide.checkpoint.files.folder import held, refusal
from hightide.checkpoint.fitting import OF_MASTERS, OPTIMIZER, Checkpoint, StateKey
from hightide.checkpoint.training import STEP, Group, OptimizerState
from hightide.ir.foreign import kind_of, shown, user_path

MODEL_KEYS = ("model", "model_state_dict", "state_dict")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict")


def optimizer_state_dict(folder: str | Path) -> dict[str, Any]:
    """What `load_state_dict` of the plain torch optimizer takes, of a checkpoint: all states, in memory.

    The optimizer must be made as the one that was saved: the same groups, with the same parameters in the same order.
    Master copies of 16-bit parameters are left out, plain PyTorch has none; `hightide.load` takes them."""
    path = chosen(user_path(folder))
    with held(path), torch.device("cpu"):  # whatever device is the default
        checkpoint = Checkpoint.open(path)
        saved = checkpoint.training.optimizer
        if saved is None:
            raise ValueError(f"{shown(checkpoint.path)} was saved without an optimizer")
        states: dict[str, dict[str, Tensor]] = {}
        try:
            for shard in checkpoint.shards.get(OPTIMIZER, ()):
                wanted = [one for one in shard.tensors if StateKey.parse(one.name).name not in OF_MASTERS]
                found = verified_tensors(checkpoint.path, checkpoint.manifest, shard.file.name, wanted)
                for key, value in ((StateKey.parse(name), value) for name, value in found.items()):
                    states.setdefault(key.param, {})[key.name] = value
        except DamagedFile as error:
            raise refusal(checkpoint.path, str(error)) from error
        return as_state_dict(saved, saved.groups, states)


def as_state_dict(
    saved: OptimizerState, groups: Sequence[Group], states: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Any]:
    """With these groups, in whose order parameters are counted; `states` are taken as they are."""
    names = [name for group in groups for name in group.params]
    indices = {name: index for index, name in enumerate(names)}
    found = {index: state for name, index in indices.items() if (state := state_of(saved, name, states)) is not None}
    laid_out = [{**group.options, "params": [indices[name] for name in group.params]} for group in groups]
    return {"state": found, "param_groups": laid_out}


def state_of(saved: OptimizerState, name: str, states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any] | None:
    """Of a parameter, as torch's optimizers have it; None: it has none."""
    if name not in saved.updates and name not in saved.others:
        return None
    count = {STEP: torch.tensor(float(saved.updates[name]))} if saved.counts and name in saved.updates else {}
    return {**count, **states.get(name, {}), **saved.others.get(name, {})}


def load_torch_file(model: nn.Module, optimizer: torch.optim.Optimizer | None, path: Path) -> dict[str, Any]:
    """State dicts in a file of torch.save: of the model alone, or of both under the usual names. Returns what else is
    there. Nothing in it is run: only tensors and plain values are read."""
    saved = _unpickled(path)
    if not isinstance(saved, dict):
        raise ValueError(f"{shown(path)} is {kind_of(saved)}; save state dicts: torch.save({{'model': ...}}, ...)")
    key = next((key for key in MODEL_KEYS if isinstance(saved.get(key), dict)), None)
    states = next((saved.pop(key) for key in OPTIMIZER_KEYS if isinstance(saved.get(key), dict)), None)
    values, rest = (saved, {}) if key is None else (saved.pop(key), saved)
    if optimizer is not None and states is None:
        raise ValueError(
            f"{shown(path)} has no state of an optimizer (under {' or '.join(map(repr, OPTIMIZER_KEYS))}); load the "
            "weights alone: hightide.load(model, None, file)"
        )
    if key is None and not all(isinstance(value, Tensor) for value in values.values()):
        raise ValueError(
            f"{shown(path)} is no state dict of a model, and has none under {', '.join(map(repr, MODEL_KEYS))}"
        )
    model.load_state_dict(values)
    if optimizer is not None:
        assert states is not None
        optimizer.load_state_dict(states)
    return rest


def _unpickled(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # of torch, which advises to run what is in it, or does not name the file
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise ValueError(
            f"{shown(path)} is damaged, or holds more than tensors and plain values, which is all that is read "
            "(weights_only=True): save state dicts, torch.save({'model': model.state_dict(), 'optimizer': "
            "optimizer.state_dict()}, ...), or get it again"
        ) from error
