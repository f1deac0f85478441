"""`hightide.verify`: a few steps plain and a few steps wrapped, on copies, and whether the two agree."""

from __future__ import annotations

import time

import torch
from torch import nn

from hightide.asked import check_fresh, chosen_device
from hightide.free_memory import GPU_HEADROOM
from hightide.ir.limits import Limits
from hightide.ir.units import parse_bytes
from hightide.process.progress import progress_line
from hightide.process.system import free_host_bytes
from hightide.profiler.model.block_finder import BlockChoice
from hightide.profiler.model.call_tree import Arguments, Batch, call_arguments
from hightide.shard.meeting import are_several
from hightide.verification.copies import as_before
from hightide.verification.observed_training import LossOf, recorded_warnings, usual_loss
from hightide.verification.side_by_side import NotTrained, SideBySide
from hightide.verification.smaller import MemoryBudget
from hightide.verification.verdict import Verdict

TOLERANCE = 1e-5  # of the largest entry of a tensor, in fp32


def verify(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    loss: LossOf | None = None,
    limits: Limits | None = None,
    micro_batch: int | None = None,
    update: str = "deferred",
    gradients: str = "float32",
    compile: bool = False,
    device: str | torch.device | None = None,
    blocks: BlockChoice | None = None,
    steps: int = 2,
    tolerance: float = TOLERANCE,
    memory: int | str | None = None,
) -> Verdict:
    """Trains copies of the model plain and wrapped, and says whether, and else where first, the two differ.

    Everything but these is as for `wrap`: `loss` is a function of what the model returns; by default `.loss`,
    `["loss"]`, the first number of a tuple or the number itself. `steps`: with the batch, then with its samples in
    another order. `tolerance`: of the largest entry of each tensor; what rounding does to this model is measured, and
    allowed too. `memory`: what may be taken of the device; by default what is free. A model that does not fit there
    plain is made smaller, and a `ValueError` says so where that is not possible.

    Model, optimizer and random states are not touched. A model that hightide refuses is no exception: the verdict says
    so. What the model itself raises in plain PyTorch is raised as it is.
    """
    began_s = time.perf_counter()
    check_fresh(model, optimizer)
    if are_several():
        raise ValueError(
            "verify in one of several ranks: it compares one process with plain PyTorch; call it without torchrun and "
            "without a process group"
        )
    if steps < 1:
        raise ValueError(f"steps={steps}; at least 1 is needed, and 2 to see what an update leads to")
    if not tolerance > 0:
        raise ValueError(f"tolerance={tolerance}; it must be above 0: sums are taken in another order")
    place = chosen_device(device)
    shared = {"update": update, "gradients": gradients, "compile": compile, "device": place, "blocks": blocks}
    given = Arguments(*call_arguments(batch))
    runs = SideBySide(model, optimizer, given, loss or usual_loss, steps, limits, micro_batch, place, shared)
    with progress_line("hightide.verify"), as_before(place), recorded_warnings() as said:
        try:
            runs.prepare(_room(place, memory))
            runs.run(tolerance)
        except NotTrained as refusal:
            runs.refusal = str(refusal)
    return Verdict(
        equal=not runs.refusal and not runs.failure and all(row.equal for row in runs.rows),
        rows=tuple(runs.rows),
        runs=tuple(runs.trained),
        changed=tuple(runs.changed),
        unsplit=tuple(runs.unsplit),
        warnings=tuple(said),
        refusal=runs.refusal,
        failure=runs.failure,
        tolerance=tolerance,
        seconds=time.perf_counter() - began_s,
    )


def _room(device: torch.device, memory: int | str | None) -> MemoryBudget:
    host_bytes = free_host_bytes()
    asked = parse_bytes(memory, "memory") if memory is not None else None
    if device.type != "cuda":
        return MemoryBudget(0, host_bytes if asked is None else asked)
    free_bytes = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    usable_bytes = int((free_bytes - torch.cuda.memory_allocated(device)) * GPU_HEADROOM)
    return MemoryBudget(usable_bytes if asked is None else asked, host_bytes)
