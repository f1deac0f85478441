"""What it takes until ranks know a small thing of each other: each training forward begins with such an exchange, and
each backward ends with one (see [Note: larger batches of ranks] in observe/ranked_batches.py).

    torchrun --nproc-per-node 2 bench/exchange.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch

from hightide.runtime.run import FORWARD_BEGINS
from hightide.shard.collectives import Collectives
from hightide.shard.meeting import find_ranks

WARM_UP = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    collectives = Collectives(find_ranks(device="cpu"))
    if collectives.ranks.is_alone:
        raise SystemExit("one rank exchanges nothing: start it with torchrun --nproc-per-node 2")
    seconds = []
    for _ in range(WARM_UP + options.count):
        began_s = time.perf_counter()
        collectives.any_true(FORWARD_BEGINS, False)
        seconds.append(time.perf_counter() - began_s)
    tenths = statistics.quantiles(seconds[WARM_UP:], n=10)
    if collectives.ranks.rank == 0:
        low, median, high = (1e6 * tenths[at] for at in (0, 4, 8))
        where = f"{collectives.ranks.world} ranks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        print(f"{where}: an exchange takes {median:.0f} us (median; a tenth below {low:.0f}, a tenth above {high:.0f})")
    collectives.ranks.close()


if __name__ == "__main__":
    main()
