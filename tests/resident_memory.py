"""A script in a process of its own that measures peaks of its resident memory, and prints them as JSON."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from forked import run_script

# What is freed goes back at once. By default malloc begins to keep blocks of up to 32 MiB after it has freed some, and
# how much of that is still resident changes from run to run by more than the slack of a test.
STEADY_BYTES = 256 * 1024


def reported(script: str, *arguments: str) -> dict[str, Any]:
    """Its last line."""
    if not os.path.exists("/proc/self/clear_refs"):
        pytest.skip("reads the peak of resident memory from /proc")
    done = run_script(script, arguments, timeout_s=110, mmap_bytes=STEADY_BYTES, quick_end=True)
    assert done.status == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report
