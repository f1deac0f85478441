"""Attention is counted as the kernel that will run on the device, however long sequences are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from hightide.ir.block import CallSpec
from hightide.profiler.fake import attention
from hightide.profiler.fake.attention import AttentionCall, kernel_by_rule
from hightide.profiler.model.model_profile import profile_model
from hightide.profiler.needs import token_tiles
from hightide.profiler.trial import independence, repeated_call

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FLASH, EFFICIENT, MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
HIDDEN, HEADS = 128, 4
TWO_SEQUENCES_BYTES = 2 * (65536 + 1) * 8  # of token numbers, and one that the loss puts behind them


class LargestReal(TorchDispatchMode):
    """Of all tensors with values that are made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor) and not tensor.is_meta:
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return out


def layer_call(
    length: int,
    runs_on: torch.device = GPU,
    dtype: torch.dtype = torch.bfloat16,
    attention: str = "sdpa",
    key_heads: int = 2,
    dropout: float = 0.0,
    padded: bool = False,
    device: torch.device | None = None,
) -> CallSpec:
    """Of a decoder's layer, one sequence of so many tokens."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=key_heads,
        max_position_embeddings=131072,
        attn_implementation=attention,
        attention_dropout=dropout,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype).train()
    tokens = torch.zeros(1, length, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    if padded:
        batch["attention_mask"] = torch.ones_like(tokens)
        batch["attention_mask"][:, : length // 2] = 0
    profile, _ = profile_model(model, None, batch, device=device, runs_on=runs_on)
    (call,) = [call for call in profile.calls if profile.blocks[call.block].name == "model.layers.1"]
    return call


def bytes_per_token(call: CallSpec, length: int) -> tuple[float, float, float]:
    peaks = call.forward_peak, call.kept, call.backward_peak
    return tuple(peak.at(1) / length for peak in peaks)  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def untiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of attention are what is asked for, and are the same for each token however long a sample is."""
    monkeypatch.setattr(token_tiles, "LONG", 1 << 40)


@pytest.mark.parametrize(
    ("runs_on", "dtype", "options"),
    [
        (GPU, torch.bfloat16, {}),
        (GPU, torch.float16, {"dropout": 0.1}),
        (GPU, torch.float32, {"key_heads": HEADS}),
        pytest.param(GPU, torch.float32, {"key_heads": HEADS, "dropout": 0.1}, marks=pytest.mark.long),
        (CPU, torch.float32, {}),
        pytest.param(CPU, torch.bfloat16, {}, marks=pytest.mark.long),
    ],
)
def test_bytes_are_linear_in_the_length_where_no_square_exists(
    runs_on: torch.device, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    with LargestReal() as real:
        short, long = (bytes_per_token(layer_call(n, runs_on, dtype, **options), n) for n in (4096, 65536))
    assert long == pytest.approx(short, rel=0.01)
    assert real.num_bytes <= TWO_SEQUENCES_BYTES, "no mask is made"


@pytest.mark.parametrize(
    ("runs_on", "options"),
    [
        (GPU, {"attention": "eager"}),
        (CPU, {"attention": "eager"}),
        (GPU, {"dtype": torch.float32}),  # keys that heads share: torch has flash attention for them, in 16 bits
        (CPU, {"dropout": 0.1}),
    ],
)
def test_squares_that_are_real_are_counted(runs_on: torch.device, options: dict[str, Any]) -> None:
    short, long = (layer_call(n, runs_on, **options) for n in (1024, 4096))
    element_bytes = 4 if options.get("dtype") is torch.float32 else 2
    for peak in ("forward_peak", "kept", "backward_peak"):
        assert getattr(long, peak).at(1) >= HEADS * 4096**2 * element_bytes
        assert 2.5 < getattr(long, peak).at(1) / 4 / getattr(short, peak).at(1) <= 4.01


def test_a_math_kernel_makes_no_real_mask_however_long_the_sequence() -> None:
    with LargestReal() as real:
        layer_call(65536, CPU, dropout=0.1)
    assert real.num_bytes <= TWO_SEQUENCES_BYTES


def test_a_padded_batch_has_a_mask_and_no_scores() -> None:
    call, plain = layer_call(2048, padded=True), layer_call(2048)
    beyond = call.kept.at(1) - plain.kept.at(1)
    assert 2 * 2048**2 <= beyond < 4 * 2048**2, "one number for each pair of tokens, and not one for each head"


@pytest.mark.parametrize("runs_on", [CPU, GPU])
def test_causal_attention_counts_half(runs_on: torch.device) -> None:
    short, long = (layer_call(n, runs_on).forward.flop.at(1) for n in (4096, 8192))
    pairs = 8192**2 - 2 * 4096**2  # what doubling the length adds beyond twice the rest
    assert long - 2 * short == pytest.approx(2 * pairs * HIDDEN, rel=0.01)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_kernels_sum_in_fp32_inside() -> None:
    """The gradient of the queries, and of each query one number more."""
    model, batch = nn.Sequential(Attending(), Attending()), torch.zeros(1, HEADS, 1024, 64, dtype=torch.bfloat16)
    on_cpu, on_gpu = (profile_model(model, None, batch, device=None, runs_on=device)[0] for device in (CPU, GPU))
    more = on_gpu.calls[1].backward_peak.at(1) - on_cpu.calls[1].backward_peak.at(1)
    assert more == pytest.approx(4 * (64 + 1) * HEADS * 1024, rel=0.02)


def attention_call(
    dtype: torch.dtype = torch.bfloat16, width: int = 64, key_heads: int = 4, **options: Any
) -> AttentionCall:
    query = torch.zeros(2, 4, 8, width, dtype=dtype)
    key = torch.zeros(2, key_heads, options.pop("key_length", 8), width, dtype=dtype)
    return AttentionCall(query, key, key.clone(), **options)


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        (attention_call(), FLASH),
        (attention_call(is_causal=True, dropout_p=0.1), FLASH),
        (attention_call(key_heads=2, enable_gqa=True), FLASH),
        (attention_call(width=36), FLASH),
        (attention_call(width=264), EFFICIENT),
        (attention_call(attn_mask=torch.ones(2, 1, 8, 8, dtype=torch.bool)), EFFICIENT),
        (attention_call(attn_mask=torch.ones(8, 8, dtype=torch.bool), key_heads=2, enable_gqa=True), MATH),
        (attention_call(is_causal=True, key_length=16), EFFICIENT),
        (attention_call(torch.float32), EFFICIENT),
        (attention_call(torch.float32, width=34), MATH),
        (attention_call(torch.float32, key_heads=2, enable_gqa=True), MATH),
        (attention_call(torch.float64), MATH),
    ],
)
def test_which_kernel_a_gpu_takes(call: AttentionCall, kernel: SDPBackend) -> None:
    assert kernel_by_rule(call) == kernel


@pytest.mark.parametrize("padded", [False, True])
def test_torch_is_asked_with_short_tensors_that_are_real(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a GPU; here the CPU answers in its place."""
    by_rule = layer_call(1024, padded=padded)
    asked = []
    choice = torch._fused_sdp_choice

    def answered(query: torch.Tensor, *args: Any, **kwargs: Any) -> int:
        asked.append((type(query), tuple(query.shape), query.stride(-1), query.requires_grad))
        assert choice(query, *args, **kwargs) >= 0
        return int(EFFICIENT.value if padded else FLASH.value)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention, "ASKED", CPU)
    monkeypatch.setattr(torch, "_fused_sdp_choice", answered)
    assert layer_call(1024, padded=padded).backward_peak == by_rule.backward_peak
    assert {kind for kind, *_ in asked} == {torch.Tensor}
    assert {shape[2:] for _, shape, *_ in asked} == {(attention.SHORT, HIDDEN // HEADS)}
    assert {needs for *_, needs in asked} == {True}, "with gradients torch takes other kernels"
    assert {stride for *_, stride, _ in asked} == {1}


def test_long_sequences_are_tried_short(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = set()
    before = repeated_call.RepeatedCall.run

    def seen(self: Any, leaves: Any, *args: Any, **kwargs: Any) -> Any:
        lengths.update(leaf.shape[1] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim == 3)
        return before(self, leaves, *args, **kwargs)

    monkeypatch.setattr(repeated_call.RepeatedCall, "run", seen)
    call = layer_call(8192, CPU, torch.float32, device=CPU)
    assert call.splittable and lengths == {independence.SHORT}


class Mixing(nn.Module):
    """Of all samples, or of the tokens that only long sequences have."""

    def __init__(self, asks: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.asks = asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x[:, : self.asks] + x.mean(0) if x.shape[1] < self.asks else x - x.mean((0, 1))


@pytest.mark.parametrize("asks", [0, 6000])
def test_mixing_is_found_in_long_sequences_too(asks: int) -> None:
    model = nn.Sequential(Mixing(asks), nn.Linear(8, 8))
    profile, _ = profile_model(model, None, torch.zeros(2, 5000, 8))
    assert [call.splittable for call in profile.calls] == [False, True]
