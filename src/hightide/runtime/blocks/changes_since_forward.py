"""Whatever a block keeps beside its parameters, from its forward to the backward that runs it again: other tensors must
not be read there, all else is put back meanwhile. See [Note: what changes later]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hightide.ir.refusal import Refused
from hightide.profiler.trial.state import version
from hightide.runtime.guards.contents import ObjectContents

if TYPE_CHECKING:
    from hightide.runtime.blocks.block_runner import BlockRunner


class ChangesSinceForward:
    """The forward of one call, which changes nothing of it."""

    def __init__(self, runner: BlockRunner, contents: ObjectContents | None) -> None:
        """`contents`: as the block is called. None: nobody looks at it."""
        self._runner, self._contents = runner, contents
        self._tensors: list[tuple[Tensor, int]] = []  # and how often they were written to
        self._others: set[int] = set()  # tensors that have changed, by id
        self._has_changed = False

    def note(self) -> None:
        """After the forward."""
        self._tensors = self._now()

    def _now(self) -> list[tuple[Tensor, int]]:
        tensors = self._buffers() if self._contents is None else self._contents.tensors()
        return [(tensor, version(tensor)) for tensor in tensors]

    def _buffers(self) -> list[Tensor]:
        places = [module.__dict__["_buffers"] for module in self._runner.inside]
        return [one for place in places if place for one in place.values() if one is not None]

    def look(self, is_compiled: bool) -> None:
        """Before the backward. What compiled code reads is not seen, so no buffer may have changed."""
        then, now = self._tensors, self._now()
        if len(then) != len(now) or any([a is not c or b != d for (a, b), (c, d) in zip(then, now, strict=True)]):
            known = {(id(tensor), count) for tensor, count in then}
            self._others = {id(tensor) for tensor, count in now if (id(tensor), count) not in known}
        if self._contents is not None:
            with self._runner.run.caches.off():  # as in the forward: configs are contents, too
                self._has_changed = not self._contents.are_same()
        if is_compiled and self._others and any(id(buffer) in self._others for buffer in self._buffers()):
            self.refuse()

    @contextmanager
    def as_then(self) -> Iterator[None]:
        with (
            _Unread(self._others, self.refuse) if self._others else nullcontext(),
            self._contents.put_back() if self._contents is not None and self._has_changed else nullcontext(),
        ):
            yield

    def forget(self) -> None:
        """After the backward. The graph keeps this object, and what is kept may be results with graphs of their own:
        each step would keep the one before it."""
        self._contents, self._tensors = None, []

    def refuse(self) -> None:
        """Plain PyTorch has saved what it made of it."""
        raise Refused(
            f"a buffer of block {self._runner.spec.name!r} was changed between its forward and its backward, or "
            "another tensor that it keeps, and backward runs the block again: the gradient would be that of another "
            "forward. Change buffers after backward()"
        )


class _Unread(TorchFunctionMode):
    """Inside, whoever uses one of these tensors is refused. One that only hooks fill may change at any time."""

    def __init__(self, tensors: Set[int], refuse: Callable[[], None]) -> None:
        super().__init__()
        self._tensors, self._refuse = tensors, refuse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_question = getattr(func, "__name__", "") == "__get__" and not isinstance(result, Tensor)  # of its shape
        if not is_question and any(id(leaf) in self._tensors for leaf in pytree.tree_leaves((args, kwargs))):
            self._refuse()
        return result
