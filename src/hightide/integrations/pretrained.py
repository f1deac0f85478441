"""`hightide.from_pretrained`: a Hugging Face folder as a model without memory, whose values `wrap` reads into chunks.

What a file's tensors are called in the model, and which of them are joined or cut (experts, mostly), is transformers'
own knowledge, and is asked of it; only the reading is done here, one parameter at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hightide.loading.tensor_file import StoredTensor, read_header, same_values
from hightide.loading.unloaded import parameters_on_meta, remember
from hightide.runtime.origin import Origin

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NAMED = 5  # as many tensors are named in a message


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
    transformers = import_transformers()
    path = Path(folder)
    stored = _stored_tensors(path)
    config, unknown = transformers.AutoConfig.from_pretrained(
        path, local_files_only=True, return_unused_kwargs=True, **config_options
    )
    if unknown:
        raise ValueError(f"{type(config).__name__} has no {', '.join(map(repr, unknown))}; leave it out")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{path} is quantised: such parameters cannot be trained; use the original model")
    kind = class_of(transformers, config, model_class)
    config.dtype = _dtype(dtype, config, stored.values())
    model = build_without_values(kind, config)
    plan = _LoadingPlan(model, stored)
    plan.check(path)
    plan.load_buffers()
    model.eval()
    _read_generation_config(transformers, model, path)
    config._name_or_path = str(path)
    remember(model, str(path), plan.of_parameters())
    return model


# -- the folder --------------------------------------------------------------------------------------------------


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    if not folder.is_dir():
        raise ValueError(
            f"{str(folder)!r} is no folder here; hightide.from_pretrained reads a folder that was downloaded "
            "(huggingface_hub.snapshot_download) or saved (model.save_pretrained)"
        )
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; it must be a folder as model.save_pretrained writes it")
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise ValueError(
            f"{folder} has neither {SINGLE} nor {INDEX}; convert it once: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise ValueError(f"{len(absent)} of {len(files)} files of {folder} are missing: {_few(absent)}; get them again")
    stored = {name: tensor for file in files for name, tensor in read_header(folder / file).items()}
    lost = [name for name in weight_map if name not in stored]
    if lost:
        raise ValueError(f"{len(lost)} tensors of {folder / INDEX} are in none of its files: {_few(lost)}")
    return stored


# -- the model ---------------------------------------------------------------------------------------------------


def import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ValueError("models of transformers need it: pip install 'hightide[hf]'") from error
    return transformers


def class_of(transformers: Any, config: Any, asked: Any) -> Any:
    """The model class that was asked for, else the one that the config names, else its causal language model."""
    if asked is not None:
        mapping = getattr(asked, "_model_mapping", None)  # of an AutoModel class
        if mapping is None:
            return asked
        if type(config) not in mapping:
            raise ValueError(f"{asked.__name__} has no model for a {type(config).__name__}; pass another model_class")
        return mapping[type(config)]
    names = getattr(config, "architectures", None) or []
    if names:
        found = getattr(transformers, names[0], None)
        if found is None:
            raise ValueError(f"transformers has no model class {names[0]!r}, which the config names; pass model_class=")
        return found
    return class_of(transformers, config, transformers.AutoModelForCausalLM)


def _dtype(asked: torch.dtype | str | None, config: Any, stored: Iterable[StoredTensor]) -> torch.dtype:
    if asked in (None, "auto"):
        asked = config.dtype or next((one.dtype for one in stored if one.dtype.is_floating_point), torch.float32)
    dtype = getattr(torch, asked.removeprefix("torch."), None) if isinstance(asked, str) else asked
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={asked!r} is no floating-point dtype; use torch.bfloat16, torch.float32 or None")
    return dtype


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


def _read_generation_config(transformers: Any, model: Any, folder: Path) -> None:
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)


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


class _LoadingPlan:
    """An origin for every entry of the model's state dict, by the rules by which transformers loads."""

    def __init__(self, model: Any, stored: Mapping[str, StoredTensor]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        self._model = model
        self._expected: dict[str, Tensor] = model.state_dict()
        self.origins: dict[str, Origin] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.unexpected: list[str] = []
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
                self.origins[target], self.shapes[target] = stored[name], stored[name].shape
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
                self.origins[name] = _Part(converted, name)
                self.shapes[name] = tuple((value[0] if isinstance(value, list) else value).shape)
            else:
                self.unexpected.append(name)

    def check(self, folder: Path) -> None:
        """Every parameter has values and every tensor a place, but for what transformers itself does not mind."""
        info = _LoadingInfo(self._missing(), set(self.unexpected))
        self._model._adjust_missing_and_unexpected_keys(info)
        mismatched = [
            f"{name} {self.shapes[name]} instead of {tuple(self._expected[name].shape)}"
            for name in sorted(self.origins)
            if self.shapes[name] != tuple(self._expected[name].shape)
        ]
        problems = [
            f"{len(names)} {text}: {_few(sorted(names))}"
            for names, text in (
                (info.missing_keys, "tensors are missing"),
                (info.unexpected_keys, "tensors are not in the model"),
                (mismatched, "tensors have another shape"),
            )
            if names
        ]
        if problems:
            raise ValueError(
                f"{folder} does not fit {type(self._model).__name__} ({len(self._expected)} tensors): "
                f"{'; '.join(problems)}. Pass the model_class= that the folder was saved from"
            )

    def _missing(self) -> set[str]:
        """A tied parameter has its values from any of its names."""
        filled = {id(self._tensor(name)) for name in self.origins}
        return {name for name in self._expected if id(self._tensor(name)) not in filled}

    def _tensor(self, name: str) -> Tensor:
        path, _, attribute = name.rpartition(".")
        tensor: Tensor = getattr(self._model.get_submodule(path), attribute)
        return tensor

    def of_parameters(self) -> dict[int, tuple[nn.Parameter, Origin]]:
        """By the id of the parameter. A tied one may be stored under each of its names, with the same values."""
        found: dict[int, tuple[nn.Parameter, Origin]] = {}
        names: dict[int, str] = {}
        for name, origin in self.origins.items():
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
        for name, origin in self.origins.items():
            if name in buffers:
                origin.fill(buffers[name])


@dataclass
class _LoadingInfo:
    """What transformers' own check of names changes."""

    missing_keys: set[str]
    unexpected_keys: set[str]


def _few(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
