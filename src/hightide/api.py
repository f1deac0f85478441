"""The public functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from hightide.asked import Asked, Calls, chosen_device
from hightide.ir.foreign import kind_of
from hightide.ir.limits import Limits
from hightide.ir.plan import Plan
from hightide.observe.recorder import Recording
from hightide.observe.recorder import record as record_run
from hightide.observe.stats import Stats, read_stats
from hightide.profiler.model.block_finder import BlockChoice
from hightide.profiler.model.call_tree import Batch
from hightide.profiler.model.samples import Samples, possible_samples, samples_along_first
from hightide.profiler.switches import checkpointing
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of, unwrap_modules
from hightide.shard.collectives import Collectives
from hightide.shard.meeting import find_ranks, talks_even_alone
from hightide.shard.signs import Patience
from hightide.wrapping import plan_for, wrap_model


def wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    limits: Limits | None = None,
    plan: Plan | None = None,
    micro_batch: int | None = None,
    update: str = "deferred",
    gradients: str = "float32",
    compile: bool = False,
    device: str | torch.device | None = None,
    blocks: BlockChoice | None = None,
    accumulate: Calls = 1,
    group: ProcessGroup | None = None,
    timeout_s: float = Patience.timeout_s,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Makes a model and its optimizer train within limits; the training loop stays as it is. Returns the same model,
    and a new optimizer with the same groups and states: use it from now on in place of the one that was given.

    `batch` is one whole step's batch, as an example: a mapping (keyword arguments), a tuple (positional arguments) or
    a tensor. `plan` uses a plan made earlier instead of making one; where that uses a disk, `limits` says in which
    folder. `micro_batch` pins the micro-batch size.
    `update="in_backward"` is a promise of one step per backward and no clipping, which hides more of the update; a
    broken promise raises. `gradients="param"` rounds each finished gradient, whose sum is fp32, to its parameter's
    dtype: half the bytes to move and to keep on the host. `compile` compiles the blocks with torch.compile, equal ones
    once. `device`: CUDA where there is one, else 'cpu', the simulated accelerator: a bounded arena in RAM.
    `blocks` names the modules that move as a whole, by patterns of their names ("model.layers.*") or by their classes;
    by default they are found. A plan that was made with it needs it again. `accumulate` is how often the loop calls
    backward before each step, each time with a batch like the example: the step is planned as a whole. With "auto" the
    example is all samples of a step, and the plan says in how many equal calls the loop has to give them: its
    `accumulate`, of `num_samples` each.

    Under torchrun, or in a process of torch.distributed, all ranks train one model together, as with DDP: each calls
    this, with its own batches, and gradients are averaged. They are those of `group`, or of the default group. A rank
    that waits for another one gives up after `timeout_s`.
    """
    with _among_ranks(device, group, timeout_s) as (place, collectives):
        asked = Asked(
            model,
            optimizer,
            batch,
            limits=limits,
            plan=plan,
            micro_batch=micro_batch,
            update=update,
            gradients=gradients,
            compile=compile,
            device=place,
            blocks=blocks,
            accumulate=accumulate,
            ranks_on_node=_ranks_on_node(collectives),
        )
        return wrap_model(asked, collectives)


def wrap_again(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    before: Plan,
    *,
    device: str | torch.device | None = None,
    timeout_s: float = Patience.timeout_s,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """As `wrap`, for a run that goes on: with the plan that it had `before`, which was made for all that is asked here
    too. Where that cannot be used, another is made, which a warning tells; of several ranks all do the same. Unlike a
    plan that is given, it gives way to another where a larger batch comes. `options`: of `wrap`."""
    with _among_ranks(device, None, timeout_s) as (place, collectives):
        on_node = _ranks_on_node(collectives)
        asked = Asked(model, optimizer, batch, device=place, ranks_on_node=on_node, **options)
        return wrap_model(asked, collectives, before)


@contextmanager
def _among_ranks(
    device: str | torch.device | None, group: ProcessGroup | None, timeout_s: float
) -> Iterator[tuple[torch.device, Collectives | None]]:
    """Where a model is wrapped, and the ranks that do it together, if there are several. What is raised ends them."""
    place = chosen_device(device)
    is_any = device is None or torch.device(device) == torch.device("cuda")  # on several ranks a GPU for each
    ranks = find_ranks(group, place.type if is_any else place, Patience(timeout_s=timeout_s), talks_even_alone())
    try:
        collectives = None if ranks.is_alone else Collectives(ranks)
        if collectives is not None:
            collectives.open()
        yield (place, None) if collectives is None else (ranks.device, collectives)
    except BaseException as error:
        if ranks.watchman is not None:
            ranks.watchman.fail(error)
        ranks.close()
        raise


def _ranks_on_node(collectives: Collectives | None) -> int:
    return 1 if collectives is None else len(collectives.ranks.ranks_of_node)


def wrap_frozen(
    model: nn.Module,
    batch: Batch,
    *,
    limits: Limits | None = None,
    device: str | torch.device | None = None,
    blocks: BlockChoice | None = None,
    group: ProcessGroup | None = None,
    timeout_s: float = Patience.timeout_s,
) -> nn.Module:
    """Makes a model that is only evaluated run within limits, beside one that trains (the reference model of DPO, a
    teacher, a reward model): it has no gradients and no states, and what the GPU does not hold streams through it. Each
    of the models keeps to its own limits, so that together they keep to the sum. Returns the same model.

    All of its parameters must be frozen: `model.requires_grad_(False)`. Of several ranks each evaluates its own batches
    and has a shard of the model, as with `wrap`: together they have one copy, and all of them must call it."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {kind_of(model)}; pass a torch.nn.Module")
    trainable = [name for name, param in model.named_parameters() if param.requires_grad]
    if trainable:
        raise ValueError(
            f"{len(trainable)} parameters require gradients ({', '.join(trainable[:3])}), and a model without an "
            "optimizer is only evaluated; freeze it with model.requires_grad_(False), or use hightide.wrap"
        )
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError("the model has 0 parameters; there is nothing to move")
    # Evaluations run unsplit, and are planned so, where it is sure which dimension the samples are.
    whole = samples_along_first(batch) if possible_samples(batch) == [Samples.FIRST] else None
    frozen, _ = wrap(
        model,
        torch.optim.SGD([first], lr=0.0),  # updates nothing: its only parameter is frozen
        batch,
        limits=limits,
        micro_batch=whole,
        device=device,
        blocks=blocks,
        group=group,
        timeout_s=timeout_s,
    )
    return frozen


def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    limits: Limits | None = None,
    micro_batch: int | None = None,
    update: str = "deferred",
    gradients: str = "float32",
    compile: bool = False,
    device: str | torch.device | None = None,
    blocks: BlockChoice | None = None,
    accumulate: Calls = 1,
) -> Plan:
    """The plan that `wrap` would use, without touching the model."""
    asked = Asked(
        model,
        optimizer,
        batch,
        limits=limits,
        micro_batch=micro_batch,
        update=update,
        gradients=gradients,
        compile=compile,
        device=chosen_device(device),
        blocks=blocks,
        accumulate=accumulate,
    )
    return plan_for(asked)


def unwrap(model: nn.Module) -> nn.Module:
    """Makes a wrapped model plain again, with its present values; its wrapped optimizer must not be used any more."""

    def is_plain() -> None:
        unwrap_modules(model)
        checkpointing.switch_on_again(model)

    _run(model).close(is_plain)
    return model


@contextmanager
def on_all_ranks(model: nn.Module) -> Iterator[None]:
    """Inside, `state_dict()` of the model and of its optimizer give whole tensors on each of several ranks, and not on
    the first alone: each then has room for all of them."""
    run = _run(model)
    before, run.tells_all = run.tells_all, True
    try:
        yield
    finally:
        run.tells_all = before


def stats(model: nn.Module) -> Stats:
    """What the run has measured so far, beside its forecast."""
    return read_stats(_run(model))


def record(model: nn.Module) -> AbstractContextManager[Recording]:
    """Records what every lane does and what the GPU holds, without waiting for it until the end:

    with hightide.record(model) as recording:
        ...  # a few steps
    recording.timeline.save("run.json")  # of the last one; `hightide simulate plan.json --measured run.json` shows it
    """
    return record_run(_run(model))


def _run(model: nn.Module) -> Run:
    run = run_of(model)
    if run is None:
        raise ValueError(f"this {type(model).__name__} is not wrapped; pass the model that hightide.wrap returned")
    return run
