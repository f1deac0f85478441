"""The largest Llama-shaped model that trains two steps within limits of GPU, host and disk, by bisection.

    python bench/largest.py --plan-only
    python bench/largest.py --system hightide,zero3 --gpu 24GiB --host 48GiB
    python bench/largest.py --system hightide,infinity --gpu 24GiB --host 48GiB --disk /scratch:40GiB

A size is a number of attention heads n of 128: width 128 n, n + 4 layers, 3.5 widths in the feed-forward part, the
vocabulary of Llama 3, tied. Each attempt is a process of its own. A watchdog adds up the resident memory of it and its
children ten times a second, and ends them when it is above the host's limit (`--slack` for what torch and CUDA
themselves take); torch's allocator keeps the limit of the GPU for everybody. An attempt counts if both steps end and
the loss is a number. Parameters begin as zeros: no values are made on the host first.

`--plan-only` asks only the planner, on the preset `--machine`, and needs no GPU. One JSON line per system. `--between`
spares the sizes that are known to fit or not to; if the largest of them fits, the line says so (`at_least`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed_peer import DeepSpeed
from torch import nn

import hightide
from hightide.cli.workload import Workload
from hightide.doctor.known import load_machine
from hightide.integrations.foreign_folder import import_transformers
from hightide.integrations.shapes import shaped_model
from hightide.ir.limits import parse_disks
from hightide.ir.plan import GradientDtype, Update
from hightide.ir.units import parse_bytes
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.predict.estimate import estimate
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.search import search
from hightide.profiler.model.repeated import FEW_LAYERS

SYSTEMS = ("hightide", "zero3", "infinity")
FEWEST, MOST = 8, 96  # heads: 0.2 and 190 billion parameters
HEAD_SIZE, VOCABULARY = 128, 128256
POLL_S = 0.1
LR = 1e-5


@dataclass(frozen=True)
class Attempt:
    heads: int
    num_params: int
    fits: bool
    why_not: str = ""
    host_peak_bytes: int = 0
    step_s: float | None = None  # of the second step; told, with --plan-only


def config_of(heads: int, length: int, num_layers: int | None = None) -> Any:
    width = heads * HEAD_SIZE
    return import_transformers().LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=layers_of(heads) if num_layers is None else num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=length,
        tie_word_embeddings=True,
    )


def layers_of(heads: int) -> int:
    return heads + 4


def without_values(heads: int, length: int) -> nn.Module:
    return shaped_model(config_of(heads, length), torch.bfloat16)


def num_params(heads: int, length: int) -> int:
    return sum(param.numel() for param in without_values(heads, length).parameters())


# -- the planner's word -----------------------------------------------------------------------------------------------


def planned(options: argparse.Namespace, heads: int) -> Attempt:
    model = shaped_model(config_of(heads, options.length, FEW_LAYERS), torch.bfloat16)
    tokens = torch.zeros(options.sequences, options.length, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    profile = Workload(f"{heads} heads", model, batch, num_layers=layers_of(heads)).profile()
    machine = load_machine(options.machine)
    limits = parse_bytes(options.gpu, "--gpu"), parse_bytes(options.host, "--host")
    update, gradients = Update(options.update), GradientDtype(options.gradients)
    terms = Terms(*limits, update, gradients=gradients, disk_bytes=disk_bytes(options), in_parts=True)
    numel = sum(spec.numel for spec in profile.params)
    try:
        found = search(Problem(profile, estimate(profile, machine), machine, terms))
    except InfeasiblePlan as refused:
        return Attempt(heads, numel, False, str(refused))
    return Attempt(heads, numel, True, host_peak_bytes=found.plan.forecast.host_peak_bytes, step_s=found.step.step_s)


def disk_bytes(options: argparse.Namespace) -> int:
    return sum(disk.num_bytes for disk in parse_disks(options.disk, "--disk"))


# -- two steps, in a process of their own -----------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    """Prints the seconds of the second step."""
    if options.device == "cuda":
        limit_bytes, total_bytes = parse_bytes(options.gpu, "--gpu"), torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes))
    step = {"hightide": hightide_step, "zero3": deepspeed_step, "infinity": deepspeed_step}[options.one](options)
    generator = torch.Generator().manual_seed(1)
    seconds = 0.0
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, (options.sequences, options.length), generator=generator)
        begin_s = time.perf_counter()
        loss = step(tokens)
        if options.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin_s
        if not math.isfinite(loss):
            raise SystemExit(f"the loss is {loss}")
    print(json.dumps({"step_s": seconds}), flush=True)


def hightide_step(options: argparse.Namespace) -> Callable[[torch.Tensor], float]:
    model = without_values(options.heads, options.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    tokens = torch.zeros(options.sequences, options.length, dtype=torch.long)
    limits = hightide.Limits(gpu=options.gpu, host=options.host, **({"disk": options.disk} if options.disk else {}))
    wanted = {"update": options.update, "gradients": options.gradients, "limits": limits}
    batch = {"input_ids": tokens, "labels": tokens}
    model, optimizer = hightide.wrap(model, optimizer, batch, device=options.device, **wanted)

    def step(tokens: torch.Tensor) -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def deepspeed_step(options: argparse.Namespace) -> Callable[[torch.Tensor], float]:
    """One sequence at a time."""
    folder = parse_disks(options.disk, "--disk")[0].path if options.one == "infinity" else None
    peer = DeepSpeed(1, options.sequences, LR, disk=folder)
    with peer.partitioned():
        model = import_transformers().LlamaForCausalLM._from_config(
            config_of(options.heads, options.length), torch_dtype=torch.bfloat16
        )
    step = peer.step_of(model)
    return lambda tokens: float(step(tokens))


# -- the watchdog -----------------------------------------------------------------------------------------------------


def attempted(options: argparse.Namespace, system: str, heads: int) -> Attempt:
    """In a session of its own, so that all of it can be ended."""
    numel = num_params(heads, options.length)
    command = [sys.executable, __file__, "--one", system, "--heads", str(heads), *options.passed]
    limit_bytes = parse_bytes(options.host, "--host") + parse_bytes(options.slack, "--slack")
    begin_s, peak_bytes, why_not = time.monotonic(), 0, ""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while process.poll() is None:
            peak_bytes = max(peak_bytes, used := resident_bytes(process.pid))
            if used > limit_bytes:
                why_not = f"{used} bytes of host memory, above {limit_bytes}"
            elif time.monotonic() - begin_s > options.limit_s:
                why_not = f"no two steps in {options.limit_s:.0f} s"
            if why_not:
                break
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
    if not why_not and process.returncode:
        why_not = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1][:400]
    if why_not:
        return Attempt(heads, numel, False, why_not, peak_bytes)
    told = json.loads(output.strip().splitlines()[-1])
    return Attempt(heads, numel, True, host_peak_bytes=peak_bytes, step_s=told["step_s"])


def resident_bytes(pid: int) -> int:
    """Of a process and all that it has started, each page once."""
    total, waiting = 0, [pid]
    while waiting:
        one = Path(f"/proc/{waiting.pop()}")
        try:
            rows = (one / "smaps_rollup").read_text().splitlines()
            total += sum(1024 * int(row.split()[1]) for row in rows if row.startswith("Pss:"))
            for task in (one / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return total


# -- bisection --------------------------------------------------------------------------------------------------------


def largest(
    attempt: Callable[[int], Attempt], fewest: int = FEWEST, most: int = MOST
) -> tuple[Attempt | None, list[Attempt]]:
    """The largest that fits, and all attempts. Fitting is taken to be monotone."""
    tried: list[Attempt] = []

    def fits(heads: int) -> bool:
        tried.append(attempt(heads))
        one = tried[-1]
        verdict = "fits" if one.fits else f"does not: {one.why_not}"
        print(f"{heads} heads, {one.num_params / 1e9:.2f}B: {verdict}", file=sys.stderr, flush=True)
        return one.fits

    low, high = fewest - 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return next((one for one in tried if one.fits and one.heads == low), None), tried


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--system", default="hightide", help=f"of {', '.join(SYSTEMS)}; several with commas")
    add("--plan-only", action="store_true", help="hightide: ask the planner, train nothing")
    add("--gpu", default="24GiB")
    add("--host", default="48GiB")
    add("--disk", action="append", default=[], metavar="FOLDER:SIZE")
    add("--slack", default="4GiB", help="of host memory, for the process itself")
    add("--sequences", type=int, default=4)
    add("--length", type=int, default=1024)
    add("--update", default="in_backward", choices=[str(one) for one in Update])
    add("--gradients", default="param", choices=[str(one) for one in GradientDtype])
    add("--machine", default="h200", help="with --plan-only: a preset")
    add("--device", default="cuda", help="cpu: the simulated accelerator")
    add("--between", type=int, nargs=2, default=[FEWEST, MOST], metavar="HEADS", help="sizes that are looked at")
    add("--limit-s", type=float, default=1800.0, help="seconds of one attempt")
    add("--one", choices=SYSTEMS, help=argparse.SUPPRESS)
    add("--heads", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.passed = [word for word in argv if word != "--plan-only"]
    return options


def main() -> None:
    options = parse(sys.argv[1:])
    if options.one is not None:
        return train(options)
    for system in options.system.split(","):
        if system not in SYSTEMS:
            raise SystemExit(f"--system {system}: there are {', '.join(SYSTEMS)}")
        if system != "hightide" and importlib.util.find_spec("deepspeed") is None:
            print(f"{system} is left out: DeepSpeed cannot be imported", file=sys.stderr)
            continue
        if system == "infinity" and not options.disk:
            raise SystemExit("infinity needs --disk FOLDER:SIZE")
        if options.plan_only and system == "hightide":
            found, tried = largest(lambda heads: planned(options, heads), *options.between)
        else:
            found, tried = largest(lambda heads, system=system: attempted(options, system, heads), *options.between)
        limits = {"gpu": options.gpu, "host": options.host, "disk": options.disk}
        row: dict[str, Any] = {"system": system, "plan_only": options.plan_only, **limits, "tried": len(tried)}
        if found is not None:
            sizes = [parse_bytes(options.gpu, "--gpu"), parse_bytes(options.host, "--host"), disk_bytes(options)]
            row |= asdict(found) | {"limit_bytes_per_param": sum(sizes) / found.num_params}
            row["at_least"] = found.heads == options.between[1]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
