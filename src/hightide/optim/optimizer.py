"""The optimizer that `wrap` returns: the user's own, by type, groups and state layout, whose step happens in chunks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hightide.ir.plan import Update
from hightide.ir.refusal import Refused
from hightide.optim.chunk_updates import ChunkUpdates
from hightide.optim.groups import Groups
from hightide.optim.registry import rule_for
from hightide.optim.rule import Rule
from hightide.optim.states.own_keys import (
    add_masters,
    asks_to_place,
    is_nothing_to_place,
    nothing_to_place,
    take_masters,
)
from hightide.optim.states.state_mapping import StateOf, States
from hightide.process.interrupts import deferred, uninterrupted
from hightide.process.system import return_freed_memory
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of


class WrappedOptimizer(torch.optim.Optimizer):
    """Mixed into a subclass of the user's optimizer class. What users change is what updates follow: options of groups,
    which parameters are in which group, states. Schedulers that were made before wrapping hold the original, and go on
    working: its list of groups is this one's."""

    _home: Run
    rule: Rule
    _groups: Groups
    updates: ChunkUpdates
    _states: States
    _original: torch.optim.Optimizer
    _former: FormerStates
    _refuses: RemovableHandle | None = None  # steps of the original
    _packed: dict[Tensor, dict[str, Any]] | None = None  # while a state dict is made

    @property
    def _run(self) -> Run:
        self._home.birthplace.check()
        return self._home

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._original.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._original.param_groups = groups

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[Tensor, Any]:
        """See States."""
        return self._states if self._packed is None else self._packed

    @state.setter
    def state(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        if states is not self._states:
            self._states = self._states.succeeded_by(states)

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with uninterrupted:  # it is done or not done, whatever interrupts it
            if self._run.plan.update is Update.IN_BACKWARD:
                self.updates.check_promise()
                if self._run.executor.promises.has_gradients:
                    self._run.gradients.refuse_dropped(self.updates.used)
            try:
                self.updates.follow()
                self._run.step()
            finally:
                self.updates.end_step()
            self._original._opt_called = True  # type: ignore[attr-defined]  # for schedulers made before wrapping
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # or torch hooks it once more when a state is loaded

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Updates that were issued by step() still read their gradients; this only ends the gradients' visible life."""
        with uninterrupted:
            if set_to_none or self._run.plan.update is Update.IN_BACKWARD:
                self._run.gradients.drop(self._groups.now())
                return
            for param in self._params():
                if param.grad is not None:
                    param.grad.zero_()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the gradients of all the optimizer's parameters by their global norm, exactly; returns the norm."""
        if self._run.plan.update is Update.IN_BACKWARD:
            raise Refused(
                "clip_grad_norm_ after update='in_backward': the updates have run already, unclipped. Wrap with "
                "update='deferred' (the default) to clip."
            )
        with uninterrupted:
            return torch.nn.utils.clip_grad_norm_(self._params(), max_norm, norm_type)

    def state_dict(self) -> dict[str, Any]:
        """In the layout of the plain optimizer, with copies of the states of all parameters that are in a group. Of
        several ranks all must call it, and the first gets them; the others get an empty one."""
        if asks_to_place(sys._getframe(1)):
            return nothing_to_place()
        with deferred:
            return self._saved()

    def _saved(self) -> dict[str, Any]:
        self._run.check_values()
        self._groups.now()
        # Torch reads `self.state` between the user's own hooks, which see and change the states themselves.
        begin = self.register_state_dict_pre_hook(_pack)
        try:
            with begin, self.register_state_dict_post_hook(_unpack, prepend=True):
                saved = super().state_dict()
        finally:
            self._packed = None
        saved = add_masters(saved, self._run, self._params(), self.updates.masters_differ)
        return saved if self._run.gets_whole else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of a plain optimizer or of a wrapped one. Moments are taken as they are: torch would round them to the
        parameters' dtype."""
        if not is_nothing_to_place(state_dict):
            with uninterrupted:
                self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        given: dict[str, Any] = {}

        def take(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            """What the user's own hooks have left; nothing has changed yet."""
            self.updates.refuse_if_issued("a state of the optimizer is loaded")
            self._run.secure()
            for group in state_dict["param_groups"]:
                self.rule.check(group)
            self._states.check(self._states_by_key(state_dict))
            given.update(state_dict)
            return {**state_dict, "state": {}}

        def fill(_: Any) -> None:
            self._states.fill(self._states_by_key(given))
            if take_masters(given, self._run, self._params()):
                self.updates.masters_differ = True

        begin, end = self.register_load_state_dict_pre_hook, self.register_load_state_dict_post_hook
        with begin(take), end(fill, prepend=True):
            super().load_state_dict(state_dict)

    # -- for checkpoints ------------------------------------------------------------------------------------------

    @property
    def others(self) -> dict[str, dict[str, Any]]:
        """What lies beside the states of the rule, and all of a parameter that has no room for states."""
        return self._states.others

    def check_renewal(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Whether `renew` may be called with these: nothing has changed if it raises."""
        self.updates.refuse_if_issued("a checkpoint is loaded")
        for group, its in zip(self.param_groups, options, strict=True):
            self.rule.check({**group, **its})

    def renew(
        self,
        options: Sequence[Mapping[str, Any]],
        counts: Mapping[str, int],
        others: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Everything but the values of states, which somebody else writes to their places: options of each group, how
        many updates each parameter has had, and what lies beside its states."""
        self._states.renew(counts, others)
        for group, its in zip(self.param_groups, options, strict=True):
            group.update(its)
        self.updates.masters_differ = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Torch's would put states and groups beside the true ones."""
        for name in ("param_groups", "state"):
            if name in state:
                setattr(self, name, state[name])
        rest = {name: value for name, value in state.items() if name not in ("param_groups", "state")}
        if self._home.between is None:
            super().__setstate__(rest)
            return
        self._packed = {}  # it looks at states, of which there are none: they are filled when it is through
        try:
            super().__setstate__(rest)
        finally:
            self._packed = None

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise Refused(
            "a wrapped optimizer cannot be copied: its states live in hightide's chunks. Copy the values with "
            "copy.deepcopy(optimizer.state_dict()), or copy the optimizer before hightide.wrap"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise Refused(
            "a wrapped optimizer cannot be pickled: its states live in hightide's chunks. Save optimizer.state_dict(), "
            "and load it into an optimizer that was wrapped in the same way"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Of parameters that were in a group when the model was wrapped, and are in none now."""
        super().add_param_group(param_group)
        try:
            self._groups.now()
        except Refused:
            del self.param_groups[-1]
            raise

    def give_back(self) -> None:
        """The states, to the original: this one is of no use any more."""
        if self._refuses is not None:
            self._refuses.remove()
        self._former.give_back(self._states)

    def _params(self) -> list[Tensor]:
        return list(GroupedParams(self._original))

    def _states_by_key(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Torch compares the numbers of parameters."""
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        keys = [self._run.keys[id(param)] for param in self._params()]
        states = state_dict["state"]
        return {key: states[index] for index, key in zip(indices, keys, strict=False) if index in states}


@dataclass(frozen=True)
class GroupedParams:
    """The parameters of all groups, as they are whenever this is iterated over."""

    original: torch.optim.Optimizer

    def __iter__(self) -> Iterator[Tensor]:
        return (param for group in self.original.param_groups for param in group["params"])


def _pack(optimizer: Any) -> None:
    optimizer._packed = optimizer._states.copied()


def _unpack(optimizer: Any, state_dict: dict[str, Any]) -> None:
    optimizer._packed = None


def _refuse_steps(original: torch.optim.Optimizer, run: Run) -> RemovableHandle:
    """Of the original: it has no states any more, and where parameters are always on the GPU nothing else would stop
    it. A hook, because a scheduler that was made before wrapping has put its own step on the original; hooks are shared
    with the wrapped optimizer, and nobody takes this one away when the model is unwrapped."""
    home = weakref.ref(run)

    def refuse(optimizer: Any, *_: Any) -> None:
        run = home()
        if optimizer is original and run is not None and run_of(run.model) is run:
            raise Refused(
                "step() of the optimizer that was passed to hightide.wrap: its states have moved. Call step() of the "
                "optimizer that hightide.wrap returned"
            )

    return original.register_step_pre_hook(refuse)


def wrap_optimizer(original: torch.optim.Optimizer, run: Run) -> WrappedOptimizer:
    """If it fails, the original is as it was."""
    rule = rule_for(original)
    body = {"__module__": type(original).__module__, "__qualname__": type(original).__qualname__}
    cls = type(type(original).__name__, (WrappedOptimizer, type(original)), body)
    wrapped: WrappedOptimizer = object.__new__(cls)
    # A scheduler has put its own step on the original; groups are the original's; states move into chunks; a
    # GradScaler must unscale p.grad itself.
    patched = {"step", "param_groups", "state", "_step_supports_amp_scaling"}
    wrapped.__dict__.update({name: value for name, value in vars(original).items() if name not in patched})
    wrapped._home, wrapped.rule, wrapped._original = run, rule, original
    wrapped._groups = Groups(original, rule, run)
    wrapped.updates = ChunkUpdates(
        rule, wrapped._groups, run.chunks, run.gradients, run.lanes.update_threads, run.await_states, run.acts
    )
    wrapped._states = States(run, rule, wrapped.updates, GroupedParams(original))
    run.performer.updating.updates = wrapped.updates
    run.options = wrapped._groups.options
    wrapped._former = FormerStates(original, run.keys, tuple(state.name for state in rule.states))
    try:
        wrapped._states.check(wrapped._former.here)
        wrapped._states.fill(wrapped._former.here)
        wrapped._refuses = _refuse_steps(original, run)
    except BaseException:
        wrapped.give_back()
        raise
    return_freed_memory()
    return wrapped


class FormerStates:
    """States on their way into chunks, and back again if they do not get there."""

    def __init__(self, original: torch.optim.Optimizer, keys: Mapping[int, str], moment_names: Sequence[str]) -> None:
        """Takes the states out of the optimizer: whoever moves them takes them out of `here`."""
        self._original = original
        self._order = [(param, keys[id(param)]) for param in original.state]
        self._moment_names = moment_names
        self._like = {  # of what moves: an empty tensor of its dtype, where it was; the rest itself
            key: {name: self._without_values(name, value) for name, value in original.state[param].items()}
            for param, key in self._order
        }
        self.here: dict[str, Any] = {key: original.state.pop(param) for param, key in self._order}

    def give_back(self, moved: States) -> None:
        """What is not here any more has moved."""
        for param, key in self._order:
            self._original.state[param] = self.here[key] if key in self.here else self._copied(key, moved[param])

    def _without_values(self, name: str, value: Any) -> Any:
        return value.new_empty(0) if name in self._moment_names and isinstance(value, Tensor) else value

    def _copied(self, key: str, state: StateOf) -> dict[str, Any]:
        copied, like = state.copied(), self._like[key]
        moved = {name: copied[name].to(like[name]) for name in self._moment_names if name in copied}
        return {**like, **moved}
