"""Forecasts of step time and memory, and what a GPU says to them.

    hightide doctor --out machine.json
    python bench/forecast.py --predict --machine machine.json
    python bench/forecast.py --measure
    python bench/forecast.py --search --machine bench/machine.json

`--predict` rehearses the models of the plans in bench/plans.py (FORECASTS) and writes bench/forecasts.json, to be
committed before anything is measured. `--measure` trains a few steps under each plan, each in its own process, adds
what it finds to bench/measured.json and prints the table of all that is there. It fails if a bound is missed: the error
of the step time is at most 5% in the median and 12% at worst; what the GPU reserves is never above its forecast, which
is at most 5% too high; the process's memory is within 2% or 1 GiB of its forecast.

`--search` needs no GPU: under the limits of each plan it searches with the costs that are kept in bench/forecasts.json
and prints both forecasts. bench/machine.json is the machine on which these were rehearsed.

A measured step is the median time between the ends of two steps by the GPU's own events: the steady state.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from plans import FOLDER, FORECASTS, HOST, PLANS, HandWritten, profile_of
from shapes import batches, build
from throughput import rss_bytes

from hightide.ir.action import Mode
from hightide.ir.block import ModelProfile
from hightide.ir.codec import from_json, to_json
from hightide.ir.costs import Costs
from hightide.ir.machine import Machine
from hightide.ir.plan import Plan
from hightide.ir.units import format_bytes, parse_bytes
from hightide.planner.lower import lower
from hightide.planner.placement import Placement
from hightide.planner.predict.peaks import peaks, reserved_bytes
from hightide.planner.predict.step_seconds import forecast, with_peaks
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.search import search
from hightide.process import files
from hightide.process.system import return_freed_memory
from hightide.profiler.model.model_profile import profile_calls
from hightide.rehearsal.rehearse import measure_costs

HERE = Path(__file__).parent
EVERY = {**FORECASTS, **PLANS}
FORECAST_FILE, MEASURED_FILE = HERE / "forecasts.json", HERE / "measured.json"
MEDIAN_ERROR, WORST_ERROR = 0.05, 0.12  # of the step time
TOO_HIGH = 0.05  # of the GPU's forecast
HOST_SHARE, HOST_BYTES = 0.02, 1024**3
WARM_STEPS = 3
STEPS_S = 6.0  # of measured steps, in one run


@dataclass(frozen=True)
class Told:
    """The forecast of one plan."""

    step_s: float
    issue_s: float  # of the thread that runs the model; more than the step: it is the limit
    busy_s: dict[str, float]  # per lane
    gpu_bytes: int  # reserved
    host_bytes: int  # of the process, its libraries included
    held_out: bool


@dataclass(frozen=True)
class Found:
    """What one run has measured."""

    step_s: float
    gpu_bytes: int
    host_bytes: int
    bare_bytes: int  # of the process with torch and CUDA, before the model
    stall_s: dict[str, float]
    alloc_retries: int
    tensor_bytes: int | None = None  # on the GPU, at most: what is reserved beyond are holes and workspaces


# -- predict ----------------------------------------------------------------------------------------------------------


def predict(names: list[str], machine: Machine, device: torch.device, compile: bool) -> dict[str, Any]:
    torch.zeros(1, device=device)
    bare_bytes = rss_bytes("VmRSS")
    loaded_bytes = 0  # the same, with what compiling and running loads
    rehearsed: dict[tuple[str, int, int], tuple[ModelProfile, Costs]] = {}
    told: dict[str, Told] = {}
    for name in names:
        key = _workload(FORECASTS[name])
        if key not in rehearsed:
            rehearsed[key] = _rehearse(key, names, device, compile)
            if not loaded_bytes:
                return_freed_memory()
                loaded_bytes = max(bare_bytes, rss_bytes("VmRSS"))
        told[name] = tell(*rehearsed[key], name, machine, loaded_bytes, device.type == "cuda")
        print(f"{name:26} {told[name].step_s:7.3f} s  GPU {format_bytes(told[name].gpu_bytes):>9}", flush=True)
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "machine": {"name": machine.name, "date": machine.date},
        "bare_bytes": bare_bytes,
        "loaded_bytes": loaded_bytes,
        "plans": {name: asdict(one) for name, one in told.items()},
        "costs": {"/".join(map(str, key)): json.loads(to_json(costs)) for key, (_, costs) in rehearsed.items()},
    }


def tell(profile: ModelProfile, costs: Costs, name: str, machine: Machine, process_bytes: int, cuda: bool) -> Told:
    plan = Plan.load(FOLDER / f"{name}.json")
    schedule = lower(with_peaks(profile, costs), plan, Mode.TRAIN)
    step = forecast(Problem(profile, costs, machine, Terms.of(plan)), Placement(plan), schedule)
    return Told(
        step_s=step.step_s,
        issue_s=step.issue_s,
        busy_s={str(lane): seconds for lane, seconds in step.simulated.busy_s.items()},
        gpu_bytes=reserved_bytes(schedule) if cuda else peaks(schedule).gpu_peak_bytes,
        host_bytes=process_bytes + peaks(schedule).host_peak_bytes,
        held_out=FORECASTS[name].held_out,
    )


def _workload(written: HandWritten) -> tuple[str, int, int]:
    return written.model, written.sequences, written.length


def _rehearse(
    key: tuple[str, int, int], names: list[str], device: torch.device, compile: bool
) -> tuple[ModelProfile, Costs]:
    model_name, sequences, length = key
    sizes = {FORECASTS[name].micro_batch for name in names if _workload(FORECASTS[name]) == key}
    model = build(model_name, length, device="meta")
    tokens = batches(model, sequences, length, count=1)[0]
    optimizer = torch.optim.AdamW(model.parameters())
    started_s = time.perf_counter()
    batch = {"input_ids": tokens, "labels": tokens}
    profile, probed, records = profile_calls(model, optimizer, batch, device=None, runs_on=device, source=None)
    costs = measure_costs(profile, probed, records, optimizer, device, compile, sorted(sizes))
    print(f"# rehearsed {model_name}, {sequences} x {length}: {time.perf_counter() - started_s:.1f} s", flush=True)
    return profile, costs


# -- measure ----------------------------------------------------------------------------------------------------------


def measure(name: str, step_s: float, device: str) -> Found | str:
    """Its figures, or what went wrong."""
    written = FORECASTS[name]
    steps = max(4, min(12, round(STEPS_S / step_s)))
    command = [
        sys.executable,
        str(HERE / "throughput.py"),
        f"--plan={FOLDER / name}.json",
        f"--update={written.update}",
    ]
    command += [f"--model={written.model}", f"--sequences={written.sequences}", f"--length={written.length}"]
    command += [f"--gpu={written.gpu}", f"--device={device}", f"--steps={steps}", f"--warmup={WARM_STEPS}"]
    done = subprocess.run([*command, "--synced-steps=0"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return f"exit {done.returncode}"
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return Found(
        step_s=result["event_s"]["median"],
        gpu_bytes=result.get("gpu_peak_reserved_bytes", result["tier_peak_bytes"]["gpu"]),
        host_bytes=result["host_rss_peak_bytes"],
        bare_bytes=result["host_rss_bare_bytes"],
        stall_s=result["stall_s_per_step"],
        alloc_retries=result.get("gpu_alloc_retries", 0),
        tensor_bytes=result.get("gpu_peak_allocated_bytes"),
    )


def measure_all(names: list[str], told: dict[str, Told], device: str, budget_s: float) -> list[str]:
    """Adds to the file after each run. Returns what failed, or was not run for want of time."""
    missed, started_s, longest_s = [], time.perf_counter(), 0.0
    for name in names:
        begun_s = time.perf_counter()
        if begun_s - started_s + longest_s > budget_s:
            missed.append(f"{name}: no time left of {budget_s:.0f} s")
            continue
        found = measure(name, told[name].step_s, device)
        longest_s = max(longest_s, time.perf_counter() - begun_s)
        if isinstance(found, str):
            missed.append(f"{name}: {found}")
            continue
        measured = json.loads(MEASURED_FILE.read_text()) if MEASURED_FILE.exists() else {}
        files.write_text(MEASURED_FILE, json.dumps({**measured, name: asdict(found)}, indent=1) + "\n")
        print(f"# {name}: {found.step_s:.3f} s/step, in {time.perf_counter() - begun_s:.0f} s", flush=True)
    return missed


# -- search -----------------------------------------------------------------------------------------------------------


def search_all(names: list[str], machine: Machine) -> None:
    kept = json.loads(FORECAST_FILE.read_text())["costs"]
    profiles: dict[tuple[str, int, int], ModelProfile] = {}
    print(f"{'plan':26} {'by hand':>8} {'search':>8} {'gain':>7}  {'took':>6}  what it chose")
    for name in names:
        written = EVERY[name]
        key = _workload(written)
        if "/".join(map(str, key)) not in kept:
            continue
        if key not in profiles:
            profiles[key] = profile_of(*key)
        costs = from_json(Costs, json.dumps(kept["/".join(map(str, key))]))
        limits = parse_bytes(written.gpu, "gpu"), parse_bytes(HOST, "host")
        profile = with_peaks(profiles[key], costs)
        terms = Terms(*limits, written.update, gradients=written.gradients)
        problem = Problem(profile, costs, machine, terms)
        started_s = time.perf_counter()
        found = search(problem)
        took_s = time.perf_counter() - started_s
        by_hand = Plan.load(FOLDER / f"{name}.json")
        by_hand_s = forecast(problem, Placement(by_hand), lower(profile, by_hand, Mode.TRAIN)).step_s
        chosen, gain = found.candidate, found.step.step_s / by_hand_s - 1
        print(f"{name:26} {by_hand_s:6.3f} s {found.step.step_s:6.3f} s {gain:+7.1%}  {took_s:4.1f} s", end="")
        print(f"  micro-batch {chosen.micro_batch}, {len(chosen.whole)} whole, {len(chosen.keep)} keep", flush=True)


# -- the table --------------------------------------------------------------------------------------------------------


def print_table(told: dict[str, Told], found: dict[str, Found]) -> list[str]:
    """Returns the bounds that were missed."""
    print(f"{'plan (* held out)':26} {'s/step: told':>12} {'found':>7} {'error':>6}", end="")
    print(f"  {'GPU: told':>10} {'found':>9} {'over':>6}  {'host: told':>10} {'found':>9} {'over':>9}")
    errors, missed = {}, []
    for name, one in told.items():
        if name not in found:
            continue
        is_, label = found[name], name + (" *" if one.held_out else "")
        errors[name] = one.step_s / is_.step_s - 1
        gpu_over, host_over = one.gpu_bytes / is_.gpu_bytes - 1, one.host_bytes - is_.host_bytes
        print(f"{label:26} {one.step_s:12.3f} {is_.step_s:7.3f} {errors[name]:+6.1%}", end="")
        print(f"  {format_bytes(one.gpu_bytes):>10} {format_bytes(is_.gpu_bytes):>9} {gpu_over:+6.1%}", end="")
        print(f"  {format_bytes(one.host_bytes):>10} {format_bytes(is_.host_bytes):>9} {host_over / 2**30:+5.2f} GiB")
        if not 0 <= gpu_over <= TOO_HIGH:
            missed.append(f"{name}: GPU forecast {gpu_over:+.1%}, allowed 0 to {TOO_HIGH:.0%}")
        if abs(host_over) > max(HOST_SHARE * is_.host_bytes, HOST_BYTES):
            missed.append(f"{name}: host forecast {host_over / 2**30:+.2f} GiB")
    if not errors:
        return ["nothing was measured"]
    sizes = sorted((abs(error), name) for name, error in errors.items())
    median = statistics.median(size for size, _ in sizes)
    print(f"step time: median error {median:.1%}, worst {sizes[-1][0]:.1%} ({sizes[-1][1]})")
    if median > MEDIAN_ERROR:
        missed.append(f"median error of the step time {median:.1%}, allowed {MEDIAN_ERROR:.0%}")
    missed += [f"{name}: error of the step time {size:.1%}" for size, name in sizes if size > WORST_ERROR]
    return missed


def _read(path: Path, cls: type, part: str | None = None) -> dict[str, Any]:
    if not path.exists():
        return {}
    data = json.loads(path.read_text())
    return {name: cls(**values) for name, values in (data[part] if part else data).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true", help="rehearse, simulate, write bench/forecasts.json")
    parser.add_argument("--measure", action="store_true", help="train under each plan, then print the table")
    parser.add_argument("--search", action="store_true", help="print what the search finds under the same limits")
    parser.add_argument("--machine", type=Path, help="with --predict and --search: a machine file of `hightide doctor`")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="of FORECASTS: " + ", ".join(FORECASTS))
    parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS", help="with --measure: for all runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="on CUDA unless said otherwise")
    options = parser.parse_args()
    names = options.only or list(FORECASTS)
    if unheard := [name for name in names if name not in EVERY]:
        parser.error(f"no plan is called {', '.join(unheard)}; there are {', '.join(EVERY)}")
    missed: list[str] = []
    if (options.predict or options.search) and options.machine is None:
        parser.error("--predict and --search need --machine FILE: run `hightide doctor --out FILE` first")
    if options.search:
        search_all(options.only or list(EVERY), Machine.load(options.machine))
        return 0
    if options.predict:
        device = torch.device(options.device)
        compile = device.type == "cuda" if options.compile is None else options.compile
        made = predict(names, Machine.load(options.machine), device, compile)
        files.write_text(FORECAST_FILE, json.dumps(made, indent=1) + "\n")
    told: dict[str, Told] = _read(FORECAST_FILE, Told, "plans")
    if options.measure:
        unknown = [name for name in names if name not in told]
        if unknown:
            parser.error(f"no forecast of {', '.join(unknown)}: run --predict first")
        missed = measure_all(names, told, options.device, options.budget)
    if not options.predict:
        missed += print_table(told, _read(MEASURED_FILE, Found))
    for problem in missed:
        print(f"MISSED: {problem}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
