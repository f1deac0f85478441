"""The buffers of a table on the host: nothing is written over what is still on its way."""

from __future__ import annotations

import pytest
import torch

from hightide.runtime.tables.host_table import HostTable
from hightide.stores.array import Array
from hightide.stores.host_arena import HostArena
from hightide.stores.simulated import SimulatedAccelerator

ROWS, WIDTH = 12, 4


class Fence:
    """Of a copy that the GPU has not done yet."""

    def __init__(self, waited: list[int]) -> None:
        self.number = len(waited)
        self._waited = waited

    def join(self) -> None:
        raise AssertionError("the host writes there: a stream that waits is not enough")

    def synchronize(self) -> None:
        self._waited.append(self.number)


def table(num_rows: int = 3, gradients: int = 3) -> HostTable:
    gpu, host = SimulatedAccelerator(2**20), HostArena(2**20)
    shape, num_bytes = (ROWS, WIDTH), ROWS * WIDTH * 4
    weight, gradient = (Array(host, host.allocate(num_bytes, name), torch.float32, shape) for name in ("w", "g"))
    weight.view.copy_(torch.arange(ROWS * WIDTH).view(shape))
    return HostTable("w", weight, gradient, gpu, host, (num_rows * WIDTH * 4, gradients * WIDTH * 4))


def test_rows_are_gathered_when_those_before_are_on_the_gpu() -> None:
    looked_up, waited = table(), []
    for call, ids in enumerate(([1, 2, 3], [4, 4], [0])):
        into = torch.empty(len(ids), WIDTH)
        copy = looked_up.look_up(torch.tensor(ids), into, lambda: Fence(waited))
        assert len(waited) == call, "the first has nobody to wait for"
        assert looked_up.arriving is into
        assert copy() == into.nbytes
        assert torch.equal(into, looked_up.weight.view[ids])


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_more_than_the_buffer_holds_goes_in_parts(num_rows: int) -> None:
    looked_up, waited = table(num_rows), []
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    into = torch.empty(len(ids), WIDTH)
    assert looked_up.look_up(ids, into, lambda: Fence(waited))() == into.nbytes
    assert torch.equal(into, looked_up.weight.view[ids])
    assert len(waited) == (-(-len(ids) // num_rows) - 1 if num_rows else 0)


@pytest.mark.parametrize("gradients", [0, 2, 6])
def test_gradients_that_have_no_room_leave_at_once(gradients: int) -> None:
    looked_up = table(gradients=gradients)
    made = torch.randn(2, 2, WIDTH)
    rows, send = looked_up.leave(made.transpose(0, 1))
    sent = send()
    assert sent == (made.nbytes if gradients >= 4 else 0)
    assert torch.equal(rows, made.transpose(0, 1).reshape(4, WIDTH))
