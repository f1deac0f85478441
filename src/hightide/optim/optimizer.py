"""The optimizer that `wrap` returns: the user's own, by type, groups and state layout, whose step happens in chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hightide.ir.plan import Update
from hightide.machine import return_freed_memory
from hightide.optim.masters import add_masters, take_masters
from hightide.optim.registry import rule_for
from hightide.optim.rule import Rule
from hightide.optim.updates import ChunkUpdates
from hightide.runtime.chunks import RETURN_BYTES
from hightide.runtime.run import Run


class WrappedOptimizer(torch.optim.Optimizer):
    """Mixed into a subclass of the user's optimizer class. Shares the original's list of groups, so that schedulers
    that were made before wrapping go on working."""

    _run: Run
    _rule: Rule
    _updates: ChunkUpdates
    _original: torch.optim.Optimizer

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._run.plan.update is Update.IN_BACKWARD:
            self._check_promise()
        self._run.step()
        self._updates.used.clear()
        self._original._opt_called = True  # type: ignore[attr-defined]  # for schedulers made before wrapping
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Updates that were issued by step() still read their gradients; this only ends the gradients' visible life."""
        if set_to_none or self._run.plan.update is Update.IN_BACKWARD:
            self._run.gradients.drop(self._keys())
            return
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.zero_()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the gradients of all the optimizer's parameters by their global norm, exactly; returns the norm."""
        if self._run.plan.update is Update.IN_BACKWARD:
            raise RuntimeError(
                "clip_grad_norm_ after update='in_backward': the updates have run already, unclipped. Wrap with "
                "update='deferred' (the default) to clip."
            )
        params = [param for group in self.param_groups for param in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def state_dict(self) -> dict[str, Any]:
        """In the layout of the plain optimizer, with copies of the states."""
        self._run.check_values()
        self._run.executor.wait_for_updates()
        for group in self.param_groups:
            for param in group["params"]:
                key = self._run.keys[id(param)]
                if self._updates.num_steps[key]:
                    self.state[param] = self._state_of(key)
        try:
            return add_masters(super().state_dict(), self._run, self._params())
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of a plain optimizer or of a wrapped one. Moments are taken as they are: torch would round them to the
        parameters' dtype. Hooks see the groups only."""
        for group in state_dict["param_groups"]:
            self._rule.check(group)
        self._check_states(state_dict["state"].values())
        self._run.executor.wait_for_updates()
        shared = self.param_groups
        super().load_state_dict({**state_dict, "state": {}})
        shared[:] = self.param_groups
        self.param_groups = shared
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = self._params()
        states = state_dict["state"]
        for key in self._updates.num_steps:
            self._updates.reset(key)
        self._take_states({param: states[index] for index, param in zip(saved, params, strict=True) if index in states})
        take_masters(state_dict, self._run, params)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError(
            "a group cannot be added after hightide.wrap, which has packed the parameters by group; add it to the "
            "optimizer "
            "before wrapping"
        )

    def _state_of(self, key: str) -> dict[str, Tensor]:
        """One parameter's entry in the plain optimizer's state: on the host, the GPU has no room for copies."""
        moments = [moment.to("cpu", copy=True) for moment in self._updates.moments_of(key)]
        state = dict(zip(self._rule.moment_names, moments, strict=True))
        if self._rule.step_name is None:
            return state
        return {self._rule.step_name: torch.tensor(float(self._updates.num_steps[key])), **state}

    def _take_states(self, states: dict[Any, Any]) -> None:
        """Moves plain optimizer states into the chunks, out of `states`: they never exist twice."""
        names, step_name = self._rule.moment_names, self._rule.step_name
        self._check_states(states.values())
        freed_bytes = 0
        for param in list(states):
            state = states.pop(param)
            if _is_empty(state):
                continue
            key = self._run.keys[id(param)]
            self._updates.num_steps[key] = 1 if step_name is None else int(state[step_name])
            for place, name in zip(self._updates.moments_of(key), names, strict=True):
                if state[name].shape != place.shape:
                    raise ValueError(
                        f"the state {name!r} of {key!r} has the shape {tuple(state[name].shape)}, the parameter "
                        f"{tuple(place.shape)}; it was saved by the optimizer of another model, or of other groups"
                    )
                place.copy_(state[name])
                freed_bytes += place.nbytes
            del state
            if freed_bytes >= RETURN_BYTES:
                return_freed_memory()
                freed_bytes = 0

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _check_states(self, states: Iterable[Mapping[str, Any]]) -> None:
        step_name = self._rule.step_name
        wanted = {*self._rule.moment_names, *([] if step_name is None else [step_name])}
        for state in states:
            if not _is_empty(state) and (not wanted or not wanted <= set(state)):
                raise ValueError(
                    f"a state with {', '.join(map(repr, state))}, but this {type(self).__name__} has "
                    f"{', '.join(map(repr, sorted(wanted))) or 'none'}: it was saved by another optimizer, or with "
                    "other options"
                )

    def _keys(self) -> list[str]:
        return [self._run.keys[id(param)] for group in self.param_groups for param in group["params"]]

    def _check_promise(self) -> None:
        for group, used in self._updates.used.items():
            now = self._updates.hyper(group)
            if now != used:
                raise RuntimeError(
                    f"the hyper-parameters of group {group} changed between backward and step() (from {used} to "
                    f"{now}), but "
                    "this model was wrapped with update='in_backward': the updates have run already, with the old "
                    "ones. Change "
                    "them after step(), or wrap with update='deferred' (the default)."
                )


def _is_empty(state: Mapping[str, Any]) -> bool:
    return all(value is None for value in state.values())


def wrap_optimizer(original: torch.optim.Optimizer, run: Run) -> torch.optim.Optimizer:
    rule = rule_for(original)
    body = {"__module__": type(original).__module__, "__qualname__": type(original).__qualname__}
    cls = type(type(original).__name__, (WrappedOptimizer, type(original)), body)
    wrapped: WrappedOptimizer = object.__new__(cls)
    # A scheduler has put its own step on the original; states move into chunks; a GradScaler must unscale p.grad
    # itself.
    patched = {"step", "state", "_step_supports_amp_scaling"}
    wrapped.__dict__.update({name: value for name, value in vars(original).items() if name not in patched})
    wrapped.state = defaultdict(dict)
    wrapped._run, wrapped._rule, wrapped._original = run, rule, original
    groups = original.param_groups
    wrapped._updates = ChunkUpdates(run.profile, rule, groups, run.chunks, run.gradients, run.lanes.sharers)
    run.performer.updates = wrapped._updates
    wrapped._take_states(original.state)
    return_freed_memory()
    return wrapped
