"""Any small model within any limits: it trains as in plain PyTorch with no tier above its limit, or it is refused with
the number of bytes that are missing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from harness import EPS, assert_close_weights
from hypothesis import HealthCheck, Phase, assume, example, given, note, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from random_models import Layer, Sketch, sketches
from torch import Tensor

import hightide.wrapping
from hightide.ir.action import Mode
from hightide.ir.activation import Activation
from hightide.ir.block import ModelProfile
from hightide.ir.plan import BlockPlan, Forecast, GradientDtype, Update
from hightide.ir.tier import Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.layout import pack
from hightide.planner.lower import lower
from hightide.planner.placement import Placement
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.peaks import peaks
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.search import search
from hightide.profiler.model.model_profile import profile_calls
from hightide.runtime.surgery import run_of
from hightide.this_machine import simulated_machine

NUM_STEPS = 3
PLENTY = 2**26
MOST_REFUSALS = 2  # one may name the GPU, and the next the host
GPU, HOST = Tier.GPU, Tier.HOST


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


class Subject:
    """A fresh model, and what the profiler says about it: profiling takes most of the time, so it is done once."""

    def __init__(self, case: Case) -> None:
        self.model = case.sketch.build()
        self.optimizer = make_optimizer(self.model, case.groups)
        self.example = case.sketch.batch(case.num_samples, seed=0)
        self._profile: Any = None

    def profile(self, *_: Any) -> Any:
        if self._profile is None:
            self._profile = profile_calls(self.model, self.optimizer, self.example)
        return self._profile

    def wrap(self, **options: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hightide.wrapping, "profile_of", self.profile)
            self.model, self.optimizer = hightide.wrap(self.model, self.optimizer, self.example, **options)


def train(case: Case, subject: Subject, piece: int | None = None) -> Outcome:
    """As it is: plain, or wrapped. `piece`: by so many samples at a time, whose gradients add up."""
    is_wrapped = run_of(subject.model) is not None
    model, optimizer = subject.model, subject.optimizer
    torch.manual_seed(7)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        num_samples = case.num_samples - (case.smaller_last and step == NUM_STEPS - 1)
        for part in range(case.accumulate):
            batch = case.sketch.batch(num_samples, seed=10 * step + part + 1)
            losses.append(0.0)
            for start in range(0, num_samples, piece or num_samples):
                some = {name: value[start : start + (piece or num_samples)] for name, value in batch.items()}
                loss = model(**some)["loss"] * (len(some["labels"]) / num_samples / case.accumulate)
                loss.backward()
                losses[-1] += loss.item()
        if case.clip:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    stats = hightide.stats(model) if is_wrapped else None
    if is_wrapped:
        hightide.unwrap(model)
    return Outcome(losses, norms, weights, stats)


def limits(gpu: int, host: int) -> hightide.Limits:
    return hightide.Limits(gpu=gpu, host=host)


def problem(case: Case, profile: ModelProfile, gpu_bytes: int, micro_batch: int | None) -> Problem:
    """As `wrap` puts it."""
    machine = simulated_machine()
    costs = estimate(profile, machine)
    update, gradients = Update(case.update), GradientDtype(case.gradients)
    terms = Terms(gpu_bytes, PLENTY, update, micro_batch, gradients=gradients)
    return Problem(profile, costs, machine, terms, quick=True)


def least_plan(case: Case, profile: ModelProfile) -> tuple[int, int]:
    """The least bytes on the GPU, as the refusal of one byte names them, and those that the host then needs."""
    with pytest.raises(InfeasiblePlan) as refused:
        search(problem(case, profile, 1, case.micro_batch))
    gpu_bytes = max(1, int(case.gpu * refused.value.num_bytes))
    if case.gpu < 1:
        return gpu_bytes, PLENTY
    return gpu_bytes, search(problem(case, profile, gpu_bytes, case.micro_batch)).plan.forecast.host_peak_bytes


def check(case: Case) -> None:
    subject = Subject(case)
    assume(subject.model(**subject.example)["loss"].requires_grad)  # all frozen: plain PyTorch has no backward either
    gpu_bytes, host_needed_bytes = least_plan(case, subject.profile()[0])
    host_bytes = max(1, int(case.host * host_needed_bytes))
    note(f"gpu limit {gpu_bytes}, host limit {host_bytes}")
    check_within(case, subject, gpu_bytes, host_bytes)


def check_within(case: Case, subject: Subject, gpu_bytes: int, host_bytes: int, num_refusals: int = 0) -> None:
    """Trains within these limits, or is refused, and then within those that the refusal names."""
    wrap = {"limits": limits(gpu_bytes, host_bytes), "micro_batch": case.micro_batch}
    try:
        subject.wrap(**case.options, **wrap)
    except InfeasiblePlan as refusal:
        check_refusal(refusal, gpu_bytes, host_bytes)
        assert num_refusals < MOST_REFUSALS, f"refused {num_refusals} times before: {refusal}"
        raised = {refusal.tier: refusal.num_bytes}
        check_within(case, subject, raised.get(GPU, gpu_bytes), raised.get(HOST, host_bytes), num_refusals + 1)
        return
    check_training(case, subject)


def check_refusal(refusal: InfeasiblePlan, gpu_bytes: int, host_bytes: int) -> None:
    limit = {GPU: gpu_bytes, HOST: host_bytes}[refusal.tier]
    missing = refusal.num_bytes - limit
    assert missing > 0 and f"{missing} bytes" in str(refusal) and f"{refusal.tier}={refusal.num_bytes}" in str(refusal)


def random_plan(case: Case, profile: ModelProfile, random: Random) -> hightide.Plan:
    """Any legal decisions, within limits that are the forecast itself: not a byte to spare."""
    base = search(problem(case, profile, PLENTY, case.micro_batch or case.num_samples)).plan
    layout = pack(profile, random.choice([base.layout.slot_numel, 128, 640, 4096]))
    with_frozen = {chunk.block for chunk in layout.chunks if not chunk.trainable_numel}
    blocks = []
    for spec, block in zip(profile.blocks, base.blocks, strict=True):
        params, states = random.choice([(HOST, HOST), (HOST, HOST), (GPU, HOST), (HOST, GPU), (GPU, GPU)])
        params = GPU if states is GPU and spec.index not in with_frozen else params
        activation = random.choice(list(Activation))
        inputs = GPU if activation is Activation.KEEP else random.choice([HOST, GPU])
        blocks.append(
            block
            if spec.loose
            else BlockPlan(spec.name, params, states, activation, inputs, settles=random.random() < 0.5)
        )
    plan = replace(base, layout=layout, blocks=tuple(blocks))
    slots, grad_slots = Placement(plan).widest_tick({call.block for call in profile.calls})
    plan = replace(plan, num_slots=slots + random.randrange(3), num_grad_slots=grad_slots + random.randrange(3))
    modes = [Mode.TRAIN] + ([Mode.ACCUMULATE] if case.update == "deferred" else [])
    needed = [peaks(lower(profile, plan, mode)) for mode in modes]
    forecast = Forecast(max(peak.gpu_peak_bytes for peak in needed), max(peak.host_peak_bytes for peak in needed))
    return replace(
        plan,
        gpu_limit_bytes=forecast.gpu_peak_bytes,
        host_limit_bytes=max(1, forecast.host_peak_bytes),
        forecast=forecast,
    )


def check_any_plan(case: Case, seed: int) -> None:
    subject = Subject(case)
    assume(subject.model(**subject.example)["loss"].requires_grad)
    plan = random_plan(case, subject.profile()[0], Random(seed))
    subject.wrap(**case.options, plan=plan)
    check_training(case, subject)


def check_training(case: Case, subject: Subject) -> None:
    """Of a wrapped model."""
    wrapped = train(case, subject)
    stats = wrapped.stats
    assert stats is not None and stats.num_steps == NUM_STEPS and stats.deviations == 0
    assert stats.peak_bytes["gpu"] <= stats.plan.gpu_limit_bytes
    assert stats.peak_bytes["host"] <= stats.plan.host_limit_bytes
    assert stats.peak_bytes["gpu"] <= stats.forecast.gpu_peak_bytes, "the forecast is an upper bound"
    one_micro_batch = stats.plan.micro_batch == case.num_samples
    if case.sketch.dtype == "float32" and (one_micro_batch or not case.sketch.dropout):
        plain = train(case, Subject(case))
        for expected, found in zip(plain.losses + plain.norms, wrapped.losses + wrapped.norms, strict=True):
            assert abs(found - expected) <= 2e-6 * abs(expected), (plain.losses, wrapped.losses)
        if not one_micro_batch:  # where two samples' gradients nearly cancel, only the same sum has the same rounding
            plain = nearest(plain, train(case, Subject(case), stats.plan.micro_batch), wrapped)
        assert_close_weights(plain.weights, wrapped.weights)
    else:  # master copies in fp32, and other random numbers: equal to the bit on any placement instead
        other = Subject(case)
        other.wrap(**case.options, limits=limits(PLENTY, PLENTY), micro_batch=stats.plan.micro_batch)
        whole = train(case, other)
        assert (whole.losses, whole.norms) == (wrapped.losses, wrapped.norms)
        assert all(torch.equal(value, wrapped.weights[name]) for name, value in whole.weights.items())


def nearest(one: Outcome, other: Outcome, to: Outcome) -> Outcome:
    """Of each weight's elements those which are nearer."""

    def pick(name: str) -> Tensor:
        a, b, found = one.weights[name], other.weights[name], to.weights[name]
        return torch.where((a - found).abs() <= (b - found).abs(), a, b)

    return replace(one, weights={name: pick(name) for name in one.weights})


@contextmanager
def probed_whole() -> Iterator[None]:
    """These models can be probed, and forecasts of their memory hold: what is done where they cannot, or do not, would
    make the test weaker."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the memory of|the model could not be probed|the GPU needs")
        yield


FAST = (Phase.explicit, Phase.generate)  # shrinking takes minutes; the test at length does it
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
LENGTH = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=SLOW,
    derandomize=False,
    print_blob=True,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),  # a run that was cut short finds its failure again
)


PLAIN_SKETCH = Sketch(
    layers=(),
    width=32,
    tokens=1,
    ids=True,
    tied_head=False,
    frozen_embedding=False,
    loose=False,
    gate=False,
    pair=False,
    twice=False,
    container="list",
    dropout=0.0,
    buffers=False,
    unused=False,
    dtype="float32",
    seed=0,
)
PLAIN_CASE = Case(
    PLAIN_SKETCH,
    num_samples=2,
    micro_batch=None,
    update="deferred",
    gradients="float32",
    clip=False,
    accumulate=1,
    smaller_last=False,
    groups=1,
    gpu=0.6,
    host=0.7,
)

WIDER_THAN_MEASURED = replace(  # a convolution's output has other strides than without values: the next block copies it
    PLAIN_CASE,
    sketch=replace(
        PLAIN_SKETCH,
        layers=(
            Layer(kind="conv", inner=48),
            Layer(kind="conv", inner=48, same_as=0),
            Layer(kind="mlp", inner=5),
            Layer(kind="conv", inner=48, same_as=1, frozen="first"),
        ),
        tokens=8,
        frozen_embedding=True,
        loose=True,
        pair=True,
        container="sequential",
        unused=True,
    ),
    gradients="param",
    clip=True,
    smaller_last=True,
    groups=2,
    gpu=1.05,
    host=4.0,
)

MANY_INPUTS_ON_THE_HOST = replace(  # of each micro-batch, and not a byte for what stands in their place
    PLAIN_CASE,
    sketch=replace(
        PLAIN_SKETCH,
        layers=(Layer(kind="mlp", inner=5),),
        width=6,
        tied_head=True,
        frozen_embedding=True,
        loose=True,
        gate=True,
        pair=True,
        dropout=0.2,
    ),
    num_samples=5,
    gpu=1.0,
    host=1.0,
)

CANCELS_IN_ONE_ELEMENT = replace(  # the gradients of two samples: plain PyTorch is as far off, a sample at a time
    PLAIN_CASE,
    sketch=replace(
        PLAIN_SKETCH,
        layers=(
            Layer(kind="mlp", inner=48),
            Layer(kind="conv", inner=5),
            Layer(kind="mlp", inner=16),
            Layer(kind="linear", inner=5),
            Layer(kind="conv", inner=5, same_as=1),
        ),
        tied_head=True,
        frozen_embedding=True,
        loose=True,
        gate=True,
        pair=True,
        unused=True,
        seed=3,
    ),
)

KEPT_BETWEEN_BLOCKS = replace(  # one layer, called twice, is no stack: attention and dropout run outside of blocks
    PLAIN_CASE,
    sketch=replace(
        PLAIN_SKETCH,
        layers=(Layer(kind="attention", inner=5), Layer(kind="attention", inner=5, same_as=0)),
        tokens=8,
        container="sequential",
        dropout=0.2,
    ),
    num_samples=5,
)


@pytest.mark.timeout(300)
@given(cases())
@example(WIDER_THAN_MEASURED)
@example(MANY_INPUTS_ON_THE_HOST)
@example(KEPT_BETWEEN_BLOCKS)
@example(CANCELS_IN_ONE_ELEMENT)
@settings(max_examples=3, deadline=None, suppress_health_check=SLOW, phases=FAST)
def test_any_model_within_any_limits(case: Case) -> None:
    with probed_whole():
        check(case)


UPDATED_AT_THE_PEAK = replace(  # inside a backward that still holds its inputs
    PLAIN_CASE,
    sketch=replace(
        PLAIN_SKETCH,
        layers=(Layer(kind="linear", inner=48),),
        ids=False,
        dropout=0.2,
        unused=True,
        dtype="bfloat16",
        seed=1,
    ),
    num_samples=1,
    update="in_backward",
    groups=2,
    gpu=8.0,
    host=4.0,
)


@pytest.mark.timeout(300)
@given(cases(), st.integers(0, 2**16))
@example(UPDATED_AT_THE_PEAK, 1)
@settings(max_examples=4, deadline=None, suppress_health_check=SLOW, phases=FAST)
def test_any_model_by_any_plan(case: Case, seed: int) -> None:
    with probed_whole():
        check_any_plan(case, seed)


@pytest.mark.long
@pytest.mark.timeout(1800)
@given(cases())
@LENGTH
def test_any_model_within_any_limits_at_length(case: Case) -> None:
    with probed_whole():
        check(case)


@pytest.mark.long
@pytest.mark.timeout(1800)
@given(cases(), st.integers(0, 2**16))
@LENGTH
def test_any_model_by_any_plan_at_length(case: Case, seed: int) -> None:
    with probed_whole():
        check_any_plan(case, seed)
