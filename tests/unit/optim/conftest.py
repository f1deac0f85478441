"""What the tests of updates share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hightide.runtime.lanes.lanes import Lanes


@pytest.fixture(scope="package")
def lanes() -> Iterator[Lanes]:
    """Threads enough that a tile may run on any of several."""
    lanes = Lanes(timeout_s=60.0, num_update_threads=3)
    yield lanes
    lanes.close()
