"""First values for a model that was made on the meta device and has no files: its own initialisers make them.

[Note: initialising without the memory] An initialiser is the user's code: `reset_parameters()` of a module, as in plain
PyTorch, or a transformers model's `initialize_weights()`. It may touch any parameter, its children's too. So it runs
under a mode that gives a parameter real memory when an operation first touches it, and moves the oldest ones into
their chunks when too much is real. Initialisers run in the order in which constructors would have called them
(children first) and draw on the CPU: torch.manual_seed decides about the values, the plan does not. A parameter that
several modules own (a head tied to its embedding) has the values of the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hightide.runtime.chunks.chunks import Chunks

REAL_BYTES = 64 * 1024**2  # of parameters at a time
RESETS = ("reset_parameters", "_reset_parameters")  # the second: nn.MultiheadAttention and nn.Transformer
FLAG = "_is_hf_initialized"  # of transformers
NAMED = 5  # as many are named in a message


def check_initialisers(model: nn.Module, without_origin: Mapping[str, nn.Parameter]) -> None:
    """ValueError for parameters for which no initialiser is in sight. Nothing has been touched yet."""
    covered = {id(param) for module in initialised_modules(model) for param in _reach(module)}
    lost = [name for name, param in without_origin.items() if id(param) not in covered]
    if lost:
        raise ValueError(
            f"{len(lost)} of {len(without_origin)} parameters on the meta device have no values and no initialiser "
            f"({', '.join(lost[:NAMED])}): give the module that owns them a reset_parameters() method, "
            "make the model without torch.device('meta'), or load a folder with hightide.from_pretrained"
        )


def initialised_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Those with an initialiser and something on the meta device, children first. A transformers model does its own."""
    names = ("initialize_weights", "_init_weights")
    is_of_transformers = all(callable(getattr(model, name, None)) for name in names)
    if not is_of_transformers:
        for child in model.children():
            yield from initialised_modules(child)
    if (is_of_transformers or reset_of(model) is not None) and lacks_values(model):
        yield model


def lacks_values(model: nn.Module) -> bool:
    return any(value.is_meta for value in (*model.parameters(), *model.buffers()))


def initialise(model: nn.Module, modules: list[nn.Module], keys: frozenset[str], chunks: Chunks) -> None:
    """See [Note: initialising without the memory]. `keys`: the parameters that have no values yet."""
    buffers = _real_buffers(model)
    real = _Real(chunks, keys)
    try:
        with torch.no_grad(), _flagged(model, {id(chunks.parameters[key]) for key in keys}), real:
            for module in modules:
                reset = reset_of(module)
                if reset is None:
                    module.initialize_weights()  # type: ignore[operator]
                else:
                    with real.keeping(module.parameters(recurse=False)):
                        reset()
    finally:
        real.move_all()
    lost = sorted(real.unset) + [name for name, (buffer, mark) in buffers.items() if _is_unset(buffer, mark)]
    if lost:
        raise ValueError(
            f"{len(lost)} parameters and buffers on the meta device were left without values by their modules' "
            f"initialisers ({', '.join(lost[:NAMED])}); set them before hightide.wrap, or make the model without "
            "torch.device('meta')"
        )


class _Real(TorchFunctionMode):
    def __init__(self, chunks: Chunks, keys: frozenset[str]) -> None:
        super().__init__()
        self._chunks = chunks
        self._keys = {id(chunks.parameters[key]): key for key in keys}
        self._held: dict[str, nn.Parameter] = {}  # real at present, oldest first
        self._owned: set[str] = set()  # by a module that has initialised them
        self.unset = set(keys)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        touched = [self._keys[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._keys]
        for key in touched:
            if key not in self._held:
                self._make_real(key)
        while sum(param.nbytes for param in self._held.values()) > REAL_BYTES:
            oldest = next((key for key in self._held if key not in touched), None)
            if oldest is None:
                break
            self._move(oldest)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def keeping(self, own: Iterable[nn.Parameter]) -> Iterator[None]:
        """While a module initialises its `own` parameters: those that another one has set before stay as they are."""
        keys = [self._keys[id(param)] for param in own if id(param) in self._keys]
        kept = {key: self._value(key) for key in keys if key in self._owned}
        yield
        for key, value in kept.items():
            if key not in self._held:
                self._make_real(key)
            self._held[key].data = value
        self._owned.update(keys)

    def move_all(self) -> None:
        for key in list(self._held):
            self._move(key)

    def _make_real(self, key: str) -> None:
        param = self._chunks.parameters[key]
        self._chunks.binding.show(key)  # until it is stored
        if key in self.unset:
            param.data = torch.full(param.shape, math.nan, dtype=param.dtype)
        else:
            param.data = self._value(key)
        self._held[key] = param

    def _value(self, key: str) -> Tensor:
        if key in self._held:
            return self._held[key].data.clone()
        return self._chunks.whole_value(key)

    def _move(self, key: str) -> None:
        value = self._held.pop(key).data
        if not bool(value.isnan().any()):
            self.unset.discard(key)
        self._chunks.store(key, value)


@contextmanager
def _flagged(model: nn.Module, without_values: set[int]) -> Iterator[None]:
    """Transformers marks what it need not initialise: parameters that have values, and modules once they are done."""
    forget_initialised(model)
    with_values = [param for param in model.parameters() if id(param) not in without_values]
    for param in with_values:
        setattr(param, FLAG, True)
    try:
        yield
    finally:
        for param in with_values:
            param.__dict__.pop(FLAG, None)


def forget_initialised(model: nn.Module) -> None:
    """Of transformers: it would take modules for done."""
    for module in model.modules():
        module.__dict__.pop(FLAG, None)


def reset_of(module: nn.Module) -> Any:
    return next((getattr(module, name) for name in RESETS if callable(getattr(module, name, None))), None)


def _reach(module: nn.Module) -> Iterator[nn.Parameter]:
    """What its initialiser is for: its own parameters, or, of a whole model, all."""
    yield from module.parameters(recurse=reset_of(module) is None)
    if isinstance(module, nn.modules.RNNBase | nn.MultiheadAttention):
        yield from module.parameters()


def _real_buffers(model: nn.Module) -> dict[str, tuple[Tensor, Any]]:
    """Gives buffers on the meta device memory, filled with a mark by which it is seen whether somebody set them."""
    made: dict[int, Tensor] = {}
    marked: dict[str, tuple[Tensor, Any]] = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            is_bool = buffer.dtype == torch.bool
            mark = math.nan if buffer.is_floating_point() else 0 if is_bool else torch.iinfo(buffer.dtype).min
            if id(buffer) not in made:
                made[id(buffer)] = torch.full(buffer.shape, mark, dtype=buffer.dtype)
            module._buffers[name] = made[id(buffer)]
            marked[f"{path}.{name}".removeprefix(".")] = (made[id(buffer)], mark)
    return marked


def _is_unset(buffer: Tensor, mark: Any) -> bool:
    if not buffer.numel():
        return False
    return bool(buffer.isnan().any()) if buffer.is_floating_point() else bool((buffer == mark).all())
