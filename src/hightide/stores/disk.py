"""The DISK tier: regions in files of the user's folders, moved by threads past the page cache."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from hightide.ir.limits import DiskLimit
from hightide.ir.machine import DISK_DEPTH, DISK_REQUEST_BYTES
from hightide.ir.tier import Tier
from hightide.process.forks import Birthplace
from hightide.stores.disk_file import SECTOR_BYTES, PageBuffer, open_disk_file
from hightide.stores.disk_requests import BUFFER_BYTES, LOOKS, Request, Requests, Sectors, Traffic, down
from hightide.stores.freelist import FreeLists
from hightide.stores.store import OutOfMemory, Region, Store
from hightide.stores.threads import start_threads
from hightide.stores.ticket import DEFAULT_TIMEOUT_S, Ticket

JOIN_TIMEOUT_S = 5.0  # at the end, for requests that are under way


class DiskStore(Store):
    """A file on each disk, set aside in full when the store is made; each region lies on one of them, the emptiest
    that can hold it. `read` and `write` return at once: threads of the store do the work, reads and writes of each disk
    apart, and a ticket is done when its bytes have moved. What overlaps must be waited for first; parts of a region
    that do not overlap may be under way together. What a failed write meant to change cannot be read, and no part of a
    sector in it written, until it was written as a whole.

    CPU tensors that are contiguous, begin at a multiple of 4,096 and go to such an offset are moved straight; what lies
    beyond a whole number of sectors, and all else, passes through small buffers. Tensors that are strided or on a GPU
    are copied by the caller's thread, and their tickets are done when it returns.
    """

    align_bytes = SECTOR_BYTES
    starts_zeroed = True

    def __init__(
        self,
        disks: Sequence[DiskLimit],
        capacity_bytes: int | None = None,
        request_bytes: int = DISK_REQUEST_BYTES,
        depth: int = DISK_DEPTH,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        are_checked: bool = True,
        is_direct: bool = True,
    ) -> None:
        """`disks`: folders, and the size of the file in each. `capacity_bytes`: the most that may be in use, if that is
        less. `depth`: requests of at most `request_bytes` under way, of each kind on each disk. `timeout_s`: for one
        such request. `are_checked`: bytes that are not those that were written are an error. `is_direct`: False goes
        through the page cache, as where the file system cannot otherwise, of which a warning tells.
        """
        sizes = [disk.num_bytes // SECTOR_BYTES * SECTOR_BYTES for disk in disks]
        if request_bytes <= 0 or request_bytes % SECTOR_BYTES or depth <= 0:
            raise ValueError(
                f"request_bytes={request_bytes}, depth={depth}: requests must be a multiple of {SECTOR_BYTES} bytes, "
                "one at least at a time"
            )
        super().__init__(Tier.DISK, min(sum(sizes), sum(sizes) if capacity_bytes is None else capacity_bytes))
        empty = [disk for disk, size in zip(disks, sizes, strict=True) if not size]
        if empty:
            raise ValueError(
                f"{empty[0].num_bytes} bytes on {empty[0].path}: give {SECTOR_BYTES} at least, or leave it out"
            )
        self._free = self._space = FreeLists(sizes)
        self._birthplace = Birthplace()
        self._timeout_s = timeout_s
        self._disks = _open_all(disks, sizes, are_checked, is_direct)
        self._queues = [
            {is_write: Requests(disk, is_write, request_bytes, timeout_s) for is_write in (False, True)}
            for disk in self._disks
        ]
        queues = [queue for pair in self._queues for queue in pair.values()]
        over, begun = threading.Event(), threading.Semaphore(0)
        # Threads hold the queues and never this object, so that a forgotten store is collected and its threads end.
        workers = [_Worker(queue, number, begun) for queue in queues for number in range(depth)]
        watcher = threading.Thread(
            target=_watch, args=(queues, over, timeout_s / LOOKS), name="hightide-disk-watch", daemon=True
        )
        # At exit too: see `_end`.
        self._finalizer = weakref.finalize(self, _end, self._birthplace, workers, watcher, over)
        start_threads(workers, begun)
        watcher.start()

    # ---- bytes

    def read(self, region: Region, into: torch.Tensor, offset_bytes: int = 0) -> Ticket:
        return self._move(region, into, offset_bytes, is_write=False)

    def write(self, region: Region, source: torch.Tensor, offset_bytes: int = 0) -> Ticket:
        return self._move(region, source, offset_bytes, is_write=True)

    def _move(self, region: Region, tensor: torch.Tensor, offset_bytes: int, is_write: bool) -> Ticket:
        self._birthplace.check()
        with self._lock:
            self._check_bounds(region, tensor.dtype, offset_bytes, tensor.numel())
        if not tensor.numel():
            return Ticket.completed(region.label)
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            return self._submit(region, offset_bytes, is_write, tensor.data_ptr(), tensor.nbytes, tensor)
        return self._in_ticket(region.label, partial(self._copy_through, region, offset_bytes, is_write), tensor)

    def _submit(
        self, region: Region, offset_bytes: int, is_write: bool, address: int, num_bytes: int, keeps: object
    ) -> Ticket:
        index, start = self._space.place(region.offset)
        file = self._disks[index].file
        place = (start + offset_bytes, num_bytes, start + region.num_bytes)
        request = Request(region.label, file, is_write, *place, address, keeps)
        self._queues[index][is_write].submit(request)
        return request.ticket

    def _copy_through(self, region: Region, offset_bytes: int, is_write: bool, tensor: torch.Tensor) -> None:
        """In the caller's thread, with one buffer."""
        buffer = PageBuffer(BUFFER_BYTES)
        memory = torch.frombuffer(buffer.memory, dtype=torch.uint8)
        with torch.no_grad():
            for part in _parts(tensor):
                staged = memory[: part.nbytes].view(part.dtype).view(part.shape)
                if is_write:
                    staged.copy_(part)
                moved = self._submit(region, offset_bytes, is_write, buffer.address, part.nbytes, buffer)
                moved.wait(2 * self._timeout_s)  # the queue itself gives up before
                if not is_write:
                    part.copy_(staged)
                offset_bytes += part.nbytes

    # ---- accounts

    @property
    def traffic(self) -> Traffic:
        """Since the store was made."""
        return sum((disk.traffic for disk in self._disks), Traffic())

    @property
    def is_direct(self) -> bool:
        """All its bytes go past the page cache."""
        return all(disk.file.is_direct for disk in self._disks)

    def _out_of_memory(self, num_bytes: int, label: str, largest_free_bytes: int | None = None) -> OutOfMemory:
        left_bytes = self.capacity_bytes - self._used_bytes
        return super()._out_of_memory(num_bytes, label, min(largest_free_bytes or left_bytes, left_bytes))

    def close(self) -> None:
        """Requests that are under way end, those that wait are refused, and the files' space is free again, unless one
        hangs: its file stays until the process ends."""
        if not self._birthplace.is_here:  # its descriptors are closed already, and others' locks may be held for ever
            return
        super().close()
        self._finalizer()


def _open_all(disks: Sequence[DiskLimit], sizes: list[int], are_checked: bool, is_direct: bool) -> list[Sectors]:
    opened: list[Sectors] = []
    try:
        for disk, size in zip(disks, sizes, strict=True):
            file = open_disk_file(Path(disk.path), size, is_direct)
            opened.append(Sectors(file, are_checked))
            if is_direct and not file.is_direct:
                warnings.warn(
                    f"{disk.path}: its file system cannot move bytes past the page cache ({file.refusal}). Training "
                    "works, but slower, and takes memory for the cache; name a folder on a local disk if there is one",
                    stacklevel=4,
                )
    except BaseException:
        for one in opened:
            one.file.close()
        raise
    return opened


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of its elements in their order, each of which fits into a buffer."""
    if tensor.nbytes <= BUFFER_BYTES:
        yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(down(BUFFER_BYTES) // tensor.dtype.itemsize)
    else:
        for row in tensor:
            yield from _parts(row)


class _Worker(threading.Thread):
    def __init__(self, queue: Requests, number: int, begun: threading.Semaphore) -> None:
        super().__init__(name=f"hightide-disk-{'write' if queue.is_write else 'read'}-{number}", daemon=True)
        self.queue, self._number, self._begun = queue, number, begun

    @property
    def hangs(self) -> bool:
        return self.queue.hangs(self._number)

    def run(self) -> None:
        torch.set_num_threads(1)  # several sums are made at the same time already
        self._begun.release()
        self.queue.work(self._number)


def _watch(queues: list[Requests], over: threading.Event, interval_s: float) -> None:
    while not over.wait(interval_s):
        for queue in queues:
            hangs = queue.look()
            if hangs is not None:
                for one in queues:
                    if one.sectors is queue.sectors:
                        one.refuse(hangs, running_too=one is queue)


def _end(birthplace: Birthplace, workers: list[_Worker], watcher: threading.Thread, over: threading.Event) -> None:
    """Joined at exit too: a thread that Python ends in the middle of a torch operation aborts the process. One that
    hangs in a system call is in none: it is not waited for, and its file not closed under it."""
    if not birthplace.is_here:
        return
    closed = RuntimeError(f"the store on {Tier.DISK} was closed before this request began")
    for worker in workers:
        worker.queue.refuse(closed)
    over.set()
    deadline_s = time.monotonic() + JOIN_TIMEOUT_S
    for thread in (watcher, *workers):
        if thread is not threading.current_thread() and not (isinstance(thread, _Worker) and thread.hangs):
            thread.join(max(0.0, deadline_s - time.monotonic()))
    for sectors in {worker.queue.sectors for worker in workers}:
        if not any(worker.is_alive() for worker in workers if worker.queue.sectors is sectors):
            sectors.file.close()
