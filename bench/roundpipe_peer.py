"""RoundPipe as a peer of the benchmarks: blocks streamed, all states on the host, in fp32.

It is no dependency: whoever compares brings it along on PYTHONPATH. Its preset for Llama calls transformers by names of
arguments that are no more; here they are those of the version that is there.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn


class RoundPipe:
    """A model in RoundPipe. `is_stale`: its own default, an update that the next step does not see yet."""

    def __init__(self, model: nn.Module, num_micro_batches: int, lr: float, is_stale: bool) -> None:
        import roundpipe
        from roundpipe.models import llama
        from roundpipe.optim import Adam

        llama.create_causal_mask = _renamed(llama.create_causal_mask)
        config = roundpipe.RoundPipeRunConfig(num_microbatch=num_micro_batches)
        self._pipe: Any = roundpipe.wrap_model_to_roundpipe(
            model, use_sequential_preset=True, optim_dtype=torch.float32, model_run_config=config
        )
        self._adam = Adam(self._pipe.optim_parameters(), lr=lr, decoupled_weight_decay=True)
        self._num_micro_batches, self._is_stale = num_micro_batches, is_stale

    def step(self, tokens: Tensor) -> Tensor:
        """Returns the mean loss of the batch. The optimizer runs in a thread of RoundPipe's own."""
        loss = self._pipe.forward_backward(
            input_kwargs={"input_ids": tokens, "labels": tokens},
            loss_fn=lambda outputs, _: outputs.loss / self._num_micro_batches,
        )
        self._pipe.step(self._update, is_async=self._is_stale)
        return loss.detach()

    def _update(self) -> None:
        self._adam.step()
        self._adam.zero_grad()

    def wait(self) -> None:
        self._pipe.optim_updated.wait()


def _renamed(create_causal_mask: Any) -> Any:
    """`input_embeds` became `inputs_embeds`, and what a version does not take is left out."""
    taken = inspect.signature(create_causal_mask).parameters

    def called(**arguments: Any) -> Any:
        if "inputs_embeds" in taken and "input_embeds" in arguments:
            arguments["inputs_embeds"] = arguments.pop("input_embeds")
        return create_causal_mask(**{name: value for name, value in arguments.items() if name in taken})

    return called
