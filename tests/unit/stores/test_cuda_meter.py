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
