"""Every test starts from the same seeds and one thread, and needs no network. Timeouts are in pyproject.toml."""

from __future__ import annotations

import gc
import importlib
import os
import random
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: a test must not wait for a download

import pytest
import torch
from hypothesis import settings

import hightide.asked
import hightide.profiler.model.model_profile
import hightide.wrapping
from known_profiles import KnownProfiles

TESTS = Path(__file__).resolve().parent

settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("repeatable")

gc.disable()  # until the tests are collected: what is imported stays
torch.set_num_threads(1)  # tests run side by side; more threads only make them wait for each other


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _simulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that are not about a GPU mean the simulated accelerator, also where there is one."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(hightide.asked, "has_cuda", lambda: False)


PROFILED_EACH_TIME = {"profiler", "rehearsal", "project", "gpu"}  # folders of tests that are about profiles
_known_profiles = KnownProfiles(hightide.profiler.model.model_profile.profile_calls)


@pytest.fixture(autouse=True)
def _profiled_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if PROFILED_EACH_TIME.isdisjoint(request.path.relative_to(TESTS).parts):
        for module in (hightide.profiler.model.model_profile, hightide.wrapping):
            monkeypatch.setattr(module, "profile_calls", _known_profiles)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard", default="1/1", metavar="K/N", help="only every N-th of the selected tests, from the K-th"
    )


@pytest.hookimpl(trylast=True)  # after the selection by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _skip_gpu_tests(items)
    shard, num_shards = map(int, config.getoption("--shard").split("/"))
    if not 1 <= shard <= num_shards:
        raise pytest.UsageError(f"--shard {shard}/{num_shards}: shards are numbered from 1 to {num_shards}")
    rest = [item for number, item in enumerate(items) if number % num_shards != shard - 1]
    items[:] = items[shard - 1 :: num_shards]
    config.hook.pytest_deselected(items=rest)


def pytest_collection_finish() -> None:
    """Torch, transformers and the tests themselves are half a million objects, which no test makes garbage of: whoever
    collects garbage looks through them no more."""
    importlib.import_module("torch._dynamo")  # the first optimizer would, after this
    gc.freeze()
    gc.enable()


MANY = 50_000  # objects that have come to stay; tests that collect garbage do so several times each


@pytest.fixture(autouse=True, scope="module")
def _frozen_again() -> None:
    """What was imported since, or remembered, stays too."""
    if len(gc.get_objects(generation=2)) > MANY:
        gc.collect()
        gc.freeze()


def _skip_gpu_tests(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:  # not by keyword: those hold the ids of parameters too
            item.add_marker(skip)
