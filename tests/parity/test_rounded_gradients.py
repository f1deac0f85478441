"""Gradients that are kept in the parameter's dtype: sums in fp32, one rounding, the same bits from every plan."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from harness import SUBJECTS, Trained, assert_same_bits, make_optimizer, train
from torch import Tensor, nn

import hightide
import models
from each_value import each_value
from hightide.ir.activation import Activation
from hightide.ir.plan import BlockPlan, GradientDtype, Plan
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner import chunk_places
from hightide.planner.placement import Placement
from hightide.planner.solution import Solution
from hightide.profiler.model.model_profile import profile_model
from hightide.runtime.lanes import thread_lives
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of

BF16 = torch.bfloat16
ROOMY = hightide.Limits(gpu="16MiB", host="64MiB")
G, H = Tier.GPU, Tier.HOST
NUM_STEPS = 2
PLACES: dict[str, Callable[[int], tuple[Tier, Tier]]] = {
    "all on the gpu": lambda _: (G, G),
    "all on the gpu, in fp32": lambda _: (G, G),
    "states on host": lambda _: (G, H),
    "streamed": lambda _: (H, H),
    "mixed": lambda block: [(H, H), (G, G), (G, H)][block % 3],
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every larger gradient passes through the staging in several tiles, and a tail. Few layers are worth a grad
    slot."""
    monkeypatch.setattr(chunk_places, "STAGING_NUMEL", 640)
    monkeypatch.setattr(chunk_places, "SLOTS_FOR_ROUNDED", 1)


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


def bf16_model(name: str, num_samples: int = 6, **options: Any) -> models.Pair:
    model, batch = SUBJECTS[name].build(num_samples=num_samples, **options)
    return model.to(BF16), as_bf16(batch)


def as_bf16(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value.to(BF16) if value.is_floating_point() else value for key, value in batch.items()}


def plan_for(
    pair: models.Pair,
    where: str,
    update: str = "deferred",
    micro_batch: int = 2,
    gradients: str = "param",
    accumulate: int = 1,
    sums: Tier = H,
) -> Plan:
    model, batch = pair
    optimizer = make_optimizer(model, groups=2)
    options: dict[str, Any] = {"micro_batch": micro_batch, "update": update, "gradients": gradients}
    options["accumulate"] = accumulate
    plan = hightide.plan(model, optimizer, batch, limits=ROOMY, **options)
    profile, _ = profile_model(model, optimizer, batch)
    blocks = []
    for spec, block in zip(profile.blocks, plan.blocks, strict=True):
        tiers = PLACES[where](spec.index)
        blocks.append(block if spec.loose else BlockPlan(spec.name, *tiers, Activation.RECOMPUTE, G, sums=sums))
    plan = replace(plan, blocks=tuple(blocks))
    if where.endswith("in fp32"):
        plan = replace(plan, rounded_on_gpu=False)
    slots, grad_slots = Placement(plan).widest_tick({call.block for call in profile.calls})
    return replace(plan, num_slots=slots + 1 if slots else 0, num_grad_slots=grad_slots + 1 if grad_slots else 0)


def wrapped(pair: models.Pair, where: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Run]:
    plan = plan_for(pair, where, **options)
    model, optimizer = hightide.wrap(pair[0], make_optimizer(pair[0], groups=2), pair[1], plan=plan)
    run = run_of(model)
    assert run is not None
    return model, optimizer, run


def batches(name: str, num_steps: int = NUM_STEPS) -> list[Any]:
    return [as_bf16(batch) for batch in SUBJECTS[name].batches(num_steps, num_samples=6)]


def masters(run: Run) -> dict[str, Tensor]:
    run.executor.wait_for_updates()
    values = {}
    for key, (chunk, entry) in run.chunks.places.items():
        if entry.offset_numel < run.chunks.specs[chunk].optimised_numel:
            master = run.chunks.master_of(key)
            values[key] = (run.chunks.value(key).view if master is None else master).clone()
    return values


# ---- against plain PyTorch


class Reference:
    """Plain PyTorch in bf16 with fp32 masters: a whole step's gradient, summed over slices of the batch in fp32,
    rounded to bf16 once, updates the masters, whose rounding is the next step's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.masters = {name: nn.Parameter(param.detach().float()) for name, param in model.named_parameters()}
        matrices = [value for value in self.masters.values() if value.dim() > 1]
        vectors = [value for value in self.masters.values() if value.dim() <= 1]
        shape = nn.Module()
        shape.all = nn.ParameterList([*matrices, *vectors])
        self.optimizer = make_optimizer(shape, groups=2)

    def step(self, batch: dict[str, Any], micro_batch: int, clip: float | None = None) -> float:
        num_samples = len(next(iter(batch.values())))
        sums = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        total = 0.0
        for start in range(0, num_samples, micro_batch):
            part = {key: value[start : start + micro_batch] for key, value in batch.items()}
            weight = self._weight(part) / self._weight(batch)
            loss = models.loss_of(self.model, part) * weight
            loss.backward()
            total += loss.item()
            for name, param in self.model.named_parameters():
                assert param.grad is not None
                sums[name] += param.grad.float()
                param.grad = None
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(value) for value in sums.values()]))
        factor = 1.0 if clip is None else min(1.0, clip / (float(norm) + 1e-6))
        for name, master in self.masters.items():
            master.grad = sums[name].to(BF16).float() * factor
        self.optimizer.step()
        for name, param in self.model.named_parameters():
            param.data.copy_(self.masters[name])
        return total

    @staticmethod
    def _weight(batch: dict[str, Any]) -> int:
        """What the loss is a mean over: labelled tokens (all but the first of a sequence), or samples."""
        labels = batch["labels"]
        return int((labels[:, 1:] != -100).sum()) if labels.dtype == torch.int64 else len(labels)


@pytest.mark.parametrize(
    ("name", "micro_batch", "where", "clip"),
    [
        ("hand_written", 2, "streamed", None),
        ("llama_tied", 2, "streamed", 0.5),
        long("llama", 2, "streamed", 0.5),
        long("llama_tied", 2, "streamed", None),
        long("llama", 6, "streamed", None),
        long("llama", 2, "all on the gpu", None),
        long("llama_tied", 2, "all on the gpu", 0.5),
        long("hand_written", 6, "all on the gpu", None),
    ],
)
def test_bf16_training_equals_plain_pytorch_with_fp32_masters(name, micro_batch, where, clip):
    """Tolerance: compute is in bf16, whose rounding (2**-8) depends on how a batch is cut; so masters may be apart by
    5% of what AdamW can have moved them, and losses by 1%. An unrounded or unscaled gradient is told apart by the other
    tests of this file, to the bit."""
    steps, lr = 6, 3e-3
    reference = Reference(bf16_model(name)[0])
    before = {key: value.detach().clone() for key, value in reference.masters.items()}
    model, optimizer, run = wrapped(bf16_model(name), where, micro_batch=micro_batch)
    for batch in batches(name, steps):
        expected = reference.step(batch, micro_batch, clip)
        loss = models.loss_of(model, batch)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        assert abs(loss.item() - expected) <= 0.01 * abs(expected)
    found = masters(run)
    assert found.keys() == reference.masters.keys()
    moved, apart = [], []
    for key, value in reference.masters.items():
        moved.append((value.detach() - before[key]).abs().mean())
        apart.append((value.detach() - found[key]).abs().mean())
        assert float(apart[-1]) <= 0.05 * steps * lr, key
    assert float(sum(apart)) <= 0.05 * float(sum(moved)), (float(sum(apart)), float(sum(moved)))
    hightide.unwrap(model)


# ---- across plans


def run_with(name: str, plan: Plan, **options: Any) -> Trained:
    torch.manual_seed(3)
    stream = batches(name, 2 * NUM_STEPS)
    if options.get("accumulate") == 2:
        stream = list(zip(stream[::2], stream[1::2], strict=True))
    return train(bf16_model(name), stream, wrap={"plan": plan}, groups=2, **options)


@pytest.mark.parametrize(
    ("name", "update", "options"),
    [
        ("plain_tied", "deferred", {"clip": "torch"}),
        ("hand_written", "deferred", {"accumulate": 2, "clip": "optimizer"}),
        ("hand_written", "in_backward", {}),
        long("llama_tied", "deferred", {"clip": "torch"}),
        long("llama_tied", "in_backward", {}),
        long("llama_tied", "deferred", {"accumulate": 2, "clip": "optimizer"}),
        long("plain_tied", "deferred", {}),
    ],
)
def test_every_plan_rounds_at_the_same_moments(name, update, options):
    results = {where: run_with(name, plan_for(bf16_model(name), where, update), **options) for where in PLACES}
    first = results["all on the gpu"]
    for where, result in results.items():
        print(where)  # pytest shows it where the next line fails
        assert_same_bits(first, result)
        assert result.stats is not None and result.stats.deviations == 0
        assert_same_moments(first, result)
    unrounded = run_with(name, plan_for(bf16_model(name), "streamed", update, gradients="float32"), **options)
    with pytest.raises(AssertionError, match="moments"):  # else nothing was rounded
        assert_same_moments(first, unrounded)


def assert_same_moments(first: Trained, other: Trained) -> None:
    """Weights are bf16 and would hide small differences."""
    states = [trained.optimizer.state_dict()["state"] for trained in (first, other)]
    assert states[0].keys() == states[1].keys() and states[0]
    for number, state in states[0].items():
        for name, value in state.items():
            assert torch.equal(value, states[1][number][name]), f"the moments {name} of {number} differ"


@pytest.mark.parametrize("name", [long("llama_tied"), "hand_written"])
def test_both_timings_give_the_same_bits(name):
    results = [run_with(name, plan_for(bf16_model(name), "mixed", update)) for update in ("deferred", "in_backward")]
    assert_same_bits(*results)
    assert_same_moments(*results)


class Shared(nn.Module):
    """One block that runs three times in a row: its gradient stays in its slot from call to call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(2)])
        self.out = nn.Linear(32, 8)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in (self.layers[0], self.layers[1], self.layers[1], self.layers[1]):
            x = x + layer(x)
        return {"loss": nn.functional.mse_loss(self.out(x), labels)}


def test_a_block_that_runs_several_times_in_a_row_rounds_alike_everywhere():
    def make() -> models.Pair:
        return Shared().to(BF16), as_bf16(models.vector_batch())

    results = []
    for where in PLACES:
        stream = [as_bf16(models.vector_batch(seed)) for seed in range(4)]
        results.append(train(make(), stream, wrap={"plan": plan_for(make(), where)}, groups=2, clip="torch"))
    for result in results[1:]:
        assert_same_bits(results[0], result)
        assert_same_moments(results[0], result)


def test_a_slow_lane_changes_nothing():
    name, options = "llama_tied", {"accumulate": 2, "clip": "torch"}
    plan = plan_for(bf16_model(name), "streamed")
    expected = run_with(name, plan, **options)
    for lane in (Lane.H2D, Lane.D2H, Lane.CPU):
        print(lane)  # pytest shows it where the next lines fail
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(thread_lives, "_run", partial(run_late, thread_lives._run, lane, random.Random(7)))
            slow = run_with(name, plan, **options)
        assert_same_bits(expected, slow)
        assert_same_moments(expected, slow)


def run_late(run: Callable[..., None], slow: Lane, delays: random.Random, task: Any, *rest: Any) -> None:
    if task.lane is slow:
        time.sleep(delays.choice((0.0, 0.001, 0.004)))
    run(task, *rest)


def test_an_fp32_model_is_not_touched():
    build = partial(SUBJECTS["llama_tied"].build, num_samples=6)
    stream = SUBJECTS["llama_tied"].batches(NUM_STEPS, num_samples=6)
    results = []
    for gradients in ("float32", "param"):
        plan = plan_for(build(), "streamed", gradients=gradients)
        assert Placement(plan).staging_bytes == 0
        results.append(train(build(), stream, wrap={"plan": plan}, groups=2, clip="torch"))
    assert_same_bits(*results)
    assert results[0].stats.moved_bytes == results[1].stats.moved_bytes
    assert results[0].stats.peak_bytes == results[1].stats.peak_bytes


# ---- bytes


EVERY_PLACE = [(where, gradients) for where in PLACES for gradients in ("float32", "param")]


@pytest.mark.parametrize(
    ("name", "where", "gradients"),
    [
        *each_value(("hand_written",), list(PLACES), ("float32", "param")),
        ("llama_tied", "mixed", "param"),
        *(long("llama_tied", *case) for case in EVERY_PLACE if case != ("mixed", "param")),
    ],
)
def test_bytes_are_what_the_plan_says(name, where, gradients):
    pair = bf16_model(name)
    model, optimizer, run = wrapped(pair, where, gradients=gradients)
    staging = run.gpu.breakdown().get("gradient staging", 0)
    assert staging == Placement(run.plan).staging_bytes and (staging > 0) == (gradients == "param")
    assert run.host.used_bytes == Placement(run.plan).base_bytes()[H]
    at_home = [
        run.chunks.grad(spec.index)
        for spec in run.chunks.specs
        if spec.trainable_numel and run.chunks.placed[spec.index].states is H
    ]
    assert {value.dtype for value in at_home} <= {BF16 if gradients == "param" else torch.float32}
    waiting = [place for place in run.chunks.placed if place.is_rounded_home]
    assert (
        len(waiting) >= 2 if where == "all on the gpu" and gradients == "param" else where != "streamed" or not waiting
    )
    for place in waiting:
        index = place.chunk.index
        assert (place.states, run.chunks.grad(index).dtype) == (G, BF16) and run.chunks.grad(index).store is run.gpu
        assert place.copies[ChunkKind.GRAD, G] == 2 * place.chunk.trainable_numel
    moved_before = dict(run.performer.moved_bytes)
    for _ in range(2):
        models.loss_of(model, pair[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.executor.wait_for_updates()
    stats = hightide.stats(model)
    forecast = Solution.of(run.profile, run.plan).schedules
    gpu_peak = max(place_peaks(schedule) for schedule in forecast.values())
    assert stats.peak_bytes["gpu"] <= gpu_peak
    scheduled = sum(a.num_bytes for a in forecast[hightide.ir.action.Mode.TRAIN].lane(Lane.D2H))  # type: ignore[attr-defined]
    assert run.performer.moved_bytes[Lane.D2H] - moved_before.get(Lane.D2H, 0) == 2 * scheduled
    assert scheduled >= sum(place.grad_bytes for place in run.chunks.placed if place.states is H)
    hightide.unwrap(model)


def place_peaks(schedule: Any) -> int:
    return hightide.planner.predict.peaks.peaks(schedule).gpu_peak_bytes  # type: ignore[attr-defined]


def test_the_rule_plans_within_limits_and_forecasts_the_peak():
    """The limit is tight: what the staging takes must be in the forecast."""
    model, batch = bf16_model("llama")
    for gpu in ("150KiB", "200KiB", "400KiB"):
        model, batch = bf16_model("llama")
        limits = hightide.Limits(gpu=gpu, host="64MiB")
        model, optimizer = hightide.wrap(
            model, make_optimizer(model), batch, limits=limits, micro_batch=2, gradients="param"
        )
        for _ in range(2):
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = hightide.stats(model)
        assert stats.peak_bytes["gpu"] <= stats.forecast.gpu_peak_bytes <= stats.plan.gpu_limit_bytes
        assert stats.plan.gradients is GradientDtype.PARAM
        hightide.unwrap(model)


# ---- what users see


@pytest.mark.parametrize("where", ["all on the gpu", "streamed"])
def test_gradients_can_be_read_scaled_and_replaced(where):
    pair = bf16_model("hand_written")
    model, optimizer, run = wrapped(pair, where)
    plain, batch = bf16_model("hand_written")[0], pair[1]
    models.loss_of(model, batch).backward()
    models.loss_of(plain, batch).backward()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert param.grad.dtype == BF16
        torch.testing.assert_close(param.grad.clone(), other.grad, rtol=0.05, atol=0.02, msg=name)
    key = next(key for key in run.parameters if key.startswith("layers.1."))
    param = run.parameters[key]
    read = param.grad.clone()
    at_rest = run.gradients.place_of(key).view
    assert torch.equal(at_rest.float(), read.float()), "what is at rest is exactly what is read"
    param.grad.mul_(0.3)
    assert torch.equal(param.grad.clone(), (read.float() * 0.3).to(BF16))
    replacement = torch.full(param.shape, 0.1, dtype=torch.float32)
    param.grad = replacement
    optimizer.step()
    run.executor.wait_for_updates()
    moment = next(iter(wrapped_moments(optimizer, key)))
    expected = torch.zeros(param.shape).lerp(replacement.to(BF16).float(), 1 - 0.9)
    torch.testing.assert_close(moment.float(), expected, rtol=1e-6, atol=0)
    hightide.unwrap(model)


def test_what_is_added_to_gradients_is_rounded_alike_everywhere() -> None:
    """Once, with the factor that they still had: an update on the GPU must not see more bits than one on the host."""

    def updated(where: str) -> dict[str, Tensor]:
        pair = bf16_model("hand_written")
        model, optimizer, run = wrapped(pair, where)
        models.loss_of(model, pair[1]).backward()
        found: dict[str, Tensor] = {}
        for name, param in model.named_parameters():
            param.grad.mul_(0.3)
            param.grad.add_(torch.full(param.shape, 0.01))
            found[f"gradient of {name}"] = param.grad.clone()
        found["norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found |= masters(run)
        hightide.unwrap(model)
        return found

    first = updated("all on the gpu")
    for where in ("all on the gpu, in fp32", "streamed", "mixed"):
        for name, value in updated(where).items():
            assert torch.equal(value, first[name]), f"{name}, {where}"


@pytest.mark.parametrize("num_passes", [1, 2])
def test_what_is_added_twice_to_the_sum_of_several_passes_is_rounded_alike_everywhere(num_passes: int) -> None:
    """By each addition once the sum is finished, wherever it was summed. With a pass that is still to come it is not
    finished: then the step rounds it once."""

    def updated(where: str, sums: Tier) -> dict[str, Tensor]:
        pair = bf16_model("hand_written")
        model, optimizer, run = wrapped(pair, where, accumulate=2, sums=sums)
        generator = torch.Generator().manual_seed(3)
        for batch in batches("hand_written", num_passes):
            models.loss_of(model, batch).backward()
        found: dict[str, Tensor] = {}
        for name, param in model.named_parameters():
            for _ in range(2):
                param.grad.add_(0.003 * torch.randn(param.shape, generator=generator))
            found[f"gradient of {name}"] = param.grad.clone()
        found["norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found |= masters(run)
        hightide.unwrap(model)
        return found

    first = updated("all on the gpu", H)
    for where, sums in (("streamed", H), ("streamed", G), ("mixed", G)):
        for name, value in updated(where, sums).items():
            assert torch.equal(value, first[name]), f"{name}, {where}, sums on the {sums}"


def wrapped_moments(optimizer: Any, key: str) -> list[Tensor]:
    return [moment.view for moment in optimizer.updates.moments.of(key)]


@pytest.mark.parametrize("where", ["streamed", "mixed", long("all on the gpu"), long("states on host")])
def test_what_rests_is_representable_and_frozen_parameters_have_none(where):
    pair = bf16_model("llama")
    for param in pair[0].model.layers[1].parameters():  # type: ignore[union-attr,operator,index]
        param.requires_grad_(False)
    frozen = {name: p.detach().clone() for name, p in pair[0].named_parameters() if not p.requires_grad}
    model, optimizer, run = wrapped(pair, where)
    models.loss_of(model, pair[1]).backward()
    for spec in run.chunks.specs:
        if spec.trainable_numel:
            if spec.index in run.flight.exits:
                run.flight.exits[spec.index].wait_through()
            value = run.chunks.grad(spec.index).view
            assert torch.equal(value.float(), value.to(BF16).float()) and value.any()
    optimizer.step()
    after = model.state_dict()
    for name, value in frozen.items():
        assert torch.equal(after[name], value)
    hightide.unwrap(model)


@pytest.mark.parametrize("where", ["all on the gpu", "streamed"])
def test_fp16_gradients_that_overflow_show_in_the_norm(where):
    """A loop that skips steps whose norm is not finite must skip this one: the sums are finite, what is kept is not."""
    model, batch = models.hand_written()
    pair = (model.half(), {key: value.half() for key, value in batch.items()})
    plan = plan_for(pair, where)
    model, _ = hightide.wrap(pair[0], make_optimizer(pair[0], groups=2), pair[1], plan=plan)
    loss = models.loss_of(model, pair[1])
    (loss.float() * 2.0**16).backward()
    inside = [param for name, param in model.named_parameters() if name.startswith("layers.")]
    assert any(not param.grad.isfinite().all() for param in inside)
    assert not torch.isfinite(torch.nn.utils.clip_grad_norm_(inside, 1.0))
    hightide.unwrap(model)


def test_what_waits_rounded_on_the_gpu_is_added_to_and_scaled_as_at_home() -> None:
    """By a second backward that leaves a block out, one whose end fails, and one that wants no parameter's gradient."""

    def fail(_: Tensor) -> None:
        raise RuntimeError("on purpose")

    def updated(where: str) -> dict[str, Tensor]:
        pair = bf16_model("hand_written")
        model, optimizer, run = wrapped(pair, where)
        first, second, third, fourth = batches("hand_written", 4)
        models.loss_of(model, first).backward()
        for param in model.parameters():
            param.grad.mul_(0.3)
        second["x"].requires_grad_()
        found = {"of the input": torch.autograd.grad(models.loss_of(model, second), second["x"])[0]}
        model.skip = {1}
        models.loss_of(model, second).backward()
        model.skip = set()
        third["x"].requires_grad_().register_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            models.loss_of(model, third).backward()
        found |= {name: param.grad.clone() for name, param in model.named_parameters()}
        found["norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        models.loss_of(model, fourth).backward()
        optimizer.step()
        found |= {f"master of {name}": value for name, value in masters(run).items()}
        hightide.unwrap(model)
        return found

    first = updated("all on the gpu")
    for where in ("all on the gpu, in fp32", "streamed", "mixed"):
        for name, value in updated(where).items():
            assert torch.equal(value, first[name]), f"{name}, {where}"


def test_the_choice_is_in_the_plan_and_checked(tmp_path):
    pair = bf16_model("hand_written")
    optimizer = make_optimizer(pair[0])
    with pytest.raises(ValueError, match=r"gradients='fp8'.*'float32' or 'param'"):
        hightide.plan(*(pair[0], optimizer, pair[1]), limits=ROOMY, gradients="fp8")
    plan = hightide.plan(pair[0], optimizer, pair[1], limits=ROOMY)
    assert plan.gradients is GradientDtype.FLOAT32
    with pytest.raises(ValueError, match=r"gradients='param', but the plan was made with gradients='float32'"):
        hightide.wrap(pair[0], optimizer, pair[1], plan=plan, gradients="param")
    rounded = hightide.plan(pair[0], optimizer, pair[1], limits=ROOMY, gradients="param")
    assert "bfloat16: the sum, rounded" in rounded.explain()
    rounded.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == rounded
    data = json.loads((tmp_path / "plan.json").read_text())
    del data["gradients"]  # a plan from before there was a choice
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert Plan.load(tmp_path / "old.json").gradients is GradientDtype.FLOAT32
