"""What `wrap` plans with: limits, machine and costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import hightide
import models
from hightide import posing, this_machine
from hightide.ir.action import Mode
from hightide.ir.block import Affine, ModelProfile
from hightide.ir.tier import Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.lower import lower
from hightide.planner.predict.peaks import peaks
from hightide.planner.predict.step_seconds import with_peaks
from hightide.planner.problem import Terms
from hightide.planner.search.search import search
from hightide.planner.solution import Solution
from hightide.profiler.model.model_profile import profile_calls
from unit.planner.profiles import stack
from unit.runtime.steps import adamw

GIB = 2**30
CUDA = torch.device("cuda", 0)


def test_on_a_gpu_a_large_model_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the simulated accelerator, in a GPU's place."""
    sizes, measure = [], posing.measure_costs

    def measured(*args: Any) -> Any:
        profile, probed, records, optimizer, device, compile, micro_batches = args
        assert device is CUDA
        sizes.append(micro_batches)
        return measure(profile, probed, records, optimizer, torch.device("cpu"), compile, micro_batches)

    monkeypatch.setattr(posing, "measure_costs", measured)
    monkeypatch.setattr(posing, "SMALL_NUMEL", 0)
    monkeypatch.setattr(posing, "machine_of", lambda device, is_small: this_machine.simulated_machine())
    model, batch = models.hand_written()
    optimizer = adamw(model)
    profiled = profile_calls(model, optimizer, batch)
    terms = Terms(2**26, 2**26)
    problem = posing.problem_of(profiled, optimizer, CUDA, False, terms)
    assert sizes == [[1, 2, 6]] and problem.costs.source.startswith("measured") and not problem.quick
    assert problem.profile == with_peaks(profiled[0], problem.costs) != profiled[0]
    assert search(problem).plan.micro_batch == models.NUM_SAMPLES


def test_a_plan_for_rehearsed_blocks_is_verified_by_what_they_take() -> None:
    """One that the user has saved: compiled blocks take half of what tensors without values say."""
    model, batch = models.llama()
    profile = profile_calls(model, adamw(model), batch)[0]
    calls = [replace(call, backward_peak=_half(call.backward_peak), kept=_half(call.kept)) for call in profile.calls]
    lean, num_rehearsals = replace(profile, calls=tuple(calls)), 0

    def rehearsed() -> ModelProfile:
        nonlocal num_rehearsals
        num_rehearsals += 1
        return lean

    roomy = hightide.plan(model, adamw(model), batch, limits=hightide.Limits(gpu="64MiB", host="64MiB"))
    half, whole = (peaks(lower(one, roomy, Mode.TRAIN)).gpu_peak_bytes for one in (lean, profile))
    assert half < whole
    for gpu_bytes, expected, number in ((whole, profile, 0), (whole - 1, lean, 1), (half, lean, 2)):
        limited = Solution.of(profile, replace(roomy, gpu_limit_bytes=gpu_bytes))
        verified = hightide.posing.verified(limited, rehearsed)
        assert verified.profile is expected and num_rehearsals == number
        assert verified.peaks.gpu_peak_bytes <= gpu_bytes
    with pytest.raises(InfeasiblePlan):
        hightide.posing.verified(Solution.of(profile, replace(roomy, gpu_limit_bytes=half - 1)), rehearsed)
    assert num_rehearsals == 3, "once for each"
    with pytest.raises(InfeasiblePlan):
        hightide.posing.verified(Solution.of(profile, replace(roomy, gpu_limit_bytes=half)), lambda: None)
    streamed = hightide.plan(model, adamw(model), batch, limits=hightide.Limits(gpu="400KiB", host="64MiB"))
    with pytest.raises(InfeasiblePlan, match="host"):  # a rehearsal would not help
        hightide.posing.verified(Solution.of(profile, replace(streamed, host_limit_bytes=1)), rehearsed)
    assert num_rehearsals == 3


def test_only_a_large_model_on_a_gpu_is_rehearsed_for_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = models.hand_written()
    optimizer = adamw(model)
    profiled = profile_calls(model, optimizer, batch)
    measure = posing.measure_costs

    def measured(*args: Any) -> Any:
        profile, probed, records, optimizer, device, compile, micro_batches = args
        assert device is CUDA
        return measure(profile, probed, records, optimizer, torch.device("cpu"), compile, micro_batches)

    monkeypatch.setattr(posing, "measure_costs", measured)
    assert posing.rehearsed_profile(profiled, optimizer, CUDA, False, GIB) is None
    monkeypatch.setattr(posing, "SMALL_NUMEL", 0)
    assert posing.rehearsed_profile(profiled, optimizer, torch.device("cpu"), False, GIB) is None
    found = posing.rehearsed_profile(profiled, optimizer, CUDA, False, GIB)
    assert found is not None and found.fingerprint == profiled[0].fingerprint and found != profiled[0]


def _half(size: Affine) -> Affine:
    return Affine(size.fixed // 2, size.per_sample // 2)


def test_a_block_that_cannot_run_alone_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise TypeError("it reads what its parent sets")

    monkeypatch.setattr(posing, "measure_costs", fails)
    monkeypatch.setattr(posing, "let_go", lambda device: None)
    monkeypatch.setattr(posing, "SMALL_NUMEL", 0)
    monkeypatch.setattr(posing, "machine_of", lambda device, is_small: this_machine.simulated_machine())
    model, batch = models.hand_written()
    optimizer = adamw(model)
    terms = Terms(2**26, 2**26)
    with pytest.warns(UserWarning, match=r"cannot be timed alone \(TypeError: it reads what its parent sets\)"):
        problem = posing.problem_of(profile_calls(model, optimizer, batch), optimizer, CUDA, False, terms)
    assert problem.costs.source.startswith("estimated") and search(problem).plan.micro_batch == models.NUM_SAMPLES


def test_rehearsals_keep_to_the_limit() -> None:
    profile = stack(12, num_samples=16)
    assert posing.rehearsed_sizes(profile, 2**40) == [1, 4, 16]
    assert posing.rehearsed_sizes(profile, 1) == [1]  # whatever it takes
    wide = tuple(replace(call, backward_peak=Affine(0, 2**20)) for call in profile.calls)
    assert posing.rehearsed_sizes(replace(profile, calls=wide), 10 * 2**20) == [1, 4]


def test_everything_fits_so_nothing_moves() -> None:
    model, batch = models.llama()
    plan = hightide.plan(model, adamw(model), batch, limits=hightide.Limits(gpu="1GiB", host="1GiB"))
    assert all(block.params is block.states is Tier.GPU for block in plan.blocks)
    assert plan.micro_batch == models.NUM_SAMPLES and "everything stays on the GPU" in plan.explain()


# -- disks ------------------------------------------------------------------------------------------------------------
