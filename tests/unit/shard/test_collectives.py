"""Parts of sections; a rank that is alone exchanges nothing."""

from __future__ import annotations

import pytest
import torch

from hightide.shard.agreement import check_same, from_first, least
from hightide.shard.collectives import Collectives, Section
from hightide.shard.ranks import Ranks


def test_parts_of_a_section_are_equal_and_cover_it() -> None:
    section = Section(7, 12)
    whole = torch.arange(30)
    assert torch.cat([section.part(rank, 3).of(whole) for rank in range(3)]).tolist() == list(range(7, 19))
    with pytest.raises(AssertionError, match="cannot be divided among 5 ranks"):
        section.part(0, 5)


def test_alone_nothing_is_exchanged() -> None:
    alone = Collectives(Ranks.alone())
    whole, shard = torch.zeros(5), torch.arange(4.0)
    alone.gather("a chunk", whole, [Section(0, 2), Section(2, 0), Section(3, 2)], shard)
    assert whole.tolist() == [0, 1, 0, 2, 3]
    out = torch.empty(3)
    alone.reduce("a gradient", whole, [Section(0, 1), Section(3, 2)], out)
    alone.reduce_whole("a gradient", whole)
    assert out.tolist() == [0, 2, 3] and whole.tolist() == [0, 1, 0, 2, 3]
    alone.sum_all("squares", whole)
    assert whole.tolist() == [0, 1, 0, 2, 3]
    assert alone.any_true("overflow", True) and not alone.any_true("overflow", False)
    assert alone.broadcast_bytes("text", b"text") == b"text"


def test_alone_all_agree() -> None:
    alone = Collectives(Ranks.alone())
    assert from_first(alone, "the plan", lambda: "plan") == "plan"
    assert least(alone, {"gpu": 3, "host": None}) == {"gpu": 3, "host": None}
    check_same(alone, {"model": "abc"})
