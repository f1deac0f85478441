"""Gradients of the head that are made in forward are those of plain PyTorch, and of the way through backward."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unit.runtime.head.test_fused_loss import SEQUENCE, VOCABULARY, Pair, shifted

NUM_TILES = 10  # of shifted rows: BATCH * (SEQUENCE - 1) = 48, in fives


def early(**options: Any) -> Pair:
    pair = Pair(**options)
    pair.head.in_forward = True
    return pair


def bind_fp32(pair: Pair) -> None:
    """Gradients, as the runtime does."""
    for param in pair.linear.parameters():
        param.grad_dtype = None
        param.grad = torch.zeros(param.shape)


def both(pair: Pair, scale: float = 1.0, **options: Any) -> tuple[Tensor, Tensor]:
    """Plain and lazy, after backward."""
    losses = []
    for logits in pair.logits():
        loss = F.cross_entropy(*shifted(logits, pair.labels), **options)
        (loss * scale).sum().backward()
        losses.append(loss.detach())
    return losses[0], losses[1]


@pytest.mark.parametrize("scale", [1.0, 0.3, -4.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"ignore_index": 3},
        {"label_smoothing": 0.1},
        {"weight": torch.linspace(0.1, 2, VOCABULARY)},
        {"weight": torch.linspace(0.1, 2, VOCABULARY), "label_smoothing": 0.2, "reduction": "sum"},
    ],
    ids=str,
)
def test_equal_to_plain_pytorch(options: dict[str, Any], scale: float) -> None:
    pair = early()
    pair.labels[pair.labels == -100] = options.get("ignore_index", -100)
    expected, found = both(pair, scale, **options)
    torch.testing.assert_close(found, expected)
    pair.assert_same_gradients()
    assert len(pair.head.projected_dtypes) == NUM_TILES, "nothing is projected twice"
    assert pair.head.holds == ["forward", "backward accumulate=True"]


def test_bf16_sums_in_fp32() -> None:
    pair = early(dtype=torch.bfloat16)
    bind_fp32(pair)
    exact = [param.detach().double().requires_grad_() for param in (pair.plain_linear.weight, pair.plain_linear.bias)]
    hidden = pair.plain_hidden.detach().double().requires_grad_()
    F.cross_entropy(*shifted(F.linear(hidden, *exact), pair.labels)).backward()
    _, lazy = pair.logits()
    F.cross_entropy(*shifted(lazy, pair.labels)).backward()
    for param, expected in zip(pair.linear.parameters(), exact, strict=True):
        assert param.grad is not None and param.grad.dtype is torch.float32 and expected.grad is not None
        assert (param.grad - expected.grad).abs().max() <= 2**-7 * expected.grad.abs().max()


@pytest.mark.parametrize("power", [1.0, 0.25, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_as_in_backward(dtype: torch.dtype, power: float) -> None:
    """Where the gradient of the loss is a power of two, and nothing was summed before."""
    found = []
    for in_forward in (False, True):
        pair = Pair(dtype=dtype)
        pair.head.in_forward = in_forward
        bind_fp32(pair)
        _, loss = both(pair, power)
        found.append([loss, pair.hidden.grad, *(param.grad for param in pair.linear.parameters())])
    for in_backward, made in zip(*found, strict=True):
        assert in_backward is not None and made is not None and torch.equal(in_backward, made)


def test_it_adds_to_sums_that_exist() -> None:
    pair = early()
    both(pair)
    pair.head.in_forward = True
    both(pair, 0.7)
    pair.assert_same_gradients()


@pytest.mark.parametrize("options", [{"reduction": "sum"}, {"reduction": "sum", "label_smoothing": 0.1}, {}], ids=str)
@pytest.mark.parametrize("in_forward", [False, True])
def test_without_a_label_there_is_no_gradient_whatever_the_loss_is_divided_by(
    in_forward: bool, options: dict[str, Any]
) -> None:
    """By the number of labels, which is zero."""
    pair = early()
    pair.head.in_forward = in_forward
    pair.labels.fill_(-100)
    both(pair, scale=float("inf"), **options)
    assert pair.plain_hidden.grad is not None and not pair.plain_hidden.grad.any()
    pair.assert_same_gradients()


def test_operations_on_logits_are_gone_through() -> None:
    pair = early()
    plain, lazy = (30 * torch.tanh(logits.float() / 30) for logits in pair.logits())
    for logits in (plain, lazy):
        F.cross_entropy(*shifted(logits, pair.labels)).backward()
    pair.assert_same_gradients()
    assert len(pair.head.projected_dtypes) == NUM_TILES


def test_a_frozen_head_and_rows_that_need_no_gradient() -> None:
    pair = early()
    pair.linear.requires_grad_(False)
    pair.head.anchor, pair.head.params = None, []
    plain, lazy = pair.logits()
    for logits in (plain, lazy):
        F.cross_entropy(*shifted(logits, pair.labels)).backward()
    assert pair.linear.weight.grad is None and pair.hidden.grad is not None
    torch.testing.assert_close(pair.hidden.grad, pair.plain_hidden.grad)

    pair = early()
    pair.hidden.requires_grad_(False)
    both(pair)
    assert pair.hidden.grad is None
    torch.testing.assert_close(pair.linear.weight.grad, pair.plain_linear.weight.grad)


def test_gradients_of_rows_alone_leave_those_of_weights() -> None:
    pair = early()
    plain, lazy = (F.cross_entropy(*shifted(logits, pair.labels)) for logits in pair.logits())
    (expected,), (found,) = torch.autograd.grad(plain, pair.plain_hidden), torch.autograd.grad(lazy, pair.hidden)
    torch.testing.assert_close(found, expected)
    assert pair.linear.weight.grad is None and pair.head.holds[-1] == "backward accumulate=False"


@pytest.mark.parametrize("kind", ["a loss per row", "fp16", "logits made fp16", "a second loss"])
def test_what_cannot_be_done_so_is_done_in_backward(kind: str) -> None:
    if kind == "a loss per row":
        pair = early()
        both(pair, reduction="none")
    elif kind == "fp16":
        pair = early(dtype=torch.float16)
        both(pair, 1024.0)
    elif kind == "logits made fp16":
        pair = early()
        for logits in pair.logits():
            rows, labels = shifted(logits.half().float(), pair.labels)
            (F.cross_entropy(rows, labels) * 1024).backward()
    else:
        pair = early()
        for logits in pair.logits():
            rows, labels = shifted(logits, pair.labels)
            (F.cross_entropy(rows, labels) + F.cross_entropy(rows, labels.flip(0))).backward()
    pair.assert_same_gradients(2e-3 if "fp16" in kind else 1e-6)
    expected = 3 if kind == "a second loss" else 2
    assert len(pair.head.projected_dtypes) == expected * NUM_TILES


def test_a_loss_that_needs_no_gradient_makes_none_and_takes_nothing_from_the_next() -> None:
    pair = early()
    _, lazy = pair.logits()
    F.cross_entropy(*shifted(lazy.detach(), pair.labels))
    with torch.no_grad():
        F.cross_entropy(*shifted(lazy, pair.labels))
    assert pair.head.in_forward and len(pair.head.projected_dtypes) == 2 * NUM_TILES
    F.cross_entropy(*shifted(lazy, pair.labels)).backward()
    assert not pair.head.in_forward and len(pair.head.projected_dtypes) == 3 * NUM_TILES


@pytest.mark.parametrize("plain", [True, False])
def test_a_loss_over_no_rows_gives_weights_a_gradient_of_zero(plain: bool) -> None:
    pair = early(plain=plain)
    for logits in pair.logits():
        F.cross_entropy(logits[pair.labels > VOCABULARY], pair.labels[:0, 0], reduction="sum").backward()
    for param, expected in zip(pair.linear.parameters(), pair.plain_linear.parameters(), strict=True):
        assert param.grad is not None and expected.grad is not None
        assert not param.grad.any() and not expected.grad.any()


def test_all_labels_ignored() -> None:
    pair = early()
    pair.labels.fill_(-100)
    expected, found = both(pair)
    assert expected.isnan() and found.isnan()
    for param in (pair.linear.weight, pair.hidden):
        assert param.grad is not None and not param.grad.any()


def test_without_a_backward_nothing_stays() -> None:
    pair = early()
    _, lazy = pair.logits()
    loss = F.cross_entropy(*shifted(lazy, pair.labels))
    assert loss.grad_fn is not None
    made = weakref.ref(loss.grad_fn.early.rows_grad)  # type: ignore[attr-defined]
    assert made() is not None
    del loss, lazy
    gc.collect()
    assert made() is None
    assert pair.linear.weight.grad is None and pair.hidden.grad is None


def test_no_weights_wait_for_backward() -> None:
    """They lie in a slot that others will use; and a copy of them would not be in the forecast."""
    pair = early()
    _, lazy = pair.logits()
    loss = F.cross_entropy(*shifted(lazy, pair.labels))
    assert loss.grad_fn is not None
    made = loss.grad_fn.early  # type: ignore[attr-defined]
    held = [value for value in (made.rows_grad, *made.sums) if isinstance(value, Tensor)]
    assert sorted(vars(made)) == ["module", "rows_grad", "sums"]
    assert all(value.data_ptr() != pair.linear.weight.data_ptr() for value in held)
    assert made.rows_grad.shape[0] == pair.labels.shape[0] * (SEQUENCE - 1)
