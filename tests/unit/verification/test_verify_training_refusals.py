"""What is refused, what is the user's own error, and what is bad input: three different things."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hightide
import models
from hightide.planner.infeasible import InfeasiblePlan


def small(**options: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    model, batch = models.hand_written(num_layers=2, num_samples=6, **options)
    return model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3)


def assert_refused(verdict: hightide.Verdict, text: str) -> None:
    assert not verdict.equal and not verdict.rows and not verdict.failure
    assert text in verdict.refusal
    assert str(verdict).startswith("REFUSED, so there is nothing to compare: ")
    assert all(len(line) <= 80 for line in str(verdict).splitlines())


def test_an_optimizer_that_is_not_supported() -> None:
    model, batch, _ = small()
    verdict = hightide.verify(model, torch.optim.RMSprop(model.parameters()), batch)
    assert_refused(verdict, "torch.optim.rmsprop.RMSprop is not supported")


def test_a_gradient_hook() -> None:
    model, batch, optimizer = small()
    seen: list[Tensor] = []
    model.layers[0].mlp[0].weight.register_hook(seen.append)
    assert_refused(hightide.verify(model, optimizer, batch), "'layers.0.mlp.0.weight' has a gradient hook")
    assert not seen, "hooks of the user's parameters were not run"


def test_a_block_that_changes_its_input() -> None:
    class Writing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return super().forward(x)

    model = nn.Sequential(nn.Linear(4, 4), Writing(4, 4), nn.Linear(4, 4))
    verdict = hightide.verify(
        model, torch.optim.SGD(model.parameters()), torch.rand(6, 4), loss=lambda result: result.mean()
    )
    assert_refused(verdict, "changes an input in place")


def test_limits_that_are_too_small() -> None:
    model, batch, optimizer = small()
    verdict = hightide.verify(model, optimizer, batch, limits=hightide.Limits(gpu="8KiB", host="8MiB"))
    assert not verdict.equal and "8.0 KiB" in verdict.refusal
    assert verdict.rows and all(row.equal for row in verdict.rows), "what was run before that was equal"


def needed_bytes(model: nn.Module, batch: Any) -> int:
    """Of the smallest GPU for which there is a plan."""
    needed = 1
    for _ in range(8):
        try:
            limits = hightide.Limits(gpu=needed, host="8MiB")
            hightide.plan(model, torch.optim.AdamW(model.parameters()), batch, limits=limits)
            return needed
        except InfeasiblePlan as refusal:
            needed = refusal.num_bytes
    raise AssertionError(needed)


def test_limits_that_are_too_small_for_the_fp32_copy_only_are_left_out() -> None:
    model, batch, _ = small()
    in_fp32 = needed_bytes(model, batch)
    batch = {name: value.to(torch.bfloat16) for name, value in batch.items()}
    in_bf16 = needed_bytes(model.to(torch.bfloat16), batch)
    assert in_bf16 < in_fp32
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    verdict = hightide.verify(model, optimizer, batch, limits=hightide.Limits(gpu=in_bf16, host="8MiB"))
    assert verdict.equal, verdict
    assert len(verdict.runs) == 1 and any("too small for a copy in fp32" in text for text in verdict.changed)
    verdict = hightide.verify(model, optimizer, batch, limits=hightide.Limits(gpu="1KiB", host="8MiB"))
    assert not verdict.equal and "1.0 KiB" in verdict.refusal


def test_what_the_model_itself_raises_is_raised_as_its_own() -> None:
    class Broken(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("no such token")

    model = Broken(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(KeyError, match="no such token") as caught:
        hightide.verify(model, torch.optim.SGD(model.parameters()), torch.rand(6, 4))
    assert any("raised by the plain model, in PyTorch alone" in note for note in caught.value.__notes__)


def test_a_result_without_a_loss_says_what_to_pass() -> None:
    model, batch = models.sequential(num_samples=6)
    with pytest.raises(ValueError, match=r"a Tensor in which there is no loss; pass loss="):
        hightide.verify(model, torch.optim.SGD(model.parameters()), batch)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda result: result["loss"].detach(), "does not depend on any parameter"),
        (lambda result: result["loss"] * float("nan"), "the loss is nan: nothing can be compared"),
    ],
)
def test_a_loss_that_tells_nothing(loss: Any, message: str) -> None:
    model, batch, optimizer = small()
    with pytest.raises(ValueError, match=message):
        hightide.verify(model, optimizer, batch, loss=loss)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0; at least 1"),
        ({"tolerance": 0.0}, "it must be above 0"),
        ({"device": "tpu"}, "'tpu'"),
        ({"memory": "much"}, "memory='much' is not a size"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    model, batch, optimizer = small()
    with pytest.raises(ValueError, match=message):
        hightide.verify(model, optimizer, batch, **options)


def test_a_wrapped_model_is_bad_input() -> None:
    model, batch, optimizer = small()
    model, optimizer = hightide.wrap(model, optimizer, batch)
    with pytest.raises(ValueError, match="wrapped already"):
        hightide.verify(model, optimizer, batch)
