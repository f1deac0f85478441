"""Which machine this is: what a measurement belongs to."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from hightide.ir.machine import SIMULATED, Fingerprint
from hightide.process.system import host_bytes, usable_cores


def fingerprint(device: torch.device) -> Fingerprint:
    return Fingerprint(
        gpu=gpu_name(device),
        gpu_uuid=str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "",
        driver=_first_line("/sys/module/nvidia/version") if device.type == "cuda" else "",
        processor=processor_name(),
        num_cores=usable_cores(),
        memory_gib=round(host_bytes() / 2**30),  # what a kernel keeps for itself varies a little
        torch=torch.__version__,
    )


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else SIMULATED


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return ""
