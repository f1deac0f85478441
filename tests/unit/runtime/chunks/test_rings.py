"""Buffers of what lives on disk: what is in them, who uses them, where they lie."""

from __future__ import annotations

import pytest
import torch

from hightide.ir.tier import ChunkKind
from hightide.runtime.chunks.rings import Ring
from hightide.stores.host_arena import HostArena

PARAM, GRAD = ChunkKind.PARAM, ChunkKind.GRAD


@pytest.fixture
def ring() -> Ring:
    return Ring(HostArena(2**16), num_buffers=3, buffer_bytes=8192)


def test_buffers_begin_with_pages_and_do_not_overlap(ring: Ring) -> None:
    addresses = [ring.array(buffer, torch.float32, 2048).view.data_ptr() for buffer in range(3)]
    assert [address - addresses[0] for address in addresses] == [0, 8192, 16384]
    assert addresses[0] % 4096 == 0
    inside = ring.array(1, torch.int16, 8, offset_bytes=4096)
    assert inside.view.data_ptr() == addresses[1] + 4096
    assert ring.array(1, torch.int16, 8, offset_bytes=4096) is inside, "made once"


def test_memory_that_does_not_begin_with_a_page_is_noticed() -> None:
    host = HostArena(2**16)
    host.allocate(512, "somebody came first")
    with pytest.raises(AssertionError, match="begin with a page"):
        Ring(host, num_buffers=1, buffer_bytes=4096)


def test_a_buffer_is_for_the_last_content_that_it_was_given(ring: Ring) -> None:
    first = ring.fill(0, chunk=5, kind=PARAM)
    assert ring.holding(0, 5, PARAM) is first and ring.holding(0, 5, GRAD) is None and ring.of(5, PARAM) is first
    second = ring.fill(0, chunk=6, kind=PARAM)
    assert ring.holding(0, 5, PARAM) is None and ring.holding(0, 6, PARAM) is second
    ring.leave(first)
    assert ring.holding(0, 6, PARAM) is second, "somebody else is there by now"
    ring.leave(second)
    assert ring.of(6, PARAM) is None


def test_parameters_may_wait_twice_and_gradients_once(ring: Ring) -> None:
    for kind in (PARAM, GRAD):
        ring.fill(0, chunk=1, kind=kind)
        ring.fill(2, chunk=1, kind=kind)
        assert (ring.holding(0, 1, kind) is not None) == (kind is PARAM)
        assert ring.holding(2, 1, kind) is not None


def test_what_was_made_obsolete_is_not_good(ring: Ring) -> None:
    contents = [ring.fill(buffer, chunk, PARAM) for buffer, chunk in enumerate((1, 2, 1))]
    for content in contents:
        content.is_good = True
    ring.forget(1)
    assert [content.is_good for content in contents] == [False, True, False]
