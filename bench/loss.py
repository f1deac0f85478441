"""Head and loss alone, fused over tiles, against the matrix products that they cannot do without.

    python bench/loss.py                                   W1: 32,768 tokens, hidden 3072, vocabulary 128,256, bf16
    python bench/loss.py --device cpu --tokens 256 --hidden 64 --vocabulary 1000 --dtype float32

One JSON line per number of tokens whose logits are kept (none, half, all). `floor_s` is the time of the bare products
of the same tiles: projection, rows' gradient, weight's gradient, and one more projection where logits are not kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hightide.planner.loss_tiles import LOSS_SCRATCH_BYTES, LOSS_TILE_BYTES, TILE_ALIGN_TOKENS
from hightide.runtime.head.cross_entropy import tiles
from hightide.runtime.head.lazy_logits import LazyLogits
from hightide.runtime.head.linear import add_product, sums_in_fp32


class ResidentHead:
    """A head whose weights are always there."""

    def __init__(self, linear: nn.Linear, tile_tokens: int, scratch_bytes: int, kept_tokens: int) -> None:
        self.plain_linear, self.tile_tokens, self.scratch_bytes = linear, tile_tokens, scratch_bytes
        self.num_classes, self.version, self._kept_tokens = linear.out_features, 0, kept_tokens
        self.anchor = torch.empty(0, device=linear.weight.device, requires_grad=True)

    def claim_kept_tokens(self) -> int:
        return self._kept_tokens

    def project(self, rows: Tensor) -> Tensor:
        return self.plain_linear(rows)

    @contextmanager
    def forward_hold(self) -> Iterator[None]:
        yield

    @contextmanager
    def backward_hold(self, accumulate: bool) -> Iterator[None]:
        yield

    def will_accumulate(self) -> bool:
        return True

    def materialise(self, hidden: Tensor) -> Tensor:
        raise AssertionError("the loss is fused")


class Workload:
    def __init__(self, args: argparse.Namespace) -> None:
        dtype, device = getattr(torch, args.dtype), torch.device(args.device)
        torch.manual_seed(0)
        self.linear = nn.Linear(args.hidden, args.vocabulary, bias=False, dtype=dtype, device=device)
        self.linear.weight.grad_dtype = None
        self.linear.weight.grad = torch.zeros(args.vocabulary, args.hidden, device=device)
        self.hidden = torch.randn(args.tokens, args.hidden, dtype=dtype, device=device).requires_grad_()
        self.target = torch.randint(args.vocabulary, (args.tokens,), device=device)
        fitting = int(args.tile_mib * 2**20) // (args.vocabulary * dtype.itemsize)
        self.tile_tokens = max(TILE_ALIGN_TOKENS, fitting // TILE_ALIGN_TOKENS * TILE_ALIGN_TOKENS)
        self.scratch_bytes = int(args.scratch_mib * 2**20)

    def fused(self, kept_tokens: int) -> None:
        head = ResidentHead(self.linear, self.tile_tokens, self.scratch_bytes, kept_tokens)
        F.cross_entropy(LazyLogits(head, self.hidden).float(), self.target).backward()
        self.hidden.grad = None

    @torch.no_grad()
    def products(self, kept_tokens: int) -> None:
        weight, total = self.linear.weight, self.linear.weight.grad
        assert total is not None
        for tile in tiles(len(self.hidden), self.tile_tokens):
            rows = self.hidden[tile]
            logits = rows @ weight.t()
            if tile.stop > kept_tokens:
                torch.mm(rows, weight.t(), out=logits)
            logits @ weight
            add_product(total, logits.t(), rows)


def seconds(run: Callable[[], None], num_runs: int, cuda: bool) -> list[float]:
    times = []
    for _ in range(num_runs + 2):
        started_s = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started_s)
    return times[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--hidden", type=int, default=3072)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--tile-mib", type=float, default=LOSS_TILE_BYTES / 2**20)
    parser.add_argument("--scratch-mib", type=float, default=LOSS_SCRATCH_BYTES / 2**20)
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    workload, cuda = Workload(args), args.device.startswith("cuda")
    flop = 2 * args.tokens * args.hidden * args.vocabulary
    for kept_tokens in (0, args.tokens // 2, args.tokens):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            before_bytes = torch.cuda.memory_allocated()
        times = seconds(lambda kept=kept_tokens: workload.fused(kept), args.runs, cuda)
        result = {
            **vars(args),
            "kept_tokens": kept_tokens,
            "tile_tokens": workload.tile_tokens,
            "sums_in_fp32": sums_in_fp32(workload.linear.weight.device, workload.linear.weight.dtype),
            "median_s": statistics.median(times),
            "min_s": min(times),
            "max_s": max(times),
            "peak_bytes": torch.cuda.max_memory_allocated() - before_bytes if cuda else None,
        }
        floor_s = statistics.median(seconds(lambda kept=kept_tokens: workload.products(kept), args.runs, cuda))
        num_products = 3 + (args.tokens - kept_tokens) / args.tokens
        result |= {"floor_s": floor_s, "share_of_floor": floor_s / result["median_s"]}
        result["tflop_per_s"] = num_products * flop / result["median_s"] / 1e12
        print(json.dumps(result))


if __name__ == "__main__":
    main()
