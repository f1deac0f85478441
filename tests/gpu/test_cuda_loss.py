"""The fused loss on a real GPU: torch's values, no waiting, no hidden copies, and fp32 sums inside the product."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hightide.runtime.lazy_logits import LazyLogits
from hightide.runtime.linear import add_product, sums_in_fp32
from unit.runtime.test_loss import LinearHead

pytestmark = pytest.mark.gpu

ROWS, HIDDEN, CLASSES, TILE = 3000, 256, 20_000, 1024


def test_products_of_bf16_are_added_to_fp32_in_place() -> None:
    """If this fails on a version of torch, `add_product` takes the slower way with slices: see sums_in_fp32."""
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        assert sums_in_fp32(torch.device("cuda", 0), dtype)
        left, right = (torch.randn(shape, device="cuda").to(dtype) for shape in ((500, 300), (300, 200)))
        before = torch.randn(500, 200, device="cuda")
        total = before.clone()
        version, address = total._version, total.data_ptr()
        add_product(total, left, right)
        assert total._version > version and total.data_ptr() == address
        exact = before.double() + left.double() @ right.double()
        assert (total.double() - exact).abs().max() <= 1e-5 * exact.abs().max()


def setup(dtype: torch.dtype, **head: Any) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    linear = nn.Linear(HIDDEN, CLASSES, dtype=dtype, device="cuda")
    rows = (torch.randn(ROWS, HIDDEN, device="cuda") * 2).to(dtype)
    target = torch.randint(CLASSES, (ROWS,), device="cuda")
    target[:50] = -100
    return linear, rows, target


def fused_head(linear: nn.Linear, plain: bool, kept_tokens: int) -> LinearHead:
    head = LinearHead(linear, TILE, plain)
    head.kept_tokens, head.scratch_bytes = kept_tokens, 100 * CLASSES * 4
    head.anchor = torch.empty(0, device="cuda", requires_grad=True)
    head.node = head.anchor.view_as(head.anchor).grad_fn.next_functions[0][0]
    return head


@pytest.mark.parametrize("kept_tokens", [0, TILE, ROWS])
@pytest.mark.parametrize("soft_cap", [False, True])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_equal_to_torch_without_waiting(
    dtype: torch.dtype, tolerance: float, plain: bool, soft_cap: bool, kept_tokens: int
) -> None:
    linear, rows, target = setup(dtype)
    found = []
    for fused in (True, False):
        own, leaf = copy.deepcopy(linear), rows.clone().requires_grad_()
        if fused:
            sums_in_fp32(rows.device, dtype)
            own.weight.grad_dtype = own.bias.grad_dtype = None
            own.weight.grad, own.bias.grad = (torch.zeros_like(p, dtype=torch.float32) for p in own.parameters())
            torch.cuda.set_sync_debug_mode("error")
        try:
            logits = LazyLogits(fused_head(own, plain, kept_tokens), leaf * 1) if fused else own(leaf * 1)
            logits = torch.tanh(logits.float() / 5.0) * 5.0 if soft_cap else logits.float()
            loss = F.cross_entropy(logits, target)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        grads = [tensor.grad for tensor in (leaf, own.weight, own.bias)]
        found.append([loss.detach(), *(grad for grad in grads if grad is not None)])
    for one, other in zip(*found, strict=True):
        assert (one.double() - other.double()).abs().max() <= tolerance * other.double().abs().max()


def test_memory_is_one_tile_the_scratch_and_little_more() -> None:
    """Operations between dtypes with `out=` make no copies of their own."""
    linear, rows, target = setup(torch.bfloat16)
    linear.weight.grad_dtype = linear.bias.grad_dtype = None
    linear.weight.grad, linear.bias.grad = (torch.zeros_like(p, dtype=torch.float32) for p in linear.parameters())
    rows.requires_grad_()
    for _ in range(2):  # the first allocates workspaces
        rows.grad = None
        torch.cuda.synchronize()
        before_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        F.cross_entropy(LazyLogits(fused_head(linear, True, 0), rows).float(), target).backward()
        peak_bytes = torch.cuda.max_memory_allocated() - before_bytes
    tile_bytes, scratch_bytes, rows_bytes = TILE * CLASSES * 2, 100 * CLASSES * 4, ROWS * HIDDEN * 2
    assert peak_bytes <= 1.1 * (tile_bytes + scratch_bytes + 2 * rows_bytes)
