"""Attention on tensors without values, counted as the kernel that will run on the device.

[Note: which kernel attends] `scaled_dot_product_attention` chooses a kernel by the device, and tensors without values
are on the CPU. For the simulated accelerator that is the truth. For a GPU the kernel is chosen here: torch is asked
where there is a GPU; where there is none, the rules are those of a GPU of compute capability 8.0 or later, and where
torch's versions differ (grouped keys in fp32), the kernel that takes more memory is taken. The kernel's own operation
then runs without values, forward and backward: what it returns and saves is told by torch, and what it allocates and
frees inside by `workspace_bytes`.

A math kernel makes its causal mask by an operation without arguments, which would be real: with 131,072 tokens that is
16 GiB. Such ones are made without values too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from hightide.profiler.fake.recurrent import GATES, is_unreal, recur

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
MAX_FLASH_WIDTH = 256  # elements of a head
BIAS_ALIGNMENT = 16  # elements of a row of a mask
ROWS = 128  # of queries: the kernels' statistics are for so many at a time
ASKED = torch.device("cuda")
SHORT = 64  # tokens with which torch is asked: their number does not matter


class _Entered(threading.local):
    """Modes that are active in this thread, outermost first: whether they stand for a GPU."""

    def __init__(self) -> None:
        self.on_gpu: list[bool] = []


_entered = _Entered()

Unreal = Callable[[FakeTensorMode], AbstractContextManager[None]]  # what operations make out of nothing has no values


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of `scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        there = (self.query, self.key, self.value, self.attn_mask)
        return tuple(tensor for tensor in there if isinstance(tensor, Tensor))

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)


class DeviceKernels(TorchFunctionMode):
    """While it is active, attention and recurrent layers on tensors without values are those of the device. See [Note:
    which kernel attends] and [Note: recurrent kernels]. Real tensors are computed with as ever."""

    def __init__(self, device: torch.device, unreal: Unreal) -> None:
        super().__init__()
        self._on_gpu, self._unreal = device.type == "cuda", unreal

    def __enter__(self) -> DeviceKernels:
        _entered.on_gpu.append(self._on_gpu)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _entered.on_gpu.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._on_gpu and func in GATES and is_unreal(args):
            return recur(func, args)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        call = AttentionCall(*args, **kwargs)
        mode = next((tensor.fake_mode for tensor in call.tensors if isinstance(tensor, FakeTensor)), None)
        if mode is None:
            return func(*args, **kwargs)
        with self._unreal(mode):
            return _attend(call) if self._on_gpu else func(*args, **kwargs)


def _attend(call: AttentionCall) -> Tensor:
    kernel = gpu_kernel(call)
    if kernel == SDPBackend.FLASH_ATTENTION or (kernel == SDPBackend.CUDNN_ATTENTION and call.attn_mask is None):
        return _flash(call)
    if kernel == SDPBackend.EFFICIENT_ATTENTION or kernel == SDPBackend.CUDNN_ATTENTION:
        return _efficient(call)
    attended: Tensor = aten._scaled_dot_product_attention_math(
        call.query,
        call.key,
        call.value,
        call.attn_mask,
        call.dropout_p,
        call.is_causal,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
    )[0]
    return attended


def _flash(call: AttentionCall) -> Tensor:
    """cuDNN's is counted like it: it returns and saves as much."""
    width = call.query.shape[-1]
    parts = [F.pad(part, (0, -width % 8)) if width % 8 else part for part in (call.query, call.key, call.value)]
    scale = width**-0.5 if call.scale is None else call.scale
    attended: Tensor = aten._scaled_dot_product_flash_attention(*parts, call.dropout_p, call.is_causal, scale=scale)[0]
    return attended[..., :width] if width % 8 else attended


def _efficient(call: AttentionCall) -> Tensor:
    bias, key, value = call.attn_mask, call.key, call.value
    if bias is not None:
        if bias.dtype is torch.bool:
            bias = torch.zeros_like(bias, dtype=call.query.dtype).masked_fill_(bias.logical_not(), float("-inf"))
        columns = bias.shape[-1]
        if columns % BIAS_ALIGNMENT:
            bias = F.pad(bias, (0, -columns % BIAS_ALIGNMENT))[..., :columns]
        bias = bias.expand(*call.query.shape[:-1], key.shape[-2])
    groups = call.query.shape[-3] // key.shape[-3]
    if groups > 1:  # cuDNN's, which reads each key as often as it needs it
        key, value = (part.repeat_interleave(groups, dim=-3) for part in (key, value))
    attended: Tensor = aten._scaled_dot_product_efficient_attention(
        call.query, key, value, bias, call.needs_grad, call.dropout_p, call.is_causal, scale=call.scale
    )[0]
    return attended


def gpu_kernel(call: AttentionCall) -> SDPBackend:
    """That torch will choose. See [Note: which kernel attends]. To be compared by value: it is not always the same
    object."""
    if not torch.cuda.is_available() or any(tensor.ndim != 4 for tensor in call.tensors[:3]):
        return kernel_by_rule(call)
    needs_grad = call.needs_grad
    with _disable_current_modes():  # nobody counts these, and they are real
        query, key, value = (_like(part, needs_grad) for part in call.tensors[:3])
        mask = None
        if call.attn_mask is not None:
            shape = (*call.attn_mask.shape[:-2], *(min(size, SHORT) for size in call.attn_mask.shape[-2:]))
            mask = torch.zeros(shape, dtype=call.attn_mask.dtype, device=ASKED)
        chosen = torch._fused_sdp_choice(
            query, key, value, mask, call.dropout_p, call.is_causal, scale=call.scale, enable_gqa=call.enable_gqa
        )
    return SDPBackend(chosen)


def _like(tensor: Tensor, needs_grad: bool) -> Tensor:
    """A short one on the GPU, its dimensions in the same order in memory."""
    strides = tensor.stride()
    order = sorted(range(4), key=lambda dim: strides[dim], reverse=True)
    sizes = [tensor.shape[0], tensor.shape[1], min(tensor.shape[2], SHORT), tensor.shape[3]]
    made = torch.empty([sizes[dim] for dim in order], dtype=tensor.dtype, device=ASKED)
    return made.permute([order.index(dim) for dim in range(4)]).requires_grad_(needs_grad)


def kernel_by_rule(call: AttentionCall) -> SDPBackend:
    """Where there is no GPU to ask."""
    query, key, value = call.tensors[:3]
    if any(part.ndim != 4 for part in (query, key, value)):
        return SDPBackend.MATH
    (_, heads, length, width), (_, key_heads, key_length, key_width) = query.shape, key.shape
    value_width = value.shape[-1]
    same_heads = heads == key_heads == value.shape[1]
    if any(part.stride(-1) != 1 for part in (query, key, value)) or 0 in (length, key_length):
        return SDPBackend.MATH
    shares_keys = call.enable_gqa and key_heads == value.shape[1] and heads % key_heads == 0
    if (
        call.attn_mask is None
        and query.dtype in HALF
        and width == key_width == value_width <= MAX_FLASH_WIDTH
        and (same_heads or shares_keys)
        and (length == key_length or not call.is_causal)
    ):
        return SDPBackend.FLASH_ATTENTION
    alignment = 8 if query.dtype in HALF else 4
    is_aligned = width == key_width and width % alignment == value_width % alignment == 0
    if query.dtype in (*HALF, torch.float32) and is_aligned and same_heads:
        return SDPBackend.EFFICIENT_ATTENTION
    return SDPBackend.MATH


def workspace_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """What an attention kernel of a GPU allocates and frees inside, at most: sums in fp32, statistics by row, and the
    gradients of keys and values that several heads share, head by head. The backward of a softmax multiplies result and
    gradient there first."""
    if func is aten._softmax_backward_data.default:
        return int(args[0].numel() * args[0].element_size()) if _entered.on_gpu and _entered.on_gpu[-1] else 0
    if func is aten._scaled_dot_product_flash_attention_backward.default:
        query, key, value = args[1:4]
        sums = _rows(query) * query.shape[-1]
        shared = 0 if query.shape[1] == key.shape[1] else _of_all_heads(query, key) + _of_all_heads(query, value)
        return 4 * (sums + _rows(query)) + shared * query.element_size()
    if func is aten._scaled_dot_product_efficient_attention_backward.default:
        grad, query, key, value = args[:4]
        if query.dtype is torch.float32:  # its sums are the gradients; the product of result and gradient
            return int(4 * (grad.numel() + _rows(query)))
        return int(4 * (_rows(query) * (1 + query.shape[-1]) + key.numel() + value.numel()))
    return 0


def _rows(query: Tensor) -> int:
    return query.shape[0] * query.shape[1] * (-(-query.shape[2] // ROWS) * ROWS)


def _of_all_heads(query: Tensor, part: Tensor) -> int:
    return part.numel() // part.shape[1] * query.shape[1]
