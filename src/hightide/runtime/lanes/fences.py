"""Points in the streams of a GPU, which travel with data in flight."""

from __future__ import annotations

import itertools

import torch

StreamKey = tuple[int, int, int]  # as torch has it: number, device, kind of device
_known: dict[StreamKey, torch.cuda.Stream] = {}


def present_stream(device: torch.device) -> tuple[torch.cuda.Stream, StreamKey | None]:
    """The caller's stream, and its name if it lives as long as the process: torch makes an object for it whenever it is
    asked, which takes longer than to record an event there. None: somebody else's, whose name another may get."""
    if device.index is None:
        return torch.cuda.current_stream(device), None
    key: StreamKey = torch._C._cuda_getCurrentStream(device.index)
    stream = _known.get(key)
    if stream is None:
        stream = torch.cuda.current_stream(device)
        if key[0] and not key[0] & 1:  # an address, as of streams that torch has not made
            return stream, None
        _known[key] = stream
    return stream, key


class EventFence:
    """A point in one CUDA stream."""

    __slots__ = ("_behind", "_device", "_event", "number")
    _numbers = itertools.count()

    def __init__(self, stream: torch.cuda.Stream, name: StreamKey | None = None) -> None:
        """`name`: of the stream, if it has one."""
        self._device = stream.device
        self.number = next(self._numbers)
        self._event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
        self._event.record(stream)
        self._behind: tuple[StreamKey, ...] = () if name is None else (name,)  # streams that need not wait for it again

    def join(self) -> None:
        stream, name = present_stream(self._device)
        if name is None or name not in self._behind:
            self._event.wait(stream)
            if name is not None:
                self._behind += (name,)  # once it waits: another thread may ask meanwhile

    def synchronize(self) -> None:
        with torch.cuda.device(self._device):  # a thread begins with the first GPU, where it needs nothing
            self._event.synchronize()
