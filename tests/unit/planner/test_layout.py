from dataclasses import replace

from hypothesis import given, settings

from hightide.ir.chunk import ALIGN_NUMEL, aligned
from hightide.ir.state_spec import ADAM_STATES, REMAINDER
from hightide.planner.layout import LATENCY_NUMEL, pack, slot_candidates, slot_sizes
from unit.planner.profiles import Sketch, build, call, param, profiles, stack


def names(chunk):
    return [place.param for place in chunk.params]


def test_chunks_follow_execution_order_and_blocks():
    layout = pack(stack(num_layers=2), slot_numel=4096)
    assert [chunk.block for chunk in layout.chunks] == [0, 1, 2, 3, 4]
    assert [chunk.users for chunk in layout.chunks] == [(0,), (1,), (2,), (3,), (4,)]


def test_optimised_by_group_then_trainable_then_frozen():
    specs = [
        param("frozen", 10, trainable=False),
        param("free", 10, group=None),
        param("one", 10, group=1),
        param("zero", 10, group=0),
        param("one more", 10, group=1),
    ]
    profile = build(specs, [Sketch("b", [spec.name for spec in specs])], [call(0)])
    (chunk,) = pack(profile, 4096).chunks
    assert names(chunk) == ["zero", "one", "one more", "free", "frozen"]
    sizes = (chunk.optimised_numel, chunk.trainable_numel, chunk.numel)
    assert sizes == (3 * ALIGN_NUMEL, 4 * ALIGN_NUMEL, 5 * ALIGN_NUMEL)


def test_a_chunk_ends_where_the_slot_would_overflow_and_a_large_parameter_is_alone():
    specs = [param("a", 200), param("b", 900), param("c", 100), param("d", 100)]
    profile = build(specs, [Sketch("b", ["a", "b", "c", "d"])], [call(0)])
    layout = pack(profile, slot_numel=384)
    assert [names(chunk) for chunk in layout.chunks] == [["a"], ["b"], ["c", "d"]]
    assert layout.num_slots(layout.chunks[1]) == 3  # 1024 elements in slots of 384


def test_a_tied_parameter_lives_once_in_a_chunk_of_its_own():
    specs = [param("embed", 500), param("scale", 10), param("head", 10)]
    profile = build(specs, [Sketch("e", ["embed", "scale"]), Sketch("h", ["head", "embed"])], [call(0), call(1)])
    layout = pack(profile, 4096)
    assert [(names(chunk), chunk.block, chunk.users) for chunk in layout.chunks] == [
        (["scale"], 0, (0,)),
        (["embed"], 0, (0, 1)),
        (["head"], 1, (1,)),
    ]


def test_what_the_loose_block_shares_belongs_to_it():
    specs = [param("w", 500)]
    profile = build(specs, [Sketch("a", ["w"]), Sketch("", ["w"], loose=True)], [call(0)])
    (chunk,) = pack(profile, 4096).chunks
    assert (chunk.block, chunk.users) == (1, (0, 1))


def test_dtypes_do_not_mix_and_low_precision_has_a_master():
    specs = [param("a", 100, "bfloat16"), param("b", 100, "float32")]
    profile = build(specs, [Sketch("x", ["a", "b"])], [call(0)])
    low, full = pack(profile, 4096).chunks
    assert (low.dtype, full.dtype) == ("bfloat16", "float32")
    assert (low.states, full.states) == ((*ADAM_STATES, REMAINDER), ADAM_STATES)
    assert len(pack(profile, 4096, ADAM_STATES[:1]).chunks[0].states) == 2


def test_blocks_never_called_have_chunks_too():
    profile = build([param("a", 10), param("unused", 10)], [Sketch("x", ["a"]), Sketch("y", ["unused"])], [call(0)])
    assert [chunk.block for chunk in pack(profile, 4096).chunks] == [0, 1]


@given(profiles())
@settings(max_examples=60, deadline=None)
def test_every_parameter_lies_once_aligned_and_without_overlap(profile):
    layout = pack(profile, 512)
    placed = [place for chunk in layout.chunks for place in chunk.params]
    assert sorted(place.param for place in placed) == sorted(spec.name for spec in profile.params)
    for chunk in layout.chunks:
        end = 0
        for place in chunk.params:
            assert place.offset_numel % ALIGN_NUMEL == 0 and place.offset_numel >= end
            end = place.offset_numel + aligned(place.numel)
        assert chunk.numel == end and chunk.optimised_numel <= chunk.trainable_numel <= chunk.numel
        assert len(chunk.params) == 1 or chunk.numel <= 512


def held(chunk):
    return {place.param for place in chunk.params}


def brute_cost(profile, slot_numel):
    """Written out again from the definition, fetch by fetch."""
    layout = pack(profile, slot_numel)
    numel = {spec.name: spec.numel for spec in profile.params}
    sizes = [sum(numel[key] for key in block.params) for block in profile.blocks if not block.loose]
    middle = sorted(sizes)[len(sizes) // 2]
    trained = {spec.name for spec in profile.params if spec.trainable}
    adapters = set()
    for block in profile.blocks:
        mine = trained & set(block.params)
        if not block.loose and sum(numel[key] for key in mine) * 4 < sum(numel[key] for key in block.params):
            adapters |= mine
    cost = 0
    for entry in profile.calls:
        for _ in ("forward", "backward") if entry.needs_backward else ("forward",):
            for chunk in layout.chunks:
                if entry.block not in chunk.users or profile.blocks[chunk.block].loose or adapters & held(chunk):
                    continue
                if sum(numel[key] for key in profile.blocks[chunk.block].params) * 64 >= middle:
                    slots = max(1, -(-chunk.numel // slot_numel))
                    cost += slots * slot_numel - chunk.numel + LATENCY_NUMEL
    return cost


def lora(num_layers=2):
    """The second of three matrices of each layer is trained, and small."""
    profile = stack(num_layers=num_layers)
    specs = [replace(spec, trainable=False, group=None) for spec in profile.params]
    small = {block.params[0] for block in profile.blocks if "layers" in block.name}
    specs = [replace(s, trainable=True, group=0, shape=(32,)) if s.name in small else s for s in specs]
    return replace(profile, params=tuple(specs)), small


def test_what_little_is_trained_lies_apart():
    profile, small = lora()
    assert small
    for chunk in pack(profile, slot_numel=4096).chunks:
        assert held(chunk) <= small or not held(chunk) & small
        assert (chunk.trainable_numel == chunk.numel) if held(chunk) & small else (chunk.trainable_numel == 0)


@given(profiles())
@settings(max_examples=60, deadline=None)
def test_the_slot_size_found_is_the_cheapest_candidate(profile):
    found = slot_sizes(profile)[0]
    costs = {size: brute_cost(profile, size) for size in slot_candidates(profile)}
    assert costs[found] == min(costs.values())
    assert found == max(size for size, cost in costs.items() if cost == costs[found])


def test_equal_layers_fill_their_slots():
    profile = stack(num_layers=12)
    layer = next(chunk for chunk in pack(profile, slot_sizes(profile)[0]).chunks if chunk.block == 1)
    assert slot_sizes(profile)[0] == layer.numel


def test_a_huge_embedding_does_not_blow_up_the_slots():
    profile = stack(num_layers=12)
    specs = tuple(replace(spec, shape=(200_000,)) if spec.name == "embed.weight" else spec for spec in profile.params)
    assert slot_sizes(replace(profile, params=specs))[0] < 100_000


def test_beside_a_huge_table_slots_are_not_tiny() -> None:
    """Else a model of a table and little more has a hundred thousand of them, and no search ends."""
    specs = [param("table", 160_000_000), param("small", 256)]
    profile = build(specs, [Sketch("embed", ["table"]), Sketch("layer", ["small"])], [call(0), call(1)])
    layouts = [pack(profile, slot_numel) for slot_numel in slot_sizes(profile)]
    assert max(layout.num_slots(chunk) for layout in layouts for chunk in layout.chunks) <= 256
