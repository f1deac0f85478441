"""The examination of a real GPU."""

from __future__ import annotations

import time

import pytest
import torch

from hightide.doctor.identity import fingerprint
from hightide.doctor.measure import examine
from hightide.ir.machine import subsets
from hightide.ir.tier import Lane

pytestmark = pytest.mark.gpu


@pytest.mark.alone
def test_a_gpu_is_measured_in_half_a_minute_and_leaves_nothing() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated(device)
    started_s = time.monotonic()
    report = examine(device)
    assert time.monotonic() - started_s < 30
    assert torch.cuda.memory_allocated(device) - before_bytes < 128 << 20, "more than workspaces of cuBLAS"
    machine = report.machine
    assert [speeds.busy for speeds in machine.speeds] == subsets()
    assert machine.gpu is not None and machine.host is not None and machine.unpinned is not None
    assert machine.fingerprint == fingerprint(device) and machine.fingerprint.gpu_uuid
    assert not machine.is_simulated and report.free.gpu_bytes is not None

    alone = {lane: machine.speeds_of({lane})[lane] for lane in (Lane.H2D, Lane.D2H)}
    assert alone[Lane.H2D] > 1.2 * machine.unpinned.h2d_bytes_per_s, "pinned memory is not faster"
    both = machine.speeds_of({Lane.H2D, Lane.D2H})
    assert all(0.3 * alone[lane] < both[lane] < 1.05 * alone[lane] for lane in alone)
    products = machine.gpu.matmul_flop_per_s
    assert products.tf32 is not None and products.bfloat16 > products.tf32 > products.float32
    assert machine.gpu.memory_bytes_per_s > 5 * alone[Lane.H2D]
    assert 1e-6 < machine.latency_s < 1e-3
    assert machine.first_part is not None and 1.0 <= machine.first_part < 1.6, "of an update in C, in two parts"
