"""Parameters into chunks, and the slot size that wastes least.

In a chunk optimised parameters come first, group by group, then other trainable ones, then frozen ones: so its gradient
and its states are prefixes of its elements, and an update is a few ranges. Where little of a block is trained (LoRA),
that lies in chunks of its own: they may stay on the GPU with their states while the frozen ones stream. A parameter
that is larger than a slot makes a chunk that takes several slots in a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from statistics import median_high

from hightide.ir.block import ModelProfile, ParamSpec
from hightide.ir.chunk import ALIGN_NUMEL, ChunkSpec, Layout, ParamRange, aligned
from hightide.ir.state_spec import ADAM_STATES, StateSpecs, with_master

LATENCY_NUMEL = 1024 * 1024  # what one more transfer costs, in elements that the link could have moved instead
TINY_FRACTION = 1 / 64  # of the median block: smaller blocks are not worth streaming
MOST_SLOTS_WIDE = 256  # that one parameter takes: each is an entry of every list that a search makes
ADAPTER_FRACTION = 1 / 4  # of a block: if less of it is trained, this lies apart from what is frozen


def pack(profile: ModelProfile, slot_numel: int, states: StateSpecs = ADAM_STATES, num_shards: int = 1) -> Layout:
    """Chunks in execution order, block by block and dtype by dtype; adapters apart from what is frozen. Each can be cut
    into so many equal shards.

    Shared parameters go to the first block that uses them (to the loose pseudo-block, if that is one of them: plain
    autograd must find them on the GPU), in chunks of their own, so that the other users fetch nothing but them."""
    chunks: list[ChunkSpec] = []
    backwards = Counter(call.block for call in profile.calls if call.needs_backward)
    for (block, users, dtype, _), params in _bundles(profile):
        num_backwards = 0 if profile.blocks[block].loose else sum(backwards[user] for user in users)
        specs = list(params)
        for part in _cut(_sizes(specs), slot_numel, num_shards):
            chunks.append(_chunk(len(chunks), block, users, dtype, specs[part], states, num_backwards, num_shards))
    return Layout(slot_numel, tuple(chunks))


def made_again(profile: ModelProfile, layout: Layout, num_shards: int = 1) -> Iterator[ChunkSpec]:
    """What each chunk is by the parameters that are said to lie in it: an edited layout is held against it. Which of
    them lie together, and how often a step adds to their gradients, is taken as it is."""
    bundles = {spec.name: bundle for bundle, params in _bundles(profile) for spec in params}
    for chunk in layout.chunks:
        specs = sorted((profile.param(place.param) for place in chunk.params), key=_section)
        block, users, dtype, _ = bundles[specs[0].name]
        yield _chunk(chunk.index, block, users, dtype, specs, chunk.rule_states, chunk.num_backwards, num_shards)


def slot_sizes(profile: ModelProfile, num_shards: int = 1) -> tuple[int, ...]:
    """The block sizes, their halves, thirds and quarters, by cost; of equals the larger one first.

    Cost of a size, over all fetches of a step: slot elements that stay empty, plus LATENCY_NUMEL for each transfer.
    Tiny blocks do not count: they are the first to become persistent, and must not decide about the others."""
    fetches = _fetches(profile)
    candidates = slot_candidates(profile, num_shards)
    return tuple(sorted(candidates, key=lambda slot_numel: (_cost(fetches, slot_numel, num_shards), -slot_numel)))


def slot_candidates(profile: ModelProfile, num_shards: int = 1) -> set[int]:
    specs = {spec.name: spec for spec in profile.params}
    tiny = tiny_blocks(profile)
    counted = [block for block in profile.blocks if not block.loose and block.index not in tiny]
    apart = adapters(profile)
    members = ([specs[key] for key in block.params if key not in apart] for block in counted)
    sizes = {_padded(_sizes(params), num_shards) for params in members}
    parts = {_pad(-(-size // part), num_shards) for size in sizes for part in (1, 2, 3, 4)}
    widest = max((spec.numel for spec in profile.params), default=0)  # beside a huge table all else may be tiny
    least = max(ALIGN_NUMEL, aligned(-(-widest // MOST_SLOTS_WIDE)))
    return {max(part, least) for part in parts} or {least}


def tiny_blocks(profile: ModelProfile) -> frozenset[int]:
    specs = {spec.name: spec for spec in profile.params}
    sizes = {b.index: sum(specs[key].numel for key in b.params) for b in profile.blocks if not b.loose}
    median = median_high(sizes.values()) if sizes else 0
    return frozenset(block for block, size in sizes.items() if size < TINY_FRACTION * median)


def adapters(profile: ModelProfile) -> frozenset[str]:
    """Trainable parameters of blocks that are mostly frozen (LoRA): few bytes, which can stay on the GPU, with their
    gradients and states, while the rest streams."""
    specs = {spec.name: spec for spec in profile.params}
    found: set[str] = set()
    for block in profile.blocks:
        trained = [key for key in block.params if specs[key].trainable]
        numel = sum(specs[key].numel for key in block.params)
        if not block.loose and sum(specs[key].numel for key in trained) < ADAPTER_FRACTION * numel:
            found.update(trained)
    return frozenset(found)


Sizes = tuple[tuple[int, int], ...]  # of parameters: the section of the chunk, and the elements that it takes


def _fetches(profile: ModelProfile) -> Counter[Sizes]:
    """How often a step fetches parameters of these sizes together: equal blocks cost the same."""
    tiny = tiny_blocks(profile)
    num_fetches = [0] * len(profile.blocks)
    for call in profile.calls:
        num_fetches[call.block] += 2 if call.needs_backward else 1
    found: Counter[Sizes] = Counter()
    for (block, users, _, is_adapter), params in _bundles(profile):
        if not (profile.blocks[block].loose or block in tiny or is_adapter):
            found[_sizes(params)] += sum(num_fetches[user] for user in users)
    return found


def _cost(fetches: Counter[Sizes], slot_numel: int, num_shards: int) -> int:
    cost = 0
    for sizes, count in fetches.items():
        numels = [_padded(sizes[part], num_shards) for part in _cut(sizes, slot_numel, num_shards)]
        slots_numel = sum(max(1, -(-numel // slot_numel)) * slot_numel for numel in numels)
        cost += count * (slots_numel - sum(numels) + len(numels) * LATENCY_NUMEL)
    return cost


Bundle = tuple[int, tuple[int, ...], str, bool]  # owner, users, dtype, whether adapters


def _bundles(profile: ModelProfile) -> Iterator[tuple[Bundle, Iterable[ParamSpec]]]:
    """Parameters that may lie together, in the order of their chunks."""
    users: dict[str, list[int]] = {}
    rank: dict[str, int] = {}
    for block in profile.blocks:
        for key in block.params:
            rank.setdefault(key, len(rank))
            users.setdefault(key, []).append(block.index)
    lost = [spec.name for spec in profile.params if spec.name not in users]
    assert not lost, f"parameters of no block: {lost}"
    loose = {block.index for block in profile.blocks if block.loose}
    apart = adapters(profile)

    def bundle(spec: ParamSpec) -> Bundle:
        mine = users[spec.name]
        owner = next((user for user in mine if user in loose), mine[0])
        return owner, tuple(mine), spec.dtype, spec.name in apart

    def order(spec: ParamSpec) -> tuple[int, bool, tuple[int, ...], str, int, int, int]:
        owner, mine, dtype, _ = bundles[spec.name]
        return owner, len(mine) > 1, mine, dtype, *_section(spec), rank[spec.name]

    bundles = {spec.name: bundle(spec) for spec in profile.params}
    return groupby(sorted(profile.params, key=order), key=lambda spec: bundles[spec.name])


def _section(spec: ParamSpec) -> tuple[int, int]:
    """Optimised group by group, then trainable, then frozen: gradients and states are prefixes of a chunk."""
    if not spec.trainable:
        return 2, 0
    return (1, 0) if spec.group is None else (0, spec.group)


def _sizes(params: Iterable[ParamSpec]) -> Sizes:
    return tuple((_section(spec)[0], aligned(spec.numel)) for spec in params)


def _padded(sizes: Sizes, num_shards: int) -> int:
    """Of a chunk of these parameters."""
    return sum(_pad(sum(size for one, size in sizes if one == section), num_shards) for section in range(3))


def _pad(numel: int, num_shards: int) -> int:
    """A section, so that it can be cut into shards that begin where parameters may."""
    unit = num_shards * ALIGN_NUMEL
    return -(-numel // unit) * unit


def _cut(sizes: Sizes, slot_numel: int, num_shards: int) -> Iterator[slice]:
    """Cuts where the slot would overflow. A parameter larger than a slot is alone and spans several."""
    first, numels = 0, [0, 0, 0]
    for at, (section, size) in enumerate(sizes):
        numels[section] += size
        if at > first and sum(_pad(numel, num_shards) for numel in numels) > slot_numel:
            yield slice(first, at)
            first, numels = at, [0, 0, 0]
            numels[section] = size
    yield slice(first, len(sizes))


def _chunk(
    index: int,
    block: int,
    users: tuple[int, ...],
    dtype: str,
    members: Sequence[ParamSpec],
    states: StateSpecs,
    num_backwards: int,
    num_shards: int,
) -> ChunkSpec:
    ranges: list[ParamRange] = []
    ends = [0, 0, 0]  # of the optimised, the trainable and all parameters, each padded
    end = last = 0
    for spec in members:
        section, _ = _section(spec)
        end, last = (end if section == last else ends[last]), section
        ranges.append(ParamRange(spec.name, end, spec.numel))
        end = ranges[-1].end_numel
        start = ends[section - 1] if section else 0
        ends[section:] = [start + _pad(end - start, num_shards)] * (3 - section)
    numels = ends[2], ends[1], ends[0]
    return ChunkSpec(index, block, users, dtype, *numels, tuple(ranges), with_master(states, dtype), num_backwards)
