"""The host's AdamW alone and while both links are busy: G parameters/s and share of the measured DRAM bandwidth.

    python bench/update.py                  all variants; small on a small machine
    python bench/update.py --threads 16 --tiles 256Ki --kernels c --huge-pages

It measures the product's own code: `HostUpdate` on the cpu lane of `Lanes`, whose threads take tiles of one update. `c`
is the compiled kernel, `torch` torch's operations. `fp32` is the update of fp32 arrays; `bf16` takes the gradient in
bf16 and writes the parameter's bf16 copy too. Both move 28 bytes per parameter through DRAM.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from hightide.ir.chunk import ALIGN_NUMEL
from hightide.ir.tier import Lane
from hightide.optim.adam import AdamWHyper, AdamWRule
from hightide.optim.host import HostUpdate
from hightide.optim.operands import Operands
from hightide.runtime.lanes import Lanes

BYTES_PER_PARAM = {"fp32": 28, "bf16": 28}  # 4 read + 3 written fp32; or 2 + 3*4 read and 3*4 + 2 written
STORED_BYTES_PER_PARAM = 20  # master, two moments, fp32 gradient (or its bf16 and the parameter's)
HYPER = AdamWHyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, maximize=False)
RULE = AdamWRule()
KERNELS = ("c", "torch")


@dataclass(frozen=True)
class Variant:
    kind: str  # fp32, bf16
    kernel: str  # c, torch
    num_threads: int
    tile_numel: int


class Arrays:
    """What one update reads and writes. All pages are touched."""

    def __init__(self, numel: int, huge_pages: bool = False) -> None:
        def array(dtype: torch.dtype) -> Tensor:
            return _huge(numel, dtype) if huge_pages else torch.empty(numel, dtype=dtype)

        self.master, self.first, self.second = (array(torch.float32).zero_() for _ in range(3))
        self.grads = {"fp32": array(torch.float32), "bf16": array(torch.bfloat16)}
        self.param = array(torch.bfloat16)
        noise = torch.randn(min(numel, 1 << 20))
        for start in range(0, numel, len(noise)):
            size = min(len(noise), numel - start)
            for target in (self.master, self.param, *self.grads.values()):
                target[start : start + size] = noise[:size]

    def operands(self, kind: str) -> Operands:
        param = self.param if kind == "bf16" else None
        return Operands(self.master, self.grads[kind], (self.first, self.second), param)


def _huge(numel: int, dtype: torch.dtype) -> Tensor:
    memory = mmap.mmap(-1, numel * dtype.itemsize)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


class Updater:
    """Runs whole updates in one variant, as the product does: on the cpu lane, shared by its threads."""

    def __init__(self, arrays: Arrays, variant: Variant) -> None:
        self.operands, self.step = arrays.operands(variant.kind), 10
        self.lanes = Lanes(update_threads=variant.num_threads)
        self.update = HostUpdate(RULE, self.lanes.sharers, variant.kernel, variant.tile_numel)

    def run(self) -> None:
        work = self.lanes.submit("update", Lane.CPU, 0, [], lambda: self.update.update(self.operands, self.step, HYPER))
        self.lanes.wait(work, Lane.CPU)

    def close(self) -> None:
        self.lanes.close()


class LinkLoad:
    """Keeps both links busy with pinned copies until it is closed."""

    COPY_BYTES = 1 << 28

    def __init__(self) -> None:
        self.copied_bytes = {"h2d": 0, "d2h": 0}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._copy, args=(way,)) for way in self.copied_bytes]

    def __enter__(self) -> LinkLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _copy(self, way: str) -> None:
        # Several host buffers, so that the copies come from DRAM and not from the cache.
        hosts = [torch.empty(self.COPY_BYTES, dtype=torch.uint8, pin_memory=True).fill_(1) for _ in range(4)]
        gpu = torch.ones(self.COPY_BYTES, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            for host in itertools.cycle(hosts):
                if self._stop.is_set():
                    return
                source, target = (host, gpu) if way == "h2d" else (gpu, host)
                target.copy_(source, non_blocking=True)
                ended = torch.cuda.Event()
                ended.record()
                ended.synchronize()  # 256 MiB a copy: the gap in between is nothing
                self.copied_bytes[way] += self.COPY_BYTES


def seconds(work: Callable[[], object], repeats: int) -> list[float]:
    work()
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return times


def dram_bandwidth(numel: int, repeats: int) -> dict[str, float]:
    """GB/s as torch reaches it. The share is taken of the best of read, scale and add, which like the update write
    only where they have read. A copy reads its target's lines too before it writes them, uncounted: it shows less than
    the memory moves, and as a ceiling it would put the update above 100%."""
    a, b = (torch.full((numel,), 1.0) for _ in range(2))
    probes: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (8, lambda: b.copy_(a)),
        "read": (4, a.sum),
        "scale": (8, lambda: b.mul_(1.0)),
        "add": (12, lambda: b.add_(a)),
    }
    return {name: size * numel / min(seconds(work, repeats)) / 1e9 for name, (size, work) in probes.items()}


def ceiling(*measured: dict[str, float]) -> float:
    return max(probe[name] for probe in measured for name in ("read", "scale", "add"))


def measure(arrays: Arrays, variant: Variant, repeats: int, loaded: bool) -> dict[str, Any]:
    updater = Updater(arrays, variant)
    links: dict[str, float] = {}
    try:
        if loaded:
            with LinkLoad() as load:
                updater.run()  # long enough for the links to start
                before, started_s = dict(load.copied_bytes), time.perf_counter()
                times = seconds(updater.run, repeats)
                elapsed_s = time.perf_counter() - started_s
                links = {way: (load.copied_bytes[way] - before[way]) / elapsed_s / 1e9 for way in before}
        else:
            times = seconds(updater.run, repeats)
    finally:
        updater.close()
    numel = len(arrays.master)
    rate = numel / statistics.median(times)
    return {
        **vars(variant),
        "loaded": loaded,
        "numel": numel,
        "gparams_per_s": rate / 1e9,
        "min_gparams_per_s": numel / max(times) / 1e9,
        "max_gparams_per_s": numel / min(times) / 1e9,
        "gb_per_s": rate * BYTES_PER_PARAM[variant.kind] / 1e9,
        "link_gb_per_s": links,
    }


def check() -> None:
    """Every variant computes the same, to the bit, as torch's fused AdamW on the rounded gradient."""
    numel = 80 * ALIGN_NUMEL
    for kind, kernel in itertools.product(BYTES_PER_PARAM, KERNELS):
        arrays = Arrays(numel)
        expected = arrays.master.clone().requires_grad_()
        expected.grad = arrays.grads[kind].float()
        optimizer = torch.optim.AdamW([expected], lr=HYPER.lr, weight_decay=HYPER.weight_decay, fused=True)
        optimizer.step()
        updater = Updater(arrays, Variant(kind, kernel, 2, 8 * ALIGN_NUMEL))
        updater.step = 1
        updater.run()
        updater.close()
        assert torch.equal(arrays.master, expected.detach()), (kind, kernel)
        assert kind != "bf16" or torch.equal(arrays.param, expected.detach().bfloat16()), kernel


def main() -> None:
    num_cores = len(os.sched_getaffinity(0))
    counts = sorted({num_cores, max(1, num_cores - 2), max(1, num_cores // 2)}, reverse=True)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--numel", type=int, help="parameters; by default 400M, or less where memory is small")
    add("--threads", default=",".join(map(str, counts)), help="thread counts, with commas")
    add("--tiles", default="64Ki,256Ki,1Mi,4Mi", help="elements per tile, with commas")
    add("--kinds", default="fp32,bf16")
    add("--kernels", default=",".join(KERNELS))
    add("--repeats", type=int, default=7)
    add("--huge-pages", action="store_true", help="ask for transparent huge pages")
    add("--load", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available(), help="links busy too")
    options = parser.parse_args()
    if options.load and not torch.cuda.is_available():
        parser.error("--load copies to and from a GPU, and there is none")

    free_bytes = psutil.virtual_memory().available
    numel = options.numel or min(400_000_000, free_bytes // 8 // STORED_BYTES_PER_PARAM)
    check()
    torch.set_num_threads(num_cores)  # whatever OMP_NUM_THREADS says
    probe_numel = min(numel, free_bytes // 8 // 8)
    before = dram_bandwidth(probe_numel, options.repeats)
    arrays = Arrays(numel, options.huge_pages)
    results = []
    choices = (options.kinds.split(","), options.kernels.split(","), _numbers(options.threads), _numbers(options.tiles))
    for variant in itertools.starmap(Variant, itertools.product(*choices)):
        for loaded in (False, True)[: 1 + options.load]:
            results.append(measure(arrays, variant, options.repeats, loaded))
            print(json.dumps(results[-1]), flush=True)
    torch.set_num_threads(num_cores)
    after = dram_bandwidth(probe_numel, options.repeats)  # again: a machine that others use drifts
    machine = {"cores": num_cores, "torch": torch.__version__, "huge_pages": options.huge_pages}
    print(json.dumps({**machine, "dram_gb_per_s": {"before": before, "after": after}}))
    print_table(results, ceiling(before, after))


def _numbers(text: str) -> list[int]:
    units = {"Ki": 1 << 10, "Mi": 1 << 20}
    return [int(item.rstrip("KMi")) * units.get(item[-2:], 1) for item in text.split(",")]


def print_table(results: list[dict[str, Any]], dram_gb_per_s: float, count: int = 6) -> None:
    """The fastest few of each kind."""
    print("kind  links  kernel   threads  tile       Gparam/s  (min-max)    DRAM share  link GB/s")
    for kind, loaded in itertools.product(BYTES_PER_PARAM, (False, True)):
        rows = [row for row in results if (row["kind"], row["loaded"]) == (kind, loaded)]
        for row in sorted(rows, key=lambda row: -row["gparams_per_s"])[:count]:
            links = " ".join(f"{way} {value:.1f}" for way, value in row["link_gb_per_s"].items())
            print(
                f"{kind}  {'busy' if loaded else 'idle'}   {row['kernel']:7}  {row['num_threads']:7}"
                f"  {row['tile_numel']:<9}  {row['gparams_per_s']:8.2f}"
                f"  ({row['min_gparams_per_s']:.2f}-{row['max_gparams_per_s']:.2f})"
                f"  {row['gb_per_s'] / dram_gb_per_s:9.0%}  {links}"
            )
    print(f"DRAM: {dram_gb_per_s:.1f} GB/s by torch's best in-place or reading operation")
    if any(row["gb_per_s"] > dram_gb_per_s for row in results):
        print(
            "Shares above 100%: the probes were limited by few cores or by other programs, so shares mean nothing here"
        )


if __name__ == "__main__":
    sys.exit(main())
