"""Counts every storage that is allocated while a dispatch mode is active, until the storage dies.

[Note: how storages are counted] A storage's Python object lives as long as the storage itself, however many tensors
and graphs share it, so one weak reference per storage tells when its bytes are free. The reference's callback may
fire in any thread and in the middle of anything (the garbage collector runs when it likes), so it does nothing but
append to a deque, which needs no lock and cannot fail. The ledger settles these deaths before it counts a birth and
before it answers a question, so live and peak bytes are exact.

Not seen: buffers that a kernel allocates and frees inside one operation, unless whoever meters says how many bytes
these are.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hightide.stores.left_alone import CAN_BE_LEFT_ALONE, leave_alone

DEFAULT_LABEL = "activations"

OnChange = Callable[[int, str], object]  # (delta_bytes, label)


class Event(NamedTuple):
    """A storage is born, or dies."""

    storage: int  # its number
    num_bytes: int  # negative: it dies


Inside = Callable[[Any, Sequence[Any], Mapping[str, Any]], int]  # of an operation and its arguments: bytes


_DEVICE = torch.ops.prim.device.default


def device_asked(func: Any, args: Any) -> torch.device | None:
    """The answer, where an operation is no more than autograd's question where a fake tensor lives. There are more of
    these than of all others together, and each would pass through every mode."""
    if func is _DEVICE and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
        return args[0].fake_device
    return None


class DispatchMode(TorchDispatchMode):
    """Torch wraps the code of every mode, so that torch.compile leaves it alone, which takes half as long as the way
    through the dispatcher does. Here the code itself is marked."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not CAN_BE_LEFT_ALONE

    def __init_subclass__(cls, **kwargs: Any) -> None:
        own: Any = cls.__dict__.get("__torch_dispatch__")
        super().__init_subclass__(**kwargs)
        if own is not None:
            leave_alone(own)


class _StorageRef(weakref.ref):
    """Weak reference to a storage, with what was counted for it."""

    __slots__ = ("key", "label", "num_bytes", "number")
    key: int
    number: int
    label: str
    num_bytes: int


class StorageLedger:
    """The storages that are alive and counted, for the meters of all threads. See [Note: how storages are counted]."""

    def __init__(
        self,
        on_change: OnChange | None = None,
        lock: threading.RLock | None = None,
        events: list[Event] | None = None,
    ) -> None:
        """`events`: where births and deaths are written down."""
        # A store that answers on_change passes its own lock: two locks taken in both orders would deadlock.
        self._lock = threading.RLock() if lock is None else lock
        self._on_change = on_change
        self._known: dict[int, _StorageRef] = {}
        self._dead: deque[_StorageRef] = deque()
        self._died = self._dead.append
        self._live_bytes = 0
        self._peak_bytes = 0
        self._events = events
        self._num_counted = 0

    @property
    def live_bytes(self) -> int:
        self.catch_up()
        return self._live_bytes

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    def knows(self, storage: torch.UntypedStorage) -> bool:
        ref = self._known.get(id(storage))
        return ref is not None and ref() is storage

    def count(self, storage: torch.UntypedStorage, label: str, num_bytes: int | None = None) -> None:
        """Counts a storage from now until it dies. A known one is only measured again: `out=` may have resized it."""
        key = id(storage)
        with self._lock:
            if self._dead:
                self.catch_up()
            ref = self._known.get(key)
            if ref is not None and ref() is storage:
                self._recount(ref, storage, num_bytes)
                return
            size = storage.nbytes() if num_bytes is None else num_bytes
            self._known[key] = ref = _StorageRef(storage, self._died)
            ref.key, ref.label, ref.num_bytes, ref.number = key, label, size, self._num_counted
            self._num_counted += 1
            if size:
                self._change(ref.number, size, label)

    def ignore(self, storage: torch.UntypedStorage) -> None:
        """Makes a storage known at no cost: somebody else counts it."""
        self.count(storage, "", num_bytes=0)

    def pass_by(self, num_bytes: int, label: str) -> None:
        """Something is there, and gone again."""
        with self._lock:
            self.catch_up()
            for delta_bytes in (num_bytes, -num_bytes):
                self._change(self._num_counted, delta_bytes, label)
            self._num_counted += 1

    def catch_up(self) -> None:
        """Takes the storages that have died off the books."""
        dead = self._dead
        if not dead:
            return
        with self._lock:
            while dead:  # whoever takes from it has the lock
                ref = dead.popleft()
                if self._known.get(ref.key) is ref:  # else the address already belongs to a younger storage
                    del self._known[ref.key]
                if ref.num_bytes:
                    self._change(ref.number, -ref.num_bytes, ref.label)

    def _recount(self, ref: _StorageRef, storage: torch.UntypedStorage, num_bytes: int | None) -> None:
        if ref.label == "":  # ignored: stays so
            return
        size = storage.nbytes() if num_bytes is None else num_bytes
        if size != ref.num_bytes:
            before, ref.num_bytes = ref.num_bytes, size
            if self._events is not None:
                self._events += [Event(ref.number, delta) for delta in (-before, size) if delta]
            self._change(None, size - before, ref.label)

    def _change(self, number: int | None, delta_bytes: int, label: str) -> None:
        """`number`: of the storage that is born or dies; None: that is written down."""
        if self._events is not None and number is not None:
            self._events.append(Event(number, delta_bytes))
        self._live_bytes += delta_bytes
        if self._live_bytes > self._peak_bytes:
            self._peak_bytes = self._live_bytes
        if self._on_change is not None:
            self._on_change(delta_bytes, label)


class AllocationMeter(DispatchMode):
    """Counts new storages of the thread that entered it, of real and of fake tensors (enter it inside the fake mode).

    An instance belongs to one thread; threads share a ledger. `on_change(delta_bytes, label)` may raise on growth: the
    exception leaves the operation that allocated. It must not raise on a negative delta. `inside` says what a kernel
    allocates and frees by itself.
    """

    def __init__(
        self,
        on_change: OnChange | None = None,
        label: str = DEFAULT_LABEL,
        ledger: StorageLedger | None = None,
        inside: Inside | None = None,
    ) -> None:
        super().__init__()
        assert on_change is None or ledger is None, "a shared ledger has its own on_change"
        self.events: list[Event] = []  # of a ledger of its own
        self.ledger = StorageLedger(on_change, events=self.events) if ledger is None else ledger
        self.label = label
        self._inside = inside

    @property
    def live_bytes(self) -> int:
        return self.ledger.live_bytes

    @property
    def peak_bytes(self) -> int:
        return self.ledger.peak_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and (device := device_asked(func, args)) is not None:
            return device
        out = func(*args, **kwargs) if kwargs else func(*args)
        if _look_of.get(id(func)) != _SKIP:
            self.saw(func, args, kwargs, out)
        return out

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """For another mode that calls it, instead of one more mode."""
        look = _look_of.get(id(func))
        if look is None:
            _looked_at.append(func)
            look = _look_of.setdefault(id(func), _classify(func))
        if look == _SKIP:
            return
        ledger = self.ledger
        for storage in _storages(out):
            if look == _FRESH or ledger.knows(storage) or not _is_input(storage, args, kwargs):
                ledger.count(storage, self.label)
        if self._inside is not None and (num_bytes := self._inside(func, args, kwargs or {})):
            self.ledger.pass_by(num_bytes, self.label)


# What an operation's outputs can be, by its schema.
_SKIP = 1  # only views of its inputs, or its inputs changed in place
_LOOK = 2  # new storages, or (composite operations, dropout in eval, _unsafe_view) an input's
_FRESH = 3  # annotated as a view, of a tensor that was made below the dispatcher: torch.tensor(...)

_look_of: dict[int, int] = {}  # by the operation's id: its hash is computed in Python, for each of thousands a step
_looked_at: list[Any] = []  # they live, so that no other has the id of one


def _classify(func: Any) -> int:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator
        return _LOOK
    if not any("Tensor" in str(result.type) for result in schema.returns):  # prim.device of a fake tensor, sizes
        return _SKIP
    if schema.name in ("aten::lift_fresh", "aten::lift"):
        return _FRESH
    resizes = any(argument.is_out for argument in schema.arguments) or schema.name.startswith("aten::resize")
    # Under inference_mode composites arrive whole: reshape is annotated as a view but copies when it must.
    if resizes or func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return _LOOK
    return _SKIP if all(result.alias_info is not None for result in schema.returns) else _LOOK


def _is_input(storage: torch.UntypedStorage, args: Any, kwargs: Any) -> bool:
    for arg in args:
        if isinstance(arg, torch.Tensor | list | tuple):
            for other in _storages(arg):
                if other is storage:
                    return True
    return bool(kwargs) and _is_input(storage, tuple(kwargs.values()), None)


def _storages(value: Any) -> Sequence[torch.UntypedStorage]:
    """The storages of a tensor, or of the tensors in nested lists. No generator: it runs several times an operation."""
    if isinstance(value, torch.Tensor):
        try:
            return (value.untyped_storage(),)
        except (NotImplementedError, RuntimeError):  # sparse and wrapper tensors have none of their own
            return ()
    if isinstance(value, list | tuple):
        return [storage for entry in value for storage in _storages(entry)]
    return ()
