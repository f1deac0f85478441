"""The baseline: what a good engineer writes in plain PyTorch when everything fits the GPU.

bf16 parameters, fp32 master, moments and gradient sums, fused AdamW, compiled blocks (with the checkpoint inside the
compiled function, so that recomputation skips the last projection), and the loss in chunks, so that logits never exist
for more than `LOSS_TOKENS` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from shapes import layers_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LOSS_TOKENS = 4096


class Checkpointed(nn.Module):
    """A block that keeps only its inputs for backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def prepare_blocks(model: nn.Module, *, recompute: bool, compile: bool) -> None:
    layers = layers_of(model)
    for index, layer in enumerate(layers):
        if recompute:
            layers[index] = Checkpointed(layer)
        if compile:
            layers[index].compile(dynamic=False)


def _loss_sum(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


@dataclass
class MasterAdamW:
    """fp32 master weights beside bf16 parameters. Gradients are summed in fp32 as soon as backward has made them."""

    params: list[nn.Parameter]
    lr: float
    clip: float | None = None
    masters: list[Tensor] = field(init=False)
    fresh: list[bool] = field(init=False)  # the next gradient is the first of the step

    def __post_init__(self) -> None:
        self.masters = [param.detach().float().clone() for param in self.params]
        for index, (param, master) in enumerate(zip(self.params, self.masters, strict=True)):
            master.grad = torch.zeros_like(master)
            param.register_post_accumulate_grad_hook(lambda param, index=index: self._take(param, index))
        self.fresh = [True] * len(self.params)
        self.optimizer = torch.optim.AdamW(self.masters, lr=self.lr, fused=True)

    def _take(self, param: Tensor, index: int) -> None:
        total = self.masters[index].grad
        if self.fresh[index]:
            total.copy_(param.grad)
        else:
            total.add_(param.grad)
        self.fresh[index] = False
        param.grad = None

    def step(self) -> None:
        assert not any(self.fresh), "a parameter got no gradient; AdamW would step on the sum of the last step"
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters)
        self.fresh = [True] * len(self.params)


class Resident:
    """One training step over micro-batches; `step` returns the loss as a tensor and never waits for the GPU."""

    def __init__(
        self, model: nn.Module, *, micro_batch: int, lr: float, clip: float | None, recompute: bool, compile: bool
    ) -> None:
        self.model, self.micro_batch = model, micro_batch
        self.device = next(model.parameters()).device
        prepare_blocks(model, recompute=recompute, compile=compile)
        self.loss_sum = torch.compile(_loss_sum, dynamic=False) if compile else _loss_sum
        self.optimizer = MasterAdamW(list(model.parameters()), lr, clip)

    def step(self, tokens: Tensor) -> Tensor:
        tokens = tokens.to(self.device, non_blocking=True)
        num_predicted = tokens.shape[0] * (tokens.shape[1] - 1)
        losses = [self._micro_step(part, num_predicted) for part in tokens.split(self.micro_batch)]
        self.optimizer.step()
        return torch.stack(losses).sum()

    def _micro_step(self, tokens: Tensor, num_predicted: int) -> Tensor:
        hidden = self.model.base_model(input_ids=tokens).last_hidden_state
        # The last position predicts nothing; ignoring it keeps all chunks equal, for the compiler and for alignment.
        labels = F.pad(tokens[:, 1:], (0, 1), value=-100).reshape(-1)
        rows = hidden.detach().reshape(len(labels), -1)
        weight = self.model.get_output_embeddings().weight
        grad, loss = torch.empty_like(rows), torch.zeros((), device=self.device)
        for start in range(0, len(rows), LOSS_TOKENS):
            at = slice(start, start + LOSS_TOKENS)
            part = rows[at].requires_grad_()
            part_loss = self.loss_sum(part, weight, labels[at]) / num_predicted
            part_loss.backward()
            grad[at] = part.grad
            loss += part_loss.detach()
        hidden.backward(grad.view_as(hidden))
        return loss
