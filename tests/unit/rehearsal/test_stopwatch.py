"""What is timed on a GPU is timed on the GPU that was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hightide.rehearsal.rehearse import let_go
from hightide.rehearsal.stopwatch import time_laps

SECOND = torch.device("cuda", 1)


class Cuda:
    """As torch.cuda with two GPUs, of which the first is the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 0
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
                return 1e3

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
