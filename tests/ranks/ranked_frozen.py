"""What each rank does in the tests of a frozen model beside one that several ranks train: DPO on its own batches."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from ranked_loop import optimizer_of
from ranked_training import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hightide
import models
from hightide.ir.tier import Tier
from hightide.process.system import resident_bytes
from hightide.runtime.surgery import run_of
from parity.test_frozen_beside import NUM_PAIRS, dpo_loss, log_probabilities


def beside(rank: int, world: int, gpu: int, gpu_frozen: int, host_frozen: int) -> dict[str, Any]:
    """Ranks have batches of different sizes for the evaluation alone, at the end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = models.llama(num_layers=2)[0]
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    with torch.no_grad():
        for param in reference.parameters():
            param += 0.01 * (rank + 1)  # those of the first rank count
    plain, plain_reference = copy.deepcopy(model), copy.deepcopy(reference)
    for value in plain_reference.state_dict().values():
        dist.broadcast(value, 0)
    batches = [models.token_batch(10 * seed + rank, num_samples=2 * NUM_PAIRS)["input_ids"] for seed in range(3)]
    example: dict[str, Any] = {"input_ids": torch.zeros_like(batches[0])}
    reference = hightide.wrap_frozen(
        reference, example, limits=hightide.Limits(gpu=gpu_frozen, host=host_frozen), timeout_s=60.0
    )
    model, optimizer = hightide.wrap(
        model, optimizer_of(model), example, limits=hightide.Limits(gpu=gpu, host="64MiB"), timeout_s=60.0
    )
    ddp, plain_optimizer = DistributedDataParallel(plain), optimizer_of(plain)
    losses = []
    for ids in batches:
        pair = [dpo_loss(model, reference, ids), dpo_loss(ddp, plain_reference, ids)]
        for loss in pair:
            loss.backward()
        for one in (optimizer, plain_optimizer):
            one.step()
            one.zero_grad()
        losses.append([loss.item() for loss in pair])
    ids = batches[0][: 1 + rank]
    with torch.no_grad():
        alone = [log_probabilities(one, ids).tolist() for one in (reference, plain_reference)]
    known, weights = plain.state_dict(), model.state_dict()
    difference = max((float((weights[name] - known[name]).abs().max()) for name in weights), default=0.0)
    run, its = run_of(model), run_of(reference)
    assert run is not None and its is not None
    found = {
        "losses": losses,
        "alone": alone,
        "difference": difference,
        "gpu": [run.gpu.peak_bytes, its.gpu.peak_bytes],
        "host": hightide.stats(reference).peak_bytes[Tier.HOST],
        "param_bytes": sum(param.nbytes for param in plain.parameters()),
        "streams": any(block.params is Tier.HOST for block in its.plan.blocks),
        "ranks": its.plan.ranks,
    }
    hightide.unwrap(model)
    hightide.unwrap(reference)
    found["frozen"] = digest(dict(reference.state_dict())) == digest(dict(plain_reference.state_dict()))
    found["trainable"] = sum(param.requires_grad for param in reference.parameters())
    del ddp  # before the group: see ranked_training.py
    dist.destroy_process_group()
    return found


def in_memory(rank: int, world: int, gpu_bytes: int, host_bytes: int) -> dict[str, Any]:
    """A frozen model that the host holds once, in shards."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    small = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).requires_grad_(False)  # with it come all modules
    frozen = hightide.wrap_frozen(small, torch.zeros(2, 8), blocks=["*"])
    with torch.no_grad():
        frozen(torch.zeros(2, 8))
    hightide.unwrap(frozen)
    before_bytes = resident_bytes()
    torch.manual_seed(0)
    with torch.device("meta"):
        large = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16))).requires_grad_(False)
    limits = hightide.Limits(gpu=gpu_bytes, host=host_bytes)
    frozen = hightide.wrap_frozen(large, torch.zeros(2, 1024), limits=limits, blocks=["*"])
    with torch.no_grad():
        frozen(torch.randn(2, 1024))
    return {"bytes": resident_bytes() - before_bytes, "host": hightide.stats(frozen).peak_bytes[Tier.HOST]}


def evaluates_alone(rank: int, world: int, gpu_frozen: int) -> None:
    """The first rank evaluates a model of which it has a shard; the other has ended."""
    torch.set_num_threads(1)
    model, batch = models.llama(num_layers=2)
    model.requires_grad_(False)
    frozen = hightide.wrap_frozen(model, batch, limits=hightide.Limits(gpu=gpu_frozen, host="64MiB"))
    if rank == 0:
        with torch.no_grad():
            frozen(**batch)
