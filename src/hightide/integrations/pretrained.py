"""`hightide.from_pretrained`: a Hugging Face folder as a model without memory, whose values `wrap` reads into chunks.

What a file's tensors are called in the model, and which of them are joined or cut (experts, mostly), is transformers'
own knowledge, and is asked of it; only the reading is done here, one parameter at a time.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hightide.integrations.foreign_folder import (
    CONFIG,
    blaming,
    check_folder,
    class_of,
    few,
    import_transformers,
    read_config,
    stored_tensors,
)
from hightide.ir.foreign import read_json, shown
from hightide.loading.tensor_file import StoredTensor, same_values
from hightide.loading.unloaded import parameters_on_meta, remember
from hightide.runtime.chunks.origin import Origin

HALVES = (torch.bfloat16, torch.float16)


def from_pretrained(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    model_class: Any = None,
    **config_options: Any,
) -> nn.Module:
    """A model of a Hugging Face folder (config.json and safetensors files) whose values stay in the files until `wrap`
    reads them, straight into its chunks: in RAM the model never exists beside them.

    `dtype`: of the parameters; by default the config's, else the files'. `model_class`: a transformers class, by
    default the one that the config names. Other options change the config, as in transformers. Like there, the model
    is in evaluation mode: call `model.train()`. Until it is wrapped it cannot be called.
    """
    path = Path(folder)
    check_folder(path)
    config = read_config(path, config_options)
    stored = stored_tensors(path)
    kind = class_of(config, model_class)
    _check_dtypes(path, stored.values(), config.dtype, is_sure=dtype is not None)
    config.dtype = _dtype(dtype, config, stored.values())
    with blaming(path / CONFIG, config_options):
        model = build_without_values(kind, config)
        plan = LoadingPlan(model, stored)
    plan.check(path)
    plan.load_buffers()
    model.eval()
    _read_generation_config(model, path)
    remember(model, str(path), plan.of_parameters())
    return model


# -- the model ---------------------------------------------------------------------------------------------------


def _dtype(asked: torch.dtype | str | None, config: Any, stored: Iterable[StoredTensor]) -> torch.dtype:
    if asked in (None, "auto"):
        asked = config.dtype or next((one.dtype for one in stored if one.dtype.is_floating_point), torch.float32)
    dtype = getattr(torch, asked.removeprefix("torch."), None) if isinstance(asked, str) else asked
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={asked!r} is no floating-point dtype; use torch.bfloat16, torch.float32 or None")
    return dtype


def _check_dtypes(folder: Path, stored: Iterable[StoredTensor], said: torch.dtype | None, is_sure: bool) -> None:
    """Two dtypes have 16 bits: where the config and the files do not agree which it is, one of them may be wrong. Who
    names a dtype himself is taken to know."""
    halves = Counter(one.dtype for one in stored if one.dtype in HALVES)
    others = {dtype: count for dtype, count in halves.items() if dtype is not said} if said in HALVES else halves
    if len(others) > (said not in HALVES):
        names = " and ".join(
            f"{count} tensors in {str(dtype).removeprefix('torch.')}" for dtype, count in others.items()
        )
        doubt = (
            f"{shown(folder)} has {names}, and its config.json says {str(said).removeprefix('torch.')}: all have 16 "
            "bits, and if one of the two is wrong the values are others"
        )
        if not is_sure:
            raise ValueError(f"{doubt}. Correct the dtype in config.json, or pass dtype= to have the files believed")
        warnings.warn(f"{doubt}. Compare a loss with plain transformers first", stacklevel=3)


def build_without_values(kind: Any, config: Any) -> nn.Module:
    """As `kind.from_pretrained` builds it, but only the parameters are on the meta device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.dtype)
    try:
        with parameters_on_meta():
            model: nn.Module = kind(config)
    finally:
        torch.set_default_dtype(before)
    plan = model._get_dtype_plan(config.dtype)  # type: ignore[operator]
    if plan:
        from transformers.core_model_loading import build_glob_alternation

        pattern, names, _ = build_glob_alternation(list(plan))
        for name, param in model.named_parameters():
            if match := pattern.search(name):
                param.data = param.data.to(plan[names[match.lastgroup]])
    return model


def _read_generation_config(model: Any, folder: Path) -> None:
    path = folder / "generation_config.json"
    if model.can_generate() and path.exists():
        read_json(path, path.name)
        with blaming(path):
            model.generation_config = import_transformers().GenerationConfig.from_pretrained(
                folder, local_files_only=True
            )


# -- which tensor goes where -------------------------------------------------------------------------------------


class _Converted:
    """What transformers makes of several stored tensors, or cuts out of one. Kept until every part has been taken."""

    def __init__(self, convert: Callable[[], Mapping[str, Any]]) -> None:
        self._convert = convert
        self._values: dict[str, Tensor] = {}

    def take(self, name: str) -> Tensor:
        if name not in self._values:
            made = self._convert()
            self._values = {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
        return self._values.pop(name)


class _Part:
    """One result of a conversion, as an Origin."""

    def __init__(self, converted: _Converted, name: str) -> None:
        self._converted, self._name = converted, name

    def fill(self, target: Tensor) -> None:
        with torch.no_grad():
            target.copy_(self._converted.take(self._name))


class _Source(NamedTuple):
    origin: Origin
    shape: tuple[int, ...]
    dtype: torch.dtype


class LoadingPlan:
    """An origin for every entry of the model's state dict, by the rules by which transformers loads."""

    def __init__(
        self, model: Any, stored: Mapping[str, StoredTensor], expected: Mapping[str, Tensor] | None = None
    ) -> None:
        """`expected`: the entries with their shapes, by default the state dict itself."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        self._model = model
        self._expected: Mapping[str, Tensor] = model.state_dict() if expected is None else expected
        self._sources: dict[str, _Source] = {}
        self.unexpected: list[str] = []
        self.twice: list[str] = []
        transforms = get_model_conversion_mapping(model)
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = {
            pattern: one for one in transforms if isinstance(one, WeightConverter) for pattern in one.source_patterns
        }
        prefix = model.base_model_prefix
        collected: dict[str, Any] = {}  # the converter of a target, with the tensors it needs
        sources: dict[str, list[tuple[str, str]]] = {}
        for name in sorted(stored, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, list(converters.values()), prefix, self._expected)
            if target not in self._expected and name in self._expected:
                target, pattern = rename_source_key(name, [], [], prefix, self._expected)
            if target not in self._expected:
                self.unexpected.append(name)
            elif pattern is None:
                if target in self._sources:
                    self.twice.append(target)
                self._sources[target] = _Source(stored[name], stored[name].shape, stored[name].dtype)
            else:
                collected.setdefault(target, converters[pattern])
                sources.setdefault(target, []).append((name, pattern))
        for target, converter in collected.items():
            self._add_conversion(target, converter, sources[target], stored)
        model._weight_conversions = [one for one in transforms if one.was_used()]  # for save_pretrained

    def _add_conversion(
        self, target: str, converter: Any, sources: list[tuple[str, str]], stored: Mapping[str, StoredTensor]
    ) -> None:
        def convert(read: Callable[[StoredTensor], Tensor]) -> dict[str, Any]:
            one = deepcopy(converter)
            for name, pattern in sources:
                one.add_tensor(target, name, pattern, lambda name=name: read(stored[name]))
            made: dict[str, Any] = one.convert(target, model=self._model, config=self._model.config)
            return made

        shapes = convert(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        converted = _Converted(lambda: convert(StoredTensor.read))
        for name, value in shapes.items():
            if name in self._expected:
                made = value[0] if isinstance(value, list) else value
                self._sources[name] = _Source(_Part(converted, name), tuple(made.shape), made.dtype)
            else:
                self.unexpected.append(name)

    def check(self, folder: Path) -> None:
        if problems := self.problems():
            raise ValueError(
                f"{shown(folder)} does not fit {type(self._model).__name__} ({len(self._expected)} tensors): "
                f"{'; '.join(problems)}. Pass the model_class= that the folder was saved from"
            )

    def problems(self) -> list[str]:
        """Every parameter has values and every tensor a place, but for what transformers itself does not mind."""
        info = _LoadingInfo(self._missing(), set(self.unexpected))
        self._model._adjust_missing_and_unexpected_keys(info)
        pairs = [(name, source, self._expected[name]) for name, source in sorted(self._sources.items())]
        unlike = [
            f"{name} {source.dtype} instead of {expected.dtype}"
            for name, source, expected in pairs
            if source.dtype.is_floating_point != expected.is_floating_point()
        ]
        mismatched = [
            f"{name} {source.shape} instead of {tuple(expected.shape)}"
            for name, source, expected in pairs
            if source.shape != tuple(expected.shape)
        ]
        return [
            f"{len(names)} {text}: {few(sorted(names))}"
            for names, text in (
                (info.missing_keys, "tensors are missing"),
                (info.unexpected_keys, "tensors are not in the model"),
                (self.twice, "tensors are stored more than once"),
                (mismatched, "tensors have another shape"),
                (unlike, "tensors have another kind of dtype"),
            )
            if names
        ]

    @property
    def origins(self) -> dict[str, tuple[Origin, torch.dtype]]:
        """By the name in the state dict, with the dtype in the files."""
        return {name: (source.origin, source.dtype) for name, source in self._sources.items()}

    def _missing(self) -> set[str]:
        """A tied parameter has its values from any of its names."""
        filled = {id(self._tensor(name)) for name in self._sources}
        return {name for name in self._expected if id(self._tensor(name)) not in filled}

    def _tensor(self, name: str) -> Tensor:
        path, _, attribute = name.rpartition(".")
        tensor: Tensor = getattr(self._model.get_submodule(path), attribute)
        return tensor

    def of_parameters(self) -> dict[int, tuple[nn.Parameter, Origin]]:
        """By the id of the parameter. A tied one may be stored under each of its names, with the same values."""
        found: dict[int, tuple[nn.Parameter, Origin]] = {}
        names: dict[int, str] = {}
        for name, (origin, _, _) in self._sources.items():
            param = self._tensor(name)
            if not isinstance(param, nn.Parameter):
                continue
            if id(param) not in found:
                found[id(param)], names[id(param)] = (param, origin), name
            elif not same_values(found[id(param)][1], origin):
                raise ValueError(
                    f"{names[id(param)]!r} and {name!r} are one parameter of {type(self._model).__name__}, but their "
                    "stored values differ; pass tie_word_embeddings=False if they are meant to"
                )
        return found

    def load_buffers(self) -> None:
        """They are real already, and small."""
        buffers = dict(self._model.named_buffers())
        for name, (origin, _, _) in self._sources.items():
            if name in buffers:
                origin.fill(buffers[name])


@dataclass
class _LoadingInfo:
    """What transformers' own check of names changes."""

    missing_keys: set[str]
    unexpected_keys: set[str]
