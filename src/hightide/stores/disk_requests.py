"""Reads or writes of one file, cut into pieces that a few threads work on.

[Note: a hanging request] A system call on a disk cannot be called off. When one has not returned in time its ticket,
and those of all that wait behind it, fail with a TimeoutError that says where it is; the disk takes nothing more,
because that call may still change its memory or its place on the disk. Its thread is left alone: it keeps tensor and
file alive, and nobody waits for it, at exit neither.

[Note: parts of a sector] What does not fill its sectors, or lies in memory that is not aligned as the disk asks for,
passes through a buffer of the thread. Neighbours in one sector may be read and written at the same time: whoever needs
a part of a sector holds the lock of such parts for as long as it works on it.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from hightide.stores.disk_file import SECTOR_BYTES, DiskFile, PageBuffer
from hightide.stores.disk_sums import SectorSums
from hightide.stores.ticket import Ticket

LOOKS = 8  # a piece that was seen so often is given up: a process that was stopped meanwhile has not looked
BUFFER_BYTES = 4 << 20  # of a thread


class ChangedBytes(OSError):
    """The disk has returned other bytes than were written."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that users asked for, and that system calls moved."""

    asked_read_bytes: int = 0
    asked_written_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))


class Request:
    """A read or write of part of a region. It is through when each of its pieces is, or when one hangs."""

    def __init__(
        self,
        label: str,
        file: DiskFile,
        is_write: bool,
        start: int,
        num_bytes: int,
        region_stop: int,
        address: int,
        keeps: object,
    ) -> None:
        """`start`: in the file. `region_stop`: what follows in its sector is nobody's. `keeps`: what the memory at
        `address` belongs to."""
        self.label, self.start, self.num_bytes, self.address = label, start, num_bytes, address
        self.region_stop = region_stop
        self._keeps = keeps
        way = "write of" if is_write else "read of"
        self.name = f"{way} {label!r}, {num_bytes} bytes at {start} of {file}"
        self.ticket = Ticket(self.name)
        # The rest belongs to the queue's lock.
        self.error: BaseException | None = None  # the first. Pieces that have not begun are left out
        self.num_left = 0  # pieces
        self.is_over = False  # somebody completes the ticket, or has done so

    def pieces(self, request_bytes: int) -> Iterator[RequestPiece]:
        """Of about the same size, cut at sectors. Where memory is aligned, sectors of which only a part is meant are
        pieces by themselves, so that all others go straight."""
        start, stop = self.start, self.start + self.num_bytes
        if (self.address - start) % SECTOR_BYTES == 0:
            first, last, most_bytes = up(start), down(stop), request_bytes
        else:
            first, last, most_bytes = down(start), up(stop), min(request_bytes, BUFFER_BYTES)
        cuts = {start, stop}
        if first < last:
            num_pieces = -(-(last - first) // most_bytes)
            cuts |= {last, *range(first, last, up(-(-(last - first) // num_pieces)))}
        inside = sorted(cut for cut in cuts if start <= cut <= stop)
        for begin, end in pairwise(inside):
            yield RequestPiece(self, begin, end, self.address + begin - start)


@dataclass(frozen=True)
class RequestPiece:
    request: Request
    start: int
    stop: int
    address: int

    @property
    def fills_sectors(self) -> bool:
        return self.start % SECTOR_BYTES == self.stop % SECTOR_BYTES == 0

    @property
    def is_straight(self) -> bool:
        return self.fills_sectors and self.address % SECTOR_BYTES == 0


class Sectors:
    """A file and what was written to it. The threads of both of its queues use it."""

    def __init__(self, file: DiskFile, are_checked: bool) -> None:
        self.file = file
        self.parts = threading.Lock()  # see [Note: parts of a sector]
        self._sums = SectorSums(file.num_bytes) if are_checked else None
        self._lock = threading.Lock()
        self._traffic = Traffic()

    def read(self, label: str, offset: int, num_bytes: int, address: int) -> None:
        moved_bytes = self.file.transfer(address, offset, num_bytes, is_write=False)
        self.count(Traffic(read_bytes=moved_bytes))
        changed = None if self._sums is None else self._sums.first_difference(offset, address, num_bytes)
        if changed is not None:
            raise ChangedBytes(
                f"{label!r}: the {SECTOR_BYTES} bytes at {changed} of {self.file} are not what was written there. "
                "Somebody else has changed them, the disk has, or an earlier write failed: look at the system's log "
                "before you use this disk again, and go on from the last checkpoint"
            )

    def write(self, offset: int, num_bytes: int, address: int) -> None:
        if self._sums is not None:
            self._sums.note(offset, address, num_bytes)
        self.count(Traffic(written_bytes=self.file.transfer(address, offset, num_bytes, is_write=True)))

    def spoil(self, piece: RequestPiece) -> None:
        """Of a write that did not come to its end."""
        if self._sums is not None:
            self._sums.spoil(down(piece.start), up(piece.stop) - down(piece.start))

    def count(self, more: Traffic) -> None:
        with self._lock:
            self._traffic += more

    @property
    def traffic(self) -> Traffic:
        return self._traffic

    def read_piece(self, piece: RequestPiece, buffer: PageBuffer) -> None:
        begin, num_bytes = down(piece.start), up(piece.stop) - down(piece.start)
        self.read(piece.request.label, begin, num_bytes, buffer.address)
        ctypes.memmove(piece.address, buffer.address + piece.start - begin, piece.stop - piece.start)

    def write_piece(self, piece: RequestPiece, buffer: PageBuffer) -> None:
        begin, num_bytes = down(piece.start), up(piece.stop) - down(piece.start)
        last = num_bytes - SECTOR_BYTES
        if piece.start > begin:
            self.read(piece.request.label, begin, SECTOR_BYTES, buffer.address)
        is_alone = piece.stop % SECTOR_BYTES == 0 or piece.stop == piece.request.region_stop
        if not is_alone and (last or piece.start == begin):
            self.read(piece.request.label, begin + last, SECTOR_BYTES, buffer.address + last)
        ctypes.memmove(buffer.address + piece.start - begin, piece.address, piece.stop - piece.start)
        self.write(begin, num_bytes, buffer.address)

    def move(self, piece: RequestPiece, is_write: bool, buffer: PageBuffer | None) -> None:
        if piece.is_straight:
            num_bytes = piece.stop - piece.start
            if is_write:
                self.write(piece.start, num_bytes, piece.address)
            else:
                self.read(piece.request.label, piece.start, num_bytes, piece.address)
            return
        assert buffer is not None
        through_buffer = self.write_piece if is_write else self.read_piece
        if piece.fills_sectors:
            through_buffer(piece, buffer)
            return
        with self.parts:
            through_buffer(piece, buffer)


class Requests:
    """One direction of one file. Requests begin in the order in which they come."""

    def __init__(self, sectors: Sectors, is_write: bool, request_bytes: int, timeout_s: float) -> None:
        self.sectors, self.is_write = sectors, is_write
        self._request_bytes, self._timeout_s = request_bytes, timeout_s
        # Re-entrant: the garbage collector may end a store in any of its threads.
        self._lock = threading.Condition(threading.RLock())
        self._queue: deque[RequestPiece] = deque()
        self._running: dict[int, RequestPiece] = {}  # by thread
        self._looks: dict[int, int] = {}  # at each of them
        self._refusal: BaseException | None = None  # of all that comes

    # ---- for the store

    def submit(self, request: Request) -> None:
        pieces = list(request.pieces(self._request_bytes))
        request.num_left = len(pieces)
        with self._lock:
            refusal = self._refusal
            if refusal is None:
                self._queue.extend(pieces)
                self._lock.notify(len(pieces))
        if refusal is not None:
            request.ticket.set_error(refusal)
            return
        asked = "asked_written_bytes" if self.is_write else "asked_read_bytes"
        self.sectors.count(Traffic(**{asked: request.num_bytes}))

    def look(self) -> TimeoutError | None:
        """LOOKS times in `timeout_s`. See [Note: a hanging request]."""
        with self._lock:
            self._looks = {number: self._looks.get(number, 0) + 1 for number in self._running}
            hanging = [self._running[number] for number in self._looks if self.hangs(number)]
        if not hanging:
            return None
        piece = hanging[0]
        where = f"{piece.stop - piece.start} of them at {piece.start}"
        return TimeoutError(f"{piece.request.name}: {where} were not moved after {self._timeout_s:g} s")

    def hangs(self, number: int) -> bool:
        """One of its threads."""
        return self._looks.get(number, 0) > LOOKS

    def refuse(self, error: BaseException, running_too: bool = False) -> None:
        """All that comes, and what waits."""
        with self._lock:
            self._refusal = self._refusal or error
            given_up = {piece.request for piece in self._queue}
            for piece in self._queue:
                piece.request.num_left -= 1
            self._queue.clear()
            if running_too:
                given_up |= {piece.request for piece in self._running.values()}
            for request in given_up:
                request.error = request.error or error
            over = [one for one in given_up if not one.is_over and (running_too or not one.num_left)]
            for request in over:
                request.is_over = True
            self._lock.notify_all()
        for request in over:
            request.ticket.set_error(request.error or error)

    # ---- for its threads

    def work(self, number: int) -> None:
        """The life of a thread, which ends when everything is refused."""
        buffer: PageBuffer | None = None
        while (piece := self._take(number)) is not None:
            error: BaseException | None = None
            try:
                if piece.request.error is not None:
                    self._leave_out(piece)
                else:
                    if buffer is None and not piece.is_straight:
                        buffer = PageBuffer(BUFFER_BYTES)
                    self.sectors.move(piece, self.is_write, buffer)
            except BaseException as raised:  # whatever it is, it belongs to whoever waits
                error = raised
                self._leave_out(piece)
            self._end(number, piece.request, error)
            del piece, error  # an idle thread must not keep anybody's tensors alive

    def _leave_out(self, piece: RequestPiece) -> None:
        if self.is_write:
            self.sectors.spoil(piece)

    def _take(self, number: int) -> RequestPiece | None:
        with self._lock:
            while not self._queue:
                if self._refusal is not None:
                    return None
                self._lock.wait()
            piece = self._running[number] = self._queue.popleft()
            return piece

    def _end(self, number: int, request: Request, error: BaseException | None) -> None:
        with self._lock:
            del self._running[number]
            self._looks.pop(number, None)
            request.error = request.error or error
            request.num_left -= 1
            if request.num_left or request.is_over:
                return
            request.is_over = True
        if request.error is None:
            request.ticket.set_result()
        else:
            request.ticket.set_error(request.error)


def down(offset: int) -> int:
    return offset // SECTOR_BYTES * SECTOR_BYTES


def up(offset: int) -> int:
    return -(-offset // SECTOR_BYTES) * SECTOR_BYTES
