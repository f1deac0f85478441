"""The passes over logits give torch's cross-entropy and its gradient, in few kernels and the same bits for any plan."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hightide.runtime.head.lazy_logits import LazyLogits
from hightide.runtime.head.linear import LinearBackward, add_product, gradients_of
from unit.runtime.head.test_fused_loss import LinearHead

ROWS, HIDDEN, CLASSES, TILE = 61, 16, 83, 24  # two tiles and a tail
Loss = Callable[[Tensor, Tensor], Tensor]


class Setup:
    """One head and its rows; `run` trains a copy of it with a loss."""

    def __init__(self, dtype: torch.dtype = torch.float32, bias: bool = True, spread: float = 3.0) -> None:
        torch.manual_seed(3)
        self.linear = nn.Linear(HIDDEN, CLASSES, bias=bias, dtype=dtype)
        self.rows = torch.randn(ROWS, HIDDEN, dtype=dtype) * spread
        self.target = torch.randint(CLASSES, (ROWS,))
        self.target[5:11] = -100

    def run(self, loss: Loss, fused: bool = True, **head: Any) -> list[Tensor]:
        """The loss, and the gradients of the rows, the weight and the bias."""
        linear, rows = copy.deepcopy(self.linear), self.rows.clone().requires_grad_()
        logits = LazyLogits(make_head(linear, **head), rows * 1) if fused else linear(rows * 1)
        value = loss(logits, self.target)
        value.backward()
        return [value.detach(), *(tensor.grad for tensor in (rows, *linear.parameters()) if tensor.grad is not None)]


def make_head(linear: nn.Linear, plain: bool = True, kept_tokens: int = 0, scratch_rows: float = 7) -> LinearHead:
    head = LinearHead(linear, TILE, plain)
    head.kept_tokens, head.scratch_bytes = kept_tokens, int(scratch_rows * CLASSES * 4)
    return head


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Relative to the largest value of each tensor."""
    assert [t.shape for t in found] == [t.shape for t in expected]
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    pairs = zip(found, expected, strict=True)
    return max(((a.double() - b.double()).abs().max() / b.double().abs().max()).item() for a, b in pairs)


OPTIONS = [
    {"reduction": reduction, "label_smoothing": smoothing, "weight": weight, "ignore_index": ignored}
    for reduction, smoothing, weight, ignored in itertools.product(
        ("mean", "sum", "none"), (0.0, 0.3), (None, torch.linspace(0, 2, CLASSES)), (-100, 17)
    )
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_options_of_cross_entropy(options: dict[str, Any], dtype: torch.dtype) -> None:
    setup = Setup(dtype)
    if options["ignore_index"] >= 0:
        setup.target.clamp_(min=0)
    factors = torch.linspace(-2, 1, ROWS, dtype=dtype)

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        weight = None if options["weight"] is None else options["weight"].to(dtype)
        result = F.cross_entropy(logits, target, **{**options, "weight": weight})
        return (result * factors).sum() if options["reduction"] == "none" else result

    error = largest_error(setup.run(loss), setup.run(loss, fused=False))
    assert error <= (1e-6 if dtype == torch.float32 else 1e-14)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("shape", ["soft cap", "scaled", "soft cap, then float"])
def test_recorded_operations_in_low_precision(shape: str, plain: bool) -> None:
    """Same operations in the same dtypes as torch's: what differs is the order of sums."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        if shape == "scaled":
            return F.cross_entropy((logits * 0.3).float(), target)
        capped = torch.tanh(logits / 5.0) * 5.0
        return F.cross_entropy(capped.float() if "float" in shape else capped.double(), target)

    setup = Setup(torch.bfloat16)
    assert largest_error(setup.run(loss, plain=plain), setup.run(loss, fused=False)) <= 2**-6


def test_bf16_gradients_of_logits_are_torchs_within_one_rounding() -> None:
    """The rows' gradient through an identity weight is the logits' gradient itself."""
    torch.manual_seed(0)
    linear = nn.Linear(CLASSES, CLASSES, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(CLASSES))
    rows, target = (torch.randn(ROWS, CLASSES) * 4).bfloat16(), torch.randint(CLASSES, (ROWS,))
    grads = []
    for fused in (True, False):
        leaf = rows.clone().requires_grad_()
        logits = LazyLogits(make_head(linear), leaf * 1) if fused else linear(leaf * 1)
        F.cross_entropy(logits.float(), target).backward()
        assert leaf.grad is not None
        grads.append(leaf.grad)
    found, expected = (grad.view(torch.int16).int() for grad in grads)
    assert (found - expected).abs().max() <= 1
    assert (found != expected).float().mean() < 0.01


def test_large_common_offset_costs_no_digits() -> None:
    """exp(logit - maximum) is exact where maximum + log(total) would have lost the difference."""
    setup = Setup(bias=True)
    with torch.no_grad():
        setup.linear.bias.fill_(2000.0)
    loss = lambda logits, target: F.cross_entropy(logits, target)  # noqa: E731
    exact = copy.deepcopy(setup)
    exact.linear.double()
    exact.rows = exact.rows.double()
    logits = setup.linear(setup.rows)  # as rounded as those of the fused loss
    reference = logits.detach().double().requires_grad_()
    F.cross_entropy(reference, setup.target).backward()
    found = setup.run(loss)
    assert largest_error(found[1:2], [(reference.grad @ exact.linear.weight).float()]) <= 1e-6


def test_ignored_rows_have_exactly_no_gradient_and_only_ignored_rows_are_nan() -> None:
    setup = Setup()
    loss = lambda logits, target: F.cross_entropy(logits, target, label_smoothing=0.1)  # noqa: E731
    assert setup.run(loss)[1][5:11].count_nonzero() == 0
    setup.target.fill_(-100)
    found, expected = setup.run(F.cross_entropy), setup.run(F.cross_entropy, fused=False)
    assert found[0].isnan() and expected[0].isnan()
    for grad, plain in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(grad, plain, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_no_numbers_are_torchs(value: float) -> None:
    setup = Setup()
    with torch.no_grad():
        setup.linear.bias[7] = value
    setup.target[setup.target == 7] = 8
    found, expected = setup.run(F.cross_entropy), setup.run(F.cross_entropy, fused=False)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.isnan(), other.isnan())


def test_targets_out_of_range_raise() -> None:
    setup = Setup()
    for wrong in (CLASSES, -1):
        setup.target[0] = wrong
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            setup.run(F.cross_entropy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_however_many_logits_are_kept_and_however_large_the_scratch(dtype: torch.dtype) -> None:
    setup = Setup(dtype)
    loss = lambda logits, target: F.cross_entropy(logits.float(), target)  # noqa: E731
    base = setup.run(loss)
    for kept_tokens, scratch_rows in itertools.product((0, TILE, 2 * TILE + 1, ROWS), (0.5, 5, 1000)):
        found = setup.run(loss, kept_tokens=kept_tokens, scratch_rows=scratch_rows)
        assert all(torch.equal(one, other) for one, other in zip(found, base, strict=True)), (kept_tokens, scratch_rows)


def test_kept_logits_are_not_projected_again_and_promised_once() -> None:
    setup = Setup()
    head = make_head(setup.linear, kept_tokens=2 * TILE)
    logits = LazyLogits(head, setup.rows.clone().requires_grad_() * 1)
    (F.cross_entropy(logits, setup.target) + F.cross_entropy(logits * 2, setup.target)).backward()
    assert len(head.projected_dtypes) == 3 + 1 + 3 + 3  # the second loss keeps nothing
    detached = make_head(setup.linear.requires_grad_(False), kept_tokens=ROWS)
    F.cross_entropy(LazyLogits(detached, setup.rows), setup.target)
    assert detached.kept_tokens == ROWS  # no backward will come


class WideKernels(TorchDispatchMode):
    """Counts operations on tensors as wide as the vocabulary, other than views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        wide = [t for t in tree_iter((args, kwargs, result)) if isinstance(t, Tensor) and CLASSES in t.shape]
        if wide and name not in ("slice", "detach", "empty", "t", "view", "expand", "_unsafe_view", "alias", "select"):
            self.names[name] += 1
        return result


def test_kernels_per_tile() -> None:
    """Two per tile of rows in forward and four in backward; per projection: itself, and in backward three products."""
    setup = Setup(bias=False)
    head = make_head(setup.linear, scratch_rows=8)  # of two arrays. Sixteen tiles of rows: 6 + 6 + 4
    logits = LazyLogits(head, setup.rows.clone().requires_grad_() * 1)
    with WideKernels() as forward:
        loss = F.cross_entropy(logits.view(-1, CLASSES), setup.target)
    with WideKernels() as backward:
        loss.backward()
    assert forward.names == {"mm": 3, "_log_softmax": 16, "gather": 16}
    tiled = ("_log_softmax", "scatter_add_", "_log_softmax_backward_data", "scatter_")
    expected = {"mm": 6, "addmm_": 3, "zero_": 3, **dict.fromkeys(tiled, 16)}
    assert {name: backward.names[name] for name in expected} == expected
    assert set(backward.names) - set(expected) <= {"zeros_like"}, backward.names


class NoWaiting(TorchDispatchMode):
    """Refuses what makes the host wait for a GPU."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "item", "unique", "_to_cpu")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.WAITING, name
        assert name != "index" or all(i is None or i.dtype != torch.bool for i in args[1]), "boolean mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_items", [None, torch.tensor(29)])
def test_nothing_waits_in_the_loss_of_transformers(num_items: Tensor | None) -> None:
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    setup = Setup(torch.bfloat16)
    logits = LazyLogits(make_head(setup.linear), setup.rows[:60].view(3, 20, HIDDEN).clone().requires_grad_() * 1)
    with NoWaiting():
        capped = torch.tanh(logits / 30.0) * 30.0
        labels = setup.target[:60].view(3, 20)
        losses = [
            loss_utils.ForCausalLMLoss(value, labels, CLASSES, num_items_in_batch=num_items)
            for value in (logits, capped)
        ]
        torch.stack(losses).sum().backward()


class SquashedHead(nn.Linear):
    """Its last operation saves its own output: the gradient must not be written over it."""

    def forward(self, rows: Tensor) -> Tensor:
        return torch.tanh(super().forward(rows))


def test_a_head_that_saves_its_output() -> None:
    setup = Setup()
    setup.linear.__class__ = SquashedHead
    found = setup.run(F.cross_entropy, plain=False)
    assert largest_error(found, setup.run(F.cross_entropy, fused=False)) <= 1e-6


# -- the products ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slice_bytes", [1, 200, 2**20])
def test_products_add_to_sums_of_another_dtype(slice_bytes: int) -> None:
    left, right = torch.randn(13, 9).bfloat16(), torch.randn(9, 6).bfloat16()
    before = torch.randn(13, 6)
    total = before.clone()
    version = total._version
    add_product(total, left, right, slice_bytes)
    assert torch.equal(total, before + (left @ right).float())
    assert total._version > version  # it counts as received


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_linear_backward_equals_autograd(dtype: torch.dtype, autocast: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(HIDDEN, CLASSES, dtype=dtype)
    by_hand = copy.deepcopy(linear)
    rows = torch.randn(ROWS, HIDDEN, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = linear(rows)
    grad = torch.randn_like(out)
    out.backward(grad)
    rows_grad = torch.empty_like(rows)
    with torch.no_grad():
        LinearBackward(by_hand, out.dtype, gradients_of(by_hand))(rows, grad, rows_grad)
    found = [rows_grad, by_hand.weight.grad, by_hand.bias.grad]
    tolerance = 2**-7 if out.dtype == torch.bfloat16 else 1e-6
    assert largest_error(found, [rows.grad, linear.weight.grad, linear.bias.grad]) <= tolerance


def test_linear_backward_leaves_frozen_parameters_and_grad_of_inputs_alone() -> None:
    linear = nn.Linear(HIDDEN, CLASSES)
    linear.bias.requires_grad_(False)
    rows, grad = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, CLASSES)
    with torch.no_grad():
        LinearBackward(linear, grad.dtype, (None, None))(rows, grad, torch.empty_like(rows))
        assert linear.weight.grad is None
        LinearBackward(linear, grad.dtype, gradients_of(linear))(rows, grad, None)
    assert linear.bias.grad is None and linear.weight.grad is not None
