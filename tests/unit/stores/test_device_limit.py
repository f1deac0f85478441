"""One number per device stands for all limits: they add up, and the last to go leaves the device as it was."""

from __future__ import annotations

import pytest
import torch

from hightide.stores import device_limit

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
    monkeypatch.setattr(device_limit, "_devices", {})
    return fake


def test_limits_add_up_on_top_of_what_was_there_before(device: FakeDevice) -> None:
    device_limit.add(0, 200, outside_bytes=50)
    assert device.fraction == 0.25
    device_limit.add(0, 300, outside_bytes=400)  # by now the first model's own memory would be counted
    assert device.fraction == 0.55
    device_limit.drop(0, 200)
    assert device.fraction == 0.35
    device_limit.drop(0, 300)
    assert device.fraction == 1.0
    device_limit.add(0, 100, outside_bytes=0)
    assert device.fraction == 0.1


def test_the_whole_device_is_the_most(device: FakeDevice) -> None:
    device_limit.add(0, 900, outside_bytes=300)
    assert device.fraction == 1.0


def test_a_lower_limit_of_somebody_else_stays(device: FakeDevice) -> None:
    device.fraction = 0.3
    device_limit.add(0, 900, outside_bytes=0)
    assert device.fraction == 0.3
    device_limit.add(0, 100, outside_bytes=0)
    device_limit.drop(0, 900)
    assert device.fraction == 0.1
    device_limit.drop(0, 100)
    assert device.fraction == 0.3


def test_a_torch_that_cannot_tell_its_fraction_has_none(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    device_limit.add(0, 200, outside_bytes=0)
    device_limit.drop(0, 200)
    assert device.fraction == 1.0
