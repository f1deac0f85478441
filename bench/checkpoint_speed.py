"""How fast a checkpoint is written, beside what the machine allows: copies, sums, writes and syncs, each alone.

    python bench/checkpoint_speed.py --folder /scratch/new-folder --parameters 1e8 --rounds 5

A stack of layers, states on the host of a wrapped model, is saved with nothing beside it, and again while another
thread runs Python all the time, as a training loop does: who waits for Python's lock waits for its switch interval.
Rounds alternate between all rows, and medians are told. The folder must not be there: it is made, and removed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import shutil
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

import hightide
from hightide.stores.disk_file import PageBuffer

BLOCK_BYTES = 16 * 1024**2
NUM_THREADS = 4
WIDTH = 2048


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk that is meant; must not be there")
    parser.add_argument("--parameters", type=float, default=1e8, help="a checkpoint has 12 bytes for each")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


@contextmanager
def busy_python() -> Iterator[None]:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Floors:
    """Each part of a save alone, on as many bytes, block by block."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._folder, self._count = folder, max(NUM_THREADS, num_bytes // BLOCK_BYTES)
        self._blocks = [PageBuffer(BLOCK_BYTES) for _ in range(4 * NUM_THREADS)]
        for block in self._blocks:
            block.memory[:] = os.urandom(BLOCK_BYTES)
        self.num_bytes = self._count * BLOCK_BYTES

    def _of(self, number: int) -> PageBuffer:
        return self._blocks[number % len(self._blocks)]

    def copies(self) -> None:
        target = self._blocks[0].address
        for number in range(self._count):
            ctypes.memmove(target, self._of(number + 1).address, BLOCK_BYTES)

    def sums(self, num_threads: int = 1) -> None:
        self._shared(num_threads, lambda number: zlib.crc32(self._of(number).memory))

    def writes(self, num_threads: int) -> None:
        path = self._folder / "written"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_DIRECT", 0))
        try:
            os.posix_fallocate(descriptor, 0, self.num_bytes)
            self._shared(
                num_threads, lambda number: os.pwrite(descriptor, self._of(number).memory, number * BLOCK_BYTES)
            )
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            path.unlink()

    def _shared(self, num_threads: int, work: Callable[[int], object]) -> None:
        def some(first: int) -> None:
            for number in range(first, self._count, num_threads):
                work(number)

        threads = [threading.Thread(target=some, args=(first,)) for first in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def wrapped(num_parameters: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    layers = max(2, round(num_parameters / WIDTH**2))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    batch = torch.randn(1, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    host_bytes = 16 * layers * WIDTH**2 + 2**30
    limits = hightide.Limits(gpu=8 * 4 * WIDTH**2, host=host_bytes)
    model, optimizer = hightide.wrap(model, optimizer, batch, limits=limits, device="cpu")
    model(batch).sum().backward()
    optimizer.step()
    return model, optimizer


def main() -> None:
    options = parse()
    options.folder.mkdir(parents=True)  # fails if it is there
    try:
        measure(options)
    finally:
        shutil.rmtree(options.folder)


def measure(options: argparse.Namespace) -> None:
    model, optimizer = wrapped(options.parameters)
    saves = options.folder / "checkpoints"
    num_bytes = hightide.save(model, optimizer, saves, step=0, wait=True).num_bytes
    floors = Floors(options.folder, num_bytes)

    def save() -> None:
        hightide.save(model, optimizer, saves, step=1, wait=True)
        shutil.rmtree(saves / "step-1")

    def save_beside_python() -> None:
        with busy_python():
            save()

    rows: dict[str, tuple[int, Callable[[], object]]] = {
        "copies, one thread": (floors.num_bytes, floors.copies),
        "CRC-32, one thread": (floors.num_bytes, floors.sums),
        f"CRC-32, {NUM_THREADS} threads": (floors.num_bytes, lambda: floors.sums(NUM_THREADS)),
        "writes past the cache and sync, one thread": (floors.num_bytes, lambda: floors.writes(1)),
        f"writes past the cache and sync, {NUM_THREADS} threads": (
            floors.num_bytes,
            lambda: floors.writes(NUM_THREADS),
        ),
        "hightide.save": (num_bytes, save),
        "hightide.save beside busy Python": (num_bytes, save_beside_python),
    }
    speeds: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(options.rounds):
        for name, (its_bytes, work) in rows.items():
            began_s = time.perf_counter()
            work()
            speeds[name].append(its_bytes / 1e9 / (time.perf_counter() - began_s))
    load = os.getloadavg()[0]
    print(f"{num_bytes / 1e9:.2f} GB, {os.cpu_count()} cores ({platform.machine()}), load {load:.1f}; GB/s")
    for name, found in speeds.items():
        print(f"{name:<52} {statistics.median(found):6.2f}   ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
