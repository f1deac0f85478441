"""The optimizer's groups as they are now: schedulers change their options, users move parameters between them, take
them out and put them back."""

from __future__ import annotations

from typing import Any

import torch

from hightide.ir.refusal import Refused
from hightide.optim.rule import Rule
from hightide.runtime.run import Run

REMEDY = (
    "To train it, call hightide.unwrap(model), put it into a group of a plain optimizer over model.parameters(), and "
    "wrap both again"
)


class Groups:
    """The list is the original optimizer's, which a scheduler that was made before wrapping holds."""

    def __init__(self, original: torch.optim.Optimizer, rule: Rule, run: Run) -> None:
        self._original, self._rule, self._keys = original, rule, run.keys
        self._members: list[list[int]] = []  # of each group, when it was last looked at
        self._found: dict[str, int] = {}
        self._without_states = {spec.name for spec in run.profile.params if spec.trainable and spec.group is None}

    def hyper(self, group: int) -> Any:
        return self._rule.read(self._original.param_groups[group])

    def options(self) -> dict[str, str]:
        """What updates follow, of each group."""
        groups = range(len(self._original.param_groups))
        return {f"group {group} of the optimizer": repr(self.hyper(group)) for group in groups}

    def now(self) -> dict[str, int]:
        """The group of each parameter that is in one. What updates could not honour is refused."""
        for index, group in enumerate(self._original.param_groups):
            if (complaint := self._rule.complaint(group)) is not None:
                raise Refused(f"group {index} of the optimizer was changed after hightide.wrap: {complaint}")
        members = [list(map(id, group["params"])) for group in self._original.param_groups]
        if members != self._members:  # parameters of the model live as long as this
            self._found, self._members = self._look(), members
        return self._found

    def _look(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for index, group in enumerate(self._original.param_groups):
            for param in group["params"]:
                key = self._keys.get(id(param))
                if key is None:
                    raise Refused(
                        f"group {index} of the optimizer has a parameter of shape {tuple(param.shape)} that is none of "
                        f"the wrapped model. {REMEDY}, or give it an optimizer of its own"
                    )
                if key in self._without_states:
                    raise Refused(
                        f"{key!r} was put into group {index} of the optimizer after hightide.wrap, which has kept no "
                        f"room for its states. {REMEDY}"
                    )
                if key in found:
                    raise Refused(
                        f"{key!r} is in group {found[key]} of the optimizer and again in group {index}: each step "
                        "would update it twice. Take it out of one of them"
                    )
                found[key] = index
        return found
