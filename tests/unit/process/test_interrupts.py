"""Signals are noted inside a section, and passed on at safe points and at its end, to whoever handles them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from hightide.process import interrupts
from hightide.process.interrupts import Hold, deferred, in_a_line, is_interrupt, safe_point, uninterrupted

pytestmark = pytest.mark.timeout(20)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs without it
    yield
    assert interrupts._now.depth == interrupts._now.num_held == 0 and not interrupts._now.noted
    for number, handler in before.items():
        signal.signal(number, handler)


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def is_default() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_waits_for_the_end() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), deferred:
        ctrl_c()
        done = True
    assert done and is_default()


def test_it_waits_for_a_safe_point() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), deferred, deferred:
        safe_point()
        ctrl_c()
        done.append(1)
        safe_point()
        done.append(2)
    assert done == [1] and is_default()


@pytest.mark.parametrize("inner", [uninterrupted, deferred])
def test_what_is_held_has_no_safe_points(inner: object) -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), deferred, uninterrupted, inner:  # type: ignore[attr-defined]
        ctrl_c()
        safe_point()
        done = True
    assert done and is_default()


def test_inside_of_another_section_the_end_of_a_held_one_does_not_raise() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), deferred:
        with uninterrupted:
            ctrl_c()
        done = True
        safe_point()
        raise AssertionError
    assert done


def test_another_exception_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, deferred:
        ctrl_c()
        raise ZeroDivisionError
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_it_is_raised_once() -> None:
    with pytest.raises(KeyboardInterrupt), deferred:
        ctrl_c()
        ctrl_c()
    with deferred:
        safe_point()


def test_a_handler_that_only_takes_note_is_called_as_often() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    with deferred:
        ctrl_c()
        ctrl_c()
        assert not calls
        safe_point()
        assert calls == [signal.SIGINT] * 2
        ctrl_c()
    assert len(calls) == 3


def test_a_handler_that_raises_something_else() -> None:
    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    signal.signal(signal.SIGINT, stop)
    with pytest.raises(Stop) as caught, deferred:
        ctrl_c()
    assert is_interrupt(caught.value) and not is_interrupt(Stop()) and signal.getsignal(signal.SIGINT) is stop
    with pytest.raises(Stop):  # an interrupt is no finding
        in_a_line(caught.value)
    assert in_a_line(ValueError("too wide\nand long")) == "ValueError: too wide" and in_a_line(Stop()) == "Stop: "


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_ignored_or_ends_the_process_stays_so(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    with deferred, uninterrupted:
        assert signal.getsignal(signal.SIGINT) is handler
        safe_point()
    assert signal.getsignal(signal.SIGINT) is handler


def test_sigterm_waits_where_somebody_handles_it() -> None:
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(SystemExit(7)))
    done = False
    with pytest.raises(SystemExit), deferred:
        signal.raise_signal(signal.SIGTERM)
        done = True
    assert done


def test_both_come_through() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    with pytest.raises(KeyboardInterrupt), deferred:
        signal.raise_signal(signal.SIGTERM)
        ctrl_c()
    for _ in range(10):
        pass
    assert calls == [signal.SIGTERM]


def test_a_handler_that_was_set_inside_stays() -> None:
    def mine(*_: object) -> None:
        raise AssertionError

    with deferred:
        signal.signal(signal.SIGINT, mine)
    assert signal.getsignal(signal.SIGINT) is mine


def test_handlers_that_call_those_before_them_do_not_go_in_circles() -> None:
    calls: list[str] = []
    with deferred:
        before = signal.getsignal(signal.SIGINT)

        def mine(number: int, frame: object) -> None:
            calls.append("mine")
            before(number, frame)  # type: ignore[operator,arg-type]

        signal.signal(signal.SIGINT, mine)
    with pytest.raises(KeyboardInterrupt), deferred:
        ctrl_c()
    assert calls == ["mine"]
    signal.signal(signal.SIGINT, before)  # as who restores what was there
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


def test_in_another_thread_nothing_happens() -> None:
    seen: list[object] = []

    def work() -> None:
        with deferred, uninterrupted:
            seen.append(signal.getsignal(signal.SIGINT))
            safe_point()

    thread = threading.Thread(target=work)
    with pytest.raises(KeyboardInterrupt), deferred:
        ctrl_c()
        before = interrupts._now.depth
        thread.start()
        thread.join()
        assert interrupts._now.depth == before
    assert len(seen) == 1


def test_whoever_asks_again_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "PATIENCE_S", 0.05)
    with pytest.raises(KeyboardInterrupt), deferred:
        ctrl_c()
        ctrl_c()  # too soon
        time.sleep(0.06)
        ctrl_c()
        raise AssertionError
    with pytest.raises(KeyboardInterrupt), uninterrupted:
        ctrl_c()
        time.sleep(0.06)
        ctrl_c()
        done = True
    assert done


def test_a_hold_ends_somewhere_else_or_when_it_is_over() -> None:
    is_over = False
    hold = Hold(lambda: is_over)
    hold.begin()
    hold.begin()
    ctrl_c()
    safe_point()
    with pytest.raises(KeyboardInterrupt):
        hold.end()
    hold.end()
    hold.begin()  # and its end does not come
    is_over = True
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
    assert is_default()


def test_one_that_comes_while_handlers_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def late(number: int) -> object:
        if number == signal.SIGINT and not asked:
            asked.append(number)
            signal.raise_signal(signal.SIGINT)
        return signal.getsignal(number)

    with pytest.raises(KeyboardInterrupt), interrupts.deferred:
        monkeypatch.setattr(interrupts, "getsignal", late)
    assert asked
