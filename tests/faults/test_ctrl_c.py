"""Ctrl-C anywhere in hightide: it is raised soon, nothing of the user's is left changed, and training goes on with the
values of plain PyTorch. Random moments are bench/interrupts.py's; here they are calls of Python functions, counted."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import hightide
import hightide.profiler.model.model_profile
import hightide.wrapping
import models
from hightide.process import interrupts
from hightide.profiler.model.model_profile import profile_calls
from hightide.runtime.surgery import run_of

PATH = Path(__file__).resolve().parents[2] / "bench" / "interrupts.py"
PLACES = (
    "backward", "forward", "step", "zero_grad", "clip", "evaluation", "state_dict", "load", "unwrap", "move"
)  # fmt: skip
pytestmark = pytest.mark.timeout(120)


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("interrupting", PATH)
    assert spec is not None and spec.loader is not None
    module = sys.modules["interrupting"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = loaded()


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def profiled_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hightide.profiler.model.model_profile, hightide.wrapping):
        monkeypatch.setattr(module, "profile_calls", profile_calls)


class AtCall:
    """Sends SIGINT when a share of the calls of Python functions have been made that there are in the whole."""

    def __init__(self) -> None:
        self.share: float | None = None
        self._num_calls = 0

    def __call__(self, name: str, work: Callable[[], Any]) -> bool:
        number, at = 0, None if self.share is None else int(self.share * self._num_calls)

        def see(_frame: Any, event: str, _argument: Any) -> None:
            nonlocal number
            if event == "call":
                number += 1
                if number == at:
                    signal.raise_signal(signal.SIGINT)

        try:
            sys.setprofile(see)
            try:
                work()
            finally:
                sys.setprofile(None)
        except KeyboardInterrupt:
            return True
        if self.share is None:
            self._num_calls = number
        return False


def shares(num: int) -> list[float]:
    return [(index + 0.5) / num for index in range(num)]


def interrupt_everywhere(where: str, update: str, num: int) -> None:
    subject, at_call = bench.Subject(update), AtCall()
    subject.check()
    num_caught = 0
    for share in (None, *shares(num)):
        at_call.share = share
        num_caught += bench.TRAINED[where](subject, at_call)
        subject.check()
    assert num_caught >= 0.8 * num, f"{num_caught} of {num} interrupts were raised"
    hightide.unwrap(subject.model)


@pytest.mark.parametrize("where", PLACES)
def test_training_goes_on(where: str) -> None:
    interrupt_everywhere(where, "deferred", 4 if where == "unwrap" else 8)


@pytest.mark.parametrize("where", ["backward", "step"])
def test_training_goes_on_with_updates_in_backward(where: str) -> None:
    """A backward is then a whole step: it is done to its end, as on a GPU."""
    interrupt_everywhere(where, "in_backward", 8)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", PLACES)
def test_training_goes_on_long(where: str) -> None:
    interrupt_everywhere(where, "deferred", 20 if where == "unwrap" else 150)


def wraps_interrupted(call: str, num: int) -> None:
    at_call = AtCall()
    for _ in range(2):  # counted; the first one does what is done once
        bench.in_wrap(1, at_call, call)
    num_caught = 0
    for number, share in enumerate(shares(num)):
        at_call.share = share
        num_caught += bench.in_wrap(4 * number + (number % 3 > 0), at_call, call)
    assert num_caught >= 0.8 * num


@pytest.mark.parametrize("call", ["wrap", "plan"])
def test_an_interrupted_wrap_leaves_nothing(call: str, profiled_each_time: None) -> None:
    wraps_interrupted(call, 5)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_interrupted_wrap_leaves_nothing_long(profiled_each_time: None) -> None:
    wraps_interrupted("wrap", 100)


def test_values_move_back_from_wherever_wrap_has_taken_them() -> None:
    """The profile is known here, so that most calls are those of the way in."""
    wraps_interrupted("wrap", 12)


def test_at_random_moments(capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--where", "backward", "wrap", "--count", "3", "--seed", "5"]) == 0, capfd.readouterr()


# -- models without values ---------------------------------------------------------------------------------------------


class Initialised(nn.Linear):
    interrupts_at: int | None = None
    num_calls = 0

    def reset_parameters(self) -> None:
        type(self).num_calls += 1
        if self.num_calls == self.interrupts_at:
            signal.raise_signal(signal.SIGINT)
        super().reset_parameters()


def test_a_model_on_the_meta_device_has_no_values_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(device: str) -> nn.Module:
        with torch.device(device):
            return nn.Sequential(*(Initialised(16, 16) for _ in range(4)))

    torch.manual_seed(3)
    plain = made("cpu")
    x = torch.randn(4, 16)
    model = made("meta")
    params = list(model.parameters())
    optimizer = bench.adamw(model)
    limits = hightide.Limits(gpu="1MiB", host="8MiB")
    monkeypatch.setattr(Initialised, "num_calls", 0)
    monkeypatch.setattr(Initialised, "interrupts_at", 3)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        hightide.wrap(model, optimizer, x, limits=limits)
    assert all(param.is_meta for param in model.parameters())
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert torch.equal(before, torch.get_rng_state())
    monkeypatch.setattr(Initialised, "interrupts_at", None)
    model, _ = hightide.wrap(model, optimizer, x, limits=limits)
    bench.compare_values(model, plain)
    hightide.unwrap(model)


def test_states_in_other_dtypes_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = models.hand_written(num_layers=2)
    model.bfloat16()
    batch = {name: value.bfloat16() if value.is_floating_point() else value for name, value in batch.items()}
    optimizer = bench.adamw(model)
    models.loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(hightide.wrapping, "wrap_modules", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hightide.wrap(model, optimizer, batch, limits=hightide.Limits(gpu="1MiB", host="8MiB"))
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
    assert not optimizer._optimizer_step_pre_hooks
    models.loss_of(model, batch).backward()
    optimizer.step()


def test_a_wrap_that_fails_is_undone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = bench.Fresh(1)
    monkeypatch.setattr(hightide.wrapping, "wrap_modules", lambda _: 1 / 0)
    options = {"limits": hightide.Limits(gpu="100KiB", host="64MiB"), "micro_batch": 2}
    with pytest.raises(ZeroDivisionError):
        hightide.wrap(fresh.model, fresh.optimizer, fresh.x, **options)
    monkeypatch.undo()
    fresh.check(options, again=True)


# -- how soon, and what else a handler may do --------------------------------------------------------------------------


def after(seconds: float) -> threading.Timer:
    """A real signal, from outside of the main thread."""
    timer = threading.Timer(seconds, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    timer.start()
    return timer


def test_waiting_for_a_lane_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = bench.Subject("deferred")
    run = run_of(subject.model)
    assert run is not None
    go_on, copy_home = threading.Event(), run.performer._copy_home_to_gpu

    def slow(*args: Any) -> int:
        go_on.wait(30)
        return copy_home(*args)

    monkeypatch.setattr(run.performer, "_copy_home_to_gpu", slow)
    began_s = time.monotonic()
    after(0.3)
    with pytest.raises(KeyboardInterrupt):
        subject.model(subject.x)
    assert time.monotonic() - began_s < 5
    go_on.set()
    subject.check()
    hightide.unwrap(subject.model)


def test_a_block_that_never_ends_is_interrupted_by_asking_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "PATIENCE_S", 0.3)
    subject = bench.Subject("deferred")

    def endless(x: torch.Tensor) -> torch.Tensor:
        for number in itertools.count():  # signals of a busy machine may come late, and two of them as one
            if number % 50 == 0:
                signal.raise_signal(signal.SIGINT)
            time.sleep(0.01)
        raise AssertionError

    monkeypatch.setattr(subject.model.blocks[2].wide, "forward", endless)
    with pytest.raises(KeyboardInterrupt):
        subject.model(subject.x)
    monkeypatch.undo()
    subject.check()
    hightide.unwrap(subject.model)


class OutOfTime(Exception):
    pass


def test_a_handlers_own_exception_is_no_finding_of_a_trial(profiled_each_time: None) -> None:
    """Whatever a block raises when it is tried is a reason not to split it; but not what a handler raises."""

    def stop(*_: object) -> None:
        raise OutOfTime

    fresh = bench.Fresh(1)
    narrow = fresh.model.blocks[0].narrow
    forward, num_calls = narrow.forward, 0

    def counted(x: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == at:
            signal.raise_signal(signal.SIGINT)
        return forward(x)

    options = {"limits": hightide.Limits(gpu="1MiB", host="8MiB")}
    at, narrow.forward = 0, counted
    hightide.plan(fresh.model, fresh.optimizer, fresh.x, **options)
    num_in_all = num_calls
    assert num_in_all > 10
    signal.signal(signal.SIGINT, stop)
    for number in range(1, num_in_all + 1, num_in_all // 6):
        num_calls, at = 0, number
        with pytest.raises(OutOfTime):
            hightide.plan(fresh.model, fresh.optimizer, fresh.x, **options)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    del narrow.forward
    fresh.check(options, again=True)


def test_a_handler_that_asks_for_an_end_changes_nothing() -> None:
    """As those of trainers that save and stop: it is called, and the step goes on."""
    asked: list[int] = []
    subject = bench.Subject("deferred")
    signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    timers = [after(0.001 * number) for number in range(5)]
    subject.check()
    for timer in timers:
        timer.join()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert len(asked) >= 1
    hightide.unwrap(subject.model)


def test_all_of_it_works_in_another_thread() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            subject = bench.Subject("deferred")
            subject.check()
            subject.rewrap()
            hightide.unwrap(subject.model)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and not errors


def test_backward_in_another_thread_is_not_interrupted() -> None:
    """As on a GPU: the thread that waits is, and the pass comes to its end."""
    subject = bench.Subject("deferred")
    for delay_s in (0.0, 0.002, 0.005):
        loss, done = subject.model(subject.x), threading.Event()

        def backward(loss: torch.Tensor = loss, done: threading.Event = done) -> None:
            loss.backward()
            done.set()

        thread = threading.Thread(target=backward)
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            after(delay_s)
            time.sleep(30)
        assert done.wait(30)
        subject.optimizer.zero_grad()
        subject.check()
    hightide.unwrap(subject.model)


def test_hooks_that_watch_a_first_call_do_not_stay() -> None:
    """Also after an ordinary exception."""
    subject = bench.Subject("deferred")
    block = subject.model.blocks[1]
    seen: list[int] = []

    def hook(*_: object) -> None:
        seen.append(1)
        raise OutOfTime

    handle = block.wide.register_forward_hook(hook)
    with pytest.raises(OutOfTime):
        subject.model(subject.x)
    assert len(block.wide._forward_hooks) == 1 and not block.wide._forward_pre_hooks
    handle.remove()
    subject.optimizer.zero_grad()
    subject.check()
    hightide.unwrap(subject.model)
