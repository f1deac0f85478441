"""One number per device stands for all limits: they add up, and the last to go leaves the device as it was."""

from __future__ import annotations

import pytest
import torch

from hightide.stores import device_limit
from hightide.stores.device_limit import Limit

TOTAL_BYTES = 1000


class FakeDevice:
    def __init__(self, fraction: float) -> None:
        self.fraction = fraction


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice(1.0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: fake.fraction, raising=False)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, index: setattr(fake, "fraction", fraction)
    )
    monkeypatch.setattr(device_limit, "_total_bytes", lambda index: TOTAL_BYTES)
    monkeypatch.setattr(device_limit, "LOADING_BYTES", 10)
    monkeypatch.setattr(device_limit, "_devices", {})
    return fake


def loaded(limit_bytes: int, outside_bytes: int) -> Limit:
    """A limit that is in force."""
    limit = Limit(limit_bytes)
    device_limit.add(0, limit, outside_bytes)
    device_limit.end_loading(0, limit, outside_bytes)
    return limit


def test_limits_add_up_on_top_of_what_was_there_before(device: FakeDevice) -> None:
    first = loaded(200, outside_bytes=50)
    assert device.fraction == 0.25
    second = loaded(300, outside_bytes=400)  # by now the first model's own memory would be counted
    assert device.fraction == 0.55
    device_limit.drop(0, first)
    assert device.fraction == 0.35
    device_limit.drop(0, second)
    assert device.fraction == 1.0
    loaded(100, outside_bytes=0)
    assert device.fraction == 0.1


def test_a_limit_counts_before_its_slab_is_there(device: FakeDevice) -> None:
    """And a model that was on the device stops to be outside once it is in its slab."""
    first, second = Limit(200, slab_bytes=80), Limit(100, slab_bytes=70)
    device_limit.add(0, first, 150)  # 50 of somebody else, and two models: 60 and 40
    assert device.fraction == 0.36, "nothing that is there is in the way while the first is loaded"
    device_limit.end_loading(0, first, 170)  # its slab is there, and the first model is not any more
    assert device.fraction == 0.29
    device_limit.add(0, second, 180)  # with what the first run has allocated
    assert device.fraction == 0.4, "its slab does not fail under the first one's limit"
    device_limit.end_loading(0, second, 210)
    assert device.fraction == 0.36
    device_limit.end_loading(0, second, 2000)
    assert device.fraction == 0.36, "what is allocated later is not outside"


def test_runs_on_a_device_are_counted(device: FakeDevice) -> None:
    assert device_limit.num_limits(0) == 0
    first, _ = loaded(200, 0), loaded(200, 0)
    assert (device_limit.num_limits(0), device_limit.num_limits(1)) == (2, 0)
    device_limit.drop(0, first)
    assert device_limit.num_limits(0) == 1


def test_the_whole_device_is_the_most(device: FakeDevice) -> None:
    loaded(900, outside_bytes=300)
    assert device.fraction == 1.0


def test_a_lower_limit_of_somebody_else_stays(device: FakeDevice) -> None:
    device.fraction = 0.3
    first = loaded(900, outside_bytes=0)
    assert device.fraction == 0.3
    second = loaded(100, outside_bytes=0)
    device_limit.drop(0, first)
    assert device.fraction == 0.1
    device_limit.drop(0, second)
    assert device.fraction == 0.3


def test_a_torch_that_cannot_tell_its_fraction_has_none(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    device_limit.drop(0, loaded(200, outside_bytes=0))
    assert device.fraction == 1.0
