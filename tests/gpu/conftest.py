"""Each test finds the device clean, and leaves no limit on it: the next one of the process would run into it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from hightide.doctor import known
from hightide.stores import device_limit


@pytest.fixture(autouse=True)
def _machine_of_the_tests(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is measured here, beside other tests, must not become the user's machine."""
    path = tmp_path_factory.getbasetemp() / "machine.json"
    monkeypatch.setattr(known, "cache_path", lambda: path)


@pytest.fixture(autouse=True)
def _clean_device(request: pytest.FixtureRequest) -> Iterator[None]:
    num_failed = request.session.testsfailed
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # one for each stream that a test has multiplied on; peaks would count it
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    gc.collect()  # a model that was only dropped lies in a cycle
    passed = request.session.testsfailed == num_failed  # the traceback of a failed one holds its model
    assert not passed or not device_limit._devices, "a limit was left behind"
