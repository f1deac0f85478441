"""What modules and other objects keep, compared with what it was: in C as far as possible, a microsecond per module.

It is followed through attributes, lists, dicts and plain objects. Another object in the place of one is a change, equal
or not: what is in it could change later. Tensors are compared by who they are and how often they were written to.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hightide.profiler.trial.state import version

MAX_DEPTH = 6  # of objects in objects
MOST_VALUES = 2_000  # looked at each time; what is further away than these is not followed
PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_PLAIN_TYPES = frozenset(PLAIN)
_FOREIGN = frozenset({"torch", "logging", "threading", "random", "numpy"})  # objects of these are not followed
_Place = Any  # a dict, list, deque, set or tuple, or what is in a class


class Contents:
    def __init__(
        self,
        roots: Iterable[_Place],
        without: Mapping[int, Collection[str]] | None = None,
        closed: Collection[int] = (),
    ) -> None:
        """`without`: keys that do not count, by the id of their dict. `closed`: ids of what is not followed."""
        self._places: list[_Place] = []
        self._then: list[_Place] = []  # copies of them
        self._links: list[tuple[_Place, Any, Any]] = []  # a place, a key, and the object there that is followed
        self._singly: list[_Singly] = []
        self._gather(roots, without or {}, set(closed))
        self._keys = [_key(then) for then in self._then]

    def _gather(self, roots: Iterable[_Place], without: Mapping[int, Collection[str]], seen: set[int]) -> None:
        queue = deque((root, 0) for root in roots)
        seen |= {id(root) for root, _ in queue}
        num_values = 0
        while queue:
            place, depth = queue.popleft()
            num_values += len(place)
            if depth and num_values > MOST_VALUES:
                return
            entries = _entries(place)
            if id(place) in without or isinstance(place, Hidden) or any(_is_written_to(value) for _, value in entries):
                self._singly.append(_Singly(place, without.get(id(place), ())))
            elif not isinstance(place, tuple):
                self._places.append(place)
                self._then.append(_copied(place))
            for key, value in entries:
                inner = _inside(value) if depth < MAX_DEPTH else None
                if inner is None or id(value) in seen:
                    continue
                seen.add(id(value))
                queue.append((inner, depth + 1))
                if not isinstance(place, set | tuple):
                    self._links.append((place, key, value))

    def are_same(self) -> bool:
        try:
            return (
                self._places == self._then
                and all(place[key] is value for place, key, value in self._links)
                and all(one.is_same() for one in self._singly)
            )
        except Exception:  # something is gone, or does not compare with what has taken its place
            return False

    def with_other_numbers(self) -> Contents | None:
        """How it is now, if only plain values have changed. None: more has."""
        changed = [at for at, place in enumerate(self._places) if not _equal(place, self._then[at])]
        for at in changed:
            now, then = (dict(_entries(one)) for one in (self._places[at], self._then[at]))
            if now.keys() != then.keys():
                return None
            if not all(value is then[key] or (_is_plain(value) and _is_plain(then[key])) for key, value in now.items()):
                return None
        other = copy.copy(self)
        other._then, other._keys = [*self._then], [*self._keys]
        for at in changed:
            other._then[at] = _copied(self._places[at])
            other._keys[at] = _key(other._then[at])
        return other if other.are_same() else None

    def key(self) -> tuple[Any, ...]:
        """Two are equal if plain values are equal and all objects are the same."""
        return *self._keys, *(one.key for one in self._singly)

    def tensors(self) -> list[Tensor]:
        values = (value for one in self._singly for value in one.values().values())
        return [value for value in values if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Inside, all values are what they were, but for tensors."""
        pairs = list(zip(self._places, self._then, strict=True))
        pairs += [(one.place, one.then()) for one in self._singly if isinstance(one.place, dict)]
        changed = [
            (place, then, _copied(place))
            for place, then in pairs
            if isinstance(place, dict | list) and not _same_values(place, then)
        ]
        for place, then, _ in changed:
            _fill(place, then)
        try:
            yield
        finally:
            for place, _, now in changed:
                _fill(place, now)


class _Singly:
    """A place with tensors in it, which are not kept alive: its values are compared one by one."""

    def __init__(self, place: _Place, without: Collection[str]) -> None:
        self.place, self._without = place, without
        values = self.values()
        self._then = {key: _Value(value) for key, value in values.items()}
        self.key = tuple(map(_token, values.values()))

    def values(self) -> dict[Any, Any]:
        return {key: value for key, value in _entries(self.place) if key not in self._without}

    def is_same(self) -> bool:
        now = self.values()
        return now.keys() == self._then.keys() and all(one.is_still(now[key]) for key, one in self._then.items())

    def then(self) -> dict[Any, Any]:
        """Tensors, and what does not count, as they are now."""
        kept = {key: one.value for key, one in self._then.items() if not one.is_tensor}
        stay = {key for key, one in self._then.items() if one.is_tensor}.union(self._without)
        now = {key: value for key, value in _entries(self.place) if key in stay}
        return now | kept


class _Value:
    def __init__(self, value: Any) -> None:
        self.is_tensor = isinstance(value, Tensor)
        self.value = weakref.ref(value) if self.is_tensor else value
        self._written = _written(value)

    def is_still(self, value: Any) -> bool:
        if self.is_tensor:
            return self.value() is value and _written(value) == self._written
        if value is self.value:
            return self._written is None or _written(value) == self._written
        return type(value) is type(self.value) and _is_plain(value) and bool(value == self.value)


class Hidden:
    """Values that are in no dict of their own: variables of a closure, slots of an object, a few globals."""

    def __init__(self, readers: Sequence[Callable[[], Any]]) -> None:
        self._readers = readers

    def __len__(self) -> int:
        return len(self._readers)

    def __getitem__(self, index: int) -> Any:
        try:
            return self._readers[index]()
        except (AttributeError, KeyError, ValueError):  # nothing is there yet
            return None


def _written(value: Any) -> Any:
    """What tells that it was written to. None: nothing does, or every update does."""
    if isinstance(value, Tensor):
        address = value.data_ptr() if type(value) is Tensor else 0  # `buffer.data = ...` is not counted
        return None if isinstance(value, nn.Parameter) else (version(value), address)
    return value.tobytes() if _is_array(value) and value.size <= MOST_VALUES else None


def _is_written_to(value: Any) -> bool:
    return isinstance(value, Tensor) or _is_array(value)


def _is_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN_TYPES or isinstance(value, PLAIN)


def _key(place: _Place) -> tuple[Any, ...]:
    return tuple(_token(value) for _, value in _entries(place))


def _token(value: Any) -> Any:
    return value if _is_plain(value) else (type(value), id(value), _written(value))


def _equal(one: Any, two: Any) -> bool:
    try:
        return bool(one == two)
    except Exception:  # arrays and tensors do not compare so
        return False


def _entries(place: _Place) -> list[tuple[Any, Any]]:
    if isinstance(place, Mapping):
        return list(place.items())
    return [(key, place[key]) for key in range(len(place))] if isinstance(place, Hidden) else list(enumerate(place))


def _copied(place: _Place) -> _Place:
    return dict(place) if isinstance(place, dict | MappingProxyType) else place.copy()


def _same_values(one: Any, two: Any) -> bool:
    found, expected = _entries(one), _entries(two)
    return len(found) == len(expected) and all(
        a == c and b is d for (a, b), (c, d) in zip(found, expected, strict=True)
    )


def _fill(place: Any, values: Any) -> None:
    if isinstance(place, list):
        place[:] = values
        return
    for key in [key for key in place if key not in values]:
        del place[key]
    for key, value in values.items():
        if key not in place or place[key] is not value:
            place[key] = value


def _inside(value: Any) -> _Place | None:
    """What is to be followed of a value."""
    if _is_plain(value) or _is_written_to(value) or isinstance(value, type | ModuleType):
        return None
    if isinstance(value, nn.Module):  # none of the block's: of all that hangs on it only numbers count
        kept = vars(value)
        return Hidden([partial(kept.__getitem__, name) for name, one in kept.items() if _is_plain(one)])
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        return Hidden([partial(getattr, cell, "cell_contents") for cell in cells]) if cells else None
    if isinstance(value, dict | list | deque | set | tuple):
        return value or None
    if type(value).__module__.partition(".")[0] in _FOREIGN:
        return None
    there = getattr(value, "__dict__", None)
    if isinstance(there, dict) and there:
        return there
    names = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ())]
    return Hidden([partial(getattr, value, name) for name in names]) if names else None
