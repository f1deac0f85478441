"""A loop under autocast: as plain PyTorch within bf16, with recomputation under the same autocast as forward."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import models
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.runtime.blocks.autocast import Autocast
from unit.runtime.steps import Twins, twins

TOLERANCE = 2**-7  # bf16 has 8 bits of mantissa


def autocast_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = models.loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def activations(kind: Activation):
    def edit(plan: Plan) -> Plan:
        blocks = [
            replace(block, params=Tier.HOST, states=Tier.HOST, inputs=Tier.GPU, activation=kind)
            if block.name
            else block
            for block in plan.blocks
        ]
        return replace(plan, blocks=tuple(blocks), num_slots=2, num_grad_slots=2, gpu_limit_bytes=2**22)

    return edit


def pair_of(name: str, kind: Activation) -> Twins:
    model, batch = models.ZOO[name]()
    return twins(model, batch, gpu="300KiB", lr=1e-3, edit=activations(kind))


def test_the_loop_under_autocast_is_that_of_plain_pytorch_within_bf16() -> None:
    for name in ("llama", "hand_written"):
        pair = pair_of(name, Activation.RECOMPUTE)
        for _ in range(4):
            ours, expected = pair.step(autocast_step)
            assert abs(ours - expected) <= TOLERANCE * abs(expected)
        for (key, ours), expected in zip(
            pair.model.state_dict().items(), pair.plain.state_dict().values(), strict=True
        ):
            assert (ours - expected).abs().max() <= 4 * 1e-3, (
                key
            )  # four steps of lr: signs of tiny gradients may differ
        pair.close()


def test_every_level_gives_the_same_bits_under_autocast() -> None:
    for name in ("llama", "hand_written"):
        results = []
        for kind in Activation:
            pair = pair_of(name, kind)
            losses = [autocast_step(pair.model, pair.optimizer, pair.batch).item() for _ in range(3)]
            results.append((losses, pair.model.state_dict()))
            assert pair.run.performer.num_evictions >= 2
            pair.close()
        losses, weights = results[0]
        for other_losses, other_weights in results[1:]:
            assert losses == other_losses
            assert all(torch.equal(value, other_weights[key]) for key, value in weights.items())


def test_autocast_was_really_on_in_recomputation() -> None:
    """A block that notes the dtype of its own product."""
    seen: list[torch.dtype] = []

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            if torch.is_grad_enabled():  # else it is looked at: the list that it fills has changed
                seen.append(y.dtype)
            return x + y.tanh()  # else backward would not need the product, and it would not be recomputed

    model = nn.Sequential(*(Noting() for _ in range(3)))
    batch = torch.randn(6, 32)
    pair = twins(model, batch, gpu="300KiB", edit=activations(Activation.RECOMPUTE))
    with torch.autocast("cpu", torch.bfloat16):
        pair.model(batch)  # of the first call more is seen
    assert all(dtype is torch.bfloat16 for dtype in seen[-9:])
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        loss = pair.model(batch).square().mean()
    num_forward = len(seen)
    loss.backward()
    assert num_forward == 9 and len(seen) == 18
    assert all(dtype is torch.bfloat16 for dtype in seen)
    seen.clear()
    pair.model(batch).square().mean().backward()  # and off again
    assert all(dtype is torch.float32 for dtype in seen)
    pair.close()


def test_a_captured_state_is_restored_both_ways() -> None:
    off = Autocast.capture()
    with torch.autocast("cpu", torch.bfloat16):
        on = Autocast.capture()
        with off.restored():
            assert not torch.is_autocast_enabled("cpu")
        with on.restored():
            assert not torch.is_autocast_cache_enabled()
        assert torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
    with on.restored():
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
