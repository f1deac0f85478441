"""Embeddings that are looked up on the host: equal to plain PyTorch, and the same bits as on the GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import race_detector
import torch
import torch.nn.functional as F
from harness import EPS, assert_close_weights
from test_slow_lanes import slow_down
from torch import Tensor, nn

import hightide
import models
from each_value import each_value
from hightide.ir.action import Mode
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane, Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.placement import Placement
from hightide.planner.solution import Solution
from hightide.planner.verify.compare_records import compare
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of

G, H = Tier.GPU, Tier.HOST
ROOMY = hightide.Limits(gpu="16MiB", host="64MiB")
VOCABULARY, WIDTH, NUM_SAMPLES, LENGTH = 40, 16, 4, 9
BF16 = torch.bfloat16


class Words(nn.Module):
    """Many ids come twice or more, some are padding."""

    def __init__(self, padding: int | None = None, frozen: bool = False, calls: int = 1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.calls = calls
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        self.embed.weight.requires_grad_(not frozen)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH)) for _ in "ab")
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def rows(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for shift in range(1, self.calls):
            hidden = hidden + (0.5 + shift) * self.embed(ids.roll(shift, dims=1))  # other gradients in each call
        return hidden

    def after(self, hidden: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten())

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.after(self.rows(ids), labels)}


def batch_of(seed: int, num_samples: int = NUM_SAMPLES, length: int = LENGTH) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 12, (num_samples, length), generator=draw)
    return {"ids": ids, "labels": torch.randint(0, VOCABULARY, (num_samples, length), generator=draw)}


def optimizer_of(parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW([param for param in parameters if param.requires_grad], lr=3e-3, eps=EPS)


def placed(plan: Plan, compute: Tier = H, params: Tier = H, states: Tier = H, name: str = "embed") -> Plan:
    """Everything but the embedding streams, or all is there; it is looked up on the host, or is as the others."""
    kinds: dict[str, Any] = {"activation": Activation.RECOMPUTE, "inputs": G, "held": G, "sums": H}
    tables = {"params": H, "states": H, "compute": H} if compute is H else {}
    everywhere = {"params": params, "states": states, **kinds}
    blocks = tuple(
        replace(block, **{**everywhere, **(tables if block.name.endswith(name) else {})}) if block.name else block
        for block in plan.blocks
    )
    plan = replace(plan, blocks=blocks, loss_kept_tokens=0)
    assert plan.profile is not None
    slots, grad_slots = Placement(plan).widest_tick({call.block for call in plan.profile.calls})
    return replace(plan, num_slots=slots + (slots > 0), num_grad_slots=grad_slots + (grad_slots > 0))


def wrapped(
    model: nn.Module, edit: Callable[[Plan], Plan] = placed, micro_batch: int = 2, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Run]:
    optimizer, batch = optimizer_of(model.parameters()), batch_of(0)
    plan = hightide.plan(model, optimizer, batch, limits=ROOMY, micro_batch=micro_batch, **options)
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=edit(plan), update=options.get("update", "deferred"))
    run = run_of(model)
    assert run is not None
    return model, optimizer, run


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_steps: int = 5,
    accumulate: int = 1,
    clip: bool = False,
) -> tuple[list[float], dict[str, Tensor]]:
    seen = []
    for step in range(num_steps):
        for part in range(accumulate):
            loss = model(**batch_of(100 * step + part))["loss"] / accumulate
            loss.backward()
            seen.append(loss.item())
        if clip:
            seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
        optimizer.zero_grad()
    return seen, {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(found: tuple[list[float], dict[str, Tensor]], plain: tuple[list[float], dict[str, Tensor]]) -> None:
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(plain[0]), rtol=2e-6, atol=0)
    assert_close_weights(plain[1], found[1])


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # model, plan, loop
    "plain": ({}, {}, {}),
    "clipped": ({}, {}, {"clip": True, "num_steps": 20}),
    "in backward": ({}, {"update": "in_backward"}, {}),
    "padding": ({"padding": 3}, {}, {"clip": True}),
    "frozen": ({"frozen": True}, {}, {"clip": True}),
    "three backwards": ({}, {}, {"accumulate": 3, "clip": True}),
    "three planned": ({}, {"accumulate": 3}, {"accumulate": 3, "clip": True}),
    "three planned, in backward": ({}, {"accumulate": 3, "update": "in_backward"}, {"accumulate": 3}),
    "two calls": ({"calls": 2, "padding": 0}, {}, {"clip": True}),
    "two calls, planned twice, in backward": (
        {"calls": 2},
        {"accumulate": 2, "update": "in_backward"},
        {"accumulate": 2},
    ),
}


MORE = ("plain", "three planned", "two calls")  # of which each feature is in another case too


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.long if case in MORE else ()) for case in CASES])
def test_equal_to_plain_pytorch_and_to_the_bit_to_other_plans(case: str) -> None:
    model, plan, loop = CASES[case]
    plain = Words(**model)
    expected = train(plain, optimizer_of(plain.parameters()), **loop)
    results = {}
    for compute, params, states in ((H, H, H), (H, G, G), (G, H, H)):
        other, optimizer, run = wrapped(
            Words(**model), lambda p, c=compute, q=params, s=states: placed(p, c, q, s), **plan
        )
        results[compute, params, states] = found = train(other, optimizer, **loop)
        assert_equal(found, expected)
        stats = hightide.stats(other)
        assert stats.deviations == 0
        assert bool(run.chunks.tables) == (compute is H)
        assert stats.peak_bytes["gpu"] <= stats.forecast.gpu_peak_bytes
        assert stats.peak_bytes["host"] <= stats.forecast.host_peak_bytes
        hightide.unwrap(other)
        assert_close_weights(found[1], dict(other.state_dict()))
    first = results[G, H, H]
    for places, found in results.items():
        assert found[0] == first[0], places
        assert all(torch.equal(value, first[1][name]) for name, value in found[1].items()), places


class InBf16:
    """Plain PyTorch in bf16 with fp32 masters, and with fp32 sums of the rows' gradients."""

    def __init__(self, model: Words, rounds: bool) -> None:
        self.model, self.rounds = model, rounds
        self.masters = {name: nn.Parameter(param.detach().float()) for name, param in model.named_parameters()}
        self.optimizer = optimizer_of(self.masters.values())

    def step(self, batches: list[dict[str, Tensor]], clip: bool) -> list[float]:
        seen = []
        for batch in batches:
            hidden = self.model.embed(batch["ids"]).detach().requires_grad_()
            loss = self.model.after(hidden, batch["labels"]) / len(batches)
            params = {name: param for name, param in self.model.named_parameters() if name != "embed.weight"}
            grads = dict(zip(params, torch.autograd.grad(loss, [*params.values(), hidden]), strict=False))
            table = torch.zeros(VOCABULARY, WIDTH)
            rows = torch.autograd.grad(self.model.after(hidden, batch["labels"]) / len(batches), [hidden])[0]
            table.index_add_(0, batch["ids"].flatten(), rows.flatten(0, 1).float())
            for name, grad in {**grads, "embed.weight": table}.items():
                master = self.masters[name]
                master.grad = grad.float() if master.grad is None else master.grad + grad.float()
            seen.append(loss.item())
        if clip:
            seen.append(float(torch.nn.utils.get_total_norm([m.grad for m in self.masters.values()])))
        scale = min(1.0, 0.3 / (seen[-1] + 1e-6)) if clip else 1.0
        for master in self.masters.values():
            grad = master.grad.to(BF16).float() if self.rounds else master.grad
            master.grad = grad * scale
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(self.masters[name])
        return seen


@pytest.mark.parametrize("gradients", ["float32", "param"])
@pytest.mark.parametrize(("accumulate", "clip"), [(1, True), (3, False)])
def test_bf16_with_masters_sums_rows_in_fp32_and_rounds_once(gradients: str, accumulate: int, clip: bool) -> None:
    reference = InBf16(Words().to(BF16), gradients == "param")
    options = {"gradients": gradients, "accumulate": accumulate}
    model, optimizer, run = wrapped(Words().to(BF16), micro_batch=NUM_SAMPLES, **options)
    expected = []
    for step in range(6):
        expected += reference.step([batch_of(100 * step + part) for part in range(accumulate)], clip)
    found, _ = train(model, optimizer, 6, accumulate, clip)
    home = run.chunks.grad(run.chunks.places["embed.weight"][0])
    summed = home.view.clone()
    assert summed.any() and torch.equal(summed.to(BF16).to(summed.dtype), summed) == (gradients == "param")
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-3, atol=0)
    master = run.chunks.master_of("embed.weight")
    assert master is not None
    difference = (master - reference.masters["embed.weight"]).abs()
    assert difference.max() <= 2e-3 and difference.mean() <= 1e-5, (difference.max(), difference.mean())
    assert home.dtype == (BF16 if gradients == "param" and accumulate == 1 else torch.float32)


# -- the schedule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
@pytest.mark.parametrize("calls", [1, 2])
def test_executed_equals_scheduled(update: str, calls: int) -> None:
    model, optimizer, run = wrapped(Words(calls=calls), update=update)
    train(model, optimizer, 3)
    run.executor.wait_for_updates()
    schedule = run.executor.programs[Mode.TRAIN].schedule
    for back in range(3):
        assert compare(schedule, run.lanes.records_of(run.lanes.pass_index - back)) == []
    looked_up = [action.id for action in schedule.lane(Lane.H2D) if action.op == "look_up"]
    assert looked_up == [f"look_up.{call}" for call in range(calls)]
    chunk = run.chunks.places["embed.weight"][0]
    assert not [action for action in schedule.actions if action.chunk == chunk and action.op in ("fetch", "clear")]
    with torch.no_grad():
        model(**batch_of(1, num_samples=2))
    evaluated = run.executor.programs[Mode.EVAL].schedule
    assert compare(evaluated, run.lanes.records_of(run.lanes.pass_index)) == []


def test_each_pass_of_a_step_follows_its_schedule() -> None:
    model, optimizer, run = wrapped(Words(), accumulate=3)
    train(model, optimizer, 2, accumulate=3)
    run.executor.wait_for_updates()
    for back, mode in enumerate((Mode.LAST, Mode.MIDDLE, Mode.FIRST)):
        records = run.lanes.records_of(run.lanes.pass_index - back)
        lines = compare(run.executor.programs[mode].schedule, records)
        assert [line for line in lines if "compute: step" not in line] == [], mode


@pytest.mark.parametrize("frozen", [False, True])
def test_what_the_plan_sets_aside_is_what_is_taken(frozen: bool) -> None:
    _, _, run = wrapped(Words(frozen=frozen))
    schedule = run.executor.programs[Mode.TRAIN].schedule
    assert run.gpu.used_bytes + run.profile.batch_bytes == schedule.gpu_base_bytes
    assert run.host.used_bytes == schedule.host_base_bytes
    rows = -(-NUM_SAMPLES * LENGTH * WIDTH * 4 // 512) * 512
    assert run.host.breakdown()["embedding rows"] == (rows if frozen else 2 * rows)
    assert run.gpu.breakdown().get("embedding rows", 0) == (0 if frozen else rows)


def test_only_rows_cross_the_link() -> None:
    moved = {}
    for compute in (H, G):
        model, optimizer, _ = wrapped(Words(), lambda plan, c=compute: placed(plan, c))
        train(model, optimizer, 1)
        before = hightide.stats(model).moved_bytes.copy()
        train(model, optimizer, 1)
        hightide.stats(model)
        run_of(model).executor.wait_for_updates()  # type: ignore[union-attr]
        after = hightide.stats(model).moved_bytes
        moved[compute] = {lane: after[lane] - before[lane] for lane in after}
    rows, table = NUM_SAMPLES * LENGTH * WIDTH * 4, VOCABULARY * WIDTH * 4
    assert moved[G]["d2h"] - moved[H]["d2h"] == table - rows
    assert moved[G]["h2d"] - moved[H]["h2d"] in (table - rows, 2 * table - rows)


@pytest.mark.filterwarnings("ignore:block .* was called in an order")
@pytest.mark.parametrize(
    "case",
    [
        *("three backwards", "in backward", "off the plan"),
        *(pytest.param(case, marks=pytest.mark.long) for case in ("plain", "three planned")),
    ],
)
def test_a_slow_lane_changes_nothing(case: str) -> None:
    options, plan, loop = CASES.get(case, ({}, {}, {"accumulate": 2}))
    results = []
    for lane in (None, Lane.H2D, Lane.D2H, Lane.CPU):
        with pytest.MonkeyPatch.context() as patch:
            delayed = slow_down(patch, lane) if lane is not None else ["nothing"]
            model, optimizer, _ = wrapped(Words(**options), **plan)
            model.calls = 4 if case == "off the plan" else 1  # type: ignore[assignment]
            results.append(train(model, optimizer, 3, **loop))
        assert delayed
    for losses, weights in results[1:]:
        assert losses == results[0][0]
        assert all(torch.equal(value, results[0][1][name]) for name, value in weights.items())


@pytest.mark.filterwarnings("ignore:block .* was called in an order")
@pytest.mark.parametrize(
    ("passes", "update"), each_value(((1, 1), (2, 1), (1, 3), (2, 2)), ("deferred", "in_backward"))
)
def test_no_stream_overtakes_another(passes: tuple[int, int], update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, accumulate = passes
    detector = race_detector.install(monkeypatch)
    model, optimizer, run = wrapped(Words(calls=calls), update=update, accumulate=accumulate)
    for step in range(6):
        model.calls = calls + (step % 3 == 2)  # type: ignore[assignment]  # off the plan
        for part in range(accumulate):
            backward(model, part)
        if update == "in_backward":  # the weights are the next ones by now
            optimizer.step()
        with torch.no_grad():
            model(**batch_of(7, num_samples=9))
        if update == "deferred":
            optimizer.step()
        optimizer.zero_grad()
    run.executor.wait_for_updates()
    hightide.unwrap(model)
    assert min(detector.num_uses[kind] for kind in ("rows", "made rows", "arrived rows", "home of gradient")) > 10
    assert not detector.races, "\n".join(sorted(set(detector.races)))


# -- what loops do ----------------------------------------------------------------------------------------------------


def pairs(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer, Run]:
    plain = Words(**options)
    model, optimizer, run = wrapped(Words(**options))
    return model, optimizer, plain, optimizer_of(plain.parameters()), run


def both(act: Callable[[nn.Module, torch.optim.Optimizer], Any], num_steps: int = 4, **options: Any) -> None:
    """The same loop on the wrapped model and on the plain one."""
    model, optimizer, plain, plain_optimizer, _ = pairs(**options)
    for step in range(num_steps):
        seen = []
        for one, its_optimizer in ((model, optimizer), (plain, plain_optimizer)):
            torch.manual_seed(step)
            seen.append(act(one, its_optimizer))
        torch.testing.assert_close(*seen, rtol=2e-6, atol=1e-7)
    assert_close_weights(dict(plain.state_dict()), dict(model.state_dict()))


def backward(model: nn.Module, seed: int = 0, **sizes: int) -> Tensor:
    loss: Tensor = model(**batch_of(seed, **sizes))["loss"]
    loss.backward()
    return loss.detach()


def reads(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    backward(model)
    grad = model.embed.weight.grad.clone()
    optimizer.step()
    optimizer.zero_grad()
    return grad


def replaces(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    backward(model)
    model.embed.weight.grad = model.embed.weight.grad.clone() + 0.01  # rows that nobody has looked up, too
    backward(model, 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def scales(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    backward(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    backward(model, 1)
    model.embed.weight.grad.mul_(0.5)
    optimizer.step()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.zero_grad(set_to_none=False)
    return norm


def keeps_zeros(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad(set_to_none=False)
    loss = backward(model, 2)
    optimizer.step()
    return loss


def drops(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    model(**batch_of(5))  # a forward that nobody follows
    loss = model(**batch_of(6))["loss"]
    with torch.no_grad():
        model(**batch_of(7, num_samples=9, length=23))  # more rows than the plan has a buffer for
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def grows(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    """Longer sequences than the example's, in training: rows that a plan by hand has no place for are refused."""
    if run_of(model) is not None:
        with pytest.raises(hightide.Refused, match="the plan does not hold it"):
            backward(model, 3, length=2 * LENGTH + 1)
    loss = backward(model, 3)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def fails(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    """Ids out of range: as plain PyTorch, and the loop goes on."""
    batch = batch_of(4)
    batch["ids"] = batch["ids"].clone()
    batch["ids"][0, 0] = VOCABULARY
    with pytest.raises(IndexError, match="out of range"):
        model(**batch)
    loss = backward(model, 4)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def skips(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    """Without the embedding: its parameter has no gradient, and is not updated."""
    batch = batch_of(8)
    loss = model.after(torch.ones(NUM_SAMPLES, LENGTH, WIDTH), batch["labels"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return backward(model, 8)


def calls_more(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    """Off the plan: one call was foreseen."""
    model.calls = 3
    loss = backward(model, 9)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.filterwarnings("ignore:block .* was called in an order")
@pytest.mark.parametrize(
    "act", [reads, replaces, scales, keeps_zeros, drops, grows, fails, skips, calls_more], ids=lambda act: act.__name__
)
def test_whatever_a_loop_does_has_its_plain_effect(act: Any) -> None:
    both(act)


def test_generation_and_evaluation_look_up_what_was_trained() -> None:
    model, batch = models.llama(tied=False, num_layers=2)
    plain = copy.deepcopy(model)
    optimizer, plain_optimizer = optimizer_of(model.parameters()), optimizer_of(plain.parameters())
    plan = placed(hightide.plan(model, optimizer, batch, limits=ROOMY, micro_batch=2), name="embed_tokens")
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=plan)
    assert run_of(model).chunks.tables  # type: ignore[union-attr]
    for one, its_optimizer in ((model, optimizer), (plain, plain_optimizer)):
        for _ in range(3):
            models.loss_of(one, batch).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    prompt = batch["input_ids"][:2, :5]
    found, expected = (one.eval().generate(prompt, max_new_tokens=6, do_sample=False) for one in (model, plain))
    assert torch.equal(found, expected)
    with torch.inference_mode():
        torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)
    assert_close_weights(dict(plain.state_dict()), dict(model.state_dict()))


def test_evaluation_follows_weights_that_are_exchanged() -> None:
    """As in plain PyTorch: functional_call, and averaged weights that are put in their place."""
    plain, other = Words(), torch.randn(VOCABULARY, WIDTH)
    model, _, _ = wrapped(copy.deepcopy(plain))
    for one in (plain, model):
        one.eval()
    with torch.no_grad():
        losses = [
            torch.func.functional_call(one, {"embed.weight": other}, kwargs=batch_of(1))["loss"].item()
            for one in (plain, model)
        ]
        own = [one(**batch_of(1))["loss"].item() for one in (plain, model)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and own[0] == pytest.approx(own[1], rel=1e-6)
    assert abs(own[0] - losses[0]) > 1e-3
    hightide.unwrap(model)


class Changing(Words):
    """Changes what was looked up in place."""

    def rows(self, ids: Tensor) -> Tensor:
        rows = super().rows(ids)
        rows.mul_(1.5)
        rows[:, 0] = 0.25
        return F.relu(rows, inplace=True)


def test_what_was_looked_up_may_be_changed_in_place() -> None:
    plain = Changing()
    model, optimizer, _ = wrapped(copy.deepcopy(plain))
    found, expected = train(model, optimizer, 4), train(plain, optimizer_of(plain.parameters()), 4)
    assert_equal(found, expected)
    hightide.unwrap(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_is_no_business_of_sums(dtype: torch.dtype) -> None:
    plain = Words()
    model, optimizer, _ = wrapped(copy.deepcopy(plain))
    expected = train(plain, optimizer_of(plain.parameters()), 3, clip=True)
    torch.set_default_dtype(dtype)
    try:
        found = train(model, optimizer, 3, clip=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal(found, expected)
    hightide.unwrap(model)


def test_a_second_backward_is_refused() -> None:
    model, _, _ = wrapped(Words())
    total = model.embed(batch_of(0)["ids"]).sum()  # type: ignore[operator]
    total.backward(retain_graph=True)
    with pytest.raises(hightide.Refused):
        total.backward()


def test_a_run_moves_between_plans_with_gradients_under_way() -> None:
    """To the bit as if it had never moved."""
    results = []
    for moves in (False, True):
        model, optimizer, run = wrapped(Words())
        there = Solution.of(run.profile, placed(run.plan, compute=G))
        back = Solution.of(run.profile, run.plan)
        for step in range(4):
            backward(model, step)
            if moves:
                run.move_to(there if step % 2 == 0 else back)
            backward(model, 10 + step)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        results.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(value, results[0][name]) for name, value in results[1].items())


def test_states_are_saved_and_loaded() -> None:
    model, optimizer, _ = wrapped(Words())
    train(model, optimizer, 3)
    saved = model.state_dict(), copy.deepcopy(optimizer.state_dict())
    expected = train(model, optimizer, 2)
    again, its_optimizer, _ = wrapped(Words())
    again.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    found = train(again, its_optimizer, 2)
    assert found[0] == expected[0]
    assert all(torch.equal(value, expected[1][name]) for name, value in found[1].items())


def test_wrap_finds_it_by_itself_where_nothing_else_fits() -> None:
    """A table as large as the GPU."""

    def wide() -> Words:
        model = Words()
        model.embed = nn.Embedding(30_000, WIDTH)
        return model

    model, plain = wide(), wide()
    plain.load_state_dict(model.state_dict())
    optimizer, limits = optimizer_of(model.parameters()), hightide.Limits(gpu=30_000 * WIDTH * 4, host="64MiB")
    model, optimizer = hightide.wrap(model, optimizer, batch_of(0), limits=limits)
    run = run_of(model)
    assert run is not None and [table.key for table in run.chunks.tables.values()] == ["embed.weight"]
    assert_equal(train(model, optimizer, 8, clip=True), train(plain, optimizer_of(plain.parameters()), 8, clip=True))
    with hightide.record(model):
        train(model, optimizer, 2)
    assert hightide.stats(model).deviations == 0


def test_a_grad_scaler_sees_an_overflow_of_rows() -> None:
    model, optimizer, _ = wrapped(Words().half(), gradients="param")
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scales = []
    for step in range(4):
        before = model.state_dict()["embed.weight"]
        loss = model(**batch_of(step))["loss"] * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        assert torch.equal(before, model.state_dict()["embed.weight"]) == (step == 2)
    assert scales == [256.0, 256.0, 128.0, 128.0]


# -- what is refused --------------------------------------------------------------------------------------------------


class Odd(Words):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, **options)


class Tied(Words):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Scaled(Words):
    class Rows(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    def __init__(self) -> None:
        super().__init__()
        self.embed = self.Rows(VOCABULARY, WIDTH)


def hooked() -> Words:
    model = Words()
    model.embed.register_forward_hook(lambda _, args, output: None)
    return model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: Odd(scale_grad_by_freq=True), "more than an nn.Embedding"),
        (Scaled, "more than an nn.Embedding"),
        (hooked, "more than an nn.Embedding"),
        (Tied, "it is tied"),
    ],
    ids=["by frequency", "subclass", "hooked", "tied"],
)
def test_other_embeddings_are_refused_by_the_plan(build: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(InfeasiblePlan, match=reason):
        wrapped(build())


@pytest.mark.parametrize("edit", [{"params": G, "states": H}, {"sums": G}, {"compute": Tier.DISK}])
def test_a_table_on_the_host_lives_there(edit: dict[str, Tier]) -> None:
    def changed(plan: Plan) -> Plan:
        plan = placed(plan)
        return replace(plan, blocks=tuple(replace(b, **edit) if b.name == "embed" else b for b in plan.blocks))

    with pytest.raises(InfeasiblePlan, match="plan of block 'embed' has compute on"):
        wrapped(Words(), changed)


def test_other_blocks_are_refused() -> None:
    with pytest.raises(InfeasiblePlan, match=r"more than an nn.Embedding"):
        wrapped(Words(), lambda plan: placed(plan, name="head"))


def test_an_embedding_that_is_changed_afterwards_is_refused() -> None:
    model, _, _ = wrapped(Words())
    model.embed.max_norm = 1.0  # type: ignore[union-attr]
    with pytest.raises(hightide.Refused, match="max_norm"):
        model(**batch_of(0))


def test_a_plan_says_it_and_survives_its_file(tmp_path: Any) -> None:
    _, _, run = wrapped(Words())
    run.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").decisions == run.plan.decisions
    assert "embed: looked up on the host" in run.plan.explain()
