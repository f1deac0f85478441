"""The figures that the project wants of itself on an H200: one command, a table of wanted and found.

    python bench/figures.py --list
    python bench/figures.py --budget 560 --save figures.json [--disk /scratch] [--only w1,1b]

A figure needs one or more cases, each a program of `bench/` in a process of its own with a limit of seconds. Cases run
in the order of the list, while the budget lasts; what each one printed is saved at once, so that a call that is cut
off loses one case only, and the next call with the same file goes on behind it. A ratio is taken of cases of one call
alone, because no two machines are alike: where one of them is missing or of another call, all of them run again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
GIB = 1 << 30
Result = dict[str, Any]  # the last JSON line of a case, with "call" and "wall_s" beside it

STEPS = "--warmup 3 --synced-steps 0 --gradients param --host 112GiB"
LARGE = "--sequences 512 --length 1024 --gradients param --clip 1.0 --steps 3 --warmup 1 --synced-steps 0"
FROM_DISK = "--gpu 24GiB --update in_backward --gradients param --steps 4 --warmup 2 --synced-steps 0"


@dataclass(frozen=True)
class Case:
    command: str  # program and options; {disk} is the folder of --disk
    limit_s: int


CASES: dict[str, Case] = {
    "resident": Case(f"throughput.py {STEPS} --steps 10 --system resident --recompute --micro-batch 4", 120),
    "w1-24": Case(f"throughput.py {STEPS} --steps 10 --gpu 24GiB --update in_backward", 200),
    "w1-24-clip": Case(f"throughput.py {STEPS} --steps 10 --gpu 24GiB --clip 1.0", 160),
    "w1-48": Case(f"throughput.py {STEPS} --steps 10 --gpu 48GiB --update in_backward", 160),
    "w1-trainer": Case(
        "trainer_throughput.py --warmup 3 --gradients param --host 112GiB --steps 10 --gpu 24GiB --update in_backward",
        160,
    ),
    "plain-3b": Case(f"throughput.py {STEPS} --steps 10 --system resident --micro-batch 4", 120),
    "kept-3b": Case(f"throughput.py {STEPS} --steps 10 --update in_backward", 160),
    "plain-1b": Case(
        f"throughput.py {STEPS} --steps 15 --model llama-3.2-1b --sequences 8 --system resident --micro-batch 8", 90
    ),
    "1b-24": Case(
        f"throughput.py {STEPS} --steps 15 --model llama-3.2-1b --sequences 8 --gpu 24GiB --update in_backward", 120
    ),
    "qwen-3b": Case(f"throughput.py {LARGE} --model qwen2.5-3b --calls 32 --gpu 80GiB --host 112GiB", 260),
    "qwen-7b": Case(f"throughput.py {LARGE} --model qwen2.5-7b --calls 32 --gpu 80GiB --host 110GiB", 400),
    "long": Case(
        f"throughput.py {STEPS} --steps 3 --sequences 1 --length 131072 --gpu 24GiB --clip 1.0 --warmup 1", 280
    ),
    "save-1b": Case(
        "checkpoint.py --model llama-3.2-1b --every 20 --steps 40 --warmup 3 --host 100GiB --gradients param"
        " --folder {disk}/saved",
        240,
    ),
    "save-w1": Case(
        "checkpoint.py --gpu 24GiB --host 90GiB --update in_backward --gradients param --every 20 --steps 20 --warmup 3"
        " --one-at-a-time --folder {disk}/saved",
        420,
    ),
    "disk-w1": Case(f"throughput.py {FROM_DISK} --states-on-disk 8 --disk {{disk}}:40GiB", 300),
    "disk-w1-host": Case(f"throughput.py {FROM_DISK} --host 24GiB --disk {{disk}}:40GiB", 240),
    "disk-infinity": Case("throughput.py --system deepspeed --gpu 24GiB --disk {disk}:40GiB --steps 2 --warmup 1", 400),
    "disk-8b": Case(
        f"throughput.py {FROM_DISK} --model llama-3.1-8b --sequences 16 --host 64GiB --disk {{disk}}:48GiB", 400
    ),
    "tiny": Case(  # of no figure that counts: shows without a GPU that this program works
        "throughput.py --model tiny --device cpu --dtype float32 --sequences 2 --length 16 --steps 2 --warmup 1"
        " --synced-steps 0",
        100,
    ),
}


@dataclass(frozen=True)
class Figure:
    wanted: str
    bound: float
    at_least: bool
    cases: tuple[str, ...]
    found: Callable[..., float]  # of the cases' results
    group: str


def step_s(result: Result) -> float:
    """From step end to step end; the median."""
    return float(result["event_s"]["median"])


def ratio(reference: Result, run: Result) -> float:
    return step_s(reference) / step_s(run)


def tokens_per_s(run: Result) -> float:
    return float(run["sequences"]) * float(run["length"]) / step_s(run)


FIGURES: dict[str, Figure] = {
    "W1, 24 GiB, in backward / resident": Figure("1.10", 1.10, True, ("resident", "w1-24"), ratio, "w1"),
    "W1, 24 GiB, clipped / resident": Figure("0.97", 0.97, True, ("resident", "w1-24-clip"), ratio, "w1"),
    "W1, 48 GiB, in backward / resident": Figure("1.15", 1.15, True, ("resident", "w1-48"), ratio, "w1"),
    "W1, 24 GiB, Trainer / own loop": Figure("0.97", 0.97, True, ("w1-24", "w1-trainer"), ratio, "w1"),
    "3B, no limit / plain, no recompute": Figure("0.98", 0.98, True, ("plain-3b", "kept-3b"), ratio, "kept"),
    "1B, 16k tokens, 24 GiB / plain": Figure("0.93", 0.93, True, ("plain-1b", "1b-24"), ratio, "1b"),
    "Qwen2.5-3B, 512 x 1024, tokens/s": Figure("28,500", 28_500, True, ("qwen-3b",), tokens_per_s, "qwen"),
    "Qwen2.5-7B, 512 x 1024, tokens/s": Figure("12,300", 12_300, True, ("qwen-7b",), tokens_per_s, "qwen7"),
    "3B, 131,072 tokens, 24 GiB, tokens/s": Figure("runs", 1, True, ("long",), tokens_per_s, "long"),
    "1B, a save every 20 steps, overhead": Figure(
        "3%", 0.03, False, ("save-1b",), lambda run: float(run["overhead"]), "save"
    ),
    "W1, one save in 20 steps, overhead": Figure(
        "stated", float("inf"), False, ("save-w1",), lambda run: float(run["overhead"]), "save"
    ),
    "W1 from disk / ZeRO-Infinity": Figure("2.2", 2.2, True, ("disk-infinity", "disk-w1"), ratio, "disk"),
    "W1, 24 GiB host / all on disk": Figure("1.7", 1.7, True, ("disk-w1", "disk-w1-host"), ratio, "disk"),
    "8B in 24 + 64 + 48 GiB, tokens/s": Figure("stated", 0, True, ("disk-8b",), tokens_per_s, "disk8b"),
    "tiny, without a GPU, tokens/s": Figure("stated", 0, True, ("tiny",), tokens_per_s, "tiny"),
}
BY_NAME_ONLY = {"tiny"}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="figures, cases and commands; runs nothing")
    parser.add_argument("--only", help="groups of figures, with commas")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds; no case begins that could outlast it")
    parser.add_argument("--save", default="figures.json", help="what was found; the next call goes on from it")
    parser.add_argument("--disk", default="/tmp", help="folder for checkpoints and what is trained from a disk")
    options = parser.parse_args(argv)
    groups = {figure.group for figure in FIGURES.values()}
    asked = set(options.only.split(",")) if options.only else groups - BY_NAME_ONLY
    if asked - groups:
        parser.error(
            f"--only {options.only}: no group {', '.join(sorted(asked - groups))}; {', '.join(sorted(groups))}"
        )
    figures = {name: figure for name, figure in FIGURES.items() if figure.group in asked}
    if options.list:
        print_list(figures)
        return 0
    results = Results(Path(options.save), options.disk)
    results.run(figures.values(), options.budget)
    print_runs(results.of, figures.values())
    print_figures(results.of, figures)
    return 0


class Results:
    """What each case has printed, in a file that is written after each of them."""

    def __init__(self, path: Path, disk: str) -> None:
        self.path, self.disk = path, disk
        self.of: dict[str, Result] = json.loads(path.read_text()) if path.exists() else {}
        self.call = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())

    def run(self, figures: Iterable[Figure], budget_s: float) -> None:
        end_s = time.monotonic() + budget_s
        for figure in figures:
            if is_found(figure, self.of):
                continue
            for name in figure.cases:
                left_s = end_s - time.monotonic()
                if self.of.get(name, {}).get("call") == self.call:
                    continue
                if CASES[name].limit_s > left_s:
                    print(f"{name}: not begun, {left_s:.0f} s are left and it may take {CASES[name].limit_s}")
                    break
                self.of[name] = self._case(name)
                self.path.write_text(json.dumps(self.of, indent=1))

    def _case(self, name: str) -> Result:
        program, *options = shlex.split(CASES[name].command.format(disk=self.disk))
        print(f"{name}: {program} {shlex.join(options)}", flush=True)
        started_s = time.monotonic()
        with subprocess.Popen(
            [sys.executable, str(BENCH / program), *options], stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            try:
                printed, _ = process.communicate(timeout=CASES[name].limit_s)
                result = last_json(printed) if process.returncode == 0 else {"error": f"exit {process.returncode}"}
            except subprocess.TimeoutExpired:
                result = {"error": f"not finished in {CASES[name].limit_s} s"}
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # with its children: the next case needs the GPU
        return {**result, "call": self.call, "wall_s": round(time.monotonic() - started_s, 1)}


def last_json(text: str) -> Result:
    """Programs with several phases print a line each, which are taken together."""
    found: Result = {}
    for line in text.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found or {"error": "printed no result"}


def is_found(figure: Figure, results: dict[str, Result]) -> bool:
    cases = [results.get(name, {"error": "not run"}) for name in figure.cases]
    return all("error" not in case for case in cases) and len({case["call"] for case in cases}) == 1


def print_list(figures: dict[str, Figure]) -> None:
    for name, figure in figures.items():
        print(f"{figure.group:8} {name}: {'at least' if figure.at_least else 'at most'} {figure.wanted}")
        for case in figure.cases:
            print(f"{'':9}{case} ({CASES[case].limit_s} s): {CASES[case].command}")


def print_runs(results: dict[str, Result], figures: Iterable[Figure]) -> None:
    """Forecast against found, and memory: the bounds are 4% in the median, 10% at worst, 0 retries, RSS 1 GiB."""
    errors: list[float] = []
    print(
        f"{'case':14} {'s/step':>8} {'told':>8} {'off':>7} {'reserved':>9} {'told':>7} {'retries':>7} {'RSS above':>9}"
    )
    for name in dict.fromkeys(case for figure in figures for case in figure.cases):
        result = results.get(name, {"error": "not run"})
        if "error" in result or "event_s" not in result:
            print(f"{name:14} {result.get('error', 'see its line')}")
            continue
        forecast = result.get("forecast") or {}
        told_s, error = forecast.get("step_s"), None
        if told_s:
            error = told_s / step_s(result) - 1
            errors.append(error)
        print(
            f"{name:14} {step_s(result):8.4f} {_number(told_s, '8.4f')} {_number(error, '+7.1%')}"
            f" {_gib(result.get('gpu_peak_reserved_bytes'), 9)} {_gib(forecast.get('gpu_bytes'), 7)}"
            f" {result.get('gpu_alloc_retries', '-'):>7} {_gib(result.get('host_above_plan_bytes'), 9)}"
        )
    if errors:
        sizes = [abs(error) for error in errors]
        print(
            f"forecasts of {len(errors)} runs: off by {statistics.median(sizes):.1%} in the median,"
            f" {max(sizes):.1%} at worst"
        )


def _number(value: float | None, form: str) -> str:
    width = int(form.lstrip("+").split(".")[0])
    return f"{'-':>{width}}" if value is None else f"{value:{form}}"


def _gib(count: float | None, width: int) -> str:
    return f"{'-':>{width}}" if count is None else f"{count / GIB:{width}.2f}"


def print_figures(results: dict[str, Result], figures: dict[str, Figure]) -> None:
    print(f"\n{'figure':40} {'wanted':>8} {'found':>10}")
    for name, figure in figures.items():
        if not is_found(figure, results):
            print(f"{name:40} {figure.wanted:>8} {'-':>10}")
            continue
        found = figure.found(*(results[case] for case in figure.cases))
        is_met = found >= figure.bound if figure.at_least else found <= figure.bound
        text = f"{found:,.0f}" if found >= 100 else f"{found:.3f}"
        print(f"{name:40} {figure.wanted:>8} {text:>10}{'' if is_met else '  not met'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
