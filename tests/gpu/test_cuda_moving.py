"""A run goes on under another plan, on a real GPU: pinned memory and the slab are given back and taken again."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

import hightide
import models
from hightide.ir.passes import Passes
from hightide.planner.solution import Solution
from hightide.stores import device_limit
from hightide.stores.store import OutOfMemory
from unit.runtime.chunks.test_moving import KINDS, ScaledLast, move, placed, states, wrapped
from unit.runtime.steps import train_step

pytestmark = pytest.mark.gpu

MIB = 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("before", "after"), [(a, b) for a in KINDS for b in KINDS if a != b])
def test_nothing_is_lost_on_the_way_and_training_goes_on(before: str, after: str, dtype: torch.dtype) -> None:
    model, optimizer, run, batch = wrapped(before, dtype, "cuda")
    losses = [train_step(model, optimizer, batch).item() for _ in range(3)]
    there = states(model, optimizer)
    move(run, placed(run.plan, after))
    assert all(torch.equal(old, new) for old, new in zip(there, states(model, optimizer), strict=True))
    losses += [train_step(model, optimizer, batch).item() for _ in range(3)]
    assert losses[-1] < losses[2] < losses[0] and hightide.stats(model).deviations == 0
    hightide.unwrap(model)


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_there_and_back_between_backward_and_step(update: str) -> None:
    model, optimizer, run, batch = wrapped("resident", torch.bfloat16, "cuda", update=update)
    for kind in ("streamed", "updated on host", "resident"):
        models.loss_of(model, batch).backward()
        norms = [param.grad.norm().item() for param in model.parameters()] if update == "deferred" else []
        move(run, placed(run.plan, kind))
        if norms:
            assert [param.grad.norm().item() for param in model.parameters()] == norms
        optimizer.step()
        optimizer.zero_grad()
    assert run.num_steps == 3 and hightide.stats(model).deviations == 0
    hightide.unwrap(model)


@pytest.mark.alone  # it asks for more than there is, and for a moment has all that others need
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slab_that_cannot_be_had_leaves_the_run_as_it_was(kind: str, dtype: torch.dtype) -> None:
    model, optimizer, run, batch = wrapped(kind, dtype, "cuda")
    losses = [train_step(model, optimizer, batch).item() for _ in range(2)]
    models.loss_of(model, batch).backward()
    norms = [param.grad.norm().item() for param in model.parameters()]
    there, gpu = states(model, optimizer), run.gpu
    held_bytes = torch.cuda.memory_allocated()
    too_much = 2 * torch.cuda.get_device_properties(0).total_memory
    plan = placed(run.plan, "resident")
    solution = Solution.of(run.profile, replace(plan, gpu_limit_bytes=too_much))
    solution = replace(solution, passes=Passes.of(replace(solution.passes.last, gpu_base_bytes=too_much)))
    with pytest.raises(OutOfMemory) as caught:
        run.move_to(solution)
    assert any("the old plan stays" in note for note in caught.value.__notes__)
    del caught
    gc.collect()
    assert run.gpu is gpu and torch.cuda.memory_allocated() == held_bytes
    assert device_limit.num_limits(torch.cuda.current_device()) == 1
    assert [param.grad.norm().item() for param in model.parameters()] == norms
    assert all(torch.equal(old, new) for old, new in zip(there, states(model, optimizer), strict=True))
    optimizer.step()
    optimizer.zero_grad()
    losses += [train_step(model, optimizer, batch).item() for _ in range(3)]
    assert losses[-1] < losses[1] < losses[0] and hightide.stats(model).deviations == 0
    hightide.unwrap(model)


class Wide(torch.nn.Module):
    """Its weights are most of what it needs: 48 MiB, and as much for gradients and each moment."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2048, 2048, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


def test_a_graph_that_is_still_alive_holds_nothing_of_the_old_slab() -> None:
    pair = Wide(), {"x": torch.randn(4, 2048)}
    model, _, run, batch = wrapped("resident", torch.float32, "cuda", pair=pair)
    loss = models.loss_of(model, batch)
    held_bytes = torch.cuda.memory_allocated() - run.gpu.used_bytes  # beside the slab: the graph, workspaces
    old_bytes = run.gpu.used_bytes
    assert old_bytes >= 4 * 48 * MIB
    move(run, placed(run.plan, "streamed"))
    assert run.gpu.used_bytes < old_bytes - 48 * MIB
    assert torch.cuda.memory_allocated() <= held_bytes + run.gpu.used_bytes + MIB
    with pytest.raises(RuntimeError, match="plan was changed"):
        loss.backward()
    models.loss_of(model, batch).backward()
    torch.cuda.synchronize()
    hightide.unwrap(model)


def test_what_plain_autograd_has_saved_is_not_read_any_more() -> None:
    model, batch = ScaledLast(), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    limits = hightide.Limits(gpu="1GiB", host="64MiB")
    plan = hightide.plan(model, optimizer, batch, limits=limits, micro_batch=2, device="cuda")
    model, _ = hightide.wrap(model, optimizer, batch, plan=plan, device="cuda")
    run = model.hightide_run
    loss = model(batch)
    move(run, placed(run.plan, "streamed"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model(batch).backward()
    torch.cuda.synchronize()
    hightide.unwrap(model)


def test_two_wrapped_models_train_side_by_side_and_one_of_them_moves() -> None:
    first = wrapped("resident", torch.float32, "cuda", pair=(Wide(), {"x": torch.randn(4, 2048)}))
    assert first[2].gpu.is_alone
    second = wrapped("resident", torch.float32, "cuda", pair=(Wide(), {"x": torch.randn(4, 2048)}))
    assert not first[2].gpu.is_alone and not second[2].gpu.is_alone
    losses = [[train_step(*one[:2], one[3]).item() for one in (first, second)] for _ in range(2)]
    move(first[2], placed(first[2].plan, "streamed"))
    losses += [[train_step(*one[:2], one[3]).item() for one in (first, second)] for _ in range(2)]
    assert all(after < before for before, after in zip(losses[0], losses[-1], strict=True))
    hightide.unwrap(first[0])
    assert second[2].gpu.is_alone
    hightide.unwrap(second[0])
