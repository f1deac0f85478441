"""Ranks that are killed under torchrun: `bench/rank_kills.py --steps 400` (20 kills of one run of 2 ranks, 2 minutes).

A tiny model with dropout trains on several ranks under `torchrun --max-restarts`. Each process begins by loading the
newest checkpoint, where there is one, and saves every few steps, beside training. At random moments a random rank is
killed, in the middle of a step or of a save; torchrun ends the others and starts all again. At its end every step was
made, and each rank has the losses of a run that nothing happened to, to the bit; the last checkpoint is whole."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "ranks")]

NUM_STEPS, EVERY = 40, 3
WITHIN_S = 900.0
LOOK_S = 0.02


# -- a rank ----------------------------------------------------------------------------------------------------------


def train(folder: Path, num_steps: int) -> None:
    """What a user writes, but for the lines that tell the bench how far it is."""
    from ranked_plans import Plans

    import hightide
    import models

    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model, example = models.llama(num_layers=2, dropout=0.1, num_samples=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = Plans(model, optimizer, example).of(world, "mixed")
    torch.manual_seed(rank)  # dropout differs, as with DDP
    model, optimizer = hightide.wrap(model, optimizer, example, plan=plan)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)
    begin, losses, saving = 0, [], None
    if hightide.latest(folder / "checkpoints") is not None:
        loaded = hightide.load(model, optimizer, folder / "checkpoints")
        scheduler.load_state_dict(loaded.extra)
        begin, losses = loaded.step, loaded.rank_extra
    (folder / f"pid-{rank}.tmp").write_text(str(os.getpid()))
    os.replace(folder / f"pid-{rank}.tmp", folder / f"pid-{rank}")
    for step in range(begin, num_steps):
        loss = models.loss_of(model, models.token_batch(seed=1000 * rank + step, num_samples=2))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % EVERY == 0 or step + 1 == num_steps:
            own = list(losses)
            saving = hightide.save(
                model, optimizer, folder / "checkpoints", step=step + 1, extra=scheduler.state_dict(), rank_extra=own,
                keep=2, on_error="raise",
            )  # fmt: skip
    if saving is not None:
        saving.wait()
    (folder / f"losses-{rank}.json").write_text(json.dumps(losses))


# -- around them -----------------------------------------------------------------------------------------------------


def started(folder: Path, world: int, num_steps: int, restarts: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"),
        *(f"--max-restarts={restarts}", "--monitor-interval=0.2", __file__),
        *("--rank-of", str(folder), "--steps", str(num_steps)),
    ]
    with (folder / "log").open("ab") as log:
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def pids(folder: Path, world: int) -> dict[int, int]:
    """Of ranks that train now."""
    found = {}
    for rank in range(world):
        try:
            found[rank] = int((folder / f"pid-{rank}").read_text())
            os.kill(found[rank], 0)
        except (OSError, ValueError):
            found.pop(rank, None)
    return found


def losses_of(folder: Path, world: int) -> list[list[float]]:
    return [json.loads((folder / f"losses-{rank}.json").read_text()) for rank in range(world)]


def ends(process: subprocess.Popen[bytes], folder: Path) -> None:
    try:
        status = process.wait(WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise SystemExit(f"the run hangs:\n{(folder / 'log').read_text()[-9000:]}") from None
    if status:
        raise SystemExit(f"the run has ended with {status}:\n{(folder / 'log').read_text()[-9000:]}")


def killed(folder: Path, world: int, num_steps: int, num_kills: int, chance: random.Random) -> int:
    """Returns how many kills have hit a rank that trained."""
    process, hits, seen, since_s = started(folder, world, num_steps, num_kills), 0, {}, time.monotonic()
    try:
        while process.poll() is None and hits < num_kills and time.monotonic() - since_s < WITHIN_S:
            time.sleep(LOOK_S)
            now = pids(folder, world)
            if len(now) < world or any(seen.get(rank) == pid for rank, pid in now.items()):
                continue
            time.sleep(chance.uniform(0.0, 1.5))
            if process.poll() is None:
                victim = chance.randrange(world)
                try:
                    os.kill(now[victim], signal.SIGKILL)
                    hits += 1
                except ProcessLookupError:
                    pass
                seen = now
        ends(process, folder)
    finally:
        process.kill()
    return hits


def measured(folder: Path, world: int, num_steps: int, num_kills: int, seed: int) -> tuple[int, list[str]]:
    """How many kills there were, and what was wrong."""
    from hightide.checkpoint.choosing import latest
    from hightide.checkpoint.files.folder import damages

    whole, struck = folder / "whole", folder / "struck"
    for one in (whole, struck):
        one.mkdir()
    ends(started(whole, world, num_steps, 0), whole)
    hits = killed(struck, world, num_steps, num_kills, random.Random(seed))
    problems = []
    for rank, (one, other) in enumerate(zip(losses_of(whole, world), losses_of(struck, world), strict=True)):
        if one != other:
            at = next(
                (step for step, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), "the end"
            )
            problems.append(f"rank {rank}: {len(one)} losses and {len(other)}, which differ at {at}")
    last = latest(struck / "checkpoints")
    if last is None or damages(last) or last.name != f"step-{num_steps}":
        problems.append(f"the last checkpoint is {last}")
    left = sorted(path.name for path in (struck / "checkpoints").iterdir())
    if len(left) > 2:
        problems.append(f"left over: {', '.join(left)}")
    return hits, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        train(Path(arguments.rank_of), arguments.steps)
        return
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hightide-") as folder:
        hits, problems = measured(Path(folder), arguments.ranks, arguments.steps, arguments.kills, arguments.seed)
    print(f"{hits} of {arguments.kills} kills of {arguments.ranks} ranks, {time.monotonic() - began_s:.0f} s")
    if hits < arguments.kills:
        print(f"the run has made its {arguments.steps} steps before there were more: give it more --steps")
    for problem in problems:
        print(problem)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
