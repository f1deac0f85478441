"""Anything that a user wants kept beside the model, as JSON and tensors: what schedulers, scalers and dataloaders give
as `state_dict()`. It comes back equal, types included: tuples, integer keys, infinities, numpy's numbers.

[Note: tagged values] What JSON has stays as it is. Everything else is a mapping of one key that begins with "$":
{"$tuple": [...]}, {"$tensor": "extra['mean']"} for a tensor of that name in the file beside, and so on. Mappings whose
keys are not plain text, or begin with "$" themselves, are {"$dict": [[key, value], ...]}. Long bytes and long lists of
numbers are kept as tensors too. Tensors come back on the CPU.

Nothing is run or imported by name when it is read: tags are those of the table below, dtypes those of numpy's numbers.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hightide.checkpoint.files.tensor_layout import DTYPE_NAMES
from hightide.ir.foreign import MAX_COUNT, QUOTED, quoted
from hightide.loading.tensor_file import MAX_DIMS

MAX_NESTING = 18  # a level may take three of those that files of JSON may have
LONG = 1024  # bytes, or numbers of a list, from which on they are a tensor
_NUMPY_KINDS = "biufc"
_MAX_INT_CHARS = 1 << 18
_OTHER_DTYPES = {  # those that files of tensors may not have: kept as bytes
    name: getattr(torch, name) for name in ("uint16", "uint32", "uint64", "complex64", "complex128")
}
_TAGS = {OrderedDict: "$ordered", Counter: "$counter", dict: "$dict"}
_SEQUENCE_TAGS: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset", torch.Size: "$size"}


def to_plain(value: object, where: str = "extra") -> tuple[Any, dict[str, Tensor]]:
    """Plain data for JSON, and the tensors that it names. ValueError for anything else in it, which names its place."""
    tensors: dict[str, Tensor] = {}
    return _Encoder(tensors).encode(value, where, 0), tensors


def from_plain(data: Any, tensors: Mapping[str, Tensor], where: str = "extra") -> Any:
    """What `to_plain` was given. ValueError for data that it cannot have made."""
    return _Decoder(tensors).decode(data, where)


class _Encoder:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def encode(self, value: Any, where: str, depth: int) -> Any:
        if depth > MAX_NESTING:
            raise ValueError(f"{_short(where)} is nested deeper than {MAX_NESTING} levels, or contains itself")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if abs(value) <= MAX_COUNT else self._big(value, where)
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind is str:
            return value if _is_unicode(value) else {"$text": value.encode("utf-16-le", "surrogatepass").hex()}
        if kind in (bytes, bytearray):
            return self._bytes(value, where)
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if kind in (dict, OrderedDict, Counter):
            return self._mapping(value, where, depth)
        if kind in (list, tuple, set, frozenset, torch.Size):
            return self._sequence(value, where, depth)
        return self._of_numpy(value, where)

    def _big(self, value: int, where: str) -> Any:
        if value.bit_length() > 4 * _MAX_INT_CHARS - 16:
            raise ValueError(f"{_short(where)} is an integer of {value.bit_length()} bits; keep it as bytes")
        return {"$int": hex(value)}

    def _bytes(self, value: bytes | bytearray, where: str) -> Any:
        tag = "$bytes" if isinstance(value, bytes) else "$bytearray"
        if len(value) < LONG:
            return {tag: base64.b64encode(value).decode()}
        return {tag: {"$tensor": self._keep(torch.frombuffer(bytearray(value), dtype=torch.uint8), where)}}

    def _mapping(self, value: dict[Any, Any], where: str, depth: int) -> Any:
        is_plain = all(type(key) is str and not key.startswith("$") and _is_unicode(key) for key in value)
        if is_plain and type(value) is dict:
            return {key: self.encode(entry, f"{where}[{key!r}]", depth + 1) for key, entry in value.items()}
        pairs = [
            [self._key(key, where), self.encode(entry, f"{where}[{quoted(key)}]", depth + 1)]
            for key, entry in value.items()
        ]
        return {_TAGS[type(value)]: pairs}

    def _key(self, key: Any, where: str) -> Any:
        if isinstance(key, Tensor):
            raise ValueError(f"{_short(where)} has a tensor as a key; use text or numbers")
        return self.encode(key, f"key {quoted(key)} of {where}", MAX_NESTING - 2)

    def _sequence(self, value: Any, where: str, depth: int) -> Any:
        kind = type(value)
        if kind in (list, tuple) and len(value) >= LONG:
            for number, dtype in ((int, torch.int64), (float, torch.float64)):
                if all(type(entry) is number for entry in value) and (number is float or _fits(value)):
                    name = self._keep(torch.tensor(value, dtype=dtype), where)
                    return {"$numbers" if kind is list else "$tuple of numbers": {"$tensor": name}}
        if kind in (set, frozenset):
            entries = [self._key(entry, where) for entry in value]
        else:
            entries = [self.encode(entry, f"{where}[{index}]", depth + 1) for index, entry in enumerate(value)]
        if kind is list:
            return entries
        return {_SEQUENCE_TAGS[kind]: entries}

    def _of_numpy(self, value: Any, where: str) -> Any:
        numpy = sys.modules.get("numpy")  # who has something of it has imported it
        if numpy is not None and type(value) is numpy.ndarray:
            _check_numpy(value.dtype, where)
            flat = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.size else _no_bytes()
            return {"$array": [value.dtype.str, list(value.shape), self._keep(flat, where)]}
        if numpy is not None and isinstance(value, numpy.generic):
            _check_numpy(value.dtype, where)
            return {"$number": [value.dtype.str, value.tobytes().hex()]}
        raise ValueError(
            f"{_short(where)} is {_what(value)}; give text, numbers, bytes, tensors or arrays, and lists, tuples and "
            "dictionaries of them"
        )

    def _tensor(self, value: Tensor, where: str) -> Any:
        if value.layout != torch.strided or value.is_quantized or value.is_nested or value.device.type == "meta":
            raise ValueError(
                f"{_short(where)} is a tensor without plain values of its own ({value.layout}); give dense ones"
            )
        value = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if value.dtype in DTYPE_NAMES:
            return {"$tensor": self._keep(value, where)}
        name = str(value.dtype).removeprefix("torch.")
        if name not in _OTHER_DTYPES:
            raise ValueError(f"{_short(where)} is a tensor of {name}; give one of a common dtype")
        return {"$raw": [name, list(value.shape), self._keep(value.view(-1).view(torch.uint8), where)]}

    def _keep(self, value: Tensor, where: str) -> str:
        """Under a name that tells where it was."""
        name = where if where not in self._tensors and len(where) <= QUOTED else f"tensor {len(self._tensors)}"
        self._tensors[name] = value
        return name


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._tags: dict[str, Callable[[Any, str], Any]] = {
            "$int": self._int,
            "$float": self._float,
            "$text": self._text,
            "$bytes": self._bytes,
            "$bytearray": lambda data, where: bytearray(self._bytes(data, where)),
            "$tensor": self._tensor,
            "$raw": self._raw,
            "$numbers": self._numbers,
            "$tuple of numbers": lambda data, where: tuple(self._numbers(data, where)),
            "$tuple": lambda data, where: tuple(self._list(data, where)),
            "$set": lambda data, where: _hashed(set, self._list(data, where), where),
            "$frozenset": lambda data, where: _hashed(frozenset, self._list(data, where), where),
            "$size": self._size,
            "$dict": self._pairs,
            "$ordered": lambda data, where: OrderedDict(self._pairs(data, where)),
            "$counter": lambda data, where: Counter(self._pairs(data, where)),
            "$array": self._array,
            "$number": self._number,
        }

    def decode(self, data: Any, where: str) -> Any:
        if isinstance(data, list):
            return self._list(data, where)
        if not isinstance(data, dict):
            return data
        tag = next(iter(data), "")
        if not tag.startswith("$"):
            return {key: self.decode(entry, f"{where}[{key!r}]") for key, entry in data.items()}
        if len(data) != 1 or tag not in self._tags:
            raise _damaged(where, data)
        return self._tags[tag](data[tag], where)

    def _list(self, data: Any, where: str) -> list[Any]:
        if not isinstance(data, list):
            raise _damaged(where, data)
        return [self.decode(entry, f"{where}[{index}]") for index, entry in enumerate(data)]

    def _pairs(self, data: Any, where: str) -> dict[Any, Any]:
        pairs = self._list(data, where)
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise _damaged(where, data)
        return _hashed(dict, pairs, where)

    def _int(self, data: Any, where: str) -> int:
        try:
            if isinstance(data, str) and len(data) <= _MAX_INT_CHARS:
                return int(data, 16)
        except ValueError:
            pass
        raise _damaged(where, data)

    def _float(self, data: Any, where: str) -> float:
        if data not in ("inf", "-inf", "nan"):
            raise _damaged(where, data)
        return float(data)

    def _text(self, data: Any, where: str) -> str:
        try:
            return bytes.fromhex(data).decode("utf-16-le", "surrogatepass")
        except (TypeError, ValueError):
            raise _damaged(where, data) from None

    def _bytes(self, data: Any, where: str) -> bytes:
        if isinstance(data, dict):
            return self._memory(data, where)
        try:
            return base64.b64decode(data, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise _damaged(where, data) from None

    def _tensor(self, data: Any, where: str) -> Tensor:
        if not isinstance(data, str) or data not in self._tensors:
            raise ValueError(f"{_short(where)} is a tensor {quoted(data)} that is not in the file; it is damaged")
        return self._tensors[data]

    def _raw(self, data: Any, where: str) -> Tensor:
        """Of a dtype that files of tensors do not have."""
        kind, shape, memory = self._shaped(data, where)
        dtype = _OTHER_DTYPES.get(kind) if isinstance(kind, str) else None
        if dtype is None or math.prod(shape) * dtype.itemsize != len(memory):
            raise _damaged(where, data)
        flat = torch.frombuffer(bytearray(memory), dtype=torch.uint8) if memory else _no_bytes()
        return flat.view(dtype).view(shape)

    def _shaped(self, data: Any, where: str) -> tuple[Any, list[int], bytes]:
        if not isinstance(data, list) or len(data) != 3 or not isinstance(data[1], list):
            raise _damaged(where, data)
        kind, shape, name = data
        if len(shape) > MAX_DIMS or not all(type(size) is int and 0 <= size <= MAX_COUNT for size in shape):
            raise _damaged(where, data)
        return kind, shape, self._memory({"$tensor": name}, where)

    def _memory(self, data: Any, where: str) -> bytes:
        """That a tensor of bytes holds for something else."""
        value = self.decode(data, where)
        if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.ndim != 1:
            raise _damaged(where, data)
        value = value.contiguous()
        return ctypes.string_at(value.data_ptr(), value.nbytes) if value.nbytes else b""

    def _numbers(self, data: Any, where: str) -> list[Any]:
        value = self.decode(data, where)
        if not isinstance(value, Tensor) or value.ndim != 1 or value.dtype not in (torch.int64, torch.float64):
            raise _damaged(where, data)
        return value.tolist()

    def _size(self, data: Any, where: str) -> torch.Size:
        sizes = self._list(data, where)
        if not all(type(size) is int and abs(size) <= MAX_COUNT for size in sizes):
            raise _damaged(where, data)
        return torch.Size(sizes)

    def _array(self, data: Any, where: str) -> Any:
        kind, shape, memory = self._shaped(data, where)
        dtype = _numpy_dtype(kind, where)
        if math.prod(shape) * dtype.itemsize != len(memory):
            raise _damaged(where, data)
        import numpy

        return numpy.frombuffer(bytearray(memory), dtype=dtype).reshape(shape)

    def _number(self, data: Any, where: str) -> Any:
        import numpy

        if not isinstance(data, list) or len(data) != 2:
            raise _damaged(where, data)
        dtype = _numpy_dtype(data[0], where)
        try:
            memory = bytes.fromhex(data[1])
        except (TypeError, ValueError):
            raise _damaged(where, data) from None
        if len(memory) != dtype.itemsize:
            raise _damaged(where, data)
        return numpy.frombuffer(memory, dtype=dtype)[0]


def _numpy_dtype(text: Any, where: str) -> Any:
    try:
        import numpy
    except ImportError as error:
        raise ValueError(f"{_short(where)} is of numpy, which is not installed: pip install numpy") from error
    if not isinstance(text, str) or len(text) > 4 or text[:1] not in "<>=|" or text[1:2] not in _NUMPY_KINDS:
        raise _damaged(where, text)
    try:
        return numpy.dtype(text)
    except TypeError:
        raise _damaged(where, text) from None


def _check_numpy(dtype: Any, where: str) -> None:
    if dtype.kind not in _NUMPY_KINDS or dtype.itemsize > 16 or len(dtype.str) > 4:
        raise ValueError(f"{_short(where)} is of numpy's {dtype}; give numbers")


def _no_bytes() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _fits(numbers: Iterable[int]) -> bool:
    return all(abs(number) <= MAX_COUNT for number in numbers)


def _hashed(kind: Any, entries: list[Any], where: str) -> Any:
    try:
        found = kind(entries)
    except TypeError:
        raise _damaged(where, entries) from None
    if len(found) != len(entries):
        raise _damaged(where, entries)
    return found


def _is_unicode(text: str) -> bool:
    return text.isprintable() or not any("\ud800" <= char <= "\udfff" for char in text)


def _short(where: str) -> str:
    return where if len(where) <= QUOTED else f"{where[: QUOTED // 2]} ... {where[-QUOTED // 2 + 5 :]}"


def _what(value: object) -> str:
    kind = type(value)
    name = {"function": "function", "builtin_function_or_method": "function", "method": "method"}.get(kind.__name__)
    return f"a {name}" if name else f"of {kind.__module__}.{kind.__qualname__}"


def _damaged(where: str, data: object) -> ValueError:
    return ValueError(f"{_short(where)} is {quoted(data)}, which no save has written; the file is damaged")
