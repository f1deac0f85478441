"""One profile for two shapes: nothing in it is below either of them."""

from __future__ import annotations

from dataclasses import fields, replace

from hightide.ir.block import Affine, CallSpec, ModelProfile
from hightide.planner.wider_profile import wider, with_blocks_of
from unit.planner.profiles import stack


def stretched(profile: ModelProfile, factor: int, num_samples: int) -> ModelProfile:
    """A longer batch: fixed parts stay, all others grow."""

    def longer(call: CallSpec) -> CallSpec:
        lines = {one.name: getattr(call, one.name) for one in fields(call)}
        grown = {n: Affine(v.fixed, factor * v.per_sample) for n, v in lines.items() if isinstance(v, Affine)}
        return replace(call, **grown)

    return replace(profile, num_samples=num_samples, calls=tuple(map(longer, profile.calls)))


def test_it_holds_both() -> None:
    many = stack()
    long = stretched(many, 3, max(1, many.num_samples // 2))
    both = wider(many, long)
    assert both is not None and both.num_samples == many.num_samples
    for one in (many, long):
        for wide, call in zip(both.calls, one.calls, strict=True):
            for field in fields(CallSpec):
                line = getattr(call, field.name)
                if isinstance(line, Affine):
                    for size in range(1, both.num_samples + 1):
                        assert getattr(wide, field.name).at(size) >= line.at(size), field.name
    assert wider(many, many) is not None


def test_other_ways_through_the_model_have_none() -> None:
    profile = stack()
    assert wider(profile, replace(profile, calls=profile.calls[:-1])) is None


def test_blocks_keep_their_numbers() -> None:
    profile = stack()
    order = [block.index for block in profile.blocks if not block.loose][::-1]
    turned = replace(
        profile,
        blocks=tuple(replace(profile.blocks[old], index=new) for new, old in enumerate(order)),
        calls=tuple(replace(call, block=order.index(call.block)) for call in profile.calls),
    )
    same = with_blocks_of(turned, profile)
    assert same is not None and [call.block for call in same.calls] == [call.block for call in profile.calls]
    renamed = replace(profile, blocks=tuple(replace(block, name=block.name + "x") for block in profile.blocks))
    assert with_blocks_of(renamed, profile) is None
