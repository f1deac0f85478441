"""Files of a model's folder: those that its library would write, and under which names values lie in them.

[Note: asking the library] What transformers and PEFT call tensors in files, which of several tied names they write,
which tensors they cut or join on the way and what lies beside them is their own knowledge, and is asked of them: with
tensors that have shapes but no values, or, for adapters, with numbers in the place of values, which then stand in the
file under the names that it would have. So nothing is copied to know it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hightide.loading.tensor_file import read_header
from hightide.profiler.switches.caches import is_pretrained

MODEL, ADAPTER, TRAINED = "model", "adapter_model", "trained"  # the files' names begin so; further adapters: FOLDER/...
DEFAULT = "default"  # the adapter that PEFT writes without a folder of its own
SUFFIX = ".safetensors"
ASKED_WHO_WRITES = "should_save_on_this_rank"  # of transformers


class Named(NamedTuple):
    """A tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Written:
    """What some tensors of the model become in files: one as it is, or several that are cut or joined."""

    stem: str  # of the file
    sources: tuple[str, ...]  # each by the first name that the model has for it
    stored: tuple[Named, ...]
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None  # None: one, as it is


@dataclass(frozen=True)
class ModelFiles:
    written: tuple[Written, ...]
    left_out: tuple[str, ...] = ()  # parameters that are not written: the frozen ones of a model with adapters
    small: Mapping[str, bytes] = field(default_factory=dict)  # the other files
    num_parameters: int = 0


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that are in a state dict, under all their names, in its order. Nothing is copied."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        found |= {prefix + name: param for name, param in module._parameters.items() if param is not None}
        kept = (item for item in module._buffers.items() if item[0] not in module._non_persistent_buffers_set)
        found |= {prefix + name: buffer for name, buffer in kept if buffer is not None}
    return found


def first_names(tensors: Mapping[str, Tensor]) -> dict[int, str]:
    """By the id of the tensor: one that is tied has several."""
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)
    return names


def model_files(model: nn.Module, trained: Sequence[str] = ()) -> ModelFiles:
    """`trained`: parameters that have been, and may be frozen by now: they are written in any case."""
    tensors = tensors_of(model)
    if has_adapters(model):
        return _with_adapters(model, tensors, trained)
    if is_pretrained(model):
        return _of_transformers(model, tensors)
    names = first_names(tensors)
    return ModelFiles(tuple(_as_it_is(MODEL, name, name, tensors[name]) for name in names.values()))


def has_adapters(model: nn.Module) -> bool:
    """Of PEFT, around the model or put into it by transformers."""
    is_around = any(kind.__name__ == "PeftModel" for kind in type(model).__mro__)
    return is_around or bool(getattr(model, "_hf_peft_config_loaded", False))


def _as_it_is(stem: str, name: str, stored: str, tensor: Tensor) -> Written:
    return Written(stem, (name,), (Named(stored, tensor.dtype, tuple(tensor.shape)),))


# -- transformers ----------------------------------------------------------------------------------------------------


def _of_transformers(model: Any, tensors: Mapping[str, Tensor]) -> ModelFiles:
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    names = first_names(tensors)
    marks = {number: torch.zeros(1) for number in names}  # tied names have one
    # What it would not write, because a fresh model has it too, is written all the same: it may have been trained.
    kept = remove_tied_weights_from_state_dict({name: marks[id(tensor)] for name, tensor in tensors.items()}, model)
    with without_bars():
        small = _small_files(model, state_dict={})
    written = tuple(_reverted(model, {name: tensors[name] for name in kept}, names))
    return ModelFiles(written, (), small, num_parameters=model.num_parameters())


def _reverted(model: Any, kept: Mapping[str, Tensor], names: Mapping[int, str]) -> Iterator[Written]:
    from transformers.core_model_loading import revert_weight_conversion

    def reverted(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By their names in the model's state dict."""
        made: dict[str, Tensor] = revert_weight_conversion(model, dict(values))
        return made

    shapes = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in kept.items()}
    origins = {id(shape): name for name, shape in shapes.items()}
    made = reverted(shapes)
    for stored, shape in made.items():
        if id(shape) in origins:
            name = origins.pop(id(shape))
            yield _as_it_is(MODEL, names[id(kept[name])], stored, kept[name])
    rest = {name: shapes[name] for name in origins.values()}
    for group in _linked({name: set(reverted({name: shape})) for name, shape in rest.items()}):
        parts = reverted({name: rest[name] for name in group})
        if any(stored not in made or part.shape != made[stored].shape for stored, part in parts.items()):
            raise ValueError(
                f"transformers makes one tensor in files out of several of {type(model).__name__} in a way that "
                f"cannot be followed ({', '.join(sorted(group)[:3])}); save this model with save_pretrained"
            )
        of = {names[id(kept[name])]: name for name in group}
        yield Written(
            MODEL,
            tuple(of),
            tuple(Named(stored, part.dtype, tuple(part.shape)) for stored, part in parts.items()),
            lambda values, of=of: reverted({of[name]: value for name, value in values.items()}),  # type: ignore[misc]
        )


def _linked(targets: Mapping[str, set[str]]) -> list[list[str]]:
    """Sources that have a target in common."""
    groups: list[tuple[list[str], set[str]]] = []
    for name, ends in targets.items():
        near = [group for group in groups if group[1] & ends]
        groups = [group for group in groups if not group[1] & ends]
        sources = [one for group in near for one in group[0]]
        groups.append(([*sources, name], ends.union(*(group[1] for group in near))))
    return [group[0] for group in groups]


# -- PEFT ------------------------------------------------------------------------------------------------------------

_known: weakref.WeakKeyDictionary[nn.Module, tuple[object, list[_Adapter]]] = weakref.WeakKeyDictionary()


class _Adapter(NamedTuple):
    folder: str  # "" is the model's own
    sources: dict[str, str]  # the name in the model, by that in the file
    small: dict[str, bytes]

    def placed(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name


def _with_adapters(model: nn.Module, tensors: Mapping[str, Tensor], trained: Sequence[str]) -> ModelFiles:
    names, adapters = first_names(tensors), _adapters(model, tensors)
    firsts = {names[id(tensor)]: tensor for tensor in tensors.values()}
    written = [
        _as_it_is(adapter.placed(ADAPTER), name, stored, firsts[name])
        for adapter in adapters
        for stored, name in adapter.sources.items()
    ]
    covered = {name for adapter in adapters for name in adapter.sources.values()}
    params = dict(model.named_parameters())
    moving = {name for name, param in params.items() if param.requires_grad} | set(trained)
    others = [name for name in firsts if name not in covered and (name in moving or name not in params)]
    written += [_as_it_is(TRAINED, name, name, firsts[name]) for name in others]
    left_out = tuple(name for name in params if name not in covered and name not in others)
    small = {adapter.placed(name): content for adapter in adapters for name, content in adapter.small.items()}
    return ModelFiles(tuple(written), left_out, small)


def _adapters(model: Any, tensors: Mapping[str, Tensor]) -> list[_Adapter]:
    """Each has a folder of its name, as PEFT has it, but for PEFT's "default", else the first: whoever loads the folder
    finds that one. PEFT may ask a server about the base model: it is asked once."""
    known_names = list(model.peft_config)
    if len(known_names) > 1 and is_pretrained(model):
        raise ValueError(
            f"the model has {len(known_names)} adapters ({', '.join(known_names)}) that transformers has put into "
            "it, which writes one of them; delete the others (model.delete_adapter), or put them in with PEFT's "
            "get_peft_model and add_adapter"
        )
    asked = (*((name, repr(config)) for name, config in model.peft_config.items()), tuple(tensors))
    known = _known.get(model)
    if known is None or known[0] != asked:
        chosen = DEFAULT if DEFAULT in known_names else known_names[0]
        adapters = [_asked(model, tensors, name, "" if name == chosen else name) for name in known_names]
        known = _known[model] = (asked, adapters)
    return known[1]


def _asked(model: Any, tensors: Mapping[str, Tensor], name: str, folder: str) -> _Adapter:
    names = first_names(tensors)
    numbers = {name: number for number, name in enumerate(names.values())}
    marks = {name: torch.tensor([numbers[names[id(tensor)]]]) for name, tensor in tensors.items()}
    options = {} if is_pretrained(model) else {"selected_adapters": [name]}
    with TemporaryDirectory() as made, without_bars(), written_here(model):
        model.save_pretrained(made, state_dict=marks, **options)
        file = next(Path(made).rglob(f"{ADAPTER}*{SUFFIX}"))
        found = {stored: int(mark.read().flatten()[0]) for stored, mark in read_header(file).items()}
        small = {one.name: one.read_bytes() for one in file.parent.iterdir() if one.is_file() and one != file}
    by_number = {number: name for name, number in numbers.items()}
    return _Adapter(folder, {stored: by_number[number] for stored, number in found.items()}, small)


# -- files -----------------------------------------------------------------------------------------------------------


def _small_files(model: Any, **options: Any) -> dict[str, bytes]:
    """What it writes beside its tensors."""
    with TemporaryDirectory() as folder, written_here(model):
        model.save_pretrained(folder, **options)
        return {one.name: one.read_bytes() for one in Path(folder).iterdir() if one.is_file() and one.suffix != SUFFIX}


@contextmanager
def written_here(model: nn.Module) -> Iterator[None]:
    """Its `save_pretrained` writes. In a process group transformers does so on the first of all ranks alone, whoever
    has been asked: what another one saves, in a folder of its own or for its own group, would silently not be there."""
    if not hasattr(type(model), ASKED_WHO_WRITES):
        yield
        return
    before = {name: value for name, value in model.__dict__.items() if name == ASKED_WHO_WRITES}
    model.__dict__[ASKED_WHO_WRITES] = lambda is_main_process: is_main_process
    try:
        yield
    finally:
        del model.__dict__[ASKED_WHO_WRITES]
        model.__dict__.update(before)


@contextmanager
def without_bars() -> Iterator[None]:
    """Of progress, of transformers: its files are small, or not written here."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


@contextmanager
def errors_only(library: str) -> Iterator[None]:
    """Of what it logs: its advice is about loops that are not ours."""
    logger = logging.getLogger(library)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
