"""What `wrap` plans with: the machine that it runs on, and what a step costs there.

[Note: small models] Measuring a machine and a model, and a thorough search, take seconds: too much for a model whose
step takes milliseconds. Those are planned with assumed speeds and by a quick search. Speeds are assumed on the
simulated accelerator too, where plans must not depend on how busy the machine is. Assumed speeds may make a plan slower
than another, never larger."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

import torch

from hightide.doctor.known import known_machine, load_machine, remember
from hightide.doctor.measure import examine
from hightide.ir.block import ModelProfile
from hightide.ir.costs import Costs
from hightide.ir.machine import SIMULATED, Machine
from hightide.ir.plan import GradientDtype, Update
from hightide.planner.choice import check_micro_batch
from hightide.planner.cost import with_peaks
from hightide.planner.estimate import estimate
from hightide.planner.question import Question
from hightide.profiler.probe import ProbeResult
from hightide.profiler.recording import Record
from hightide.progress import tell
from hightide.rehearsal.rehearse import let_go, measure_costs

SMALL_NUMEL = 2**24  # parameters
ASSUMED = "rtx-3090"  # a preset

_disturbed: dict[torch.device, Machine] = {}  # measured by this process, and not kept for others

Profiled = tuple[ModelProfile, ProbeResult, Sequence[Record]]


@dataclass(frozen=True)
class Asked:
    """What the user wants, and gives for it."""

    gpu_bytes: int
    host_bytes: int
    update: Update
    micro_batch: int | None
    num_moments: int
    gradients: GradientDtype


def question_about(
    profiled: Profiled, optimizer: torch.optim.Optimizer, device: torch.device, compile: bool, asked: Asked
) -> Question:
    """On a GPU the model is rehearsed."""
    profile = profiled[0]
    check_micro_batch(profile, asked.micro_batch)
    machine = machine_of(device, _is_small(profile))
    fallback = "the plan follows from estimated times: it fits, and may be slower than another"
    costs = _rehearsed(profiled, optimizer, device, compile, asked.gpu_bytes, fallback) or estimate(profile, machine)
    return Question(
        with_peaks(profile, costs),
        costs,
        machine,
        asked.gpu_bytes,
        asked.host_bytes,
        asked.update,
        asked.micro_batch,
        asked.num_moments,
        asked.gradients,
        quick=_is_small(profile),
    )


def rehearsed_profile(
    profiled: Profiled, optimizer: torch.optim.Optimizer, device: torch.device, compile: bool, gpu_bytes: int
) -> ModelProfile | None:
    """With the bytes that blocks really take, where a rehearsal can tell them."""
    costs = _rehearsed(profiled, optimizer, device, compile, gpu_bytes, "the plan is refused")
    return None if costs is None else with_peaks(profiled[0], costs)


def _is_small(profile: ModelProfile) -> bool:
    return sum(spec.numel for spec in profile.params) < SMALL_NUMEL


def _rehearsed(
    profiled: Profiled,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    compile: bool,
    gpu_bytes: int,
    fallback: str,
) -> Costs | None:
    profile, probed, records = profiled
    if device.type != "cuda" or _is_small(profile) or probed.failure:
        return None
    sizes = rehearsed_sizes(profile, gpu_bytes)
    try:
        return measure_costs(profile, probed, records, optimizer, device, compile, sizes)
    except Exception as error:  # whatever a block raises alone, or memory that others hold
        let_go(device)
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        warnings.warn(f"blocks cannot be timed alone ({reason}); {fallback}", stacklevel=4)
        return None


def machine_of(device: torch.device, is_small: bool) -> Machine:
    if device.type != "cuda":
        return simulated_machine()
    known = known_machine(device)
    if known.machine is not None:
        return known.machine
    if is_small:
        return load_machine(ASSUMED)
    if device in _disturbed:
        return _disturbed[device]
    warnings.warn(f"{known.problem}: `hightide doctor` runs now, once, for about 10 s", stacklevel=4)
    report = examine(device, tell=lambda detail: tell("measuring this machine", detail))
    if report.is_undisturbed:
        with suppress(OSError):  # nowhere to keep it: the next run measures again, and says so
            remember(report.machine)
    else:
        warnings.warn(
            "other programs used the machine while it was measured (its cores, or memory of its GPU), so forecasts may "
            "be too slow. The next process measures again; `hightide doctor` says what was in use, and keeps what it "
            "measures",
            stacklevel=4,
        )
        _disturbed[device] = report.machine
    return report.machine


@cache
def simulated_machine() -> Machine:
    """The simulated accelerator is taken for a small GPU that nobody has."""
    machine = load_machine(ASSUMED)
    assert machine.gpu is not None
    return replace(machine, name=SIMULATED, gpu=replace(machine.gpu, name=SIMULATED))


def rehearsed_sizes(profile: ModelProfile, gpu_bytes: int) -> list[int]:
    """One sample, a quarter of the batch, and all of it; less where a block would not fit alone."""
    num_samples = profile.num_samples
    sizes = sorted({1, -(-num_samples // 4), num_samples})
    return [size for size in sizes if size == 1 or _largest_block_bytes(profile, size) <= gpu_bytes]


def _largest_block_bytes(profile: ModelProfile, num_samples: int) -> int:
    """Parameters and gradient; activations, and what enters and leaves, forward and backward. The logits of a head that
    is fused with the loss never exist."""
    params = {spec.name: spec for spec in profile.params}
    largest = 0
    for call in profile.calls:
        if profile.blocks[call.block].lazy_head:
            continue
        numel = sum(params[key].numel for key in profile.blocks[call.block].params)
        beside = call.new_inputs.at(num_samples) + call.saved_inputs.at(num_samples) + call.outputs.at(num_samples)
        inside = call.kept.at(num_samples) + call.backward_peak.at(num_samples)
        largest = max(largest, 8 * numel + 2 * beside + inside)
    return largest
