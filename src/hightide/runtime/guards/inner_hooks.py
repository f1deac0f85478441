"""Forward hooks of users on modules inside blocks: how often they are called.

A block runs once per micro-batch, and again where it is recomputed, and so do the hooks inside of it. (Hooks of the
block itself, and those that are taps, are called once, with the whole batch.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from hightide.profiler.model.hooks import HookWatch


class InnerHooks:
    """Of one block."""

    def __init__(self, block: nn.Module) -> None:
        self._inside = [module for module in block.modules() if module is not block]
        # Torch keeps these very objects as long as a module lives, so that a look at them is enough.
        self._hooks = [hooks for module in self._inside for hooks in (module._forward_pre_hooks, module._forward_hooks)]
        self.num_extra_calls = 0  # beyond those of plain PyTorch

    @property
    def are_there(self) -> bool:
        return any(self._hooks)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Inside, the block runs once more than it would in plain PyTorch."""
        with ExitStack() as handles:
            for module in self._inside:
                for hooks, register in (
                    (module._forward_pre_hooks, module.register_forward_pre_hook),
                    (module._forward_hooks, module.register_forward_hook),
                ):
                    num_hooks = sum(not isinstance(getattr(one, "__self__", None), HookWatch) for one in hooks.values())
                    if num_hooks:
                        handles.enter_context(register(self._counter(num_hooks), prepend=True))
            yield

    def _counter(self, num_hooks: int) -> Any:
        def count(*_: Any) -> None:
            self.num_extra_calls += num_hooks

        return count
