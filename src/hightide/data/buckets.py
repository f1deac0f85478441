"""Batches of any length, padded to one of a few: each length that a model sees is tried, compiled and remembered."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch

from hightide.ir.foreign import kind_of

INPUT_IDS = "input_ids"
MASK = "attention_mask"
POSITIONS = "position_ids"
UNSEEN = {"labels": -100, MASK: 0}  # what no loss counts, and no token attends to
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")  # where packed sequences begin, for kernels

Batch = MutableMapping[str, Any]


def bucket_lengths(longest: int, count: int = 4, multiple: int = 64) -> tuple[int, ...]:
    """At most `count` lengths to pad to, increasing. The last is `longest` itself, which may be all that a model has
    positions for; the others are multiples of `multiple`, about equally far apart: the shorter a batch the less it
    matters how much of it is padding."""
    for name, value in (("longest", longest), ("count", count), ("multiple", multiple)):
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    steps = (-(-longest * step // (count * multiple)) * multiple for step in range(1, count))
    return (*sorted({length for length in steps if length < longest}), longest)


class PadToBucket:
    """A collator around another: what `collate` makes of the examples is padded to the smallest of `lengths` that holds
    it. Tokens lie along the second dimension of every tensor that has a pad value: labels (-100) and attention_mask (0)
    have one, `pad_values` has the others, input_ids first of all. Lengths may differ between tensors (those of an
    encoder and a decoder): each is padded to its own bucket.

    On the right, where causal models do not look, losses are those of the batch unpadded. On the left they are so for
    models that count positions by the mask, or have none but relative ones.

    Padding that a model could attend to gets an attention mask, if there is none. A batch with position_ids and no mask
    gets none, because models take that for packed sequences: padding of position 0 then is sequences of its own."""

    def __init__(
        self,
        collate: Callable[[Sequence[Any]], Batch],
        lengths: Sequence[int],
        *,
        pad_values: Mapping[str, int],
        side: Literal["left", "right"] = "right",
    ) -> None:
        if not lengths or lengths[0] < 1 or any(shorter >= longer for shorter, longer in pairwise(lengths)):
            raise ValueError(f"lengths must be positive and increasing, and there must be one: {tuple(lengths)}")
        if side not in ("left", "right"):
            raise ValueError(f"side is {side!r}: padding goes to the left or to the right")
        self.collate = collate
        self.lengths = tuple(lengths)
        self.pad_values = {**UNSEEN, **pad_values}
        self.side = side

    def __call__(self, examples: Sequence[Any]) -> Batch:
        batch = self.collate(examples)
        if not isinstance(batch, MutableMapping):
            raise ValueError(f"{type(self.collate).__name__} gave {kind_of(batch)}: a dict of tensors is padded")
        targets = self._targets(batch)
        if all(length == target for length, target in targets.items()):
            return batch
        return self._padded(batch, targets)

    def _targets(self, batch: Batch) -> dict[int, int]:
        """The bucket of each length that there is."""
        lengths = {value.shape[1]: key for key, value in batch.items() if self._counts_tokens(key, value)}
        if not lengths:
            raise ValueError(
                f"nothing in the batch says how long it is: it has {', '.join(map(str, batch))}, and there are pad "
                f"values for {', '.join(self.pad_values)}. Give pad_values={{'input_ids': ...}} and tensors of samples "
                f"x tokens"
            )
        return {length: self._bucket(key, length) for length, key in lengths.items()}

    def _counts_tokens(self, key: str, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or key not in self.pad_values:
            return False
        return not (key == "labels" and value.is_floating_point())  # of several classes, not of tokens

    def _bucket(self, key: str, length: int) -> int:
        for target in self.lengths:
            if length <= target:
                return target
        raise ValueError(
            f"{key} is {length} tokens long, and the longest bucket has {self.lengths[-1]}: cut the examples to "
            f"{self.lengths[-1]} tokens, or give a bucket of {length}"
        )

    def _padded(self, batch: Batch, targets: dict[int, int]) -> Batch:
        padded = copy.copy(batch)
        for key, value in batch.items():
            if key in PACKED:
                raise ValueError(f"the batch has {key}, which says where packed sequences end: those cannot be padded")
            if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] not in targets:
                continue
            target = targets[value.shape[1]]
            if key == MASK and value.dim() > 2:
                raise ValueError(f"{key} is {tuple(value.shape)}: masks of samples x tokens are padded, no others")
            if target != value.shape[1]:
                padded[key] = self._filled(value, target, self._value_of(key, value))
        ids = batch.get(INPUT_IDS)
        if MASK not in batch and POSITIONS not in batch and isinstance(ids, torch.Tensor) and ids.dim() > 1:
            length = ids.shape[1]
            if targets.get(length, length) != length:
                padded[MASK] = self._filled(torch.ones_like(ids), targets[length], 0)
        return padded

    def _value_of(self, key: str, value: torch.Tensor) -> int:
        if key not in self.pad_values:
            raise ValueError(
                f"{key} has as many entries per sample as there are tokens ({value.shape[1]}), and no pad value: "
                f"give pad_values={{{key!r}: ...}}"
            )
        return self.pad_values[key]

    def _filled(self, value: torch.Tensor, target: int, fill: int) -> torch.Tensor:
        length = value.shape[1]
        filled = value.new_full((value.shape[0], target, *value.shape[2:]), fill)
        first = target - length if self.side == "left" else 0
        filled[:, first : first + length] = value
        return filled
