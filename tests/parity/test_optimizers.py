"""Every registered rule in a model, on every tier: weights, states and byte counts are those of torch's own optimizer.

Whoever adds a rule adds its options to `OPTIONS`: a rule without any fails here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hightide
import models
from hightide.ir.action import Mode
from hightide.ir.activation import Activation
from hightide.ir.plan import BlockPlan, Plan
from hightide.ir.tier import Tier
from hightide.optim.registry import RULES
from hightide.planner.placement import Placement
from hightide.planner.predict.peaks import peaks
from hightide.profiler.model.model_profile import profile_model
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of

LIMITS = hightide.Limits(gpu="16MiB", host="64MiB")
NUM_SAMPLES, NUM_STEPS, MAX_NORM = 6, 4, 0.3
G, H = Tier.GPU, Tier.HOST
PLACES: dict[str, Callable[[int], tuple[Tier, Tier]]] = {
    "all on the gpu": lambda _: (G, G),
    "states on host": lambda _: (G, H),
    "streamed": lambda _: (H, H),
    "mixed": lambda block: [(H, H), (G, G), (G, H)][block % 3],
}
# Of the group of matrices and of the group of vectors. Adam's eps keeps what has no gradient from walking on rounding.
OPTIONS: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "adamw": {"adamw": ({"eps": 1e-4, "weight_decay": 0.1}, {"eps": 1e-4, "lr": 1e-3, "weight_decay": 0.0})},
    "adam": {"adam": ({"eps": 1e-4, "weight_decay": 0.1}, {"eps": 1e-4, "lr": 1e-3, "betas": (0.8, 0.9)})},
    "sgd": {
        "sgd": ({"weight_decay": 0.1}, {"lr": 1e-3}),
        "sgd momentum": ({"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}, {"momentum": 0.5, "maximize": True}),
        "sgd nesterov": ({"momentum": 0.9, "nesterov": True}, {"momentum": 0.0, "weight_decay": 0.1}),
    },
}
NUM_MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd momentum": 1, "sgd nesterov": 1}
CASES = [(kind.optimizer, name) for kind in RULES for name in OPTIONS.get(kind.name, {"without options here": None})]
every = pytest.mark.parametrize(("optimizer", "name"), CASES, ids=[name for _, name in CASES])


def long(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.long)


def build(dtype: torch.dtype, seed: int = 0) -> models.Pair:
    """In bf16 without the loose parameter: its gradient is torch's own, in bf16, and so is that gradient's norm."""
    model, batch = models.hand_written(seed=seed, num_samples=NUM_SAMPLES)
    assert isinstance(model, models.HandWritten)
    model.scale.requires_grad_(dtype is torch.float32)
    return model.to(dtype), {key: value.to(dtype) for key, value in batch.items()}


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def batches(dtype: torch.dtype, num_steps: int = NUM_STEPS, seed: int = 10) -> list[dict[str, Tensor]]:
    stream = [models.vector_batch(seed + step, NUM_SAMPLES) for step in range(num_steps)]
    return [{key: value.to(dtype) for key, value in batch.items()} for batch in stream]


def make(optimizer: type, name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    of_matrices, of_vectors = next(options[name] for options in OPTIONS.values() if name in options)
    matrices = {"params": [param for param in params if param.dim() > 1], **of_matrices}
    vectors = {"params": [param for param in params if param.dim() <= 1], **of_vectors}
    made: torch.optim.Optimizer = optimizer([matrices, vectors], lr=1e-2)
    return made


def wrap(
    pair: models.Pair, optimizer: torch.optim.Optimizer, where: str, micro_batch: int = 2
) -> tuple[nn.Module, torch.optim.Optimizer, Run]:
    model, batch = pair
    plan = hightide.plan(model, optimizer, batch, limits=LIMITS, micro_batch=micro_batch)
    profile, _ = profile_model(model, optimizer, batch)
    blocks = [
        block if spec.loose else BlockPlan(spec.name, *PLACES[where](spec.index), Activation.RECOMPUTE, G)
        for spec, block in zip(profile.blocks, plan.blocks, strict=True)
    ]
    plan = replace(plan, blocks=tuple(blocks))
    slots, grad_slots = Placement(plan).widest_tick({call.block for call in profile.calls})
    plan = replace(plan, num_slots=slots + 1 if slots else 0, num_grad_slots=grad_slots + 1 if grad_slots else 0)
    model, wrapped = hightide.wrap(model, optimizer, batch, plan=plan)
    run = run_of(model)
    assert run is not None
    return model, wrapped, run


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> tuple[float, float]:
    loss = models.loss_of(model, batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), float(norm)


@dataclass
class Masters:
    """Plain PyTorch in bf16 with fp32 masters, which its optimizer owns."""

    model: nn.Module
    masters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, model: nn.Module, optimizer: type, name: str) -> Masters:
        masters = {key: nn.Parameter(param.detach().float()) for key, param in trainable(model)}
        return cls(model, masters, make(optimizer, name, list(masters.values())))

    def step(self, batch: dict[str, Tensor]) -> tuple[float, float]:
        loss = models.loss_of(self.model, batch)
        loss.backward()
        for key, param in trainable(self.model):
            assert param.grad is not None
            self.masters[key].grad, param.grad = param.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for key, param in trainable(self.model):
            param.data.copy_(self.masters[key])
        return loss.item(), float(norm)


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
    error, bound = float((found - expected).abs().max()), 1e-5 * float(expected.abs().max()) + 1e-6
    assert error <= bound, f"{what}: off by {error:.3g}, allowed {bound:.3g}"  # a NaN fails too


def assert_same_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Layout and values of two optimizers' state dicts."""
    assert found["param_groups"] == expected["param_groups"]
    assert list(found["state"]) == list(expected["state"])
    for index, entry in expected["state"].items():
        assert list(found["state"][index]) == list(entry)
        for field, value in entry.items():
            other = found["state"][index][field]
            assert other.untyped_storage().nbytes() == other.nbytes
            assert_close(other, value, f"{field} of {index}")


def test_every_rule_is_tested() -> None:
    assert {kind.name for kind in RULES} == set(OPTIONS)
    assert {name for options in OPTIONS.values() for name in options} == set(NUM_MOMENTS)


@pytest.mark.parametrize(
    ("optimizer", "name", "where"),
    [
        pytest.param(*case, where, id=f"{case[1]}-{where}", marks=() if (row + column) % 2 == 0 else pytest.mark.long)
        for row, case in enumerate(CASES)
        for column, where in enumerate(PLACES)
    ],
)
def test_fp32_equals_torch(optimizer: type, name: str, where: str) -> None:
    plain, _ = build(torch.float32)
    expected = make(optimizer, name, list(plain.parameters()))
    pair = build(torch.float32)
    before = copy.deepcopy(pair[0].state_dict())
    model, wrapped, run = wrap(pair, make(optimizer, name, list(pair[0].parameters())), where)
    assert wrapped.state_dict() == expected.state_dict(), "before the first step"
    norms = []
    for batch in batches(torch.float32):
        (loss, norm), (plain_loss, plain_norm) = step(model, wrapped, batch), step(plain, expected, batch)
        assert abs(loss - plain_loss) <= 1e-6 * abs(plain_loss)
        assert abs(norm - plain_norm) <= 1e-5 * plain_norm
        norms.append(norm)
    assert max(norms) > MAX_NORM, "nothing was clipped"
    values = model.state_dict()
    for key, value in plain.state_dict().items():
        assert_close(values[key], value, key)
        assert not torch.equal(values[key], before[key]), f"{key} did not train"
    assert_same_states(wrapped.state_dict(), expected.state_dict())
    assert run.stashes is not None and hightide.stats(model).deviations == 0
    hightide.unwrap(model)


@every
@pytest.mark.parametrize("where", ["mixed", *map(long, ["all on the gpu", "states on host", "streamed"])])
def test_bf16_equals_torch_on_fp32_masters(optimizer: type, name: str, where: str) -> None:
    """One micro-batch, so that gradients are torch's to the bit: masters and moments agree as closely as in fp32."""
    reference = Masters.of(build(torch.bfloat16)[0], optimizer, name)
    pair = build(torch.bfloat16)
    made = make(optimizer, name, [param for _, param in trainable(pair[0])])
    model, wrapped, run = wrap(pair, made, where, micro_batch=NUM_SAMPLES)
    for batch in batches(torch.bfloat16):
        (loss, norm), (plain_loss, plain_norm) = step(model, wrapped, batch), reference.step(batch)
        assert loss == plain_loss
        assert abs(norm - plain_norm) <= 1e-5 * plain_norm
    run.executor.wait_for_updates()
    for key, expected in reference.masters.items():
        master = run.chunks.master_of(key)
        assert master is not None
        assert_close(master, expected.detach(), key)
    assert_same_states(wrapped.state_dict(), reference.optimizer.state_dict())
    hightide.unwrap(model)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_states_take_the_bytes_of_their_moments(optimizer: type, name: str, dtype: torch.dtype) -> None:
    pair = build(dtype)
    model, wrapped, run = wrap(pair, make(optimizer, name, list(pair[0].parameters())), "streamed")
    num_arrays = NUM_MOMENTS[name] + (dtype is not torch.float32)
    for spec in run.chunks.specs:
        assert len(spec.states) == num_arrays
        master_bytes = 2 * (dtype is not torch.float32)
        assert spec.state_bytes == (4 * NUM_MOMENTS[name] + master_bytes) * spec.optimised_numel
    step(model, wrapped, pair[1])
    forecast = peaks(run.executor.programs[Mode.TRAIN].schedule)
    measured = hightide.stats(model).peak_bytes
    assert measured["gpu"] <= forecast.gpu_peak_bytes and measured["host"] <= forecast.host_peak_bytes
    hightide.unwrap(model)


@every
@pytest.mark.parametrize("where", ["mixed", long("streamed")])
def test_a_run_goes_from_plain_to_wrapped_and_back(optimizer: type, name: str, where: str) -> None:
    """Two steps each: plain, wrapped as it is, wrapped anew from state dicts, and plain again from state dicts."""
    stream = batches(torch.float32, num_steps=8)
    straight, _ = build(torch.float32)
    one = make(optimizer, name, list(straight.parameters()))
    for batch in stream:
        step(straight, one, batch)

    pair = build(torch.float32)
    model, its = pair[0], make(optimizer, name, list(pair[0].parameters()))
    for batch in stream[:2]:
        step(model, its, batch)
    model, its, _ = wrap(pair, its, where)
    for batch in stream[2:4]:
        step(model, its, batch)
    saved, states = model.state_dict(), its.state_dict()
    hightide.unwrap(model)

    pair = build(torch.float32, seed=1)
    model, its, _ = wrap(pair, make(optimizer, name, list(pair[0].parameters())), where)
    step(model, its, stream[0])  # states that the loaded ones replace
    model.load_state_dict(saved)
    its.load_state_dict(states)
    assert_same_states(its.state_dict(), states)
    for batch in stream[4:6]:
        step(model, its, batch)
    saved, states = model.state_dict(), its.state_dict()
    hightide.unwrap(model)

    model, _ = build(torch.float32, seed=2)
    its = make(optimizer, name, list(model.parameters()))
    model.load_state_dict(saved)
    its.load_state_dict(states)
    for batch in stream[6:]:
        step(model, its, batch)
    for key, value in straight.state_dict().items():
        assert_close(model.state_dict()[key], value, key)
    assert_same_states(its.state_dict(), one.state_dict())


@every
def test_moments_of_a_bf16_model_are_loaded_as_they_were_saved(optimizer: type, name: str) -> None:
    """Torch would round them to bf16."""
    pair = build(torch.bfloat16)
    model, its, _ = wrap(pair, make(optimizer, name, list(pair[0].parameters())), "mixed")
    step(model, its, pair[1])
    states = its.state_dict()
    its.load_state_dict(copy.deepcopy(states))
    for index, entry in its.state_dict()["state"].items():
        for field, value in entry.items():
            assert torch.equal(value, states["state"][index][field]) and value.dtype == torch.float32
    hightide.unwrap(model)


def test_a_state_without_entries_makes_an_optimizer_new() -> None:
    pair = build(torch.float32)
    model, its, _ = wrap(pair, make(torch.optim.SGD, "sgd momentum", list(pair[0].parameters())), "mixed")
    fresh = its.state_dict()
    step(model, its, pair[1])
    assert its.state_dict()["state"]
    its.load_state_dict(fresh)
    assert its.state_dict() == fresh
    hightide.unwrap(model)


@pytest.mark.parametrize(("saved_by", "name", "message"), [
    (torch.optim.AdamW, "adamw", "exp_avg.*momentum_buffer.*another optimizer"),
    (torch.optim.SGD, "sgd", None),
])  # fmt: skip
def test_states_of_another_optimizer_are_refused(saved_by: type, name: str, message: str | None) -> None:
    plain, batch = build(torch.float32)
    other = make(saved_by, name, list(plain.parameters()))
    step(plain, other, batch)
    pair = build(torch.float32)
    model, its, _ = wrap(pair, make(torch.optim.SGD, "sgd momentum", list(pair[0].parameters())), "streamed")
    step(model, its, pair[1])
    kept = its.state_dict()
    states = {**kept, "state": other.state_dict()["state"]}
    if message is None:  # there are none
        its.load_state_dict(states)
        assert its.state_dict()["state"] == {}
    else:
        with pytest.raises(ValueError, match=message):
            its.load_state_dict(states)
        assert_same_states(its.state_dict(), kept)
    hightide.unwrap(model)


def test_options_that_matter_are_refused_in_a_state_dict_too() -> None:
    pair = build(torch.float32)
    model, its, _ = wrap(pair, make(torch.optim.SGD, "sgd", list(pair[0].parameters())), "streamed")
    states = its.state_dict()
    states["param_groups"][1]["momentum"] = 0.9
    with pytest.raises(ValueError, match=r"momentum=0\.9.*wrap again with momentum"):
        its.load_state_dict(states)
    hightide.unwrap(model)


@pytest.mark.parametrize("where", ["streamed", "all on the gpu"])
def test_momentum_that_is_switched_on_and_off(where: str) -> None:
    """Torch makes the buffer in the first update with momentum, whenever that is, and keeps it without."""
    plain, _ = build(torch.float32)
    pair = build(torch.float32)
    expected = make(torch.optim.SGD, "sgd nesterov", list(plain.parameters()))
    model, its, _ = wrap(pair, make(torch.optim.SGD, "sgd nesterov", list(pair[0].parameters())), where)
    for number, batch in enumerate(batches(torch.float32, 6)):
        for one, optimizer in ((plain, expected), (model, its)):
            optimizer.param_groups[1]["momentum"] = [0.0, 0.0, 0.5, 0.5, 0.0, 0.9][number]
            optimizer.param_groups[1]["dampening"] = 0.3
            step(one, optimizer, batch)
        assert_same_states(its.state_dict(), expected.state_dict())
    for key, value in plain.state_dict().items():
        assert_close(model.state_dict()[key], value, key)
    hightide.unwrap(model)


def test_one_cycle_moves_momentum_and_learning_rate() -> None:
    plain, _ = build(torch.float32)
    pair = build(torch.float32)
    expected = make(torch.optim.SGD, "sgd momentum", list(plain.parameters()))
    original = make(torch.optim.SGD, "sgd momentum", list(pair[0].parameters()))
    cycle: dict[str, Any] = {"max_lr": 1e-2, "total_steps": 10}
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(one, **cycle) for one in (expected, original)]
    model, its, _ = wrap(pair, original, "streamed")
    for batch in batches(torch.float32, 5):
        step(model, its, batch)
        step(plain, expected, batch)
        for scheduler in schedulers:
            scheduler.step()
    for key, value in plain.state_dict().items():
        assert_close(model.state_dict()[key], value, key)
    hightide.unwrap(model)


@every
def test_updates_in_backward_equal_torch(optimizer: type, name: str) -> None:
    plain, example = build(torch.float32)
    expected = make(optimizer, name, list(plain.parameters()))
    model, _ = build(torch.float32)
    its = make(optimizer, name, list(model.parameters()))
    model, its = hightide.wrap(model, its, example, limits=LIMITS, micro_batch=2, update="in_backward")
    for batch in batches(torch.float32):
        for one, optimizer_ in ((model, its), (plain, expected)):
            models.loss_of(one, batch).backward()
            optimizer_.step()
            optimizer_.zero_grad()
    for key, value in plain.state_dict().items():
        assert_close(model.state_dict()[key], value, key)
    hightide.unwrap(model)


def test_a_plan_for_another_number_of_moments_is_refused() -> None:
    model, batch = build(torch.float32)
    params = list(model.parameters())
    plan: Plan = hightide.plan(model, make(torch.optim.AdamW, "adamw", params), batch, limits=LIMITS)
    with pytest.raises(ValueError, match=r"exp_avg_sq \(float32\) of each parameter, this one keeps momentum_buffer"):
        hightide.wrap(model, make(torch.optim.SGD, "sgd momentum", params), batch, plan=plan)
    hightide.unwrap(hightide.wrap(model, make(torch.optim.Adam, "adam", params), batch, plan=plan)[0])
