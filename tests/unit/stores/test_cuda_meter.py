"""Whose out of memory it is, without a GPU."""

from __future__ import annotations

import pytest
import torch

from hightide.ir.tier import Tier
from hightide.stores.cuda import CudaAccelerator
from hightide.stores.store import OutOfMemory


@pytest.mark.parametrize("tier", [Tier.GPU, Tier.HOST])
def test_a_refusal_goes_through_meters_as_it_is(tier: Tier) -> None:
    """A new one would have lost its bytes, and a host's would have become the GPU's."""
    gpu = CudaAccelerator.__new__(CudaAccelerator)  # its memory is nobody's affair here
    refusal = OutOfMemory(tier, "activations", 2**31, 0, 2**30, {})
    with pytest.raises(torch.OutOfMemoryError) as caught, gpu.meter("activations"), gpu.meter("activations"):
        raise refusal
    assert caught.value is refusal


def test_what_does_not_come_back_is_refused_in_our_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block inputs come back to the GPU between two blocks, where no meter is."""
    gpu = CudaAccelerator.__new__(CudaAccelerator)
    gpu.device = torch.device("cpu")
    assert gpu.empty(torch.Size((2, 3)), torch.bfloat16, "block inputs").shape == (2, 3)

    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch, "empty", full)
    monkeypatch.setattr(gpu, "refused", lambda label, message: OutOfMemory(Tier.GPU, label, 2**31, 0, 2**30, {}))
    with pytest.raises(OutOfMemory, match="'block inputs' asks for 2147483648 bytes"):
        gpu.empty(torch.Size((2**31,)), torch.uint8, "block inputs")
