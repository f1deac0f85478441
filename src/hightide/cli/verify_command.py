"""`hightide verify`: whether a model trains in hightide as in plain PyTorch, on a small batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn

from hightide.cli.workload import (
    Dtype,
    GradientsOption,
    LoraOption,
    ModelArgument,
    UpdateOption,
    adamw,
    check_own_batch,
    load_workload,
    made_by_function,
    set_apart,
)
from hightide.integrations.lora import Lora, with_adapters
from hightide.ir.foreign import KEPT, shown
from hightide.ir.limits import Limits
from hightide.ir.plan import GradientDtype, Update
from hightide.profiler.model.call_tree import Batch
from hightide.profiler.model.repeated import FEW_LAYERS
from hightide.verification.side_by_side import OWN_ERROR
from hightide.verification.verify_training import verify as verify_model

SEQUENCES, LENGTH = 6, 32  # where the command does not say
SEED = 0
Made = tuple[str, nn.Module, torch.optim.Optimizer, Batch]


@dataclass(frozen=True)
class VerifyOptions:
    model: ModelArgument
    sequences: Annotated[int | None, typer.Option(help="Sequences per step; default: a few.")] = None
    length: Annotated[int | None, typer.Option(help="Tokens per sequence; default: a few.")] = None
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype of the parameters; the comparison runs in fp32.")] = None
    lora: LoraOption = None
    gpu: Annotated[str | None, typer.Option(metavar="SIZE", help="GPU memory that hightide may use.")] = None
    host: Annotated[str | None, typer.Option(metavar="SIZE", help="Host memory that hightide may use.")] = None
    micro_batch: Annotated[int | None, typer.Option(help="Samples per micro-batch; default: a third of them.")] = None
    update: UpdateOption = Update.DEFERRED
    gradients: GradientsOption = GradientDtype.FLOAT32
    compile: Annotated[bool, typer.Option("--compile", help="Compile blocks with torch.compile.")] = False
    device: Annotated[str | None, typer.Option(help="cuda, or cpu (the simulated accelerator).")] = None
    steps: Annotated[int, typer.Option(help="Number of optimizer steps.")] = 2
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory that plain PyTorch may use; default: what is free.")
    ] = None


def verify(options: VerifyOptions, console: Console, notes: Console) -> bool:
    """Whether it is equal. The verdict goes to `console`, everything else to `notes`."""
    torch.manual_seed(SEED)
    limits = Limits(gpu=options.gpu, host=options.host) if options.gpu or options.host else None
    name, model, optimizer, batch = _made(options, notes)
    try:
        with set_apart(name):
            verdict = verify_model(
                model,
                optimizer,
                batch,
                limits=limits,
                micro_batch=options.micro_batch,
                update=options.update,
                gradients=options.gradients,
                compile=options.compile,
                device=options.device,
                steps=options.steps,
                memory=options.memory,
            )
    except Exception as error:
        if OWN_ERROR not in getattr(error, "__notes__", ()):
            raise
        raise ValueError(f"{name} raised {type(error).__name__}, without hightide: {shown(error, KEPT)}") from error
    console.print(f"{name}\n{verdict}", markup=False, soft_wrap=True)
    return verdict.equal


def _made(options: VerifyOptions, notes: Console) -> Made:
    if (made := made_by_function(options.model)) is not None:
        return _of_function(*made, options)
    lora = Lora.parse(options.lora) if options.lora is not None else None
    sequences, length = options.sequences or SEQUENCES, options.length or LENGTH
    workload = load_workload(options.model, sequences, length, options.dtype or Dtype.FLOAT32, lora)
    if workload.num_layers is not None:
        notes.print(f"{FEW_LAYERS} of {workload.num_layers} layers: they are equal", soft_wrap=True)
    name, model = workload.name, workload.model
    return name, model, adamw(name, model), _tokens(name, model, sequences, length)


def _of_function(name: str, made: Any, options: VerifyOptions) -> Made:
    """Unlike for planning, what it returned is real."""
    parts = made if isinstance(made, tuple) else (made,)
    model, batch = parts[0], parts[-1] if len(parts) > 1 else None
    optimizer = parts[1] if len(parts) == 3 else None
    is_right = isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer | None) and len(parts) <= 3
    if not is_right:
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(
            f"{name} returned {kinds}; it must return module, (module, batch) or (module, optimizer, batch)"
        )
    if batch is not None:
        check_own_batch(name, options.sequences, options.length)
    if optimizer is not None and (options.dtype is not None or options.lora is not None):
        raise ValueError(f"{name} brings an optimizer of its own; leave out --dtype and --lora")
    if options.dtype is not None:
        model.to(options.dtype.torch)
    if options.lora is not None:
        model = with_adapters(model, Lora.parse(options.lora))
    if batch is None:
        batch = _tokens(name, model, options.sequences or SEQUENCES, options.length or LENGTH)
    return name, model, optimizer or adamw(name, model), batch


def _tokens(name: str, model: nn.Module, sequences: int, length: int) -> Batch:
    """Random ones: equal samples would hide an error that mixes them up."""
    words = next((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if words is None:
        raise ValueError(f"{name} has 0 embeddings, so its batch is not known; let a function return (module, batch)")
    tokens = torch.randint(0, words, (sequences, length))
    return {"input_ids": tokens, "labels": tokens.clone()}
