"""Which optimizers there are."""

from __future__ import annotations

import torch

from hightide.optim.adam import AdamRule, AdamWRule
from hightide.optim.rule import Rule
from hightide.optim.sgd import SGDRule

RULES: tuple[type[Rule], ...] = (AdamWRule, AdamRule, SGDRule)


def in_parts(rule: Rule, optimizer: torch.optim.Optimizer) -> bool:
    """Whether its updates on the host can write parameters first: see [Note: states later] in chunk_updates.py."""
    return rule.kernel() is not None and all(rule.has_parts(rule.read(group)) for group in optimizer.param_groups)


def rule_for(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule of an optimizer, all of whose groups were checked. A subclass may do anything in its step: refused."""
    for kind in RULES:
        if type(optimizer) is kind.optimizer:
            rule = kind.of(optimizer)
            for group in optimizer.param_groups:
                rule.check(group)
            return rule
    supported = ", ".join(f"torch.optim.{kind.optimizer.__name__}" for kind in RULES)
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    raise ValueError(
        f"the optimizer {name} is not supported; use one of: {supported}. Another update rule is one small file: its "
        "states and its arithmetic on a range of elements (docs/optimizers.md, 'Adding a rule')"
    )
