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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hightide
import hightide.api
from hightide.shard.signs import Patience

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from started_ranks import EndedRank, StartedRanks  # noqa: E402

WITHIN_S = 90.0  # after the fault
NUM_STEPS, STRUCK_BEFORE = 40, 10  # a signal comes up to 0.05 s later: there must be more to do
SLOW_S, TIMEOUT_S = 30.0, 6.0
WIDTH = 32
LOST = ("killed", "stopped", "raises", "bad batch", "slow", "ends early", "reads alone")  # the run cannot go on
UNEVEN = (  # nor can it here: a rank calls something more or less often than others
    *("one backward more", "one step less", "one step more", "one block more", "accumulates more", "steps early"),
    *("leaves early to save", "evaluates alone", "generates alone"),
)
IN_BARRIER = ("leaves early to a barrier", "evaluates alone before a barrier", "saves alone before a barrier")
GOES_ON = ("nan", "skips a block", "late", "steps in vain")  # it can
EITHER = ("other order",)
KINDS = (*LOST, *UNEVEN, *IN_BARRIER, *GOES_ON, *EITHER)
ENDS_WELL = ("one step less", "leaves early to save")  # where nobody needs anybody
ACCUMULATE = {"accumulates more": 2, "steps early": 2}  # backwards before each step, as all ranks promise
DEFERRED = ("reads alone", "one backward more", "one step more", *ACCUMULATE)  # else it is refused


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
    gpu = chance.choice(["40KiB", "1MiB"])
    if "alone" in kind:
        gpu = "40KiB"  # what fits each GPU needs nobody else
    limits = hightide.Limits(gpu=gpu, host="16MiB")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    timeout_s, num_passes = TIMEOUT_S if kind == "slow" else 600.0, ACCUMULATE.get(kind, 1)
    options = {"update": update, "blocks": ["layers.*"], "timeout_s": timeout_s, "accumulate": num_passes}
    wrapped, optimizer = hightide.wrap(model, optimizer, torch.zeros(4, WIDTH), limits=limits, **options)
    finite = []
    for step in range(NUM_STEPS):
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        is_struck = rank == victim and step == at_step
        if is_struck:
            batch = _strikes(kind, chance, wrapped, model, batch)
        if is_struck and kind == "one step less":
            continue
        if is_struck and kind.startswith("leaves early"):
            break
        for number in range(num_passes + (is_struck and kind in ("one backward more", "accumulates more"))):
            if number and is_struck and kind == "steps early":
                optimizer.step()
            loss = wrapped(batch)
            loss.backward()
        if is_struck and kind == "reads alone":
            model.layers[0][0].weight.grad.clone()
        finite.append(bool(torch.isfinite(loss)))
        for _ in range(1 + (is_struck and kind == "one step more")):
            optimizer.step()
        optimizer.zero_grad()
        if is_struck and kind == "steps in vain":
            optimizer.step()
        if is_struck and kind == "ends early":
            raise SystemExit(0)
        if step == at_step and "alone before" in kind:
            if rank == victim:
                _alone(wrapped, batch, evaluates=kind.startswith("evaluates"))
            torch.distributed.barrier()
    if kind == "leaves early to save":
        wrapped.state_dict()
    elif kind == "leaves early to a barrier":
        torch.distributed.barrier()
    return {"finite": finite, "at": at_step, "update": update}


def _alone(wrapped: nn.Module, batch: Tensor, evaluates: bool) -> None:
    if not evaluates:
        wrapped.state_dict()
        return
    wrapped.eval()
    with torch.no_grad():
        wrapped(batch)
    wrapped.train()


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
    elif kind == "one block more":
        model.order = [*model.order, chance.randrange(5)]
    elif kind in ("evaluates alone", "generates alone"):
        with torch.no_grad():
            for _ in range(1 if kind == "evaluates alone" else 5):
                wrapped(batch)
    return batch


# ---- one round


def struck_s_of(victim: EndedRank) -> float | None:
    told = victim.stdout.splitlines()[:1]
    return float(told[0]) if told and re.fullmatch(r"[0-9.]+", told[0]) else None


def checked(kind: str, victim: int, ranks: list[EndedRank]) -> dict[int, EndedRank]:
    """Those that must end as they should; the victim may end somehow, unless it is as well as the others."""
    is_well = kind in ("nan", *UNEVEN, *IN_BARRIER) and kind not in ENDS_WELL
    return {number: rank for number, rank in enumerate(ranks) if number != victim or is_well}


def problems_of(kind: str, victim: int, ranks: list[EndedRank]) -> list[str]:
    struck_s, found = struck_s_of(ranks[victim]), []
    if struck_s is None:
        return [f"the fault did not happen: {ranks[victim].stderr[-500:]}"]
    for number, rank in checked(kind, victim, ranks).items():
        if rank.timed_out or rank.ended_s - struck_s > WITHIN_S:
            found.append(f"rank {number} hung")
        elif kind in GOES_ON and rank.status != 0:
            found.append(f"rank {number} ended: {rank.error}")
        elif kind in IN_BARRIER and (rank.status != 1 or not is_told_outside(rank, number, victim)):
            found.append(f"rank {number} ended with {rank.status}, and said {rank.stderr[-900:]!r}")
        elif kind in (*LOST, *UNEVEN) and (rank.status != 1 or not is_told(rank, number, victim)):
            found.append(f"rank {number} ended with {rank.status}, and said {rank.error!r}")
        elif kind in EITHER and rank.status not in (0, 1):
            found.append(f"rank {number} ended with {rank.status}: {rank.error}")
        elif kind == "nan" and all(json.loads(rank.stdout.splitlines()[-1])["finite"]):
            found.append(f"rank {number} went on with finite losses")
    return found


def is_told(rank: EndedRank, number: int, victim: int) -> bool:
    """Who failed, at what this rank was, and what it has waited for; or in what it differs, which all have found."""
    if "Refused: ranks differ in " in rank.error:
        return f" on rank {victim}" in rank.error
    return (
        f"RankFailure: rank {number}, at " in rank.error
        and f"rank {victim}" in rank.error
        and (" waited " in rank.error or "raised" in rank.error)
    )


def is_told_outside(rank: EndedRank, number: int, victim: int) -> bool:
    """Whoever waits in a barrier is told beside the exception that ends it."""
    told = [line for line in rank.stderr.splitlines() if f"rank {number}, at " in line]
    return any(
        f"rank {victim} (at " in line and "torch.distributed.barrier()" in line and "has not come" in line
        for line in told
    )


def round_of(
    started: StartedRanks, kind: str, world: int, seed: int, quick: bool, took: Callable[[float], object] = str
) -> list[str]:
    """What was wrong. `took` gets the seconds until the last of those that were checked had ended."""
    victim = random.Random(seed + 1).randrange(world)
    if kind in DEFERRED:
        seed = next(one for one in range(seed, seed + 1000) if _update_of(one) == "deferred")
    within_s = WITHIN_S + SLOW_S + 60.0  # to begin with
    stopped = victim if kind == "stopped" else None
    ranks = started.run("trains", world, within_s, stopped, kind=kind, victim=victim, seed=seed, quick=quick)
    if (struck_s := struck_s_of(ranks[victim])) is not None:
        took(max(rank.ended_s for rank in checked(kind, victim, ranks).values()) - struck_s)
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
    started, bad = StartedRanks("rank_faults", HERE), Counter[tuple[str, int]]()
    took_s: dict[tuple[str, int], list[float]] = {}
    for number in range(options.count):
        kind = options.kinds[number % len(options.kinds)]
        world = options.worlds[number // len(options.kinds) % len(options.worlds)]
        seconds = took_s.setdefault((kind, world), [])
        problems = round_of(started, kind, world, options.seed + number, options.quick, seconds.append)
        bad[kind, world] += bool(problems)
        for problem in problems:
            print(problem, flush=True)
        print(f"round {number}: {kind}, {world} ranks, {seconds[-1] if seconds else -1:.1f} s", flush=True)
    started.close()
    for (kind, world), seconds in took_s.items():
        problems = f"{bad[kind, world]} with problems; all had ended after {max(seconds, default=0.0):.1f} s at most"
        print(f"{kind:32} {world} ranks: {len(seconds):3} rounds, {problems}")
    return 1 if sum(bad.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
