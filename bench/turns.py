"""Two versions of the source by turns on one GPU: is the new one as fast as the old one?

    git archive OLD_COMMIT src bench | tar -x -C OLD_FOLDER
    python bench/turns.py OLD_FOLDER [--turns 5] [--only "W1 in backward"]
    python bench/turns.py OLD_FOLDER --bookkeeping [--blocks 64] [--passes 40]

Each version is a process of its own, which wraps each workload once, after the other one; then they take a few steps in
turn. A figure is the median over turns of the median of a turn's steps, by events of the GPU. Processor time is that of
the thread that runs forward and of the one that runs backward, per step. `--bookkeeping` runs bench/bookkeeping.py of
each version by turns instead, without a GPU. Ends with a line of JSON. `--only tiny` is for a look without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

Workload = tuple[str, int, int, str, float | None, int]  # model, sequences, length, update, clipped to, steps per turn
WORKLOADS: dict[str, Workload] = {
    "W1 in backward": ("llama-3.2-3b", 16, 2048, "in_backward", None, 6),
    "W1 deferred, clipped": ("llama-3.2-3b", 16, 2048, "deferred", 1.0, 6),
    "1B, 8,192 tokens": ("llama-3.2-1b", 4, 2048, "in_backward", None, 25),
}
TINY: dict[str, Workload] = {"tiny": ("tiny", 2, 16, "in_backward", None, 2)}
LIMITS = {"gpu": "24GiB", "host": "54GiB"}
TINY_LIMITS = {"gpu": "16MiB", "host": "64MiB"}
WARM_STEPS = 5
TICKS_PER_S = 100  # of /proc


def processor_s() -> dict[str, float]:
    found = {"forward": 0.0, "backward": 0.0}
    for thread in Path("/proc/self/task").iterdir():
        try:
            name, fields = (thread / "comm").read_text(), (thread / "stat").read_text().rsplit(") ", 1)[1].split()
        except OSError:  # it has ended
            continue
        key = "backward" if name.startswith("pt_autograd") else "forward" if thread.name == str(os.getpid()) else ""
        if key:
            found[key] += (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return found


class Child:
    """One version. Obeys lines of JSON."""

    def __init__(self, folder: str) -> None:
        sys.path[:0] = [f"{folder}/src", f"{folder}/bench"]
        self._name, self._model, self._optimizer = "", None, None  # type: tuple[str, Any, Any]

    def wrap(self, name: str, sequences: int, length: int, update: str, clip: float | None, _: int) -> dict[str, float]:
        import torch
        from shapes import batches, build

        import hightide

        if self._name == name:
            hightide.unwrap(self._model)
        else:
            self._model = self._optimizer = None
            gc.collect()
            torch.cuda.empty_cache()
            self._name, self._model = name, build(name, length)
        self._tokens, self._clip = batches(self._model, sequences, length, count=1)[0], clip
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5)
        example = {"input_ids": self._tokens, "labels": self._tokens}
        self._cuda = torch.cuda.is_available()
        limits = hightide.Limits(**(TINY_LIMITS if name == "tiny" else LIMITS))
        options = {"limits": limits, "update": update, "gradients": "param", "compile": self._cuda}
        began_s = time.perf_counter()
        self._model, self._optimizer = hightide.wrap(self._model, optimizer, example, **options)
        told_s = hightide.stats(self._model).forecast.step_s
        return {"wrap_s": time.perf_counter() - began_s, "told_s": told_s}

    def steps(self, number: int) -> dict[str, Any]:
        """After one that is not counted."""
        import torch

        events, before = [], processor_s()
        for index in range(number + 1):
            before = processor_s() if index == 1 else before
            self._model(input_ids=self._tokens, labels=self._tokens).loss.backward()
            if self._clip:
                torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
            self._optimizer.step()
            self._optimizer.zero_grad()
            events.append(torch.cuda.Event(enable_timing=True) if self._cuda else time.perf_counter())
            if self._cuda:
                events[-1].record()
        if self._cuda:
            torch.cuda.synchronize()
        laps_s = [begin.elapsed_time(end) / 1e3 if self._cuda else end - begin for begin, end in pairwise(events)]
        after = processor_s()
        return {"step_s": statistics.median(laps_s), **{key: (after[key] - before[key]) / number for key in after}}

    def obey(self) -> None:
        for line in sys.stdin:
            verb, *arguments = json.loads(line)
            print("@" + json.dumps(getattr(self, verb)(*arguments)), flush=True)


def ask(process: subprocess.Popen[str], *words: object) -> dict[str, float]:
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps(words), file=process.stdin, flush=True)
    for line in process.stdout:
        if line.startswith("@"):
            return json.loads(line[1:])
    raise SystemExit("a version ended before it had answered; its error is above")


def compare(label: str, versions: dict[str, subprocess.Popen[str]], turns: int) -> dict[str, dict[str, float]]:
    """By version."""
    *_, num_steps = workload = {**WORKLOADS, **TINY}[label]
    made = {name: ask(process, "wrap", *workload) for name, process in versions.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
    for process in versions.values():
        ask(process, "steps", WARM_STEPS)
    for turn in range(turns):
        for name in sorted(versions, reverse=bool(turn % 2)):
            found[name].append(ask(versions[name], "steps", num_steps))
    middle = {
        name: {key: statistics.median(one[key] for one in rows) for key in rows[0]} for name, rows in found.items()
    }
    for name, row in middle.items():
        spread = ", ".join(f"{one['step_s']:.4f}" for one in found[name])
        print(
            f"{label}, {name}: step {row['step_s']:.4f} s ({spread}), told {made[name]['told_s']:.4f} s, wrap "
            f"{made[name]['wrap_s']:.1f} s, threads {row['forward']:.3f} and {row['backward']:.3f} s",
            flush=True,
        )
    print(f"{label}: new / old {middle['new']['step_s'] / middle['old']['step_s']:.4f}", flush=True)
    return {name: {**middle[name], **made[name]} for name in versions}


def bookkeeping(folders: dict[str, Path], options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """By version and variant; medians over turns."""
    command = ["--json", "--blocks", str(options.blocks), "--passes", str(options.passes)]
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in folders}
    for turn in range(options.turns):
        for name in sorted(folders, reverse=bool(turn % 2)):
            folder = folders[name].resolve()
            done = subprocess.run(
                [sys.executable, str(folder / "bench" / "bookkeeping.py"), *command],
                env={**os.environ, "PYTHONPATH": str(folder / "src"), "CUDA_VISIBLE_DEVICES": ""},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            for row in json.loads(done.stdout)["rows"]:
                variant = row.get("variant") or row["placement"]  # as it was called before
                found[name].setdefault(variant, []).append(row)
    middle = {
        name: {
            variant: {key: statistics.median(row[key] for row in rows) for key in ("block_us", "wall_us", "wrap_s")}
            for variant, rows in variants.items()
        }
        for name, variants in found.items()
    }
    for variant in middle["new"]:
        old, new = middle["old"][variant]["block_us"], middle["new"][variant]["block_us"]
        print(f"{variant}: {old:.0f} us per block and step before, {new:.0f} after: {new / old:.2f}", flush=True)
    return middle


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a folder with src and bench of the old version")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", choices=[*WORKLOADS, *TINY], help="one workload instead of all")
    parser.add_argument("--bookkeeping", action="store_true")
    parser.add_argument("--blocks", type=int, default=64, help="of --bookkeeping")
    parser.add_argument("--passes", type=int, default=40, help="of --bookkeeping")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    options = parse(sys.argv[1:])
    if options.child:
        Child(str(options.old)).obey()
        return
    folders = {"old": options.old, "new": Path(__file__).resolve().parents[1]}
    if options.bookkeeping:
        print(json.dumps(bookkeeping(folders, options)), flush=True)
        return
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    versions = {
        name: subprocess.Popen(
            [sys.executable, __file__, str(folder), "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for name, folder in folders.items()
    }
    found: dict[str, dict[str, Any]] = {name: {} for name in versions}
    try:
        for label in [options.only] if options.only else WORKLOADS:
            for name, row in compare(label, versions, options.turns).items():
                found[name][label] = row
        print(json.dumps(found), flush=True)
    finally:
        for process in versions.values():
            process.kill()


if __name__ == "__main__":
    main()
