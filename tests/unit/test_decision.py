"""What `wrap` plans with: limits, machine and costs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hightide
import hightide.api
import models
from hightide import decision
from hightide.doctor.known import Known, load_machine
from hightide.ir.action import Mode
from hightide.ir.block import Affine, ModelProfile
from hightide.ir.machine import Machine
from hightide.ir.plan import GradientDtype, Update
from hightide.ir.tier import Tier
from hightide.planner.cost import with_peaks
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.lower import lower
from hightide.planner.memory import peaks
from hightide.profiler.model import profile_calls
from unit.planner.profiles import stack
from unit.runtime.steps import adamw

GIB = 2**30
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("free_bytes", [100 * GIB, 7 * GIB])  # 7: another process has the rest
def test_the_gpu_limit_is_what_the_driver_has_free_now(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    asked = []

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return free_bytes, 141 * GIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    gpu_bytes, host_bytes = hightide.api._resolve(hightide.Limits(), CUDA)
    assert gpu_bytes == int(hightide.api.GPU_HEADROOM * free_bytes) < free_bytes and asked == [CUDA]
    assert host_bytes > 0
    assert hightide.api._resolve(hightide.Limits(gpu="2GiB", host="1GiB"), CUDA) == (2 * GIB, GIB)


def no_measuring(*_: Any) -> Any:
    raise AssertionError("this is no moment to measure a machine")


def test_the_simulated_accelerator_is_never_measured_and_plans_are_the_same_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decision, "examine", no_measuring)
    monkeypatch.setattr(decision, "known_machine", no_measuring)
    model, batch = models.hand_written()
    limits = hightide.Limits(gpu="128KiB", host="1MiB")
    first, second = (hightide.plan(model, adamw(model), batch, limits=limits) for _ in range(2))
    assert first == second and first.forecast.step_s > 0
    machine = decision.simulated_machine()
    assert machine.is_simulated and not machine.is_measured


def test_a_machine_that_was_measured_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(load_machine("h200"), name="here")
    monkeypatch.setattr(decision, "known_machine", lambda device: Known(here))
    monkeypatch.setattr(decision, "examine", no_measuring)
    assert decision.machine_of(CUDA, is_small=False) is here


def test_an_unknown_machine_is_measured_once_for_a_large_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    here, kept = replace(load_machine("h200"), name="here"), []
    monkeypatch.setattr(decision, "known_machine", lambda device: Known(None, "this machine was never measured"))
    monkeypatch.setattr(decision, "examine", lambda device, tell: SimpleNamespace(machine=here, is_undisturbed=True))

    def remember(machine: Machine) -> None:
        kept.append(machine)
        raise OSError("a home folder that cannot be written")

    monkeypatch.setattr(decision, "remember", remember)
    assumed = decision.machine_of(CUDA, is_small=True)
    assert not kept and assumed.gpu is not None and not assumed.is_simulated
    with pytest.warns(UserWarning, match="never measured: `hightide doctor` runs now, once"):
        assert decision.machine_of(CUDA, is_small=False) is here
    assert kept == [here]


def test_what_was_measured_beside_other_programs_is_used_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(load_machine("h200"), name="here")
    monkeypatch.setattr(decision, "known_machine", lambda device: Known(None, "this machine was never measured"))
    monkeypatch.setattr(decision, "examine", lambda device, tell: SimpleNamespace(machine=here, is_undisturbed=False))
    monkeypatch.setattr(decision, "remember", no_measuring)
    monkeypatch.setattr(decision, "_disturbed", {})
    with pytest.warns(UserWarning, match="other programs used the machine while it was measured"):
        assert decision.machine_of(CUDA, is_small=False) is here
    monkeypatch.setattr(decision, "examine", no_measuring)
    assert decision.machine_of(CUDA, is_small=False) is here, "once in a process"


def test_on_a_gpu_a_large_model_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the simulated accelerator, in a GPU's place."""
    sizes, measure = [], decision.measure_costs

    def measured(*args: Any) -> Any:
        profile, probed, records, optimizer, device, compile, micro_batches = args
        assert device is CUDA
        sizes.append(micro_batches)
        return measure(profile, probed, records, optimizer, torch.device("cpu"), compile, micro_batches)

    monkeypatch.setattr(decision, "measure_costs", measured)
    monkeypatch.setattr(decision, "SMALL_NUMEL", 0)
    monkeypatch.setattr(decision, "machine_of", lambda device, is_small: decision.simulated_machine())
    model, batch = models.hand_written()
    optimizer = adamw(model)
    profiled = profile_calls(model, optimizer, batch)
    asked = decision.Asked(2**26, 2**26, Update.DEFERRED, None, 2, GradientDtype.FLOAT32)
    question = decision.question_about(profiled, optimizer, CUDA, False, asked)
    assert sizes == [[1, 2, 6]] and question.costs.source.startswith("measured") and not question.quick
    assert question.profile == with_peaks(profiled[0], question.costs) != profiled[0]
    assert question.answer().plan.micro_batch == models.NUM_SAMPLES


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
        verified, schedules = hightide.api._verified(profile, replace(roomy, gpu_limit_bytes=gpu_bytes), rehearsed)
        assert verified is expected and num_rehearsals == number
        assert peaks(schedules[Mode.TRAIN]).gpu_peak_bytes <= gpu_bytes
    with pytest.raises(InfeasiblePlan):
        hightide.api._verified(profile, replace(roomy, gpu_limit_bytes=half - 1), rehearsed)
    assert num_rehearsals == 3, "once for each"
    for cannot in (None, lambda: None):
        with pytest.raises(InfeasiblePlan):
            hightide.api._verified(profile, replace(roomy, gpu_limit_bytes=half), cannot)
    streamed = hightide.plan(model, adamw(model), batch, limits=hightide.Limits(gpu="400KiB", host="64MiB"))
    with pytest.raises(InfeasiblePlan, match="host"):  # a rehearsal would not help
        hightide.api._verified(profile, replace(streamed, host_limit_bytes=1), rehearsed)
    assert num_rehearsals == 3


def test_only_a_large_model_on_a_gpu_is_rehearsed_for_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = models.hand_written()
    optimizer = adamw(model)
    profiled = profile_calls(model, optimizer, batch)
    measure = decision.measure_costs

    def measured(*args: Any) -> Any:
        profile, probed, records, optimizer, device, compile, micro_batches = args
        assert device is CUDA
        return measure(profile, probed, records, optimizer, torch.device("cpu"), compile, micro_batches)

    monkeypatch.setattr(decision, "measure_costs", measured)
    assert decision.rehearsed_profile(profiled, optimizer, CUDA, False, GIB) is None
    monkeypatch.setattr(decision, "SMALL_NUMEL", 0)
    assert decision.rehearsed_profile(profiled, optimizer, torch.device("cpu"), False, GIB) is None
    found = decision.rehearsed_profile(profiled, optimizer, CUDA, False, GIB)
    assert found is not None and found.fingerprint == profiled[0].fingerprint and found != profiled[0]


def _half(size: Affine) -> Affine:
    return Affine(size.fixed // 2, size.per_sample // 2)


def test_a_block_that_cannot_run_alone_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise TypeError("it reads what its parent sets")

    monkeypatch.setattr(decision, "measure_costs", fails)
    monkeypatch.setattr(decision, "let_go", lambda device: None)
    monkeypatch.setattr(decision, "SMALL_NUMEL", 0)
    monkeypatch.setattr(decision, "machine_of", lambda device, is_small: decision.simulated_machine())
    model, batch = models.hand_written()
    optimizer = adamw(model)
    asked = decision.Asked(2**26, 2**26, Update.DEFERRED, None, 2, GradientDtype.FLOAT32)
    with pytest.warns(UserWarning, match=r"cannot be timed alone \(TypeError: it reads what its parent sets\)"):
        question = decision.question_about(profile_calls(model, optimizer, batch), optimizer, CUDA, False, asked)
    assert question.costs.source.startswith("estimated") and question.answer().plan.micro_batch == models.NUM_SAMPLES


def test_rehearsals_keep_to_the_limit() -> None:
    profile = stack(12, num_samples=16)
    assert decision.rehearsed_sizes(profile, 2**40) == [1, 4, 16]
    assert decision.rehearsed_sizes(profile, 1) == [1]  # whatever it takes
    wide = tuple(replace(call, backward_peak=Affine(0, 2**20)) for call in profile.calls)
    assert decision.rehearsed_sizes(replace(profile, calls=wide), 10 * 2**20) == [1, 4]


def test_everything_fits_so_nothing_moves() -> None:
    model, batch = models.llama()
    plan = hightide.plan(model, adamw(model), batch, limits=hightide.Limits(gpu="1GiB", host="1GiB"))
    assert all(block.params is block.states is Tier.GPU for block in plan.blocks)
    assert plan.micro_batch == models.NUM_SAMPLES and "everything stays on the GPU" in plan.explain()
