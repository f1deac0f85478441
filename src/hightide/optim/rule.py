"""What an optimizer does to a range of elements, apart from where the range lies and when it happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from hightide.optim.adamw import AdamWRule
from hightide.optim.operands import Operands


class Rule(Protocol):
    """One optimizer's arithmetic. Its hyper-parameters are a frozen dataclass of the rule's own type, read at step(): a
    deferred update runs when a scheduler may already have changed the group."""

    @property
    def name(self) -> str: ...

    @property
    def optimizer(self) -> type[torch.optim.Optimizer]: ...

    @property
    def moment_names(self) -> tuple[str, ...]:
        """What the plain optimizer calls its states, in the order in which `update` takes them."""

    @property
    def num_moments(self) -> int:
        """fp32 arrays per element beside the parameter."""

    def check(self, group: Mapping[str, Any]) -> None:
        """ValueError for an option of the group that this rule does not know."""

    def read(self, group: Mapping[str, Any]) -> Any:
        """The group's hyper-parameters of this moment, by value."""

    def update(
        self,
        operands: Operands,
        step: int,
        hyper: Any,
        scale: float | Tensor = 1.0,
        scratch: Tensor | None = None,
    ) -> None:
        """Updates ranges in place with `grad * scale` by torch's operations, on any device; `step` counts from 1.
        `scratch`: fp32 elements to work in, which is as much as it works on at a time; without it the rule allocates
        them."""

    def kernel(self) -> Kernel | None:
        """The same arithmetic in C, for ranges on the host, if there is one and it can be used here."""


class Kernel(Protocol):
    def supports(self, grad: torch.dtype, param: torch.dtype | None) -> bool:
        """Whether it knows these dtypes. `param` None: the fp32 master is the parameter."""

    def share(self, operands: Operands, step: int, hyper: Any, scale: float, tile_numel: int) -> Callable[[int], None]:
        """One update as work for any number of threads at once: each calls it, with its own number, and takes tiles
        until none are left."""


_RULES: tuple[Rule, ...] = (AdamWRule(),)


def rule_for(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule of an optimizer, all of whose groups were checked. A subclass may do anything in its step: refused."""
    for rule in _RULES:
        if type(optimizer) is rule.optimizer:
            for group in optimizer.param_groups:
                rule.check(group)
            return rule
    supported = ", ".join(f"torch.optim.{rule.optimizer.__name__}" for rule in _RULES)
    kind = type(optimizer)
    raise ValueError(f"the optimizer {kind.__module__}.{kind.__qualname__} is not supported; use one of: {supported}")
