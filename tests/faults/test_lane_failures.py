"""A failure in any lane or store reaches the user's thread as the original exception, soon, and nothing hangs."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import hightide
import models
from forked import run_forked
from hightide.ir.activation import Activation
from hightide.ir.tier import Tier
from hightide.optim.host_update import HostUpdate
from unit.runtime.steps import Twins, twins


class Broken(Exception):
    """Nobody else raises this."""


class Fault:
    """Raises one exception object at the n-th call; counts calls, so that a test can see that it did fire."""

    def __init__(self, original: Callable[..., Any], nth: int) -> None:
        self.original, self.nth, self.num_calls = original, nth, 0
        self.error = Broken(f"call {nth}")
        self.at_s = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == self.nth:
            self.at_s = time.monotonic()
            raise self.error
        return self.original(*args, **kwargs)


class FaultInBackward(Fault):
    """Forward goes through: how often a block is called there, to be looked at, is not what is tested."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_backward = torch._C._current_graph_task_id() != -1
        return super().__call__(*args, **kwargs) if is_backward else self.original(*args, **kwargs)


def wrapped(update: str = "deferred") -> Twins:
    model, batch = models.hand_written(num_layers=4)
    return twins(model, batch, gpu="120KiB", update=update, edit=recomputed)


def recomputed(plan: hightide.Plan) -> hightide.Plan:
    """Everything moves and is updated on the host, whatever was planned, so that every lane has work in every step; a
    failure in recomputation needs a recomputation."""
    moving = {"params": Tier.HOST, "states": Tier.HOST, "inputs": Tier.GPU, "activation": Activation.RECOMPUTE}
    blocks = tuple(replace(block, **moving) if block.name else block for block in plan.blocks)
    slots = 1 + max(plan.layout.num_slots(chunk) for chunk in plan.layout.chunks)
    return replace(plan, blocks=blocks, num_slots=slots, num_grad_slots=slots, gpu_limit_bytes=2**20)


# Each kind of failure: where it is planted. The names say what breaks; the lane or store is what runs it.
def plant(kind: str, pair: Twins, monkeypatch: pytest.MonkeyPatch, nth: int) -> Fault:
    run = pair.run
    if kind == "lane h2d":
        fault = Fault(run.performer._copy_home_to_gpu, nth)
        monkeypatch.setattr(run.performer, "_copy_home_to_gpu", fault)
    elif kind == "lane d2h":
        fault = Fault(run.performer.write_back, 0)
        monkeypatch.setattr(run.performer, "write_back", _work_fails(fault, nth))
    elif kind == "lane cpu":
        fault = Fault(HostUpdate.update, nth)
        monkeypatch.setattr(HostUpdate, "update", lambda self, *args: fault(self, *args))
    elif kind == "store host":
        fault = Fault(run.host._copy, nth)
        monkeypatch.setattr(run.host, "_copy", fault)
    else:
        assert kind == "gradient on gpu"
        fault = Fault(run.chunks.grad_on_gpu, nth)
        monkeypatch.setattr(run.chunks, "grad_on_gpu", fault)
    return fault


def _work_fails(fault: Fault, nth: int) -> Callable[[int], Callable[[], object]]:
    """What is submitted to the lane fails, not the submission."""
    prepare, fault.nth = fault.original, nth

    def write_back(chunk: int) -> Callable[[], object]:
        work = prepare(chunk)

        def run() -> object:
            fault.original = work
            return fault()

        return run

    return write_back


# Where each may show: the first call that waits for it, or that submits something after it.
SURFACES = {
    "lane h2d": {"forward"},
    "lane d2h": {"backward", "step", "state_dict"},
    "lane cpu": {"backward", "step", "state_dict"},
    "store host": {"forward"},
    "gradient on gpu": {"backward", "step"},
}
KINDS = list(SURFACES)


def surfaces(pair: Twins, fault: Fault) -> str:
    """Trains until the fault surfaces; returns in which of the user's calls it did."""
    for _ in range(4):
        where = "forward"
        try:
            loss = models.loss_of(pair.model, pair.batch)
            where = "backward"
            loss.backward()
            where = "step"
            pair.optimizer.step()
            pair.optimizer.zero_grad()
            where = "state_dict"
            pair.model.state_dict()
        except Broken as error:
            assert error is fault.error
            assert time.monotonic() - fault.at_s < 10
            return where
    raise AssertionError(f"the fault did not surface; it was called {fault.num_calls} times")


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("hightide-")}


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_surfaces_as_the_same_object_and_nothing_hangs(
    kind: str, nth: int, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = own_threads()
    pair = wrapped(update)
    pair.step()
    pair.run.executor.wait_for_updates()  # the fault meets the next step's work only
    fault = plant(kind, pair, monkeypatch, nth)
    assert surfaces(pair, fault) in SURFACES[kind]
    started_s = time.monotonic()
    failure = pair.run.lanes.failure
    if kind == "gradient on gpu":  # the user's own thread asks for it, and so does the lane that takes gradients home
        assert failure is None or failure is fault.error
    else:
        assert failure is fault.error
    if failure is not None:  # a fault in a lane is for good; one in the user's own thread is not
        for again in (
            lambda: models.loss_of(pair.model, pair.batch),
            pair.optimizer.step,
            pair.model.state_dict,
            pair.optimizer.state_dict,
        ):
            with pytest.raises(Broken) as caught:
                again()
            assert caught.value is fault.error
    monkeypatch.undo()
    hightide.unwrap(pair.model)
    assert not any(thread.is_alive() for thread in own_threads() - before)
    assert time.monotonic() - started_s < 10
    pair.model(**pair.batch)  # plain again


@pytest.mark.parametrize(("kind", "where"), [("lane h2d", {"forward"}), ("lane cpu", {"step", "state_dict"})])
def test_where_a_failure_surfaces(kind: str, where: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch fails in forward. The last update of a step has nobody waiting for it but who asks for values; if the
    lane is quicker than the rest of step(), it shows there."""
    pair = wrapped()
    pair.step()
    nth = 1 if kind == "lane h2d" else sum(1 for spec in pair.run.chunks.specs if spec.optimised_numel)
    assert surfaces(pair, plant(kind, pair, monkeypatch, nth)) in where


def test_a_failure_surfaces_when_backward_runs_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where autograd has a thread of its own."""
    pair = wrapped()
    pair.step()
    loss = models.loss_of(pair.model, pair.batch)
    fault = plant("store host", pair, monkeypatch, 2)
    caught: list[BaseException] = []

    def backward() -> None:
        try:
            loss.backward()
            pair.optimizer.step()
            pair.model.state_dict()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and caught == [fault.error]


IMPORTS = """
    import torch, hightide, models
    from hightide.optim.adam import AdamWRule
    from hightide.runtime.surgery import run_of
"""
SCRIPT = """
    torch.set_num_threads(1)
    model, batch = models.hand_written(num_layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    limits = hightide.Limits(gpu="120KiB", host="8MiB")
    model, optimizer = hightide.wrap(model, optimizer, batch, limits=limits, micro_batch=2)
    run, kind = run_of(model), sys.argv[1]

    class PlantedFailure(Exception):
        pass

    def fail(*args, **kwargs):
        raise PlantedFailure(kind)

    for step in range(4):
        if step == 2:
            if kind == "lane h2d":
                run.performer._copy_home_to_gpu = fail
            elif kind == "lane d2h":
                run.performer.write_back = lambda chunk: fail
            elif kind == "lane cpu":
                AdamWRule.update = fail
            elif kind == "store host":
                run.host._copy = fail
            elif kind == "gradient on gpu":
                run.chunks.grad_on_gpu = fail
        models.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.state_dict()
    print("not reached")
"""


@pytest.mark.timeout(300)
def test_a_process_exits_cleanly_whatever_has_failed() -> None:
    """With the lanes' threads still there: nobody calls unwrap. What the user sees leads to where it was raised."""
    *failed, none = run_forked(IMPORTS, SCRIPT, [[kind] for kind in (*KINDS, "none")], timeout_s=280)
    assert (none.status, none.stdout) == (0, "not reached\n"), none.stderr
    for kind, done in zip(KINDS, failed, strict=True):
        assert done.status == 1 and done.stdout == "", (kind, done)
        assert "Fatal Python error" not in done.stderr, done.stderr
        assert done.stderr.rstrip().splitlines()[-1] == f"PlantedFailure: {kind}", done.stderr
        assert re.search(r'File "<string>", line \d+, in fail$', done.stderr, re.MULTILINE), done.stderr
        assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr


class UsersBug(Exception):
    pass


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
@pytest.mark.parametrize("where", ["forward", "second micro-batch", "recomputation"])
def test_training_goes_on_after_a_bug_in_the_users_block(
    where: str, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 raises inside a block. The user catches it, clears gradients and goes on, as with plain PyTorch."""
    pair = wrapped(update)
    pair.assert_equal(*pair.step())
    error = UsersBug()
    layer = pair.model.layers[2].mlp[0]
    nth = 2 if where == "second micro-batch" else 1
    fault = (FaultInBackward if where == "recomputation" else Fault)(layer.forward, nth)
    fault.error = error
    monkeypatch.setattr(layer, "forward", fault)
    with pytest.raises(UsersBug) as caught:
        models.loss_of(pair.model, pair.batch).backward()
    assert caught.value is error
    monkeypatch.undo()
    if where == "recomputation" and update == "in_backward":
        return  # later blocks have been updated already: that is what the promise of one step per backward means
    pair.optimizer.zero_grad()
    for _ in range(3):
        pair.assert_equal(*pair.step())
    assert pair.run.lanes.failure is None
    assert torch.isfinite(pair.step()[0])
    pair.close()
