"""What bench/figures.py runs and what it wants: cases, the figures that are taken of them, and the calls to paste.

A case is a program of `bench/`, or a module (`pytest`, `hightide`), in a process of its own. Its expected seconds are
those of the log where there are some, else an estimate (`~` in the list); its limit is where it is given up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import nan
from typing import Any

Result = dict[str, Any]  # the JSON of a case, with "call" and "wall_s" beside it

STEPS = "--warmup 3 --synced-steps 0 --gradients param --host 112GiB"
LARGE = "--sequences 512 --length 1024 --calls auto --gradients param --clip 1.0 --steps 3 --warmup 1 --synced-steps 0"
FROM_DISK = "--gpu 24GiB --update in_backward --gradients param --steps 4 --warmup 1 --synced-steps 0"
SMALL = "--model tiny --device cpu --sequences 4 --length 16"  # what a rehearsal adds
TINY = f"{SMALL} --steps 2 --warmup 1 --gpu 64MiB --host 256MiB"
PEERS = "--steps 3 --warmup 1 --synced-steps 0 --gpu 24GiB"


@dataclass(frozen=True)
class Case:
    command: str  # program and options; {disk}: a folder of its own, {old}: --old
    expected_s: int
    limit_s: int
    tiny: str | None = TINY  # options that make it run without a GPU; None: it cannot
    needs: str = ""  # "peers" or "old": the option of figures.py without which it is left out
    is_estimate: bool = field(default=False)
    held_out: bool = False  # nothing that forecasts are made of may be fitted to what it finds


def _once(
    command: str, expected_s: int, limit_s: int, tiny: str | None = TINY, needs: str = "", held_out: bool = False
) -> Case:
    """One that has never run on a GPU: its seconds are a guess."""
    return Case(command, expected_s, limit_s, tiny, needs, is_estimate=True, held_out=held_out)


CASES: dict[str, Case] = {
    "doctor": Case("hightide doctor", 15, 60, ""),
    # W1
    "resident": Case(f"throughput.py {STEPS} --steps 10 --system resident --recompute --micro-batch 4", 50, 120),
    "w1-24": Case(f"throughput.py {STEPS} --steps 10 --gpu 24GiB --update in_backward", 115, 220),
    "w1-24-clip": Case(f"throughput.py {STEPS} --steps 10 --gpu 24GiB --clip 1.0 --lanes 6", 115, 200),
    "w1-24-nccl": Case(f"throughput.py {STEPS} --steps 10 --gpu 24GiB --update in_backward --collectives", 110, 200),
    "w1-48": Case(f"throughput.py {STEPS} --steps 10 --gpu 48GiB --update in_backward", 100, 180),
    "w1-trainer": Case(
        "trainer_throughput.py --warmup 3 --gradients param --host 112GiB --steps 10 --gpu 24GiB --update in_backward",
        85,
        190,
    ),
    # Other shapes, of which forecasts are held against what is found too.
    "plain-3b": Case(f"throughput.py {STEPS} --steps 10 --system resident --micro-batch 4", 75, 150),
    "kept-3b": _once(f"throughput.py {STEPS} --steps 10 --update in_backward", 100, 180, f"{TINY} --gpu 1GiB"),
    "plain-1b": Case(
        f"throughput.py {STEPS} --steps 15 --model llama-3.2-1b --sequences 8 --system resident --micro-batch 8",
        55,
        110,
    ),
    "1b-24": Case(
        f"throughput.py {STEPS} --steps 15 --model llama-3.2-1b --sequences 8 --gpu 24GiB --update in_backward", 80, 140
    ),
    "8b-24": Case(
        "throughput.py --model llama-3.1-8b --sequences 4 --gpu 24GiB --host 112GiB --gradients param --clip 1.0"
        " --steps 6 --warmup 2 --synced-steps 0",
        130,
        220,
    ),
    "gpt2-xl-12": _once(
        f"throughput.py {STEPS} --steps 8 --model gpt2-xl --sequences 16 --length 1024 --gpu 12GiB"
        " --update in_backward",
        100,
        180,
        f"{TINY} --model tiny-gpt --gpu 512MiB --host 512MiB",
        held_out=True,
    ),
    "1b-calls": _once(
        f"throughput.py {STEPS} --steps 8 --model llama-3.2-1b --sequences 32 --calls 4 --gpu 12GiB --clip 1.0",
        100,
        180,
        f"{TINY} --calls 2",
        held_out=True,
    ),
    "eager-4b": _once(
        "throughput.py --model qwen3-4b --gpu 24GiB --host 112GiB --no-compile --steps 6 --warmup 2 --synced-steps 0",
        110,
        200,
    ),
    "eager-1b-long": _once(
        "throughput.py --model llama-3.2-1b --sequences 1 --length 65536 --gpu 24GiB --host 112GiB --no-compile"
        " --gradients param --steps 4 --warmup 1 --synced-steps 0",
        100,
        200,
        f"{TINY} --sequences 1 --length 128",
    ),
    "qwen-3b": Case(f"throughput.py {LARGE} --model qwen2.5-3b --gpu 80GiB --host 112GiB", 210, 300),
    "qwen-7b": Case(f"throughput.py {LARGE} --model qwen2.5-7b --gpu 80GiB --host 110GiB", 360, 520),
    "long": Case(
        f"throughput.py {STEPS} --steps 3 --sequences 1 --length 131072 --gpu 24GiB --clip 1.0 --warmup 1",
        180,
        330,
        f"{TINY} --sequences 1 --length 128",
    ),
    # Checkpoints.
    "save-1b": Case(
        "checkpoint.py --model llama-3.2-1b --every 20 --steps 40 --warmup 3 --host 100GiB --gradients param"
        " --folder {disk}/saved",
        270,
        400,
        f"{TINY} --every 2",
    ),
    "save-w1": Case(
        "checkpoint.py --gpu 24GiB --host 90GiB --update in_backward --gradients param --every 20 --steps 20 --warmup 3"
        " --one-at-a-time --folder {disk}/saved",
        420,
        560,
        f"{TINY} --every 2",
    ),
    # From a disk.
    "floor": Case("disk_floor.py {disk}", 80, 130, "--file-gib 0.25 --seconds 1 --warmup 0.2"),
    "disk-w1": _once(f"throughput.py {FROM_DISK} --states-on-disk 8 --disk {{disk}}:40GiB", 160, 260),
    "disk-w1-host": _once(
        f"throughput.py {FROM_DISK} --host 24GiB --disk {{disk}}:40GiB", 120, 220, f"{TINY} --gpu 700KiB --host 700KiB"
    ),
    "disk-infinity": _once(
        "throughput.py --system deepspeed --gpu 24GiB --disk {disk}:40GiB --steps 2 --warmup 1 --synced-steps 0",
        250,
        380,
        None,
        "peers",
    ),
    "disk-8b": _once(
        f"throughput.py {FROM_DISK} --model llama-3.1-8b --sequences 16 --host 64GiB --disk {{disk}}:48GiB",
        230,
        400,
        f"{TINY} --gpu 700KiB --host 700KiB",
    ),
    "saturation": _once(
        "saturation.py --disk {disk}:20GiB --floor='--seconds 5' --sequences 4 16 64 128 --steps 3"
        " --save {disk}/saturation",
        410,
        560,
        "--model tiny --device cpu --length 16 --sequences 2 4 --gpu 64MiB"
        " --floor='--file-gib 0.25 --seconds 1 --warmup 0.2'",
    ),
    "infinity-1b": _once(
        "throughput.py --system deepspeed --model llama-3.2-1b --sequences 128 --gpu 24GiB --disk {disk}:20GiB"
        " --steps 1 --warmup 1 --synced-steps 0",
        150,
        260,
        None,
        "peers",
    ),
    # Where users are.
    "train-8b": _once(
        "train_command.py --shape llama-3.1-8b --gpu 8GiB --folder {disk}",
        330,
        520,
        "--shape tiny --device cpu --gpu 4MiB --host 256MiB --sequences 2 --length 64 --no-compile",
    ),
    "trainer-parity": _once(
        "trainer_parity.py --model llama-3.2-1b --gpu 8GiB",
        150,
        280,
        "--model tiny --device cpu --gpu 1MiB --host 64MiB --sequences 2 --length 16",
    ),
    "tests-gpu": Case(
        "pytest -q -n 12 --dist worksteal --timeout 200 -m 'gpu and not alone and not long' tests/gpu",
        350,
        470,
        "--collect-only",
    ),
    "tests-alone": _once(
        "pytest -q --timeout 300 -m 'gpu and alone and not long' tests/gpu", 330, 560, "--collect-only"
    ),
    # Other systems.
    "zero2": Case(f"throughput.py {PEERS} --system zero2", 130, 230, None, "peers"),
    "zero3": Case(f"throughput.py {PEERS} --system deepspeed", 130, 230, None, "peers"),
    "roundpipe": _once(f"throughput.py {PEERS} --system roundpipe", 110, 220, None, "peers"),
    "roundpipe-stale": _once(f"throughput.py {PEERS} --system roundpipe-stale", 110, 220, None, "peers"),
    # The version before the tree was changed.
    "turns-w1": Case('turns.py {old} --only "W1 in backward"', 240, 400, "--only tiny --turns 1", "old"),
    "turns-w1-clip": Case('turns.py {old} --only "W1 deferred, clipped"', 220, 380, "--only tiny --turns 1", "old"),
    "turns-1b": Case('turns.py {old} --only "1B, 8,192 tokens"', 110, 220, "--only tiny --turns 1", "old"),
    "turns-python": Case(
        "turns.py {old} --bookkeeping --blocks 64 --passes 40", 60, 150, "--turns 1 --blocks 4 --passes 3", "old"
    ),
    # What each mechanism is worth.
    **{
        f"ablate-{name}": _once(
            f"ablate.py --json --model {model} --sequences {sequences} --steps 5",
            seconds,
            560,
            "--model tiny --device cpu --sequences 4 --length 16 --gpu 700KiB --host 64MiB --steps 1",
        )
        for name, model, sequences, seconds in (
            ("w1", "llama-3.2-3b", 16, 470),
            ("1b-4", "llama-3.2-1b", 4, 190),
            ("1b-16", "llama-3.2-1b", 16, 200),
            ("1b-64", "llama-3.2-1b", 64, 350),
        )
    },
    # The largest model. Sizes around those that the planner tells (`bench/largest.py --plan-only`).
    **{
        f"largest-{name}": _once(
            f"largest.py --system {system} --between {between} --limit-s 240 {more}", 400, 560, tiny, needs
        )
        for name, system, between, more, tiny, needs in (
            ("ours", "hightide", "25 28", "", "--device cpu --between 1 1 --gpu 512MiB --host 2GiB --length 16", ""),
            ("zero3", "zero3", "19 22", "", None, "peers"),
            (
                "ours-disk",
                "hightide",
                "29 32",
                "--disk {disk}:40GiB",
                "--device cpu --between 1 1 --gpu 512MiB --host 2GiB --length 16",
                "",
            ),
            ("infinity", "infinity", "21 24", "--disk {disk}:40GiB", None, "peers"),
        )
    },
    "tiny": Case(  # of no figure that counts: shows without a GPU that this program works
        f"throughput.py {TINY} --synced-steps 0", 15, 100, ""
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
    in_one_call: bool = True  # of seconds: no two machines are alike; sizes are the same on all of them


# -- how a figure is taken --------------------------------------------------------------------------------------------


def step_s(result: Result) -> float:
    """From step end to step end; the median."""
    return float(result["event_s"]["median"])


def ratio(reference: Result, run: Result) -> float:
    return step_s(reference) / step_s(run)


def whole_ratio(reference: Result, run: Result) -> float:
    """Of all steps with what they left unfinished: from a disk one step can be short because the next is long."""
    return float(reference["step_s"]) / float(run["step_s"])


def tokens_per_s(run: Result) -> float:
    return float(run["sequences"]) * float(run["length"]) / step_s(run)


def of_floor(floor: Result, run: Result) -> float:
    """The seconds that the disk alone would need for the step's bytes, over those of the step; nan: there are none."""
    moved = run["moved_bytes_per_step"]
    num_bytes = moved.get("disk_read", 0.0) + moved.get("disk_write", 0.0)
    return num_bytes / (1e9 * float(floor["best_gb_per_s"])) / float(run["step_s"]) if num_bytes else nan


def beside_plan(run: Result) -> float:
    """By how much the bytes that reached the device differ from those that the schedule moved; the larger way."""
    moved, device = run["moved_bytes_per_step"], run["device_bytes_per_step"]
    ways = [(moved.get(f"disk_{way}", 0.0), device.get(way)) for way in ("read", "write")]
    return max((abs(seen / told - 1) for told, seen in ways if told and seen is not None), default=nan)


def above_limits(run: Result) -> float:
    """Bytes by which the highest tier is above its limit."""
    return max(run["tier_peak_bytes"][tier] - limit for tier, limit in run["limit_bytes"].items())


def value(name: str) -> Callable[[Result], float]:
    return lambda run: float(run[name])


def _turned(name: str, key: str) -> Callable[[Result], float]:
    return lambda run: float(run["new"][name][key]) / float(run["old"][name][key])


def _issuing(run: Result) -> float:
    """Processor time of the threads that run forward and backward, new over old."""
    new, old = (run[which]["1B, 8,192 tokens"] for which in ("new", "old"))
    return (new["forward"] + new["backward"]) / (old["forward"] + old["backward"])


def _larger(ours: Result, theirs: Result) -> float:
    return float(ours["num_params"]) / float(theirs["num_params"])


def _most_lost(run: Result) -> float:
    """What the mechanism that is worth most is worth."""
    rows = [row for row in run["lines"] if row.get("found_s")]
    full = next(row for row in rows if row["name"] == "everything")
    return max(row["found_s"] / full["found_s"] - 1 for row in rows)


FREE = float("inf")
FIGURES: dict[str, Figure] = {
    "W1, 24 GiB, in backward / resident": Figure("1.10", 1.10, True, ("resident", "w1-24"), ratio, "w1"),
    "W1, 24 GiB, one rank that gathers / not": Figure("0.98", 0.98, True, ("w1-24", "w1-24-nccl"), ratio, "nccl"),
    "W1, 24 GiB, clipped / resident": Figure("0.97", 0.97, True, ("resident", "w1-24-clip"), ratio, "w1-clip"),
    "W1, 24 GiB, Trainer / own loop": Figure("0.97", 0.97, True, ("w1-24", "w1-trainer"), ratio, "w1"),
    "W1, 48 GiB, in backward / resident": Figure("1.15", 1.15, True, ("resident", "w1-48"), ratio, "w1-48"),
    "3B, no limit / plain, no recompute": Figure("0.98", 0.98, True, ("plain-3b", "kept-3b"), ratio, "kept"),
    "1B, 16k tokens, 24 GiB / plain": Figure("0.93", 0.93, True, ("plain-1b", "1b-24"), ratio, "1b"),
    "Qwen2.5-3B, 512 x 1024, tokens/s": Figure("28,500", 28_500, True, ("qwen-3b",), tokens_per_s, "qwen"),
    "Qwen2.5-7B, 512 x 1024, tokens/s": Figure("12,300", 12_300, True, ("qwen-7b",), tokens_per_s, "qwen7"),
    "3B, 131,072 tokens, 24 GiB, tokens/s": Figure("runs", 1, True, ("long",), tokens_per_s, "long"),
    "Qwen3-4B, eager, 24 GiB, retries": Figure("0", 0, False, ("eager-4b",), value("gpu_alloc_retries"), "eager"),
    "1B, 65,536 tokens, eager, tokens/s": Figure("stated", 0, True, ("eager-1b-long",), tokens_per_s, "eager"),
    "8B, 4 x 2048, 24 GiB, tokens/s": Figure("stated", 0, True, ("8b-24",), tokens_per_s, "forecasts"),
    "gpt2-xl, 16 x 1024, 12 GiB, tokens/s": Figure("stated", 0, True, ("gpt2-xl-12",), tokens_per_s, "forecasts"),
    "1B, 32 x 2048, 4 calls, tokens/s": Figure("stated", 0, True, ("1b-calls",), tokens_per_s, "forecasts"),
    "1B, a save every 20 steps, overhead": Figure("0.03", 0.03, False, ("save-1b",), value("overhead"), "save"),
    "1B, killed, to the first step, s": Figure("stated", FREE, False, ("save-1b",), value("total_s"), "save"),
    "W1, one save in 20 steps, overhead": Figure("stated", FREE, False, ("save-w1",), value("overhead"), "save-w1"),
    "W1, killed, to the first step, s": Figure("stated", FREE, False, ("save-w1",), value("total_s"), "save-w1"),
    "W1 from disk / its floor": Figure("0.85", 0.85, True, ("floor", "disk-w1"), of_floor, "disk"),
    "W1 from disk, bytes of the device": Figure("0.01", 0.01, False, ("disk-w1",), beside_plan, "disk"),
    "W1 from disk / ZeRO-Infinity": Figure("2.2", 2.2, True, ("disk-infinity", "disk-w1"), whole_ratio, "disk"),
    "W1, 24 GiB host / all on disk": Figure("1.7", 1.7, True, ("disk-w1", "disk-w1-host"), whole_ratio, "disk-host"),
    "W1, 24 GiB host / its floor": Figure("0.85", 0.85, True, ("floor", "disk-w1-host"), of_floor, "disk-host"),
    "8B in 24 + 64 + 48 GiB, tokens/s": Figure("stated", 0, True, ("disk-8b",), tokens_per_s, "disk8b"),
    "8B in 24 + 64 + 48 GiB, above limits": Figure("0", 0, False, ("disk-8b",), above_limits, "disk8b"),
    "1B from disk, tokens at 90%": Figure(
        "stated", FREE, False, ("saturation",), value("saturated_at_tokens"), "saturation"
    ),
    "1B from disk, saturated / ZeRO-Infinity": Figure(
        "stated",
        0,
        True,
        ("saturation", "infinity-1b"),
        lambda ours, theirs: ours["points"][-1]["tokens_per_s"] / theirs["tokens_per_s"],
        "saturation",
    ),
    "8B, LoRA, 8 GiB, `train`: saved after, s": Figure(
        "stated", FREE, False, ("train-8b",), value("whole_s"), "train-8b"
    ),
    "8B, LoRA, killed and resumed: losses off": Figure(
        "0.001", 1e-3, False, ("train-8b",), value("resumed_off"), "train-8b"
    ),
    "1B, Trainer in 8 GiB / plain: logs off": Figure(
        "0.0001", 1e-4, False, ("trainer-parity",), value("logs_off"), "trainer"
    ),
    "GPU tests that fail": Figure("0", 0, False, ("tests-gpu",), value("failed"), "tests-gpu"),
    "GPU tests that time, that fail": Figure("0", 0, False, ("tests-alone",), value("failed"), "tests-alone"),
    "W1, 24 GiB, clipped / ZeRO-2": Figure("stated", 0, True, ("zero2", "w1-24-clip"), whole_ratio, "rivals"),
    "W1, 24 GiB, clipped / ZeRO-3": Figure("stated", 0, True, ("zero3", "w1-24-clip"), whole_ratio, "rivals"),
    "W1, 24 GiB, clipped / RoundPipe": Figure("stated", 0, True, ("roundpipe", "w1-24-clip"), whole_ratio, "rivals-rp"),
    "W1, 24 GiB, clipped / RoundPipe, stale": Figure(
        "stated", 0, True, ("roundpipe-stale", "w1-24-clip"), whole_ratio, "rivals-rp"
    ),
    "W1 in backward, new / old": Figure(
        "1.015", 1.015, False, ("turns-w1",), _turned("W1 in backward", "step_s"), "turns"
    ),
    "W1 in backward, `wrap`, new / old": Figure(
        "1.0", 1.0, False, ("turns-w1",), _turned("W1 in backward", "wrap_s"), "turns"
    ),
    "1B, 8,192 tokens, new / old": Figure(
        "1.03", 1.03, False, ("turns-1b",), _turned("1B, 8,192 tokens", "step_s"), "turns"
    ),
    "1B, 8,192 tokens, threads, new / old": Figure("0.7", 0.7, False, ("turns-1b",), _issuing, "turns"),
    "Python per block, streamed, new / old": Figure(
        "0.7", 0.7, False, ("turns-python",), _turned("streamed", "block_us"), "turns"
    ),
    "W1 clipped, new / old": Figure(
        "1.015", 1.015, False, ("turns-w1-clip",), _turned("W1 deferred, clipped", "step_s"), "turns-clip"
    ),
    **{
        f"ablation, {text}: lost at most": Figure("stated", FREE, False, (f"ablate-{case}",), _most_lost, group)
        for text, case, group in (
            ("W1", "w1", "ablate-w1"),
            ("1B, 4 sequences", "1b-4", "ablate-1b"),
            ("1B, 16 sequences", "1b-16", "ablate-1b"),
            ("1B, 64 sequences", "1b-64", "ablate-1b-64"),
        )
    },
    "largest, 24 + 48 GiB / ZeRO-3": Figure(
        "1.6", 1.6, True, ("largest-ours", "largest-zero3"), _larger, "largest", in_one_call=False
    ),
    "largest, and 40 GiB of disk / Infinity": Figure(
        "2", 2.0, True, ("largest-ours-disk", "largest-infinity"), _larger, "largest-disk", in_one_call=False
    ),
    "tiny, without a GPU, tokens/s": Figure("stated", 0, True, ("tiny",), tokens_per_s, "tiny"),
}
BY_NAME_ONLY = {"tiny"}
FIRST = {group: ("doctor",) for group in ("w1", "w1-clip")}  # cases of a group that no figure is taken of

# One call of 9.5 minutes each, the most valuable first: the first three are what half an hour of a GPU is for. What was
# measured on the present code and is as wanted comes last.
CALLS: tuple[tuple[str, ...], ...] = (
    ("save", "eager"),
    ("save-w1",),
    ("qwen7", "kept"),
    ("train-8b", "trainer"),
    ("disk",),
    ("long", "forecasts"),
    ("disk-host", "w1-48"),
    ("qwen", "w1"),
    ("disk8b", "rivals-rp"),
    ("turns",),
    ("rivals",),
    ("saturation",),
    ("ablate-w1",),
    ("ablate-1b",),
    ("ablate-1b-64",),
    ("turns-clip",),
    ("tests-alone",),
    ("largest",),
    ("largest",),
    ("largest-disk",),
    ("largest-disk",),
    ("tests-gpu",),
    ("w1-clip", "nccl", "1b"),
)
