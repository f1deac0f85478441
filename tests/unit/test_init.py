"""`import hightide` is cheap, and has all its public names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hightide


@pytest.mark.parametrize("name", hightide.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(hightide, name).__name__ == name and name in dir(hightide)


def test_others_are_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'warp'"):
        _ = hightide.warp  # type: ignore[attr-defined,unused-ignore]


def test_torch_is_imported_when_a_name_needs_it() -> None:
    code = "import sys, hightide; assert 'torch' not in sys.modules; hightide.wrap; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
