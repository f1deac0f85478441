"""Recurrent layers on tensors without values: what their kernels keep for backward, which torch tells of values only.

[Note: recurrent kernels] nn.LSTM is one operation of oneDNN on the CPU, whose workspace has a size that only oneDNN
knows: it is asked, by running the layer on a few real tokens. On a GPU all recurrent layers are one operation of cuDNN
each, with a reserve of which no version without a GPU tells the size. There a layer is counted as its products: gates
from inputs, gates from states, and their gradients; kept is what the formulas of backward read of each token, as
numbers of the width of a layer (RESERVED). cuDNN also wants all weights in one piece, which they are not where they
lie in chunks: they are copied for each call, and kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten
WORKSPACE = 3  # among the results of the operation
ASKED_TOKENS = (32, 64)
ROUNDED_BYTES = 8 * 4096  # a workspace consists of a few arrays, each rounded up to pages
GATES = {torch.lstm: 4, torch.gru: 3, torch.rnn_tanh: 1, torch.rnn_relu: 1}
# Per token, layer and direction: the gates; states before and after, what the next layer reads and its dropout's mask;
# of an LSTM two of cells, of a GRU the candidate's part of the states.
RESERVED = {torch.lstm: 10, torch.gru: 8, torch.rnn_tanh: 4, torch.rnn_relu: 4}


def onednn_workspace_bytes(args: Sequence[Any]) -> int:
    """Of `mkldnn_rnn_layer` with these arguments. See [Note: recurrent kernels]."""
    num_tokens = args[0].shape[0]
    if num_tokens <= ASKED_TOKENS[1]:
        return _asked(args, num_tokens)
    few, more = (_asked(args, tokens) for tokens in ASKED_TOKENS)
    per_token = -(-(more - few + ROUNDED_BYTES) // (ASKED_TOKENS[1] - ASKED_TOKENS[0]))
    return more + per_token * (num_tokens - ASKED_TOKENS[1])


def _asked(args: Sequence[Any], num_tokens: int) -> int:
    def real(tensor: Tensor, shape: Sequence[int]) -> Tensor:
        return torch.zeros(shape, dtype=tensor.dtype)

    with _disable_current_modes():  # there is a workspace only where gradients are on: as they are now
        inputs = real(args[0], (num_tokens, *args[0].shape[1:]))
        others = [real(arg, arg.shape) if isinstance(arg, Tensor) else arg for arg in args[1:]]
        workspace: Tensor | None = aten.mkldnn_rnn_layer.default(inputs, *others)[WORKSPACE]
        return 0 if workspace is None else workspace.nbytes


def is_unreal(args: Sequence[Any]) -> bool:
    """Whether the weights, which come in a list, have no values."""
    lists = [arg for arg in args if isinstance(arg, list | tuple)]
    return any(isinstance(part, FakeTensor) for each in lists for part in each)


def recur(func: Any, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """As torch.lstm and the like, on a GPU. `args`: of a batch, or of a packed sequence."""
    if isinstance(args[3], bool):
        inputs, states, weights, has_biases, num_layers, _, _, bidirectional, _ = args
    else:
        inputs, _, states, weights, has_biases, num_layers, _, _, bidirectional = args
    states = list(states) if isinstance(states, tuple | list) else [states]
    num_directions = 2 if bidirectional else 1
    per_layer = len(weights) // (num_layers * num_directions)
    width = weights[1].shape[0] // GATES[func]
    projects = per_layer == (5 if has_biases else 3)  # to a narrower state
    narrow = weights[per_layer - 1].shape[0] if projects else width
    shape = (*inputs.shape[:-1], num_directions * narrow)
    reserved = RESERVED[func] * num_layers * num_directions * width
    result: Tensor
    result, *after = _Recurrent.apply(shape, reserved, per_layer, inputs, *states, *weights)
    return result, *after[: len(states)]


class _Recurrent(torch.autograd.Function):
    """Allocates, and multiplies, what cuDNN does."""

    @staticmethod
    def forward(
        ctx: Any, shape: tuple[int, ...], reserved: int, per_layer: int, inputs: Tensor, *others: Tensor
    ) -> tuple[Tensor, ...]:
        rows = inputs.shape[:-1].numel()
        states = [other for other in others if other.ndim == 3]
        weights = others[len(states) :]
        without_values = weights[0].new_empty
        packed = without_values(sum(weight.numel() for weight in weights))
        result, after = without_values(shape), [without_values(state.shape) for state in states]
        for at in range(0, len(weights), per_layer):
            _gates(rows, weights[at : at + 2])
        ctx.per_layer = per_layer
        ctx.num_states = len(states)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(inputs, result, packed, without_values(rows * reserved), *states, *weights)
        return result, *after

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, _, packed, _, *others = ctx.saved_tensors
        rows = inputs.shape[:-1].numel()
        states, weights = others[: ctx.num_states], others[ctx.num_states :]
        packed_grads = torch.empty_like(packed)
        for at in range(0, len(weights), ctx.per_layer):
            gates = _gates(rows, weights[at : at + 2])
            for weight in weights[at : at + 2]:
                below = gates @ weight
                torch.mm(gates.t(), below)
                del below
        made = [packed.new_empty(part.shape) for part in (inputs, *states, *weights)]
        del packed_grads
        wanted = ctx.needs_input_grad[3:]
        return None, None, None, *(part if needs else None for part, needs in zip(made, wanted, strict=True))


def _gates(rows: int, weights: Sequence[Tensor]) -> Tensor:
    """Of all tokens of one layer: from what it reads, and from its states."""
    of_inputs, of_states = (weight.new_empty(rows, weight.shape[1]) @ weight.t() for weight in weights)
    return of_inputs.add_(of_states)
