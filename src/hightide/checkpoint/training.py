"""Where training is: what a checkpoint has beside values of parameters and states. All of it is small, and is taken at
the moment of the call. The states of all random number generators that a loop draws from are part of it."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hightide.checkpoint.extra import from_plain, to_plain
from hightide.checkpoint.files import folder
from hightide.checkpoint.files.checked import DamagedFile, verified_bytes, verified_tensors
from hightide.checkpoint.files.manifest import Manifest
from hightide.integrations.model_files import first_names, tensors_of
from hightide.ir.foreign import decoded, parse_json, quoted, shown
from hightide.ir.plan import Plan
from hightide.loading.tensor_file import ALL_DTYPES, read_header
from hightide.optim.optimizer import WrappedOptimizer
from hightide.runtime.run import Run

TRAINING, TENSORS, PLAN = "training.json", "training.safetensors", "plan.json"
STEP = "step"  # how torch's optimizers call their count of updates
_OF_RANKS = "rank_extras"  # which one rank does not write
_PARTS = ("training", "extra", _OF_RANKS)


class Group(NamedTuple):
    params: list[str]  # names
    options: dict[str, Any]


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer without the values of its states."""

    kind: str  # the name of its class
    groups: list[Group]
    updates: dict[str, int]  # how many each parameter has had, of those that have a state
    others: dict[str, dict[str, Any]] = field(default_factory=dict)  # by parameter: what is no tensor of its size
    counts: bool = True  # plain PyTorch has the number of updates in the state too


@dataclass(frozen=True)
class OfRank:
    """What each of several ranks has of its own."""

    random: dict[str, Any]
    passes: int
    extra: Any


@dataclass(frozen=True)
class Training:
    step: int
    extra: Any
    optimizer: OptimizerState | None = None
    random: dict[str, Any] = field(default_factory=dict)
    passes: int = 0  # that hightide has counted: seeds of micro-batches follow from it
    state: dict[str, Any] = field(default_factory=dict)  # extra states of modules
    ranks: tuple[OfRank, ...] = ()  # of each; none: one rank, which has nothing else


# -- taken -----------------------------------------------------------------------------------------------------------


def names_of(model: nn.Module) -> dict[int, str]:
    """Of parameters and buffers, by id."""
    return first_names(tensors_of(model))


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    names, groups = names_of(model), []
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise ValueError(
                    f"group {index} of the optimizer has a parameter of shape {tuple(param.shape)} that is none of the "
                    "model; save the model that has all of them"
                )
        params = [names[id(param)] for param in group["params"]]
        groups.append(Group(params, {name: value for name, value in group.items() if name != "params"}))
    if isinstance(optimizer, WrappedOptimizer):
        moments = optimizer.updates.moments
        # Also of those that are in no group at the moment: they keep their states, and may be put back.
        updates = {name: moments.count(name) for name in dict.fromkeys(names.values()) if name in moments}
        rule = optimizer.rule
        return OptimizerState(rule.optimizer.__name__, groups, updates, optimizer.others, rule.step_name is not None)
    is_own = type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
    if is_own and (beside := optimizer.state_dict().keys() - {"state", "param_groups"}):
        raise ValueError(
            f"{type(optimizer).__name__} keeps {', '.join(map(repr, sorted(beside)))} beside the states of parameters, "
            "of which a checkpoint knows nothing: save its state_dict() yourself, and here the model alone "
            "(optimizer=None)"
        )
    updates, others = {}, {}
    for param, state in optimizer.state.items():
        name = names.get(id(param))
        if name is None or all(value is None for value in state.values()):
            continue
        updates[name] = _count(state.get(STEP, 1))
        left = {
            key: value
            for key, value in state.items()
            if not (_is_counted(value) if key == STEP else is_value(param, value))
        }
        if left:
            others[name] = left
    counts = any(STEP in state for state in optimizer.state.values())
    return OptimizerState(type(optimizer).__name__, groups, updates, others, counts)


def is_value(param: Tensor, state: Any) -> bool:
    """Whether a plain optimizer's entry goes to the optimizer's files: all tensors but single numbers."""
    return isinstance(state, Tensor) and (state.ndim > 0 or state.shape == param.shape)


def _is_counted(step: Any) -> bool:
    """Whether `updates` says it all. Some optimizers count in integers, and calculate with them."""
    return isinstance(step, Tensor) and step.is_floating_point()


def _count(step: Any) -> int:
    number = float(step)
    if number < 0 or number != int(number):
        raise ValueError(
            f"{STEP!r} of an optimizer's state is {number}, but it counts updates: set it to a whole number"
        )
    return int(number)


def taken(model: nn.Module, optimizer: torch.optim.Optimizer | None, run: Run | None, extra: Any) -> Training:
    """Of this moment; the step is for the caller to say."""
    state = {name: model.get_submodule(name).get_extra_state() for name in with_extra_state(model)}
    its = None if optimizer is None else optimizer_state(model, optimizer)
    return Training(0, extra, its, generator_states(), 0 if run is None else run.num_passes, state)


def with_extra_state(model: nn.Module) -> list[str]:
    """Names of modules that have a state beside their tensors."""
    return [
        name for name, module in model.named_modules() if type(module).get_extra_state is not nn.Module.get_extra_state
    ]


def to_files(training: Training) -> tuple[bytes, dict[str, Tensor]]:
    """The text of TRAINING and the tensors of TENSORS, which are copies. ValueError for what cannot be written."""
    its = training.optimizer
    content = {
        "step": training.step,
        "passes": training.passes,
        "random": training.random,
        "state": training.state,
        "optimizer": None
        if its is None
        else {
            "kind": its.kind,
            "groups": [{"params": group.params, "options": group.options} for group in its.groups],
            "updates": its.updates,
            "others": its.others,
            "counts": its.counts,
        },
    }
    if training.ranks:
        content["ranks"] = [{"random": one.random, "passes": one.passes} for one in training.ranks]
    extras = [one.extra for one in training.ranks]
    plain: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for part, value in zip(_PARTS, (content, training.extra, extras), strict=True):
        if part == _OF_RANKS and not training.ranks:
            continue
        plain[part], its_tensors = to_plain(value, part)
        tensors |= {f"{part}/{name}": tensor.clone() for name, tensor in its_tensors.items()}
    return json.dumps(plain, indent=1, allow_nan=False).encode(), tensors


# -- read ------------------------------------------------------------------------------------------------------------


def read_training(path: str | Path) -> Training:
    """Of one checkpoint: needs no model. ValueError for one that is damaged."""
    path = Path(path)
    return training_of(path, folder.whole_manifest_of(path))


def read_plan(path: str | Path) -> Plan | None:
    """The one that a checkpoint was made under; None: plain PyTorch."""
    path = Path(path)
    manifest = folder.whole_manifest_of(path)
    if all(file.name != PLAN for file in manifest.files):
        return None
    try:
        verified_bytes(path, manifest, PLAN)
    except DamagedFile as error:
        raise folder.refusal(path, str(error)) from error
    return Plan.load(path / PLAN)


def training_of(path: Path, manifest: Manifest) -> Training:
    source = shown(path / TRAINING)
    try:
        text = verified_bytes(path, manifest, TRAINING)
        tensors = verified_tensors(path, manifest, TENSORS, list(read_header(path / TENSORS, ALL_DTYPES).values()))
    except DamagedFile as error:
        raise folder.refusal(path, str(error)) from error
    plain = parse_json(decoded(text, source), source)
    parts: list[Any] = []
    for part in _PARTS:
        its = {name.removeprefix(f"{part}/"): one for name, one in tensors.items() if name.startswith(f"{part}/")}
        if part == _OF_RANKS and isinstance(plain, dict) and part not in plain:
            parts.append([])
            continue
        if not isinstance(plain, dict) or part not in plain:
            raise ValueError(f"{source} has no {part!r}; it is damaged")
        parts.append(from_plain(plain[part], its, part))
    try:
        return _training(*parts)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{source} is damaged: {quoted(str(error))} is missing or not what it must be") from error


def _training(content: Mapping[str, Any], extra: Any, rank_extras: Any) -> Training:
    its = content["optimizer"]
    state = None
    if its is not None:
        groups = [Group(list(group["params"]), dict(group["options"])) for group in its["groups"]]
        updates = {name: int(count) for name, count in its["updates"].items()}
        others = {name: dict(entries) for name, entries in its["others"].items()}
        state = OptimizerState(str(its["kind"]), groups, updates, others, bool(its["counts"]))
    ranks = tuple(
        OfRank(dict(one["random"]), int(one["passes"]), its)
        for one, its in zip(content.get("ranks", ()), rank_extras, strict=True)
    )
    passes, states = int(content["passes"]), dict(content["state"])
    return Training(int(content["step"]), extra, state, dict(content["random"]), passes, states, ranks)


def generator_states() -> dict[str, Any]:
    """Of torch on the CPU and on every GPU that is in use, of Python, and of numpy where somebody uses it."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    return states


def set_generator_states(states: dict[str, Any]) -> None:
    """Those that there are here. A GPU more or less than at the save keeps its own."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if torch.cuda.is_available():
        for index, state in enumerate(states.get("cuda", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, index)
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])


def seed_generators(states: dict[str, Any], rank: int) -> None:
    """Of a rank that was not there at the save: from the first one's states, and its own number. Always the same."""
    content = states["torch"].numpy().tobytes() + repr(states["python"]).encode() + f"/{rank}".encode()
    digest = hashlib.sha256(content).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    random.seed(digest)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int.from_bytes(digest[8:12], "little"))
