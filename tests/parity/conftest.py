"""Parity is of training; models are profiled once for all tests. See tests/known_profiles.py."""

from __future__ import annotations

import pytest

import hightide.profiler.model
from known_profiles import KnownProfiles

_known = KnownProfiles(hightide.profiler.model.profile_calls)


@pytest.fixture(autouse=True)
def _profiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hightide.profiler.model, "profile_calls", _known)
