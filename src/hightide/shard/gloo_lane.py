"""Collectives over gloo, as exchanges of bytes between all ranks.

[Note: sums over gloo] Each rank sends each other one its part, and adds what it gets in the order of ranks: the sum of
an element does not depend on how a buffer is cut, and all plans give the same bits. Everything travels as bytes,
because gloo does not know all dtypes; what lies on a GPU is copied to pinned memory and back by ourselves.

[Note: frames] gloo ends the process when a rank gets more bytes than it expects. So what is sent first is always a
frame of one size. It begins with the collective's name and size, and with a digest of all before it, and has room for
the first of the content. Ranks that come with different ones all see it there, and say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from hightide.process.interrupts import safe_point
from hightide.shard.issued import Issued
from hightide.shard.ranks import Ranks
from hightide.shard.verdicts import difference
from hightide.shard.watchman import RankFailure, Watchman

FRAME_BYTES = 16 * 1024  # to each rank, first
HEAD_BYTES = 256  # of them
STAGING_BYTES = 8 * 1024**2  # at most for what a lane sends, and as much for what it receives
TILE_ALIGN_BYTES = 512
LOOK = timedelta(seconds=0.1)  # who waits looks this often whether the user wants to interrupt it

Take = Callable[[int, torch.Tensor], None]  # where it begins, and a row from each rank


class GlooLane:
    """Of tensors on one device. The calling thread waits."""

    def __init__(self, ranks: Ranks, lane: str, device: torch.device) -> None:
        assert ranks.watchman is not None
        self._members, self._group = ranks.circle(lane)
        self.lane, self.rank, self.world = lane, self._members.index(ranks.rank), len(self._members)
        self._watchman: Watchman = ranks.watchman
        self._device = device
        self._sent = self._received = torch.empty(0, dtype=torch.uint8)

    # ---- what there is to do

    def gather(self, name: str, whole: torch.Tensor) -> None:
        rows = _bytes(whole).view(self.world, -1)

        def take(start: int, received: torch.Tensor) -> None:
            for rank in range(self.world):
                if rank != self.rank:
                    rows[rank, start : start + received.shape[1]].copy_(received[rank], non_blocking=True)

        self._swap(name, [rows[self.rank]] * self.world, take)

    def reduce(self, name: str, whole: torch.Tensor) -> None:
        rows = _bytes(whole).view(self.world, -1)

        def take(start: int, received: torch.Tensor) -> None:
            total = received[0].view(whole.dtype)
            for row in received[1:]:
                total += row.view(whole.dtype)
            rows[self.rank, start : start + received.shape[1]].copy_(received[0], non_blocking=True)

        self._swap(name, list(rows), take)

    def sum_all(self, name: str, values: torch.Tensor) -> None:
        content = _bytes(values)

        def take(start: int, received: torch.Tensor) -> None:
            total = received[0].view(values.dtype)
            for row in received[1:]:
                total += row.view(values.dtype)
            content[start : start + received.shape[1]].copy_(received[0], non_blocking=True)

        self._swap(name, [content.clone()] * self.world, take)

    def exchange(self, name: str, content: bytes) -> list[bytes]:
        """All of one length."""
        sent = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        pieces: list[list[bytes]] = [[] for _ in range(self.world)]

        def take(start: int, received: torch.Tensor) -> None:
            for row, piece in zip(received, pieces, strict=True):
                piece.append(row.numpy().tobytes())

        self._swap(name, [sent] * self.world, take)
        return [b"".join(piece) for piece in pieces]

    # ---- how

    def _swap(self, name: str, sent: Sequence[torch.Tensor], take: Take) -> None:
        """To each rank its bytes, all of one length; `take` gets those from all ranks, piece by piece."""
        num_bytes = sent[0].numel()
        with self._issued(f"{name}, {num_bytes} bytes") as issued:
            start = self._first(issued, sent, take)
            tile_bytes = STAGING_BYTES // self.world // TILE_ALIGN_BYTES * TILE_ALIGN_BYTES
            while start < num_bytes:
                size = min(tile_bytes, num_bytes - start)
                rows = self._rows(size)
                for row, content in zip(rows, sent, strict=True):
                    row.copy_(content[start : start + size], non_blocking=True)
                take(start, self._send(size))
                self._finish_copies()
                start += size

    def _first(self, issued: Issued, sent: Sequence[torch.Tensor], take: Take) -> int:
        """See [Note: frames]."""
        size = min(FRAME_BYTES - HEAD_BYTES, sent[0].numel())
        head = f"{issued.digest} {issued.name}".encode()[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0")
        rows = self._rows(FRAME_BYTES)
        rows[:, :HEAD_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for row, content in zip(rows, sent, strict=True):
            row[HEAD_BYTES : HEAD_BYTES + size].copy_(content[:size], non_blocking=True)
        received = self._send(FRAME_BYTES)
        heads = [bytes(row[:HEAD_BYTES].numpy()) for row in received]
        if any(other != head for other in heads):
            names = [other.rstrip(b"\0").decode(errors="replace").partition(" ")[2] for other in heads]
            raise self._watchman.differ(difference(self.lane, issued.number, names, self._members))
        if size:
            take(0, received[:, HEAD_BYTES : HEAD_BYTES + size])
            self._finish_copies()
        return size

    @contextmanager
    def _issued(self, name: str) -> Iterator[Issued]:
        issued = self._watchman.issue(self.lane, name)
        try:
            yield issued
        except RankFailure:
            raise
        except RuntimeError as error:
            raise self._watchman.explain(issued, error) from error
        except BaseException as error:  # an interrupt: the others wait for what will not come
            self._watchman.fail(error)
            raise
        self._watchman.through(issued)

    def _rows(self, size: int) -> torch.Tensor:
        """Where to put what is sent."""
        if self._sent.numel() < self.world * size:
            is_pinned = self._device.type == "cuda"
            with torch.cuda.device(self._device) if is_pinned else nullcontext():  # else each rank is on the first GPU
                self._sent, self._received = (
                    torch.empty(self.world * size, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2)
                )
        return self._sent[: self.world * size].view(self.world, size)

    def _send(self, size: int) -> torch.Tensor:
        self._finish_copies()
        received = self._received[: self.world * size]
        work = dist.all_to_all_single(received, self._sent[: self.world * size], group=self._group, async_op=True)
        while not work.is_completed():
            try:
                work.wait(LOOK)
            except RuntimeError:  # not yet, or it has failed: then it is completed
                safe_point()
        work.wait()
        return received.view(self.world, size)

    def _finish_copies(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.is_contiguous() and tensor.dim() == 1, tensor.shape
    return tensor.view(torch.uint8)
