"""Processes that start ranks, one for all of these tests that are about the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from started_ranks import StartedRanks


@pytest.fixture(scope="session")
def started() -> Iterator[StartedRanks]:
    ranks = StartedRanks("rank_programs", Path(__file__).parent, quick_end=True)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def training() -> Iterator[StartedRanks]:
    ranks = StartedRanks("ranked_training", Path(__file__).parent, quick_end=True)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def checkpoints() -> Iterator[StartedRanks]:
    ranks = StartedRanks("ranked_checkpoints", Path(__file__).parent, quick_end=True)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def any_model() -> Iterator[StartedRanks]:
    ranks = StartedRanks("ranked_covering", Path(__file__).parent, quick_end=True)
    yield ranks
    ranks.close()
