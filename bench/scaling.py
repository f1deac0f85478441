"""How steps scale over GPUs, as told for machines with linked ones. Needs no GPU: everything is simulated.

    python bench/scaling.py                                        # all models, presets and numbers of GPUs: minutes
    python bench/scaling.py --model llama-3.1-8b --machine 8x-h100
    python bench/scaling.py --patrickstar                          # its 20B on 8 x A100

Each GPU has a batch of its own, 16,384 tokens in one call (weak scaling), gradients and moments in fp32, deferred
updates: clipping stays exact. Efficiency is against one GPU of the same machine, which has the whole node to itself.
What fits neither GPU nor host gets 4 TiB of the node's disk, and the row says so.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from hightide.cli.workload import load_workload
from hightide.doctor.known import load_machine
from hightide.integrations.shapes import SHAPES
from hightide.ir.block import ModelProfile
from hightide.ir.machine import Machine
from hightide.ir.tier import Lane
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.one_rank import machine_of_rank
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.light import needed_flop
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.replicas import search_groups
from hightide.planner.search.search import search
from hightide.planner.solution import Searched

TOKENS = 16_384
MODELS = ("llama-3.2-3b", "llama-3.1-8b", "gpt-65b")
COUNTS = {  # GPUs of a node, and nodes
    "4x-rtx-4090": ((1, 1), (2, 1), (4, 1)),
    "8x-a100-80g": ((1, 1), (2, 1), (4, 1), (8, 1)),
    "8x-h100": ((1, 1), (2, 1), (4, 1), (8, 1)),
    "4-nodes-8x-h100": ((8, 4),),
}
GPU_SHARE, HOST_SHARE = 0.95, 0.9  # as `hightide plan` leaves it
DISK_BYTES = 4 << 40


@dataclass(frozen=True)
class Row:
    found: Searched
    gpus: int
    nodes: int
    from_disk: bool

    @property
    def tokens_per_s(self) -> float:
        profile, ranks = self.found.profile, self.gpus * self.nodes
        return ranks * profile.num_samples * profile.tokens_per_sample / self.found.step.step_s

    def text(self, machine: str, alone_per_s: float | None) -> str:
        step, forecast, busy = self.found.step, self.found.plan.forecast, self.found.step.simulated.busy_s
        ranks = self.gpus * self.nodes
        efficiency = "" if alone_per_s is None else f"{self.tokens_per_s / (ranks * alone_per_s):.0%}"
        limit = max((lane for lane in Lane if lane in busy), key=lambda lane: busy[lane])
        shares = ", ".join(
            f"{lane} {busy[lane] / step.step_s:.0%}" for lane in (Lane.GATHER, Lane.REDUCE) if busy[lane]
        )
        groups = f", {self.found.plan.replicas} replicas" if self.found.plan.replicas > 1 else ""
        gpus = f"{self.nodes} x {self.gpus}" if self.nodes > 1 else str(self.gpus)
        cells = [
            machine,
            gpus + groups + (", disk" if self.from_disk else ""),
            f"{step.step_s:.3g} s",
            f"{self.tokens_per_s:,.0f}",
            efficiency,
            f"{forecast.gpu_bytes / 2**30:.0f}",
            f"{forecast.host_peak_bytes / 2**30:.0f}",
            f"{limit} {busy[limit] / step.step_s:.0%}",
            shares,
        ]
        return "| " + " | ".join(cells) + " |"


def row(profile: ModelProfile, machine: Machine, gpus: int, nodes: int) -> Row | None:
    rank = machine_of_rank(machine, gpus, nodes)
    assert rank.gpu is not None and rank.host is not None
    limits = int(GPU_SHARE * rank.gpu.memory_bytes), int(HOST_SHARE * rank.host.memory_bytes)
    asked = Problem(profile, estimate(profile, rank), rank, Terms(*limits, ranks=gpus * nodes, in_parts=True))
    for disk_bytes in (0, DISK_BYTES // gpus):
        try:
            found = search_groups(asked.with_terms(disk_bytes=disk_bytes), search)
        except InfeasiblePlan:
            continue
        found.verify()
        return Row(found, gpus, nodes, disk_bytes > 0)
    return None


def table(model: str, machines: list[str]) -> None:
    length = 1024 if model.startswith("gpt") else 2048
    profile = load_workload(model, TOKENS // length, length, None, None).profile()
    print(f"\n{model}, {TOKENS // length} sequences of {length} for each GPU\n")
    print("| machine | GPUs | step | tokens/s | efficiency | GPU, GiB | host, GiB | busiest | between GPUs |")
    print("|---|---|---|---|---|---|---|---|---|")
    alone: dict[str, float] = {}
    for name in machines:
        for gpus, nodes in COUNTS[name]:
            found = row(profile, load_machine(name), gpus, nodes)
            base = name.removeprefix("4-nodes-")
            if found is None:
                print(f"| {name} | {gpus} | does not fit | | | | | | |", flush=True)
                continue
            if gpus * nodes == 1:
                alone[base] = found.tokens_per_s
            print(found.text(base, alone.get(base)), flush=True)


def patrickstar() -> None:
    """20B on 8 A100: operations of the model's own forward and backward, once each, per second of all GPUs."""
    SHAPES["gpt-20b"] = replace(SHAPES["gpt-13b"], settings={**SHAPES["gpt-13b"].settings, "n_layer": 64})
    profile = load_workload("gpt-20b", 16, 1024, None, None).profile()
    found = row(profile, load_machine("8x-a100-80g"), 8, 1)
    assert found is not None
    flop_per_s = 8 * needed_flop(profile, profile.num_samples) / found.found.step.step_s
    print(f"gpt-20b on 8 x A100: {found.text('8x-a100-80g', None)} {flop_per_s / 1e12:.0f} TFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--machine", choices=list(COUNTS))
    parser.add_argument("--patrickstar", action="store_true")
    options = parser.parse_args()
    if options.patrickstar:
        patrickstar()
        return
    for model in [options.model] if options.model else MODELS:
        table(model, [options.machine] if options.machine else list(COUNTS))


if __name__ == "__main__":
    main()
