"""What each rank does in these tests: trains small models with hightide, under several plans, and with DDP of plain
PyTorch."""

from __future__ import annotations

import hashlib
import json
import math
import random
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from ranked_loop import EPS, optimizer_of, peaks_above, steps
from ranked_plans import NUM_SAMPLES, ON_GPU, Plans
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hightide
import hightide.api
import hightide.posing
import hightide.profiler.model.model_profile
import hightide.this_machine
import hightide.wrapping
import models
from hightide.doctor.known import load_machine
from hightide.ir.tier import Lane, Tier
from hightide.loading.tensor_file import StoredTensor
from hightide.observe.ranked_watch import RankedWatch
from hightide.observe.timing import Measured, StepTimes
from hightide.planner.advice.correct import MemoryShortage
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.solution import Solution
from hightide.process.system import resident_bytes
from hightide.runtime import alike
from hightide.runtime.chunks import moving
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.lanes import lanes as lanes_module
from hightide.runtime.lanes.lanes import BETWEEN_RANKS, UPDATER, Lanes
from hightide.runtime.schedule.in_flight import nothing
from hightide.runtime.surgery import run_of
from hightide.shard import meeting
from hightide.shard.signs import Patience
from hightide.shard.watchman import Watchman
from known_profiles import KnownProfiles

NUM_STEPS = 5
BUILD = {
    "llama": lambda: models.llama(num_layers=2, num_samples=NUM_SAMPLES),
    "llama_tied": lambda: models.llama(tied=True, num_layers=2, num_samples=NUM_SAMPLES),
    "hand_written": lambda: models.hand_written(num_layers=3, num_samples=NUM_SAMPLES),
}
BATCH = {"llama": models.token_batch, "llama_tied": models.token_batch, "hand_written": models.vector_batch}


# Plans of one model are made of one profile; of the usual ones it is there before a rank is forked, with all that is
# loaded lazily.
KNOWN = KnownProfiles(hightide.profiler.model.model_profile.profile_calls)
for module in (hightide.wrapping, hightide.profiler.model.model_profile):
    module.profile_calls = KNOWN  # type: ignore[attr-defined]


def built(subject: str, frozen: bool = False, dtype: str = "float32") -> tuple[nn.Module, Any]:
    model, example = BUILD[subject]()
    model.to(getattr(torch, dtype))
    example = cast(example, dtype)
    if frozen:  # as with adapters: few parameters are trained
        for name, param in model.named_parameters():
            param.requires_grad_("norm" in name or name.endswith("bias") or "down" in name)
    return model, example


def cast(batch: Any, dtype: str) -> Any:
    return {
        name: value.to(getattr(torch, dtype)) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


# A profile runs backward on tensors without values. Where torch is built for CUDA, its engine starts a thread for each
# device then, and no fork of such a process can run backward: there each rank makes its own profiles.
if not torch.backends.cuda.is_built():
    for subject in BUILD:
        model, example = built(subject)
        Plans(model, optimizer_of(model), example)
    del model, example


class WithMasters:
    """What a loop of plain PyTorch does to update 16-bit parameters in fp32."""

    def __init__(self, model: nn.Module) -> None:
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._masters = nn.ParameterList(nn.Parameter(param.detach().float()) for param in self._params)
        self._optimizer = optimizer_of(self._masters)

    def step(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        self._optimizer.step()
        with torch.no_grad():
            for param, master in zip(self._params, self._masters, strict=True):
                param.copy_(master)

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None


def moved(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def digest(weights: dict[str, Tensor]) -> str:
    content = b"".join(
        value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for value in weights.values()
    )
    return hashlib.sha256(content).hexdigest()


def batches_of(subject: str, rank: int, num: int, uneven: bool) -> list[Any]:
    """Each rank has its own; `uneven`: of different sizes."""
    num_samples = NUM_SAMPLES - (rank if uneven else 0)
    return [BATCH[subject](seed=100 * rank + step, num_samples=num_samples) for step in range(num)]


def train(
    rank: int,
    world: int,
    subject: str,
    places: Sequence[str],
    update: str = "deferred",
    clip: float | None = None,
    accumulate: int = 1,
    planned: bool = True,
    frozen: bool = False,
    uneven: bool = False,
    ignored: bool = False,
    sums: str = "host",
    dtype: str = "float32",
    gradients: str = "float32",
    replicas: int = 1,
    device: str = "cpu",
    cleared: bool = True,
) -> dict[str, Any]:
    """`cleared`: gradients, after each step. `replicas`: groups of ranks, each on what it takes for a node of its own,
    that have a copy of everything; the same plans are run without them too. `planned`: whether the plan knows how often
    the loop accumulates. `ignored`: all labels of the last rank are. The weights are compared on the first rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batches = [cast(batch, dtype) for batch in batches_of(subject, rank, NUM_STEPS * accumulate, uneven)]
    if ignored:  # so that no rank divides by 0, the loss is divided by a number that the loop knows
        labels = {"labels": torch.full_like(batches[0]["labels"], -100)} if rank == world - 1 else {}
        batches = [{**batch, **labels, "num_items_in_batch": 50} for batch in batches]
    found: dict[str, Any] = {}
    weights: dict[str, dict[str, Tensor]] = {}
    model, example = built(subject, frozen, dtype)
    passes = accumulate if planned else 1
    gpu = "32MiB" if device == "cpu" else ON_GPU
    plans = Plans(model, optimizer_of(model), example, gpu=gpu, update=update, accumulate=passes, gradients=gradients)
    if replicas > 1:
        pretend_nodes(rank, world, replicas)
        places = [f"{where} in {groups}" for where in places for groups in (replicas, 1)]
    for where in places:
        model, example = built(subject, frozen, dtype)
        optimizer = optimizer_of(model)
        way, _, groups = where.partition(" in ")
        plan = plans.of(world, way, sums, int(groups or 1))
        limits = hightide.Limits(disk=f"{tempfile.gettempdir()}:64MiB") if plan.disk_limit_bytes else None
        wrapped, stepping = hightide.wrap(model, optimizer, example, plan=plan, limits=limits, device=device)
        found[where] = steps(wrapped, stepping, batches, clip, accumulate, cleared)
        weights[where] = {name: value.cpu() for name, value in wrapped.state_dict().items()}
        found[where]["digest"] = digest(weights[where])
        found[where]["deviations"] = hightide.stats(wrapped).deviations
        found[where]["above"] = peaks_above(wrapped)
        hightide.unwrap(wrapped)
        found[where]["unwrapped"] = digest(model.state_dict())
    model, _ = built(subject, frozen, dtype)
    model.to(device)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = optimizer_of(model) if dtype == "float32" else WithMasters(model)
    there = [{name: moved(value, device) for name, value in batch.items()} for batch in batches]
    found["plain"] = steps(ddp, optimizer, there, clip, accumulate, cleared)
    plain = {name: value.cpu() for name, value in model.state_dict().items()}
    del ddp  # before the group: its reducer, as the last to hold it, would wait for a thread that waits for the GIL
    for where in places if rank == 0 else ():
        found[where]["difference"] = max(float((weights[where][name] - plain[name]).abs().max()) for name in plain)
    dist.destroy_process_group()
    return found


def pretend_nodes(rank: int, world: int, nodes: int) -> None:
    """As if so many machines had equally many ranks each: a rank tells the others where it is by its host's name."""
    name = f"node-{rank * nodes // world}"
    meeting.socket = SimpleNamespace(gethostname=lambda: name)


def plan_and_train(rank: int, world: int, gpu: str, host: str) -> dict[str, Any]:
    """Nobody passes a plan, and torchrun's environment says who is there."""
    torch.set_num_threads(1)
    model, example = built("llama", False)
    limits = hightide.Limits(gpu=gpu, host=host)
    wrapped, stepping = hightide.wrap(model, optimizer_of(model), example, limits=limits)
    found = steps(wrapped, stepping, batches_of("llama", rank, NUM_STEPS, False), 0.5, 1)
    stats = hightide.stats(wrapped)
    peaks, plan = [stats.peak_bytes[tier] for tier in (Tier.GPU, Tier.HOST)], stats.plan
    return {**found, "ranks": plan.ranks, "peaks": peaks, "limits": [plan.gpu_limit_bytes, plan.host_limit_bytes]}


def asks_for_more(rank: int, world: int) -> dict[str, Any]:
    """The limit of one rank is too small for any plan; each loop tries again with what the error says is enough."""
    torch.set_num_threads(1)
    model, example = built("hand_written", False)
    limits, told = hightide.Limits(gpu="1KiB" if rank else "16MiB", host="64MiB"), ""
    try:
        hightide.wrap(model, optimizer_of(model), example, limits=limits)
    except InfeasiblePlan as error:
        told, limits = str(error), hightide.Limits(gpu=error.enough[0][Tier.GPU], host="64MiB")
    wrapped, stepping = hightide.wrap(model, optimizer_of(model), example, limits=limits)
    found = steps(wrapped, stepping, batches_of("hand_written", rank, 1, False), 0.5, 1)
    return {**found, "told": told, "limit": hightide.stats(wrapped).plan.gpu_limit_bytes}


class Skipping(nn.Module):
    """Layers that a rank may leave out, each call others; and a parameter that no block owns. All of it may be run in
    several rounds."""

    def __init__(self, rounds: int = 1, frozen: int | None = None) -> None:
        super().__init__()
        self.rounds = rounds
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        if frozen is not None:
            self.layers[frozen].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(16))
        self.shift = nn.Parameter(torch.zeros(16))
        self.skipped: set[int] = set()
        self.shifts = True

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for _ in range(self.rounds):
            for index, layer in enumerate(self.layers):
                if index not in self.skipped:
                    x = layer(x)
        x = x * self.scale
        if self.shifts:
            x = x + self.shift
        return {"loss": ((x - labels) ** 2).mean()}


def skip(
    rank: int,
    world: int,
    where: str,
    update: str,
    set_to_none: bool = True,
    rounds: int = 1,
    accumulate: int = 1,
    sums: str = "host",
    frozen: int | None = None,
) -> dict[str, Any]:
    """Ranks leave out different layers, the first and the last too, and one layer is left out by all. Not
    `set_to_none`: gradients of a step before are there, and zero. Of several `rounds` the first rank runs one less.
    `accumulate`: the loop has promised so many backwards before each step, and steps after one. `frozen`: a layer."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    chosen = [[{1}, {0, 1}], [set(), {3}], [{2}, {2}], [{0}, {3}], [{3}, {3, 1}]]

    def run(model: Any, inner: Skipping, optimizer: Any) -> list[float]:
        losses = []
        for step, skipped in enumerate(chosen):
            inner.skipped, inner.shifts = skipped[rank % 2], (step + rank) % 3 > 0
            inner.rounds = max(1, rounds - (rank == 0))
            generator = torch.Generator().manual_seed(10 * step + rank)
            x, labels = (torch.randn(4, 16, generator=generator) for _ in range(2))
            loss = model(x=x, labels=labels)["loss"]
            loss.backward()
            if update == "deferred" and accumulate == 1:
                torch.nn.utils.clip_grad_norm_(list(model.parameters()), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            losses.append(loss.item())
        return losses

    example = {"x": torch.zeros(4, 16), "labels": torch.zeros(4, 16)}
    model = Skipping(rounds, frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=EPS)
    made = Plans(model, optimizer, example, update=update, blocks=["layers.*"], accumulate=accumulate)
    plan = made.of(world, where, sums)
    wrapped, stepping = hightide.wrap(model, optimizer, example, plan=plan, blocks=["layers.*"])
    losses = run(wrapped, model, stepping)
    weights = wrapped.state_dict()
    hightide.unwrap(wrapped)
    plain = Skipping(frozen=frozen)
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    plain_losses = run(ddp, plain, torch.optim.AdamW(plain.parameters(), lr=3e-3, eps=EPS))
    known = plain.state_dict()
    del ddp  # as above
    difference = max((float((weights[name] - known[name]).abs().max()) for name in weights), default=0.0)
    dist.destroy_process_group()
    return {"losses": losses, "plain": plain_losses, "difference": difference}


class Wandering(nn.Module):
    """Layers in whatever order, as often as one likes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5))
        self.order = list(range(5))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for index in self.order:
            x = x + self.layers[index](x)
        return {"loss": ((x - labels) ** 2).mean()}


def off_the_plan(rank: int, world: int, where: str) -> dict[str, Any]:
    """All ranks call layers as no plan foresees, and the lanes of each are slow at other moments. What lanes issue is
    told in its order, whichever lane it is."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    drawn = random.Random(5)
    orders = [[drawn.randrange(5) for _ in range(drawn.randint(2, 8))] for _ in range(10)]
    delays, issued, submit = random.Random(rank), [], Lanes.submit

    def slowly(lanes: Lanes, id: str, lane: Lane, due: int, after: Sequence[Any], run: Callable[[], Any]) -> Any:
        if lane in BETWEEN_RANKS and run is not nothing:
            issued.append(str(id))
        delay_s = delays.choice((0.0, 0.0, 0.02))

        def late() -> Any:
            time.sleep(delay_s)
            return run()

        return submit(lanes, id, lane, due, after, late)

    def run(model: Any, inner: Wandering, optimizer: Any) -> list[float]:
        losses = []
        for step, order in enumerate(orders):
            inner.order = order
            generator = torch.Generator().manual_seed(10 * step + rank)
            x, labels = (torch.randn(4, 16, generator=generator) for _ in range(2))
            loss = model(x=x, labels=labels)["loss"]
            loss.backward()
            if step % 3 != 1:
                torch.nn.utils.clip_grad_norm_(list(model.parameters()), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    example = {"x": torch.zeros(4, 16), "labels": torch.zeros(4, 16)}
    model = Wandering()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=EPS)
    plan = Plans(model, optimizer, example, num_micro_batches=1, blocks=["layers.*"]).of(world, where)
    Lanes.submit = slowly  # type: ignore[method-assign]
    wrapped, stepping = hightide.wrap(model, optimizer, example, plan=plan, blocks=["layers.*"])
    losses = run(wrapped, model, stepping)
    plain = Wandering()
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    found = run(ddp, plain, torch.optim.AdamW(plain.parameters(), lr=3e-3, eps=EPS))
    del ddp  # as above
    hightide.unwrap(wrapped)
    dist.destroy_process_group()
    return {"losses": losses, "plain": found, "issued": issued}


def other_acts(rank: int, world: int, folder: str) -> dict[str, str]:
    """What the last rank alone does between two forwards, or asks of `wrap`, and what all are told of it."""
    torch.set_num_threads(1)
    batches, is_other = batches_of("hand_written", rank, 2, False), rank == world - 1
    model, example = built("hand_written")
    made = Plans(model, optimizer_of(model), example)
    clip = torch.nn.utils.clip_grad_norm_

    def wrapped(optimizer: Any = None, **options: Any) -> tuple[nn.Module, Any]:
        model, example = built("hand_written")
        if is_other and optimizer is not None:
            optimizer(model)
        return hightide.wrap(model, optimizer_of(model), example, **({"plan": made.of(world, "mixed")} | options))

    def after_backward(act: Callable[[nn.Module, Any], object], saves: bool = False) -> None:
        model, optimizer = wrapped()
        models.loss_of(model, batches[0]).backward()
        if is_other:
            act(model, optimizer)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3
        optimizer.zero_grad()
        try:
            if saves:
                hightide.save(model, optimizer, folder)
            models.loss_of(model, batches[1])
        finally:
            hightide.unwrap(model)

    def first(model: nn.Module) -> nn.Parameter:
        return next(param for param in model.parameters() if param.dim() > 1)  # of a block

    def loaded(seed: int) -> None:
        model, _ = wrapped()
        torch.manual_seed(seed)
        model.load_state_dict({name: torch.randn(param.shape) for name, param in model.named_parameters()})
        try:
            models.loss_of(model, batches[1])
        finally:
            hightide.unwrap(model)

    def average() -> None:
        model, _ = wrapped()
        models.loss_of(model, batches[0]).backward()
        try:
            dist.all_reduce(first(model).grad)
        finally:
            hightide.unwrap(model)

    def freeze(model: nn.Module) -> None:
        first(model).requires_grad_(False)

    attempts: dict[str, Callable[[], object]] = {
        "nothing": lambda: after_backward(lambda *_: None),
        "options": lambda: after_backward(lambda _, optimizer: optimizer.param_groups[1].update(lr=1.0)),
        "a save": lambda: after_backward(lambda _, optimizer: optimizer.param_groups[1].update(lr=1.0), saves=True),
        "a gradient less": lambda: after_backward(lambda model, _: setattr(first(model), "grad", None)),
        "clipped": lambda: after_backward(lambda model, _: clip(model.parameters(), 1e-4)),
        "a little": lambda: after_backward(
            lambda model, _: [param.grad.mul_(1 + 1e-6) for param in model.parameters()]
        ),
        "a group": lambda: after_backward(lambda _, optimizer: optimizer.param_groups[0]["params"].pop()),
        "values": lambda: loaded(rank),
        "a collective on a gradient": average,
        "the model": lambda: wrapped(freeze),
        "update": lambda: wrapped(plan=None, update="in_backward" if is_other else "deferred"),
    }
    told = {}
    for what, attempt in attempts.items():
        try:
            attempt()
            told[what] = ""
        except (hightide.Refused, ValueError) as error:
            told[what] = str(error)
    return told


def ends(rank: int, world: int) -> str:
    """Trains, and leaves all to the end of the program; what comes after what then, a line each."""
    torch.set_num_threads(1)
    end_lanes, end_watchman, destroy = lanes_module._end, Watchman.end, dist.destroy_process_group

    def telling(what: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **named: object) -> object:
            print(json.dumps(what), flush=True)
            return function(*args, **named)

        return call

    lanes_module._end = telling("lanes", end_lanes)  # type: ignore[assignment]
    Watchman.end = telling("watchman", end_watchman)  # type: ignore[method-assign, assignment]
    dist.destroy_process_group = telling("communicators", destroy)
    model, example = built("hand_written")
    optimizer = optimizer_of(model)
    plan = Plans(model, optimizer, example).of(world, "states on the host")
    global kept  # until the end
    kept = hightide.wrap(model, optimizer, example, plan=plan)
    steps(*kept, batches_of("hand_written", rank, 1, False), None, 1)
    return "trained"


def fetches_twice(rank: int, world: int) -> list[bool]:
    """Whether there is something to gather, when the same is fetched again while it is on its way."""
    model, example = built("hand_written")
    optimizer = optimizer_of(model)
    plan = Plans(model, optimizer, example).of(world, "streamed")
    wrapped, _ = hightide.wrap(model, optimizer, example, plan=plan)
    performer = run_of(wrapped).performer
    chunk = next(index for index, place in enumerate(performer.chunks.placed) if place.is_gathered)
    found = []
    for _ in range(2):
        performer.fetch_param(chunk, 0)
        found.append(performer.gather(chunk, 0) is not nothing)
    return found


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": ((x - labels) ** 2).mean()}


def normalise(rank: int, world: int, where: str) -> dict[str, Any]:
    """Trains, and evaluates after each step, with statistics that only the forward of each rank has made."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    example = {"x": torch.zeros(4, 16), "labels": torch.zeros(4, 16)}

    def run(model: Any, optimizer: Any) -> list[float]:
        losses = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x, labels = (torch.randn(4, 16, generator=generator) for _ in range(2))
            losses += steps(model, optimizer, [{"x": x, "labels": labels}], None, 1)["losses"]
            model.eval()
            with torch.no_grad():
                losses.append(model(x=torch.ones(4, 16), labels=torch.zeros(4, 16))["loss"].item())
            model.train()
        return losses

    model = Normalised()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=EPS)
    plan = Plans(model, optimizer, example, blocks=["layers.*"]).of(world, where)
    wrapped, stepping = hightide.wrap(model, optimizer, example, plan=plan, blocks=["layers.*"])
    losses = run(wrapped, stepping)
    hightide.unwrap(wrapped)
    plain = Normalised()
    ddp = DistributedDataParallel(plain)
    known = run(ddp, torch.optim.AdamW(plain.parameters(), lr=3e-3, eps=EPS))
    del ddp  # as above
    dist.destroy_process_group()
    return {"losses": losses, "plain": known, "digest": digest(model.state_dict())}


def pairs(rank: int, world: int, places: Sequence[str], clip: float | None, backwards: int) -> dict[str, Any]:
    """Two forwards before each backward, as contrastive losses have them, or before two: all that the plan did not
    foresee. Held against plain PyTorch whose gradients are averaged before each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    example = {"x": torch.zeros(4, 16), "labels": torch.zeros(4, 16)}

    def run(model: Any, optimizer: Any, average: Callable[[], None]) -> list[float]:
        losses = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            inputs = [torch.randn(4, 16, generator=generator) for _ in range(4)]
            first, second = (model(x=x, labels=labels)["loss"] for x, labels in (inputs[:2], inputs[2:]))
            for loss in (first, second) if backwards == 2 else (first * second,):
                loss.backward()
            average()
            if clip is not None:
                losses.append(float(torch.nn.utils.clip_grad_norm_(list(model.parameters()), clip)))
            optimizer.step()
            optimizer.zero_grad()
            losses += [first.item(), second.item()]
        return losses

    def average() -> None:
        for param in plain.parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= world

    plain = Skipping()
    known = run(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3, eps=EPS), average)
    found = {}
    for where in places:
        model = Skipping()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=EPS)
        plan = Plans(model, optimizer, example, blocks=["layers.*"]).of(world, where)
        wrapped, stepping = hightide.wrap(model, optimizer, example, plan=plan, blocks=["layers.*"])
        losses = run(wrapped, stepping, lambda: None)
        hightide.unwrap(wrapped)
        values = model.state_dict()
        difference = max(float((values[name] - value).abs().max()) for name, value in plain.state_dict().items())
        found[where] = {"losses": losses, "difference": difference}
    dist.destroy_process_group()
    return {"plain": known, "found": found}


def overflow(rank: int, world: int, where: str) -> dict[str, Any]:
    """With a GradScaler; the loss of one rank overflows in one step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batches = batches_of("llama", rank, 4, False)

    def run(model: Any, optimizer: Any) -> dict[str, Any]:
        scaler, found = torch.amp.GradScaler("cpu", init_scale=64.0), {"losses": [], "scales": []}
        for step, batch in enumerate(batches):
            loss = models.loss_of(model, batch)
            scaler.scale(loss * (torch.inf if (step, rank) == (1, 1) else 1.0)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(list(model.parameters()), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found["losses"].append(loss.item())
            found["scales"].append(scaler.get_scale())
        return found

    model, example = built("llama")
    optimizer = optimizer_of(model)
    plan = Plans(model, optimizer, example).of(world, where)
    found = run(*hightide.wrap(model, optimizer, example, plan=plan))
    model, _ = built("llama")
    found["plain"] = run(DistributedDataParallel(model), optimizer_of(model))
    return found


def values(rank: int, world: int, where: str) -> dict[str, Any]:
    """Ranks begin with different values and states: those of the first count. Then values are loaded, and read."""
    torch.set_num_threads(1)
    model, example = built("hand_written", False)
    with torch.no_grad():
        for param in model.parameters():
            param += rank
    optimizer = optimizer_of(model)
    plan = Plans(model, optimizer, example).of(world, where)
    begin = {name: value.clone() for name, value in model.state_dict().items()}
    wrapped, stepping = hightide.wrap(model, optimizer, example, plan=plan)
    found: dict[str, Any] = {
        "before": all(torch.equal(value, begin[name]) for name, value in wrapped.state_dict().items())
    }
    with torch.no_grad():
        found["evaluated"] = [
            models.loss_of(wrapped, batch).item() for batch in batches_of("hand_written", 0, 2, False)
        ]
    generator = torch.Generator().manual_seed(5)
    loaded = {name: torch.randn(value.shape, generator=generator) / 10 for name, value in begin.items()}
    wrapped.load_state_dict(loaded)
    found["loaded"] = all(torch.equal(value, loaded[name]) for name, value in wrapped.state_dict().items())
    steps(wrapped, stepping, batches_of("hand_written", rank, 2, False), 0.5, 1)
    with torch.no_grad():
        found["after"] = [models.loss_of(wrapped, batch).item() for batch in batches_of("hand_written", 0, 2, False)]
    hightide.unwrap(wrapped)
    plain = model.state_dict()
    with torch.no_grad():
        found["unwrapped"] = [models.loss_of(model, batch).item() for batch in batches_of("hand_written", 0, 2, False)]
    found["digest"] = digest(plain)
    return found


def refuse(rank: int, world: int) -> dict[str, Any]:
    """What is not there for several ranks says so, and training goes on."""
    torch.set_num_threads(1)
    model, example = built("hand_written")
    optimizer = optimizer_of(model)
    plan = Plans(model, optimizer, example).of(world, "mixed")
    wrapped, stepping = hightide.wrap(model, optimizer, example, plan=plan)
    batches = batches_of("hand_written", rank, 2, False)
    models.loss_of(wrapped, batches[0]).backward()
    tried = {
        "states": lambda: len(stepping.state),
        "a larger batch": lambda: models.loss_of(wrapped, models.vector_batch(num_samples=500_000)),
        "verify": lambda: hightide.verify(*built("hand_written")[:1], optimizer, example),
    }
    said = {}
    for what, attempt in tried.items():
        try:
            attempt()
        except (hightide.Refused, ValueError) as refusal:
            said[what] = str(refusal)
    stepping.step()
    stepping.zero_grad()
    steps(wrapped, stepping, batches[1:], 0.5, 1)
    return said


def raises(rank: int, world: int, where: str, at: str) -> dict[str, Any]:
    """The last rank raises in a block, or between two steps."""
    torch.set_num_threads(1)
    model, example = built("hand_written", False)
    optimizer = optimizer_of(model)
    plan = Plans(model, optimizer, example).of(world, where)
    wrapped, stepping = hightide.wrap(model, optimizer, example, plan=plan)
    for step, batch in enumerate(batches_of("hand_written", rank, 4, False)):
        if (step, rank) == (2, world - 1):
            if at == "step":
                raise ValueError("enough")
            batch = {**batch, "x": batch["x"][:, :-1]}  # no block takes it
        steps(wrapped, stepping, [batch], 0.5, 1)
    return {}


def gradients(rank: int, world: int, where: str, replicas: int = 1) -> dict[str, Any]:
    """Between backward and step a loop reads gradients, clips by other norms, replaces and adds to them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pretend_nodes(rank, world, replicas)
    batches = batches_of("hand_written", rank, 5, False)

    def run(model: Any, inner: nn.Module, optimizer: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"losses": [], "norms": [], "read": []}
        for batch, norm_type in zip(batches, (math.inf, 1.0, 3.0, 2.0, -math.inf), strict=True):
            loss = models.loss_of(model, batch)
            loss.backward()
            params = dict(inner.named_parameters())
            found["read"].append({name: param.grad.double().sum().item() for name, param in params.items()})
            first, second, third = list(params.values())[:3]
            first.grad = first.grad * 0.5
            second.grad.add_(torch.full(second.shape, 0.01))
            third.grad.mul_(2.0)
            if norm_type > 0:
                total = torch.nn.utils.clip_grad_norm_(list(params.values()), 0.5, norm_type=norm_type)
            else:
                total = torch.nn.utils.get_total_norm([p.grad for p in params.values()], norm_type=norm_type)
            found["norms"].append(float(total))
            found["read"].append({name: param.grad.abs().double().sum().item() for name, param in params.items()})
            optimizer.step()
            optimizer.zero_grad()
            found["losses"].append(loss.item())
        return found

    model, example = built("hand_written")
    optimizer = optimizer_of(model)
    plan = Plans(model, optimizer, example).of(world, where, replicas=replicas)
    wrapped, stepping = hightide.wrap(model, optimizer, example, plan=plan)
    found = run(wrapped, model, stepping)
    model, _ = built("hand_written")
    found["plain"] = run(DistributedDataParallel(model), model, optimizer_of(model))
    dist.destroy_process_group()
    return found


def read_alone(rank: int, world: int, what: str, evaluates: bool) -> dict[str, Any]:
    """The first rank reads what all ranks would have to, and the others go on: with the next step, or `evaluates`."""
    torch.set_num_threads(1)
    hightide.api.Patience = lambda timeout_s: Patience(timeout_s, beat_s=0.3)
    model, example = built("hand_written")
    optimizer = optimizer_of(model)
    plan = Plans(model, optimizer, example).of(world, "streamed")
    wrapped, stepping = hightide.wrap(model, optimizer, example, plan=plan)
    for batch in batches_of("hand_written", rank, 3, False):
        models.loss_of(wrapped, batch).backward()
        if rank == 0 and what == "gradient":
            dict(wrapped.named_parameters())["first.weight"].grad.clone()
        elif rank == 0:
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0, norm_type=1.0)
        elif evaluates:
            with torch.no_grad():
                models.loss_of(wrapped, batch)
        stepping.step()
        stepping.zero_grad()
    return {}


def moves(rank: int, world: int, route: Sequence[Sequence[Any]], subject: str, dtype: str) -> dict[str, Any]:
    """From plan to plan, each (where, parts of a slot, groups), a step under each; and the same steps without moving.
    In between an allocation fails on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, example = built(subject, dtype=dtype)
    made = Plans(model, optimizer_of(model), example)
    plans = [made.of(world, where, replicas=groups, slot_part=part) for where, part, groups in route]
    batches = [cast(batch, dtype) for batch in batches_of(subject, rank, len(plans) + 1, False)]
    found: dict[str, Any] = {}
    for is_moving in (False, True):
        model, example = built(subject, dtype=dtype)
        wrapped, stepping = hightide.wrap(model, optimizer_of(model), example, plan=plans[0])
        run = run_of(wrapped)
        losses = []
        for number, batch in enumerate(batches):
            told = steps(wrapped, stepping, [batch], None, 1)  # norms differ where chunks are cut elsewhere
            losses += told["losses"]
            if is_moving and number < len(plans):
                if number == 0:
                    found["stays"] = _fails_to_move(rank, run, plans[-1])
                run.move_to(Solution.of(run.profile, plans[number]))
        found["moved" if is_moving else "stayed"] = {
            "losses": losses,
            "digest": digest(wrapped.state_dict()),
        }
        hightide.unwrap(wrapped)
    dist.destroy_process_group()
    return found


def _fails_to_move(rank: int, run: Any, plan: Any) -> str:
    if rank == 1:
        stores = moving.PlanStores
        moving.PlanStores = lambda *args: (_ for _ in ()).throw(MemoryError("nothing left"))
    try:
        run.move_to(Solution.of(run.profile, plan))
    except MemoryError as error:
        return str(error)
    finally:
        if rank == 1:
            moving.PlanStores = stores
    return ""


def watched(rank: int, world: int, seen: str) -> dict[str, Any]:
    """The last rank alone sees that the plan is off: blocks take more memory, or links are slow. `own`: of each rank,
    what it has measured before."""
    torch.set_num_threads(1)
    links, estimate = load_machine("4x-rtx-4090").links, hightide.posing.estimate
    machine = replace(hightide.this_machine.simulated_machine(), estimates=(), links=links)
    hightide.this_machine.simulated_machine = lambda: machine
    hightide.posing.estimate = lambda *args: replace(
        estimate(*args), source="measured, for this test", glue_s=1e-6 * (rank + 1)
    )
    if seen == "time":
        hightide.posing.SMALL_NUMEL = 0  # a thorough search
    is_last = rank == world - 1

    def end_step(self: StepTimes) -> Measured | None:
        if self._run.num_steps < 3 or seen != "time":
            return None
        forecast = self._run.observer._step
        factor = {Lane.H2D: 3000.0, Lane.D2H: 3000.0} if is_last else {}
        lanes = {lane: factor.get(lane, 1.0) * forecast.simulated.action_s.get(lane, 0.0) for lane in Lane}
        return Measured((30.0 if is_last else 1.0) * forecast.step_s, lanes)

    def expected_shortage(self: RankedWatch) -> MemoryShortage | None:
        is_due = seen == "memory" and is_last and self._run.num_passes == 2
        factors = dict.fromkeys({call.kind for call in self.problem.profile.calls}, 1.3)
        return MemoryShortage(self.problem.terms.gpu_bytes + 1, self._num_ticks, factors) if is_due else None

    StepTimes.end_step, RankedWatch._expected_shortage = end_step, expected_shortage
    RankedWatch._overrun = lambda self: None
    model, example = built("hand_written")
    limits = hightide.Limits(gpu="100KiB", host="64MiB")
    wrapped, stepping = hightide.wrap(model, optimizer_of(model), example, limits=limits)
    run = run_of(wrapped)
    before, watch, found = run.plan, run.observer, {"plans": []}
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches_of("hand_written", rank, 6, False):
            losses += steps(wrapped, stepping, [batch], None, 1)["losses"]
            found["plans"].append(run.plan.digest)
    found["told"] = [str(one.message) for one in caught if "forecast" in str(one.message)]
    found |= {"losses": losses, "glue_s": watch.problem.costs.glue_s, "is_watched": run.observer is not None}
    found["digest"] = digest(wrapped.state_dict())
    hightide.unwrap(wrapped)
    StepTimes.end_step = lambda self: None
    model, example = built("hand_written")
    wrapped, stepping = hightide.wrap(model, optimizer_of(model), example, plan=before)  # which stays
    same = [
        steps(wrapped, stepping, [batch], None, 1)["losses"] for batch in batches_of("hand_written", rank, 6, False)
    ]
    return {**found, "same": [loss for losses in same for loss in losses], "same digest": digest(wrapped.state_dict())}


class Dropping(nn.Module):
    """Blocks that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16)) for _ in range(3)
        )

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": ((x - labels) ** 2).mean()}


def loops(rank: int, world: int, where: str, loop: str, replicas: int = 1) -> dict[str, Any]:
    """Loops that users of DDP write: `dropout` (each rank draws its own), `autocast`, `scaler` (with autocast),
    `items` (a mean over the labels of all ranks), `last batch` (with fewer samples, on one rank with none of them
    labelled), `accumulate` (gradients stay, and nothing is exchanged before the last of a step's passes)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pretend_nodes(rank, world, replicas)
    accumulate = 3 if loop == "accumulate" else 1
    counted: list[list[int]] = []

    def build() -> tuple[nn.Module, Any]:
        if loop != "dropout":
            return built("llama" if loop in ("items", "last batch") else "hand_written")
        return Dropping(), {"x": torch.zeros(NUM_SAMPLES, 16), "labels": torch.zeros(NUM_SAMPLES, 16)}

    def run(model: Any, optimizer: Any, is_plain: bool) -> list[float]:
        torch.manual_seed(100 + rank)
        scaler, losses = torch.amp.GradScaler("cpu", init_scale=32.0, enabled=loop == "scaler"), []
        for step in range(4):
            for number in range(accumulate):
                no_exchange = model.no_sync() if is_plain and number < accumulate - 1 else nullcontext()
                with no_exchange, torch.autocast("cpu", torch.bfloat16, enabled=loop in ("autocast", "scaler")):
                    loss = models.loss_of(model, _batch_of(loop, rank, world, step * accumulate + number))
                    scaler.scale(loss / accumulate).backward()
                losses.append(loss.item())
                if not is_plain:
                    counted.append([step, hightide.stats(model).moved_bytes.get(Lane.REDUCE, 0)])
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return losses

    model, example = build()
    optimizer = optimizer_of(model)
    made = Plans(model, optimizer, example, accumulate=accumulate, num_micro_batches=1 if loop == "dropout" else 2)
    plan = made.of(world, where, sums="gpu", replicas=replicas)
    wrapped, stepping = hightide.wrap(model, optimizer, example, plan=plan)
    found = {"losses": run(wrapped, stepping, False), "reduced": counted}
    weights = wrapped.state_dict()
    model, _ = build()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    found["plain"] = run(ddp, optimizer_of(model), True)
    del ddp  # before its group
    found["difference"] = max(
        (float((weights[k] - v).abs().max()) for k, v in model.state_dict().items() if weights), default=0.0
    )
    dist.destroy_process_group()
    return found


def _batch_of(loop: str, rank: int, world: int, number: int) -> Any:
    if loop == "dropout":
        generator = torch.Generator().manual_seed(10 * number + rank)
        return {name: torch.randn(NUM_SAMPLES, 16, generator=generator) for name in ("x", "labels")}
    subject = "llama" if loop in ("items", "last batch") else "hand_written"
    batch = batches_of(subject, rank, number + 1, False)[number]
    if loop == "last batch" and number == 3:
        batch = {name: value[: 1 + rank] for name, value in batch.items()}
    if loop in ("items", "last batch"):
        labels = batch["labels"].clone()
        labels[:, : 2 + 3 * rank] = -100  # ranks have different numbers of them
        if rank == world - 1 and number == 3:
            labels[:] = -100
        # A loss that is divided by the number of all ranks' labels, and by the mean over ranks multiplied again
        num_items = (labels[:, 1:] != -100).sum()
        dist.all_reduce(num_items)
        batch = {**batch, "labels": labels, "num_items_in_batch": num_items.item() / world}
    return batch


def in_memory(rank: int, world: int, gpu_bytes: int, host_bytes: int) -> dict[str, Any]:
    """A model whose parameters and states the host holds once, in shards."""
    alike.usable_cores = lambda: 16
    dist.init_process_group("gloo")
    model, example = built("hand_written")  # with it come all modules
    wrapped, stepping = hightide.wrap(model, optimizer_of(model), example)
    steps(wrapped, stepping, batches_of("hand_written", rank, 2, False), 0.5, 1)
    hightide.unwrap(wrapped)
    before_bytes = resident_bytes()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    example = torch.zeros(2, 1024)
    limits = hightide.Limits(gpu=gpu_bytes, host=host_bytes)
    wrapped, stepping = hightide.wrap(model, optimizer, example, limits=limits, blocks=["*"])
    for _ in range(2):
        wrapped(torch.randn(2, 1024)).pow(2).mean().backward()
        stepping.step()
        stepping.zero_grad()
    run = run_of(wrapped)
    run.executor.wait_for_updates()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith(UPDATER)]
    peaks = {str(tier): size for tier, size in hightide.stats(wrapped).peak_bytes.items()}
    cores = {"sharers": 1 + len(names), "torch": torch.get_num_threads()}
    return {"bytes": resident_bytes() - before_bytes, "peaks": peaks, "above": peaks_above(wrapped), **cores}


def saves(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A checkpoint of two groups goes on without groups, and one of no groups in two; states and gradients too."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pretend_nodes(rank, world, 2)
    model, example = built("hand_written", dtype="bfloat16")
    made = Plans(model, optimizer_of(model), example)
    batches = [cast(batch, "bfloat16") for batch in batches_of("hand_written", rank, 4, False)]
    found: dict[str, Any] = {}
    for groups in (2, 1):
        model, example = built("hand_written", dtype="bfloat16")
        wrapped, stepping = hightide.wrap(
            model, optimizer_of(model), example, plan=made.of(world, "mixed", replicas=groups)
        )
        steps(wrapped, stepping, batches[:2], 0.5, 1)
        hightide.save(wrapped, stepping, f"{folder}/{groups}")
        state, saved = stepping.state_dict(), digest(wrapped.state_dict())
        moments = {f"{key}.{name}": v for key, one in state.get("state", {}).items() for name, v in one.items()}
        losses = steps(wrapped, stepping, batches[2:], 0.5, 1)["losses"]
        hightide.unwrap(wrapped)
        model, example = built("hand_written", dtype="bfloat16")
        wrapped, stepping = hightide.wrap(
            model, optimizer_of(model), example, plan=made.of(world, "streamed", replicas=3 - groups, slot_part=2)
        )
        hightide.load(wrapped, stepping, f"{folder}/{groups}")
        state = stepping.state_dict()
        again = {f"{key}.{name}": v for key, one in state.get("state", {}).items() for name, v in one.items()}
        found[str(groups)] = {
            "same": digest(wrapped.state_dict()) == saved,
            "moments": len(again) if all(torch.equal(again[name], moment) for name, moment in moments.items()) else -1,
            "losses": [losses, steps(wrapped, stepping, batches[2:], 0.5, 1)["losses"]],
        }
        hightide.unwrap(wrapped)
    dist.destroy_process_group()
    return found


def first_values(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Of a model in files, of which each rank reads its shards, and of one that is initialised in its chunks, for which
    each rank has another seed."""
    torch.set_num_threads(1)
    model, example = built("llama")
    plan, read = Plans(model, optimizer_of(model), example).of(world, "streamed"), [0]
    load, read_into = Chunks.load, StoredTensor._read_into

    def counted(self: StoredTensor, file: int, flat: Tensor) -> None:
        read[0] += flat.nbytes
        read_into(self, file, flat)

    def loaded(self: Chunks, *args: Any) -> None:
        read[0] = 0
        load(self, *args)

    StoredTensor._read_into, Chunks.load = counted, loaded  # type: ignore[method-assign]
    in_files = hightide.from_pretrained(folder)
    found = {"whole": sum(param.nbytes for param in in_files.parameters())}
    with torch.device("meta"):
        on_meta = type(model)(model.config)
    for what, one in {"in files": in_files, "on meta": on_meta}.items():
        torch.manual_seed(rank)
        wrapped, _ = hightide.wrap(one, optimizer_of(one), example, plan=plan)
        found |= {what: digest(wrapped.state_dict()), f"read {what}": read[0]}
        hightide.unwrap(wrapped)
    return found
