"""A Trainer's arguments: what the plan decides instead, what would make it wait for the GPU, what is refused."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from hightide.ir.foreign import kind_of
from hightide.ir.limits import Limits
from hightide.ir.plan import Update

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")  # names that TrainingArguments(optim=) has for them
ELSEWHERE = "hightide decides by itself what lives where: leave it out, and give limits=hightide.Limits(...)"
REFUSED = {
    "deepspeed": ELSEWHERE,
    "fsdp": f"{ELSEWHERE}; several GPUs train together under torchrun without it",
    "parallelism_config": f"{ELSEWHERE}; several GPUs train together under torchrun without it",
    "auto_find_batch_size": "no batch is too large: the plan cuts it into micro-batches that fit. Leave it out",
    "fp16_full_eval": "a wrapped model keeps its dtype; evaluate as it is, or with fp16=True under autocast",
    "bf16_full_eval": "a wrapped model keeps its dtype; evaluate as it is, or with bf16=True under autocast",
    "enable_jit_checkpoint": "it makes the folder before there is a checkpoint; use save_steps, which cost little here",
}

logger = logging.getLogger("hightide")


def as_limits(limits: Limits | Mapping[str, Any] | str | None) -> Limits | None:
    """`Limits`, or its arguments, or how much of the GPU."""
    if isinstance(limits, str):
        return Limits(gpu=limits)
    if isinstance(limits, Mapping):
        try:
            return Limits(**limits)
        except TypeError:
            raise ValueError(f"limits={dict(limits)!r}; it may have gpu, host and disk") from None
    if limits is None or isinstance(limits, Limits):
        return limits
    raise ValueError(f"limits is {kind_of(limits)}; pass hightide.Limits(gpu='24GiB', host='96GiB')")


def check_arguments(args: Any, update: str) -> None:
    """Raises ValueError for what cannot be had together with a plan."""
    for name, remedy in REFUSED.items():
        if getattr(args, name, None):
            raise ValueError(f"TrainingArguments({name}={getattr(args, name)!r}): {remedy}")
    if update == Update.IN_BACKWARD and args.max_grad_norm:
        raise ValueError(
            f"update='in_backward' with max_grad_norm={args.max_grad_norm:g}: clipping needs all gradients before the "
            "first update. Set max_grad_norm=0 (the norm is logged all the same), or leave update out"
        )
    if update == Update.IN_BACKWARD and args.fp16:
        raise ValueError(
            "update='in_backward' with fp16=True: a GradScaler looks at all gradients before the first update. Use "
            "bf16=True, or leave update out"
        )


def check_ranks(args: Any, is_launched: bool) -> None:
    """`is_launched`: by something that started several ranks. Without a GPU the arguments see these only if they are
    told to use the CPU; else all would train on the same data."""
    if is_launched and args.world_size == 1:
        raise ValueError(
            "several processes were started, but TrainingArguments sees one, so all would train on the same data: "
            "without a GPU pass TrainingArguments(use_cpu=True)"
        )


def check_optimizer_name(args: Any) -> None:
    """Where the Trainer makes the optimizer."""
    name = getattr(args.optim, "value", args.optim)
    if name not in OPTIMIZERS:
        raise ValueError(
            f"optim={name!r} is not supported; use {', '.join(map(repr, OPTIMIZERS))}, or pass optimizers=(optimizer, "
            "None) with an AdamW, Adam or SGD of torch.optim"
        )


def settle_arguments(args: Any) -> None:
    """Changes what another part decides here, and what would make every step wait for the GPU."""
    if args.max_grad_norm is None:
        args.max_grad_norm = 0.0
    if args.gradient_checkpointing:
        args.gradient_checkpointing = False
        warnings.warn(
            "gradient_checkpointing=True is left off: what is recomputed is in the plan, block by block", stacklevel=4
        )
    if args.logging_nan_inf_filter:
        args.logging_nan_inf_filter = False
        logger.info(
            "logging_nan_inf_filter is off: it waits for the GPU after every call. A loss that is not finite is logged "
            "as it is; to have the filter, set trainer.args.logging_nan_inf_filter = True"
        )
    if not torch.accelerator.is_available():  # torch would warn in every epoch that it pins nothing
        args.dataloader_pin_memory = False
    if args.dataloader_pin_memory:
        args.accelerator_config.non_blocking = True
    if args.n_gpu > 1:
        warnings.warn(
            f"{args.n_gpu} GPUs are visible and one is used: start the script with torchrun "
            f"--nproc-per-node={args.n_gpu} to train on all of them",
            stacklevel=4,
        )
        args._n_gpu = 1
