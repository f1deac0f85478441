"""What a profile says of attention on a GPU is what torch does there: which kernel it takes, and its bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from hightide.profiler.fake.attention import AttentionCall, gpu_kernel, kernel_by_rule
from hightide.profiler.model.model_profile import profile_model
from unit.profiler.fake.test_attention import attention_call

pytestmark = pytest.mark.gpu

LENGTH, HEADS, WIDTH = 4096, 8, 64
ROUNDED_BYTES = 2**21  # what the allocator rounds up to, and small statistics


class Attending(nn.Module):
    def __init__(self, key_heads: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))
        self.key_heads, self.options = key_heads, options

    def forward(self, x: Tensor) -> Tensor:
        query = (x * self.weight).view(*x.shape[:2], HEADS, WIDTH).transpose(1, 2)
        key = (x[..., : self.key_heads * WIDTH] * self.weight).view(*x.shape[:2], self.key_heads, WIDTH).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, key, key, **self.options)
        return attended.transpose(1, 2).flatten(2)


CASES = [
    (torch.bfloat16, HEADS, {"is_causal": True}),
    (torch.bfloat16, 2, {"is_causal": True, "enable_gqa": True}),
    (torch.float16, HEADS, {"dropout_p": 0.1}),
    (torch.float32, HEADS, {"is_causal": True}),
    (torch.float32, 2, {"is_causal": True, "enable_gqa": True}),
    (torch.bfloat16, HEADS, {"masked": True}),
]


@pytest.mark.parametrize(("dtype", "key_heads", "options"), CASES)
def test_told_bytes_are_those_of_the_gpu(dtype: torch.dtype, key_heads: int, options: dict[str, Any]) -> None:
    options = dict(options)
    on_gpu = dict(options)
    if options.pop("masked", False):
        on_gpu.pop("masked")
        options["attn_mask"] = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
        on_gpu["attn_mask"] = options["attn_mask"].cuda()
    model = nn.Sequential(*(Attending(key_heads, dtype, options) for _ in range(2)))
    batch = torch.zeros(1, LENGTH, HEADS * WIDTH, dtype=dtype)
    told = profile_model(model, None, batch, device=None, runs_on=torch.device("cuda"))[0].calls[1]
    block = Attending(key_heads, dtype, on_gpu).cuda()
    x = torch.randn(1, LENGTH, HEADS * WIDTH, dtype=dtype, device="cuda", requires_grad=True)
    for _ in range(2):  # the first makes workspaces
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = block(x)
        kept = torch.cuda.memory_allocated() - before
        gradient = torch.ones_like(result)
        result.backward(gradient)
        peak = torch.cuda.max_memory_allocated() - before - gradient.nbytes
        del result, gradient
        x.grad = block.weight.grad = None
    result_bytes = batch.nbytes
    assert kept <= told.kept.at(1) + result_bytes + ROUNDED_BYTES
    assert told.backward_peak.at(1) <= 1.3 * peak + ROUNDED_BYTES
    assert peak <= told.backward_peak.at(1) + ROUNDED_BYTES


@pytest.mark.parametrize(
    "call",
    [
        attention_call(),
        attention_call(is_causal=True, dropout_p=0.1),
        attention_call(key_heads=2, enable_gqa=True),
        attention_call(width=264),
        attention_call(attn_mask=torch.ones(2, 1, 8, 8, dtype=torch.bool)),
        attention_call(is_causal=True, key_length=16),
        attention_call(torch.float32),
        attention_call(torch.float32, width=34),
        attention_call(torch.float64),
    ],
)
def test_the_rules_are_those_of_torch(call: AttentionCall) -> None:
    """cuDNN's kernel takes as much as the one that the rules name."""
    chosen, by_rule = gpu_kernel(call), kernel_by_rule(call)
    assert chosen == by_rule or (chosen == SDPBackend.CUDNN_ATTENTION and by_rule != SDPBackend.MATH)
