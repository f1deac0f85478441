"""What is timed on a GPU is timed on the GPU that was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import pytest
import torch

from hightide.rehearsal.rehearse import let_go
from hightide.rehearsal.stopwatch import MOST_LOAD_FACTOR, load_factor, time_laps

SECOND = torch.device("cuda", 1)


class Cuda:
    """As torch.cuda with two GPUs, of which the first is the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 0
        self.seconds: Iterator[float] = repeat(1.0)  # that passes take, one after the other
        self.used: list[tuple[str, int]] = []
        cuda = self

        class Current:
            def __init__(self, device: torch.device) -> None:
                self.device = device

            def __enter__(self) -> None:
                self.before, cuda.current = cuda.current, self.device.index

            def __exit__(self, *_: object) -> None:
                cuda.current = self.before

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: int) -> None:
                cuda.used.append(("record", stream))

            def elapsed_time(self, other: object) -> float:
                return 1e3 * next(cuda.seconds)

        fakes: dict[str, Any] = {
            "device": Current,
            "Event": Event,
            "current_stream": lambda device: device.index,
            "synchronize": lambda device: self.used.append(("synchronize", device.index)),
            "_sleep": lambda cycles: self.used.append(("sleep", self.current)),
            "empty_cache": lambda: self.used.append(("empty_cache", self.current)),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


def test_nothing_is_done_on_the_current_device_where_another_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    laps = time_laps(lambda lap: lap(), SECOND)
    let_go(SECOND)
    assert laps.seconds == (1.0,)
    assert {name for name, _ in cuda.used} == {"sleep", "record", "synchronize", "empty_cache"}
    assert {device for _, device in cuda.used} == {1} and cuda.current == 0


@pytest.mark.parametrize(("later_s", "factor"), [(0.1 * 1.03, 1.03), (0.09, 1.0), (0.5, MOST_LOAD_FACTOR)])
def test_a_load_without_a_pause_is_held_against_what_was_timed(
    monkeypatch: pytest.MonkeyPatch, later_s: float, factor: float
) -> None:
    """Of 15 passes in 1.5 s the last quarter counts: at first the clock is still high."""
    cuda = Cuda(monkeypatch)
    cuda.seconds = chain(repeat(0.1, 5 + 11), repeat(later_s))
    assert load_factor(lambda lap: lap(), SECOND) == pytest.approx(factor)
    assert load_factor(lambda lap: lap(), torch.device("cpu")) == 1.0
