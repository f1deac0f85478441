"""The batches of the first step, as an example, before anybody trains on them.

[Note: an example that nobody misses] The training dataloader is made once more, and its first batches are taken: with
its sampler, collator, workers and share of a rank, so the example has the shapes that training will see. All random
numbers are put back afterwards, and a sampler's order follows from them or from its own seed: training begins with
these very batches. A stream may be unable to give them twice (a file that is read on, a queue), and nothing tells which
one is: so it is not begun twice. What was taken out of it comes first, and then it goes on. One that has drawn from the
generators that were put back begins anew, and so does one with `set_epoch`, which decides about its order. With workers
each has a copy of the stream, and nothing was taken out of this one.

[Note: the call that will be made] What the model is called with is decided in `compute_loss`, which may take labels
away, join batches or switch on a forward of its own. So it is asked: a hook on the model ends it when it calls.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from hightide.checkpoint.training import generator_states, set_generator_states

_END = object()


class ReplayedStream(IterableDataset[Any]):
    """A stream that may be looked into: what comes out while `is_look` comes again."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.is_look = stream, False
        self._taken: list[Any] = []
        self._begun: Iterator[Any] | None = None  # by the look
        self._has_drawn = False

    def __iter__(self) -> Iterator[Any]:
        if self.is_look:
            yield from self._looked_at()
            return
        taken, begun = self._taken, self._begun
        self._taken, self._begun = [], None
        if begun is not None and self._has_drawn and iter(self.stream) is not begun:
            taken, begun = [], None
        yield from taken
        yield from self.stream if begun is None else begun

    def _looked_at(self) -> Iterator[Any]:
        if self._begun is None:
            self._begun, self._has_drawn = iter(self.stream), False
        yield from list(self._taken)
        while True:
            before = _fingerprint()
            sample = next(self._begun, _END)
            self._has_drawn |= _fingerprint() != before
            if sample is _END:
                return
            self._taken.append(sample)
            yield sample

    def __len__(self) -> int:
        """TypeError, as of the stream itself, if it has none."""
        return len(self.stream)

    def __getattr__(self, name: str) -> Any:
        if name == "stream":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.stream, name)


def _fingerprint() -> bytes:
    """Of all generators: another one after each number that is drawn."""
    states = generator_states()
    tensors = [states.pop("torch"), *states.pop("cuda", [])]
    return pickle.dumps(states) + b"".join(one.numpy().tobytes() for one in tensors)


def replayed(dataset: Any, num_workers: int) -> Any:
    """A dataset out of which the same comes twice, also where it comes once only."""
    is_stream = isinstance(dataset, IterableDataset) and not hasattr(dataset, "set_epoch") and not num_workers
    return ReplayedStream(dataset) if is_stream and not isinstance(dataset, ReplayedStream) else dataset


@contextmanager
def kept_generators() -> Iterator[None]:
    """Random numbers go on as if the body had drawn none."""
    states = generator_states()
    try:
        yield
    finally:
        set_generator_states(states)


def first_batches(trainer: Any, number: int) -> list[Any]:
    """At most so many, as `trainer.get_train_dataloader()` gives them. ValueError if there is none."""
    loaders = trainer.accelerator._dataloaders
    before = list(loaders)
    with kept_generators():
        try:
            batches = looked_at(trainer.get_train_dataloader(), number)
        finally:
            loaders[:] = before
    if not batches:
        raise ValueError("the training dataset gives no batch: there is no example to plan from")
    return batches


def looked_at(loader: Any, number: int) -> list[Any]:
    """Its first batches, at most so many, which come again."""
    stream = _stream_of(loader)
    found = iter(loader)
    try:
        if stream is not None:
            stream.is_look = True
        return list(islice(found, number))
    finally:
        if hasattr(found, "close"):
            found.close()
        del found  # its workers end
        if hasattr(loader, "end"):  # Accelerate takes the last one that was begun for the one in use
            loader.end()
        if stream is not None:
            stream.is_look = False


def _stream_of(loader: Any) -> ReplayedStream | None:
    """Of several ranks each has its share of it around it."""
    dataset = getattr(loader, "dataset", None)
    while dataset is not None and not isinstance(dataset, ReplayedStream):
        dataset = vars(dataset).get("dataset") if hasattr(dataset, "__dict__") else None
    return dataset


class _Called(BaseException):
    """Nobody catches it on the way."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.args_given, self.kwargs_given = args, kwargs


def first_call(trainer: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with which `trainer.compute_loss` calls the model for a batch: see [Note: the call that will be
    made]."""

    def end(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Called(args, kwargs)

    inputs = trainer._prepare_inputs(dict(batch))
    num_items = trainer._get_num_items_in_batch([inputs], trainer.args.device)
    hook = trainer.model.register_forward_pre_hook(end, with_kwargs=True)
    try:
        with kept_generators():
            trainer.compute_loss(trainer.model, inputs, num_items_in_batch=num_items)
    except _Called as call:
        bound = inspect.signature(trainer.model.forward).bind(*call.args_given, **call.kwargs_given)
        given = dict(bound.arguments)
        for name, parameter in bound.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(name, {})
        return given
    finally:
        hook.remove()
    raise ValueError("compute_loss does not call the model with the batch: there is no example to plan from")
