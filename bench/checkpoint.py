"""Checkpoints beside training: what they cost, and how fast a killed run trains again. One JSON line per process.

    python bench/checkpoint.py --model llama-3.2-1b --every 20 --steps 60 --folder /scratch/checkpoints
    python bench/checkpoint.py --model llama-3.2-3b --gpu 24GiB --update in_backward --every 20 --steps 20 --folder ...

The first process trains `--steps` steps without saving, `--every` with one save, for which memory comes from the system
and is pinned where values leave the GPU (`first_s` is what it cost), then `--steps` with a save every `--every` steps,
and as many without again: `overhead` is what those with saves took longer than the mean of those without, and includes
what a save does to the steps after it; the last save is awaited outside. Then it stops, writes the same states with a
blocking torch.save, if it may, begins another save and kills itself. The second process builds the model again, loads
the newest whole checkpoint under its plan and makes a step. Where the disk holds no two checkpoints
(`--one-at-a-time`), each is removed before the next thing is written, and the process kills itself after the blocking
save.

`bench/throughput.py` has the other options: what it calls a system is trained here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import throughput
import torch
from shapes import batches

import hightide
from hightide.checkpoint.training import read_plan
from hightide.ir.units import format_bytes
from hightide.process.system import return_freed_memory

PHASES = ("train", "resume")


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--folder", required=True, help="where checkpoints go; what is in it is removed")
    add("--every", type=int, default=20, help="steps between two saves")
    add("--torch-save", action=argparse.BooleanOptionalAction, default=True, help="it copies all states to the host")
    add("--one-at-a-time", action="store_true", help="for a disk that holds no two of them")
    add("--phase", choices=PHASES, help=argparse.SUPPRESS)
    return parser.parse_known_args(argv)


def main(argv: list[str]) -> int:
    own, others = parse(argv)
    options = throughput.parse(others)
    if own.one_at_a_time and own.every < options.steps:
        sys.exit("--one-at-a-time: one save only, so --every must be at least --steps")
    if own.phase is not None:
        print(json.dumps({"train": train, "resume": resume}[own.phase](own, options)), flush=True)
        if own.phase == "train":
            os.kill(os.getpid(), signal.SIGKILL)
        return 0
    shutil.rmtree(own.folder, ignore_errors=True)
    results = {phase: _run_apart([*argv, "--phase", phase]) for phase in PHASES}
    print_table(results)
    return int(any("error" in result for result in results.values()))


def _run_apart(argv: list[str]) -> dict[str, Any]:
    began_s = time.time()
    done = subprocess.run(
        [sys.executable, __file__, *argv],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "BEGAN_S": str(began_s)},
    )
    lines = done.stdout.strip().splitlines()
    result = json.loads(lines[-1]) if lines else {"error": f"exit {done.returncode}"}
    print(json.dumps(result), flush=True)
    return result


# -- the two processes ------------------------------------------------------------------------------------------------


def train(own: argparse.Namespace, options: argparse.Namespace) -> dict[str, Any]:
    bare_bytes = throughput.rss_bytes("VmRSS")
    system = _make(options)
    data = batches(system.model, options.sequences, options.length)
    savings: list[hightide.Saving] = []
    calls_s: list[float] = []
    ends_s: list[float] = []  # of steps, as the loop sees them
    num_steps = 0

    def steps(count: int, every: int = 0) -> None:
        nonlocal num_steps
        for number in range(count):
            system.step(data[num_steps % len(data)])
            num_steps += 1
            ends_s.append(time.perf_counter())
            if every and number % every == 0:
                called_s = time.perf_counter()
                savings.append(hightide.save(system.model, system.optimizer, own.folder, step=num_steps, keep=2))
                calls_s.append(time.perf_counter() - called_s)

    def timed(count: int, every: int = 0) -> float:
        return throughput._timed(lambda: steps(count, every), system)

    timed(options.warmup)
    without_s = [timed(options.steps)]
    peak_before = _peaks(system.model)
    first_s = timed(own.every, own.every) - own.every * without_s[0] / options.steps
    savings.pop().wait()
    calls_s.clear()
    first_steps_s = [end - begin for begin, end in pairwise(ends_s[-own.every :])]
    if own.one_at_a_time:
        _empty(own.folder)
    with_s = timed(options.steps, own.every)
    steps_s = [end - begin for begin, end in pairwise(ends_s[-options.steps :])]
    last_s = throughput._timed(lambda: savings[-1].wait(), system)
    peak_after = _peaks(system.model)
    without_s.append(timed(options.steps))
    stats, mean_s = hightide.stats(system.model), sum(without_s) / 2
    result = {
        "phase": "train",
        **{key: getattr(options, key) for key in ("model", "sequences", "length", "gpu", "host", "steps")},
        "every": own.every,
        "update": str(stats.plan.update),
        "step_s": mean_s / options.steps,
        "spread": abs(without_s[0] - without_s[1]) / mean_s,
        "overhead": with_s / mean_s - 1,
        "first_s": first_s,
        "first_steps_s": first_steps_s,
        "steps_s": steps_s,
        "call_s": throughput.summary(calls_s),  # that save() itself took
        "save_s": throughput.summary([saving.seconds for saving in savings]),
        "last_wait_s": last_s,
        "waited_s": [saving.waited_s for saving in savings],
        "copied_bytes": [saving.copied_bytes for saving in savings],
        "saved_bytes": savings[-1].num_bytes,
        "saves": len(savings),
        "errors": [str(saving.error) for saving in savings if saving.error is not None],
        "told_save": None if savings[-1].forecast is None else vars(savings[-1].forecast),
        "told": {"gpu": stats.forecast.gpu_bytes, "host": stats.forecast.host_peak_bytes},
        "limits": {"gpu": stats.plan.gpu_limit_bytes, "host": stats.plan.host_limit_bytes},
        "peak_without": peak_before,
        "peak_with": peak_after,
        **throughput._memory(torch.device(options.device).type == "cuda", bare_bytes),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    if own.torch_save:
        if own.one_at_a_time:
            _empty(own.folder)
        result |= _torch_save(system, Path(own.folder) / "torch-save.pt")
    if own.one_at_a_time:
        _empty(own.folder)
    blocking = hightide.save(system.model, system.optimizer, own.folder, step=num_steps + 1, keep=2, wait=True)
    result["blocking_s"] = blocking.seconds
    if not own.one_at_a_time:
        hightide.save(system.model, system.optimizer, own.folder, step=num_steps + 2)
        steps(1)
    return result


def _empty(folder: str) -> None:
    shutil.rmtree(folder)
    os.mkdir(folder)


def _torch_save(system: throughput.System, file: Path) -> dict[str, Any]:
    """To the disk, as a save is."""
    began_s = time.perf_counter()
    content = {"model": system.model.state_dict(), "optimizer": system.optimizer.state_dict()}
    copied_s = time.perf_counter() - began_s
    with open(file, "wb") as target:
        torch.save(content, target)
        target.flush()
        os.fsync(target.fileno())
    seconds, num_bytes = time.perf_counter() - began_s, file.stat().st_size
    del content
    return_freed_memory()
    file.unlink()
    return {"torch_save_s": seconds, "torch_save_copied_s": copied_s, "torch_save_bytes": num_bytes}


def resume(own: argparse.Namespace, options: argparse.Namespace) -> dict[str, Any]:
    began_s, imported_s = float(os.environ["BEGAN_S"]), time.time()
    newest = hightide.latest(own.folder)
    assert newest is not None, "there is no checkpoint"
    plan = read_plan(newest)
    assert plan is not None
    options.plan = str(newest / "plan.json")
    system = _make(options)
    wrapped_s = time.time()
    loaded = hightide.load(system.model, system.optimizer, newest)
    throughput.synchronize()
    loaded_s = time.time()
    system.step(batches(system.model, options.sequences, options.length, count=1)[0])
    system.drain()
    throughput.synchronize()
    return {
        "phase": "resume",
        "step": loaded.step,
        "import_s": imported_s - began_s,
        "wrap_s": wrapped_s - imported_s,
        "load_s": loaded_s - wrapped_s,
        "load_bytes": sum(file.stat().st_size for file in newest.iterdir()),
        "first_step_s": time.time() - loaded_s,
        "total_s": time.time() - began_s,
        "host_rss_peak_bytes": throughput.rss_bytes("VmHWM"),
    }


def _make(options: argparse.Namespace) -> throughput.System:
    cuda = torch.device(options.device).type == "cuda"
    return throughput.make_hightide(options, cuda if options.compile is None else options.compile)


def _peaks(model: torch.nn.Module) -> dict[str, int]:
    return {**hightide.stats(model).peak_bytes, "rss": throughput.rss_bytes("VmHWM")}


def print_table(results: dict[str, dict[str, Any]]) -> None:
    trained, resumed = results["train"], results["resume"]
    if "error" not in trained:
        gb = trained["saved_bytes"] / 1e9
        print(
            f"{trained['model']}: {trained['step_s']:.3f} s a step (spread {trained['spread']:.1%}); a save of "
            f"{gb:.1f} GB every {trained['every']} steps: {trained['overhead']:+.2%}, save() itself "
            f"{trained['call_s']['median']:.3f} s, written in {trained['save_s']['median']:.1f} s "
            f"({gb / trained['save_s']['median']:.2f} GB/s), updates waited {sum(trained['waited_s']):.2f} s"
        )
        if told := trained["told_save"]:
            print(
                f"told: {told['num_bytes'] / 1e9:.1f} GB in {told['written_s']:.1f} s ({told['speed_source']} disk), "
                f"updates held up {told['held_s']:.2f} s, copies of {format_bytes(told['aside_bytes'])}"
            )
        peaks = [
            f"{tier} {format_bytes(trained['peak_with'][tier])}, "
            f"without {format_bytes(trained['peak_without'][tier])}, "
            f"told {format_bytes(trained['told'][tier])}, limit {format_bytes(trained['limits'][tier])}"
            for tier in ("gpu", "host")
        ]
        print(f"peaks: {'; '.join(peaks)}")
        print(f"the first save, which gets and pins memory: {trained['first_s']:+.2f} s over {trained['every']} steps")
        print(f"blocking: hightide.save {trained['blocking_s']:.1f} s", end="")
        if "torch_save_s" in trained:
            print(
                f", torch.save {trained['torch_save_s']:.1f} s for {trained['torch_save_bytes'] / 1e9:.1f} GB", end=""
            )
        print()
    if "error" not in resumed:
        print(
            f"killed, restarted: {resumed['total_s']:.1f} s to the end of the first step (imports "
            f"{resumed['import_s']:.1f}, wrap {resumed['wrap_s']:.1f}, load {resumed['load_s']:.1f}, step "
            f"{resumed['first_step_s']:.1f})"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
