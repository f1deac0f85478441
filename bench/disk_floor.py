"""The best that a folder's disk does when it reads and writes at the same time: `bench/disk_floor.py FOLDER`.

It shares no code with the store. Threads read one half of an unnamed file and write the other, past the page cache,
with requests of three sizes, each for a while after a warm-up; the best row is what a step's bytes are held against.
Ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass

MIB = 1 << 20


@dataclass
class Counted:
    """Bytes of requests that have ended, by way; only while `is_on`."""

    read_bytes: int = 0
    written_bytes: int = 0
    is_on: bool = False
    is_over: bool = False


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--file-gib", type=float, default=16.0, help="more than caches of the disk hold")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each size")
    parser.add_argument("--warmup", type=float, default=3.0, help="seconds before each size that do not count")
    parser.add_argument("--request-mib", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--depth", type=int, default=4, help="threads each way")
    return parser.parse_args(argv)


def main() -> None:
    options = parse(sys.argv[1:])
    whole = max(options.request_mib) * MIB * 2
    file_bytes = max(whole, int(options.file_gib * (1 << 30)) // whole * whole)
    with tempfile.NamedTemporaryFile(dir=options.folder) as file:
        descriptor = os.open(file.name, os.O_RDWR | os.O_DIRECT)
    try:
        os.posix_fallocate(descriptor, 0, file_bytes)
        print(f"{file_bytes / 1e9:.1f} GB in {options.folder}, {options.depth} threads each way")
        fill(descriptor, file_bytes, options.depth)
        print(f"{'request':>10} {'read GB/s':>10} {'write GB/s':>11} {'both GB/s':>10} {'seconds':>8}")
        best = 0.0
        for size in options.request_mib:
            counted, took_s = measure(descriptor, file_bytes, size * MIB, options)
            read, written = (one / took_s / 1e9 for one in (counted.read_bytes, counted.written_bytes))
            best = max(best, read + written)
            print(f"{size:6} MiB {read:10.3f} {written:11.3f} {read + written:10.3f} {took_s:8.1f}", flush=True)
        print(f"best {best:.3f} GB/s")
        print(json.dumps({"best_gb_per_s": best, "file_bytes": file_bytes}), flush=True)
    finally:
        os.close(descriptor)


def fill(descriptor: int, file_bytes: int, num_threads: int) -> None:
    """Blocks that were never written cost no reading."""
    offsets = iter(range(0, file_bytes, 16 * MIB))
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        buffer = noise(16 * MIB)
        try:
            while True:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                num_bytes = min(16 * MIB, file_bytes - offset)
                assert os.pwritev(descriptor, [memoryview(buffer)[:num_bytes]], offset) == num_bytes
        except BaseException as error:
            failures.append(error)

    run([threading.Thread(target=work) for _ in range(num_threads)])
    if failures:
        raise failures[0]


def measure(descriptor: int, file_bytes: int, request_bytes: int, options: argparse.Namespace) -> tuple[Counted, float]:
    counted, lock, failures = Counted(), threading.Lock(), []  # type: ignore[var-annotated]
    places = file_bytes // 2 // request_bytes
    turns = {False: 0, True: 0}

    def work(is_write: bool) -> None:
        buffer = noise(request_bytes)
        begin = file_bytes // 2 if is_write else 0
        move = os.pwritev if is_write else os.preadv
        try:
            while not counted.is_over:
                with lock:
                    place, turns[is_write] = turns[is_write] % places, turns[is_write] + 1
                moved = move(descriptor, [buffer], begin + place * request_bytes)
                assert moved > 0, f"nothing of {request_bytes} bytes moved"
                with lock:
                    if counted.is_on and is_write:
                        counted.written_bytes += moved
                    elif counted.is_on:
                        counted.read_bytes += moved
        except BaseException as error:
            failures.append(error)
            counted.is_over = True

    threads = [threading.Thread(target=work, args=(way,)) for way in (False, True) for _ in range(options.depth)]
    for thread in threads:
        thread.start()
    time.sleep(options.warmup)
    start_s, counted.is_on = time.perf_counter(), True
    while time.perf_counter() < start_s + options.seconds and not counted.is_over:
        time.sleep(0.05)
    with lock:
        counted.is_on = False
        took_s = time.perf_counter() - start_s
    counted.is_over = True
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return counted, took_s


def noise(num_bytes: int) -> mmap.mmap:
    """Some drives compress."""
    buffer = mmap.mmap(-1, num_bytes)
    buffer[:] = os.urandom(num_bytes)
    return buffer


def run(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
