"""The output projection of a language model, as the fused loss sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from hightide.ir.action import Op
from hightide.planner.loss_tiles import loss_scratch_bytes
from hightide.runtime.blocks.block_runner import BlockRunner
from hightide.runtime.chunks.absent import Disabled


class HeadCall:
    """The block that turns hidden rows into logits, as lazy logits and the fused loss use it: one call, forward and
    backward."""

    def __init__(self, runner: BlockRunner, module: nn.Module) -> None:
        self._runner = runner
        self._module = module
        self._call: int | None = None
        plan, profile = runner.run.plan, runner.run.profile
        self._kept_tokens = plan.loss_kept_tokens
        self._in_forward = plan.loss_in_forward
        self.tile_tokens = plan.loss_tile_tokens  # rows per projection
        # For the passes over a tile of rows, recorded operations included.
        self.scratch_bytes = loss_scratch_bytes(profile, plan.loss_tile_tokens)
        # The module, where `project` is an nn.Linear's forward and nothing more.
        self.plain_linear = module if runner.spec.plain_linear and isinstance(module, nn.Linear) else None
        self.num_classes = profile.vocabulary
        self.anchor = runner.anchor  # None where the head has no trainable parameters

    @property
    def version(self) -> tuple[int, ...]:
        """Logits that are evaluated late must not use newer weights than their call: updated, or written to by the user
        where they stay on the GPU. Another plan counts updates afresh."""
        self._runner.check_plan(self._module)
        with Disabled():  # parameters may be absent
            written = [param._version for param in self._module.parameters()]
        return self._runner.version, *written

    def claim_kept_tokens(self) -> int:
        """Rows whose logits may wait for backward: for the first loss that asks, so that memory is promised once."""
        claimed, self._kept_tokens = self._kept_tokens, 0
        return claimed

    def claim_forward(self) -> bool:
        """Whether gradients may be made in forward: likewise."""
        claimed, self._in_forward = self._in_forward, False
        return claimed

    def project(self, rows: Tensor) -> Tensor:
        """The module's own forward, of (tokens, hidden). Called only while held."""
        result: Tensor = self._runner.original(self._module, rows)
        return result

    @contextmanager
    def forward_hold(self) -> Iterator[None]:
        run, block = self._runner.run, self._runner.index
        self._runner.check_parameters()
        run.passes.ensure(block)
        with run.passes.tick(Op.FORWARD, block) as tick:
            self._call = tick.call
            yield

    def backward_hold(self, accumulate: bool) -> AbstractContextManager[Any]:
        """Inside, weights are leaves whose `.grad` autograd adds to; without `accumulate` nobody asks for those."""
        self._runner.run.passes.queue_end_of_backward()
        return self._runner.run.passes.tick(Op.BACKWARD, self._runner.index, self._call, accumulate)

    def will_accumulate(self) -> bool:
        return self._runner.will_accumulate()

    def materialise(self, hidden: Tensor) -> Tensor:
        """All logits at once, by the ordinary execution of a block, with autograd."""
        self._runner.run.passes.ensure(self._runner.index)
        result: Tensor = self._runner.with_grad(self._module, (hidden,), {})
        return result
