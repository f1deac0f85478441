"""Lazy logits give loss, gradients and values of ordinary logits, and never exist as a whole in training."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hightide.runtime.head.lazy_logits import LazyLogits

BATCH, SEQUENCE, HIDDEN, VOCABULARY = 3, 17, 12, 41
TILE = 5  # 51 tokens: ten tiles and a tail


class LinearHead:
    """A head over an nn.Linear whose weights are NaN unless held, as those of a streamed block are."""

    def __init__(self, linear: nn.Linear, tile_tokens: int = TILE, plain: bool = True) -> None:
        self.tile_tokens = tile_tokens
        self.num_classes = linear.out_features
        self.version = 0
        self.scratch_bytes = 3 * linear.out_features * 4  # three rows of fp32
        self.kept_tokens = 0
        self.in_forward = False
        self.plain_linear = linear if plain else None  # None: backward through an inner graph
        self.linear = linear
        self.original_forward = linear.forward
        self.params = [param for param in linear.parameters() if param.requires_grad]
        self.anchor = torch.empty(0, requires_grad=True) if self.params else None
        self.node = None if self.anchor is None else self.anchor.view_as(self.anchor).grad_fn.next_functions[0][0]
        self.is_held = False
        self.holds: list[str] = []
        self.num_materialised = 0
        self.projected_dtypes: list[torch.dtype] = []

    def claim_kept_tokens(self) -> int:
        kept, self.kept_tokens = self.kept_tokens, 0
        return kept

    def claim_forward(self) -> bool:
        claimed, self.in_forward = self.in_forward, False
        return claimed

    def project(self, rows: Tensor) -> Tensor:
        assert self.is_held and rows.dim() == 2 and len(rows) <= self.tile_tokens
        logits = self.original_forward(rows)
        self.projected_dtypes.append(logits.dtype)
        return logits

    @contextmanager
    def forward_hold(self) -> Iterator[None]:
        with self.hold("forward"):
            yield

    @contextmanager
    def backward_hold(self, accumulate: bool) -> Iterator[None]:
        for param in self.params:
            param.requires_grad_(accumulate)
        with self.hold(f"backward accumulate={accumulate}"):
            yield
        for param in self.params:
            param.requires_grad_(True)

    @contextmanager
    def hold(self, what: str) -> Iterator[None]:
        assert not self.is_held
        self.holds.append(what)
        self.is_held = True
        yield
        self.is_held = False

    def will_accumulate(self) -> bool:
        return torch._C._will_engine_execute_node(self.node)

    def materialise(self, hidden: Tensor) -> Tensor:
        self.num_materialised += 1
        return self.original_forward(hidden)


class LargestLogits(TorchDispatchMode):
    """Most rows of any tensor whose last dimension is the vocabulary, other than the transposed weight."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.vocabulary, self.hidden, self.num_rows, self.largest_numel = vocabulary, hidden, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if not isinstance(tensor, Tensor):
                continue
            self.largest_numel = max(self.largest_numel, tensor.numel())
            if tensor.shape[-1:] == (self.vocabulary,) and tensor.shape != (self.hidden, self.vocabulary):
                self.num_rows = max(self.num_rows, tensor.numel() // self.vocabulary)
        return result


class Pair:
    """The same hidden states and head, once plain and once lazy."""

    def __init__(
        self, bias: bool = True, dtype: torch.dtype = torch.float32, tile_tokens: int = TILE, plain: bool = True
    ) -> None:
        torch.manual_seed(0)
        self.plain_linear = nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
        self.linear = copy.deepcopy(self.plain_linear)
        self.plain_hidden = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=dtype).mul_(2).requires_grad_()
        self.hidden = self.plain_hidden.detach().clone().requires_grad_()
        self.labels = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
        self.labels[0, :4] = -100
        self.head = LinearHead(self.linear, tile_tokens, plain)

    def logits(self) -> tuple[Tensor, LazyLogits]:
        # Times one: hidden states come from a graph, they are no leaves.
        return self.plain_linear(self.plain_hidden * 1.0), LazyLogits(self.head, self.hidden * 1.0)

    def assert_same_gradients(self, rtol: float = 1e-6) -> None:
        assert_close(self.hidden.grad, self.plain_hidden.grad, rtol)
        for param, plain in zip(self.linear.parameters(), self.plain_linear.parameters(), strict=True):
            assert_close(param.grad, plain.grad, rtol)


def assert_close(found: Tensor | None, expected: Tensor | None, rtol: float = 1e-6) -> None:
    """Within rtol of the largest expected value: single elements cancel."""
    assert found is not None and expected is not None
    assert found.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=rtol * max(expected.abs().max().item(), 1e-3))


def shifted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits[..., :-1, :].contiguous().view(-1, VOCABULARY), labels[..., 1:].reshape(-1)


def flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.view(-1, VOCABULARY), labels.view(-1)


WEIGHT = torch.linspace(0.5, 2, VOCABULARY)
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flat": lambda x, y: F.cross_entropy(*flat(x, y)),
    "shifted": lambda x, y: F.cross_entropy(*shifted(x, y)),
    "module": lambda x, y: nn.CrossEntropyLoss()(*shifted(x.float(), y)),
    "sum": lambda x, y: F.cross_entropy(*flat(x, y), reduction="sum") / 37,
    "none": lambda x, y: (F.cross_entropy(*flat(x, y), reduction="none") * torch.linspace(-1, 1, y.numel())).sum(),
    "weight": lambda x, y: F.cross_entropy(*flat(x, y), weight=WEIGHT),
    "weight sum": lambda x, y: F.cross_entropy(*flat(x, y), WEIGHT, reduction="sum"),
    "smoothing": lambda x, y: F.cross_entropy(*flat(x, y), label_smoothing=0.1),
    "smoothing, weight": lambda x, y: F.cross_entropy(*flat(x, y), weight=WEIGHT, label_smoothing=0.2),
    "ignore_index": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten().clamp(min=7), ignore_index=7),
    "soft cap": lambda x, y: F.cross_entropy(*flat(torch.tanh(x / 3.0) * 3.0, y)),
    "scalars": lambda x, y: F.cross_entropy(*flat(1.5 * x.mul(0.25) * torch.tensor(0.7) / 3, y)),
    "scalar first": lambda x, y: F.cross_entropy(*flat(torch.tensor(0.7) * x.reshape(-1, VOCABULARY), y)),
    "mask": lambda x, y: F.cross_entropy(x[y != -100], y[y != -100]),
    "rows": lambda x, y: F.cross_entropy(x[1][torch.tensor([3, 1, 1])], y[1][torch.tensor([3, 1, 1])]),
    "slices": lambda x, y: F.cross_entropy(x[1:, 2:-1].flatten(0, 1), y[1:, 2:-1].flatten()),
    "casts": lambda x, y: F.cross_entropy(*flat(x.double().to(torch.float32).type(torch.float64), y)).float(),
    "twice": lambda x, y: F.cross_entropy(*flat(x, y)) + 0.5 * F.cross_entropy(*flat(x * 2, y)),
    "scaled": lambda x, y: F.cross_entropy(*flat(x, y)) * -1234.5,
}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_fused_losses_equal_ordinary_ones_tile_by_tile(loss, plain):
    pair = Pair(plain=plain)
    plain_logits, logits = pair.logits()
    expected = LOSSES[loss](plain_logits, pair.labels)
    expected.backward()
    with LargestLogits(VOCABULARY, HIDDEN) as largest, warnings.catch_warnings():
        warnings.simplefilter("error")
        found = LOSSES[loss](logits, pair.labels)
        found.backward()
    assert type(found) is Tensor
    assert_close(found.detach(), expected.detach())
    pair.assert_same_gradients()
    assert 0 < largest.num_rows <= TILE
    assert pair.head.num_materialised == 0


@pytest.mark.filterwarnings("ignore:hightide")
@pytest.mark.parametrize("loss", ["in place", "augmented"])
def test_in_place_arithmetic_is_seen_by_what_follows(loss):
    pair = Pair()
    losses = []
    for logits in pair.logits():
        if loss == "in place":
            logits.mul_(0.5).add_(1.0)
        else:
            logits /= 2
            logits -= 1
        losses.append(F.cross_entropy(*flat(logits, pair.labels)))
        losses[-1].backward()
    assert_close(losses[1].detach(), losses[0].detach())
    pair.assert_same_gradients()


def test_in_place_arithmetic_that_a_view_would_miss_is_refused():
    pair = Pair()
    _, logits = pair.logits()
    view = logits.view(-1, VOCABULARY)
    for change in (lambda: view.mul_(2), lambda: logits.mul_(2), lambda: logits.masked_fill_(torch.tensor(True), 0)):
        with pytest.raises(RuntimeError, match="of which views exist"):
            change()


@pytest.mark.parametrize("tile_tokens", [1, 7, 51, 1000])
def test_any_tile_size(tile_tokens):
    pair = Pair(bias=False, tile_tokens=tile_tokens)
    plain_logits, logits = pair.logits()
    for value in (plain_logits, logits):
        F.cross_entropy(*flat(value, pair.labels)).backward()
    pair.assert_same_gradients()


def test_no_rows_and_only_ignored_rows():
    for labels in (torch.full((BATCH, SEQUENCE), -100), None):
        pair = Pair()
        found = []
        for logits in pair.logits():
            if labels is None:
                loss = F.cross_entropy(logits[:0].view(-1, VOCABULARY), pair.labels[:0].view(-1))
            else:
                loss = F.cross_entropy(*flat(logits, labels))
            loss.backward()
            found.append(loss.detach())
        assert torch.equal(found[0].isnan(), found[1].isnan()) and found[1].isnan()
        assert torch.equal(pair.hidden.grad.nan_to_num(7), pair.plain_hidden.grad.nan_to_num(7))


def test_gradients_add_to_those_that_exist():
    pair = Pair()
    for logits in pair.logits():
        F.cross_entropy(*flat(logits, pair.labels)).backward()
    for logits in pair.logits():
        (F.cross_entropy(*flat(logits, pair.labels)) * 3).backward()
    pair.assert_same_gradients()


def test_backward_from_another_thread():
    pair = Pair()
    plain_logits, logits = pair.logits()
    F.cross_entropy(*flat(plain_logits, pair.labels)).backward()
    loss = F.cross_entropy(*flat(logits, pair.labels))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join(30)
    pair.assert_same_gradients()


def test_autograd_grad_of_inputs_does_not_touch_parameters():
    pair = Pair()
    plain_logits, logits = pair.logits()
    (expected,) = torch.autograd.grad(F.cross_entropy(*flat(plain_logits, pair.labels)), pair.plain_hidden)
    (found,) = torch.autograd.grad(F.cross_entropy(*flat(logits, pair.labels)), pair.hidden)
    assert_close(found, expected)
    assert pair.linear.weight.grad is None
    assert pair.head.holds == ["forward", "backward accumulate=False"]


def test_a_hidden_state_without_gradient_still_trains_the_head():
    pair = Pair()
    expected = F.cross_entropy(*flat(pair.plain_linear(pair.plain_hidden.detach()), pair.labels))
    expected.backward()
    F.cross_entropy(*flat(LazyLogits(pair.head, pair.hidden.detach()), pair.labels)).backward()
    assert_close(pair.linear.weight.grad, pair.plain_linear.weight.grad)


def test_a_frozen_head_passes_the_gradient_on():
    pair = Pair()
    pair.linear.requires_grad_(False)
    pair.head = LinearHead(pair.linear)
    assert pair.head.anchor is None
    for logits in pair.logits():
        F.cross_entropy(*flat(logits, pair.labels)).backward()
    assert_close(pair.hidden.grad, pair.plain_hidden.grad)
    assert pair.linear.weight.grad is None


def test_a_second_backward_raises():
    pair = Pair()
    loss = F.cross_entropy(*flat(pair.logits()[1], pair.labels))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()
    loss = F.cross_entropy(*flat(pair.logits()[1], pair.labels))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_raises():
    pair = Pair()
    loss = F.cross_entropy(*flat(pair.logits()[1], pair.labels))
    (grad,) = torch.autograd.grad(loss, pair.hidden, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_inputs_changed_in_place_are_noticed():
    pair = Pair()
    hidden = pair.hidden * 1.0
    logits = LazyLogits(pair.head, hidden)
    loss = F.cross_entropy(*flat(logits, pair.labels))
    hidden.mul_(2)
    with pytest.raises(RuntimeError, match="in place"):
        F.cross_entropy(*flat(logits, pair.labels))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weights_that_were_updated_meanwhile_are_noticed():
    pair = Pair()
    _, logits = pair.logits()
    loss = F.cross_entropy(*flat(logits, pair.labels))
    pair.head.version += 1
    for use in (loss.backward, logits.argmax, lambda: F.cross_entropy(*flat(logits, pair.labels))):
        with pytest.raises(RuntimeError, match=r"before optimizer\.step"):
            use()


def test_autocast_of_the_call_holds_in_loss_and_backward():
    pair = Pair()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain_logits, logits = pair.logits()
    assert logits.dtype == plain_logits.dtype == torch.bfloat16
    losses = []
    for value in (plain_logits, logits):
        losses.append(F.cross_entropy(*flat(value.float(), pair.labels)))
        losses[-1].backward()
    assert_close(losses[1].detach(), losses[0].detach())
    pair.assert_same_gradients(rtol=2e-2)
    assert pair.head.projected_dtypes == [torch.bfloat16] * 22  # eleven tiles, twice
    with pytest.warns(UserWarning, match="needs whole logits"):
        assert torch.equal(logits.clone(), plain_logits)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain_logits, logits = pair.logits()
        assert F.cross_entropy(*flat(logits, pair.labels)).dtype == torch.float32


def test_half_precision_logits_are_summed_in_fp32():
    pair = Pair(dtype=torch.bfloat16)
    plain_logits, logits = pair.logits()
    found = F.cross_entropy(*flat(logits, pair.labels))
    exact = F.cross_entropy(*flat(plain_logits.float(), pair.labels))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.detach(), exact.detach().bfloat16())


def test_metadata_costs_nothing():
    pair = Pair()
    plain, lazy = pair.logits()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(lazy, Tensor) and torch.is_tensor(lazy)
        assert lazy.shape == plain.shape and lazy.size(-1) == VOCABULARY and lazy.size() == plain.size()
        assert lazy.dim() == lazy.ndim == 3 and lazy.numel() == plain.numel() and len(lazy) == BATCH
        assert lazy.dtype == plain.dtype and lazy.device == plain.device and lazy.is_floating_point()
        assert lazy.requires_grad and not lazy.is_leaf and lazy.stride() == plain.stride() and lazy.is_contiguous()
        assert lazy.type() == plain.type()
        assert lazy.float() is lazy and lazy.contiguous() is lazy and lazy.to(plain.device) is lazy
        assert lazy.to(torch.bfloat16).dtype == lazy.bfloat16().dtype == torch.bfloat16
        assert (lazy.half() * 2.0).dtype == torch.float16 and lazy.to(torch.zeros(1).double()).dtype == torch.float64
        assert lazy[:, :-1].shape == plain[:, :-1].shape and lazy[0, ..., :].shape == plain[0, ..., :].shape
        assert not lazy.detach().requires_grad and not lazy.detach().mul(2).requires_grad
        with torch.no_grad():
            assert not (lazy * 2).requires_grad
        for text in (repr(lazy), str(lazy), f"{lazy}"):
            assert "LazyLogits" in text and "not computed" in text
        assert lazy in {lazy: 1}
    assert pair.head.num_materialised == 0 and pair.head.holds == []


WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1).square().sum(),
    "vocabulary index": lambda x: x[..., 3].square().sum(),
    "vocabulary slice": lambda x: x[:, :, 5:9].square().sum(),
    "vocabulary mask": lambda x: x[..., torch.arange(VOCABULARY) < 5].square().sum(),
    "fewer classes": lambda x: F.cross_entropy(x[:, :, :9].flatten(0, 1), torch.arange(BATCH * SEQUENCE) % 9),
    "one value": lambda x: x[0, 0, 0] * 3,
    "tensor arithmetic": lambda x: (x * torch.linspace(0, 1, VOCABULARY) + x.detach()).sum(),
    "after recording": lambda x: (x[:, 1:].float() / 2).tanh().view(-1, VOCABULARY).logsumexp(-1).sum(),
    "transpose": lambda x: F.cross_entropy(x.transpose(1, 2), torch.zeros(BATCH, SEQUENCE, dtype=torch.long)),
    "probabilities": lambda x: F.cross_entropy(
        x.flatten(0, 1), torch.full((BATCH * SEQUENCE, VOCABULARY), 1 / VOCABULARY)
    ),
    "sums": lambda x: (1.5 - (-x).add(0.25, alpha=2) * torch.tensor(0.7) - 3).square().mean(),
    "list": lambda x: torch.stack([x, x * 2]).square().mean(),
    "keyword": lambda x: torch.tanh(input=x).sum(),
    "new axis": lambda x: x[None].square().sum() + x.unsqueeze(0).sum(),
    "rows": lambda x: sum(row.square().sum() for row in x),
    "mask then softmax": lambda x: (
        x[torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % 2 == 0].softmax(-1).square().sum()
    ),
    "log_softmax, nll": lambda x: F.nll_loss(F.log_softmax(x[0], -1), torch.zeros(SEQUENCE, dtype=torch.long)),
    "legacy": lambda x: F.cross_entropy(x[0], torch.zeros(SEQUENCE, dtype=torch.long), size_average=False),
}


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("operation", WHOLE)
def test_other_operations_see_whole_logits_with_one_warning(operation):
    pair = Pair()
    plain_logits, logits = pair.logits()
    expected = WHOLE[operation](plain_logits)
    expected.backward()
    with pytest.warns(UserWarning, match=r"hightide: the operation '.*' needs whole logits of shape") as caught:
        found = WHOLE[operation](logits)
        found.backward()
        WHOLE[operation](pair.logits()[1])
    assert len([w for w in caught if "hightide" in str(w.message)]) == 1
    assert_close(found.detach(), expected.detach())
    pair.assert_same_gradients()


@pytest.mark.filterwarnings("ignore:hightide")
def test_a_trainable_scalar_gets_its_gradient():
    pair = Pair()
    scales = [torch.tensor(0.7, requires_grad=True) for _ in range(2)]
    for logits, scale in zip(pair.logits(), scales, strict=True):
        F.cross_entropy(*flat(logits * scale, pair.labels)).backward()
    assert_close(scales[1].grad, scales[0].grad)
    pair.assert_same_gradients()


def test_one_warning_however_many_head_objects_a_block_makes():
    pair, block = Pair(), nn.Identity()
    with pytest.warns(UserWarning, match="'argmax'") as caught:
        for _ in range(3):
            LazyLogits(LinearHead(pair.linear), pair.hidden, identity=block).argmax(-1)
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore:hightide")
def test_values_without_gradient():
    pair = Pair()
    plain, lazy = pair.logits()
    assert torch.equal(lazy.argmax(-1), plain.argmax(-1))
    assert lazy.tolist() == plain.tolist() and lazy[0, 0, 0].item() == plain[0, 0, 0].item()
    assert torch.equal(lazy.detach().cpu(), plain.detach()) and torch.equal(lazy.data, plain.data)
    assert (lazy.detach().numpy() == plain.detach().numpy()).all()
    assert "LazyLogits" in repr(lazy)


@pytest.mark.filterwarnings("ignore:hightide")
def test_a_look_without_grad_does_not_lose_the_gradient():
    pair = Pair()
    losses = []
    for logits in pair.logits():
        with torch.no_grad():
            logits.argmax(-1)
            assert not F.cross_entropy(*flat(logits, pair.labels)).requires_grad
        assert not F.cross_entropy(*flat(logits.detach(), pair.labels)).requires_grad
        losses.append(F.cross_entropy(*flat(logits, pair.labels)) + logits.square().mean())
        losses[-1].backward()
    assert_close(losses[1].detach(), losses[0].detach())
    pair.assert_same_gradients()


@pytest.mark.filterwarnings("ignore:hightide")
@pytest.mark.parametrize("grad_mode", [True, False])
def test_an_assignment_is_seen_by_what_follows(grad_mode):
    pair = Pair()
    for logits in pair.logits():
        logits = logits + 1
        with torch.set_grad_enabled(grad_mode):
            logits[..., 3] = -30.0
        F.cross_entropy(*flat(logits, pair.labels)).backward()
    pair.assert_same_gradients()


@pytest.mark.filterwarnings("ignore:hightide")
def test_whole_logits_are_computed_once():
    pair = Pair()
    _, logits = pair.logits()
    (logits.softmax(-1).sum() + logits.square().sum()).backward()
    assert pair.head.num_materialised == 1


@pytest.mark.filterwarnings("ignore:hightide")
def test_code_round_torch_function_raises_rather_than_lose_a_gradient():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.square().sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.expand(BATCH, SEQUENCE, VOCABULARY)

    pair = Pair()
    plain, lazy = pair.logits()
    loss = Square.apply(lazy)
    assert_close(loss.detach(), plain.square().sum().detach())
    with pytest.raises(RuntimeError, match="clone"):
        loss.backward()
    Square.apply(lazy.clone()).backward()
    Square.apply(plain).backward()
    pair.assert_same_gradients()


def test_wrong_targets_are_refused_without_computing_logits():
    pair = Pair()
    _, logits = pair.logits()
    with pytest.raises(ValueError, match=r"batch_size \(51\) to match target batch_size \(50\)"):
        F.cross_entropy(logits.view(-1, VOCABULARY), pair.labels.view(-1)[1:])
    assert pair.head.holds == []


def test_nothing_outlives_the_step():
    pair = Pair()
    hidden = pair.hidden * 1.0
    logits = LazyLogits(pair.head, hidden)
    loss = F.cross_entropy(*flat(logits, pair.labels))
    reference = weakref.ref(hidden)
    loss.backward()
    gc.disable()  # no cycles: memory must go when the names do
    try:
        del hidden, logits
        assert reference() is None
    finally:
        gc.enable()


# -- real models -------------------------------------------------------------------------------------------------


def causal_model(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = {**small, "intermediate_size": 48, "num_key_value_heads": 1, "max_position_embeddings": 64}
    if kind.startswith("llama"):
        config = transformers.LlamaConfig(**llama, tie_word_embeddings=kind == "llama tied")
        return transformers.LlamaForCausalLM(config)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=160, n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.Gemma2Config(**llama, head_dim=16, final_logit_softcapping=0.5)
    return transformers.Gemma2ForCausalLM(config)


@pytest.mark.parametrize("kind", ["llama", "llama tied", "gpt2", "gemma2"])
@pytest.mark.parametrize("num_items", [None, 29, torch.tensor(29)])
def test_hugging_face_losses_are_fused_unchanged(kind, num_items):
    plain = causal_model(kind).train()
    lazy = copy.deepcopy(plain)
    head = LinearHead(lazy.lm_head, tile_tokens=7)
    lazy.lm_head.forward = lambda hidden: LazyLogits(head, hidden)
    tokens = torch.randint(160, (3, 20))
    labels = tokens.clone()
    labels[1, 5:] = -100
    batch = {"input_ids": tokens, "labels": labels, "use_cache": False}
    if num_items is not None:
        batch["num_items_in_batch"] = num_items
    expected = plain(**batch).loss
    expected.backward()
    with LargestLogits(160, 32) as largest, warnings.catch_warnings():
        warnings.simplefilter("error")
        output = lazy(**batch)
        output.loss.backward()
    assert_close(output.loss.detach(), expected.detach())
    for (name, param), other in zip(lazy.named_parameters(), plain.parameters(), strict=True):
        assert param.grad is not None, name
        assert_close(param.grad, other.grad, rtol=2e-6)
    assert 0 < largest.num_rows <= 7
    assert largest.largest_numel < tokens.numel() * 160
    assert output.logits.shape == (3, 20, 160)
    with pytest.warns(UserWarning, match="argmax"):
        assert torch.equal(output.logits.argmax(-1), plain(tokens, use_cache=False).logits.argmax(-1))
