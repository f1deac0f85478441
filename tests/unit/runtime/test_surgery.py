"""What wrapping does to a user's modules, and what it does not."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import time
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import hightide
import models
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.runtime.blocks import compiled
from hightide.runtime.chunks.absent import Disabled
from hightide.runtime.surgery import Wrapped, run_of
from unit.runtime.steps import Twins, assert_equal_weights, train_step, twins


def streamed(plan: Plan) -> Plan:
    blocks = [replace(block, params=Tier.HOST, states=Tier.HOST) if block.name else block for block in plan.blocks]
    return replace(plan, blocks=tuple(blocks), num_slots=2, num_grad_slots=2, gpu_limit_bytes=2**20)


@pytest.fixture
def pair() -> Twins:
    return twins(*models.hand_written(num_layers=3), gpu="200KiB", edit=streamed)


def test_copies_are_refused_with_a_remedy(pair: Twins) -> None:
    for module in (pair.model, pair.model.layers[0], pair.model.layers):
        with pytest.raises(RuntimeError, match=r"deep-copied.*state_dict\(\)"):
            copy.deepcopy(module)
        with pytest.raises(RuntimeError, match=r"pickled.*state_dict\(\)"):
            pickle.dumps(module)
        with pytest.raises(RuntimeError, match=r"pickled.*state_dict\(\)"):
            torch.save(module, io.BytesIO())


def test_classes_keep_their_names_and_relations(pair: Twins) -> None:
    for ours, theirs in zip(pair.model.modules(), pair.plain.modules(), strict=True):
        assert isinstance(ours, type(theirs))
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(type(ours), name) == getattr(type(theirs), name)
    assert type(pair.model.layers[0]) is type(pair.model.layers[1])  # torch.compile tells blocks apart by class
    assert type(pair.plain) is models.HandWritten
    assert repr(pair.model) == repr(pair.plain)


@pytest.mark.parametrize("compile", [False, True])
def test_a_model_that_is_dropped_is_gone(compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile keeps the classes that it has met, whatever compiles behind its tracing."""
    traced = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(compiled.torch, "compile", traced)
    model, batch = models.hand_written(num_layers=3)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = hightide.plan(model, optimizer, batch, limits=hightide.Limits(gpu="200KiB", host="1MiB"), micro_batch=2)
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=streamed(plan), compile=compile)
    train_step(model, optimizer, batch)
    run, block = weakref.ref(run_of(model)), model.layers[0]
    del model, optimizer
    deadline_s = time.monotonic() + 10
    while run() is not None and time.monotonic() < deadline_s:  # updates that are under way finish first
        gc.collect()
        time.sleep(0.01)
    assert run() is None
    with pytest.raises(RuntimeError, match="is gone"):
        block(torch.zeros(2, 3, 16))


def test_nothing_is_stored_on_modules_or_parameters(pair: Twins) -> None:
    train_step(pair.model, pair.optimizer, pair.batch)
    for ours, theirs in zip(pair.model.modules(), pair.plain.modules(), strict=True):
        assert vars(ours).keys() == vars(theirs).keys()
    for ours, theirs in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        assert isinstance(ours, nn.Parameter) and vars(ours).keys() == vars(theirs).keys()


def test_parameters_stay_the_same_objects(pair: Twins) -> None:
    before = [id(param) for param in pair.model.parameters()]
    assert before == [id(param) for group in pair.optimizer.param_groups for param in group["params"]]
    train_step(pair.model, pair.optimizer, pair.batch)
    hightide.unwrap(pair.model)
    assert before == [id(param) for param in pair.model.parameters()]


def test_an_absent_parameter_has_its_shape_reads_nan_and_refuses_writes(pair: Twins) -> None:
    train_step(pair.model, pair.optimizer, pair.batch)
    weight = pair.model.layers[1].mlp[0].weight
    assert weight.shape == (48, 32) and weight.dtype is torch.float32 and weight.requires_grad
    with Disabled():  # as code in C++ sees it; see test_absent for Python
        assert weight.isnan().all() and weight.untyped_storage().nbytes() == 4
        with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
            weight.add_(1)
    with torch.no_grad(), Disabled():
        weight[0, 0] = 1.0  # torch lets a write to one element pass; its next use must not go on as if nothing was lost
    with pytest.raises(RuntimeError, match=r"'layers\.1\.mlp\.0\.weight'.*lost.*before hightide.wrap"):
        train_step(pair.model, pair.optimizer, pair.batch)
    scale = pair.model.scale  # loose: the model's own code uses it, so it is there
    assert not scale.isnan().any()


def test_unwrap_gives_a_plain_model_back(pair: Twins) -> None:
    pair.assert_equal(*pair.step())
    model = hightide.unwrap(pair.model)
    assert model is pair.model and run_of(model) is None
    assert not any(isinstance(module, Wrapped) for module in model.modules())
    assert type(model) is models.HandWritten
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert_equal_weights(model, pair.plain)
    copied = copy.deepcopy(model)
    assert_equal_weights(copied, pair.plain)
    assert not any(param.isnan().any() for param in model.parameters())


def test_a_state_dict_owns_its_storage_and_loads_into_a_plain_model(pair: Twins) -> None:
    pair.assert_equal(*pair.step())
    state = pair.model.state_dict()
    for name, value in state.items():
        assert value.untyped_storage().nbytes() == value.numel() * 4, name
    fresh, _ = models.hand_written(num_layers=3, seed=9)
    fresh.load_state_dict(state)
    assert_equal_weights(fresh, pair.plain)
    part = pair.model.layers[1].state_dict()
    assert all(torch.equal(value, state[f"layers.1.{name}"]) for name, value in part.items())
    kept = {name: value.clone() for name, value in state.items()}
    pair.step()
    assert all(torch.equal(value, kept[name]) for name, value in state.items())  # a copy, not a view


def test_a_forward_on_the_instance_is_refused() -> None:
    """The swapped class would run and bypass it."""
    model, batch = models.hand_written(num_layers=3)
    model.layers[1].forward = lambda x, gate: x
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"'layers\.1'.*subclass"):
        hightide.wrap(model, optimizer, batch, limits=hightide.Limits(gpu="1MiB", host="8MiB"), micro_batch=2)
    assert run_of(model) is None and not any(isinstance(module, Wrapped) for module in model.modules())
    train_step(model, optimizer, batch)


def test_tied_parameters_stay_tied_in_a_state_dict() -> None:
    model, batch = models.plain(tied=True)
    pair = twins(model, batch, gpu="300KiB")
    pair.assert_equal(*pair.step())
    state = pair.model.state_dict()
    assert state["head.weight"].data_ptr() == state["tokens.weight"].data_ptr()
    pair.close()
    assert pair.model.head.weight is pair.model.tokens.weight
