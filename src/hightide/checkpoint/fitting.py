"""Whether a checkpoint fits a model and its optimizer: asked before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hightide.checkpoint.files.folder import DamagedCheckpoint, manifest_of, refusal
from hightide.checkpoint.files.manifest import FileSums, Manifest
from hightide.checkpoint.training import OptimizerState, Training, optimizer_state, training_of, with_extra_state
from hightide.integrations.foreign_folder import few
from hightide.integrations.model_files import (
    ADAPTER,
    MODEL,
    TRAINED,
    first_names,
    has_adapters,
    model_files,
    tensors_of,
)
from hightide.integrations.pretrained import LoadingPlan
from hightide.ir.foreign import quoted, shown
from hightide.ir.state_spec import MASTER, REMAINDER
from hightide.loading.tensor_file import ALL_DTYPES, StoredTensor, read_header
from hightide.optim.optimizer import WrappedOptimizer
from hightide.profiler.switches.caches import is_pretrained
from hightide.runtime.chunks.homes import DTYPES
from hightide.runtime.chunks.origin import Origin
from hightide.runtime.run import Run

OPTIMIZER = "optimizer"
_SHARD = re.compile(rf"({MODEL}|(?:[^/]+/)?{ADAPTER}|{TRAINED}|{OPTIMIZER})(-\d{{5}}-of-\d{{5}})?\.safetensors")
OF_MASTERS = (MASTER.name, REMAINDER.name)


class StateKey(NamedTuple):
    param: str
    name: str

    @classmethod
    def parse(cls, text: str) -> StateKey:
        param, slash, name = text.rpartition("/")
        if not slash or not param or not name:
            raise ValueError(
                f"{quoted(text)} is no '<parameter>/<state>', as tensors of an optimizer's file are called"
            )
        return cls(param, name)

    def __str__(self) -> str:
        return f"{self.param}/{self.name}"


@dataclass(frozen=True)
class Shard:
    file: FileSums
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True)
class Checkpoint:
    """One on disk, looked at but for its values."""

    path: Path
    manifest: Manifest
    training: Training
    shards: Mapping[str, tuple[Shard, ...]]  # by stem

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """ValueError for one that is damaged, with the newest whole one."""
        try:
            return cls._open(path)
        except DamagedCheckpoint:
            raise
        except ValueError as error:
            raise refusal(path, str(error)) from error

    @classmethod
    def _open(cls, path: Path) -> Checkpoint:
        manifest = manifest_of(path)
        shards: dict[str, list[Shard]] = {}
        for file in sorted(manifest.files, key=lambda one: one.name):
            if found := _SHARD.fullmatch(file.name):
                tensors = tuple(read_header(path / file.name, ALL_DTYPES).values())
                shards.setdefault(found[1], []).append(Shard(file, tensors))
        opened = {stem: tuple(its) for stem, its in shards.items()}
        for stem, its in opened.items():
            names = [tensor.name for shard in its for tensor in shard.tensors]
            if len(set(names)) != len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise ValueError(f"{shown(path)} has {quoted(twice)} in two files of its {stem}; it is damaged")
        return cls(path, manifest, training_of(path, manifest), opened)

    @property
    def adapters(self) -> list[str]:
        """Stems of their files."""
        return [stem for stem in self.shards if stem.rpartition("/")[2] == ADAPTER]

    def tensors(self, *stems: str) -> list[StoredTensor]:
        return [tensor for stem in stems for shard in self.shards.get(stem, ()) for tensor in shard.tensors]

    @property
    def states(self) -> dict[StateKey, StoredTensor]:
        return {StateKey.parse(tensor.name): tensor for tensor in self.tensors(OPTIMIZER)}


@dataclass
class Targets:
    """Where the tensors of the model's files go: to the first name that the model has for each of its own."""

    direct: dict[tuple[str, str], str] = field(default_factory=dict)  # by stem and name in the file
    converted: dict[str, Origin] = field(default_factory=dict)  # read by themselves, from files that were checked


# -- the model -------------------------------------------------------------------------------------------------------


def targets_of(model: nn.Module, run: Run | None, checkpoint: Checkpoint) -> Targets:
    """ValueError, with names and numbers, unless every tensor of one has its like in the other."""
    tensors = tensors_of(model)
    if is_pretrained(model) and not has_adapters(model):
        targets, stored, problems = _of_transformers(model, tensors, checkpoint)
    else:
        targets, stored, problems = _by_name(model, tensors, checkpoint)
    if not problems:
        problems = [*_narrowed(tensors, stored, run), *_extra_states(model, checkpoint)]
    if problems:
        raise ValueError(
            f"{shown(checkpoint.path)} does not fit this {type(model).__name__}: {'; '.join(problems)}. Nothing was "
            "changed: build the model as it was when it was saved"
        )
    return targets


Found = tuple[Targets, dict[str, torch.dtype], list[str]]  # dtypes in files, by the name in the model; problems


def _by_name(model: nn.Module, tensors: Mapping[str, Tensor], checkpoint: Checkpoint) -> Found:
    saved, known = checkpoint.training.optimizer, dict(model.named_parameters())
    files = model_files(model, [] if saved is None else [name for name in saved.updates if name in known])
    stems = (MODEL, *checkpoint.adapters, TRAINED)
    found = {(stem, tensor.name): tensor for stem in stems for tensor in checkpoint.tensors(stem)}
    expected = {}
    for one in files.written:
        place, earlier = (one.stem, one.stored[0].name), (TRAINED, one.sources[0])
        # It may have been saved among what trains: so further adapters were, before they had folders.
        expected[earlier if earlier in found and place not in found else place] = one.sources[0]
    shapes = {place: tuple(tensors[name].shape) for place, name in expected.items()}
    unlike = [
        f"{place[1]} {found[place].shape} instead of {shape}"
        for place, shape in shapes.items()
        if place in found and found[place].shape != shape
    ]
    problems = _listed(
        ("tensors are missing", [name for _, name in expected.keys() - found.keys()]),
        ("tensors are not in the model", [name for _, name in found.keys() - expected.keys()]),
        ("tensors have another shape", unlike),
    )
    dtypes = {expected[place]: tensor.dtype for place, tensor in found.items() if place in expected}
    return Targets(expected), dtypes, problems


def _of_transformers(model: nn.Module, tensors: Mapping[str, Tensor], checkpoint: Checkpoint) -> Found:
    names = first_names(tensors)
    expected = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in tensors.items()}
    stored = {tensor.name: tensor for tensor in checkpoint.tensors(MODEL)}
    before = vars(model).get("_weight_conversions")
    plan = LoadingPlan(model, stored, expected)
    model._weight_conversions = before  # type: ignore[assignment]  # how it is saved is not for this folder to decide
    targets, dtypes = Targets(), {}
    for name, (origin, dtype) in plan.origins.items():
        first = names[id(tensors[name])]
        dtypes[first] = dtype
        if isinstance(origin, StoredTensor):
            targets.direct[MODEL, origin.name] = first
        else:
            targets.converted[first] = origin
    others = [*checkpoint.adapters, *({TRAINED} & checkpoint.shards.keys())]
    return targets, dtypes, plan.problems() + [f"it has files of adapters ({stem}), the model none" for stem in others]


def _narrowed(tensors: Mapping[str, Tensor], stored: Mapping[str, torch.dtype], run: Run | None) -> list[str]:
    """Values that would be rounded. See [Note: masters of a checkpoint] in places.py."""
    unlike = []
    for name, dtype in stored.items():
        here = tensors[name].dtype
        has_master = run is not None and name in run.chunks.places and run.chunks.has_own_master(name)
        is_wide = here == torch.float32 and dtype in (torch.bfloat16, torch.float16)
        is_held = has_master and dtype.is_floating_point and dtype.itemsize <= 4
        if dtype != here and not is_wide and not is_held:
            unlike.append(f"{name} {_short(dtype)} instead of {_short(here)}")
    return _listed(("tensors have another dtype", unlike))


def _extra_states(model: nn.Module, checkpoint: Checkpoint) -> list[str]:
    its, ours = set(checkpoint.training.state), set(with_extra_state(model))
    return _listed(
        ("modules have an extra state of which it has none", [name or "the model" for name in ours - its]),
        ("extra states are of modules that have none", [name or "the model" for name in its - ours]),
    )


# -- the optimizer ---------------------------------------------------------------------------------------------------


def check_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, run: Run | None, checkpoint: Checkpoint
) -> None:
    """ValueError unless the states are those of this optimizer's parameters. Nothing is changed."""
    saved = checkpoint.training.optimizer
    if saved is None:
        raise ValueError(
            f"{shown(checkpoint.path)} was saved without an optimizer; load the weights alone: hightide.load(model, "
            "None, folder)"
        )
    here = optimizer_state(model, optimizer)
    problems = [*_kinds(saved, here), *_groups(saved, here)]
    if not problems and isinstance(optimizer, WrappedOptimizer):
        assert run is not None
        problems = list(_states(optimizer, run, checkpoint, saved))
    if problems:
        raise ValueError(
            f"{shown(checkpoint.path)} does not fit this {here.kind}: {'; '.join(problems)}. Nothing was changed: make "
            "the optimizer as it was when it was saved, or load the weights alone: hightide.load(model, None, folder)"
        )
    if isinstance(optimizer, WrappedOptimizer):
        optimizer.check_renewal([group.options for group in saved.groups])


def _kinds(saved: OptimizerState, here: OptimizerState) -> Iterable[str]:
    if saved.kind != here.kind:
        yield f"it was saved with {quoted(saved.kind)}, whose states mean something else"


def _groups(saved: OptimizerState, here: OptimizerState) -> Iterable[str]:
    if len(saved.groups) != len(here.groups):
        yield f"it has {len(saved.groups)} groups of parameters instead of {len(here.groups)}"
        return
    for index, (one, other) in enumerate(zip(saved.groups, here.groups, strict=True)):
        its, ours = set(one.params), set(other.params)
        if its - ours:
            yield f"group {index} lacks {len(its - ours)} of its parameters: {few(sorted(its - ours))}"
        if ours - its:
            yield f"group {index} has {len(ours - its)} parameters more: {few(sorted(ours - its))}"


def _states(optimizer: WrappedOptimizer, run: Run, checkpoint: Checkpoint, saved: OptimizerState) -> Iterable[str]:
    specs = {spec.name: spec for spec in optimizer.rule.states}
    names: dict[str, set[str]] = {name: set() for name in saved.updates}
    unlike = []
    for key, tensor in checkpoint.states.items():
        if key.param not in run.chunks.places:
            yield f"there is a state of {quoted(key.param)}, which the model does not have"
            return
        if key.name == REMAINDER.name and not _is_whole_here(run, key.param):
            yield (
                f"it has remainders of bfloat16, and {quoted(key.param)} is whole on each rank, its master in parts: "
                "load it in bfloat16, or on one rank"
            )
            return
        if key.name in OF_MASTERS or not run.chunks.has_room(key.param):
            continue
        names.setdefault(key.param, set()).add(key.name)
        spec, (_, entry) = specs.get(key.name), run.chunks.places[key.param]
        if spec is None:
            continue
        shape, dtype = spec.shape(tuple(run.chunks.shapes[key.param]), entry.numel), DTYPES[spec.dtype]
        if tensor.shape != shape:
            unlike.append(f"{key} {tensor.shape} instead of {shape}")
        elif not dtype.is_floating_point and tensor.dtype != dtype:
            unlike.append(f"{key} {_short(tensor.dtype)} instead of {_short(dtype)}")
    for param, found in names.items():
        if run.chunks.has_room(param) and found != set(specs):
            its, ours = few(sorted(found)) or "nothing", few(sorted(specs)) or "nothing"
            yield f"it has {its} of {quoted(param)}, this optimizer keeps {ours}: it was made with other options"
            return
    yield from _listed(("states are of another shape or dtype", unlike))


def _is_whole_here(run: Run, key: str) -> bool:
    """Or nothing of it needs more of its master than this rank has."""
    chunks = run.chunks
    has_master = MASTER in chunks.specs[chunks.places[key][0]].states and chunks.has_room(key)
    return not has_master or chunks.home_range(key) == chunks.updated_range(key)


def _listed(*found: tuple[str, Sequence[str]]) -> list[str]:
    return [f"{len(names)} {text}: {few(sorted(names))}" for text, names in found if names]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
