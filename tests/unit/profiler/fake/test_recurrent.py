"""Recurrent layers are forecast by what their kernels keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hightide.ir.block import CallSpec
from hightide.profiler.model.model_profile import profile_model
from hightide.stores.meter import AllocationMeter

SAMPLES, WIDTH = 4, 48
CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], num_layers: int, bidirectional: bool) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, num_layers, batch_first=True, bidirectional=bidirectional)
        self.narrow = nn.Linear(2 * WIDTH if bidirectional else WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        narrowed: Tensor = self.narrow(self.cells(x)[0])
        return narrowed


def model_of(kind: type[nn.RNNBase], num_layers: int = 2, bidirectional: bool = False) -> nn.Module:
    return nn.Sequential(*(Recurrent(kind, num_layers, bidirectional) for _ in range(2)))


def told(model: nn.Module, length: int, runs_on: torch.device = CPU) -> CallSpec:
    batch = torch.zeros(SAMPLES, length, WIDTH)
    return profile_model(model, None, batch, device=None, runs_on=runs_on)[0].calls[1]


def found(block: nn.Module, length: int) -> tuple[int, int]:
    """What is kept, and the peak in backward, of a real run."""
    x = torch.randn(SAMPLES, length, WIDTH, requires_grad=True)
    for param in block.parameters():
        param.grad = torch.zeros_like(param)
    with AllocationMeter() as meter:
        result = block(x)
        edge, gradient = result.grad_fn, torch.ones_like(result)
        del result
        kept = meter.live_bytes - gradient.nbytes
        torch.autograd.backward([torch.autograd.graph.GradientEdge(edge, 0)], [gradient])  # type: ignore[arg-type]
        return kept, meter.peak_bytes - gradient.nbytes


@pytest.mark.parametrize(
    ("kind", "length", "num_layers", "bidirectional"),
    [
        (nn.LSTM, 200, 2, False),
        (nn.LSTM, 50, 1, True),
        (nn.LSTM, 1, 1, False),
        (nn.GRU, 5, 2, True),
        (nn.RNN, 9, 1, False),
    ],
)
def test_the_simulated_accelerator_keeps_what_is_told(
    kind: type[nn.RNNBase], length: int, num_layers: int, bidirectional: bool
) -> None:
    model = model_of(kind, num_layers, bidirectional)
    call = told(model, length)
    kept, peak = found(model[1], length)
    assert kept <= call.kept.at(SAMPLES) <= 1.3 * kept
    assert peak <= call.backward_peak.at(SAMPLES) <= 1.5 * peak


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_a_gpu_keeps_the_gates_and_states_of_each_token(kind: type[nn.RNNBase], gates: int) -> None:
    model = model_of(kind)
    numel = 2 * SAMPLES * 100 * WIDTH  # of two layers
    call, longer = told(model, 100, GPU), told(model, 200, GPU)
    assert 4 * (gates + 2) * numel <= longer.kept.at(SAMPLES) - call.kept.at(SAMPLES) <= 4 * 4 * (gates + 2) * numel
    products = 2 * 2 * gates * WIDTH * numel + 2 * SAMPLES * 100 * WIDTH * WIDTH
    assert call.forward.flop.at(SAMPLES) == products


def test_directions_and_projections_are_counted_on_a_gpu() -> None:
    one, both = (told(model_of(nn.GRU, 1, bidirectional), 50, GPU).kept.at(SAMPLES) for bidirectional in (False, True))
    assert 1.6 * one < both < 2.4 * one

    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.wide = nn.LSTM(WIDTH, WIDTH, proj_size=16), nn.Linear(16, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            state = x.new_zeros(1, x.shape[1], 16), x.new_zeros(1, x.shape[1], WIDTH)
            wide: Tensor = self.wide(self.cells(x, state)[0])
            return wide

    call = told(nn.Sequential(Projected(), Projected()), 50, GPU)
    assert call.outputs.at(SAMPLES) == 4 * SAMPLES * 50 * WIDTH < call.kept.at(SAMPLES) / 6
