"""Chunks for several ranks: every element has one owner, and shards add up to the whole with its padding."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hightide.ir.block import ModelProfile
from hightide.ir.chunk import ALIGN_NUMEL, ChunkSpec
from hightide.planner.layout import made_again, pack, slot_sizes
from unit.planner.profiles import Sketch, build, call, param, profiles, stack


@given(profiles(), st.integers(2, 4), st.sampled_from([128, 512, 4096]))
@settings(max_examples=60, deadline=None)
def test_every_element_has_one_owner_at_its_place(profile: ModelProfile, num_shards: int, slot_numel: int) -> None:
    layout = pack(profile, slot_numel, num_shards=num_shards)
    owned: Counter[tuple[str, int]] = Counter()
    for chunk in layout.chunks:
        shards = [chunk.shard(rank, num_shards) for rank in range(num_shards)]
        for name in ("numel", "trainable_numel", "optimised_numel", "param_bytes", "grad_bytes"):
            assert {getattr(shard, name) * num_shards for shard in shards} == {getattr(chunk, name)}
        for rank, shard in enumerate(shards):
            own = [element for part in chunk.own_ranges(rank, num_shards) for element in part]
            assert len(own) == shard.numel
            for part in shard.params:
                whole = next(place for place in chunk.params if place.param == part.param)
                assert not part.start_numel % ALIGN_NUMEL and not part.offset_numel % ALIGN_NUMEL
                for element in range(part.numel):
                    there = whole.offset_numel + part.start_numel + element
                    assert own[part.offset_numel + element] == there
                    owned[part.param, part.start_numel + element] += 1
    expected = {(spec.name, element) for spec in profile.params for element in range(spec.numel)}
    assert owned.keys() == expected and set(owned.values()) <= {1}


@given(profiles(), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_padding_is_less_than_a_unit_for_each_section(profile: ModelProfile, num_shards: int) -> None:
    plain, padded = pack(profile, 2**20), pack(profile, 2**20, num_shards=num_shards)
    unit = num_shards * ALIGN_NUMEL
    for one, other in zip(plain.chunks, padded.chunks, strict=True):
        for section, longer in zip(one.sections, other.sections, strict=True):
            assert not len(longer) % unit and 0 <= len(longer) - len(section) < unit
        assert [place.param for place in one.params] == [place.param for place in other.params]
    assert list(made_again(profile, padded, num_shards)) == list(padded.chunks)


def test_one_rank_has_the_whole_and_the_same_object() -> None:
    (chunk, *_) = pack(stack(2), 4096).chunks
    assert chunk.shard(0, 1) is chunk


def test_sections_are_divided_each_for_itself() -> None:
    """So a shard is a chunk: its states and its gradient are prefixes of it too."""
    specs = [
        param("a", 200, group=0),
        param("b", 100, group=None),
        param("c", 10, trainable=False, group=None),
        param("d", 130, trainable=False, group=None),
    ]
    profile = build(specs, [Sketch("b", [spec.name for spec in specs])], [call(0)])
    (chunk,) = pack(profile, 2**20, num_shards=2).chunks
    assert [len(section) for section in chunk.sections] == [256, 256, 512]

    def parts(shard: ChunkSpec) -> list[tuple[str, int, int, int]]:
        return [(part.param, part.offset_numel, part.numel, part.start_numel) for part in shard.params]

    assert parts(chunk.shard(0, 2)) == [("a", 0, 128, 0), ("b", 128, 100, 0), ("c", 256, 10, 0), ("d", 384, 128, 0)]
    assert parts(chunk.shard(1, 2)) == [("a", 0, 72, 128), ("d", 256, 2, 128)]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_equal_layers_fill_their_slots_for_any_number_of_ranks(num_shards: int) -> None:
    profile = stack(num_layers=12)
    size = slot_sizes(profile, num_shards)[0]
    chunks = [chunk for chunk in pack(profile, size, num_shards=num_shards).chunks if 1 <= chunk.block <= 12]
    assert len(chunks) == 12 and {chunk.numel for chunk in chunks} == {size}
