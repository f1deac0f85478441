"""One profile for batches of two shapes: what holds it holds each of them, up to the larger number of samples. It is
made line by line: 4 x 64 and 2 x 200 become 4 x 200."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hightide.ir.block import Affine, CallSpec, Glue, ModelProfile, Work
from hightide.ir.records import joined, unruled

Lines = Callable[[Affine, Affine], Affine]


def wider(one: ModelProfile, two: ModelProfile) -> ModelProfile | None:
    """Of one model; its parameters and blocks are those of `one`. None: the batches take other ways through it, and no
    call of one is that of the other."""
    if _way(one) != _way(two):
        return None
    num_samples = max(one.num_samples, two.num_samples)

    def above(first: Affine, second: Affine) -> Affine:
        """A line that is nowhere below either: the larger of two lines is convex, so that its chord is above it."""
        low, high = (max(first.at(size), second.at(size)) for size in (1, num_samples))
        return Affine.through(1, low, num_samples, high)

    kinds: dict[tuple[int, int], int] = {}
    calls = []
    for first, second in zip(one.calls, two.calls, strict=True):
        kind = kinds.setdefault((first.kind, second.kind), len(kinds))
        calls.append(_wider_call(first, second, above, kind))
    return replace(
        one,
        num_samples=num_samples,
        tokens_per_sample=max(one.tokens_per_sample, two.tokens_per_sample),
        batch_bytes=max(-(-profile.batch_bytes * num_samples // profile.num_samples) for profile in (one, two)),
        calls=tuple(calls),
        glue_end=above(one.glue_end, two.glue_end),
        on_values=one.on_values or two.on_values,
    )


def with_blocks_of(profile: ModelProfile, model: ModelProfile) -> ModelProfile | None:
    """The calls of `profile` under the numbers that the blocks have in `model`. None: these are other blocks."""
    numbers = {block.name: block.index for block in model.blocks if not block.loose}
    names = [block.name for block in profile.blocks if not block.loose]
    loose = [{name for block in one.blocks if block.loose for name in block.params} for one in (profile, model)]
    if set(names) != set(numbers) or loose[0] != loose[1]:
        return None
    calls = tuple(replace(call, block=numbers[profile.blocks[call.block].name]) for call in profile.calls)
    return replace(
        model,
        num_samples=profile.num_samples,
        tokens_per_sample=profile.tokens_per_sample,
        batch_bytes=profile.batch_bytes,
        calls=calls,
        glue_end=profile.glue_end,
        on_values=profile.on_values,
    )


def _way(profile: ModelProfile) -> list[tuple[int, bool]]:
    return [(call.block, call.needs_backward) for call in profile.calls]


def _wider_call(one: CallSpec, two: CallSpec, above: Lines, kind: int) -> CallSpec:
    def lines(name: str, pair: Sequence[Any]) -> Any:
        if isinstance(pair[0], Affine):
            return above(*pair)
        if isinstance(pair[0], Work | Glue):
            return joined(pair, lines)
        raise unruled(name, pair[0])

    selective = None
    if one.selective is not None and two.selective is not None:  # the rule is that of the batch that came last
        rule = {name: getattr(two.selective, name) for name in ("flop_per_byte", "num_held")}
        selective = joined((one.selective, two.selective), lines, **rule)
    return joined(
        (one, two),
        lines,
        block=one.block,
        needs_backward=one.needs_backward,
        splittable=one.splittable and two.splittable,
        note=one.note or two.note,
        num_saved=max(one.num_saved, two.num_saved),
        num_kept=max(one.num_kept, two.num_kept),
        kind=kind,
        selective=selective,
        tiled=tuple(dict.fromkeys((*one.tiled, *two.tiled))),
    )
