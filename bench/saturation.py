"""Tokens per second against tokens per step where all states are on a disk, with the roofs of compute and I/O.

    python bench/saturation.py --disk /scratch:16GiB --save docs/images/saturation

Each point is a run of bench/throughput.py in a process of its own. The roof of I/O is a line through the origin: a
step's bytes take the same time however many tokens it has. That of compute is the same model and the largest batch with
everything on the GPU. With --deepspeed the largest batch is also trained by ZeRO-Infinity, if that can be imported.
Writes SAVE.json and, where matplotlib is, SAVE.png; prints the same JSON. `--draw SAVE.json` draws such a file again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from hightide.ir.limits import parse_disks

THROUGHPUT, FLOOR = (Path(__file__).with_name(name) for name in ("throughput.py", "disk_floor.py"))
SATURATED = 0.9


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="llama-3.2-1b")
    add("--length", type=int, default=2048)
    add("--sequences", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128])
    add("--gpu", default="24GiB")
    add("--disk", metavar="FOLDER:SIZE")
    add("--disk-gb-per-s", type=float, help="best mixed speed by bench/disk_floor.py, for the roof")
    add("--floor", metavar="OPTIONS", help="measure that speed first, by bench/disk_floor.py with these options")
    add("--buffers", type=int, default=8)
    add("--steps", type=int, default=4)
    add("--device", help="cpu: the simulated accelerator")
    add("--deepspeed", action="store_true")
    add("--save", help="without suffix")
    add("--draw", metavar="FILE", help="a file that was saved; runs nothing")
    options = parser.parse_args(argv)
    if options.draw is None and (options.disk is None or options.save is None):
        parser.error("--disk and --save are needed, or --draw")
    return options


def main() -> None:
    options = parse(sys.argv[1:])
    if options.draw:
        draw(json.loads(Path(options.draw).read_text()), Path(options.draw).with_suffix(".png"))
        return
    common = ["--model", options.model, "--length", str(options.length), "--gradients", "param"]
    common += ["--update", "in_backward", "--warmup", "2", "--synced-steps", "0"]
    if options.device:
        common += ["--device", options.device]
    on_disk = ["--disk", options.disk, "--gpu", options.gpu]

    def run(sequences: int, *more: str, steps: int = options.steps) -> dict[str, Any] | None:
        size = ["--sequences", str(sequences), "--steps", str(steps)]
        done = subprocess.run([sys.executable, THROUGHPUT, *common, *size, *more], stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else None

    if options.floor is not None:
        options.disk_gb_per_s = best_gb_per_s(options.disk, options.floor)
    most = max(options.sequences)
    results = {
        sequences: run(sequences, *on_disk, "--states-on-disk", str(options.buffers))
        for sequences in sorted(options.sequences)
    }
    found = {
        "model": options.model,
        "points": [point(result) for result in results.values() if result is not None],
        "compute_tokens_per_s": rate(run(most)),
        "deepspeed_tokens_per_s": rate(run(most, *on_disk, "--system", "deepspeed", steps=2))
        if options.deepspeed
        else None,
        "disk_bytes_per_s": options.disk_gb_per_s * 1e9 if options.disk_gb_per_s else None,
    }
    found["saturated_at_tokens"] = saturated_at(found["points"])
    save = Path(options.save)
    save.parent.mkdir(parents=True, exist_ok=True)
    save.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, save.with_suffix(".png"))
    for one in found["points"]:
        print(
            f"{one['tokens']:>8} tokens/step  {one['tokens_per_s']:>9.0f} tokens/s  {one['disk_bytes'] / 1e9:6.1f} GB"
        )
    print(json.dumps(found), flush=True)


def best_gb_per_s(disk: str, floor: str) -> float:
    """Before the points: its file and theirs have no room beside each other."""
    command = [sys.executable, str(FLOOR), parse_disks([disk], "--disk")[0].path, *shlex.split(floor)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.strip().splitlines()[-1])["best_gb_per_s"])


def point(result: dict[str, Any]) -> dict[str, float]:
    moved = result["moved_bytes_per_step"]
    return {
        "tokens": result["sequences"] * result["length"],
        "tokens_per_s": result["tokens_per_s"],
        "step_s": result["step_s"],
        "disk_bytes": moved.get("disk_read", 0) + moved.get("disk_write", 0),
    }


def rate(result: dict[str, Any] | None) -> float | None:
    return None if result is None else result["tokens_per_s"]


def saturated_at(points: list[dict[str, float]]) -> float | None:
    """Tokens per step from which on speed is SATURATED of the best, between two points by a straight line."""
    wanted = SATURATED * max((one["tokens_per_s"] for one in points), default=0.0)
    before: dict[str, float] | None = None
    for one in points:
        if one["tokens_per_s"] >= wanted:
            if before is None:
                return one["tokens"]
            share = (wanted - before["tokens_per_s"]) / (one["tokens_per_s"] - before["tokens_per_s"])
            return before["tokens"] + share * (one["tokens"] - before["tokens"])
        before = one
    return None


def draw(found: dict[str, Any], path: Path) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        print("no picture: matplotlib cannot be imported", file=sys.stderr)
        return
    points = found["points"]
    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=150)
    tokens = [one["tokens"] for one in points]
    axes.plot(tokens, [one["tokens_per_s"] for one in points], "o-", color="#1f5fa8", label="hightide, states on disk")
    if found["compute_tokens_per_s"]:
        axes.axhline(found["compute_tokens_per_s"], color="#888", linestyle="--", label="all on the GPU")
    if found["disk_bytes_per_s"]:
        roof = [one["tokens"] * found["disk_bytes_per_s"] / one["disk_bytes"] for one in points]
        axes.plot(tokens, roof, ":", color="#c0642c", label="a step's bytes at the disk's best speed")
    if found["deepspeed_tokens_per_s"]:
        axes.plot(tokens[-1:], [found["deepspeed_tokens_per_s"]], "s", color="#a03030", label="ZeRO-Infinity")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.15 * max(one["tokens_per_s"] for one in points) if points else 1)
    axes.set_xlabel("tokens per step")
    axes.set_ylabel("tokens per second")
    axes.set_title(found["model"])
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
