"""Contents of modules and other objects, compared with what they were: in C as far as possible, a microsecond per
module.

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
from torch.overrides import TorchFunctionMode

from hightide.profiler.trial.state import version

MAX_DEPTH = 6  # of objects in objects
MOST_VALUES = 2_000  # looked at each time; what is further away than these is not followed
PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_PLAIN_TYPES = frozenset(PLAIN)
# Objects of these are not followed: kernels of Triton have caches that grow with their calls.
_FOREIGN = frozenset({"torch", "logging", "threading", "random", "numpy", "triton"})
_NOTHING = object()
_Place = Any  # a dict, list, deque, set or tuple, or what is in a class


class ObjectContents:
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
        queue = deque(_Node(root, partial(_given, root), 0) for root in roots)
        seen |= {id(node.place) for node in queue}
        nodes: list[_Node] = []
        num_values = 0
        while queue:
            node = queue.popleft()
            place, depth = node.place, node.depth
            if depth and num_values + len(place) > MOST_VALUES:
                continue
            num_values += len(place) if depth else 0
            try:
                node.entries = _entries(place)
            except Exception:  # of a class of its own, which does not tell
                continue
            nodes.append(node)
            for key, value in node.entries:
                inner = _followed(value) if depth < MAX_DEPTH else None
                if inner is None or id(value) in seen:
                    continue
                seen.add(id(value))
                queue.append(_Node(inner, partial(_found, node.find, key), depth + 1, value))
                if not isinstance(place, set | tuple):
                    node.links.append((key, value))
        lent = _leading_to_results(nodes)
        for node in nodes:
            self._note(node, without.get(id(node.place)), lent)

    def _note(self, node: _Node, without: Collection[str] | None, lent: Collection[int]) -> None:
        place, is_lent = node.place, id(node.value) in lent
        if (
            without is not None
            or is_lent
            or isinstance(place, Hidden)
            or any(_is_written_to(value) or id(value) in lent for _, value in node.entries)
        ):
            find = node.find if is_lent else partial(_given, place)
            self._singly.append(_Singly(find, node.entries, without or (), lent))
        elif not isinstance(place, tuple):
            self._places.append(place)
            self._then.append(_copied(place))
        self._links += [(place, key, value) for key, value in node.links if not is_lent and id(value) not in lent]

    def are_same(self) -> bool:
        try:
            if not _equal(self._places, self._then):
                return False
            for place, key, value in self._links:
                if place[key] is not value:
                    return False
            for one in self._singly:  # asked at each call of a block: without generators
                if not one.is_same():
                    return False
        except Exception:  # something is gone, or does not compare with what has taken its place
            return False
        return True

    def with_other_numbers(self) -> ObjectContents | None:
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
        """Inside, all values are what they were, but for tensors. What others change or append meanwhile, a hook or a
        thread, stays."""
        pairs = list(zip(self._places, self._then, strict=True))
        pairs += [(place, one.then()) for one in self._singly if isinstance(place := one.place(), dict)]
        changed = [
            (place, then, _copied(place))
            for place, then in pairs
            if isinstance(place, dict | list) and not _same_values(place, then)
        ]
        for place, then, now in changed:
            _exchange(place, now, then)
        try:
            yield
        finally:
            for place, then, now in changed:
                _exchange(place, then, now)


class _Node:
    """Of what is followed. `find` gets there from a root; `value`: what it is inside of."""

    def __init__(self, place: _Place, find: Callable[[], _Place], depth: int, value: Any = None) -> None:
        self.place, self.find, self.depth, self.value = place, find, depth, value
        self.entries: list[tuple[Any, Any]] = []
        self.links: list[tuple[Any, Any]] = []


def _given(place: _Place) -> _Place:
    return place


def _found(find: Callable[[], _Place], key: Any) -> _Place:
    return _inside(find()[key])


def _leading_to_results(nodes: Sequence[_Node]) -> set[int]:
    """Ids of values through which one gets to a tensor with a graph. Whoever kept these would keep the graph of the
    step before, and in it what this step compares: they are found again from a root each time."""
    new = [node for node in nodes if any(_is_result(value) for _, value in node.entries)]
    if not new:
        return set()
    holders: dict[int, list[_Node]] = {}
    for node in nodes:
        for _, value in node.entries:
            holders.setdefault(id(value), []).append(node)
    lent: set[int] = set()
    while new:
        node = new.pop()
        if node.depth and id(node.value) not in lent:
            lent.add(id(node.value))
            new += holders[id(node.value)]
    return lent


def _is_result(value: Any) -> bool:
    return issubclass(type(value), Tensor) and value.grad_fn is not None


class _Singly:
    """A place with tensors in it, which are not kept alive: its values are compared one by one."""

    def __init__(
        self,
        find: Callable[[], _Place],
        entries: Iterable[tuple[Any, Any]],
        without: Collection[str],
        lent: Collection[int],
    ) -> None:
        """`lent`: ids of what is not kept alive either."""
        self._find, self._without = find, without
        values = {key: value for key, value in entries if key not in without}
        self._then = {key: _Value(value, id(value) in lent) for key, value in values.items()}
        self.key = tuple(map(_token, values.values()))

    def place(self) -> _Place:
        """None: it is gone."""
        try:
            return self._find()
        except Exception:
            return None

    def values(self) -> dict[Any, Any]:
        place = self.place()
        entries = [] if place is None else _entries(place)
        return {key: value for key, value in entries if key not in self._without}

    def is_same(self) -> bool:
        now, then = self.values(), self._then
        if now.keys() != then.keys():
            return False
        for key, one in then.items():  # noqa: SIM110 (as above)
            if not one.is_still(now[key]):
                return False
        return True

    def then(self) -> dict[Any, Any]:
        """Tensors, and what does not count or is not kept, as they are now."""
        kept = {key: one.value for key, one in self._then.items() if not one.is_weak}
        stay = {key for key, one in self._then.items() if one.is_weak}.union(self._without)
        now = {key: value for key, value in _entries(self.place()) if key in stay}
        return now | kept


class _Value:
    def __init__(self, value: Any, is_lent: bool) -> None:
        self._is_tensor = issubclass(type(value), Tensor)
        self.is_weak = self._is_tensor or is_lent
        self._lent = (type(value), id(value)) if is_lent and not self._is_tensor else None
        self.value: Any = weakref.ref(value) if self._is_tensor else None if is_lent else value
        self._written = _written(value)

    def is_still(self, value: Any) -> bool:
        if self._lent is not None:
            return (type(value), id(value)) == self._lent
        if self._is_tensor:
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
        except Exception:  # nothing is there yet, or what a proxy stands for is gone
            return None


def _written(value: Any) -> Any:
    """What tells that it was written to. None: nothing does, or every update does."""
    if issubclass(type(value), Tensor):
        address = value.data_ptr() if type(value) is Tensor else 0  # `buffer.data = ...` is not counted
        return None if isinstance(value, nn.Parameter) else (version(value), address)
    return value.tobytes() if _is_array(value) and value.size <= MOST_VALUES else None


def _is_written_to(value: Any) -> bool:
    return issubclass(type(value), Tensor) or _is_array(value)  # nobody's `__class__` is asked: a proxy may load


def _is_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), numpy.ndarray)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN_TYPES or issubclass(type(value), PLAIN)


def _key(place: _Place) -> tuple[Any, ...]:
    return tuple(_token(value) for _, value in _entries(place))


def _token(value: Any) -> Any:
    is_key = _is_plain(value) and type(value).__hash__ is not None
    return value if is_key else (type(value), id(value), _written(value))


def _equal(one: Any, two: Any) -> bool:
    try:
        with _OTHERS:
            return bool(one == two)
    except Exception:  # arrays do not compare so
        return False


class _Others(TorchFunctionMode):
    """Inside, a tensor equals nothing but itself: one in the place of a number is a change, whatever its value, for
    which a comparison would wait, on a GPU at each call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return False


_OTHERS = _Others()


def _entries(place: _Place) -> list[tuple[Any, Any]]:
    if isinstance(place, Mapping):
        return list(place.items())
    return [(key, place[key]) for key in range(len(place))] if isinstance(place, Hidden) else list(enumerate(place))


def _copied(place: _Place) -> _Place:
    if isinstance(place, dict | MappingProxyType):
        return dict(place)
    return next(builtin for builtin in (list, deque, set) if isinstance(place, builtin))(place)


def _same_values(one: Any, two: Any) -> bool:
    found, expected = _entries(one), _entries(two)
    return len(found) == len(expected) and all(
        a == c and b is d for (a, b), (c, d) in zip(found, expected, strict=True)
    )


def _exchange(place: Any, there: Any, values: Any) -> None:
    """Puts `values` in the place of what is `there`, without an iteration that a thread could disturb."""
    if isinstance(place, list):
        place[: len(there)] = values
        return
    for key in {**there, **values}:
        old, new = there.get(key, _NOTHING), values.get(key, _NOTHING)
        if new is old or place.get(key, _NOTHING) is not old:
            continue
        if new is _NOTHING:
            del place[key]
        else:
            place[key] = new


def _followed(value: Any) -> _Place | None:
    """None, too, for an object that fails when it is asked: a proxy of what is gone, a lazy one."""
    try:
        inner = _inside(value)
        return inner if inner is not None and len(inner) else None
    except Exception:
        return None


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
        return value
    if type(value).__module__.partition(".")[0] in _FOREIGN:
        return None
    there = getattr(value, "__dict__", None)
    if isinstance(there, dict) and there:
        return there
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = [name for some in slots for name in ((some,) if isinstance(some, str) else some)]
    return Hidden([partial(getattr, value, name) for name in names]) if names else None
