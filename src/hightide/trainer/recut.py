"""How the samples of a step are cut into calls.

[Note: whose cut] A loss that each call divides by the number of labels of the whole step (`num_items_in_batch`) is a
sum over samples: it does not matter in which calls they come, and the plan decides it. Any other loss is a mean of each
call's mean, or nobody knows: there the user's cut, per_device_train_batch_size by gradient_accumulation_steps, is part
of what is computed, and stays. It is known for causal language models of transformers, by their own forward, whose
samples do not see each other, nor how long the others are.

[Note: lengths in one call] Samples of batches that were padded to different lengths meet in one call. They are padded
on the right: labels with -100, which no loss counts, and the attention mask with 0, which is made where there is none;
so every value is as it was, but for the order of sums. Tensors for which no such value is known are not joined: then
each batch is cut by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hightide.data.buckets import INPUT_IDS, MASK, UNSEEN

PADDED = {**UNSEEN, INPUT_IDS: 0, "token_type_ids": 0}  # what is masked may be anything

Batch = Mapping[str, Any]


def is_sum_over_samples(model: nn.Module) -> bool:
    """See [Note: whose cut]. `model`: without adapters around it."""
    forward = type(model).forward
    forward = inspect.unwrap(getattr(forward, "__wrapped__", forward))
    if not forward.__module__.startswith("transformers.models.") or hasattr(model, "_loss_function"):
        return False
    if getattr(type(model), "loss_function", None) is not PreTrainedModel.loss_function:  # a subclass has its own
        return False
    if getattr(model, "loss_type", None) not in ("ForCausalLM", None):  # None means the same to transformers
        return False
    if getattr(model.config, "output_router_logits", False):  # their loss is a mean over a call
        return False
    if follows_length(model) or any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return False
    return "loss_function(" in inspect.getsource(forward)


def follows_length(model: nn.Module) -> bool:
    """Whether rotary embeddings depend on how long a call is, padding included (dynamic NTK, LongRoPE)."""
    kinds = [getattr(module, "rope_type", "") for module in model.modules()]
    named = [name for kind in kinds for name in (kind.values() if isinstance(kind, Mapping) else (kind,))]
    return any(name == "longrope" or "dynamic" in str(name) for name in named)


def num_samples(batch: Batch) -> int | None:
    """None: it is not a row for each sample in every tensor, and nothing else."""
    sizes = {value.shape[0] if isinstance(value, Tensor) and value.dim() else None for value in batch.values()}
    return sizes.pop() if len(sizes) == 1 else None


def can_join(batches: Sequence[Batch]) -> bool:
    """Whether rows of them can be in one call."""
    first = batches[0]
    for batch in batches:
        if batch.keys() != first.keys():
            return False
        for name, value in batch.items():
            is_equal = value.shape[1:] == first[name].shape[1:]
            if not is_equal and not (name in PADDED and value.dim() == 2 and first[name].dim() == 2):
                return False
    return _is_known_length(batches)


def _is_known_length(batches: Sequence[Batch]) -> bool:
    """A mask can be made only for tokens that are there."""
    differ = len({batch[INPUT_IDS].shape[1] for batch in batches if INPUT_IDS in batch}) > 1
    return not differ or "position_ids" not in batches[0]


def joined(parts: Sequence[Batch]) -> dict[str, Any]:
    """See [Note: lengths in one call]."""
    if len(parts) == 1:
        return dict(parts[0])
    rows = [dict(part) for part in parts]
    if len({one[INPUT_IDS].shape[1] for one in rows if INPUT_IDS in one}) > 1:
        for one in rows:
            one.setdefault(MASK, torch.ones_like(one[INPUT_IDS]))
    return {name: _together([one[name] for one in rows], PADDED.get(name, 0)) for name in rows[0]}


def lengthened(batch: Batch, length: int) -> dict[str, Any]:
    """Padded to so many tokens; as it is, where that is not known to change nothing."""
    own = batch[INPUT_IDS].shape[1] if INPUT_IDS in batch else length
    tokens = {name for name, value in batch.items() if value.dim() > 1 and value.shape[1] == own}
    if own >= length or not all(name in PADDED and batch[name].dim() == 2 for name in tokens):
        return dict(batch)
    longer = {MASK: torch.ones_like(batch[INPUT_IDS]), **batch}
    fills = {name: PADDED[name] for name in (*tokens, MASK)}
    return longer | {name: F.pad(longer[name], (0, length - own), value=fill) for name, fill in fills.items()}


def _together(values: Sequence[Tensor], fill: int) -> Tensor:
    if len({value.shape[1:] for value in values}) > 1:
        longest = max(value.shape[1] for value in values)
        values = [F.pad(value, (0, longest - value.shape[1]), value=fill) for value in values]
    return torch.cat(list(values))


def cut(batches: Sequence[Batch], number: int) -> list[dict[str, Any]]:
    """Into so many calls, as equal as they can be, in the order of the samples. ValueError if there are fewer."""
    sizes = [num_samples(batch) or 0 for batch in batches]
    total = sum(sizes)
    if total < number:
        raise ValueError(f"{total} samples cannot be cut into {number} calls")
    bounds = [total * index // number for index in range(number + 1)]
    calls = []
    for start, end in pairwise(bounds):
        parts, first = [], 0
        for batch, size in zip(batches, sizes, strict=True):
            low, high = max(start - first, 0), min(end - first, size)
            if low < high:
                parts.append({name: value[low:high] for name, value in batch.items()})
            first += size
        calls.append(joined(parts))
    return calls


def cut_apart(batches: Sequence[Batch], most: int) -> list[dict[str, Any]]:
    """Each batch by itself, into calls of at most so many samples."""
    return [call for batch in batches for call in cut([batch], -(-(num_samples(batch) or 1) // most))]
