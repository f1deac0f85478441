"""Any small model within any limits: it trains as in plain PyTorch with no tier above its limit, or it is refused with
the number of bytes that are missing."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import EPS, assert_close_weights
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from random_models import Sketch, sketches
from torch import Tensor

import hightide
from hightide.ir.plan import GradientDtype, Update
from hightide.planner.rule import plan_by_rule
from hightide.planner.verify import InfeasiblePlan
from hightide.profiler.model import profile_model

NUM_STEPS = 3
PLENTY = 2**26


@dataclass(frozen=True)
class Case:
    sketch: Sketch
    num_samples: int
    micro_batch: int | None
    update: str
    gradients: str
    clip: bool
    accumulate: int
    smaller_last: bool  # the last step's batch has one sample less
    groups: int
    gpu: float  # times the least for which there is a plan
    host: float  # times what the plan needs there

    @property
    def options(self) -> dict[str, Any]:
        return {"update": self.update, "gradients": self.gradients}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_samples = draw(st.sampled_from([1, 2, 5, 7]))
    update = draw(st.sampled_from(["deferred", "deferred", "in_backward"]))
    return Case(
        sketch=draw(sketches()),
        num_samples=num_samples,
        micro_batch=draw(st.sampled_from([None, None, 1, min(2, num_samples), num_samples])),
        update=update,
        gradients=draw(st.sampled_from(["float32", "float32", "param"])),
        clip=update == "deferred" and draw(st.booleans()),
        accumulate=draw(st.sampled_from([1, 1, 2])) if update == "deferred" else 1,
        smaller_last=num_samples > 1 and draw(st.booleans()),
        groups=draw(st.sampled_from([1, 2])),
        gpu=draw(st.sampled_from([0.6, 1.0, 1.0, 1.05, 1.3, 2.0, 8.0])),
        host=draw(st.sampled_from([0.7, 1.0, 1.5, 4.0, 4.0])),
    )


def make_optimizer(model: torch.nn.Module, groups: int) -> torch.optim.Optimizer:
    params = list(model.parameters())
    split = [params[::2], params[1::2]] if groups == 2 and len(params) > 1 else [params]
    options = [{"params": part, "weight_decay": 0.1 / (number + 1)} for number, part in enumerate(split)]
    return torch.optim.AdamW(options, lr=3e-3, eps=EPS)


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    stats: hightide.Stats | None


def train(case: Case, wrap: dict[str, Any] | None) -> Outcome:
    """`wrap`: None trains in plain PyTorch."""
    model = case.sketch.build()
    optimizer = make_optimizer(model, case.groups)
    if wrap is not None:
        example = case.sketch.batch(case.num_samples, seed=0)
        model, optimizer = hightide.wrap(model, optimizer, example, **case.options, **wrap)
    torch.manual_seed(7)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        num_samples = case.num_samples - (case.smaller_last and step == NUM_STEPS - 1)
        for part in range(case.accumulate):
            loss = model(**case.sketch.batch(num_samples, seed=10 * step + part + 1))["loss"] / case.accumulate
            loss.backward()
            losses.append(loss.item())
        if case.clip:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    stats = hightide.stats(model) if wrap is not None else None
    if wrap is not None:
        hightide.unwrap(model)
    return Outcome(losses, norms, weights, stats)


def limits(gpu: int, host: int) -> hightide.Limits:
    return hightide.Limits(gpu=gpu, host=host)


def least_plan(case: Case) -> tuple[int, int]:
    """The least bytes on the GPU, as the refusal of one byte names them, and those that the host then needs."""
    model = case.sketch.build()
    profile, _ = profile_model(model, make_optimizer(model, case.groups), case.sketch.batch(case.num_samples, seed=0))
    options = {
        "update": Update(case.update),
        "micro_batch": case.micro_batch,
        "gradients": GradientDtype(case.gradients),
    }
    with pytest.raises(InfeasiblePlan) as refused:
        plan_by_rule(profile, 1, PLENTY, **options)
    gpu_bytes = max(1, int(case.gpu * refused.value.num_bytes))
    if case.gpu < 1:
        return gpu_bytes, PLENTY
    return gpu_bytes, plan_by_rule(profile, gpu_bytes, PLENTY, **options).forecast.host_peak_bytes


def check(case: Case) -> None:
    gpu_bytes, host_needed_bytes = least_plan(case)
    host_bytes = max(1, int(case.host * host_needed_bytes))
    note(f"gpu limit {gpu_bytes}, host limit {host_bytes}")
    wrap = {"limits": limits(gpu_bytes, host_bytes), "micro_batch": case.micro_batch}
    if case.gpu < 1 or host_bytes < host_needed_bytes:
        tier = "gpu" if case.gpu < 1 else "host"
        with pytest.raises(ValueError, match=rf"(?s)\d+ bytes .*missing.*Limits\({tier}=") as refused:
            train(case, wrap)
        needed, limit, missing = re.findall(r"(\d+) (?:bytes )?\(", str(refused.value))
        assert int(missing) == int(needed) - int(limit) > 0
        return
    wrapped = train(case, wrap)
    stats = wrapped.stats
    assert stats is not None and stats.num_steps == NUM_STEPS
    assert stats.peak_bytes["gpu"] <= gpu_bytes and stats.peak_bytes["host"] <= host_bytes
    assert stats.peak_bytes["gpu"] <= stats.forecast.gpu_peak_bytes, "the forecast is an upper bound"
    one_micro_batch = stats.plan.micro_batch == case.num_samples
    if case.sketch.dtype == "float32" and (one_micro_batch or not case.sketch.dropout):
        plain = train(case, None)
        for expected, found in zip(plain.losses + plain.norms, wrapped.losses + wrapped.norms, strict=True):
            assert abs(found - expected) <= 2e-6 * abs(expected), (plain.losses, wrapped.losses)
        assert_close_weights(plain.weights, wrapped.weights)
    else:  # master copies in fp32, and other random numbers: equal to the bit on any placement instead
        whole = train(case, {"limits": limits(PLENTY, PLENTY), "micro_batch": stats.plan.micro_batch})
        assert (whole.losses, whole.norms) == (wrapped.losses, wrapped.norms)
        assert all(torch.equal(value, wrapped.weights[name]) for name, value in whole.weights.items())


def quiet_check(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the memory of|the model could not be probed")
        check(case)


FAST = (Phase.explicit, Phase.generate)  # shrinking takes minutes; the test at length does it
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@given(cases())
@settings(max_examples=40, deadline=None, suppress_health_check=SLOW, phases=FAST)
def test_any_model_within_any_limits(case: Case) -> None:
    quiet_check(case)


@pytest.mark.long
@pytest.mark.timeout(1800)
@given(cases())
@settings(max_examples=500, deadline=None, suppress_health_check=SLOW, derandomize=False, print_blob=True)
def test_any_model_within_any_limits_at_length(case: Case) -> None:
    quiet_check(case)
