"""Speed and memory of training steps: one JSON line per run, each run in its own process.

    python bench/throughput.py --system resident,hightide --recompute --gpu 24GiB --update in_backward

compares two systems. `--run="OPTIONS"`, repeated, makes any other comparison: each adds a run whose options override
those outside. The first run is the reference of the ratios.

`--floors` adds what links and host update need alone. The step's floor is the largest of these and of compute alone,
which is the same run with everything on the GPU.

What ranks cost beside the bytes that they exchange, which is at most 2% of a step:

    python bench/throughput.py --gpu 24GiB --update in_backward --gradients param --run="" --run=--collectives

`step_s` is the time of all steps, started without waiting in between and finished to the last update, divided by their
number. `event_s` are the same steps one by one, by GPU events; `synced_s` are other steps with a wait for the GPU after
each one, which hides less.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import floors
import lane_times
import lane_trace
import plans
import torch
from deepspeed_peer import DeepSpeed
from resident import Resident
from roundpipe_peer import RoundPipe
from shapes import batches, build, num_params, step_flop
from torch import Tensor, nn

import hightide
from hightide.integrations.shapes import SHAPES
from hightide.ir.limits import parse_disks
from hightide.ir.plan import GradientDtype, Update
from hightide.ir.tier import Tier
from hightide.ir.units import format_bytes, parse_bytes
from hightide.runtime.surgery import run_of
from hightide.shard.meeting import EVEN_ALONE_SWITCH

LR = 1e-5
AUTO = "auto"
# deepspeed is ZeRO-3, with --disk ZeRO-Infinity; roundpipe-stale trains with gradients that are one step old
SYSTEMS = ("hightide", "resident", "deepspeed", "zero2", "roundpipe", "roundpipe-stale")


@dataclass(frozen=True)
class System:
    step: Callable[[Tensor], Tensor]  # returns the loss, without waiting for it
    drain: Callable[[], None]  # waits for everything that the steps left unfinished
    model: nn.Module
    wrapped: bool
    optimizer: Any = None  # hightide's
    norms: list[Tensor] = field(default_factory=list)  # hightide's, of each step that was clipped


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--run", action="append", default=[], metavar="OPTIONS", help="one more run, with these options on top")
    add("--system", default="hightide", help=f"of {', '.join(SYSTEMS)}; several with commas")
    add("--model", default="llama-3.2-3b", choices=SHAPES)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu: the simulated accelerator")
    add("--sequences", type=int, default=16, help="per step")
    add("--length", type=int, default=2048, help="tokens per sequence")
    add("--gpu", help="hightide: limit of GPU memory, enforced by torch's allocator too, such as 24GiB")
    add("--host", help="hightide: limit of host memory")
    add("--disk", action="append", metavar="FOLDER:SIZE", help="hightide: a disk beside them, such as /scratch:48GiB")
    add(
        "--states-on-disk",
        type=int,
        metavar="BUFFERS",
        help="hightide: no choice; all states there, by so many buffers",
    )
    add("--update", default="deferred", choices=["deferred", "in_backward"])
    add("--gradients", default="float32", choices=["float32", "param"], help="without --plan: of finished gradients")
    add("--clip", type=float, help="clip gradients to this norm")
    add(
        "--calls",
        type=lambda text: text if text == AUTO else int(text),
        default=1,
        help="of equal size per step, which is planned as a whole, or auto: as the planner chooses; only hightide",
    )
    add("--micro-batch", type=int, help="sequences; resident: 4 unless given")
    add("--plan", help="hightide: a plan file, instead of limits and micro-batch")
    add("--save-plan", help="hightide: write the plan that was used")
    add("--recompute", action="store_true", help="resident: keep only each block's input (hightide: see the plan)")
    add("--compile", action=argparse.BooleanOptionalAction, help="compile blocks; on CUDA unless said otherwise")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add("--steps", type=int, default=12)
    add("--synced-steps", type=int, help="as many as --steps unless given")
    add("--warmup", type=int, default=3)
    add(
        "--collectives",
        action="store_true",
        help="hightide: one rank gathers and reduces as each of several does, in a process group of its own",
    )
    add("--trace", help="write a Chrome trace of two more steps")
    add("--record", help="hightide: write the second of two more steps as a timeline, for `hightide simulate`")
    add("--lanes", type=int, default=0, metavar="STEPS", help="hightide: lanes of as many steps, told beside found")
    add("--floors", action="store_true", help="hightide: measure each lane alone too, after the steps")
    add("--label", help="name of the run in the table")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    systems = options.system.split(",")
    if not options.run and len(systems) == 1:
        print(json.dumps(measure(options)), flush=True)
        return 0
    common = _without_runs(argv)
    added = options.run or [f"--system {system}" for system in systems]
    results = [_run_apart([*common, *shlex.split(extra)], extra.removeprefix("--system ")) for extra in added]
    print_table(results)
    return int(any("error" in result for result in results))


def _without_runs(argv: list[str]) -> list[str]:
    kept = list(argv)
    while "--run" in kept:
        at = kept.index("--run")
        del kept[at : at + 2]
    return [text for text in kept if not text.startswith("--run=")]


def _run_apart(argv: list[str], label: str) -> dict[str, Any]:
    labelled = argv if parse(argv).label else [*argv, f"--label={label}"]
    done = subprocess.run([sys.executable, __file__, *labelled], stdout=subprocess.PIPE, text=True)
    lines = done.stdout.strip().splitlines()
    result = json.loads(lines[-1]) if done.returncode == 0 else {"label": label, "error": f"exit {done.returncode}"}
    print(json.dumps(result), flush=True)
    return result


# -- one run ----------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    cuda = torch.device(options.device).type == "cuda"
    if cuda:
        torch.zeros(1, device=options.device)
    bare_bytes = rss_bytes("VmRSS")
    compile = cuda if options.compile is None else options.compile
    started_s = time.perf_counter()
    system = make(options, compile)
    setup_s = time.perf_counter() - started_s
    data = batches(system.model, options.sequences, options.length)
    losses: list[Tensor] = []

    def steps(count: int, after: Callable[[], None] = lambda: None) -> None:
        for _ in range(count):
            losses.append(system.step(data[len(losses) % len(data)]))
            after()

    warm_s = _timed(lambda: steps(options.warmup), system)
    before = hightide.stats(system.model) if system.wrapped else None
    marks, device_before = Marks(cuda), device_bytes()
    total_s = _timed(lambda: steps(options.steps, marks.set), system)
    device_after = device_bytes()
    after = hightide.stats(system.model) if system.wrapped else None
    synced_s = _synced(steps, options.steps if options.synced_steps is None else options.synced_steps)
    result: dict[str, Any] = {
        "label": options.label or options.system,
        **{
            key: getattr(options, key)
            for key in ("system", "model", "sequences", "calls", "length", "gpu", "clip", "dtype")
        },
        "compile": compile,
        "step_s": total_s / options.steps,
        "event_s": summary(marks.seconds()),
        "each_event_s": marks.seconds(),
        "each_norm": [norm.item() for norm in system.norms[options.warmup :][: options.steps]],
        "synced_s": summary(synced_s),
        "setup_s": setup_s,
        "first_steps_s": warm_s,
        **_rates(system.model, options, total_s / options.steps),
        **_memory(cuda, bare_bytes),
        "device_bytes_per_step": {
            way: (device_after[way] - device_before[way]) / options.steps for way in device_after
        },
        "loss_first": losses[0].item(),
        "loss_last": losses[-1].item(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }
    if before is not None and after is not None:
        result |= _hightide_part(before, after, result)
    else:
        result |= {"recompute": options.recompute, "micro_batch": options.micro_batch}
    if options.floors and system.wrapped:
        result["floors"] = floors.measure(run_of(system.model), result["moved_bytes_per_step"])
    if options.lanes and system.wrapped:
        result["lanes"] = lane_times.measure(system.model, steps, options.lanes)
    if options.record and system.wrapped:
        with hightide.record(system.model) as recording:
            steps(2)
        recording.timeline.save(options.record)
    if options.trace:
        result["busy"] = lane_trace.record(
            lambda: steps(2), run_of(system.model) if system.wrapped else None, options.trace
        )
    return result


def make(options: argparse.Namespace, compile: bool) -> System:
    if options.system not in SYSTEMS:
        raise SystemExit(f"--system {options.system}: there are {', '.join(SYSTEMS)}")
    if options.system in ("hightide", "resident"):
        return {"hightide": make_hightide, "resident": make_resident}[options.system](options, compile)
    return make_roundpipe(options) if options.system.startswith("roundpipe") else make_deepspeed(options)


def make_resident(options: argparse.Namespace, compile: bool) -> System:
    options.micro_batch = options.micro_batch or min(4, options.sequences)
    model = build(options.model, options.length, getattr(torch, options.dtype), options.device)
    training = Resident(
        model,
        micro_batch=options.micro_batch,
        lr=LR,
        clip=options.clip,
        recompute=options.recompute,
        compile=compile,
    )
    return System(training.step, lambda: None, model, wrapped=False)


def make_deepspeed(options: argparse.Namespace) -> System:
    """ZeRO-3 with all but the present block on the host; with --disk, states in the folder of the first. ZeRO-2 with
    parameters on the GPU."""
    if options.gpu:
        limit_gpu(options.gpu)
    options.micro_batch = options.micro_batch or min(4, options.sequences)
    disk = parse_disks(options.disk, "--disk")[0].path if options.disk else None
    stage = 2 if options.system == "zero2" else 3
    peer = DeepSpeed(options.micro_batch, options.sequences // options.micro_batch, LR, options.clip, disk, stage)
    model = build(options.model, options.length, getattr(torch, options.dtype))
    return System(peer.step_of(model), lambda: None, model, wrapped=False)


def make_roundpipe(options: argparse.Namespace) -> System:
    """With a head of its own: it knows no tied ones."""
    if options.gpu:
        limit_gpu(options.gpu)
    options.micro_batch = options.micro_batch or min(4, options.sequences)
    model = build(options.model, options.length, getattr(torch, options.dtype), tied=False)
    peer = RoundPipe(model, options.sequences // options.micro_batch, LR, options.system == "roundpipe-stale")
    return System(peer.step, peer.wait, model, wrapped=False)


def limit_gpu(limit: str) -> None:
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, parse_bytes(limit, "--gpu") / total_bytes))


def make_hightide(options: argparse.Namespace, compile: bool) -> System:
    if options.gpu and options.device != "cpu":
        limit_gpu(options.gpu)
    model = build(options.model, options.length, getattr(torch, options.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    cuts = 1 if options.calls == AUTO else options.calls  # the planner is given all samples of a step to choose
    if options.sequences % cuts:
        raise SystemExit(f"--sequences {options.sequences} cannot be cut into --calls {cuts} of equal size")
    example = batches(model, options.sequences // cuts, options.length, count=1)[0]
    wanted: dict[str, Any] = {"update": options.update, "accumulate": options.calls}
    if compile:
        wanted["compile"] = True
    if options.plan or options.states_on_disk:
        wanted["plan"] = hightide.Plan.load(options.plan) if options.plan else _states_on_disk(options)
        wanted["limits"] = hightide.Limits(disk=options.disk) if options.disk else None
    else:
        wanted["limits"] = hightide.Limits(gpu=options.gpu, host=options.host, disk=options.disk)
        wanted["gradients"] = options.gradients
        wanted["micro_batch"] = options.micro_batch
    if options.collectives:
        os.environ[EVEN_ALONE_SWITCH] = "1"
    model, optimizer = hightide.wrap(
        model, optimizer, {"input_ids": example, "labels": example}, device=options.device, **wanted
    )
    options.calls = hightide.stats(model).plan.accumulate
    if options.save_plan:
        hightide.stats(model).plan.save(options.save_plan)

    norms: list[Tensor] = []

    def step(tokens: Tensor) -> Tensor:
        for part in tokens.chunk(options.calls):
            loss = model(input_ids=part, labels=part).loss / options.calls
            loss.backward()
        if options.clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip))
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() * options.calls

    return System(
        step, lambda: run_of(model).executor.wait_for_updates(), model, wrapped=True, optimizer=optimizer, norms=norms
    )


def _states_on_disk(options: argparse.Namespace) -> hightide.Plan:
    """What a person would write to see the disk at work: the search keeps as much as it can elsewhere."""
    written = plans.HandWritten(
        options.model,
        options.sequences,
        options.length,
        options.gpu or "24GiB",
        Update(options.update),
        options.micro_batch or min(8, options.sequences),
        inputs=Tier.HOST,
        gradients=GradientDtype(options.gradients),
        state_buffers=options.states_on_disk,
    )
    return plans.make(written, plans.profile_of(options.model, options.sequences, options.length))


# -- what is measured -------------------------------------------------------------------------------------------------


class Marks:
    """The end of each step, as the GPU sees it, without waiting."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.marks: list[Any] = []
        self.set()

    def set(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        pairs = pairwise(self.marks)
        return [first.elapsed_time(second) / 1e3 if self.cuda else second - first for first, second in pairs]


def _timed(work: Callable[[], None], system: System) -> float:
    started_s = time.perf_counter()
    work()
    system.drain()
    synchronize()
    return time.perf_counter() - started_s


def _synced(steps: Callable[..., None], count: int) -> list[float]:
    ends_s = [time.perf_counter()]

    def end() -> None:
        synchronize()
        ends_s.append(time.perf_counter())

    steps(count, end)
    return [second - first for first, second in pairwise(ends_s)]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def summary(seconds: list[float]) -> dict[str, float]:
    """`spread` is (max - min) / median."""
    if not seconds:
        return {}
    median, low, high = statistics.median(seconds), min(seconds), max(seconds)
    return {"median": median, "min": low, "max": high, "spread": (high - low) / median}


def _rates(model: nn.Module, options: argparse.Namespace, step_s: float) -> dict[str, float]:
    return {
        "num_params": num_params(model),
        "tokens_per_s": options.sequences * options.length / step_s,
        "model_tflop_per_s": step_flop(model, options.sequences, options.length) / step_s / 1e12,
    }


def _memory(cuda: bool, bare_bytes: int) -> dict[str, int]:
    memory = {"host_rss_bare_bytes": bare_bytes, "host_rss_peak_bytes": rss_bytes("VmHWM")}
    if cuda:
        counters = torch.cuda.memory_stats()
        memory["gpu_peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        memory["gpu_peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        memory["gpu_alloc_retries"] = counters["num_alloc_retries"]
        memory["gpu_ooms"] = counters["num_ooms"]
    return memory


def rss_bytes(field: str) -> int:
    """VmRSS: now; VmHWM: the peak of this process (getrusage would count the parent's, from before exec)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def device_bytes() -> dict[str, int]:
    """That this process has made a disk read and write, as the system counts them; none where it does not."""
    counted = Path("/proc/self/io")
    try:
        rows = dict(line.split(": ") for line in counted.read_text().splitlines())
    except OSError:
        return {}
    return {"read": int(rows["read_bytes"]), "write": int(rows["write_bytes"])}


def _hightide_part(before: hightide.Stats, after: hightide.Stats, result: dict[str, Any]) -> dict[str, Any]:
    num_steps, plan = after.num_steps - before.num_steps, after.plan

    def per_step(now: dict[str, Any], then: dict[str, Any]) -> dict[str, float]:
        return {lane: (value - then.get(lane, 0)) / num_steps for lane, value in now.items()}

    return {
        "update": str(plan.update),
        "collectives": plan.has_collectives,
        "micro_batch": plan.micro_batch,
        "stall_s_per_step": per_step(after.stall_s, before.stall_s),
        "moved_bytes_per_step": per_step(after.moved_bytes, before.moved_bytes),
        "evictions": after.evictions,
        "deviations": after.deviations,
        "tier_peak_bytes": after.peak_bytes,
        "limit_bytes": limits_of(plan),
        "forecast": vars(after.forecast),
        "host_above_plan_bytes": result["host_rss_peak_bytes"]
        - (after.forecast.process_bytes or result["host_rss_bare_bytes"])
        - after.forecast.host_peak_bytes,
    }


def limits_of(plan: hightide.Plan) -> dict[str, int]:
    """By tier, of those that the plan uses."""
    limits = {"gpu": plan.gpu_limit_bytes, "host": plan.host_limit_bytes, "disk": plan.disk_limit_bytes}
    return {tier: limit for tier, limit in limits.items() if limit}


def print_table(results: list[dict[str, Any]]) -> None:
    """Speed relative to the first run that worked: above 1 is faster."""
    width = max(len(result["label"]) for result in results)
    print(f"{'run':{width}}  s/step  synced  ratio  tokens/s  TFLOP/s  reserved    loss")
    reference = next((result["step_s"] for result in results if "step_s" in result), None)
    for result in results:
        if "error" in result:
            print(f"{result['label']:{width}}  failed: {result['error']}, see above")
            continue
        reserved = format_bytes(result["gpu_peak_reserved_bytes"]) if "gpu_peak_reserved_bytes" in result else "-"
        print(
            f"{result['label']:{width}}  {result['step_s']:6.3f}  {result['synced_s'].get('median', 0):6.3f}"
            f"  {reference / result['step_s']:5.3f}  {result['tokens_per_s']:8.0f}"
            f"  {result['model_tflop_per_s']:7.1f}  {reserved:>8}  {result['loss_last']:.4f}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
