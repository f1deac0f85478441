"""Copies of the user's model and optimizer, which are trained in their place.

[Note: what copies change] Rounding hides errors and errors look like rounding, so the copies are made to round little:
16-bit parameters become fp32, and the eps of an Adam is raised. Adam divides a gradient by its own size: where that is
all rounding (the bias of keys in an attention has no gradient at all), the update is a random number of the size of the
learning rate, in plain PyTorch as in hightide.
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hightide.loading.initial import forget_initialised, initialised_modules, lacks_values, reset_of
from hightide.loading.unloaded import Unloaded
from hightide.profiler.fake.exchange import exchange
from hightide.profiler.trial.quiet import float32_precision
from hightide.profiler.trial.state import GlobalRandom

SEED = 0
HALF = (torch.bfloat16, torch.float16)
EPS_SHARE = 0.01  # of the largest gradient
LEAST_UPDATE = 1e-3  # of the weight with the largest gradient: smaller ones are lost in the last bits of weights


def copied_model(model: nn.Module) -> nn.Module:
    """With values of its own: parameters without values get some from the model's initialisers, else random ones.
    Gradients, and gradient hooks of parameters, are not copied."""
    memo: dict[int, Any] = {}
    unloaded = [module for module in model.modules() if isinstance(module, Unloaded)]
    for without in unloaded:  # these refuse to be copied, since their values would be lost; here they get others
        kind: Any = type(without).__bases__[-1]
        memo[id(without)] = kind.__new__(kind)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:  # left behind by an earlier forward
                memo[id(value)] = value.detach().clone()
            elif isinstance(value, torch.Generator):
                memo[id(value)] = value.clone_state()
    try:
        for without in unloaded:
            memo[id(without)].__dict__.update(copy.deepcopy(vars(without), memo))
        made: nn.Module = copy.deepcopy(model, memo)
    except Exception as error:
        raise ValueError(
            f"this {type(model).__name__} cannot be copied (copy.deepcopy: {type(error).__name__}: {error}), and "
            "verify trains copies only; make what it names an attribute that can be copied, or verify a fresh model"
        ) from error
    _give_values(made)
    for tensor in (*made.parameters(), *made.buffers()):
        if tensor.dtype in HALF:
            tensor.data = tensor.data.float()
    return made


def twins_of(model: nn.Module, made: nn.Module) -> dict[int, nn.Parameter]:
    """The copy of each parameter, by the id of the original. A copy may have fewer."""
    copies = dict(made.named_parameters())
    return {id(param): copies[name] for name, param in model.named_parameters() if name in copies}


def copied_optimizer(optimizer: torch.optim.Optimizer, twins: Mapping[int, nn.Parameter]) -> torch.optim.Optimizer:
    """Of the same class, groups and states, over the copies. For a parameter that has none there is one without
    memory."""
    groups = []
    states: dict[Tensor, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        params = []
        for param in group["params"]:
            twin = twins.get(id(param))
            if twin is None:
                params.append(nn.Parameter(torch.empty(param.shape, device="meta"), param.requires_grad))
                continue
            params.append(twin)
            if param in optimizer.state:
                state = {name: _copied(value) for name, value in optimizer.state[param].items()}
                states[twin] = {  # moments lie where their parameter is; counters stay on the CPU
                    name: value.to(twin.device) if isinstance(value, Tensor) and value.ndim else value
                    for name, value in state.items()
                }
        groups.append({**{name: _copied(value) for name, value in group.items() if name != "params"}, "params": params})
    made = type(optimizer)(groups)  # type: ignore[call-arg]
    made.state.update(states)
    return made


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value.detach().to(torch.float32, copy=True) if value.dtype in HALF else value.detach().clone()


def steady(optimizer: torch.optim.Optimizer, largest_gradient: float) -> list[str]:
    """Makes updates follow from gradients, not from their rounding; what was changed, in words. See [Note: what copies
    change]."""
    said: dict[str, None] = {}
    if largest_gradient == 0.0:
        return []
    for group in optimizer.param_groups:
        eps, lr = float(f"{EPS_SHARE * largest_gradient:.1g}"), float(group["lr"])
        is_adam = "eps" in group
        if is_adam and eps > group["eps"]:
            name = type(optimizer).__name__
            said[f"eps of {name} raised from {group['eps']:g} to {eps:g}: it would magnify rounding"] = None
            group["eps"] = eps
        least = LEAST_UPDATE if is_adam else float(f"{LEAST_UPDATE / largest_gradient:.1g}")
        if lr < least:
            said[f"a learning rate of {lr:g} raised to {least:g}: updates would be lost in rounding"] = None
            group["lr"] = least
    return list(said)


def hooked_parameters(model: nn.Module) -> list[str]:
    return [
        name for name, param in model.named_parameters() if param._backward_hooks or param._post_accumulate_grad_hooks
    ]


# -- values --------------------------------------------------------------------------------------------------------


def _give_values(model: nn.Module) -> None:
    if not lacks_values(model):
        return
    seed_all(torch.device("cpu"))
    modules = list(initialised_modules(model))
    forget_initialised(model)

    def unset(tensor: Tensor) -> Tensor | None:
        if not tensor.is_meta:
            return None
        if not isinstance(tensor, nn.Parameter):
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        dtype = torch.float32 if tensor.dtype in HALF else tensor.dtype
        return nn.Parameter(torch.full(tensor.shape, math.nan, dtype=dtype), requires_grad=tensor.requires_grad)

    exchange(list(model.modules()), unset)
    with torch.no_grad():
        for module in modules:
            (reset_of(module) or module.initialize_weights)()  # type: ignore[operator]
        for param in model.parameters():
            if param.isnan().any():
                param.normal_(std=0.02)


def nudge(model: nn.Module) -> None:
    """Changes the last bit of every weight, up or down: what comes of that is what rounding may do."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                signs = torch.randint(0, 2, param.shape, generator=generator, dtype=torch.int8).to(param.device) * 2 - 1
                param.mul_(1 + torch.finfo(param.dtype).eps * signs.to(param.dtype))


# -- random numbers ------------------------------------------------------------------------------------------------


def seed_all(device: torch.device) -> None:
    GlobalRandom(device).seed(SEED)
    random.seed(SEED)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(SEED)


@contextmanager
def as_before(device: torch.device) -> Iterator[None]:
    """Random states, and how products of matrices are rounded on a GPU, are afterwards what they were."""
    before = GlobalRandom(device)
    try:
        with torch.enable_grad(), float32_precision():
            yield
    finally:
        before.restore()
