"""What `unwrap` gives back: values, gradients and buffers of a plain model, all where the model was before."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import hightide

LIMITS = hightide.Limits(gpu="512MiB", host="16MiB")


class WithBuffers(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))  # loose: plain autograd makes its gradient
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.to(device)
        shared = torch.arange(8.0, device=device)  # after to(), which would make one of each
        self.register_buffer("offset", shared)
        for layer in self.layers:
            layer.register_buffer("offset", shared)

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x + self.offset) * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.pow(2).mean()


def check_unwrapped(before: str, device: str | None) -> None:
    torch.manual_seed(0)
    plain = WithBuffers(before)
    model, batch = copy.deepcopy(plain), torch.randn(4, 8)
    plain(batch.to(before)).backward()
    model, _ = hightide.wrap(model, torch.optim.AdamW(model.parameters()), batch, limits=LIMITS, device=device)
    assert model.offset is model.layers[0].offset, "one buffer stays one"
    model(batch).backward()
    hightide.unwrap(model)
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, expected), name  # raises if they are on different devices
        assert param.grad is not None and type(param.grad) is Tensor
        torch.testing.assert_close(param.grad, expected.grad)
    assert all(buffer.device.type == before for buffer in model.buffers())
    assert model.offset is model.layers[0].offset and model.offset.tolist() == plain.offset.tolist()
    model(batch.to(before)).backward()  # it trains, plainly


def test_values_gradients_and_buffers_come_back() -> None:
    check_unwrapped("cpu", None)
