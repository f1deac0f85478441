"""`optimizer.state` of a wrapped optimizer: the plain optimizer's mapping, over states that lie in chunks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from hightide.ir.refusal import Refused
from hightide.ir.state_spec import StateSpec
from hightide.optim.chunk_updates import ChunkUpdates
from hightide.optim.rule import Rule
from hightide.planner.predict.moving_in import RETURN_BYTES
from hightide.process.interrupts import safe_point
from hightide.process.system import return_freed_memory
from hightide.runtime.chunks.homes import DTYPES
from hightide.runtime.run import Run

GONE = (
    "these states of the optimizer were deleted or replaced meanwhile. Take them from optimizer.state again, or keep a "
    "copy: copy.deepcopy(optimizer.state[p]) of one parameter's, optimizer.state_dict() of all"
)


class States(MutableMapping[Tensor, MutableMapping[str, Any]]):
    """Reads and writes like the plain optimizer's. Deleting a state makes the next update the parameter's first one; it
    changes nothing about a 16-bit parameter's master copy, of which plain PyTorch knows nothing.

    A moment is the very memory that updates work on (fp32, on the host or on the GPU, wherever the plan keeps it), and
    writing to it in place changes the state. Updates are awaited when it is taken from here, so take it again after
    each step(): one of before may be read or written in the middle of an update. A tensor that is assigned is copied
    in; it does not become the state."""

    def __init__(self, run: Run, rule: Rule, updates: ChunkUpdates, params: Iterable[Tensor]) -> None:
        """`params`: those of the optimizer's groups, each time it is iterated over."""
        self._run, self._rule, self._updates, self._params = run, rule, updates, params
        self._names = (*([] if rule.step_name is None else [rule.step_name]), *(state.name for state in rule.states))
        self._shown: dict[str, StateOf] = {}
        # What users have put beside the optimizer's own, and all of a parameter that has no room for states (frozen).
        self._others: dict[str, dict[str, Any]] = {}
        self._gone = False

    def __getitem__(self, param: Tensor) -> StateOf:
        """Without a state it is empty, and can be filled: the plain one is a defaultdict."""
        self._await_shown()
        key = self._run.keys.get(id(param))
        if key is None:
            what = f"shape {tuple(param.shape)}" if isinstance(param, Tensor) else repr(param)
            raise Refused(
                f"optimizer.state[...] of something that is no parameter of the wrapped model ({what}); keep what else "
                "you have in a dict of your own"
            )
        return self._shown.setdefault(key, StateOf(self, key))

    def __setitem__(self, param: Tensor, state: Mapping[str, Any]) -> None:
        key = self[param].key
        self.replace([key], {key: state})

    def __delitem__(self, param: Tensor) -> None:
        if param not in self:
            raise KeyError(param)
        self.replace([self[param].key], {})

    def __contains__(self, param: object) -> bool:
        self._await_shown()
        return self._has(self._run.keys.get(id(param)))

    def __iter__(self) -> Iterator[Tensor]:
        """In the order of the groups, then what is in no group any more."""
        self._await_shown()
        grouped = {self._run.keys[id(param)]: None for param in self._params if id(param) in self._run.keys}
        keys = [key for key in {**grouped, **self._run.parameters} if self._has(key)]
        return iter([self._run.parameters[key] for key in keys])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, param: Any, default: Any = None) -> Any:
        if param in self:
            return self[param]
        return default

    def setdefault(self, param: Tensor, default: Any = None) -> StateOf:
        if param not in self:
            self[param] = default or {}
        return self[param]

    def pop(self, param: Any, *default: Any) -> Any:
        """A copy of the state, which is then deleted."""
        if default and param not in self:
            return default[0]
        copied = self[param].copied()
        del self[param]
        return copied

    def clear(self) -> None:
        self.replace(self._run.parameters, {})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} states of the wrapped optimizer; their values: state_dict())"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise Refused("optimizer.state cannot be copied with its parameters; copy the values: optimizer.state_dict()")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise Refused("optimizer.state cannot be pickled with its parameters; save optimizer.state_dict()")

    # -- for the optimizer ----------------------------------------------------------------------------------------

    @property
    def others(self) -> dict[str, dict[str, Any]]:
        return self._others

    def await_updates(self, key: str | None = None, changes: bool = True) -> None:
        """Until no update of a parameter is under way; without `key` nothing is awaited. `changes`: who asks may write
        to them."""
        if self._gone:
            raise Refused(GONE)
        self._run.check_values()
        self._updates.refuse_if_issued("the optimizer's states are read or written")
        if key is not None:
            self._run.await_states(key, changes)

    def _await_shown(self) -> None:
        """Before the mapping itself is looked at: it is the memory of states, of which each rank has a part."""
        self._run.refuse_several(
            "optimizer.state", "optimizer.state_dict() on all ranks gives whole states on the first; load_state_dict()"
        )
        self.await_updates()

    def copied(self) -> dict[Tensor, dict[str, Any]]:
        """Of the parameters that are in groups, as for a state dict. Of several ranks the first gets them."""
        self.await_updates()
        copies: dict[Tensor, dict[str, Any]] = {}
        for param in self._params:
            safe_point()
            key = self._run.keys[id(param)]
            if key in self._updates.moments:
                self._run.await_states(key, changes=False)
            state = self.copied_state(key)
            if self._run.gets_whole and self._has(key):
                copies[param] = state
        return copies

    def copied_state(self, key: str) -> dict[str, Any]:
        """Of one parameter, with copies of the moments on the host: the GPU has no room for them."""
        moments, between, specs = self._updates.moments, self._run.between, self._rule.states
        state: dict[str, Any] = {}
        if key in moments:
            if self._rule.step_name is not None:
                state[self._rule.step_name] = torch.tensor(float(moments.count(key)))
            if between is None:
                state |= {spec.name: one.get() for spec, one in zip(specs, moments.of(key), strict=True)}
            else:
                state |= {spec.name: between.whole_state(key, spec) for spec in specs}
        return {**state, **self._others.get(key, {})}

    def succeeded_by(self, given: Mapping[Tensor, Mapping[str, Any]]) -> States:
        """`optimizer.state = given`. These are of no use any more."""
        self.replace(self._run.parameters, {self[param].key: state for param, state in given.items()})
        successor = States(self._run, self._rule, self._updates, self._params)
        successor._shown, successor._others = self._shown, self._others
        for shown in self._shown.values():
            shown.belongs_to(successor)
        self._gone = True
        return successor

    def replace(self, keys: Iterable[str], given: Mapping[str, Mapping[str, Any]]) -> None:
        """From now on these parameters have the states that are `given` for them, and the others of `keys` none."""
        self.await_updates()
        kept = {key for key, state in given.items() if state is self._shown.get(key)}
        taken = {key: _plain(state) for key, state in given.items() if key not in kept}
        self.check(taken)
        for key in keys:
            if key not in kept and self._has(key):
                self.await_updates(key)
                self._updates.moments.reset(key)
                self._others.pop(key, None)
            if key not in kept and (shown := self._shown.pop(key, None)) is not None:
                shown.belongs_to(None)
        self.fill(taken)

    def renew(self, counts: Mapping[str, int], others: Mapping[str, Mapping[str, Any]]) -> None:
        """From now on each parameter has had so many updates, or has no state. Somebody else writes the values of
        states to their places (inside Run.rewriting); `others` is what users have put beside them."""
        for key in self._run.parameters:
            if (shown := self._shown.pop(key, None)) is not None:
                shown.belongs_to(None)
            if self._has_room(key) and key in counts:
                self._updates.moments.renew(key, counts[key])
            else:
                self._updates.moments.reset(key)
        self._others = {key: dict(state) for key, state in others.items()}

    def check(self, given: Mapping[str, Mapping[str, Any]]) -> None:
        """ValueError for states that are not those of this optimizer's parameters."""
        for key, state in given.items():
            if _is_empty(state):
                continue
            if not self._names or not set(self._names) <= set(state):
                raise ValueError(
                    f"a state with {', '.join(map(repr, state))}, but this {self._rule.optimizer.__name__} has "
                    f"{', '.join(map(repr, sorted(self._names))) or 'none'}: it was saved by another optimizer, or "
                    "with other options"
                )
            for spec in self._rule.states:
                self._check_moment(key, spec, state[spec.name])

    def _check_moment(self, key: str, spec: StateSpec, value: Tensor) -> None:
        chunks = self._run.chunks
        shape = spec.shape(tuple(chunks.shapes[key]), chunks.places[key][1].numel)
        if tuple(value.shape) != shape:
            raise ValueError(
                f"the state {spec.name!r} of {key!r} has the shape {tuple(value.shape)}, the parameter {shape}; it was "
                "saved by the optimizer of another model, or of other groups"
            )
        dtype = DTYPES[spec.dtype]
        if not dtype.is_floating_point and value.dtype != dtype:
            raise ValueError(
                f"the state {spec.name!r} of {key!r} is {value.dtype}, this optimizer keeps codes in {dtype}: load "
                "a state that was saved as it is"
            )

    def fill(self, given: dict[str, Any]) -> None:
        """Moves plain states into the chunks, out of `given`: they never exist twice. There are none so far."""
        freed_bytes = 0
        moments = self._updates.moments
        for key in list(given):
            state = given[key]
            if _is_empty(state):
                del given[key]
                continue
            if not self._has_room(key):
                self._others[key] = dict(state)
                del given[key]
                continue
            moments.set_count(key, 1 if self._rule.step_name is None else float(state[self._rule.step_name]))
            for index, spec in enumerate(self._rule.states):
                if self._run.acts is not None:
                    self._run.acts.loads(f"what was loaded into {spec.name} of {key}", state[spec.name])
                moments.put(key, index, state[spec.name])
                freed_bytes += state[spec.name].nbytes
            if others := {name: value for name, value in state.items() if name not in self._names}:
                self._others[key] = others
            del state, given[key]  # not before it is copied
            if freed_bytes >= RETURN_BYTES:
                return_freed_memory()
                freed_bytes = 0

    def _has(self, key: str | None) -> bool:
        return key is not None and (key in self._updates.moments or key in self._others)

    def _index(self, name: str) -> int:
        return [state.name for state in self._rule.states].index(name)

    def _has_room(self, key: str) -> bool:
        return self._run.chunks.has_room(key)


class StateOf(MutableMapping[str, Any]):
    """One parameter's state; see States."""

    def __init__(self, states: States, key: str) -> None:
        self._states: States | None = states
        self.key = key

    def belongs_to(self, states: States | None) -> None:
        self._states = states

    def __getitem__(self, name: str) -> Any:
        states = self._at_rest()
        moments, rule = states._updates.moments, states._rule
        if self.key in moments and name == rule.step_name:
            return moments.counter(self.key)
        if self.key in moments and name in states._names:
            return moments.lend(self.key, states._index(name))
        return states._others.get(self.key, {})[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Fields may come one by one: what is missing is zero, as before a first update."""
        states = self._at_rest()
        moments, rule = states._updates.moments, states._rule
        if name not in states._names or not states._has_room(self.key):
            states._others.setdefault(self.key, {})[name] = value
        elif name == rule.step_name:
            moments.set_count(self.key, float(value))
        elif value is None:
            del self[name]
        else:
            states._check_moment(self.key, rule.states[states._index(name)], value)
            moments.set_count(self.key, max(moments.count(self.key), int(rule.step_name is None)))
            index = states._index(name)
            if value is not moments.lend(self.key, index):
                moments.of(self.key)[index].put(value)

    def __delitem__(self, name: str) -> None:
        states = self._at_rest()
        if name in states._names and self.key in states._updates.moments:
            if len(states._names) > 1:
                raise Refused(
                    f"{name!r} cannot be deleted from the state of {self.key!r} alone; delete the whole state: "
                    "optimizer.state.pop(p)"
                )
            states._updates.moments.reset(self.key)
        else:
            del states._others.get(self.key, {})[name]

    def __iter__(self) -> Iterator[str]:
        states = self._at_rest()
        own = states._names if self.key in states._updates.moments else ()
        return iter([*own, *states._others.get(self.key, ())])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        states = self._at_rest()
        states._updates.moments.reset(self.key)
        states._others.pop(self.key, None)

    def __repr__(self) -> str:
        return repr(dict(self))

    def copied(self) -> dict[str, Any]:
        """With copies of the moments, on the host."""
        return self._at_rest(changes=False).copied_state(self.key)

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return copy.deepcopy(self.copied(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copied(),)

    def _at_rest(self, changes: bool = True) -> States:
        if self._states is None:
            raise Refused(GONE)
        self._states.await_updates(self.key, changes)
        return self._states


def _plain(state: Mapping[str, Any]) -> Mapping[str, Any]:
    return state.copied() if isinstance(state, StateOf) else state


def _is_empty(state: Mapping[str, Any]) -> bool:
    return all(value is None for value in state.values())
