"""Loops on a real GPU: long ones, mixed precision, determinism, no synchronisation, failures."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hightide
import models
from gpu.streamed import everything_moves, silence_transformers, wrap
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.runtime.surgery import run_of
from hightide.stores.store import OutOfMemory
from whole.test_fp16 import check_scaled_training, streamed

pytestmark = pytest.mark.gpu

MIB = 2**20


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, clip: bool = False) -> Tensor:
    loss = models.loss_of(model, batch)
    loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def resident_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


# -- long -------------------------------------------------------------------------------------------------------------


@pytest.mark.alone  # not for its time, but it takes a minute of a GPU that nobody shares
@pytest.mark.timeout(300)
@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_500_steps_do_not_grow(update: str) -> None:
    """Few and wide layers: the time of a step is that of its layers."""
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    assert sum(param.numel() for param in model.parameters()) > 200_000_000
    tokens = torch.randint(0, 8192, (8, 128))
    model, optimizer = wrap(model, {"input_ids": tokens, "labels": tokens}, update=update, micro_batch=4)
    reserved, allocated, resident = [], [], []
    for step in range(500):
        tokens = torch.randint(0, 8192, (8, 128))
        train_step(model, optimizer, {"input_ids": tokens, "labels": tokens}, clip=update == "deferred")
        if step % 50 == 49:
            run_of(model).executor.wait_for_updates()
            torch.cuda.synchronize()
            gc.collect()
            reserved.append(torch.cuda.memory_reserved())
            allocated.append(torch.cuda.memory_allocated())
            resident.append(resident_bytes())
    assert hightide.stats(model).deviations == 0
    hightide.unwrap(model)
    assert reserved[-1] == reserved[1], reserved
    assert abs(allocated[-1] - allocated[1]) <= MIB, allocated
    assert resident[-1] - resident[1] <= 16 * MIB, resident


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", Activation)
def test_a_loop_under_autocast_is_that_of_plain_pytorch_within_bf16(activation: Activation) -> None:
    model, batch = models.llama()
    plain = copy.deepcopy(model).cuda()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-4)
    here = {name: value.cuda() for name, value in batch.items()}
    model, optimizer = wrap(model, batch, partial(everything_moves, inputs=Tier.GPU, activation=activation))
    for _ in range(6):
        losses = []
        for one, its_optimizer, data in ((model, optimizer, batch), (plain, plain_optimizer, here)):
            with torch.autocast("cuda", torch.bfloat16):
                loss = models.loss_of(one, data)
            loss.backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) <= 2**-7 * abs(losses[1])
    weights = hightide.unwrap(model).state_dict()
    for name, expected in plain.state_dict().items():
        error = (weights[name].cuda() - expected).abs()
        assert weights[name].dtype == torch.float32
        assert error.max() <= 6 * 1e-3 and error.mean() <= 1e-3, name  # signs of tiny gradients may differ


@pytest.mark.parametrize("edit", [lambda plan: plan, streamed], ids=["resident", "streamed"])
def test_a_grad_scaler_trains_an_fp16_model(edit: Callable[[Plan], Plan]) -> None:
    check_scaled_training("cuda", edit)


def test_a_factor_counts_as_it_was_when_gradients_were_scaled_by_it() -> None:
    """Whatever is done with it before their updates have read it. Two in turn, and one update for all of a block."""
    model, batch = models.llama()
    plain = copy.deepcopy(model).cuda()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-4)
    here = {name: value.cuda() for name, value in batch.items()}
    model, optimizer = wrap(model, batch)
    for _ in range(3):
        for one, its_optimizer, data in ((model, optimizer, batch), (plain, plain_optimizer, here)):
            models.loss_of(one, data).backward()
            factor = torch.full((), 0.5, device="cuda")
            for _ in range(2):
                for param in one.parameters():
                    param.grad.mul_(factor)
                factor.mul_(100.0)
            its_optimizer.step()
            factor.fill_(torch.nan)
            its_optimizer.zero_grad()
    weights = hightide.unwrap(model).state_dict()
    for name, expected in plain.state_dict().items():
        bound = 1e-5 * expected.abs().max().item() + 1e-6
        assert (weights[name].cuda() - expected).abs().max().item() <= bound, name


# -- determinism ------------------------------------------------------------------------------------------------------


@contextmanager
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SAME_UPDATE_DEVICE: dict[str, Callable[[Plan], Plan]] = {
    "streamed": everything_moves,
    "inputs on the gpu": partial(everything_moves, inputs=Tier.GPU),
    "kept": partial(everything_moves, inputs=Tier.GPU, activation=Activation.KEEP),
    "one slot more": lambda plan: _more_slots(everything_moves(plan)),
    "states later": lambda plan: _settling(everything_moves(plan)),
}


def _settling(plan: Plan) -> Plan:
    return replace(plan, blocks=tuple(replace(block, settles=True) for block in plan.blocks))


def _more_slots(plan: Plan) -> Plan:
    return replace(plan, num_slots=plan.num_slots + 1, num_grad_slots=plan.num_grad_slots + 2)


@pytest.mark.parametrize("make", [models.llama_tied, models.gpt2], ids=lambda make: make.__name__)
def test_the_same_bits_from_every_plan(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager blocks, one micro-batch size, updates on the host."""
    results: dict[str, tuple[list[float], dict[str, Tensor]]] = {}
    with deterministic(monkeypatch):
        for name, edit in SAME_UPDATE_DEVICE.items():
            torch.manual_seed(0)
            model, batch = make(dropout=0.1)
            torch.manual_seed(1)
            model, optimizer = wrap(model, batch, edit)
            losses = [train_step(model, optimizer, batch, clip=True).item() for _ in range(5)]
            results[name] = losses, hightide.unwrap(model).state_dict()
    losses, weights = results["streamed"]
    for name, (other_losses, other_weights) in results.items():
        assert other_losses == losses, name
        for key, value in weights.items():
            assert torch.equal(other_weights[key], value), (name, key)


# -- no synchronisation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("update", "clip"), [("deferred", False), ("deferred", True), ("in_backward", False)])
@pytest.mark.parametrize(
    "make",
    [partial(models.llama, mask=False), partial(models.gpt2, mask=False), models.hand_written],  # HF asks masks
    ids=["llama", "gpt2", "hand_written"],
)
def test_the_steady_loop_never_waits_for_the_gpu(
    make: Any, update: str, clip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence_transformers(monkeypatch)
    model, batch = make()
    model, optimizer = wrap(model, batch, update=update)
    losses = []
    try:
        for step in range(6):
            if step == 2:  # by now every workspace and pinned buffer exists
                torch.cuda.set_sync_debug_mode("error")
            losses.append(train_step(model, optimizer, batch, clip))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(loss) for loss in losses)
    assert hightide.stats(model).deviations == 0
    hightide.unwrap(model)


# -- failures ---------------------------------------------------------------------------------------------------------


class Broken(Exception):
    """Nobody else raises this."""


@pytest.mark.parametrize("method", ["read", "write"])
def test_a_failing_copy_surfaces_as_itself(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = models.llama()
    model, optimizer = wrap(model, batch)
    train_step(model, optimizer, batch)
    error = Broken("the cable fell out")

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(run_of(model).host, method, fail)
    with pytest.raises(Broken) as caught:
        for _ in range(3):
            train_step(model, optimizer, batch)
    assert caught.value is error
    monkeypatch.undo()
    hightide.unwrap(model)


def test_a_failing_block_surfaces_as_itself_and_the_next_step_works() -> None:
    model, batch = models.llama()
    plain = copy.deepcopy(model).cuda()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-4)
    here = {name: value.cuda() for name, value in batch.items()}
    model, optimizer = wrap(model, batch)
    handle = model.model.layers[1].mlp.register_forward_hook(_raise)
    with pytest.raises(Broken):
        models.loss_of(model, batch)
    handle.remove()
    for _ in range(3):
        loss = train_step(model, optimizer, batch)
        expected = train_step(plain, plain_optimizer, here)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    hightide.unwrap(model)


def _raise(*_: Any) -> None:
    raise Broken("inside a block")


def test_exceeding_the_limit_in_a_block_is_out_of_memory_with_numbers() -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
            self.greed = 0

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.pow(2).mean() + x.new_zeros(self.greed).sum()

    model = Greedy()
    batch = torch.randn(4, 64)
    model, optimizer = wrap(model, batch)
    train_step(model, optimizer, batch)
    model.greed = 2**30  # 4 GiB of fp32; the limit is 2
    with pytest.raises(OutOfMemory, match=r"asks for .* bytes .* of 2147483648 bytes.*Limits"):
        train_step(model, optimizer, batch)
    model.greed = 0
    train_step(model, optimizer, batch)
    hightide.unwrap(model)
