"""What ranks do in these tests: see started_ranks.py. Each returns what the test looks at."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace

import torch
import torch.distributed as dist

from hightide.doctor.between_gpus import CollectiveEffort, measure_links, with_links
from hightide.doctor.known import load_machine
from hightide.shard import communicators, meeting
from hightide.shard.agreement import check_same, from_first, least
from hightide.shard.collectives import Collectives, Section
from hightide.shard.communicators import GATHER, REDUCE, STEP
from hightide.shard.meeting import find_ranks
from hightide.shard.nccl_lane import NcclLane
from hightide.shard.ranks import Ranks
from hightide.shard.signs import Patience
from hightide.shard.watchman import RankFailure

torch.set_num_threads(1)
warnings.simplefilter("error")  # of torch, for names that it has no more
SOON = Patience(timeout_s=60.0, warn_s=30.0, silent_s=3.6, beat_s=0.3)


def thread_names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


# ---- who we are


def _told(ranks: Ranks) -> dict:
    return {
        "rank": ranks.rank,
        "world": ranks.world,
        "nodes": ranks.nodes,
        "local_rank": ranks.local_rank,
        "ranks_of_node": ranks.ranks_of_node,
        "backend": ranks.backend,
        "any": Collectives(ranks).any_true("a flag", ranks.rank == ranks.world - 1),
    }


def _left(ranks: Ranks) -> dict:
    ranks.close()
    ranks.close()  # again is nothing
    return {
        "threads": thread_names(),
        "is_initialised": dist.is_initialized(),
        "num_groups": len(dist.distributed_c10d._world.pg_map),
    }


def from_environment(rank: int, world: int) -> dict:
    ranks = find_ranks(patience=SOON)
    return {**_told(ranks), "while": thread_names(), **_left(ranks)}


def from_the_users_group(rank: int, world: int) -> dict:
    dist.init_process_group("gloo")
    ranks = find_ranks(patience=SOON)
    found = {**_told(ranks), **_left(ranks)}
    dist.all_reduce(torch.ones(1))  # theirs goes on
    again = find_ranks(patience=SOON)
    found["again"] = _told(again)
    dist.destroy_process_group()  # all groups, ours too
    again.close()
    return found


def halves(rank: int, world: int) -> dict:
    """Two models, each on a half of the ranks, and one on all."""
    dist.init_process_group("gloo")
    groups = [dist.new_group(list(range(start, start + world // 2))) for start in (0, world // 2)]
    mine = find_ranks(groups[rank // (world // 2)], patience=SOON)
    everybody = find_ranks(patience=SOON)
    found = {"mine": _told(mine), "all": _told(everybody)}
    try:
        find_ranks(groups[1 - rank // (world // 2)])
    except ValueError as error:
        found["other"] = str(error)
    mine.close()
    everybody.close()
    return found


def on_two_nodes(rank: int, world: int) -> dict:
    meeting.socket.gethostname = lambda: f"host-{1 - rank % 2}"
    ranks = find_ranks(patience=SOON)
    return {**_told(ranks), **_left(ranks)}


def other_backends(rank: int, world: int) -> dict:
    meeting._backend = lambda group, device: "gloo" if rank else "nccl"
    return {"message": _message(lambda: find_ranks(patience=SOON)), "is_initialised": dist.is_initialized()}


# ---- collectives


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    made = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + rank)) * 100
    return made.to(dtype)


def whole_chunk(
    world: int, dtype: torch.dtype, part_numels: tuple[int, int, int]
) -> tuple[torch.Tensor, list[Section]]:
    """With a few elements before and behind that belong to nobody."""
    sections, start = [], 5
    for numel in part_numels:
        sections.append(Section(start, numel * world))
        start += numel * world
    return torch.full((start + 7,), -1).to(dtype), sections


def over_gloo(device: str) -> Collectives:
    """On one GPU too, which several ranks share."""
    if device != "cpu":
        dist.init_process_group("gloo")
    return Collectives(find_ranks(device=device, patience=SOON))


def gathered(rank: int, world: int, sizes: list[list[int]], device: str = "cpu") -> dict:
    both = over_gloo(device)
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.uint8, torch.int64):
        for with_shard in (False, True):
            for part_numels in sizes:
                whole, sections = whole_chunk(world, dtype, part_numels)
                expected = whole.clone()
                shard = []
                for number, section in enumerate(sections):
                    for other in range(world):
                        part = section.part(other, world)
                        part.of(expected).copy_(values(other, part.numel, dtype, number))
                    shard.append(section.part(rank, world).of(expected).clone())
                    if not with_shard:
                        section.part(rank, world).of(whole).copy_(shard[-1])
                there = whole.to(device)
                both.gather("a chunk", there, sections, torch.cat(shard).to(device) if with_shard else None)
                if not torch.equal(there.cpu(), expected):
                    wrong.append([str(dtype), with_shard, part_numels])
    both.ranks.close()
    return {"wrong": wrong}


def reduced(rank: int, world: int, part_numels: list[int], device: str = "cpu") -> dict:
    """In place, into a shard, and everywhere: the sums are those in the order of ranks, however they are cut."""
    both = over_gloo(device)
    numel = sum(part_numels) * world
    of_ranks = [values(other, numel, torch.float32) for other in range(world)]
    mean = of_ranks[0].clone()
    for other in of_ranks[1:]:
        mean += other
    mean /= world
    sections, start = [], 0
    for size in part_numels:
        sections.append(Section(start, size * world))
        start += size * world
    whole, out = of_ranks[rank].to(device, copy=True), torch.empty(sum(part_numels), device=device)
    both.reduce("a gradient", whole, sections, out)
    own = [section.part(rank, world) for section in sections]
    equal = [torch.equal(part.of(whole).cpu(), part.of(mean)) for part in own]
    equal.append(torch.equal(out.cpu(), torch.cat([part.of(mean) for part in own])))
    everywhere = of_ranks[rank].to(device, copy=True)
    both.reduce_whole("a copy's gradient", everywhere)
    equal.append(torch.equal(everywhere.cpu(), mean))
    both.ranks.close()
    return {"equal": equal}


def numbers(rank: int, world: int, device: str = "cpu") -> dict:
    both = over_gloo(device)
    total = torch.tensor([0.1 * (rank + 1), 3.0e7], device=device)
    both.sum_all("squares", total)
    wide = torch.tensor(0.1 * (rank + 1), dtype=torch.float64, device=device)
    both.sum_all("a loss", wide)
    found = {
        "fp32": total.tolist(),
        "fp64": wide.item(),
        "none": both.any_true("overflow", False),
        "one": both.any_true("overflow", rank == world - 1),
        "said": [content.decode() for content in both.exchange("words", b"word " * rank)],
        "long": [len(content) for content in both.exchange("long words", bytes(3000 * rank))],
        "from 1": both.broadcast_bytes("text", b"text" * 5000 if rank == 1 else None, source=1).decode()[-8:],
    }
    both.ranks.close()
    return found


def nccl_lanes_over_gloo(rank: int, world: int) -> dict:
    """The same calls of torch, which gloo knows too: names, places, and that each is followed to its end."""
    ranks = find_ranks(patience=SOON)
    gather, reduce, step = (NcclLane(ranks, lane) for lane in (GATHER, REDUCE, STEP))
    reduce.open(ranks.device)
    whole = torch.full((world * 10,), -1, dtype=torch.int16)
    whole.view(world, -1)[rank] = rank
    gather.gather("a chunk", whole)
    sums = torch.arange(world * 10.0) * (rank + 1)
    reduce.reduce("a gradient", sums)
    total = torch.tensor([float(rank), 1.0])
    step.sum_all("squares", total)
    logs = ranks.watchman.own.logs
    found = {
        "whole": whole.view(world, -1).tolist(),
        "part": sums.view(world, -1)[rank].tolist(),
        "total": total.tolist(),
        "numbers": [logs[lane].number for lane in (GATHER, REDUCE, STEP)],
        "under way": [logs[lane].oldest() is not None for lane in (GATHER, STEP)],  # of sums gloo does not say
    }
    dist.barrier(ranks.circle(GATHER).group)  # none of them breaks off while another is at it
    if rank == 1:
        ranks.watchman.fail(KeyError("a bad batch"))
    try:
        while True:
            gather.gather("a chunk", whole)
    except RankFailure as error:
        found["message"] = str(error)
    ranks.close()
    return found


# ---- agreement


def _message(action: Callable[[], object]) -> str:
    try:
        return f"no error: {action()}"
    except ValueError as error:
        return str(error)


def agreed(rank: int, world: int) -> dict:
    both = Collectives(find_ranks(patience=SOON))

    def fails() -> str:
        raise TypeError("no plan fits\nat all")

    found = {
        "plan": from_first(both, "the plan", lambda: f"plan of rank {rank}"),
        "least": least(both, {"gpu": 100 - rank, "host": None, "disk": None if rank else 7}),
        "same": _message(lambda: check_same(both, {"model": "abc", "steps": 3})),
        "differs": _message(lambda: check_same(both, {"model": "abc", "steps": min(rank, 1)})),
        "other names": _message(lambda: least(both, {"gpu": 1, "host" if rank else "disk": 1})),
    }
    try:
        from_first(both, "the plan", fails)
    except (TypeError, ValueError) as error:
        found["no plan"] = f"{type(error).__name__}: {error}"
    found["after"] = from_first(both, "the plan", lambda: "another")
    both.ranks.close()
    return found


# ---- faults


class Work:
    """Steps of collectives on two lanes at once, as training has them, for ever unless told how many."""

    def __init__(self, patience: Patience = SOON) -> None:
        self.ranks = find_ranks(patience=patience)
        self.both = Collectives(self.ranks)
        self.failures: list[BaseException] = []

    def gather(self, step: int, numel: int) -> None:
        whole = torch.ones(numel * self.ranks.world)
        self.both.gather(f"chunk {step % 5}", whole, [Section(0, whole.numel())])

    def reduce(self, step: int, numel: int) -> None:
        whole = torch.ones(numel * self.ranks.world)
        self.both.reduce(f"gradient {step % 5}", whole, [Section(0, whole.numel())])

    def _lane(self, work: Callable[[int, int], None], num_steps: int) -> None:
        try:
            for step in range(num_steps):
                work(step, 1000 if step % 10 else 100_000)
        except BaseException as error:
            self.failures.append(error)

    def go_on(self, num_steps: int = 10**9, each: Callable[[int], None] = lambda step: None) -> None:
        """Raises what happens here, or what the lanes have raised."""
        lanes = [threading.Thread(target=self._lane, args=(work, num_steps)) for work in (self.gather, self.reduce)]
        for lane in lanes:
            lane.start()
        try:
            for step in range(num_steps):
                self.ranks.watchman.doing = f"step {step}"
                each(step)
                self.both.any_true("overflow", False)
        except BaseException as error:
            self.ranks.watchman.fail(error)
            raise
        finally:
            for lane in lanes:
                lane.join()
        if self.failures:
            raise self.failures[0]


def at_random(seed: int, kind: str) -> None:
    """Some time within the work."""
    number = getattr(signal, kind)
    wait_s = random.Random(seed).uniform(0.02, 0.8)

    def strike() -> None:
        time.sleep(wait_s)
        print(time.time(), flush=True)
        os.kill(os.getpid(), number)

    threading.Thread(target=strike, daemon=True).start()


def struck(rank: int, world: int, kind: str, victim: int, seed: int) -> None:
    work = Work()
    if rank == victim:
        at_random(seed, kind)
    work.go_on()


def interrupted(rank: int, world: int) -> dict:
    """Rank 1, while it waits; its program goes on."""
    work = Work()
    if rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            work.gather(0, 10)
        except KeyboardInterrupt:
            print(time.time(), flush=True)
            time.sleep(3.0)
        return {}
    time.sleep(1.0)
    work.gather(0, 10)
    return {}


def raises(rank: int, world: int, victim: int, step: int) -> None:
    work = Work()

    def each(now: int) -> None:
        if rank == victim and now == step:
            print(time.time(), flush=True)
            raise KeyError("a bad batch")

    work.go_on(each=each)


def ends_early(rank: int, world: int, how: str) -> dict:
    """Rank 1 ends as if all were done, by itself or because of an exception of the user's own code."""
    work = Work()
    if rank == 1:
        print(time.time(), flush=True)
        if how == "exception":
            raise ZeroDivisionError("in the user's own code")
        return {}
    work.gather(0, 10)
    return {}


def other_order(rank: int, world: int, step: int) -> None:
    work = Work()
    for now in range(step):
        work.gather(now, 10)
    print(time.time(), flush=True)
    work.gather(step + (rank == 1), 10)


def other_size(rank: int, world: int, numel: int) -> None:
    work = Work()
    work.gather(0, numel)
    print(time.time(), flush=True)
    work.gather(1, numel + 100 * rank)


def stop_for(seconds: float) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(child, 0)


def goes_on_after_a_stop(rank: int, world: int) -> dict:
    """Stopped for shorter than ranks may be silent; then for longer, while nobody waits for it."""
    work = Work()
    if rank == 1:
        stop_for(1.0)
    work.go_on(num_steps=5)
    if rank == 1:
        stop_for(SOON.silent_s + 1.0)
    else:
        time.sleep(SOON.silent_s + 1.5)
    work.go_on(num_steps=5)
    work.ranks.close()
    return {}


def slow(rank: int, world: int, slow_s: float, timeout_s: float) -> dict:
    warnings.simplefilter("always")
    communicators.SETTING_UP_S = 1.0  # it counts for no longer than that
    work = Work(Patience(timeout_s=timeout_s, warn_s=1.2, silent_s=20.0, beat_s=0.2))
    if rank == 0:
        work.ranks.watchman.doing = "an evaluation"
        time.sleep(slow_s)
    work.gather(0, 10)
    work.ranks.close()
    return {}


def alone_in_the_end(rank: int, world: int) -> dict:
    """Rank 1 ends first, and rank 0 then; the others wait for nobody, and go on as long as they like."""
    ranks = find_ranks(patience=SOON)
    Collectives(ranks).any_true("the end", True)
    time.sleep({1: 0.0, 0: 0.5}.get(rank, SOON.silent_s + 1.5))
    ranks.watchman.check()
    return {}


def never_comes(rank: int, world: int) -> dict:
    """Rank 1 does not call wrap."""
    dist.init_process_group("gloo")
    if rank == 1:
        time.sleep(2)
        return {}
    return {"message": _message(lambda: find_ranks(patience=Patience(timeout_s=1.0)))}


def costs(rank: int, world: int, seconds: float, beat_s: float = 1.0) -> dict:
    """What the watchman takes of the processor while a rank does nothing."""
    ranks = find_ranks(patience=Patience(beat_s=beat_s))
    before = time.process_time()
    time.sleep(seconds)
    idle_s = time.process_time() - before
    ranks.close()
    return {"share": idle_s / seconds}


# ---- on a GPU


def nccl_alone(rank: int, world: int) -> dict:
    """One rank that is made to talk: all of the path, on a stream of its own."""
    ranks = find_ranks(device="cuda:0", patience=SOON, even_alone=True)
    both, stream = Collectives(ranks), torch.cuda.Stream()
    whole, sections = whole_chunk(1, torch.bfloat16, (300, 0, 1))
    whole = whole.cuda()
    sums, out, total = torch.randn(1000, device="cuda"), torch.empty(1000, device="cuda"), torch.ones(2, device="cuda")
    shard, expected = torch.ones(301, dtype=torch.bfloat16, device="cuda"), sums.clone()
    both.gather("first", torch.ones(1, device="cuda"), [Section(0, 1)])  # then communicators are made, which takes long
    both.reduce("first", torch.ones(1, device="cuda"), [Section(0, 1)])
    both.sum_all("first", torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**9)  # half a second or so
        both.gather("a chunk", whole, sections, shard)
        both.reduce("a gradient", sums, [Section(0, 1000)], out)
        both.reduce_whole("a copy's gradient", sums)
        both.sum_all("squares", total)
        is_ahead = not stream.query()
    stream.synchronize()
    found = {
        "backend": ranks.backend,
        "is_ahead": is_ahead,  # only the stream has waited
        "chunk": whole.float().sum().item(),
        "is_mean": torch.equal(out, expected) and torch.equal(sums, expected),
        "total": total.tolist(),
        "any": both.any_true("overflow", True),
    }
    ranks.close()
    return {**found, "threads": thread_names(), "is_initialised": dist.is_initialized()}


def nccl_raises(rank: int, world: int) -> dict:
    """After a fault the communicators are gone, and collectives say why."""
    ranks = find_ranks(device="cuda:0", patience=SOON, even_alone=True)
    both, whole = Collectives(ranks), torch.ones(10, device="cuda")
    both.gather("a chunk", whole, [Section(0, 10)])
    ranks.watchman.fail(KeyError("a bad batch"))
    try:
        both.gather("a chunk", whole, [Section(0, 10)])
    except RankFailure as error:
        message = str(error)
    torch.cuda.synchronize()
    ranks.close()
    return {"message": message, "sum": whole.sum().item()}


def nccl_on_one_gpu(rank: int, world: int) -> dict:
    return {"message": _message(lambda: find_ranks(device="cuda:0", patience=SOON))}


# ---- how fast


def links_between(rank: int, world: int, nodes: int, path: str) -> dict:
    """Measured in a moment, and written into a machine file."""
    name = f"host-{rank * nodes // world}"
    meeting.socket = SimpleNamespace(gethostname=lambda: name)
    both = Collectives(find_ranks(patience=SOON))
    told: list[str] = []
    links = measure_links(both, CollectiveEffort(chunk_bytes=1 << 18, num_pieces=2), told.append)
    machine = with_links(load_machine("rtx-3090"), links)
    if rank == 0:
        machine.save(path)
    both.ranks.close()
    return {**asdict(links), "told": told}
