"""One test per silent fault that a review found: each either equals plain PyTorch now, or is refused with a reason."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hightide
import models
from each_value import each_value
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.planner.predict.peaks import peaks
from hightide.runtime.chunks.absent import Disabled
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of
from unit.runtime.steps import Twins, adamw, assert_equal_weights, train_step, twins

Edit = Callable[[Plan], Plan]
LIMITS = hightide.Limits(gpu="64MiB", host="64MiB")
LAYER_WEIGHT = "model.layers.1.mlp.up_proj.weight"


def placed(
    params: Tier,
    states: Tier,
    activation: Activation = Activation.RECOMPUTE,
    inputs: Tier = Tier.GPU,
) -> Edit:
    """A plan with every block at the same place."""

    def edit(plan: Plan) -> Plan:
        blocks = [
            replace(block, params=params, states=states, activation=activation, inputs=inputs) if block.name else block
            for block in plan.blocks
        ]
        return replace(plan, blocks=tuple(blocks), num_slots=4, num_grad_slots=4)

    return edit


STREAMED = placed(Tier.HOST, Tier.HOST)
REFRESHED = placed(Tier.GPU, Tier.HOST)  # persistent parameters whose updates run on host
RESIDENT = placed(Tier.GPU, Tier.GPU)
PLANS = pytest.mark.parametrize(
    "edit", [STREAMED, REFRESHED, RESIDENT], ids=["streamed", "host states", "all on the GPU"]
)


def small_llama(**options: Any) -> models.Pair:
    return models.llama(num_layers=2, **options)


def assert_equal_gradients(model: nn.Module, plain: nn.Module) -> None:
    ours = dict(model.named_parameters())
    for name, expected in plain.named_parameters():
        gradient = ours[name].grad
        assert (gradient is None) == (expected.grad is None), name
        if gradient is not None and expected.grad is not None:
            bound = 1e-5 * expected.grad.abs().max().item() + 1e-6
            assert (gradient.clone() - expected.grad).abs().max().item() <= bound, name


def both(pair: Twins) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    return [(pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer)]


# -- optimizers and gradients --------------------------------------------------------------------------------------


def scaled_twins(edit: Edit) -> Twins:
    """With fused AdamW, to which a GradScaler leaves the unscaling."""
    model, batch = small_llama()
    plain = copy.deepcopy(model)
    optimizer = adamw(model, fused=True)
    plan = edit(hightide.plan(model, optimizer, batch, limits=LIMITS, micro_batch=2))
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=plan)
    return Twins(model, optimizer, plain, adamw(plain, fused=True), batch)


def scaled_steps(pair: Twins, unscale: bool = False, **options: Any) -> None:
    for model, optimizer in both(pair):
        scaler = torch.amp.GradScaler("cpu", **options)
        for _ in range(3):
            scaler.scale(models.loss_of(model, pair.batch)).backward()
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@PLANS
@pytest.mark.parametrize("init_scale, unscale", [(1024.0, False), (1024.0, True)], ids=["1024", "unscaled and clipped"])
def test_a_grad_scaler_with_a_fused_optimizer(edit: Edit, init_scale: float, unscale: bool) -> None:
    pair = scaled_twins(edit)
    scaled_steps(pair, unscale, init_scale=init_scale)
    assert_equal_weights(pair.model, pair.plain)
    pair.close()


@PLANS
def test_a_grad_scaler_with_a_fused_optimizer_skips_steps_that_overflow(edit: Edit) -> None:
    pair = scaled_twins(edit)
    scaled_steps(pair, init_scale=2.0**127, backoff_factor=2.0**-117)  # overflow in the first step, 1024 afterwards
    assert all(value.isfinite().all() for value in pair.plain.state_dict().values())
    assert_equal_weights(pair.model, pair.plain)
    pair.close()


BETWEEN: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "nothing": lambda model, optimizer: None,
    "clip": lambda model, optimizer: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer.zero_grad in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
}


@PLANS
@pytest.mark.parametrize("what", list(BETWEEN))
def test_a_change_of_gradients_between_the_backwards_of_two_forwards(edit: Edit, what: str) -> None:
    model, batch = models.hand_written(num_layers=2)
    pair = twins(model, batch, edit=edit)
    for model, optimizer in both(pair):
        first, second = models.loss_of(model, batch), models.loss_of(model, models.vector_batch(7))
        first.backward()
        BETWEEN[what](model, optimizer)
        second.backward()
    assert_equal_gradients(pair.model, pair.plain)
    for _, optimizer in both(pair):
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_weights(pair.model, pair.plain)
    pair.assert_equal(*pair.step())
    pair.close()


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("states", [Tier.HOST, Tier.GPU])
def test_a_backward_after_the_weights_have_changed_is_refused(activation: Activation, states: Tier) -> None:
    model, batch = models.vit()
    pair = twins(model, batch, edit=placed(states, states, activation))
    for model, optimizer in both(pair):
        loss = models.loss_of(model, batch)
        train_step(model, optimizer, models.image_batch(7))
        with pytest.raises(RuntimeError):
            loss.backward()
    pair.close()


def test_only_loose_parameters_are_trainable() -> None:
    for update in ("deferred", "in_backward"):
        torch.manual_seed(0)
        model = WithLooseParameter()
        for name, param in model.named_parameters():
            param.requires_grad_(name == "shift")
        pair = twins(model, models.vector_batch(), update=update)
        for _ in range(3):
            pair.assert_equal(*pair.step(step_on_result))
        assert not torch.equal(pair.plain.shift, WithLooseParameter().shift)
        pair.close()


class WithLooseParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(32))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.out = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = x + self.shift
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.out(x) - labels).square().mean()


def step_on_result(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    """For models that return the loss itself."""
    loss = model(**batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def test_zero_grad_in_place_after_updates_in_backward() -> None:
    model, batch = small_llama()
    pair = twins(model, batch, update="in_backward")

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        loss = models.loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    for _ in range(3):
        pair.assert_equal(*pair.step(step))
    pair.close()


@PLANS
def test_unwrap_after_backward_leaves_real_gradients(edit: Edit) -> None:
    model, batch = small_llama()
    pair = twins(model, batch, edit=edit)
    for model in (pair.model, pair.plain):
        models.loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    model = hightide.unwrap(pair.model)
    assert all(type(param.grad) is torch.Tensor for param in model.parameters())
    assert_equal_gradients(model, pair.plain)
    pair.optimizer = adamw(model)
    for model, optimizer in both(pair):
        models.loss_of(model, batch).backward()  # adds to them
        optimizer.step()
    assert_equal_weights(pair.model, pair.plain)


# -- values that the user writes -----------------------------------------------------------------------------------


def other_values(plain: nn.Module) -> dict[str, torch.Tensor]:
    """Values for a state dict; tied entries stay equal."""
    made: dict[int, torch.Tensor] = {}
    state = plain.state_dict()
    return {name: made.setdefault(value.data_ptr(), value * 0.5 + 0.01) for name, value in state.items()}


@pytest.mark.parametrize(("edit", "tied"), each_value((STREAMED, REFRESHED, RESIDENT), (True, False)))
def test_load_state_dict_on_a_wrapped_model(edit: Edit, tied: bool) -> None:
    model, batch = small_llama(tied=tied)
    pair = twins(model, batch, edit=edit)
    for _ in range(2):  # before any pass, then with updates on their way
        values = other_values(pair.plain)
        for model in (pair.model, pair.plain):
            result = model.load_state_dict(values)
            assert not result.missing_keys and not result.unexpected_keys
        loaded = pair.model.state_dict()
        assert loaded.keys() == values.keys()
        assert all(torch.equal(loaded[name], value) for name, value in values.items())
        for _ in range(2):
            pair.assert_equal(*pair.step())
    pair.close()


@PLANS
def test_load_state_dict_of_a_part_of_a_wrapped_model(edit: Edit) -> None:
    model, batch = small_llama()
    pair = twins(model, batch, edit=edit)
    pair.step()
    values = other_values(pair.plain.model.layers[1])
    for model in (pair.model, pair.plain):
        model.model.layers[1].load_state_dict(values)
    for _ in range(2):
        pair.assert_equal(*pair.step())
    pair.close()


@PLANS
def test_load_state_dict_is_as_strict_as_plain(edit: Edit) -> None:
    model, batch = small_llama()
    pair = twins(model, batch, edit=edit)
    values = other_values(pair.plain)
    missing = {name: value for name, value in values.items() if name != LAYER_WEIGHT}
    wrong = {**values, LAYER_WEIGHT: values[LAYER_WEIGHT][:-1]}
    for state, message in (
        (missing, "Missing key"),
        ({**values, "extra": torch.ones(1)}, "Unexpected"),
        (wrong, "size"),
    ):
        texts = []
        for model in (pair.model, pair.plain):
            with pytest.raises(RuntimeError, match=message) as raised:
                model.load_state_dict(state)
            texts.append(str(raised.value))
        assert texts[0] == texts[1]
    for model in (pair.model, pair.plain):
        assert model.load_state_dict(missing, strict=False).missing_keys == [LAYER_WEIGHT]
    pair.assert_equal(*pair.step())
    pair.close()


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_direct_write_that_the_next_update_would_undo_is_refused(num_steps: int) -> None:
    model, batch = small_llama()
    pair = twins(model, batch, edit=REFRESHED)
    for _ in range(num_steps):
        pair.step()
    with pytest.raises(RuntimeError, match="load_state_dict"), torch.no_grad():
        pair.model.get_parameter(LAYER_WEIGHT).mul_(0.5)
    with torch.no_grad(), Disabled():  # round the refusal
        pair.model.get_parameter(LAYER_WEIGHT).mul_(0.5)
    with pytest.raises(RuntimeError, match="load_state_dict"):
        pair.step()
    pair.close()


def test_a_direct_write_to_a_resident_parameter_counts() -> None:
    model, batch = small_llama()
    pair = twins(model, batch, edit=RESIDENT)
    pair.step()
    for model in (pair.model, pair.plain):
        with torch.no_grad():
            model.get_parameter(LAYER_WEIGHT).mul_(0.5)
    for _ in range(2):
        pair.assert_equal(*pair.step())
    pair.close()


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "unfrozen"])
def test_requires_grad_changed_after_wrap_is_refused(trainable: bool) -> None:
    model, batch = small_llama()
    model.get_parameter(LAYER_WEIGHT).requires_grad_(not trainable)
    pair = twins(model, batch, edit=STREAMED)
    pair.step()
    pair.model.get_parameter(LAYER_WEIGHT).requires_grad_(trainable)
    with pytest.raises(RuntimeError, match=re.escape(LAYER_WEIGHT)):
        models.loss_of(pair.model, batch)
    pair.close()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused(register: str) -> None:
    model, batch = small_llama()
    handle = getattr(model.get_parameter(LAYER_WEIGHT), register)(lambda value: None)
    with pytest.raises(ValueError, match=re.escape(LAYER_WEIGHT)):
        hightide.wrap(model, adamw(model), batch, limits=LIMITS, micro_batch=2)
    handle.remove()
    wrapped, _ = hightide.wrap(model, adamw(model), batch, limits=LIMITS, micro_batch=2)
    hightide.unwrap(wrapped)


# -- blocks with side effects --------------------------------------------------------------------------------------


def test_output_attentions_in_training_is_refused() -> None:
    model, batch = small_llama()
    model.set_attn_implementation("eager")
    pair = twins(model, batch, edit=STREAMED)
    with pytest.raises(ValueError, match="output_attentions"):
        pair.model(**batch, output_attentions=True)
    pair.assert_equal(*pair.step())
    pair.close()


class Odd(nn.Module):
    """A block that changes its input in place, or that leaves a part of the loss on itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.kind = kind
        self.aux: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "in place":
            x.mul_(1.5)
        y = torch.tanh(self.linear(x))
        if self.kind == "aux":
            self.aux = y.square().mean()
        return y


class OddModel(nn.Module):
    def __init__(self, *kinds: str, first_is_trainable: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32).requires_grad_(first_is_trainable)
        self.layers = nn.ModuleList(Odd(kind) for kind in kinds)
        self.out = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x.clone())
        loss = (self.out(x) - labels).square().mean()
        return loss + sum(layer.aux for layer in self.layers if layer.aux is not None)


@pytest.mark.parametrize("needs_grad", [False, True], ids=["input without grad", "input with grad"])
def test_a_block_that_changes_its_input_in_place_is_refused(needs_grad: bool) -> None:
    """Whatever the plan: it could only be recomputed from an input that is no longer there."""
    kinds = ("in place", "in place", "") if needs_grad else ("in place", "", "")
    model = OddModel(*kinds, first_is_trainable=needs_grad)
    reason = "changes an input in place" if needs_grad else "has other gradients when it is recomputed"
    with pytest.raises(ValueError, match=rf"'layers\.0' {reason}"):
        hightide.wrap(model, adamw(model), models.vector_batch(), limits=LIMITS)


@pytest.mark.parametrize("activation", list(Activation))
def test_a_block_that_leaves_a_part_of_the_loss_on_itself(activation: Activation) -> None:
    pair = twins(OddModel("", "aux", ""), models.vector_batch(), edit=placed(Tier.HOST, Tier.HOST, activation))
    for _ in range(3):
        pair.assert_equal(*pair.step(step_on_result))
    pair.close()


class LateLayer(nn.Module):
    """Its last layer is used only once `late` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.out = nn.Linear(32, 8)
        self.late = False

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: 4 if self.late else 3]:
            x = torch.tanh(layer(x))
        return (self.out(x) - labels).square().mean()


@pytest.mark.parametrize("others", [Tier.HOST, Tier.GPU])
def test_a_persistent_block_that_the_example_did_not_call_waits_for_its_update_on_host(
    others: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(plan: Plan) -> Plan:
        blocks = [
            replace(block, params=Tier.GPU, states=Tier.HOST if block.name == "layers.3" else others)
            for block in plan.blocks
        ]
        return replace(plan, blocks=tuple(blocks), num_grad_slots=4)

    pair = twins(LateLayer(), models.vector_batch(), edit=edit)
    update = pair.run.performer.updating.update
    (late,) = [block.index for block in pair.run.profile.blocks if block.name == "layers.3"]

    def slow(chunk: int, *rest: Any) -> Callable[[], object]:
        work = update(chunk, *rest)

        def working() -> None:
            time.sleep(0.1)
            work()

        return working if chunk in pair.run.chunks.by_block[late] else work

    monkeypatch.setattr(pair.run.performer.updating, "update", slow)
    pair.model.late = pair.plain.late = True
    losses = [pair.step(step_on_result) for _ in range(3)]  # no look at weights between steps: it waits for updates
    for loss, expected in losses:
        assert abs(loss.item() - expected.item()) <= 1e-6 * abs(expected.item())
    assert_equal_weights(pair.model, pair.plain)
    pair.close()


# -- memory --------------------------------------------------------------------------------------------------------


def host_peak_bytes(run: Run) -> int:
    return max(peaks(program.schedule).host_peak_bytes for program in run.executor.programs.values())


def test_inputs_of_many_lengths_on_host_stay_within_the_forecast() -> None:
    model, batch = small_llama()
    pair = twins(model, batch, edit=placed(Tier.HOST, Tier.HOST, inputs=Tier.HOST))
    limit_bytes = host_peak_bytes(pair.run)
    for num_tokens in (*range(2, 11), *range(10, 1, -1)):
        cut = {name: value[:, :num_tokens] for name, value in batch.items()}
        pair.assert_equal(*pair.step(batch=cut))
        assert pair.run.host.used_bytes <= limit_bytes, num_tokens
    assert pair.run.host.peak_bytes <= limit_bytes
    pair.close()


@PLANS
@pytest.mark.parametrize(("frozen", "dtype"), each_value((False, True), (torch.float32, torch.bfloat16)))
def test_the_host_holds_no_more_than_forecast(edit: Edit, frozen: bool, dtype: torch.dtype) -> None:
    model, batch = small_llama()
    model = model.to(dtype)
    model.model.layers.requires_grad_(not frozen)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    plan = edit(hightide.plan(model, optimizer, batch, limits=LIMITS, micro_batch=2))
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=plan)
    run = run_of(model)
    assert run is not None
    assert run.host.used_bytes <= host_peak_bytes(run)
    train_step(model, optimizer, batch)
    run.executor.wait_for_updates()
    assert run.host.peak_bytes <= host_peak_bytes(run)
    hightide.unwrap(model)


def test_the_scratch_of_scaled_updates_counts_on_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = small_llama()
    pair = twins(model, batch, edit=RESIDENT)
    models.loss_of(pair.model, batch).backward()
    torch.nn.utils.clip_grad_norm_(pair.model.parameters(), 0.01)
    before_bytes = pair.run.gpu.used_bytes
    pair.run.gpu.reset_peak()
    pair.optimizer.step()
    pair.run.executor.wait_for_updates()
    largest = max(param.numel() for param in pair.model.parameters())  # a range is at least one parameter
    assert pair.run.gpu.peak_bytes >= before_bytes + largest * 4
    pair.close()


@pytest.mark.filterwarnings("ignore:block .* runs the whole batch at once")
def test_a_block_first_called_without_the_root_is_split_once_the_root_calls_it() -> None:
    model, batch = small_llama(padded=True)
    pair = twins(model, batch, edit=STREAMED)
    ids = batch["input_ids"]
    pair.model.model(input_ids=ids).last_hidden_state.sum().backward()  # no mask: no call of the example is like it
    pair.optimizer.zero_grad()
    pair.assert_equal(*pair.step(batch={"input_ids": ids, "labels": batch["labels"]}))
    splits = pair.run.splits.known
    assert splits
    names = [block.name for block in pair.run.profile.blocks]
    assert {names[block] for (block, _), split in splits.items() if not split.splittable} == {"model.embed_tokens"}
    pair.close()
