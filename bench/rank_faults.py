"""Faults of ranks in the middle of training: `bench/rank_faults.py --count 40 --quick`.

Each round starts 2 or 4 ranks, which train a small model over gloo on simulated accelerators, and does one thing to one
of them at a random moment. Nobody may hang: all other ranks end within WITHIN_S, and say which rank it was, at what
they were and what they waited for; or, where nothing is lost, all train to the end. `--quick` has ranks that are
impatient (a rank is taken for dead after 3.6 s instead of 45)."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hightide
import hightide.api
from hightide.shard.watchman import Patience

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from started_ranks import EndedRank, StartedRanks  # noqa: E402

WITHIN_S = 90.0  # after the fault
NUM_STEPS, STRUCK_BEFORE = 40, 10  # a signal comes up to 0.05 s later: there must be more to do
SLOW_S, TIMEOUT_S = 30.0, 6.0
WIDTH = 32
LOST = ("killed", "stopped", "raises", "bad batch", "slow", "ends early", "reads alone")  # the run cannot go on
GOES_ON = ("nan", "skips a block", "late")  # it can
EITHER = ("other order",)
KINDS = (*LOST, *GOES_ON, *EITHER)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5))
        self.order = list(range(5))

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x.pow(2).mean()


# ---- in each rank


def trains(rank: int, world: int, kind: str, victim: int, seed: int, quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    if quick:
        fast = {"warn_s": 30.0, "silent_s": 3.6, "beat_s": 0.3}
        hightide.api.Patience = lambda timeout_s: Patience(timeout_s=timeout_s, **fast)
    chance = random.Random(seed)
    at_step, update = chance.randrange(1, STRUCK_BEFORE), chance.choice(["deferred", "in_backward"])
    model = Layers()
    limits = hightide.Limits(gpu=chance.choice(["40KiB", "1MiB"]), host="16MiB")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    timeout_s = TIMEOUT_S if kind == "slow" else 600.0
    wrapped, optimizer = hightide.wrap(
        model, optimizer, torch.zeros(4, WIDTH), limits=limits, update=update, blocks=["layers.*"], timeout_s=timeout_s
    )
    finite = []
    for step in range(NUM_STEPS):
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        if rank == victim and step == at_step:
            batch = _strikes(kind, chance, wrapped, model, batch)
        loss = wrapped(batch)
        loss.backward()
        if rank == victim and step == at_step and kind == "reads alone" and update == "deferred":
            model.layers[0][0].weight.grad.clone()
        finite.append(bool(torch.isfinite(loss)))
        optimizer.step()
        optimizer.zero_grad()
        if rank == victim and step == at_step and kind == "ends early":
            raise SystemExit(0)
    return {"finite": finite, "at": at_step, "update": update}


def _strikes(kind: str, chance: random.Random, wrapped: nn.Module, model: Layers, batch: Tensor) -> Tensor:
    print(time.time(), flush=True)
    if kind in ("killed", "stopped"):
        number, wait_s = signal.SIGKILL if kind == "killed" else signal.SIGSTOP, chance.uniform(0.0, 0.05)
        threading.Thread(target=lambda: (time.sleep(wait_s), os.kill(os.getpid(), number)), daemon=True).start()
    elif kind == "raises":
        raise ValueError("a fault")
    elif kind == "bad batch":
        return batch[:, :-1]
    elif kind == "nan":
        return batch * torch.nan
    elif kind in ("slow", "late"):
        time.sleep(SLOW_S if kind == "slow" else 2.0)
    elif kind == "skips a block":
        model.order = [index for index in model.order if index != chance.randrange(5)]
    elif kind == "other order":
        chance.shuffle(model.order)
    return batch


# ---- one round


def problems_of(kind: str, victim: int, ranks: list[EndedRank]) -> list[str]:
    told = ranks[victim].stdout.splitlines()[:1]
    if not told or not re.fullmatch(r"[0-9.]+", told[0]):
        return [f"the fault did not happen: {ranks[victim].stderr[-500:]}"]
    struck_s, found = float(told[0]), []
    for number, rank in enumerate(ranks):
        if number == victim and kind != "nan":
            continue
        if rank.timed_out or rank.ended_s - struck_s > WITHIN_S + (SLOW_S if kind == "slow" else 0.0):
            found.append(f"rank {number} hung")
        elif kind in GOES_ON and rank.status != 0:
            found.append(f"rank {number} ended: {rank.error}")
        elif kind in LOST and (rank.status != 1 or not is_told(rank, number, victim)):
            found.append(f"rank {number} ended with {rank.status}, and said {rank.error!r}")
        elif kind in EITHER and rank.status not in (0, 1):
            found.append(f"rank {number} ended with {rank.status}: {rank.error}")
        elif kind == "nan" and all(json.loads(rank.stdout.splitlines()[-1])["finite"]):
            found.append(f"rank {number} went on with finite losses")
    return found


def is_told(rank: EndedRank, number: int, victim: int) -> bool:
    """Who failed, at what this rank was, and what it has waited for."""
    return (
        f"RankFailure: rank {number}, at " in rank.error
        and f"rank {victim}" in rank.error
        and (" waited " in rank.error or "raised" in rank.error)
    )


def round_of(started: StartedRanks, kind: str, world: int, seed: int, quick: bool) -> list[str]:
    victim = random.Random(seed + 1).randrange(world)
    if kind == "reads alone":
        seed = next(one for one in range(seed, seed + 1000) if _update_of(one) == "deferred")
    within_s = WITHIN_S + SLOW_S + 60.0  # to begin with
    stopped = victim if kind == "stopped" else None
    ranks = started.run("trains", world, within_s, stopped, kind=kind, victim=victim, seed=seed, quick=quick)
    return [f"{kind}, {world} ranks, rank {victim}, seed {seed}: {one}" for one in problems_of(kind, victim, ranks)]


def _update_of(seed: int) -> str:
    chance = random.Random(seed)
    chance.randrange(1, STRUCK_BEFORE)
    return chance.choice(["deferred", "in_backward"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=len(KINDS), help="rounds; kinds take turns")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    started, rounds, bad = StartedRanks("rank_faults", HERE), Counter[str](), Counter[str]()
    for number in range(options.count):
        kind = options.kinds[number % len(options.kinds)]
        world = options.worlds[number // len(options.kinds) % len(options.worlds)]
        problems = round_of(started, kind, world, options.seed + number, options.quick)
        rounds[kind] += 1
        bad[kind] += bool(problems)
        for problem in problems:
            print(problem, flush=True)
    started.close()
    for kind in rounds:
        print(f"{kind:14} {rounds[kind]:4} rounds, {bad[kind]} with problems")
    return 1 if sum(bad.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
