"""Batches of which it is known that the plan holds them, and who is asked about others.

[Note: larger batches] A plan is made for one batch, the example. It holds every batch that is larger nowhere: no more
samples, no size of any tensor above that of the same tensor, no tensor that the example did not have, and no mask that
leaves something out where that of the example is of ones: models then compute with a mask of S x S. Any other batch is
profiled before its pass begins, which takes no memory of the GPU, and the plan is held against it. If it does not
hold, the run is planned again for all batches so far, and moved; or the batch is refused, while nothing has happened
yet. See observe/larger_batches.py; of several ranks all ask, and all do the same: observe/ranked_batches.py.

An evaluation is not forecast: its outputs are the user's affair. Where it runs out of memory it is begun again under a
plan that leaves more of it free."""

from __future__ import annotations

from typing import Protocol

from hightide.profiler.model.batch_sizes import BatchSizes
from hightide.profiler.model.call_tree import Arguments
from hightide.profiler.model.samples import Samples
from hightide.stores.store import OutOfMemory


class Admission(Protocol):
    def admit(self, batch: Arguments, sizes: BatchSizes) -> None:
        """Before a training pass with a batch that is not known, or that another rank does not know. Raises Refused if
        the run cannot hold it."""

    def make_room(self, error: OutOfMemory, sizes: BatchSizes) -> None:
        """An evaluation ran out of GPU memory, and will be begun again. Raises Refused if that is of no use."""

    def hold_together(self, num_samples: int) -> None:
        """Graphs of so many samples were alive at a time: see [Note: several graphs] in several_graphs.py."""


class KnownBatches:
    def __init__(self, example: BatchSizes, looks_on_gpu: bool = False) -> None:
        """`looks_on_gpu`: a look into a mask that is there costs nothing, because the model's library waits for it."""
        self._largest = [example]  # none of them holds another
        self._looks_on_gpu = looks_on_gpu

    def sizes_of(self, batch: Arguments, samples: Samples) -> BatchSizes:
        """Into what cannot be larger by its values nobody looks, unless the batch is larger anyway: whether its masks
        are of ones is then to be known of it, too."""
        masks = frozenset().union(*(known.ones for known in self._largest))
        found = BatchSizes.of(batch, samples, masks, self._looks_on_gpu)
        return found if self.hold(found) else BatchSizes.of(batch, samples)

    def hold(self, sizes: BatchSizes) -> bool:
        return any(known.holds(sizes) for known in self._largest)

    def add(self, sizes: BatchSizes) -> None:
        if self.hold(sizes):
            return
        self._largest = [known for known in self._largest if not sizes.holds(known)] + [sizes]

    def raise_samples(self, count: int) -> None:
        """All of them are held with so many samples."""
        before, self._largest = self._largest, []
        for sizes in before:
            self.add(sizes.with_samples(max(count, sizes.num_samples)))

    def longest(self, name: str) -> int:
        """A tensor's second size, which is its length where the first one is the samples; 0: nobody has one."""
        found = [one.tensors[name] for one in self._largest if name in one.tensors]
        return max((sizes[1] for sizes in found if len(sizes) > 1), default=0)

    def __str__(self) -> str:
        return "; or ".join(map(str, self._largest))
