"""Parameters that do not train, are never used, or receive a gradient only now and then."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import EPS, SUBJECTS, Loop, Trained, assert_parity, assert_streamed, compare, train
from torch import Tensor, nn

import models

LLAMA = SUBJECTS["llama"]
WRAP = {"micro_batch": 3}

FROZEN: dict[str, Callable[[str], bool]] = {
    "embedding": lambda name: "embed_tokens" in name,
    "first blocks": lambda name: "embed_tokens" in name or ".layers.0." in name or ".layers.1." in name,
    "middle block": lambda name: ".layers.1." in name,
    "head": lambda name: "lm_head" in name,
    "head and norm": lambda name: "lm_head" in name or name == "model.norm.weight",
    "all but the norm": lambda name: name != "model.norm.weight",
    "all but one matrix": lambda name: name != "model.layers.1.mlp.up_proj.weight",
    "half of each block": lambda name: "self_attn" in name,
}


def frozen_llama(which: str, tied: bool = False) -> models.Pair:
    model, batch = models.llama(tied=tied, num_layers=3, num_samples=7)
    for name, param in model.named_parameters():
        param.requires_grad_(not FROZEN[which](name))
    return model, batch


@pytest.mark.parametrize(
    ("which", "update"),
    [
        *((which, "deferred") for which in ("first blocks", "head and norm", "all but one matrix")),
        *((which, "in_backward") for which in ("embedding", "half of each block")),
        *(
            pytest.param(which, "deferred", marks=pytest.mark.long)
            for which in ("embedding", "head", "all but the norm", "half of each block", "middle block")
        ),
    ],
)
def test_frozen_parameters(which: str, update: str) -> None:
    build = partial(frozen_llama, which)
    before = {name: value.clone() for name, value in build()[0].state_dict().items()}
    _, wrapped = compare(build, lambda: LLAMA.batches(3), wrap=WRAP | {"update": update}, clip=None)
    assert_streamed(wrapped, micro_batches=[3, 3, 1])
    for name, value in wrapped.weights.items():
        assert torch.equal(value, before[name]) == FROZEN[which](name), name
    assert all(param.grad is None for name, param in wrapped.model.named_parameters() if FROZEN[which](name))


def test_frozen_parameters_that_the_optimizer_does_not_know() -> None:
    def run(wrap: dict[str, Any] | None) -> Trained:
        model, batch = frozen_llama("first blocks")
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=3e-3, eps=EPS)
        return train((model, batch), LLAMA.batches(3), wrap=wrap, optimizer=optimizer, clip="torch")

    wrapped = run(WRAP)
    assert_parity(run(None), wrapped)
    assert_streamed(wrapped, micro_batches=[3, 3, 1])


def test_trainable_parameters_that_the_optimizer_does_not_know() -> None:
    """They receive gradients, which count for the norm of all parameters, and stay as they are."""

    def run(wrap: dict[str, Any] | None) -> Trained:
        model, batch = models.llama(num_layers=3, num_samples=7)
        owned = [param for name, param in model.named_parameters() if "layers.1" not in name]
        optimizer = torch.optim.AdamW(owned, lr=3e-3, eps=EPS)

        def step(loop: Loop, batch: Any) -> Tensor:
            loss = models.loss_of(loop.model, batch)
            loss.backward()
            loop.norms.append(float(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)))
            loop.optimizer.step()
            loop.model.zero_grad()
            return loss

        return train((model, batch), LLAMA.batches(3), wrap=wrap, optimizer=optimizer, step=step)

    plain, wrapped = run(None), run(WRAP)
    assert_parity(plain, wrapped)
    assert_streamed(wrapped, micro_batches=[3, 3, 1])


def test_tied_embedding_frozen_everywhere() -> None:
    _, wrapped = compare(partial(frozen_llama, "embedding", tied=True), lambda: LLAMA.batches(3), wrap=WRAP)
    assert_streamed(wrapped, micro_batches=[3, 3, 1])


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_parameters_that_are_never_used(update: str) -> None:
    """As torch.optim skips them: not even weight decay moves them, and they have no state."""
    subject = SUBJECTS["hand_written"]
    build = partial(models.hand_written, unused=True, num_samples=7)
    plain, wrapped = compare(build, lambda: subject.batches(8), wrap=WRAP | {"update": update})
    assert_streamed(wrapped, micro_batches=[3, 3, 1])
    untouched = build()[0].state_dict()
    assert torch.equal(wrapped.weights["never.weight"], untouched["never.weight"])
    assert len(wrapped.optimizer.state_dict()["state"]) == len(plain.optimizer.state_dict()["state"])


class Sometimes(models.HandWritten):
    """Every second call leaves out a part of each layer's parameters, without leaving out the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.ModuleList(PartlyUsed() for _ in range(2))
        self.full = True

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        for layer in self.extra:
            x = layer(x, self.full)
        return super().forward(x, labels)


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(models.HIDDEN, models.HIDDEN)
        self.sometimes = nn.Linear(models.HIDDEN, models.HIDDEN)

    def forward(self, x: Tensor, full: bool) -> Tensor:
        x = x + self.always(x)
        return x + self.sometimes(x) if full else x


def sometimes() -> models.Pair:
    torch.manual_seed(0)
    return Sometimes().train(), models.vector_batch(num_samples=7)


def step_sometimes(loop: Loop, batch: Any) -> Tensor:
    loop.model.full = loop.index % 3 != 1  # type: ignore[assignment]
    loss = models.loss_of(loop.model, batch)
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_parameters_that_receive_a_gradient_only_sometimes(update: str) -> None:
    """Those without one are skipped: their step counts, and so their bias corrections, fall behind the others'."""
    subject = SUBJECTS["hand_written"]
    plain, wrapped = compare(
        sometimes, lambda: subject.batches(9), wrap=WRAP | {"update": update, "room": 1.2}, step=step_sometimes
    )
    expected = plain.optimizer.state_dict()["state"]
    found = wrapped.optimizer.state_dict()["state"]
    assert {key: int(entry["step"]) for key, entry in found.items()} == {
        key: int(entry["step"]) for key, entry in expected.items()
    }
    assert {int(entry["step"]) for entry in found.values()} == {6, 9}


def test_a_gradient_only_in_one_of_two_backwards() -> None:
    """The sum of a step with several backwards: a parameter that only one of them reaches counts once."""
    subject = SUBJECTS["hand_written"]

    def step(loop: Loop, batch: Any) -> Tensor:
        total = torch.zeros(())
        for part, full in zip(batch, (loop.index % 2 == 0, loop.index % 3 == 0), strict=True):
            loop.model.full = full  # type: ignore[assignment]
            loss = models.loss_of(loop.model, part)
            loss.backward()
            total += loss.detach()
        loop.norms.append(float(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)))
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return total

    compare(
        sometimes,
        lambda: list(zip(subject.batches(7, seed=10), subject.batches(7, seed=50), strict=True)),
        wrap=WRAP | {"room": 1.2},
        step=step,
    )


def head_only_llama() -> models.Pair:
    model, batch = models.llama(num_layers=3, num_samples=7)
    for name, param in model.named_parameters():
        param.requires_grad_("lm_head" in name)
    return model, batch


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_a_frozen_backbone_streams_forward_only_and_has_no_gradient_and_no_state(update: str) -> None:
    _, wrapped = compare(head_only_llama, lambda: LLAMA.batches(3), wrap=WRAP | {"update": update})
    stats = wrapped.stats
    assert stats is not None and stats.deviations == 0 and stats.evictions > 0
    frozen = [chunk for chunk in stats.plan.layout.chunks if not chunk.trainable_numel]
    (head,) = (chunk for chunk in stats.plan.layout.chunks if chunk.trainable_numel)
    assert all(chunk.grad_bytes == chunk.state_bytes == 0 for chunk in frozen)
    numel = models.VOCABULARY * models.HIDDEN
    assert (head.param_bytes, head.grad_bytes, head.state_bytes) == (4 * numel, 4 * numel, 8 * numel)
    assert len(wrapped.optimizer.state_dict()["state"]) == 1
    # Without backward nothing is fetched a second time, and nothing but the head's gradient and input leaves the GPU.
    all_bytes = sum(chunk.param_bytes for chunk in stats.plan.layout.chunks)
    inputs_bytes = 7 * models.NUM_TOKENS * models.HIDDEN * 4
    assert stats.moved_bytes["h2d"] <= 4 * (all_bytes + head.param_bytes + inputs_bytes)
    assert stats.moved_bytes["d2h"] <= 4 * (head.grad_bytes + inputs_bytes)
