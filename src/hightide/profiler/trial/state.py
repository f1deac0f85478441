"""The state that modules keep between calls besides their parameters: buffers, attributes, and the state of random
generators.

A forward that runs once more than in plain PyTorch (a probe, a recomputation, a micro-batch) must not leave a trace of
it. `ModuleState` remembers what a module has, says what has changed since, and puts it back. It follows attributes into
lists, dicts, sets and plain objects. What a forward keeps elsewhere (a global, a closure, a file) nobody sees.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sized
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

INTERNAL = frozenset(nn.Module().__dict__) - {"training"}  # attributes that are torch's own
MAX_DEPTH = 6  # of objects in objects
MANY = 10_000  # entries: data, and no state
CLONED_NUMEL = 1 << 20  # a larger tensor in an attribute is replaced as a whole, or it is a buffer
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type, FunctionType, MethodType, BuiltinFunctionType)
_OPAQUE = (*_PLAIN, ModuleType, nn.Module, nn.Parameter, torch.dtype, torch.device, torch.Size)


class GlobalRandom:
    """The state of the generators that a whole process shares: torch's, Python's and numpy's."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self.states = self._read()  # by name

    def _read(self) -> dict[str, Any]:
        numpy_random: Any = sys.modules.get("numpy.random")  # not there: nobody has drawn from it
        states = {"torch": torch.get_rng_state(), "Python": random.getstate()}
        if numpy_random is not None:
            states["numpy"] = numpy_random.get_state()
        if self._device is not None:
            states["CUDA"] = torch.cuda.get_rng_state(self._device)
        return states

    def restore(self) -> None:
        self.restore_shared()
        self.restore_torch()

    def restore_shared(self) -> None:
        """All but torch's."""
        random.setstate(self.states["Python"])
        if "numpy" in self.states:
            sys.modules["numpy.random"].set_state(self.states["numpy"])

    def restore_torch(self) -> None:
        torch.set_rng_state(self.states["torch"])
        if self._device is not None:
            torch.cuda.set_rng_state(self.states["CUDA"], self._device)

    def seed(self, number: int) -> None:
        """Of torch's."""
        torch.default_generator.manual_seed(number)
        if self._device is not None:
            torch.cuda.default_generators[self._device.index or 0].manual_seed(number)

    def drawn(self) -> set[str]:
        """Whose numbers were drawn since."""
        now = self._read()
        return {name for name, state in self.states.items() if not _same(state, now[name])}


class ModuleState:
    """What a module and the modules inside of it have now. `buffers=False`: attributes only."""

    def __init__(
        self, module: nn.Module, *, buffers: bool = True, shared_random: bool = False, hooks: bool = False
    ) -> None:
        """`shared_random`: Python's and numpy's generators too. Torch's are not among it: see runtime/blocks/rng.py.
        `hooks`: what forward hooks inside remember in closures or in the objects whose methods they are."""
        seen: dict[int, Any] = {}
        self._hooks = list(_closures(module, seen)) if hooks else []
        self._kept: list[tuple[str, _Attributes]] = []
        for name, inside in module.named_modules():
            self._kept.append((name, _Attributes(inside.__dict__, lambda value: _keep(value, seen, 0), INTERNAL)))
            if buffers:
                self._kept.append((name, _Attributes(inside._buffers, partial(_KeptTensor, is_buffer=True))))
        self._random = GlobalRandom() if shared_random else None

    def changes(self) -> list[str]:
        """What is different now, by name."""
        changed = [f"{name}.{key}".removeprefix(".") for name, kept in self._kept for key in kept.changes()]
        if self._random is not None:
            changed += [f"{whose}'s random numbers" for whose in sorted(self._random.drawn() - {"torch"})]
        return changed

    def restore(self) -> None:
        for _, kept in self._kept:
            kept.restore()
        for hook in self._hooks:
            hook.restore()
        if self._random is not None:
            self._random.restore_shared()


def _closures(module: nn.Module, seen: dict[int, Any]) -> Iterator[_Kept]:
    for inside in module.modules():
        for hook in (*inside._forward_hooks.values(), *inside._forward_pre_hooks.values()):
            if isinstance(hook, MethodType):
                yield _keep(hook.__self__, seen, 0)
            for cell in getattr(hook, "__closure__", None) or ():
                yield _KeptCell(cell, seen)


def contents(module: nn.Module) -> dict[str, Any]:
    """All that a `ModuleState` sees, by value and by name, to be compared with `same_contents`."""
    seen: dict[int, Any] = {}  # by id, kept alive: another must not get the id of one
    found: dict[str, Any] = {}
    for name, inside in module.named_modules():
        kept = {key: value for key, value in inside.__dict__.items() if key not in INTERNAL}
        found[name] = {
            **_content(kept, seen, 0),
            **{key: _content(value, seen, 0) for key, value in inside._buffers.items()},
        }
    shared = GlobalRandom().states
    return {**found, "Python's random numbers": shared["Python"], "numpy's random numbers": shared.get("numpy")}


def same_contents(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return _same(one, two)


def _content(value: Any, seen: dict[int, Any], depth: int) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, _OPAQUE) or id(value) in seen or depth > MAX_DEPTH:
        return None
    seen[id(value)] = value
    if (state := _state_of(value)) is not None:
        return state[0](value)
    if isinstance(value, dict):
        return {key: _content(part, seen, depth + 1) for key, part in value.items()}
    if isinstance(value, list | deque | tuple):
        return [_content(part, seen, depth + 1) for part in value]
    if isinstance(value, set):
        return len(value)
    there = getattr(value, "__dict__", None)
    return _content(there or {name: getattr(value, name) for name in _slots(value)}, seen, depth + 1)


def _same_values(one: Tensor, two: Tensor) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if torch.equal(one, two):
        return True
    return one.is_floating_point() and bool(torch.allclose(one, two, rtol=0, atol=0, equal_nan=True))


def version(tensor: Tensor | None) -> int:
    """How often it was written to, where that is counted."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _write(target: Tensor, values: Tensor) -> None:
    """By `.data`: to graphs that have saved it, the tensor is what it was."""
    if target.shape == values.shape:
        target.data.copy_(values)
    else:  # it was resized
        target.data = values.clone()


class _Attributes:
    """The entries of a dict of attributes, or of any dict. Threads may write to it meanwhile."""

    def __init__(
        self, there: dict[Any, Any], keep: Callable[[Any], _Kept], without: frozenset[str] = frozenset()
    ) -> None:
        self._there = there
        self._without = without
        self._entries = {key: keep(value) for key, value in list(there.items()) if key not in without}

    def changes(self) -> Iterator[str]:
        there = dict(self._there.items())
        for key in self._entries.keys() | (there.keys() - self._without):
            if key not in self._entries or key not in there or not self._entries[key].is_same(there[key]):
                yield str(key)

    def restore(self) -> None:
        for key in [key for key in list(self._there) if key not in self._entries and key not in self._without]:
            self._there.pop(key, None)
        for key, kept in self._entries.items():
            kept.restore()
            if self._there.get(key, self) is not kept.value:
                self._there[key] = kept.value


class _Kept:
    """A value that does not change itself: only another can take its place."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def is_same(self, now: Any) -> bool:
        if now is self.value:
            return True
        return type(now) is type(self.value) and isinstance(now, _PLAIN) and bool(now == self.value)

    def restore(self) -> None:
        """Nothing to do inside of it."""


class _KeptTensor(_Kept):
    """Of a buffer, written to is changed, also with what was there: another call may write something else. But batch
    normalisation writes its statistics past the count of writes."""

    def __init__(self, value: Tensor | None, is_buffer: bool = False) -> None:
        super().__init__(value)
        self._is_buffer = is_buffer
        self._version = version(value)
        self._values: Tensor | None = None
        if value is not None and not value.is_meta and not isinstance(value, FakeTensor):
            self._values = value.detach().clone() if is_buffer or value.numel() <= CLONED_NUMEL else None

    def is_same(self, now: Any) -> bool:
        if now is not self.value:
            return False
        if self._values is None:
            return self._is_buffer or version(now) == self._version
        is_written = self._is_buffer and version(now) != self._version
        return not is_written and _same_values(self._values, now)

    def restore(self) -> None:
        if self._values is not None:  # its version does not tell: what `_write` writes has none
            _write(self.value, self._values)


class _KeptCell(_Kept):
    """A variable of a closure."""

    def __init__(self, cell: CellType, seen: dict[int, Any]) -> None:
        super().__init__(cell)
        self._inside = _keep(cell.cell_contents, seen, 0)

    def restore(self) -> None:
        self._inside.restore()
        self.value.cell_contents = self._inside.value


class _KeptState(_Kept):
    """An object whose state can be read and set as a whole: a random generator, an array."""

    def __init__(self, value: Any, read: Callable[[Any], Any], write: Callable[[Any, Any], None]) -> None:
        super().__init__(value)
        self._read, self._write = read, write
        self._state = read(value)

    def is_same(self, now: Any) -> bool:
        return now is self.value and _same(self._state, self._read(now))

    def restore(self) -> None:
        self._write(self.value, self._state)


class _KeptContainer(_Kept):
    """A list, deque, set or tuple: what is in it, in its order. Another tuple of the same is the same."""

    def __init__(self, value: Any, seen: dict[int, Any], depth: int) -> None:
        super().__init__(value)
        self._parts = [_keep(part, seen, depth) for part in list(value)]

    def is_same(self, now: Any) -> bool:
        is_one = type(now) is type(self.value) if isinstance(self.value, tuple) else now is self.value
        if not is_one or len(now) != len(self._parts):
            return False
        if isinstance(now, set):
            return all(kept.value in now for kept in self._parts)
        return all(kept.is_same(part) for kept, part in zip(self._parts, list(now), strict=False))

    def restore(self) -> None:
        for kept in self._parts:
            kept.restore()
        if len(self.value) == len(self._parts) and all(
            part is kept.value for part, kept in zip(list(self.value), self._parts, strict=False)
        ):
            return
        self.value.clear()
        values = [kept.value for kept in self._parts]
        self.value.update(values) if isinstance(self.value, set) else self.value.extend(values)


class _KeptObject(_Kept):
    """An object with attributes, or a dict."""

    def __init__(self, value: Any, there: dict[Any, Any], seen: dict[int, Any], depth: int) -> None:
        super().__init__(value)
        self._inside = _Attributes(there, lambda value: _keep(value, seen, depth))

    def is_same(self, now: Any) -> bool:
        return now is self.value and next(self._inside.changes(), None) is None

    def restore(self) -> None:
        self._inside.restore()


def _keep(value: Any, seen: dict[int, Any], depth: int) -> _Kept:
    """`seen` has each object once: attributes may lead in circles."""
    if isinstance(value, _OPAQUE):
        return _Kept(value)
    if id(value) in seen:
        return _Kept(value)
    seen[id(value)] = value  # it must live: another object could get its id
    if isinstance(value, Tensor):
        return _KeptTensor(value)
    if (state := _state_of(value)) is not None:
        return _KeptState(value, *state)
    if depth >= MAX_DEPTH or (isinstance(value, Sized) and len(value) > MANY):
        return _Kept(value)
    if isinstance(value, list | deque | set | tuple):
        return _KeptContainer(value, seen, depth + 1)
    if isinstance(value, dict):
        return _KeptObject(value, value, seen, depth + 1)
    there = getattr(value, "__dict__", None)
    if isinstance(there, dict):
        return _KeptObject(value, there, seen, depth + 1)
    return _KeptSlots(value, seen, depth + 1) if _slots(value) else _Kept(value)


def _slots(value: Any) -> list[str]:
    """Names of the attributes of an object without a dict."""
    names = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ())]
    return [name for name in names if hasattr(value, name)] if type(value).__module__ != "builtins" else []


class _KeptSlots(_Kept):
    def __init__(self, value: Any, seen: dict[int, Any], depth: int) -> None:
        super().__init__(value)
        self._parts = {name: _keep(getattr(value, name), seen, depth) for name in _slots(value)}

    def is_same(self, now: Any) -> bool:
        return now is self.value and all(kept.is_same(getattr(now, name, None)) for name, kept in self._parts.items())

    def restore(self) -> None:
        for name, kept in self._parts.items():
            kept.restore()
            if getattr(self.value, name, None) is not kept.value:
                object.__setattr__(self.value, name, kept.value)


def _state_of(value: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]] | None:
    """How to read and to set the state of something that has one as a whole."""
    if isinstance(value, torch.Generator):
        return lambda one: one.get_state(), lambda one, state: one.set_state(state)
    if isinstance(value, random.Random):
        return lambda one: one.getstate(), lambda one, state: one.setstate(state)
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray):
        return lambda one: one.copy(), lambda one, state: one.__setitem__(..., state)
    if isinstance(value, numpy.random.RandomState):
        return lambda one: one.get_state(), lambda one, state: one.set_state(state)
    if isinstance(value, numpy.random.Generator):
        return lambda one: one.bit_generator.state, lambda one, state: setattr(one.bit_generator, "state", state)
    return None


def _same(one: Any, two: Any) -> bool:
    """Of states of generators and arrays, which hold tensors and arrays inside."""
    if type(one) is not type(two):
        return False
    if isinstance(one, Tensor):
        return _same_values(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    if isinstance(one, tuple | list):
        if set(map(type, one)) == set(map(type, two)) == {int}:  # the hundreds of numbers of a generator
            return bool(one == two)
        return len(one) == len(two) and all(_same(a, b) for a, b in zip(one, two, strict=True))
    if hasattr(one, "dtype"):
        return one.shape == two.shape and one.dtype == two.dtype and one.tobytes() == two.tobytes()
    return bool(one == two)
