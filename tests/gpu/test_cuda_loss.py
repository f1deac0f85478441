"""The fused loss on a real GPU: torch's values, no waiting, no hidden copies, and fp32 sums inside the product."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hightide.process.system import KERNELS_SWITCH
from hightide.runtime.head import row_kernels
from hightide.runtime.head.cross_entropy import (
    CrossEntropy,
    Labels,
    RowGradients,
    RowNumbers,
    Scratch,
    measure,
    write_gradient,
)
from hightide.runtime.head.lazy_logits import LazyLogits
from hightide.runtime.head.linear import add_product, sums_in_fp32
from unit.runtime.head.test_fused_loss import LinearHead

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_our_kernels_and_torchs_agree(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = (torch.randn(300, 50_257, device="cuda") * 4).to(dtype)
    assert row_kernels.usable(logits), "a GPU without them would be slow, and nobody would know"
    target = torch.randint(0, 50_257, (300,), device="cuda")
    target[::7] = -100
    found = []
    for switch in ("1", "0"):
        monkeypatch.setenv(KERNELS_SWITCH, switch)
        labels = Labels.of(target, None, CrossEntropy(), 50_257, torch.float32)
        numbers = RowNumbers.empty(300, torch.float32, logits.device, 0.0)
        scratch = Scratch(64, 50_257, torch.float32, logits.device)
        measure(logits, labels.index, None, numbers, scratch)
        gradients = RowGradients.of(labels, torch.full((300,), 0.01, device="cuda"), numbers.maximum, numbers.total)
        out = logits.clone()
        write_gradient(out, labels.index, gradients, scratch, out)
        found.append((numbers.losses(labels), out.float()))
    (ours, our_slope), (theirs, their_slope) = found
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # fp16: 6e-8, the distance of its neighbours
    torch.testing.assert_close(our_slope, their_slope, rtol=2 * torch.finfo(dtype).eps, atol=max(1e-9, smallest))
    assert (our_slope[::7] == 0).all()


def test_memory_is_one_tile_and_little_more() -> None:
    """No second copy of a tile, in any dtype."""
    rows_, hidden, classes, tile = 8192, 128, 100_000, 4096
    linear = nn.Linear(hidden, classes, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(rows_, hidden, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, classes, (rows_,), device="cuda")
    linear.weight.grad_dtype = linear.bias.grad_dtype = None
    linear.weight.grad, linear.bias.grad = (torch.zeros_like(p, dtype=torch.float32) for p in linear.parameters())
    rows.requires_grad_()
    head = fused_head(linear, True, 0)
    head.tile_tokens = tile
    for _ in range(2):  # the first allocates workspaces
        rows.grad = None
        torch.cuda.synchronize()
        before_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        F.cross_entropy(LazyLogits(head, rows).float(), target).backward()
        peak_bytes = torch.cuda.max_memory_allocated() - before_bytes
    workspaces_bytes = 256 * 2**20  # of the libraries
    assert peak_bytes <= 1.1 * tile * classes * 2 + workspaces_bytes
