"""What each rank does in the tests of batches that are larger than the example: trains with batches of many sizes, in
hightide and with DDP of plain PyTorch, and notes what is said and when the plan changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranked_loop import optimizer_of
from ranked_training import digest
from torch.nn.parallel import DistributedDataParallel

import hightide
import models
from hightide.ir.tier import Tier
from hightide.observe import larger_batches
from hightide.runtime.surgery import run_of

Shape = tuple[int, int]  # samples, and tokens of each


def tokens(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, models.VOCABULARY, tuple(shape), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def batch_of(step: int, call: int, rank: int, shape: Shape) -> dict[str, torch.Tensor]:
    return tokens(shape, 1000 * step + 100 * call + rank)


def trained(
    model: Any,
    optimizer: Any,
    calls: list[list[list[Shape]]],
    rank: int,
    clip: float | None,
    refused: list[list[int]],
    seen: Callable[[], object] = lambda: None,
) -> tuple[list[float], list[str]]:
    """`calls`: by step and call, each rank's shape. A call that is refused is left out by all ranks."""
    losses, said = [], []
    for step, of_step in enumerate(calls):
        for call, shapes in enumerate(of_step):
            if [step, call] in refused:
                continue
            try:
                loss = models.loss_of(model, batch_of(step, call, rank, shapes[rank])) / len(of_step)
            except hightide.Refused as refusal:
                said.append(str(refusal))
                continue
            loss.backward()
            losses.append(loss.item())
            seen()
        if clip is not None:
            losses.append(float(torch.nn.utils.clip_grad_norm_(list(model.parameters()), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, said


def larger(
    rank: int,
    world: int,
    calls: list[list[list[Shape]]],
    gpu: str,
    examples: tuple[Shape, ...] = ((2, 8),),
    update: str = "deferred",
    clip: float | None = None,
    refused: list[list[int]] | None = None,
) -> dict[str, Any]:
    """`examples`: of the ranks, by turns. `refused`: calls that plain PyTorch leaves out."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, _ = models.llama(num_layers=2)
    limits = hightide.Limits(gpu=gpu, host="64MiB")
    first, accumulate = tokens(examples[rank % len(examples)], 0), len(calls[0])
    wrapped, stepping = hightide.wrap(
        model, optimizer_of(model), first, limits=limits, update=update, accumulate=accumulate
    )
    run, plans = run_of(wrapped), [hightide.stats(wrapped).plan.digest]
    assert run is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, said = trained(
            wrapped, stepping, calls, rank, clip, [], lambda: plans.append(hightide.stats(wrapped).plan.digest)
        )
    stats = hightide.stats(wrapped)
    found: dict[str, Any] = {
        "losses": losses,
        "refused": said,
        "plans": plans,
        "warned": [text for one in caught if "where batches had" in (text := str(one.message))],
        "batches": str(run.batches),
        "peaks": [stats.peak_bytes[tier] for tier in (Tier.GPU, Tier.HOST)],
        "limits": [stats.plan.gpu_limit_bytes, stats.plan.host_limit_bytes],
        "deviations": stats.deviations,
    }
    weights = wrapped.state_dict()
    hightide.unwrap(wrapped)
    found["digest"] = digest(dict(model.state_dict()))
    plain, _ = models.llama(num_layers=2)
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    found["plain"], _ = trained(ddp, optimizer_of(plain), calls, rank, clip, refused or [])
    known = plain.state_dict()
    del ddp  # before the group: see ranked_training.py
    found["difference"] = max((float((weights[name] - known[name]).abs().max()) for name in weights), default=0.0)
    dist.destroy_process_group()
    return found


def raises_in_profiling(rank: int, world: int, gpu: str) -> None:
    """The last rank has a larger batch, of which the profile cannot be made."""
    torch.set_num_threads(1)
    model, _ = models.llama(num_layers=2)
    limits = hightide.Limits(gpu=gpu, host="64MiB")
    wrapped, _ = hightide.wrap(model, optimizer_of(model), tokens((2, 8), 0), limits=limits)

    def broken(*_: Any) -> None:
        raise KeyError("no such profile")

    larger_batches.profile_again = broken  # type: ignore[assignment]
    models.loss_of(wrapped, tokens((4, 16) if rank == world - 1 else (2, 8), rank)).backward()


def takes_no_part(rank: int, world: int, gpu: str) -> None:
    """The last rank does not ask about larger batches, and goes on."""
    torch.set_num_threads(1)
    model, _ = models.llama(num_layers=2)
    wrapped, _ = hightide.wrap(
        model, optimizer_of(model), tokens((2, 8), 0), limits=hightide.Limits(gpu=gpu, host="64MiB")
    )
    if rank == world - 1:
        run_of(wrapped).admission = None  # type: ignore[union-attr]
    models.loss_of(wrapped, tokens((4, 16) if rank == 0 else (2, 8), rank)).backward()
