"""The host's AdamW alone and while both links are busy: G parameters/s and share of the measured DRAM bandwidth.

    python bench/update.py                  all variants; small on a small machine
    python bench/update.py --threads 16 --tiles 256Ki --kernels c --huge-pages

It measures the product's own code: `HostUpdate` on the cpu lane of `Lanes`, whose threads take tiles of one update. `c`
is the compiled kernel, `torch` torch's operations. `fp32` is the update of fp32 arrays; `bf16` takes the gradient in
bf16 and has its master as the bf16 parameter and 16 more bits. They move 28 and 26 bytes per parameter through DRAM,
and 8 less in each of the two parts in which an update may come (`--parts params,states`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from hightide.doctor.links import NUM_BUFFERS, Link
from hightide.doctor.pace import Work, measure_together
from hightide.doctor.rates import dram_rates
from hightide.doctor.update_speed import HYPER, UpdateWork, update_arrays
from hightide.ir.chunk import ALIGN_NUMEL
from hightide.ir.machine import UPDATE_TRAFFIC_BYTES
from hightide.ir.tier import Lane
from hightide.optim.operands import Operands, Part
from hightide.runtime.lanes.lanes import Lanes
from hightide.stores.cuda import CudaAccelerator
from hightide.stores.pinned import PinnedArena

PARAM_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BYTES_PER_PARAM = {"fp32": 28, "bf16": UPDATE_TRAFFIC_BYTES}  # fp32: four arrays read, three written
STORED_BYTES_PER_PARAM = 16
COPY_BYTES = 1 << 28
KERNELS = ("c", "torch")
REPEATS = 5


@dataclass(frozen=True)
class Variant:
    kind: str  # fp32, bf16
    kernel: str  # c, torch
    num_threads: int
    tile_numel: int
    part: str = "whole"


def arrays(kind: str, numel: int, huge_pages: bool = False) -> Operands:
    return update_arrays(numel, _huge if huge_pages else _plain, PARAM_DTYPES[kind])


def _plain(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype)


def _huge(numel: int, dtype: torch.dtype) -> Tensor:
    memory = mmap.mmap(-1, numel * dtype.itemsize)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


@contextmanager
def link_loads(lanes: Lanes, device: torch.device) -> Iterator[dict[Lane, Work]]:
    """Both links, with pinned memory."""
    ways = (Lane.H2D, Lane.D2H)
    host, gpu = PinnedArena(len(ways) * NUM_BUFFERS * COPY_BYTES), CudaAccelerator(len(ways) * COPY_BYTES, device)
    try:
        works: dict[Lane, Work] = {way: Link(way, host, gpu, lanes.streams, COPY_BYTES) for way in ways}
        host.pin()
        yield works
    finally:
        torch.cuda.synchronize(device)
        gpu.close()
        host.close()


def ceiling(*measured: dict[str, float]) -> float:
    """Bytes per second, by what writes only where it has read, like the update: see dram_rates."""
    return max(probe[name] for probe in measured for name in ("read", "scale", "add"))


def measure(operands: Operands, variant: Variant, window_s: float, loaded: bool) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device()) if loaded else None
    lanes = Lanes(device=device, num_update_threads=variant.num_threads)
    try:
        update = UpdateWork(
            operands, lanes.update_threads, variant.kernel, variant.tile_numel, Part[variant.part.upper()]
        )
        with link_loads(lanes, device) if device is not None else nullcontext({}) as links:
            paces = measure_together(lanes, {**links, Lane.CPU: update}, window_s)
    finally:
        lanes.close()
    numel = len(operands)
    times = paces[Lane.CPU].piece_s
    rate = numel / statistics.median(times)
    return {
        **vars(variant),
        "loaded": loaded,
        "numel": numel,
        "gparams_per_s": rate / 1e9,
        "min_gparams_per_s": numel / max(times) / 1e9,
        "max_gparams_per_s": numel / min(times) / 1e9,
        "gb_per_s": rate * (BYTES_PER_PARAM[variant.kind] - (0 if variant.part == "whole" else 8)) / 1e9,
        "link_gb_per_s": {str(lane): pace.bytes_per_s / 1e9 for lane, pace in paces.items() if lane is not Lane.CPU},
    }


def check() -> None:
    """Every variant computes the same, to the bit, as torch's fused AdamW on the rounded gradient."""
    for kind, kernel in itertools.product(PARAM_DTYPES, KERNELS):
        operands = arrays(kind, 80 * ALIGN_NUMEL)
        expected = operands.master_values().clone().requires_grad_()
        expected.grad = operands.grad.float()
        torch.optim.AdamW([expected], lr=HYPER.lr, weight_decay=HYPER.weight_decay, fused=True).step()
        lanes = Lanes(num_update_threads=2)
        UpdateWork(operands, lanes.update_threads, kernel, 8 * ALIGN_NUMEL)()
        lanes.close()
        assert torch.equal(operands.master_values(), expected.detach()), (kind, kernel)
        assert operands.param is None or torch.equal(operands.param, expected.detach().bfloat16()), kernel


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
    add("--parts", default="whole", help="whole, params or states, with commas; the last two by c alone")
    add("--seconds", type=float, default=1.0, help="of each measurement")
    add("--huge-pages", action="store_true", help="ask for transparent huge pages")
    add("--load", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available(), help="links busy too")
    options = parser.parse_args()
    if options.load and not torch.cuda.is_available():
        parser.error("--load copies to and from a GPU, and there is none")

    free_bytes = psutil.virtual_memory().available
    numel = options.numel or min(400_000_000, free_bytes // 8 // STORED_BYTES_PER_PARAM)
    check()
    probe_numel = min(numel, free_bytes // 8 // 8)
    before = dram_rates(probe_numel, num_cores, REPEATS)
    results = []
    for kind in options.kinds.split(","):
        operands = arrays(kind, numel, options.huge_pages)
        choices = (
            options.kernels.split(","),
            _numbers(options.threads),
            _numbers(options.tiles),
            options.parts.split(","),
        )
        for kernel, num_threads, tile_numel, part in itertools.product(*choices):
            for loaded in (False, True)[: 1 + options.load]:
                variant = Variant(kind, kernel, num_threads, tile_numel, part)
                results.append(measure(operands, variant, options.seconds, loaded))
                print(json.dumps(results[-1]), flush=True)
        del operands
    after = dram_rates(probe_numel, num_cores, REPEATS)  # again: a machine that others use drifts
    machine = {"cores": num_cores, "torch": torch.__version__, "huge_pages": options.huge_pages}
    print(json.dumps({**machine, "dram_bytes_per_s": {"before": before, "after": after}}))
    print_table(results, ceiling(before, after) / 1e9)


def _numbers(text: str) -> list[int]:
    units = {"Ki": 1 << 10, "Mi": 1 << 20}
    return [int(item.rstrip("KMi")) * units.get(item[-2:], 1) for item in text.split(",")]


def print_table(results: list[dict[str, Any]], dram_gb_per_s: float, count: int = 6) -> None:
    """The fastest few of each kind."""
    print("kind  links  kernel part      threads  tile       Gparam/s  (min-max)    DRAM share  link GB/s")
    for kind, loaded in itertools.product(PARAM_DTYPES, (False, True)):
        rows = [row for row in results if (row["kind"], row["loaded"]) == (kind, loaded)]
        for row in sorted(rows, key=lambda row: -row["gparams_per_s"])[:count]:
            links = " ".join(f"{way} {value:.1f}" for way, value in row["link_gb_per_s"].items())
            print(
                f"{kind}  {'busy' if loaded else 'idle'}   {row['kernel']:5}  {row['part']:8}  {row['num_threads']:7}"
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
