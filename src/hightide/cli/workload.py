"""The MODEL of a command: a preset's name, a Hugging Face folder, or a function in a Python file. Weights are never
read or made. And the machine that it plans for."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hightide.doctor.known import known_machine, load_machine, preset_names
from hightide.integrations.foreign_folder import CONFIG
from hightide.integrations.lora import Lora, with_adapters
from hightide.integrations.shapes import (
    SHAPES,
    check_length,
    config_of,
    config_of_folder,
    max_length,
    num_layers_of,
    shaped_model,
)
from hightide.ir.block import ModelProfile
from hightide.ir.foreign import KEPT, kind_of, quoted, shown
from hightide.ir.machine import Machine
from hightide.ir.plan import GradientDtype, Update
from hightide.profiler.model.call_tree import Batch
from hightide.profiler.model.model_profile import profile_model
from hightide.profiler.model.repeated import FEW_LAYERS, stack_of, with_layers

MachineOption = Annotated[
    str | None,
    typer.Option(metavar="NAME|FILE", help="A preset or a machine file; default: what doctor measured here."),
]
SEQUENCES, LENGTH = 8, 2048  # where the command does not say
CPU, GPU = torch.device("cpu"), torch.device("cuda")
MAX_TOKENS = 2**28  # per step: so many are made, to plan with

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A preset's name, such as llama-3.1-8b, a Hugging Face folder, or FILE.py:FUNCTION."
    ),
]
LoraOption = Annotated[
    str | None, typer.Option(metavar="RANK[:TARGETS]", help="LoRA with PEFT, such as 16 or 16:q_proj,v_proj.")
]

UpdateOption = Annotated[
    Update, typer.Option(help="deferred: beside the next forward; in_backward: faster, without clipping.")
]
GradientsOption = Annotated[
    GradientDtype, typer.Option(help="Finished gradients: float32, or param (the parameter's dtype).")
]


class Dtype(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    @property
    def torch(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.value)
        return dtype


@dataclass(frozen=True)
class Workload:
    name: str
    model: nn.Module
    batch: Batch
    has_own_batch: bool = False  # --sequences and --length do not decide about it
    num_layers: int | None = None  # where `model` has only FEW_LAYERS of them: equal ones are profiled once

    def profile(self, runs_on: torch.device = GPU) -> ModelProfile:
        """With AdamW over what is trained. `runs_on`: whose kernels are counted; it need not be there."""
        optimizer = adamw(self.name, self.model)
        with set_apart(self.name):
            profile, probed = profile_model(
                self.model, optimizer, self.batch, device=None, runs_on=runs_on, source=None
            )
        if probed.failure:
            batch = "let a function return the model with a batch of its own: FILE.py:FUNCTION -> (module, batch). "
            raise ValueError(
                f"{self.name} does not run without values: {probed.failure}; {'' if self.has_own_batch else batch}"
                "If it asks for values of what it computes, what it needs is not known before it runs: hightide.wrap "
                "and hightide.plan measure it in one pass on values, on the machine that trains it"
            )
        if self.num_layers is None:
            return profile
        layer = self.model.get_submodule(f"{stack_of(profile)}.1")
        buffer_bytes = sum(buffer.numel() * buffer.element_size() for buffer in layer.buffers())
        return with_layers(profile, self.num_layers, buffer_bytes)


def load_workload(
    source: str, sequences: int | None, length: int | None, dtype: Dtype | None, lora: Lora | None
) -> Workload:
    for name, value in (("--sequences", sequences), ("--length", length)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if (sequences or SEQUENCES) * (length or LENGTH) > MAX_TOKENS:
        raise ValueError(
            f"--sequences {sequences or SEQUENCES} of --length {length or LENGTH} are more than {MAX_TOKENS} tokens; "
            "choose fewer"
        )
    workload = _load(source, sequences, length, dtype)
    if lora is None:
        return workload
    adapted = with_adapters(workload.model, lora)
    return replace(workload, name=f"{workload.name} with LoRA of rank {lora.rank}", model=adapted)


def check_source(source: str) -> None:
    """Whether there is such a model; without loading it, so that it can be told first."""
    path, colon, _ = source.rpartition(":")
    if colon and path.endswith(".py"):
        _check_file(Path(path))
    elif source not in SHAPES and not Path(source).is_dir():
        raise ValueError(
            f"there is no model {quoted(source)}: it is no folder with a config.json and no FILE.py:FUNCTION, and "
            f"presets are {', '.join(SHAPES)}"
        )


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"there is no file {path}; MODEL may be FILE.py:FUNCTION")


def _load(source: str, sequences: int | None, length: int | None, dtype: Dtype | None) -> Workload:
    check_source(source)
    if source in SHAPES:
        num_layers = num_layers_of(source)
        config = config_of(source, length or 1, min(num_layers, FEW_LAYERS))
        workload = _of_config(source, config, sequences, length, (dtype or Dtype.BFLOAT16).torch)
        return replace(workload, num_layers=num_layers) if num_layers > FEW_LAYERS else workload
    if (made := made_by_function(source, torch.device("meta"))) is not None:
        return _of_function(*made, sequences, length, dtype)
    folder = Path(source)
    if folder.is_dir():
        config = config_of_folder(folder)
        _check_decoder(config, folder)
        chosen = dtype.torch if dtype is not None else config.dtype or torch.bfloat16
        return _of_config(folder.absolute().name, config, sequences, length, chosen, folder / CONFIG)
    raise AssertionError("checked before")


def _check_decoder(config: Any, folder: Path) -> None:
    """The batch here is `input_ids` and `labels`: the decoder's inputs are made from labels behind that token."""
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        raise ValueError(
            f"{folder} is of an encoder with a decoder, and its config.json has no decoder_start_token_id, which its "
            "decoder needs; add it there (0 for T5), or let a function return the model with a batch that has "
            "decoder_input_ids: FILE.py:FUNCTION -> (module, batch)"
        )


def _of_config(
    name: str,
    config: Any,
    sequences: int | None,
    length: int | None,
    dtype: torch.dtype,
    source: Path | None = None,
) -> Workload:
    length = length or min(LENGTH, max_length(config) or LENGTH)
    check_length(config, length, name)
    return Workload(name, shaped_model(config, dtype, source), _tokens(sequences, length))


def _of_function(name: str, made: Any, sequences: int | None, length: int | None, dtype: Dtype | None) -> Workload:
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} returned {kind_of(made)}; it must return a torch.nn.Module or (module, batch)")
    if dtype is not None:
        model.to(dtype.torch)
    if batch is None:
        return Workload(name, model, _tokens(sequences, length or LENGTH))
    check_own_batch(name, sequences, length)
    real = tree_map_only(Tensor, lambda tensor: torch.zeros_like(tensor, device="cpu"), batch)
    return Workload(name, model, real, has_own_batch=True)


def check_own_batch(name: str, sequences: int | None, length: int | None) -> None:
    if sequences is not None or length is not None:
        raise ValueError(f"{name} brings a batch of its own; leave out --sequences and --length")


def adamw(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Over what is trained."""
    trained = [param for param in model.parameters() if param.requires_grad]
    if not trained:
        raise ValueError(f"{name} has 0 parameters that require a gradient; there is nothing to train")
    return torch.optim.AdamW(trained, lr=1e-3)


def made_by_function(source: str, device: torch.device | None = None) -> tuple[str, Any] | None:
    """What a function of FILE.py:FUNCTION returns, and how it is called; None: the source is none."""
    path, colon, function = source.rpartition(":")
    if not colon or not path.endswith(".py"):
        return None
    make, name = _find_function(Path(path), function), f"{Path(path).name}:{function}"
    with device or nullcontext(), _blamed(name):
        return name, make()


def _find_function(path: Path, function: str) -> Callable[[], object]:
    _check_file(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "the file is one of Python"
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.absolute().parent))  # so that it can import its neighbours, as a script can
    with _blamed(path.name):
        spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        named = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ValueError(f"{path} has no function {function!r}; it has {', '.join(named) or 'none'}")
    make: Callable[[], object] = found
    return make


@contextmanager
def _blamed(name: str) -> Iterator[None]:
    """What the user's own code raises is bad input. Its traceback is shown, from its own first line on."""
    try:
        with set_apart(name):
            yield
    except Exited:
        raise
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, contextlib.__file__):
            frames = frames.tb_next
        print("".join(traceback.format_exception(type(error), error, frames)), end="", file=sys.stderr)
        raise ValueError(f"{name} raised {type(error).__name__}: {shown(error, KEPT)}") from error


class Exited(ValueError):
    pass


@contextmanager
def set_apart(name: str) -> Iterator[None]:
    """While code of the model runs: what it prints is none of the command's output, and where it ends the program
    nothing was answered, whatever code it ends with."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        raise Exited(f"{name} ended the program (sys.exit, {quoted(error.code)}); it must return instead") from error


def _tokens(sequences: int | None, length: int) -> Batch:
    """Their values do not matter: nothing is computed from them."""
    tokens = torch.zeros(sequences or SEQUENCES, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def chosen_machine(name: str | None, device: torch.device, notes: Console) -> Machine:
    """A preset or a file by name, else what `hightide doctor` has measured here."""
    if name is not None:
        return load_machine(name)
    known = known_machine(device)
    if known.machine is None:
        raise ValueError(
            f"{known.problem}; run `hightide doctor`, or name a machine: --machine {'|'.join(preset_names())} or a file"
        )
    if known.problem:
        notes.print(f"note: {known.problem}; `hightide doctor` measures again", soft_wrap=True)
    return known.machine
