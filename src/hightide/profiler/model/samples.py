"""Where the samples of a batch are: along the first dimension of its tensors, along the second (time first, as torch's
recurrent modules and nn.Transformer have it by default), or nowhere that could be seen (graphs, lists of images).

[Note: time first] Sizes alone cannot tell which of two dimensions the samples are. The first one is tried first. If the
trial of the blocks (see [Note: trying a block alone]) finds that not one of them may be split along it, the second is
tried, and taken if some may be split along that.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from hightide.profiler.model.call_tree import (
    Batch,
    UnevenBatch,
    batch_size,
    call_arguments,
    flatten_call,
    tensors,
    unflatten,
)


class Samples(StrEnum):
    FIRST = "along the first dimension"
    SECOND = "along the second dimension"
    NOWHERE = "nowhere: the batch is one whole"


def possible_samples(batch: Batch) -> list[Samples]:
    """The most likely first."""
    found = []
    with suppress(UnevenBatch):
        batch_size(batch)
        found.append(Samples.FIRST)
    if _second_size(batch) is not None:
        found.append(Samples.SECOND)
    return found or [Samples.NOWHERE]


def refuse_nested(found: Iterable[Tensor], whose: str) -> None:
    if any(tensor.is_nested for tensor in found):
        raise ValueError(
            f"{whose} is a nested tensor (torch.nested), whose samples cannot be told apart by its dimensions; pad "
            "samples to one length, with a mask, or pack them into one row"
        )


def num_samples(batch: Batch, samples: Samples) -> int:
    if samples is Samples.FIRST:
        return batch_size(batch)
    if samples is Samples.NOWHERE:
        return 1
    size = _second_size(batch)
    if size is None:
        raise UnevenBatch(
            "the tensors of this batch share no size along their second dimension, where the example that the model "
            "was wrapped with had its samples (time first); pass batches of one layout"
        )
    return size


def shapes(batch: Batch, samples: Samples) -> frozenset[tuple[int, ...]]:
    """Of its tensors, whatever the number of samples: two batches with equal ones are equal work per sample."""
    size = num_samples(batch, samples)
    found = set()
    for leaf in tensors(flatten_call(*call_arguments(batch))[0]):
        dim = sample_dim(leaf, samples, size)
        found.add(tuple(-1 if at == dim else length for at, length in enumerate(leaf.shape)))
    return frozenset(found)


def samples_along_first(batch: Batch) -> int:
    """1, where they are not there."""
    try:
        return batch_size(batch)
    except UnevenBatch:
        return 1


def _second_size(batch: Batch) -> int | None:
    """Of time-first batches: every tensor with two dimensions has the samples along the second, or, as masks of
    padding and labels have, along the first. None: there is no such size."""
    leaves = [leaf for leaf in tensors(flatten_call(*call_arguments(batch))[0]) if leaf.ndim > 1]
    if not leaves:
        return None
    size = leaves[0].shape[1]
    return size if size and all(size in leaf.shape[:2] for leaf in leaves) else None


def sample_dim(tensor: Tensor, samples: Samples, size: int) -> int | None:
    """The dimension of a tensor that has the samples."""
    if samples is Samples.SECOND and tensor.ndim > 1 and tensor.shape[1] == size:
        return 1
    if samples is not Samples.NOWHERE and tensor.ndim > 0 and tensor.shape[0] == size:
        return 0
    return None


def resized(batch: Batch, samples: Samples, extra: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the model's call, copied to the CPU, with the last sample there `extra` times more."""
    size = num_samples(batch, samples)

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        copy = leaf.detach().to("cpu", copy=True)
        dim = sample_dim(copy, samples, size)
        if dim is not None and extra:
            copy = torch.cat([copy, *[copy.narrow(dim, size - 1, 1)] * extra], dim)
        return copy.requires_grad_(leaf.requires_grad)

    leaves, tree = flatten_call(*call_arguments(batch))
    return unflatten([resize(leaf) for leaf in leaves], tree)
