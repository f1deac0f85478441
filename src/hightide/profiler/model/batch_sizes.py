"""How large a batch is: the sizes of its tensors by name, and what else it is passed with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hightide.profiler.model.call_tree import Arguments, call_arguments, named_leaves
from hightide.profiler.model.samples import Samples, num_samples, sample_dim

SAMPLES = 0  # in the place of their number


@dataclass(frozen=True)
class BatchSizes:
    num_samples: int
    tensors: Mapping[str, tuple[int, ...]]  # by name; SAMPLES where the samples are
    flags: frozenset[str]  # whatever else may change what a model computes
    objects: frozenset[str] = frozenset()  # neither tensor nor number or text: a cache that the model fills, as a rule
    ones: frozenset[str] = frozenset()  # tensors that look like a mask which leaves nothing out

    @classmethod
    def of(
        cls, batch: Any, samples: Samples, masks: Collection[str] | None = None, looks_on_gpu: bool = True
    ) -> BatchSizes:
        """`masks`: tensors that are looked into; None: whatever may be a mask. `looks_on_gpu`: also those on a GPU,
        which are waited for; else they are taken to be of ones."""
        args, kwargs = call_arguments(batch)
        count = num_samples(Arguments(args, kwargs), samples)
        tensors, flags, objects, ones = {}, set(), set(), set()
        for name, leaf in named_leaves(args, kwargs):
            if isinstance(leaf, torch.Tensor):
                dim = sample_dim(leaf, samples, count)
                tensors[name] = tuple(SAMPLES if at == dim else size for at, size in enumerate(leaf.shape))
                if masks is not None and name not in masks:
                    continue
                if (leaf.is_cuda and not looks_on_gpu) or _leaves_nothing_out(name, leaf):
                    ones.add(name)
            elif isinstance(leaf, str) or leaf is True:  # None and False are as good as nothing
                flags.add(f"{name}={leaf!r}")
            elif not isinstance(leaf, int | float | None):
                objects.add(f"{name}: {type(leaf).__qualname__}")
        return cls(count, tensors, frozenset(flags), frozenset(objects), frozenset(ones))

    def plain(self) -> list[Any]:
        """As JSON has it."""
        return [self.num_samples, dict(self.tensors), sorted(self.flags), sorted(self.objects), sorted(self.ones)]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> BatchSizes:
        count, tensors, flags, objects, ones = plain
        by_name = {name: tuple(size) for name, size in tensors.items()}
        return cls(count, by_name, frozenset(flags), frozenset(objects), frozenset(ones))

    @staticmethod
    def objects_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return any(
            not isinstance(leaf, torch.Tensor | int | float | str | None) for _, leaf in named_leaves(args, kwargs)
        )

    def with_samples(self, count: int) -> BatchSizes:
        return replace(self, num_samples=count)

    def holds(self, other: BatchSizes) -> bool:
        """Whether the other is larger nowhere: it has no more samples, and no tensor that is not here at its size. With
        a mask that leaves something out models compute what they leave out with others: a mask of its full size."""
        return (
            other.num_samples <= self.num_samples
            and other.flags <= self.flags
            and other.objects <= self.objects
            and all(_fits(sizes, self.tensors.get(name)) for name, sizes in other.tensors.items())
            and all(name in other.ones for name in self.ones & other.tensors.keys())
        )

    def __str__(self) -> str:
        sizes = (
            f"{name} {'x'.join(str(self.num_samples if size == SAMPLES else size) for size in sizes) or 'a number'}"
            f"{' of ones' if name in self.ones else ''}"
            for name, sizes in self.tensors.items()
        )
        return ", ".join((*sizes, *sorted(self.flags)))


def _leaves_nothing_out(name: str, leaf: torch.Tensor) -> bool:
    """Numbers are a mask if they are called so: tokens may all be 1 in an example that somebody has made up."""
    is_number = leaf.is_floating_point() or leaf.is_complex()
    may_be_mask = leaf.dtype is torch.bool or (not is_number and "mask" in name)
    return may_be_mask and leaf.dim() > 1 and leaf.numel() > 0 and not leaf.is_meta and bool((leaf == 1).all())


def _fits(sizes: tuple[int, ...], room: tuple[int, ...] | None) -> bool:
    return room is not None and len(sizes) == len(room) and all(a <= b for a, b in zip(sizes, room, strict=True))
