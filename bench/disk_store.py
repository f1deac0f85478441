"""The disk store's own speed, with and without sums, by turns: `bench/disk_store.py FOLDER`. Reads and writes run at
the same time, as in a step: arrays of one half of the regions are read while those of the other are written."""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque

import torch

from hightide.ir.limits import DiskLimit
from hightide.stores.disk import DiskStore
from hightide.stores.host_arena import HostArena
from hightide.stores.store import Region
from hightide.stores.ticket import Ticket

AHEAD = 2  # arrays under way each way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--array-mib", type=int, default=128)
    parser.add_argument("--arrays", type=int, default=16)
    parser.add_argument("--request-mib", type=int, default=16)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn")
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    array_bytes = options.array_mib << 20
    host = HostArena(4 * AHEAD * array_bytes)
    buffers = [host.view(host.allocate(array_bytes, "buffer"), torch.uint8) for _ in range(2 * AHEAD)]
    for buffer in buffers:
        buffer.random_()
    found: dict[bool, list[float]] = {True: [], False: []}
    stores = {}
    for are_checked in found:
        limit = DiskLimit(options.folder, options.arrays * array_bytes)
        store = DiskStore(
            [limit], request_bytes=options.request_mib << 20, depth=options.depth, are_checked=are_checked
        )
        regions = [store.allocate(array_bytes, f"array {index}") for index in range(options.arrays)]
        for region in regions:
            store.write(region, buffers[0]).wait()  # blocks that were never written are not read from the disk
        stores[are_checked] = store, regions
    for turn in range(options.turns):
        for are_checked in (True, False) if turn % 2 else (False, True):
            rate = measure(*stores[are_checked], buffers, options.seconds)
            found[are_checked].append(rate)
            print(f"{'with' if are_checked else 'without'} sums: {rate / 1e9:.3f} GB/s read and written")
    with_sums, without = (statistics.median(found[one]) for one in (True, False))
    is_direct = all(store.is_direct for store, _ in stores.values())
    print(f"direct: {is_direct}; medians {with_sums / 1e9:.3f} and {without / 1e9:.3f}: {with_sums / without:.3f}")
    for store, _ in stores.values():
        store.close()


def measure(store: DiskStore, regions: list[Region], buffers: list[torch.Tensor], seconds: float) -> float:
    """Bytes per second that were read and written."""
    half = len(regions) // 2
    ways = [(store.read, regions[:half], buffers[:AHEAD]), (store.write, regions[half:], buffers[AHEAD:])]
    under_way: list[deque[Ticket]] = [deque(), deque()]
    counts = [0, 0]
    before, start_s = store.traffic, time.perf_counter()
    while time.perf_counter() < start_s + seconds:
        for index, (move, those, memory) in enumerate(ways):
            while len(under_way[index]) < AHEAD or under_way[index][0].done:
                if len(under_way[index]) == AHEAD:
                    under_way[index].popleft().wait()
                number = counts[index]
                under_way[index].append(move(those[number % half], memory[number % AHEAD]))
                counts[index] += 1
        time.sleep(0.0005)
    for tickets in under_way:
        for ticket in tickets:
            ticket.wait()
    moved, took_s = store.traffic, time.perf_counter() - start_s
    moved_bytes = moved.read_bytes + moved.written_bytes - before.read_bytes - before.written_bytes
    return moved_bytes / took_s


if __name__ == "__main__":
    main()
