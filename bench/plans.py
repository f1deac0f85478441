"""The hand-written plans of the benchmarks: choices here, files in bench/plans.

    python bench/plans.py [NAME ...]

needs no GPU and no weights. `bench/throughput.py --plan bench/plans/NAME.json` runs one.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from shapes import build

from hightide.ir.block import ModelProfile
from hightide.ir.plan import GradientDtype, Plan, Update
from hightide.ir.tier import Tier
from hightide.ir.units import format_bytes, parse_bytes
from hightide.planner.problem import Terms
from hightide.planner.search.by_hand import plan_by_hand
from hightide.planner.search.candidate import Candidate
from hightide.profiler.model.model_profile import profile_calls

FOLDER = Path(__file__).parent / "plans"
HOST, DISK = "112GiB", "60GiB"
LATE = 8  # of twelve blocks whose states are on disk are updated in the next forward: the disk does not idle there


@dataclass(frozen=True)
class HandWritten:
    """Blocks are counted in order of execution: 0 is the embedding."""

    model: str
    sequences: int
    length: int
    gpu: str
    update: Update
    micro_batch: int
    whole: int = 0  # so many first blocks wholly on the GPU, beside the tiny ones
    first: int = 0  # "first" begins with this one
    params: int = 0  # parameters only of so many more
    keep: int = 0  # so many last layers keep their activations
    kept_logits: int = 0  # tokens
    inputs: Tier = Tier.GPU
    spare_slots: int = 1
    spare_grad_slots: int | None = None  # None: as many as spare_slots
    gradients: GradientDtype = GradientDtype.PARAM
    state_buffers: int = 0  # all states on disk, through so many buffers on the host
    held_out: bool = False  # of FORECASTS: its measurement was not looked at while the forecast was being made better


W1 = {"model": "llama-3.2-3b", "sequences": 16, "length": 2048}
W1_8K = {**W1, "sequences": 4}

PLANS: dict[str, HandWritten] = {
    # Logits are kept: that memory is free when blocks run, so the whole batch is one micro-batch. The embedding and the
    # first layer are needed first and finished last: nothing could hide their updates.
    "w1-24gib": HandWritten(**W1, gpu="24GiB", update=Update.IN_BACKWARD, micro_batch=16, whole=3, kept_logits=24576),
    "w1-no-limit": HandWritten(
        **W1, gpu="120GiB", update=Update.IN_BACKWARD, micro_batch=16, whole=99, kept_logits=32768
    ),
    # The update of what is on the host is what is left to hide: as many states as possible on the GPU.
    "w1-24gib-clip": HandWritten(**W1, gpu="24GiB", update=Update.DEFERRED, micro_batch=8, whole=9, inputs=Tier.HOST),
    # The embedding's gradient takes four grad slots at the end: three more let the layers before it finish meanwhile.
    "w1-8gib": HandWritten(
        **W1,
        gpu="8GiB",
        update=Update.IN_BACKWARD,
        micro_batch=8,
        inputs=Tier.HOST,
        spare_grad_slots=3,
    ),
    "w1-8k-24gib": HandWritten(
        **W1_8K, gpu="24GiB", update=Update.IN_BACKWARD, micro_batch=4, whole=14, inputs=Tier.HOST
    ),
    "w1-8k-no-limit": HandWritten(
        **W1_8K, gpu="120GiB", update=Update.IN_BACKWARD, micro_batch=4, whole=99, kept_logits=8192
    ),
    "gpt2-xl-24gib": HandWritten(
        model="gpt2-xl",
        sequences=32,
        length=1024,
        gpu="24GiB",
        update=Update.IN_BACKWARD,
        micro_batch=32,
        whole=8,
        keep=3,
        kept_logits=32768,
    ),
}

_1B = {"model": "llama-3.2-1b", "length": 2048}
_3B = {"model": "llama-3.2-3b", "length": 2048}
_8K, _32K = {"sequences": 4, "micro_batch": 4}, {"sequences": 16, "micro_batch": 16}
_NOW, _LATER = {"update": Update.IN_BACKWARD}, {"update": Update.DEFERRED}

# What bench/forecast.py forecasts and measures: models, limits, batches, timings, recomputed and kept.
FORECASTS: dict[str, HandWritten] = {
    "1b-12gib-32k": HandWritten(**_1B, **_32K, **_NOW, gpu="12GiB", whole=1, inputs=Tier.HOST, held_out=True),
    "1b-12gib-8k-later": HandWritten(**_1B, **_8K, **_LATER, gpu="12GiB", whole=3),
    "1b-24gib-8k-keep": HandWritten(**_1B, **_8K, **_NOW, gpu="24GiB", whole=8, keep=6, kept_logits=8192),
    "1b-24gib-32k-later": HandWritten(**_1B, **_32K, **_LATER, gpu="24GiB", whole=6, keep=1),
    "1b-48gib-32k-later-keep": HandWritten(**_1B, **_32K, **_LATER, gpu="48GiB", whole=10, keep=6, kept_logits=32768),
    "3b-12gib-8k": HandWritten(**_3B, **_8K, **_NOW, gpu="12GiB", whole=1),
    "3b-12gib-32k": HandWritten(**_3B, sequences=16, micro_batch=4, **_NOW, gpu="12GiB", inputs=Tier.HOST, whole=1),
    "3b-24gib-32k": HandWritten(**_3B, **_32K, **_NOW, gpu="24GiB", whole=2, kept_logits=20480),
    "3b-24gib-8k-later": HandWritten(**_3B, **_8K, **_LATER, gpu="24GiB", whole=7),
    "3b-48gib-32k-keep": HandWritten(**_3B, **_32K, **_NOW, gpu="48GiB", whole=8, keep=3, kept_logits=16384),
    "3b-48gib-8k-later": HandWritten(
        **_3B, **_8K, **_LATER, gpu="48GiB", whole=16, keep=4, kept_logits=8192, held_out=True
    ),
}


def make(written: HandWritten, profile: ModelProfile) -> Plan:
    layers = [block.index for block in profile.blocks if not block.loose and not block.lazy_head]
    tiny = [index for index in layers if profile.blocks[index].kind.endswith("Norm")]
    big = [index for index in layers if index not in tiny]
    front = big[written.first :]
    whole, params = front[: written.whole], front[written.whole : written.whole + written.params]
    kept = big[len(big) - written.keep :]
    candidate = Candidate(
        micro_batch=written.micro_batch,
        inputs=written.inputs,
        spare_slots=written.spare_slots,
        spare_grad_slots=written.spare_grad_slots,
        whole=frozenset() if written.state_buffers else frozenset([*whole, *tiny]),
        params=frozenset(params),
        keep=frozenset(kept),
        loss_kept_tokens=written.kept_logits,
        disk=written.state_buffers > 0,
        host_params=frozenset(layers),
        state_buffers=written.state_buffers,
        read_buffers=min(2, written.state_buffers),
        late=LATE if written.state_buffers else 0,
    )
    limits = parse_bytes(written.gpu, "gpu"), parse_bytes(HOST, "host")
    disk_bytes = parse_bytes(DISK, "disk") if written.state_buffers else 0
    terms = Terms(*limits, written.update, gradients=written.gradients, disk_bytes=disk_bytes)
    return plan_by_hand(profile, candidate, terms)


def profile_of(model: str, sequences: int, length: int) -> ModelProfile:
    shape = build(model, length, device="meta")
    optimizer = torch.optim.AdamW(shape.parameters())
    tokens = torch.zeros(sequences, length, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    gpu = torch.device("cuda")
    return profile_calls(shape, optimizer, batch, device=None, runs_on=gpu)[
        0
    ]  # shapes are believed: nothing is trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = {**PLANS, **FORECASTS}
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(every))
    profiles: dict[tuple[str, int, int], ModelProfile] = {}
    FOLDER.mkdir(exist_ok=True)
    for name in parser.parse_args().names or every:
        written = every[name]
        key = (written.model, written.sequences, written.length)
        if key not in profiles:
            profiles[key] = profile_of(*key)
        plan = make(written, profiles[key])
        replace(plan, profile=None).save(FOLDER / f"{name}.json")  # the model is at hand where it is used
        gpu, host = plan.forecast.gpu_peak_bytes, plan.forecast.host_peak_bytes
        print(
            f"{name:24} GPU tensors {format_bytes(gpu):>9} of {written.gpu:>6}, host {format_bytes(host):>9}",
            flush=True,
        )


if __name__ == "__main__":
    main()
