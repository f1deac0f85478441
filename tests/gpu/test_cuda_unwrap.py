"""A model comes back to the device on which it was before, whole."""

from __future__ import annotations

import pytest

from unit.runtime.test_unwrap import check_unwrapped

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("before", ["cpu", "cuda"])
def test_everything_ends_on_the_device_where_the_model_was(before: str) -> None:
    check_unwrapped(before, "cuda")
