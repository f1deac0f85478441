"""Checkpoints beside training: what they cost, told and found, and how fast a killed run trains again.

    python bench/checkpoint.py --model llama-3.2-1b --every 20 --steps 40 --host 100GiB --folder /scratch/checkpoints
    python bench/checkpoint.py --model llama-3.2-3b --gpu 24GiB --host 90GiB --update in_backward --gradients param \\
        --every 20 --steps 20 --one-at-a-time --folder /scratch/checkpoints

The first process prepares for saves (`--no-prepare`: it does not), trains `--steps` steps without saving, `--every`
with one save, the first of the process (`first_s` is what it cost), then `--steps` with a save every `--every` steps,
and as many without again: `overhead` is what those with saves took longer than the mean of those without, and includes
what a save does to the steps after it; the last save is awaited outside. Then it stops, writes the same states with a
blocking torch.save, if it may, begins another save and kills itself. The second process builds the model again, loads
the newest whole checkpoint under its plan and makes a step. Where the disk holds no two checkpoints
(`--one-at-a-time`), each is removed before the next thing is written, and the process kills itself after the blocking
save. A JSON line for each process as soon as it knows something, and a table at the end.

The folder is made, or is one that this bench has made before: anything else is refused, for what is in it is removed.
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
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import throughput
import torch
from shapes import batches

import hightide
from hightide.checkpoint.training import read_plan
from hightide.ir.units import format_bytes
from hightide.planner.predict.save_forecast import SaveForecast
from hightide.process.system import return_freed_memory

PHASES = ("train", "resume")
MARK = ".made-by-bench-checkpoint"  # in a folder that is ours


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--folder", required=True, help="where checkpoints go: a new folder, or one of this bench, which is emptied")
    add("--prepare", action=argparse.BooleanOptionalAction, default=True, help="hightide.prepare_saves before steps")
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
    if own.phase == "train":
        train(own, options)
        os.kill(os.getpid(), signal.SIGKILL)
    if own.phase == "resume":
        _print(resume(own, options))
        return 0
    _claim(Path(own.folder))
    results = {phase: _run_apart([*argv, "--phase", phase]) for phase in PHASES}
    print_table(results)
    return int(any("error" in result for result in results.values()))


def _claim(folder: Path) -> None:
    """Makes it, or empties it if it is ours."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        sys.exit(f"--folder {folder} is no folder; name one that is not there")
    if folder.exists() and not (folder / MARK).is_file() and any(folder.iterdir()):
        sys.exit(f"--folder {folder} has files that this bench has not made; name another one, it would be emptied")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    _empty(folder)


def _empty(folder: Path) -> None:
    assert (folder / MARK).is_file(), "not ours"
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()


def _print(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)


def _run_apart(argv: list[str]) -> dict[str, Any]:
    """What a process has told last; it may have been killed since, or by somebody else."""
    env = {**os.environ, "BEGAN_S": str(time.time())}
    result: dict[str, Any] = {}
    with subprocess.Popen([sys.executable, __file__, *argv], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                result = json.loads(line)
            print(line, end="", flush=True)
    return result or {"error": f"exit {process.returncode}"}


# -- the two processes ------------------------------------------------------------------------------------------------


def train(own: argparse.Namespace, options: argparse.Namespace) -> None:
    folder = Path(own.folder)
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
                savings.append(hightide.save(system.model, system.optimizer, folder, step=num_steps, keep=2))
                calls_s.append(time.perf_counter() - called_s)

    def timed(count: int, every: int = 0) -> float:
        return throughput._timed(lambda: steps(count, every), system)

    told = hightide.prepare_saves(system.model, folder) if own.prepare else None
    if told is not None:
        print(told.in_words, flush=True)
    timed(options.warmup)
    without_s = [timed(options.steps)]
    peak_before = _peaks(system.model)
    first_s = timed(own.every, own.every) - own.every * without_s[0] / options.steps
    first = savings.pop()
    first.wait()
    calls_s.clear()
    first_steps_s = [end - begin for begin, end in pairwise(ends_s[-own.every :])]
    if own.one_at_a_time:
        _empty(folder)
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
        "cost_s": (with_s - mean_s) / len(savings),  # of one save, to training
        "first_s": first_s,
        "first_waited_s": first.waited_s,
        "prepared": own.prepare,
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
        "told_save": None if savings[-1].forecast is None else _told(savings[-1].forecast),
        "told": {"gpu": stats.forecast.gpu_bytes, "host": stats.forecast.host_peak_bytes},
        "limits": {"gpu": stats.plan.gpu_limit_bytes, "host": stats.plan.host_limit_bytes},
        "save_peak_bytes": stats.save_peak_bytes,
        "peak_without": peak_before,
        "peak_with": peak_after,
        **throughput._memory(torch.device(options.device).type == "cuda", bare_bytes),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    _print(result)
    if own.torch_save:
        if own.one_at_a_time:
            _empty(folder)
        result |= _torch_save(system, folder / "torch-save.pt")
        _print(result)
    if own.one_at_a_time:
        _empty(folder)
    blocking = hightide.save(system.model, system.optimizer, folder, step=num_steps + 1, keep=2, wait=True)
    result["blocking_s"] = blocking.seconds
    _print(result)
    if not own.one_at_a_time:
        hightide.save(system.model, system.optimizer, folder, step=num_steps + 2)
        steps(1)


def _told(forecast: SaveForecast) -> dict[str, Any]:
    return {**asdict(forecast), "host_bytes": forecast.host_bytes, "first_s": forecast.first_s}


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
    rows: list[tuple[str, str, str]] = []
    if "error" not in trained:
        every, saves = trained["every"], trained["saves"]
        print(
            f"{trained['model']}, {trained['sequences']} x {trained['length']} tokens, {trained['update']}, "
            f"{trained['device']}: {trained['step_s']:.4f} s a step (spread {trained['spread']:.1%}); {saves} saves, "
            f"one every {every} steps{'' if trained['prepared'] else '; not prepared'}"
        )
        rows += _rows(trained)
    if "error" not in resumed:
        parts = ("import", "wrap", "load", "first_step")
        rows.append(("from the kill to the end of the first step", "", f"{resumed['total_s']:.2f} s"))
        rows += [(f"  {part.replace('_', ' ')}", "", f"{resumed[f'{part}_s']:.2f} s") for part in parts]
    for name, result in results.items():
        if "error" in result:
            rows.append((f"the process {name}", "", result["error"]))
    width = max(len(row[0]) for row in rows)
    print(f"{'':<{width}}  {'told':>20}  {'found':>20}")
    for name, told, found in rows:
        print(f"{name:<{width}}  {told:>20}  {found:>20}")


def _rows(trained: dict[str, Any]) -> list[tuple[str, str, str]]:
    told, every = trained["told_save"] or {}, trained["every"]

    def said(key: str, show: Callable[[Any], str]) -> str:
        return show(told[key]) if told else "not simulated"

    def seconds(value: float) -> str:
        return f"{value:.3f} s"

    speed = trained["saved_bytes"] / trained["save_s"]["median"] / 1e9
    share = f"{told['held_s'] / (every * trained['step_s']):.2%}" if told else "not simulated"
    limits = trained["limits"]
    host_told = trained["told"]["host"] + told.get("host_bytes", 0)
    source = told.get("speed_source", "").rstrip(":")
    rows = [
        ("bytes of a checkpoint", said("num_bytes", format_bytes), format_bytes(trained["saved_bytes"])),
        ("written in", said("written_s", seconds), seconds(trained["save_s"]["median"])),
        (f"speed ({source})", said("write_bytes_per_s", lambda one: f"{one / 1e9:.2f} GB/s"), f"{speed:.2f} GB/s"),
        (f"cost over {every} steps", share, f"{trained['overhead']:+.2%}"),
        ("seconds that one save costs", said("held_s", seconds), seconds(trained["cost_s"])),
        ("  of it the call", "", seconds(trained["call_s"]["median"])),
        ("  updates waited", "", seconds(sum(trained["waited_s"]) / trained["saves"])),
        ("the first save costs more", said("first_s", seconds), seconds(trained["first_s"] - trained["cost_s"])),
        ("copied aside, at one moment and in all", said("aside_bytes", format_bytes), _most(trained["copied_bytes"])),
        ("host memory of a save", said("host_bytes", format_bytes), format_bytes(trained["save_peak_bytes"])),
        ("host, with saves", format_bytes(host_told), format_bytes(trained["peak_with"]["host"])),
        ("host, its limit", "", format_bytes(limits["host"])),
        ("GPU", format_bytes(trained["told"]["gpu"]), format_bytes(trained["peak_with"]["gpu"])),
        ("GPU, its limit", "", format_bytes(limits["gpu"])),
    ]
    if "blocking_s" in trained:
        rows.append(("blocking hightide.save", "", seconds(trained["blocking_s"])))
    if "torch_save_s" in trained:
        size = format_bytes(trained["torch_save_bytes"])
        rows.append((f"blocking torch.save of {size}", "", seconds(trained["torch_save_s"])))
    return rows


def _most(sizes: list[int]) -> str:
    return format_bytes(max(sizes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
