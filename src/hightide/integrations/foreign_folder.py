"""Hugging Face folders, which come from strangers: their config.json, and which files hold their tensors.

[Note: what a config may decide] transformers sets whatever keys it finds in a config.json on its config object, and
some of them make it load code: `auto_map` from the folder or a hub, an implementation of attention or experts by the
name of a repository (or one that falls back to such a repository), a backbone by its name in a hub, another config
file. None of that happens here: those keys are refused, or taken away where they are not needed; remote code is never
trusted; and while the model is made nothing is fetched from a hub. Numbers are bounded, because a model is built as
large as its config says before anything can be known about it. Whatever transformers then raises is about the file.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from hightide.ir.foreign import KEPT, kind_of, quoted, read_json, shown
from hightide.loading.tensor_file import StoredTensor, read_header

CONFIG = "config.json"
SINGLE = "model.safetensors"
OTHER_WEIGHTS = (".bin", ".pt", ".pth")
INDEX = "model.safetensors.index.json"
NAMED = 5  # as many tensors are named in a message

IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")
OWN_CODE = {None, "", "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm"}  # in torch or transformers itself
QUANTISED = ("quantization_config", "compression_config")
FOREIGN_CODE = ("configuration_files", "trust_remote_code", "use_kernels", "kernel_config", "use_timm_backbone")
MAX_NUMBER = 2**40  # of any setting
# Of what modules, lists and tables are made of, one by one.
MAX_COUNTS = (
    (re.compile(r"(.*_)?(layers?|depths?)"), 2048),
    (re.compile(r"(.*_)?(labels|experts|heads?|blocks|stages|codebooks|groups|levels|quantizers|hashes)"), 65_536),
)


# -- the config ----------------------------------------------------------------------------------------------------


def import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ValueError("models of transformers need it: pip install transformers") from error
    return transformers


def read_config(folder: Path, options: Mapping[str, Any]) -> Any:
    """The transformers config of a folder, with the user's options on top."""
    transformers = import_transformers()
    path = folder / CONFIG
    if "trust_remote_code" in options:
        raise ValueError("hightide never runs code of a model's folder: leave trust_remote_code out")
    _check_settings(read_json(path, CONFIG), path)
    with blaming(path, options):
        config, unknown = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, return_unused_kwargs=True, **options
        )
        configs = list(_with_parts(config, transformers.PreTrainedConfig))
    if unknown:
        raise ValueError(f"{type(config).__name__} has no {', '.join(map(repr, unknown))}; leave it out")
    for part in configs:
        _check_made(part, path, options)
    config._name_or_path = str(folder)  # the file may say another
    return config


def _check_settings(settings: object, path: Path) -> None:
    """See [Note: what a config may decide]."""
    if not isinstance(settings, dict):
        raise ValueError(
            f"{shown(path)} is {quoted(settings)}; it must be a mapping, as model.save_pretrained writes it"
        )
    if "auto_map" in settings:
        warnings.warn(
            f"{shown(path)} names code of its own (auto_map), which hightide never runs: transformers' own class is "
            "used where it has one",
            stacklevel=5,
        )
    for key, value in _entries(settings):
        where = f"{shown(path)}: {shown(key)}"
        if key in QUANTISED and value is not None:
            raise ValueError(
                f"{shown(path.parent)} is quantised ({key} in {CONFIG}): such parameters cannot be trained; use the "
                "original model"
            )
        if key in FOREIGN_CODE and value:
            raise ValueError(f"{where} is {quoted(value)}: a folder may not have other code or files loaded; remove it")
        if IMPLEMENTATION.fullmatch(key):
            for name in value.values() if isinstance(value, dict) else [value]:
                _check_implementation(name, where)
        if (key == "model_type" and str(value).startswith("timm")) or key == "pretrained_cfg":
            raise ValueError(f"{where} is {quoted(value)}: timm finds models by names of a hub; use another model")
        if key in ("dtype", "torch_dtype") and value is not None:
            named = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
            if not isinstance(named, torch.dtype) or not named.is_floating_point:
                raise ValueError(f"{where} is {quoted(value)}, which is no floating-point dtype; use bfloat16")
        _check_number(key, value, where)


def _check_implementation(name: object, where: str) -> None:
    if not isinstance(name, str | None) or name not in OWN_CODE:
        raise ValueError(
            f"{where} is {quoted(name)}: it may have code loaded from elsewhere, which a folder may not decide; remove "
            "it there, and pass attn_implementation= yourself if you want it"
        )


def _check_number(key: str, value: object, where: str) -> None:
    most = next((most for pattern, most in MAX_COUNTS if pattern.fullmatch(key)), MAX_NUMBER)
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int) and abs(number) > most:
            raise ValueError(f"{where} is {quoted(number)}; at most {most} makes sense")


def _entries(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Of all levels. The file is not deep: that was checked when it was read."""
    for key, value in settings.items():
        yield key, value
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                yield from _entries(part)


def _with_parts(config: Any, kind: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if isinstance(value, kind):
            yield from _with_parts(value, kind)


def _check_made(config: Any, path: Path, options: Mapping[str, Any]) -> None:
    """What was made of it, by whichever way."""
    vars(config).pop("auto_map", None)
    for name in ("_attn_implementation", "_experts_implementation"):
        value, asked = getattr(config, name, None), options.get(name.removeprefix("_"))
        if value not in (asked.values() if isinstance(asked, dict) else [asked]):  # the user's own word is trusted
            _check_implementation(value, f"{shown(path)}: {name}")


def class_of(config: Any, asked: Any) -> Any:
    """The model class that was asked for, else the one that the config names, else its causal language model."""
    transformers = import_transformers()
    if asked is not None:
        mapping = getattr(asked, "_model_mapping", None)  # of an AutoModel class
        if mapping is None:
            return asked
        if type(config) not in mapping:
            raise ValueError(f"{asked.__name__} has no model for {kind_of(config)}; pass another model_class")
        return mapping[type(config)]
    names = getattr(config, "architectures", None)
    if not names:
        return class_of(config, transformers.AutoModelForCausalLM)
    name = names[0] if isinstance(names, list | tuple) else None
    found: Any = None
    if isinstance(name, str) and name.isidentifier():
        with suppress(Exception):  # one that needs what is not installed
            found = getattr(transformers, name, None)
    if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
        raise ValueError(f"transformers has no model class {quoted(name)}, which the config names; pass model_class=")
    if not isinstance(config, getattr(found, "config_class", None) or ()):
        raise ValueError(
            f"the config names {found.__name__} and is {kind_of(config)}, which is not what that class takes; "
            "pass model_class="
        )
    return found


@contextmanager
def blaming(path: Path, options: Mapping[str, Any] | None = None) -> Iterator[None]:
    """What transformers and torch raise of a folder's file is about that file; and they fetch nothing meanwhile, unless
    the user's own options say where from."""
    try:
        with nullcontext() if options and "attn_implementation" in options else _offline():
            yield
    except Exception as error:
        if "trust_remote_code" in str(error):  # which it advises, and nothing here takes
            raise ValueError(
                f"{shown(path)} needs custom code (auto_map), which hightide never runs; load the model in a script of "
                "your own, with trust_remote_code=True, and give it to hightide.wrap"
            ) from error
        raise ValueError(
            f"transformers cannot make a model of {shown(path)}: {type(error).__name__}: {shown(error, KEPT)}"
        ) from error


@contextmanager
def _offline() -> Iterator[None]:
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


# -- its files -----------------------------------------------------------------------------------------------------


def check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(
            f"{quoted(str(folder))} is no folder here; hightide.from_pretrained reads a folder that was downloaded "
            "(huggingface_hub.snapshot_download) or saved (model.save_pretrained)"
        )
    if not (folder / CONFIG).is_file():
        if (folder / "adapter_config.json").is_file():
            raise ValueError(
                f"{shown(folder)} has no {CONFIG}, only adapters (PEFT): merge them into their model with "
                "PeftModel.from_pretrained(model, FOLDER).merge_and_unload(), save that with save_pretrained, its "
                "tokenizer too, and name that folder"
            )
        raise ValueError(f"{shown(folder)} has no {CONFIG}; it must be a folder as model.save_pretrained writes it")


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """By name; all headers have been checked."""
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    if not (folder / INDEX).exists():
        remedy = "it was not downloaded as a whole; get it again"
        if any(one.suffix in OTHER_WEIGHTS for one in folder.iterdir()):
            remedy = "convert it once: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        raise ValueError(f"{shown(folder)} has neither {SINGLE} nor {INDEX}; {remedy}")
    return _of_index(folder)


def _of_index(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in the file that the index says, and no others. Files may be links, as in the cache of a hub; names
    may not lead out of the folder."""
    index = read_json(folder / INDEX, "index")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{shown(folder / INDEX)} has no weight_map with names and files; get it again")
    for name in weight_map.values():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", name):
            raise ValueError(
                f"{shown(folder / INDEX)} names the file {quoted(name)}, which is no name of a .safetensors file in "
                "this folder; get it again"
            )
    files = sorted(set(weight_map.values()))
    absent = [name for name in files if not (folder / name).exists()]
    if absent:
        raise ValueError(
            f"{len(absent)} of {len(files)} files of {shown(folder)} are missing: {few(absent)}; get them again"
        )
    stored: dict[str, StoredTensor] = {}
    for file, found in [(file, read_header(folder / file)) for file in files]:
        strays = [name for name in found if weight_map.get(name) != file]
        if strays:
            raise ValueError(
                f"{len(strays)} tensors of {shown(folder / file)} are not there by {INDEX}: {few(strays)}; get both "
                "again"
            )
        stored |= found
    lost = [name for name in weight_map if name not in stored]
    if lost:
        raise ValueError(f"{len(lost)} tensors of {shown(folder / INDEX)} are in none of its files: {few(lost)}")
    return stored


def few(names: list[str]) -> str:
    return ", ".join(shown(name) for name in names[:NAMED]) + (", ..." if len(names) > NAMED else "")
