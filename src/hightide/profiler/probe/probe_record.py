"""One run of a model, written down: the calls of its blocks with their tensors, which parameters were used where, and
what was taken out of blocks by another way than their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hightide.ir.foreign import kind_of
from hightide.ir.refusal import Refused
from hightide.process.interrupts import in_a_line, safe_point
from hightide.profiler.fake.values import Values, stands_for
from hightide.profiler.fake.watching import watched
from hightide.profiler.model.block_finder import FoundBlock
from hightide.profiler.model.call_tree import (
    Tree,
    flatten,
    flatten_call,
    mode_of,
    signature_of,
    tensors,
    unflatten,
    way_of,
)
from hightide.profiler.model.hooks import HookWatch
from hightide.profiler.probe.tap_search import Opening, Taps, TapSearch
from hightide.profiler.probe.taps import Taken, Tapped, hand_out, tapping

Forward = Callable[..., object]  # called like the model


@dataclass
class CallRecord:
    """One call as it happened in one run. Holds the tensors, so that no storage is mistaken for another."""

    block: int
    leaves: list[Any]  # of the arguments
    tree: Tree
    way: str  # how it was called, whatever the sizes and the mode
    signature: str
    versions: list[int]
    results: list[Any] = field(default_factory=list)
    result_tree: Tree | None = None
    tapped: list[torch.Tensor] = field(default_factory=list)
    tap_parts: list[Taken] = field(default_factory=list)
    mutated: bool = False
    problem: str = ""  # why blocks cannot be called like this
    returned: int | str | None = None  # the argument that is the result too, if it is a list or dict
    needs_backward: bool = False  # as the block itself returns; a hook of the user's may ask for gradients later
    without_grad: bool = False  # under the model's own `torch.no_grad()`
    finished: bool = False

    @property
    def inputs(self) -> list[torch.Tensor]:
        return tensors(self.leaves)

    @property
    def outputs(self) -> list[torch.Tensor]:
        return [*tensors(self.results), *self.tapped]


@dataclass
class ProbeRecord:
    """One run of the model."""

    num_samples: int
    records: list[CallRecord]  # finished calls
    known: list[torch.Tensor]  # batch, parameters and buffers: not made by the model's code
    uses: dict[int, tuple[str, ...]]
    loose: frozenset[str]
    failure: str
    captured: frozenset[str] = frozenset()
    taps: Taps = field(default_factory=dict)
    more_taps: Taps = field(default_factory=dict)
    written: frozenset[str] = frozenset()  # parameters that a forward has given other values
    rehooked: frozenset[int] = frozenset()  # blocks inside of which a hook changes what is computed


class Recorder:
    """Hooks on the blocks that write down their calls."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[FoundBlock],
        num_samples: int,
        taps: Taps,
        values: Values | None = None,
    ) -> None:
        """`values`: blocks run on them, and not on tensors without."""
        self._model = model
        self._blocks = blocks
        self._values = values
        self._num_samples = num_samples
        self._taps = taps
        self._search = TapSearch([block.module for block in blocks], taps)
        self._records: list[CallRecord] = []
        self._running: list[_Running] = []  # the innermost block last
        self._rehooked: set[int] = set()

    def run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProbeRecord:
        known = [*tensors(flatten_call(args, kwargs)[0]), *self._model.parameters(), *self._model.buffers()]
        self._watch = watch = _ParameterWatch(self._model, self._blocks, self._running)
        failure = ""
        result: object = None
        with ExitStack() as stack:
            for index, block in enumerate(self._blocks):
                # Last before forward and first after it: we see what forward itself gets and returns.
                enter = block.module.register_forward_pre_hook(self._enter(index), with_kwargs=True)
                leave = block.module.register_forward_hook(self._leave, with_kwargs=True, prepend=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            stack.enter_context(watched(before=(watch.look,)))
            stack.callback(self._close)
            try:
                result = forward(*args, **kwargs)
            except Refused:
                raise
            except Exception as error:  # whatever the model raises without values: the caller falls back
                failure = in_a_line(error)
        finished = [record for record in self._records if record.finished]
        uses = {block: tuple(names) for block, names in watch.uses.items()}
        captured, reached = _follow(
            result, finished, self._blocks, self._search.openings, watch.loose, _names(self._model)
        )
        captured |= {self._blocks[block].name for block in self._search.leaking}
        return ProbeRecord(
            self._num_samples,
            finished,
            known,
            uses,
            frozenset(watch.loose),
            failure,
            frozenset(captured),
            self._taps,
            self._search.taps(reached),
            frozenset(watch.written | watch.replaced()) - watch.loose,
            frozenset(self._rehooked),
        )

    def _close(self) -> None:
        """What a failure inside of a block has left open."""
        self._search.close()
        while self._running:
            self._running.pop().stack.close()

    def _enter(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            safe_point()
            given, tree = flatten_call(args, kwargs)
            leaves = given if self._values is None else self._values.there(given)
            signature = signature_of(leaves, tree, mode_of(list(module.modules())))
            versions = [tensor._version for tensor in tensors(leaves)]
            record = CallRecord(index, leaves, tree, way_of(leaves, tree), signature, versions)
            self._records.append(record)
            stack, hooks = ExitStack(), HookWatch(module)
            tapped = stack.enter_context(tapping(module, self._taps.get(index, ())))
            self._running.append(_Running(record, stack, tapped, given, hooks))
            if self._values is not None:
                stack.enter_context(self._values.of(module))
                stack.enter_context(self._watch.also(module))
            self._search.enter(index)
            stack.callback(hooks.close)
            hooks.open()
            return None if not is_changed(leaves, given) else unflatten(leaves, tree)

        return hook

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        """The caller gets views of the outputs: gradients that come through them pass a node of their own, and those of
        a tensor that was taken out of the block's middle do not."""
        running = self._running.pop()
        record, tapped = running.record, running.tapped
        self._search.leave(record.block)
        running.stack.close()
        if running.hooks.replaces:
            self._rehooked.add(record.block)

        def bordered(leaf: Any) -> Any:
            if self._values is not None:
                return self._values.back(leaf, record.leaves, running.given)
            return leaf.view_as(leaf) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None else leaf

        leaves, tree = flatten(result)
        record.results, record.result_tree = [bordered(leaf) for leaf in leaves], tree
        record.tapped, record.tap_parts = [bordered(tensor) for tensor in tapped.tensors], tapped.parts
        hand_out(module, tapped.parts, record.tapped)
        record.needs_backward = any(tensor.requires_grad for tensor in record.outputs)
        record.without_grad = not torch.is_grad_enabled()
        record.returned = _returned(args, kwargs, result)
        if not module._backward_hooks and not module._backward_pre_hooks:  # for these torch puts others in their place
            record.problem = _problem(record, flatten_call(args, kwargs)[0])
        record.mutated = record.versions != [tensor._version for tensor in record.inputs]
        record.leaves = running.given
        record.finished = True
        return unflatten(record.results, tree)


@dataclass(frozen=True)
class _Running:
    """A block whose call has not ended."""

    record: CallRecord
    stack: ExitStack  # of what ends with it
    tapped: Tapped
    given: list[Any]  # leaves of its arguments, as the model's code passed them
    hooks: HookWatch


def _problem(record: CallRecord, leaves_after: list[Any]) -> str:
    """What a block does with its arguments that is lost, because it gets copies of lists and dicts."""
    before = record.leaves
    if record.returned is None and is_changed(before, leaves_after):
        return "changes a list or dict that it is called with; return what it adds instead"
    for leaf in before:
        if any(tensor.requires_grad for tensor in _tensors_inside(leaf)):
            return (
                f"is called with {kind_of(leaf)} that holds tensors with gradients, which hightide cannot "
                "follow; pass the tensors themselves, or in a dict, a tuple or a dataclass"
            )
    return ""


def is_changed(leaves: Sequence[Any], after: Sequence[Any]) -> bool:
    """Whether a call has changed the structure of its arguments."""
    return len(leaves) != len(after) or any(a is not b for a, b in zip(leaves, after, strict=True))


def _returned(args: Any, kwargs: Any, result: Any) -> int | str | None:
    if not isinstance(result, list | dict):
        return None
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return next((place for place, value in places if value is result), None)


def _tensors_inside(value: Any, depth: int = 0) -> list[torch.Tensor]:
    """Of an object that is no structure of tensors."""
    if isinstance(value, torch.Tensor):
        return [value] if depth else []
    parts: list[Any] = []
    if isinstance(value, list | tuple):
        parts = list(value)
    elif isinstance(value, dict):
        parts = list(value.values())
    elif not isinstance(value, torch.nn.Module | type) and hasattr(value, "__dict__"):
        parts = list(vars(value).values())
    return [tensor for part in parts for tensor in _tensors_inside(part, depth + 1)] if depth < 3 else []


def _follow(
    result: object,
    records: list[CallRecord],
    blocks: Sequence[FoundBlock],
    openings: Sequence[Opening],
    loose: set[str],
    names: dict[int, str],
) -> tuple[set[str], set[int]]:
    """Follows gradients from the model's results, not through blocks' outputs: the model has taken a tensor out of the
    middle of a block if they reach the block's parameters. Returns the names of such blocks, and the ids of the
    openings' tensors that they meet on their way, where they end: these can be made taps."""
    owners = {stands_for(param): block.name for block in blocks for param in block.module.parameters()}
    borders = {tensor.grad_fn for record in records for tensor in record.outputs if tensor.grad_fn is not None}
    at: dict[Any, set[int]] = {}
    for opening in openings:
        for tensor in opening.tensors:
            if tensor.grad_fn is not None:
                at.setdefault(tensor.grad_fn, set()).add(id(tensor))
    todo: list[Any] = [tensor.grad_fn for tensor in tensors(flatten(result)[0]) if tensor.grad_fn is not None]
    seen: set[Any] = set()
    captured, reached = set(), set()
    while todo:
        node = todo.pop()
        if node is None or node in seen or node in borders:
            continue
        seen.add(node)
        if node in at:
            reached |= at[node]
            continue
        param = getattr(node, "variable", None)
        if param is not None and (key := stands_for(param)) in owners and names.get(key) not in loose:
            captured.add(owners[key])
        todo.extend(next_node for next_node, _ in node.next_functions)
    return captured, reached


class _ParameterWatch:
    """Sees which parameters operations use, inside and outside of the blocks that hold them."""

    def __init__(self, model: nn.Module, blocks: Sequence[FoundBlock], running: list[_Running]) -> None:
        self.uses: dict[int, dict[str, None]] = {}
        self.loose: set[str] = set()
        self.written: set[str] = set()
        self._model, self._running = model, running
        self._keys = names = _names(model)
        self._names = {storage_of(param): names[stands_for(param)] for param in model.parameters()}
        self._owners: dict[str, set[int]] = {}
        for index, block in enumerate(blocks):
            for param in block.module.parameters():
                if stands_for(param) in names:  # else the model has lost this block since it was wrapped
                    self._owners.setdefault(names[stands_for(param)], set()).add(index)

    @contextmanager
    def also(self, module: nn.Module) -> Iterator[None]:
        """The parameters of a block are copies with values for a while."""
        copies = {storage_of(param): self._keys[stands_for(param)] for param in module.parameters()}
        new = {key: name for key, name in copies.items() if key not in self._names}
        self._names.update(new)
        try:
            yield
        finally:
            now = {storage_of(param) for param in module.parameters()}
            self.written |= {name for key, name in copies.items() if key not in now}
            for key in new:
                del self._names[key]

    def look(self, func: Any, args: Any, kwargs: Any) -> None:
        self._see_all(args)
        if kwargs:
            self._see_all(kwargs.values())
        if func._schema.is_mutable:
            self._see_writes(func, args, kwargs)

    def _see_all(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self._see(self._names.get(storage_of(value)))
            elif isinstance(value, list | tuple):
                self._see_all(value)

    def _see_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, torch.Tensor) and (name := self._names.get(storage_of(tensor))) is not None:
                    self.written.add(name)

    def replaced(self) -> set[str]:
        """Parameters that are others now, or whose `.data` were set."""
        now = {storage_of(param) for param in self._model.parameters()}
        return {name for key, name in self._names.items() if key not in now}

    def _see(self, name: str | None) -> None:
        if name is None:
            return
        owners = self._owners.get(name, set())
        users = [one.record.block for one in self._running if one.record.block in owners]
        for block in users:
            self.uses.setdefault(block, {})[name] = None
        if not users:
            self.loose.add(name)


def _names(model: nn.Module) -> dict[int, str]:
    """The key of each parameter, also where a copy with values is in its place."""
    return {stands_for(param): name for name, param in model.named_parameters()}


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
