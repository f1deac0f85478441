"""The first signal asks, the second Ctrl-C ends at once."""

from __future__ import annotations

import signal
import threading

import pytest

from hightide.cli.train.stop_request import stop_request


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_request() as stop_signal:
        assert stop_signal() is None
        signal.raise_signal(number)
        assert stop_signal() is number
    assert stop_signal() is number
    assert signal.getsignal(number) is before


def test_the_second_ctrl_c_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), stop_request():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_a_ctrl_c_that_torchrun_hands_on_is_no_second_one() -> None:
    with stop_request(echo_s=60.0) as stop_signal:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stop_signal() is signal.SIGINT


def test_sigterm_asks_however_often_it_comes_and_the_first_signal_is_told() -> None:
    """Who ends a job sends it to the process, to its group, and after the terminal's Ctrl-C."""
    with stop_request() as stop_signal:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert stop_signal() is signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_in_another_thread_nothing_is_asked_for() -> None:
    found: list[object] = []

    def work() -> None:
        with stop_request() as stop_signal:
            found.append(stop_signal())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None]
