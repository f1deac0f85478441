"""The output projection of a language model, as the fused loss sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from hightide.ir.action import Op
from hightide.planner.loss_tiles import loss_scratch_bytes
from hightide.runtime.blocks.block_function import BlockRunner
from hightide.runtime.chunks.absent import Disabled


class HeadCall:
    """The head's side of a fused projection and loss (see runtime/head/fused_loss.py): one call, forward and
    backward."""

    def __init__(self, runner: BlockRunner, module: nn.Module) -> None:
        self._runner = runner
        self._module = module
        self._call: int | None = None
        plan, profile = runner.run.plan, runner.run.profile
        self._kept_tokens = plan.loss_kept_tokens
        self._in_forward = plan.loss_in_forward
        self.tile_tokens = plan.loss_tile_tokens
        self.scratch_bytes = loss_scratch_bytes(profile, plan.loss_tile_tokens)
        self.plain_linear = module if runner.spec.plain_linear and isinstance(module, nn.Linear) else None
        self.num_classes = profile.vocabulary
        self.anchor = runner.anchor

    @property
    def version(self) -> tuple[int, ...]:
        """Logits that are evaluated late must not use newer weights than their call: updated, or written to by the user
        where they stay on the GPU. Another plan counts updates afresh."""
        self._runner.check_plan(self._module)
        with Disabled():  # parameters may be absent
            written = [param._version for param in self._module.parameters()]
        return self._runner.version, *written

    def claim_kept_tokens(self) -> int:
        claimed, self._kept_tokens = self._kept_tokens, 0
        return claimed

    def claim_forward(self) -> bool:
        claimed, self._in_forward = self._in_forward, False
        return claimed

    def project(self, rows: Tensor) -> Tensor:
        result: Tensor = self._runner.original(self._module, rows)
        return result

    @contextmanager
    def forward_hold(self) -> Iterator[None]:
        run, block = self._runner.run, self._runner.index
        self._runner.check_parameters()
        run.ensure_pass(block)
        with run.tick(Op.FORWARD, block) as tick:
            self._call = tick.call
            yield

    def backward_hold(self, accumulate: bool) -> AbstractContextManager[Any]:
        self._runner.run.queue_end_of_backward()
        return self._runner.run.tick(Op.BACKWARD, self._runner.index, self._call, accumulate)

    def will_accumulate(self) -> bool:
        return self._runner.will_accumulate()

    def materialise(self, hidden: Tensor) -> Tensor:
        self._runner.run.ensure_pass(self._runner.index)
        result: Tensor = self._runner.with_grad(self._module, (hidden,), {})
        return result
