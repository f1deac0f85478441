"""What the model's own code takes between blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hightide.ir.block import Affine, Glue, ModelProfile
from hightide.profiler.model.model_profile import profile_model

WIDTH = 8
ROW = 4 * WIDTH  # bytes of one sample
LOSS = 2 * 4  # the loss and its gradient
NUM_SAMPLES = 3


class Between(nn.Module):
    """A block, something, a block, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.second(self.between(self.first(x))).mean()}


class Residual(Between):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.first(x)
        return {"loss": (y + self.second(y * 2)).mean()}


class Dropped(Between):
    def between(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


class Wide(Between):
    def between(self, x: Tensor) -> Tensor:
        return x.repeat(1, 6).view(-1, 6, WIDTH).sin().sum(1)


def profiled(model: nn.Module) -> ModelProfile:
    return profile_model(model, None, {"x": torch.randn(NUM_SAMPLES, WIDTH)})[0]


def test_code_that_only_passes_on_what_blocks_return_holds_nothing() -> None:
    first, second = profiled(Between()).calls
    assert first.glue == Glue()
    assert second.glue == Glue(peak=Affine(0, ROW))  # what it receives
    assert second.glue_backward == Glue(Affine(LOSS, 0), Affine(LOSS, 2 * ROW))  # the mean's gradient, as a whole


def test_a_residual_and_its_gradient_wait_for_the_block_beside() -> None:
    first, second = profiled(Residual()).calls
    assert second.new_inputs == Affine(0, ROW)
    assert second.glue.held == Affine()  # it is the first block's result, which counts at this tick
    assert second.glue_backward.held == Affine(LOSS, 0)  # the gradient of both is one tensor
    assert first.glue_backward.peak == Affine(LOSS, 3 * ROW)  # that, the second block's, and of both the sum


def test_what_the_graph_keeps_is_held_until_its_backward() -> None:
    first, second = profiled(Dropped()).calls
    mask = ROW  # on the CPU a number for each element
    assert second.glue.held.per_sample == mask
    assert second.glue_backward.held.per_sample == mask
    assert first.glue_backward.held.per_sample == 0


def test_what_comes_and_goes_is_in_the_peak_of_both_ways() -> None:
    first, second = profiled(Wide()).calls
    assert second.glue.held.per_sample == 6 * ROW  # of which the sine's gradient is made
    assert second.glue.peak.per_sample == (1 + 6 + 6 + 1) * ROW
    assert first.glue_backward.peak.per_sample >= 2 * 6 * ROW and first.glue_backward.held.per_sample == 0


def test_the_model_is_left_as_it_was() -> None:
    model, batch = Dropped(), {"x": torch.randn(NUM_SAMPLES, WIDTH)}
    state = torch.get_rng_state()
    profile_model(model, None, batch)
    assert "forward" not in model.first.__dict__ and model.first.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


class _Asks(torch.autograd.Function):
    """Its backward wants to know a value."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * grad.sum().item()


class Asking(Between):
    def between(self, x: Tensor) -> Tensor:
        return _Asks.apply(x)


def test_code_whose_backward_asks_for_values_is_measured_on_values() -> None:
    with pytest.warns(UserWarning, match="could not be probed without values.*one pass on values"):
        profile = profiled(Asking())
    assert profile.on_values
    assert profile.calls[1].glue == Glue(peak=Affine(0, 2 * ROW)), "what the first block returned, and its clone"


class WithThePrompt(Between):
    """A trained tensor that is nobody's parameter, and a hook on what the code makes."""

    def __init__(self, prompt: Tensor) -> None:
        super().__init__()
        self.prompts, self.norms = [prompt], []

    def between(self, x: Tensor) -> Tensor:
        x = x + self.prompts[0]
        if x.requires_grad:
            x.register_hook(lambda grad: self.norms.append(float(grad.norm())))
        return x


def test_what_is_the_users_sees_no_gradients_without_values() -> None:
    prompt = torch.ones(WIDTH, requires_grad=True)
    model = WithThePrompt(prompt)
    assert profiled(model).calls[1].glue_backward.peak.per_sample
    assert prompt.grad is None and not model.norms
    model(torch.randn(NUM_SAMPLES, WIDTH))["loss"].backward()
    assert prompt.grad is not None and len(model.norms) == 1
