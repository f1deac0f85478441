"""What real loops do to an optimizer beside stepping it: states cleared and written, parameters moved between groups or
taken out of them, hooks, restarts. Each has the effect that it has in plain PyTorch, or is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hightide
import models
from hightide.ir.activation import Activation
from hightide.ir.plan import BlockPlan, Plan
from hightide.ir.refusal import Refused
from hightide.ir.tier import Tier
from hightide.planner.placement import Placement
from hightide.profiler.model.model_profile import profile_model
from hightide.runtime.surgery import run_of

LIMITS = hightide.Limits(gpu="16MiB", host="64MiB")
NUM_STEPS, CHANGE_AFTER = 4, 2
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-4),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, dampening=0.1),
}
PLACES = {"streamed": Tier.HOST, "resident": Tier.GPU}
SETTINGS = [
    ("adamw", "streamed", "deferred"),
    ("sgd", "resident", "deferred"),
    ("adamw", "resident", "in_backward"),
    ("sgd", "streamed", "in_backward"),
]
every = pytest.mark.parametrize(("kind", "place", "update"), SETTINGS, ids=[" ".join(one) for one in SETTINGS])
DEFERRED = SETTINGS[:2]
deferred = pytest.mark.parametrize(("kind", "place", "update"), DEFERRED, ids=[" ".join(one) for one in DEFERRED])


@dataclass
class Side:
    """A model with its optimizer, plain or wrapped; a change does the same to both."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    original: torch.optim.Optimizer  # as before wrapping
    params: dict[str, Tensor]  # of the optimizer
    kept: dict[str, Any] = field(default_factory=dict)  # whatever a change wants to remember

    @property
    def moments(self) -> list[str]:
        return ["momentum_buffer"] if isinstance(self.optimizer, torch.optim.SGD) else ["exp_avg", "exp_avg_sq"]

    def of(self, part: str) -> list[Tensor]:
        found = [param for name, param in self.params.items() if part in name]
        assert found
        return found

    def backward(self, batch: Any) -> Tensor:
        loss = models.loss_of(self.model, batch)
        loss.backward()
        return loss.detach()


def groups_of(params: dict[str, Tensor]) -> list[dict[str, Any]]:
    matrices = [param for param in params.values() if param.dim() > 1]
    vectors = [param for param in params.values() if param.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3, "weight_decay": 0.0}]


def plain_side(kind: str, dtype: torch.dtype = torch.float32) -> Side:
    model, _ = models.hand_written(num_layers=2)
    model = model.to(dtype)
    model.scale.requires_grad_(dtype is torch.float32)  # loose: torch's own gradient, in bf16
    params: dict[str, Tensor] = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = OPTIMIZERS[kind](groups_of(params))
    return Side(model, optimizer, optimizer, params)


@cache
def plan_for(kind: str, place: str, update: str, dtype: torch.dtype) -> Plan:
    side, batch = plain_side(kind, dtype), batches(1, dtype)[0]
    micro_batch = 3 if dtype is torch.float32 else 6  # of one micro-batch gradients are torch's to the bit
    plan = hightide.plan(side.model, side.optimizer, batch, limits=LIMITS, micro_batch=micro_batch, update=update)
    profile, _ = profile_model(side.model, side.optimizer, batch)
    blocks = [
        block if spec.loose else BlockPlan(spec.name, PLACES[place], PLACES[place], Activation.RECOMPUTE, Tier.GPU)
        for spec, block in zip(profile.blocks, plan.blocks, strict=True)
    ]
    plan = replace(plan, blocks=tuple(blocks))
    slots, grad_slots = Placement(plan).widest_tick({call.block for call in profile.calls})
    return replace(plan, num_slots=slots + 1 if slots else 0, num_grad_slots=grad_slots + 1 if grad_slots else 0)


def wrapped_side(kind: str, place: str, update: str, dtype: torch.dtype = torch.float32) -> Side:
    side = plain_side(kind, dtype)
    plan = plan_for(kind, place, update, dtype)
    side.model, side.optimizer = hightide.wrap(side.model, side.optimizer, batches(1, dtype)[0], plan=plan)
    return side


once = cache(wrapped_side)


def like_new(kind: str, place: str, update: str) -> Side:
    """Wrapped once for all tests, and taken back to the beginning for each: wrapping takes longer than training."""
    side, fresh = once(kind, place, update), plain_side(kind)
    side.kept.clear()
    side.model.zero_grad()
    side.model.load_state_dict(fresh.model.state_dict())
    side.optimizer.defaults.update(fresh.optimizer.defaults)
    fresh_groups = fresh.optimizer.state_dict()["param_groups"]
    side.optimizer.param_groups = [
        {**fresh, **group} for fresh, group in zip(fresh_groups, groups_of(side.params), strict=True)
    ]
    side.optimizer.state.clear()
    return side


def batches(num: int, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    return [{key: value.to(dtype) for key, value in models.vector_batch(10 + step).items()} for step in range(num)]


def states(side: Side) -> dict[str, dict[str, Tensor]]:
    """What is in `optimizer.state`, in its order."""
    names = {id(param): name for name, param in side.params.items()}
    return {
        names[id(param)]: {name: torch.as_tensor(value).clone() for name, value in state.items()}
        for param, state in side.optimizer.state.items()
        if state  # reading an absent one leaves an empty one behind in a defaultdict
    }


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape, what
    error, bound = float((found - expected).abs().max()), 1e-5 * float(expected.abs().max()) + 1e-6
    assert error <= bound, f"{what}: off by {error:.3g}, allowed {bound:.3g}"  # a NaN fails too


def assert_same(ours: Side, plain: Side) -> None:
    found, expected = ours.model.state_dict(), plain.model.state_dict()
    for name, value in expected.items():
        assert_close(found[name], value, name)
    assert_same_states(states(ours), states(plain))


def assert_same_states(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    assert sorted(found) == sorted(expected)
    for name, state in expected.items():
        assert list(found[name]) == list(state)
        for moment, value in state.items():
            assert_close(found[name][moment], value, f"{moment} of {name}")


# -- changes between two steps -----------------------------------------------------------------------------------


def restart_by_clearing(side: Side) -> None:
    side.optimizer.state.clear()
    assert len(side.optimizer.state) == 0


def restart_by_a_fresh_dict(side: Side) -> None:
    side.optimizer.state = defaultdict(dict)


def restart_by_setstate(side: Side) -> None:
    side.optimizer.__setstate__({"state": defaultdict(dict), "param_groups": side.optimizer.param_groups})


def relora_forgets_some(side: Side) -> None:
    for number, param in enumerate(side.of("layers.1")):
        if number % 3 == 0:
            del side.optimizer.state[param]
        elif number % 3 == 1:
            assert side.moments[0] in side.optimizer.state.pop(param)
        else:
            side.optimizer.state[param] = {}
        assert not side.optimizer.state.get(param)


def relora_prunes_moments(side: Side) -> None:
    for number, param in enumerate(side.of("layers")):
        moment = side.optimizer.state[param][side.moments[0]]
        moment.mul_(torch.rand(moment.shape, generator=torch.Generator().manual_seed(number)) > 0.9)


def moments_are_damped(side: Side) -> None:
    for state in side.optimizer.state.values():
        state[side.moments[0]] *= 0.3
        state[side.moments[-1]].add_(0.01)


def moments_are_assigned(side: Side) -> None:
    for state in side.optimizer.state.values():
        state[side.moments[0]] = torch.full_like(state[side.moments[0]], 1e-3)
        for name, value in state.items():  # as code does that moves states to another device
            if torch.is_tensor(value):
                state[name] = value.clone()


def counts_are_written(side: Side) -> None:
    if "momentum_buffer" in side.moments:
        return
    one, two, three, *_ = side.of("layers")
    side.optimizer.state[one]["step"].zero_()
    side.optimizer.state[two]["step"] = torch.tensor(7.0)
    side.optimizer.state[three]["step"] += 2
    side.kept["counter"] = side.optimizer.state[three]["step"]


def one_state_goes_to_another_parameter(side: Side) -> None:
    one, two = side.params["layers.0.mlp.0.weight"], side.params["layers.1.mlp.0.weight"]
    side.optimizer.state[two] = copy.deepcopy(side.optimizer.state[one])


def only_some_states_stay(side: Side) -> None:
    kept = {id(param) for param in side.of("layers.0")}
    side.optimizer.state = defaultdict(
        dict, {param: state for param, state in side.optimizer.state.items() if id(param) in kept}
    )


def a_state_of_the_users_own_beside(side: Side) -> None:
    for number, param in enumerate(side.of("layers.1")):
        side.optimizer.state[param]["anchor"] = torch.full((2,), float(number))


def parameters_change_groups(side: Side) -> None:
    first, second = side.optimizer.param_groups
    moved = {id(param) for param in side.of("layers.1")}
    second["params"] = second["params"] + [param for param in first["params"] if id(param) in moved]
    first["params"] = [param for param in first["params"] if id(param) not in moved]


def groups_are_swapped(side: Side) -> None:
    first, second = side.optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]


def the_list_of_groups_is_turned_round(side: Side) -> None:
    side.optimizer.param_groups = side.optimizer.param_groups[::-1]
    side.optimizer.param_groups[0]["lr"] = side.original.param_groups[1]["lr"] / 2


def rates_by_layer(side: Side) -> None:
    """Every layer becomes a group, and the lower ones learn slower."""
    old = side.optimizer.param_groups[0]
    side.optimizer.param_groups.clear()
    for layer in range(2):
        params = side.of(f"layers.{layer}.")
        side.optimizer.add_param_group({"params": params, "lr": old["lr"] * 0.7 ** (2 - layer)})
    rest = [param for name, param in side.params.items() if "layers" not in name]
    side.optimizer.param_groups.append({**old, "params": rest})


def new_defaults_for_new_groups(side: Side) -> None:
    side.optimizer.defaults["lr"] = 1e-3
    group = side.optimizer.param_groups.pop()
    side.optimizer.add_param_group({"params": iter(group["params"])})
    assert side.optimizer.param_groups[-1]["lr"] == 1e-3


def frozen_by_a_shorter_list(side: Side) -> None:
    for group in side.optimizer.param_groups:
        group["params"] = [param for param in group["params"] if id(param) not in {id(p) for p in side.of("layers.0")}]


def frozen_by_deleting_from_the_list(side: Side) -> None:
    del side.optimizer.param_groups[0]["params"][1:3]


def frozen_by_taking_a_group_away(side: Side) -> None:
    side.kept["group"] = side.optimizer.param_groups.pop()


def frozen_group_with_its_states(side: Side) -> None:
    for param in side.optimizer.param_groups.pop(0)["params"]:
        del side.optimizer.state[param]


def other_betas(side: Side) -> None:
    for group in side.optimizer.param_groups:
        group["weight_decay"] = 0.3
        if "betas" in group:
            group["betas"] = (0.7, 0.9)


def a_state_dict_changed_by_hand(side: Side) -> None:
    saved = copy.deepcopy(side.optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 2e-3
    for state in saved["state"].values():
        state[side.moments[0]].mul_(0.5)
    del saved["state"][0]
    side.optimizer.load_state_dict(saved)


def hooks_of_state_dicts(side: Side) -> None:
    """They see and change what they do in plain PyTorch, states too."""
    moment = side.moments[0]
    param = side.of("layers.1")[0]

    def before_saving(optimizer: Any) -> None:
        optimizer.state[param][moment].fill_(0.25)

    def before_loading(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        return {**saved, "state": {index: state for index, state in saved["state"].items() if index != 1}}

    def after_loading(optimizer: Any) -> None:
        assert float(optimizer.state[param][moment].mean()) == 0.25
        optimizer.state[param][moment].mul_(2)

    optimizer = side.optimizer
    hooks = [
        optimizer.register_state_dict_pre_hook(before_saving),
        optimizer.register_state_dict_post_hook(lambda _, saved: side.kept.update(seen=len(saved["state"]))),
        optimizer.register_load_state_dict_pre_hook(before_loading),
        optimizer.register_load_state_dict_post_hook(after_loading),
    ]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert side.kept["seen"] == len(side.params)
    for hook in hooks:
        hook.remove()


CHANGES: list[Callable[[Side], None]] = [
    restart_by_clearing,
    restart_by_a_fresh_dict,
    restart_by_setstate,
    relora_forgets_some,
    relora_prunes_moments,
    moments_are_damped,
    moments_are_assigned,
    counts_are_written,
    one_state_goes_to_another_parameter,
    only_some_states_stay,
    a_state_of_the_users_own_beside,
    parameters_change_groups,
    groups_are_swapped,
    the_list_of_groups_is_turned_round,
    rates_by_layer,
    new_defaults_for_new_groups,
    frozen_by_a_shorter_list,
    frozen_by_deleting_from_the_list,
    frozen_by_taking_a_group_away,
    frozen_group_with_its_states,
    other_betas,
    a_state_dict_changed_by_hand,
    hooks_of_state_dicts,
]


def train(side: Side, change: Callable[[Side], None] | None, update: str = "deferred") -> Iterator[float]:
    """With updates in backward `model.zero_grad()`: a gradient that the optimizer does not drop breaks the promise."""
    for number, batch in enumerate(batches(NUM_STEPS)):
        if number == CHANGE_AFTER and change is not None:
            change(side)
        yield float(side.backward(batch))
        side.optimizer.step()
        (side.optimizer if update == "deferred" else side.model).zero_grad()


@pytest.mark.parametrize(
    ("change", "setting"),
    [  # each with both optimizers and both timings, by turns streamed and resident; the other half is `long`
        pytest.param(change, setting, marks=() if (setting[1] == "streamed") == (number % 2 == 0) else pytest.mark.long)
        for number, change in enumerate(CHANGES)
        for setting in SETTINGS
    ],
    ids=lambda value: value.__name__ if callable(value) else " ".join(value),
)
def test_a_change_between_steps(change: Callable[[Side], None], setting: tuple[str, str, str]) -> None:
    kind, place, update = setting
    ours, plain = like_new(kind, place, update), plain_side(kind)
    for loss, expected in zip(train(ours, change, update), train(plain, change, update), strict=True):
        assert abs(loss - expected) <= 1e-6 * abs(expected)
    assert_same(ours, plain)
    for name, param in plain.params.items():  # what was taken out keeps its gradients, and adds to them
        found = ours.params[name].grad
        assert (found is None) == (param.grad is None), name
        if param.grad is not None and found is not None:
            assert_close(found.clone(), param.grad, f"the gradient of {name}")
    if not (kind == "sgd" and change is counts_are_written) and change is not a_state_of_the_users_own_beside:
        assert any(not torch.allclose(value, plain.params[name]) for name, value in unchanged(kind).items()), (
            "no change"
        )


@cache
def unchanged(kind: str) -> dict[str, Tensor]:
    side = plain_side(kind)
    list(train(side, None))
    return side.params


# -- other loops -------------------------------------------------------------------------------------------------


def check(kind: str, place: str, update: str, loop: Callable[[Side], list[float]]) -> Side:
    """Runs a loop on both sides; what it returns is compared, and weights and states."""
    ours, plain = like_new(kind, place, update), plain_side(kind)
    found, expected = loop(ours), loop(plain)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert abs(one - other) <= 1e-5 * abs(other)
    assert_same(ours, plain)
    return ours


@deferred
def test_groups_that_change_while_gradients_accumulate_and_are_clipped(kind: str, place: str, update: str) -> None:
    def loop(side: Side) -> list[float]:
        norms = []
        for number, batch in enumerate(batches(8)):
            side.backward(batch)
            if number == 2:  # between the two backwards of a step
                parameters_change_groups(side)
            if number == 4:
                frozen_by_taking_a_group_away(side)
            if number % 2:
                params = [param for group in side.optimizer.param_groups for param in group["params"]]
                norms.append(float(torch.nn.utils.clip_grad_norm_(params, 0.2)))
                side.optimizer.step()
                side.optimizer.zero_grad()
        return norms

    check(kind, place, update, loop)


@deferred
def test_a_group_that_is_taken_away_and_put_back(kind: str, place: str, update: str) -> None:
    """Its states wait for it, as in plain PyTorch."""

    def loop(side: Side) -> list[float]:
        losses = []
        for number, batch in enumerate(batches(5)):
            if number == 1:
                frozen_by_taking_a_group_away(side)
            if number == 3:
                side.optimizer.param_groups.append(side.kept["group"])
            losses.append(float(side.backward(batch)))
            side.optimizer.step()
            side.model.zero_grad()
        return losses

    check(kind, place, update, loop)


@deferred
def test_hooks_around_step_see_and_change_what_the_step_uses(kind: str, place: str, update: str) -> None:
    def before(optimizer: Any, *_: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.8
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad.mul_(0.5)
        if len(optimizer.state):
            next(iter(optimizer.state.values()))["exp_avg" if kind == "adamw" else "momentum_buffer"].zero_()

    def loop(side: Side) -> list[float]:
        calls: list[float] = []
        hooks = [
            side.optimizer.register_step_pre_hook(before),
            side.optimizer.register_step_post_hook(lambda *_: calls.append(1.0)),
        ]
        for batch in batches(3):
            side.backward(batch)
            side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))  # they still run once
            side.optimizer.step()
            side.optimizer.zero_grad()
        for hook in hooks:
            hook.remove()
        return [*calls, float(len(calls)), side.optimizer.param_groups[0]["lr"]]

    check(kind, place, update, loop)


@every
def test_schedulers_of_the_old_optimizer_restart(kind: str, place: str, update: str) -> None:
    def loop(side: Side) -> list[float]:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(side.original, T_0=2)
        losses = []
        for batch in batches(4):
            losses.append(float(side.backward(batch)))
            side.optimizer.step()
            side.optimizer.zero_grad()
            scheduler.step()
            if scheduler.T_cur == 0:
                side.optimizer.state = defaultdict(dict)
        return [*losses, side.optimizer.param_groups[0]["lr"]]

    check(kind, place, update, loop)


@deferred
def test_gradient_surgery(kind: str, place: str, update: str) -> None:
    """Gradients written, projected, taken away, and zeros that are kept."""

    def loop(side: Side) -> list[float]:
        losses = []
        for batch in batches(4):
            losses.append(float(side.backward(batch)))
            for number, param in enumerate(side.of("layers")):
                gradient = param.grad
                assert gradient is not None
                if number % 4 == 0:
                    param.grad = gradient - gradient.mean()
                elif number % 4 == 1:
                    param.grad = torch.full_like(gradient, 0.01)
                elif number % 4 == 2:
                    param.grad = None
            side.optimizer.step()
            side.optimizer.zero_grad(set_to_none=False)
        return losses

    check(kind, place, update, loop)


@deferred
def test_sharpness_aware_steps_by_state_dict(kind: str, place: str, update: str) -> None:
    """Two backwards a step: up along the gradient, and the step from where it began."""

    def loop(side: Side) -> list[float]:
        losses = []
        for batch in batches(3):
            losses.append(float(side.backward(batch)))
            here = {name: value.clone() for name, value in side.model.state_dict().items()}
            up = {name: value + 0.01 * side.params[name].grad.sign() for name, value in here.items()}  # type: ignore[union-attr]
            side.optimizer.zero_grad()
            side.model.load_state_dict(up)
            side.backward(batch)
            side.model.load_state_dict(here)
            side.optimizer.step()
            side.optimizer.zero_grad()
        return losses

    check(kind, place, update, loop)


@every
def test_lookahead_and_an_average_of_weights_by_state_dict(kind: str, place: str, update: str) -> None:
    def loop(side: Side) -> list[float]:
        slow = {name: value.clone() for name, value in side.model.state_dict().items()}
        losses = []
        for number, batch in enumerate(batches(4)):
            losses.append(float(side.backward(batch)))
            side.optimizer.step()
            side.optimizer.zero_grad()
            if number % 2:
                for name, value in side.model.state_dict().items():
                    slow[name].lerp_(value, 0.5)
                side.model.load_state_dict(slow)
        return [*losses, *(float(value.norm()) for value in slow.values())]

    check(kind, place, update, loop)


@deferred
def test_several_evaluations_in_one_step(kind: str, place: str, update: str) -> None:
    """A closure that is called more than once, as by a line search; the last gradients count."""

    def loop(side: Side) -> list[float]:
        losses = []
        for batch in batches(3):

            def closure(batch: Any = batch) -> Tensor:
                for _ in range(2):
                    side.optimizer.zero_grad()
                    loss = side.backward(batch)
                return loss

            losses.append(float(side.optimizer.step(closure)))  # type: ignore[arg-type]
        return losses

    check(kind, place, update, loop)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_reset_leaves_the_masters_of_16_bit_parameters_alone(kind: str, place: str) -> None:
    """Against plain PyTorch that trains fp32 masters: its optimizer's states are reset, not its parameters."""
    ours, plain = wrapped_side(kind, place, "deferred", torch.bfloat16), plain_side(kind, torch.bfloat16)
    low = plain.params
    plain.params = {name: nn.Parameter(param.detach().float()) for name, param in low.items()}
    plain.optimizer = OPTIMIZERS[kind](groups_of(plain.params))
    for number, batch in enumerate(batches(6, torch.bfloat16)):
        for side in (ours, plain):
            if number == 2:
                relora_forgets_some(side)
            if number == 3:
                parameters_change_groups(side)
            if number == 4:
                moments_are_damped(side)
            side.backward(batch)
        for name, param in low.items():
            assert param.grad is not None
            plain.params[name].grad, param.grad = param.grad.float(), None
        for side in (ours, plain):
            side.optimizer.step()
            side.optimizer.zero_grad()
        for name, param in low.items():
            param.data.copy_(plain.params[name])
    assert_same_states(states(ours), states(plain))
    run = run_of(ours.model)
    assert run is not None
    for name, master in plain.params.items():
        found = run.chunks.master_of(name)
        assert found is not None
        assert_close(found, master.detach(), name)
        assert not torch.equal(found, found.bfloat16().float()) or found.numel() < 9, "a master that knows no more"
    hightide.unwrap(ours.model)


# -- what is held, copied and saved ------------------------------------------------------------------------------


def trained(kind: str = "adamw", place: str = "streamed", update: str = "deferred") -> Side:
    side = like_new(kind, place, update)
    for batch in batches(2):
        side.backward(batch)
        side.optimizer.step()
        side.optimizer.zero_grad()
    return side


@every
def test_a_state_dict_follows_the_groups(kind: str, place: str, update: str) -> None:
    """Of two parameters that are taken out nothing is saved, and what is loaded goes to those that are there."""
    ours, plain = trained(kind, place, update), plain_side(kind)
    for batch in batches(2):
        plain.backward(batch)
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    for side in (ours, plain):
        first = side.optimizer.param_groups[0]
        removed, first["params"] = first["params"][1:3], [first["params"][0], *first["params"][3:]]
        if side is plain:  # where it would be a KeyError
            for param in removed:
                del side.optimizer.state[param]
    found, expected = ours.optimizer.state_dict(), plain.optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"] and list(found["state"]) == list(expected["state"])
    for index, state in expected["state"].items():
        for name, value in state.items():
            assert_close(found["state"][index][name], value, f"{name} of {index}")
    ours.optimizer.state.clear()
    ours.optimizer.load_state_dict(expected)
    assert_same_states(states(ours), states(plain))


def test_what_is_held_of_a_state_keeps_its_values() -> None:
    """As in plain PyTorch, where a deleted state is nobody's but the holder's; and it can be put back."""
    side = trained()
    before = states(side)
    held = {param: dict(state) for param, state in side.optimizer.state.items()}
    of_one = side.optimizer.state.pop(side.params["head.weight"])
    side.optimizer.state.clear()
    side.backward(batches(1)[0])
    side.optimizer.step()
    side.model.zero_grad()
    assert_close(of_one["exp_avg"], before["head.weight"]["exp_avg"], "what was popped")
    side.optimizer.state = held
    assert_same_states(states(side), before)
    side.optimizer.state = {param: state for param, state in side.optimizer.state.items() if param.dim() > 1}
    assert_same_states(states(side), {name: state for name, state in before.items() if side.params[name].dim() > 1})


def test_a_moment_is_live_and_a_mapping_that_was_replaced_says_so() -> None:
    side = trained()
    param = side.params["head.weight"]
    state, every_state = side.optimizer.state[param], side.optimizer.state
    counter, moment = state["step"], state["exp_avg"]
    assert state["exp_avg"] is moment and list(state) == ["step", "exp_avg", "exp_avg_sq"]
    side.backward(batches(1)[0])
    side.optimizer.step()
    assert float(counter) == 3.0
    assert torch.equal(side.optimizer.state[param]["exp_avg"], moment)
    side.optimizer.state[param] = {}
    with pytest.raises(Refused, match=r"deleted or replaced.*deepcopy"):
        state["exp_avg"]
    side.optimizer.state = defaultdict(dict)
    with pytest.raises(Refused, match="deleted or replaced"):
        side.optimizer.state = every_state
    with pytest.raises(KeyError):
        side.optimizer.state[param]["exp_avg"]  # as in plain PyTorch before the first step
    with pytest.raises(KeyError):
        del side.optimizer.state[param]


def test_a_state_that_is_no_state_of_this_optimizer_is_refused_and_changes_nothing() -> None:
    side = trained()
    param, before = side.params["head.weight"], states(side)
    with pytest.raises(ValueError, match=r"momentum_buffer.*another optimizer"):
        side.optimizer.state[param] = {"momentum_buffer": torch.zeros(8, 32)}
    with pytest.raises(ValueError, match=r"\(3,\).*\(8, 32\)"):
        side.optimizer.state[param] = {"step": 1, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(8, 32)}
    with pytest.raises(ValueError, match=r"\(3,\).*\(8, 32\)"):
        side.optimizer.state[param]["exp_avg"] = torch.zeros(3)
    with pytest.raises(Refused, match=r"alone.*state\.pop\(p\)"):
        del side.optimizer.state[param]["exp_avg"]
    with pytest.raises(Refused, match="no parameter of the wrapped model"):
        side.optimizer.state["mine"] = {}  # type: ignore[index]
    with pytest.raises(Refused, match=r"1\.5.*whole number"):
        side.optimizer.state[param]["step"] = 1.5
    assert_same_states(states(side), before)
    side.optimizer.state[param]["step"].fill_(1.5)
    side.backward(batches(1)[0])
    with pytest.raises(Refused, match=r"1\.5.*whole number"):
        side.optimizer.step()
    side.optimizer.state[param]["step"] = 2
    side.optimizer.step()


def test_a_state_of_a_parameter_that_was_frozen_before_wrapping_is_kept() -> None:
    """Nothing updates it, but a checkpoint has it, as in plain PyTorch."""
    plain = plain_side("adamw")
    plain.backward(batches(1)[0])
    plain.optimizer.step()
    plain.optimizer.zero_grad()
    frozen = plain.params["head.weight"].requires_grad_(False)
    saved = copy.deepcopy(plain.optimizer.state_dict())
    model, optimizer = hightide.wrap(plain.model, plain.optimizer, batches(1)[0], limits=LIMITS)
    for _ in range(2):
        found = optimizer.state_dict()
        assert list(found["state"]) == list(saved["state"])
        for index, state in saved["state"].items():
            assert all(torch.equal(value, found["state"][index][name]) for name, value in state.items())
        optimizer.load_state_dict(found)
    assert float(optimizer.state[frozen]["step"]) == 1.0
    optimizer.state[frozen]["step"] = torch.tensor(5.0)
    assert float(optimizer.state.pop(frozen)["step"]) == 5.0 and frozen not in optimizer.state
    hightide.unwrap(model)


def test_copies_are_refused_with_a_remedy() -> None:
    side = trained()
    for copied in (copy.copy, copy.deepcopy, pickle.dumps, lambda one: torch.save(one, io.BytesIO())):
        with pytest.raises(Refused, match=r"optimizer\.state_dict\(\)"):
            copied(side.optimizer)
        with pytest.raises(Refused, match=r"optimizer\.state_dict\(\)"):
            copied(side.optimizer.state)
    of_one = pickle.loads(pickle.dumps(side.optimizer.state[side.params["head.bias"]]))
    assert_same_states({"head.bias": of_one}, {"head.bias": states(side)["head.bias"]})


def test_a_profiler_looks_into_the_optimizer() -> None:
    with torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True):
        trained()


# -- refused -----------------------------------------------------------------------------------------------------


@every
def test_what_updates_cannot_follow_is_refused(kind: str, place: str, update: str) -> None:
    side = trained(kind, place, update)
    group = side.optimizer.param_groups[1]
    stranger = nn.Parameter(torch.zeros(3))

    def refused(message: str) -> None:
        with pytest.raises(Refused, match=message):
            side.backward(batches(1)[0])
            side.optimizer.step()
        side.optimizer.param_groups[1]["params"] = group["params"] = group["params"][:num_params]

    num_params = len(group["params"])
    group["params"] = [*group["params"], stranger]
    refused(r"\(3,\) that is none of the wrapped model.*unwrap\(model\).*wrap")
    if update == "in_backward":
        return  # the refusal came in the middle of a backward
    group["params"] = [*group["params"], side.params["layers.0.mlp.0.weight"]]
    refused(r"'layers\.0\.mlp\.0\.weight' is in group 0 of the optimizer and again in group 1.*Take it out")
    option = "amsgrad" if kind == "adamw" else "differentiable"
    group[option] = True
    refused(f"group 1 of the optimizer was changed after hightide.wrap.*{option}=True.*{option}=False")
    group[option] = False
    side.optimizer.step()


@every
def test_the_old_optimizer_does_not_step_until_the_model_is_plain_again(kind: str, place: str, update: str) -> None:
    side = wrapped_side(kind, place, update)
    torch.optim.lr_scheduler.StepLR(side.original, 1)  # puts a step of its own there
    side.backward(batches(1)[0])
    with pytest.raises(Refused, match=r"that hightide\.wrap returned"):
        side.original.step()
    side.optimizer.step()
    side.optimizer.zero_grad()
    hightide.unwrap(side.model)
    before = side.params["head.weight"].detach().clone()
    side.backward(batches(1)[0])
    side.original.step()
    assert not torch.equal(side.params["head.weight"], before)


def test_a_parameter_without_room_for_states_is_refused() -> None:
    model, batch = models.hand_written(num_layers=2)
    optimizer: Any = torch.optim.AdamW(model.layers.parameters(), lr=1e-2)
    model, optimizer = hightide.wrap(model, optimizer, batch, limits=LIMITS)
    with pytest.raises(Refused, match=r"'head\.weight' was put into group 1.*no room.*unwrap\(model\)"):
        optimizer.add_param_group({"params": model.head.parameters()})
    assert len(optimizer.param_groups) == 1
    hightide.unwrap(model)


def change_group(side: Side) -> None:
    first, second = side.optimizer.param_groups
    second["params"].append(first["params"].pop())


BETWEEN: dict[str, Callable[[Side], Any]] = {
    "taken out": lambda side: side.optimizer.param_groups.pop(),
    "put into another group": change_group,
    "states cleared": lambda side: side.optimizer.state.clear(),
    "state read": lambda side: side.optimizer.state[side.params["head.weight"]],
    "state dict": lambda side: side.optimizer.state_dict(),
    "state loaded": lambda side: side.optimizer.load_state_dict(side.kept["saved"]),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_a_change_after_updates_in_backward_breaks_the_promise(what: str) -> None:
    side = wrapped_side("adamw", "streamed", "in_backward")
    side.kept["saved"] = side.optimizer.state_dict()
    side.backward(batches(1)[0])
    with pytest.raises(Refused, match=r"between backward and step\(\).*in_backward.*after step\(\).*deferred"):
        BETWEEN[what](side)
        side.optimizer.step()
    hightide.unwrap(side.model)


def test_a_gradient_that_nobody_drops_is_named_when_its_parameter_was_taken_out() -> None:
    side = wrapped_side("adamw", "streamed", "in_backward")
    frozen_by_taking_a_group_away(side)
    side.backward(batches(1)[0])
    side.optimizer.step()
    side.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"model\.zero_grad\(\) \(the optimizer does not know '"):
        side.backward(batches(1)[0])
    hightide.unwrap(side.model)
