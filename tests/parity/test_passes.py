"""Steps of several passes that were planned as such: the same results as plain PyTorch, and the same bits from every
plan, whether the loop keeps its promise or not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import SUBJECTS, make_optimizer
from torch import Tensor, nn

import hightide
import models
from hightide.ir.action import Mode
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane, Tier
from hightide.planner import chunk_places
from hightide.planner.layout import pack
from hightide.planner.placement import Placement
from hightide.planner.solution import Solution
from hightide.planner.verify.compare_records import compare
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of

G, H = Tier.GPU, Tier.HOST
ROOMY = hightide.Limits(gpu="16MiB", host="64MiB")
NUM_SAMPLES = 4
# Of block number i: params, states, sums.
PLACES: dict[str, Callable[[int], tuple[Tier, Tier, Tier]]] = {
    "sums at home": lambda _: (H, H, H),
    "sums stay": lambda _: (H, H, G),
    "mixed": lambda i: [(H, H, G), (G, G, H), (G, H, G), (H, H, H), (G, H, H)][i % 5],
}
Pair = tuple[nn.Module, torch.optim.Optimizer]


def plan_for(pair: Pair, batch: Any, where: str, inputs: Tier = H, **options: Any) -> Plan:
    """Slots that hold a few blocks, so that some stay in them from pass to pass."""
    plan = hightide.plan(*pair, batch, limits=ROOMY, micro_batch=2, **options)
    assert plan.profile is not None
    loose = {block.name for block in plan.profile.blocks if block.loose}
    kinds = {"activation": Activation.RECOMPUTE, "inputs": inputs, "held": G}
    blocks = [
        block
        if block.name in loose
        else replace(block, **dict(zip(("params", "states", "sums"), PLACES[where](i), strict=True)), **kinds)
        for i, block in enumerate(plan.blocks)
    ]
    plan = replace(plan, blocks=tuple(blocks))
    slots, grad_slots = Placement(plan).widest_tick({call.block for call in plan.profile.calls})
    return replace(plan, num_slots=slots + 2 if slots else 0, num_grad_slots=grad_slots + 1 if grad_slots else 0)


def build(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Pair, Any]:
    torch.manual_seed(0)
    model, batch = SUBJECTS[name].build(num_samples=NUM_SAMPLES, **options)
    model = model.to(dtype)
    return (model, make_optimizer(model, groups=2)), batch


def wrapped(name: str, where: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Pair, Run]:
    pair, batch = build(name, dtype)
    plan = plan_for(pair, batch, where, **options)
    model, optimizer = hightide.wrap(*pair, batch, plan=plan)
    run = run_of(model)
    assert run is not None
    return (model, optimizer), run


Between = Callable[[nn.Module, int], None]


def train(
    pair: Pair, name: str, per_step: list[int], clip: float = 0.0, between: Between = lambda model, count: None
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, norms and weights, with as many backwards per step. `between`: called before each forward."""
    model, optimizer = pair
    batches = iter(SUBJECTS[name].batches(sum(per_step), num_samples=NUM_SAMPLES))
    numbers, count = [], 0
    for number in per_step:
        for _ in range(number):
            between(model, count)
            loss = models.loss_of(model, next(batches)) / number
            loss.backward()
            numbers.append(loss.item())
            count += 1
        if clip:
            numbers.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return numbers, {key: value.clone() for key, value in model.state_dict().items()}


def assert_close(ours: tuple[list[float], dict[str, Tensor]], plain: tuple[list[float], dict[str, Tensor]]) -> None:
    assert ours[0] == pytest.approx(plain[0], rel=2e-6, abs=1e-6)
    for key, value in plain[1].items():
        assert (ours[1][key] - value).abs().max() <= 1e-5 * value.abs().max() + 1e-6, key


def assert_same_bits(ours: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]) -> None:
    assert ours[0] == other[0]
    assert all(torch.equal(ours[1][key], value) for key, value in other[1].items())


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


def placed(*others: Any) -> list[Any]:
    """Each of these with "mixed", which has every place of a chunk; with the plain places they are `long`."""
    plain = [long(where, other) for where in ("sums at home", "sums stay") for other in others]
    return [*(("mixed", other) for other in others), *plain]


COVERING = [  # every model and number of passes, each timing with each kind of weights and with a middle pass
    ("llama", 3, "in_backward"),
    ("llama_tied", 2, "deferred"),
    ("llama_tied", 4, "in_backward"),
    ("plain", 4, "deferred"),
]
MORE = [
    ("llama_tied", 3, "deferred"),
    ("llama", 3, "deferred"),
    ("llama_tied", 2, "in_backward"),
    ("llama_tied", 3, "in_backward"),
    ("llama_tied", 4, "deferred"),
    ("plain", 4, "in_backward"),
]


@pytest.mark.parametrize(("name", "number", "update"), [*COVERING, *(long(*case) for case in MORE)])
def test_every_plan_equals_plain_pytorch_and_gives_the_same_bits(name: str, number: int, update: str) -> None:
    clip = 0.3 if update == "deferred" else 0.0
    plain = train(build(name)[0], name, [number] * 2, clip)
    first = None
    for where in PLACES:
        pair, run = wrapped(name, where, update=update, accumulate=number)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trained = train(pair, name, [number] * 2, clip)
        assert hightide.stats(pair[0]).deviations == 0
        assert_close(trained, plain)
        assert_followed(run, number)
        if first is not None:
            assert_same_bits(trained, first)
        first = trained
        hightide.unwrap(pair[0])


def assert_followed(run: Run, number: int) -> None:
    """The passes of the last step did what their schedules say."""
    run.executor.wait_for_updates()
    modes = [Mode.FIRST, *([Mode.MIDDLE] * (number - 2)), Mode.LAST]
    for back, mode in enumerate(reversed(modes[-3:])):
        lines = compare(run.executor.programs[mode].schedule, run.lanes.records_of(run.lanes.pass_index - back))
        assert [line for line in lines if mode is Mode.LAST or ": step " not in line] == [], mode


def test_what_stays_does_not_move() -> None:
    """Sums that stay cross the link once per step, others twice per pass; parameters in slots are not fetched again."""
    moved = {}
    for where in ("sums at home", "sums stay"):
        pair, run = wrapped("llama", where, inputs=G, accumulate=4)
        train(pair, "llama", [4] * 2)
        passes = Solution.of(run.profile, run.plan).passes
        moved[where] = hightide.stats(pair[0]).moved_bytes
        assert moved[where] == {str(lane): 2 * passes.moved_bytes(lane) for lane in (Lane.H2D, Lane.D2H)}
        assert run.executor.programs[Mode.MIDDLE].schedule.standing
        hightide.unwrap(pair[0])
    grads = sum(place.chunk.grad_bytes for place in Placement(run.plan).chunks if place.stays)
    assert moved["sums at home"]["d2h"] - moved["sums stay"]["d2h"] == 2 * 3 * grads


@pytest.mark.parametrize(("where", "per_step"), placed([1, 1, 3], [2, 5, 3], [3, 1, 4]))
def test_a_loop_that_does_not_keep_its_promise_is_right_and_told_once(where: str, per_step: list[int]) -> None:
    plain = train(build("llama_tied")[0], "llama_tied", per_step, 0.3)
    pair, _ = wrapped("llama_tied", where, accumulate=3)
    with pytest.warns(UserWarning, match="accumulate=3") as told:
        trained = train(pair, "llama_tied", per_step, 0.3)
    assert len([one for one in told if "accumulate=3" in str(one.message)]) == 1
    assert_close(trained, plain)
    hightide.unwrap(pair[0])


def test_in_backward_a_step_may_come_early_and_a_backward_too_many_is_refused() -> None:
    plain = train(build("llama")[0], "llama", [3, 2, 3])
    pair, _ = wrapped("llama", "mixed", update="in_backward", accumulate=3)
    with pytest.warns(UserWarning, match="step\\(\\) came after 2"):
        assert_close(train(pair, "llama", [3, 2, 3]), plain)
    with pytest.raises(hightide.Refused, match="in_backward"):
        train(pair, "llama", [4])


@pytest.mark.parametrize(("where", "dtype"), placed(torch.bfloat16, torch.float16))
def test_sums_are_rounded_once(where: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a sum in fp32 of the gradients of all passes, each of which the model itself computes."""
    monkeypatch.setattr(chunk_places, "STAGING_NUMEL", 640)  # several tiles
    pair, run = wrapped("llama_tied", where, dtype, gradients="param", accumulate=3)
    alone, apart = wrapped("llama_tied", "sums at home", dtype, gradients="float32")
    for batch in SUBJECTS["llama_tied"].batches(3, num_samples=NUM_SAMPLES):
        models.loss_of(pair[0], batch).backward()
        models.loss_of(alone[0], batch).backward()
    for one in (run, apart):
        one.executor.come_to_rest()
    for key, _ in pair[0].named_parameters():
        finished, whole = (one.gradients.place_of(key).peek() for one in (run, apart))
        assert torch.equal(finished.float(), whole.to(dtype).float()), key


def test_what_the_last_pass_leaves_out_is_rounded_all_the_same() -> None:
    trained = {}
    for where in ("sums at home", "sums stay"):
        pair, run = wrapped("plain", where, torch.bfloat16, gradients="param", accumulate=2)
        model, optimizer = pair
        layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
        first, second = SUBJECTS["plain"].batches(2, num_samples=NUM_SAMPLES)
        models.loss_of(model, first).backward()
        whole = list(layers)
        layers._modules.pop(str(len(whole) - 1))
        models.loss_of(model, second).backward()
        optimizer.step()
        layers._modules[str(len(whole) - 1)] = whole[-1]
        trained[where] = {key: value.clone() for key, value in model.state_dict().items()}
        run.executor.wait_for_updates()
    assert all(torch.equal(trained["sums stay"][key], value) for key, value in trained["sums at home"].items())


def evaluate(model: nn.Module, count: int) -> None:
    if count % 3 == 1:
        with torch.no_grad():
            models.loss_of(model, SUBJECTS["llama"].batches(1, num_samples=NUM_SAMPLES)[0])


def look(model: nn.Module, count: int) -> None:
    """Gradients are read, scaled and replaced between passes."""
    params = [param for param in model.parameters() if param.grad is not None]
    if count % 4 == 2:
        torch.nn.utils.clip_grad_norm_(params, 0.2)
        params[-1].grad = params[-1].grad * 0.5  # type: ignore[operator]
        assert params[0].grad.norm() > 0  # type: ignore[union-attr]
        assert params[1].grad.clone().abs().sum() > 0  # type: ignore[union-attr]


def load(model: nn.Module, count: int) -> None:
    if count % 4 == 1:
        state = {key: value * 1.01 for key, value in model.state_dict().items()}
        model.load_state_dict(state)


def drop(model: nn.Module, count: int) -> None:
    if count == 5:
        model.zero_grad()


@pytest.mark.parametrize(("where", "between"), placed(evaluate, look, load, drop))
def test_what_a_loop_does_between_passes(where: str, between: Between) -> None:
    per_step = [4, 4]
    plain = train(build("llama")[0], "llama", per_step, 0.3, between)
    pair, _ = wrapped("llama", where, accumulate=4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*accumulate=4")  # of the one that drops what there is
        assert_close(train(pair, "llama", per_step, 0.3, between), plain)
    hightide.unwrap(pair[0])


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_a_move_to_another_plan_between_passes(update: str) -> None:
    """From every place of sums to every other, in the middle of a step."""
    plain = train(build("llama_tied")[0], "llama_tied", [3] * 3)
    options = {"update": update, "accumulate": 3}
    pair, run = wrapped("llama_tied", "sums stay", **options)
    other, batch = build("llama_tied")
    plans = {where: plan_for(other, batch, where, **options) for where in PLACES}
    order = iter(["sums at home", "mixed", "sums stay", "mixed", "sums at home", "sums stay"])

    def move(model: nn.Module, count: int) -> None:
        if count % 3:
            run.move_to(Solution.of(run.profile, plans[next(order)]))

    assert_close(train(pair, "llama_tied", [3] * 3, between=move), plain)


def test_an_exception_in_the_middle_of_a_step() -> None:
    plain = train(build("llama")[0], "llama", [3])
    for where in PLACES:
        pair, _ = wrapped("llama", where, accumulate=3)
        model, optimizer = pair
        batch = SUBJECTS["llama"].batches(1, num_samples=NUM_SAMPLES)[0]
        models.loss_of(model, batch).backward()
        block = next(module for name, module in model.named_modules() if name.endswith("layers.1.mlp"))

        def fail(*_: Any) -> None:
            raise KeyError("planted")

        hook = block.register_forward_hook(fail)
        with pytest.raises(KeyError, match="planted"):
            models.loss_of(model, batch)
        hook.remove()
        optimizer.zero_grad()
        assert_close(train(pair, "llama", [3]), plain)


def test_adapters() -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> tuple[Pair, Any]:
        (model, _), batch = build("llama")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config)
        return (model, make_optimizer(model)), batch

    plain = train(adapted()[0], "llama", [3] * 2, 0.3)
    for where in ("sums at home", "sums stay"):
        pair, batch = adapted()
        model, optimizer = hightide.wrap(*pair, batch, plan=plan_for(pair, batch, where, accumulate=3))
        assert_close(train((model, optimizer), "llama", [3] * 2, 0.3), plain)


@pytest.mark.parametrize("room", [1.05, long(1.6), 3.0])
def test_limits_only(room: float) -> None:
    """The search finds a plan for the whole step, and no tier exceeds its limit."""
    from harness import wrap

    plain = train(build("gpt2")[0], "gpt2", [4] * 2, 0.3)
    pair, batch = build("gpt2")
    model, optimizer = wrap(*pair, batch, room=room, accumulate=4)
    assert_close(train((model, optimizer), "gpt2", [4] * 2, 0.3), plain)
    stats = hightide.stats(model)
    assert stats.plan.accumulate == 4 and "loop: 4 calls of 4 samples, then step()" in stats.plan.explain()
    assert stats.peak_bytes["gpu"] <= stats.plan.gpu_limit_bytes


def test_dropout_and_scaler() -> None:
    """Masks follow from the pass; a scaler that skips a step drops its sums."""
    trained = []
    for where in PLACES:
        pair, batch = build("gpt2", dropout=0.2)
        plan = plan_for(pair, batch, where, accumulate=2)
        model, optimizer = hightide.wrap(*pair, batch, plan=plan)
        model.train()
        trained.append(train((model, optimizer), "gpt2", [2] * 3, 0.3))
    assert_same_bits(trained[0], trained[1])
    assert_same_bits(trained[0], trained[2])


@pytest.mark.parametrize("accumulate", [0, -1, True, 2.0, "4"])
def test_what_is_no_number_of_passes(accumulate: Any) -> None:
    pair, batch = build("plain")
    with pytest.raises(ValueError, match="accumulate="):
        hightide.wrap(*pair, batch, limits=ROOMY, accumulate=accumulate)


def test_a_plan_says_how_many_passes_it_is_for() -> None:
    pair, batch = build("plain")
    plan = plan_for(pair, batch, "mixed", accumulate=2)
    with pytest.raises(ValueError, match="accumulate=3, but the plan was made with accumulate=2"):
        hightide.wrap(*pair, batch, plan=plan, accumulate=3)
    model, _ = hightide.wrap(*pair, batch, plan=plan)
    assert hightide.stats(model).plan.accumulate == 2


class Narrow(nn.Module):
    """bf16 products between fp32 norms: chunks of two dtypes."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.back = nn.Linear(width, 4 * width).to(dtype), nn.Linear(4 * width, width).to(dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(torch.tanh(self.wide(self.norm(x).to(self.dtype)))).float()


class Stack(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Narrow(dtype) for _ in range(4))
        self.others = nn.ModuleList(Narrow(dtype) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = z = x
        for layer in self.layers:
            y = layer(y)
        for layer in self.others:
            z = layer(z)
        return y, z


def stacked(where: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[Pair, Run, Plan]:
    torch.manual_seed(0)
    model = Stack(dtype)
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.05), (torch.randn(4, 32),)
    plan = plan_for((model, optimizer), batch, where, **options)
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=plan)
    run = run_of(model)
    assert run is not None
    return (model, optimizer), run, plan


@pytest.mark.parametrize(("where", "update"), placed("deferred", "in_backward"))
def test_gradients_of_inputs_in_between(where: str, update: str) -> None:
    """An adversarial loop: torch.autograd.grad for the inputs, in a pass of its own, before each backward."""

    def trained(pair: Pair) -> dict[str, Tensor]:
        model, optimizer = pair
        draw = torch.Generator().manual_seed(1)
        for _ in range(2):
            for _ in range(2):
                x = torch.randn(4, 32, generator=draw).requires_grad_(True)
                (gradient,) = torch.autograd.grad(model(x)[0].square().sum(), x)
                y, z = model((x + 0.01 * gradient.sign()).detach())
                ((y.square().mean() + z.square().mean()) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {key: value.clone() for key, value in model.state_dict().items()}

    pair, run, _ = stacked(where, torch.float32, update=update, accumulate=2)
    torch.manual_seed(0)
    model = Stack(torch.float32)
    plain = trained((model, torch.optim.SGD(model.parameters(), lr=0.05)))
    ours = trained(pair)
    assert max(float((ours[key] - value).abs().max()) for key, value in plain.items()) < 1e-6
    assert set(run.performer.updating.num_updates.values()) == {2}


def test_parameters_in_slots_are_not_older_than_their_update() -> None:
    """In backward, after the last pass of a step: a forward before step() is refused, and one after it sees them."""
    pair, run, _ = stacked("sums at home", torch.float32, update="in_backward", accumulate=2)
    model, x = pair[0], torch.randn(4, 32)
    for _ in range(2):
        y, z = model(x)
        (y.square().sum() + z.square().sum()).backward()
    run.executor.wait_for_updates()
    with torch.no_grad(), pytest.raises(hightide.Refused, match="between backward and optimizer"):
        model(x)
    pair[1].step()
    with torch.no_grad():
        now = model(x)[0]
    assert (y.detach() - now).abs().max() > 1e-2
    torch.testing.assert_close(model(x)[0].detach(), now, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("where", ["sums at home", "sums stay"])
def test_what_overflows_is_seen_before_an_early_step(where: str) -> None:
    """Sums in fp32 that fp16 cannot hold: a step would make them infinite, and a scaler must know."""
    pair, _, _ = stacked(where, torch.float16, gradients="param", accumulate=3)
    model, optimizer = pair
    x = torch.randn(4, 32)
    model(x)[0].square().sum().backward()
    halves = [param for param in model.layers.parameters() if param.dtype == torch.float16]  # type: ignore[union-attr]
    scale = 40_000 / max(param.grad.clone().abs().max().item() for param in halves)  # type: ignore[union-attr]
    optimizer.zero_grad()
    for _ in range(2):
        (model(x)[0].square().sum() * scale).backward()
    assert max(param.grad.norm().item() for param in halves) == float("inf")  # type: ignore[union-attr]
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(1))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    scaler.step(optimizer)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "the step is skipped"


def test_a_move_to_another_layout_with_sums_that_are_still_to_be_rounded() -> None:
    pair, run, plan = stacked("sums at home", gradients="param", accumulate=3)
    (model, optimizer), x = pair, torch.randn(4, 32)
    assert plan.profile is not None
    layout = pack(plan.profile, plan.layout.slot_numel // 2, plan.layout.chunks[0].rule_states)
    other = replace(plan, layout=layout)
    slots, grad_slots = Placement(other).widest_tick({call.block for call in plan.profile.calls})
    model(x)[0].square().mean().backward()
    run.move_to(Solution.of(run.profile, replace(other, num_slots=slots + 2, num_grad_slots=grad_slots + 1)))
    model(x)[0].square().mean().backward()
    with pytest.warns(UserWarning, match="step\\(\\) came after 2"):
        optimizer.step()
    run.executor.wait_for_updates()


def test_several_losses_in_a_pass() -> None:
    """Backwards off the plan send no sum home that is to stay: it is rounded once, as everywhere."""
    found = []
    for where in ("sums at home", "sums stay"):
        (model, optimizer), run, _ = stacked(where, gradients="param", accumulate=3)
        draw = torch.Generator().manual_seed(1)
        for _ in range(3):
            y, z = model(torch.randn(4, 32, generator=draw))
            y.square().mean().backward()
            z.square().mean().backward()
        optimizer.step()
        run.executor.wait_for_updates()
        found.append({key: value.clone() for key, value in model.state_dict().items()})
    assert all(torch.equal(found[0][key], value) for key, value in found[1].items())


@pytest.mark.parametrize("num_evaluations", [0, 1])
def test_a_recording_has_all_passes_of_the_last_step(num_evaluations: int) -> None:
    (model, optimizer), _, _ = stacked("mixed", torch.float32, accumulate=3)
    x = torch.randn(4, 32)
    with hightide.record(model) as recording:
        for _ in range(3):
            for number in range(3):
                model(x)[0].square().mean().backward()
                with torch.no_grad():
                    for _ in range(num_evaluations if number < 2 else 0):
                        model(x)
            optimizer.step()
            optimizer.zero_grad()
    bars = [bar for bar in recording.timeline.bars if not bar.earlier]
    assert sum(bar.id == "bwd.0" for bar in bars) == 3 and sum(bar.id == "step" for bar in bars) == 1
    assert sum(bar.id == "fwd.0" for bar in bars) == 3 + 2 * num_evaluations
