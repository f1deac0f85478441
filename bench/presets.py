"""Writes src/hightide/machines/*.json: estimates for machines that nobody has measured yet.

    python bench/presets.py

Specifications are the makers' public figures. What is reached of them is taken from one H200 that was measured (torch
2.11, 16 cores; MEASURED below). Numbers that nobody has measured are marked "assumed". A file that `hightide doctor
--out` wrote on the machine itself is always better.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from hightide.ir.machine import (
    UPDATE_BYTES,
    UPDATE_TRAFFIC_BYTES,
    CollectiveRates,
    Disk,
    Estimate,
    Gpu,
    Host,
    Links,
    Machine,
    MatmulRates,
    SmallRequests,
    Speeds,
    Unpinned,
    subsets,
)
from hightide.ir.tier import Lane

FOLDER = Path(__file__).resolve().parents[1] / "src" / "hightide" / "machines"
GB = 1e9
PCIE = {4: 31.5 * GB, 5: 63.0 * GB}  # ×16, one direction


@dataclass(frozen=True)
class Reached:
    """Of a specification, or of what a lane is alone."""

    matmul: float
    h2d: float
    d2h: float
    both_links: float
    link_loss: float  # of a link's speed beside the other, when the update is busy too
    update_loss: float


MEASURED = Reached(
    matmul=806 / 989.4,
    h2d=55.5 / 63.0,
    d2h=55.3 / 63.0,
    both_links=50.9 / 55.4,
    link_loss=1 - 43.7 / 50.9,
    update_loss=1 - 2.4 / 4.23,
)
H200_READ, H200_COPY = 115 * GB, 90 * GB
H200_UPDATE = 4.7e9 * 28 / UPDATE_TRAFFIC_BYTES  # parameters/s; it was measured when 28 bytes went through memory
# What all three move together through memory, over what the update alone moves.
H200_MIXED = (2 * 43.7 * GB) / (H200_UPDATE * UPDATE_TRAFFIC_BYTES) + 1 - MEASURED.update_loss
ASSUMED_GPU_MEMORY, ASSUMED_DRAM, ASSUMED_DISK, VISIBLE = 0.9, 0.8, 0.9, 0.985
ASSUMED_UNPINNED = 10 * GB
LATENCY_S = 20e-6


@dataclass(frozen=True)
class Spec:
    name: str
    gpu_gib: float
    gpu_memory: float  # bytes/s
    bf16: float  # TFLOP/s, dense, summed in fp32; fp16 is the same
    tf32: float
    fp32: float
    pcie: int
    processor: str
    num_cores: int
    host_gib: int
    dram: float | None  # bytes/s; None: as the H200's host, measured
    dram_text: str
    disk_text: str
    disk_read: float
    disk_write: float
    disk_keeps: float = 1.0  # share of the speed when its cache is full
    linked: Linked | None = None


@dataclass(frozen=True)
class Linked:
    """GPUs of one node, or of several."""

    gpus: int
    nodes: int
    inside: float  # bytes/s of one GPU, one direction, by specification
    inside_text: str
    reached: float  # of that, by collectives: assumed
    over_pcie: bool  # they take it from copies between host and GPU, and these from them
    network: float | None = None  # of one GPU
    network_text: str = ""


SERVER_DISK = ("a data centre SSD (Samsung PM9A3)", 6.8 * GB, 4.0 * GB)
XEON = "16 cores of a server's Xeon with AVX-512"
SPECS = {
    "rtx-3090": Spec(
        "NVIDIA GeForce RTX 3090", 24, 936 * GB, 71, 35.6, 35.6, 4, "8-core desktop processor", 8, 64,
        51.2 * GB, "two channels of DDR4-3200", "a PCIe 4.0 SSD (Samsung 980 PRO)", 7.0 * GB, 5.0 * GB, 0.3,
    ),
    "rtx-4090": Spec(
        "NVIDIA GeForce RTX 4090", 24, 1008 * GB, 165.2, 82.6, 82.6, 4, "16-core desktop processor", 16, 128,
        83.2 * GB, "two channels of DDR5-5200", "a PCIe 4.0 SSD (Samsung 990 PRO)", 7.45 * GB, 6.9 * GB, 0.3,
    ),
    "rtx-5090": Spec(
        "NVIDIA GeForce RTX 5090", 32, 1792 * GB, 209.5, 104.8, 104.8, 5, "16-core desktop processor", 16, 192,
        89.6 * GB, "two channels of DDR5-5600", "a PCIe 5.0 SSD (Crucial T705)", 14.5 * GB, 12.7 * GB, 0.3,
    ),
    "a100-80g": Spec(
        "NVIDIA A100-SXM4-80GB", 80, 2039 * GB, 312, 156, 19.5, 4, "16 cores of a server's EPYC", 16, 125,
        96 * GB, "one GPU's share of a server: the H200's host × 204.8/307.2 (DDR4-3200 to DDR5-4800)", *SERVER_DISK,
    ),
    "h100": Spec(
        "NVIDIA H100 80GB HBM3", 80, 3350 * GB, 989.4, 494.7, 66.9, 5, XEON, 16, 125,
        None, "as the H200's host, which was measured", *SERVER_DISK,
    ),
    "h200": Spec(
        "NVIDIA H200", 141, 4800 * GB, 989.4, 494.7, 66.9, 5, XEON, 16, 125,
        None, "measured", "a virtual disk, measured", 3.5 * GB, 3.1 * GB,
    ),
}  # fmt: skip


SERVER_DISKS = ("4 data centre SSDs (Samsung PM9A3) as one", 4 * 6.8 * GB, 4 * 4.0 * GB)
NVLINK_SHARE, STAGED_SHARE, NETWORK_SHARE = 0.78, 0.4, 0.9
INFINIBAND = (50 * GB, "one port of 400 Gb/s InfiniBand for each GPU")
H100_NODE = replace(
    SPECS["h100"], processor="2 Xeons of 56 cores with AVX-512", num_cores=112, host_gib=2048, dram=614.4 * GB,
    dram_text="16 channels of DDR5-4800", disk_text=SERVER_DISKS[0], disk_read=SERVER_DISKS[1],
    disk_write=SERVER_DISKS[2], linked=Linked(8, 1, 450 * GB, "NVLink 4", NVLINK_SHARE, over_pcie=False),
)  # fmt: skip
NODES = {
    "4x-rtx-4090": replace(
        SPECS["rtx-4090"], processor="32 cores of a workstation's Threadripper", num_cores=32, host_gib=512,
        dram=307.2 * GB, dram_text="8 channels of DDR5-4800",
        linked=Linked(4, 1, PCIE[4], "PCIe 4.0 ×16 without peer access, through host memory", STAGED_SHARE,
                      over_pcie=True),
    ),
    "8x-a100-80g": replace(
        SPECS["a100-80g"], processor="2 EPYCs of 64 cores", num_cores=128, host_gib=1024, dram=409.6 * GB,
        dram_text="16 channels of DDR4-3200", disk_text=SERVER_DISKS[0], disk_read=SERVER_DISKS[1],
        disk_write=SERVER_DISKS[2], linked=Linked(8, 1, 300 * GB, "NVLink 3", NVLINK_SHARE, over_pcie=False),
    ),
    "8x-h100": H100_NODE,
    "4-nodes-8x-h100": replace(
        H100_NODE,
        linked=Linked(8, 4, 450 * GB, "NVLink 4", NVLINK_SHARE, False, *INFINIBAND),
    ),
}  # fmt: skip
COLLECTIVE_LATENCY_S, NETWORK_LATENCY_S = 30e-6, 60e-6
PCIE_SHARE = 0.5  # of each, while copies and collectives are on the same PCIe link, or two collectives at once


def estimate(spec: Spec) -> Machine:
    reached = MEASURED
    if spec.dram is None:
        read, copy, update = H200_READ, H200_COPY, H200_UPDATE
    else:
        read = ASSUMED_DRAM * spec.dram
        copy, update = read * H200_COPY / H200_READ, H200_UPDATE * read / H200_READ
    raw = PCIE[spec.pcie]
    alone = {Lane.H2D: reached.h2d * raw, Lane.D2H: reached.d2h * raw, Lane.CPU: update * UPDATE_BYTES}
    room = H200_MIXED * update * UPDATE_TRAFFIC_BYTES
    speeds = tuple(
        Speeds(busy, tuple(_rounded(speed) for speed in _together(busy, alone, room).values())) for busy in subsets()
    )
    return Machine(
        name=spec.name,
        source="an estimate, made by bench/presets.py: specifications × what one measured H200 reaches of its own",
        speeds=speeds,
        latency_s=LATENCY_S,
        gpu=Gpu(
            spec.name,
            int(spec.gpu_gib * VISIBLE * 2**30),
            _rounded(ASSUMED_GPU_MEMORY * spec.gpu_memory),
            MatmulRates(
                *(_rounded(reached.matmul * rate * 1e12) for rate in (spec.bf16, spec.bf16, spec.fp32, spec.tf32))
            ),
        ),
        unpinned=Unpinned(ASSUMED_UNPINNED, ASSUMED_UNPINNED),
        host=Host(
            spec.processor, spec.num_cores, spec.host_gib << 30, _rounded(copy), _rounded(read), _rounded(update), "c"
        ),
        disk=_disk(spec),
        estimates=_sources(spec),
        links=None if spec.linked is None else _links(spec.linked),
    )


def _links(linked: Linked) -> Links:
    beside = PCIE_SHARE if linked.over_pcie else 1.0
    return Links(
        gpus_per_node=linked.gpus,
        num_nodes=linked.nodes,
        inside=CollectiveRates(*[_rounded(linked.reached * linked.inside)] * 3),
        across=None if linked.network is None else CollectiveRates(*[_rounded(NETWORK_SHARE * linked.network)] * 3),
        latency_s=COLLECTIVE_LATENCY_S,
        across_latency_s=NETWORK_LATENCY_S,
        beside_copies=beside,
        copies_beside=beside,
        together=PCIE_SHARE,
    )


def _links_source(linked: Linked) -> str:
    network = (
        f"; between nodes {linked.network_text}, {linked.network / GB:g} GB/s × {NETWORK_SHARE} (assumed)"
        if linked.network is not None
        else ""
    )
    shared = (
        f"copies and collectives on one PCIe link have {PCIE_SHARE:g} of it each"
        if linked.over_pcie
        else "copies between host and GPU are on other links"
    )
    return (
        f"{linked.inside_text}, {linked.inside / GB:g} GB/s one way × {linked.reached:g} (assumed){network}; "
        f"latencies assumed; {shared}, two collectives at once {PCIE_SHARE:g} (assumed)"
    )


def _together(busy: tuple[Lane, ...], alone: dict[Lane, float], room: float) -> dict[Lane, float]:
    """Both links slow each other down a little. What then does not fit through host memory is lost in the same
    proportion as on the H200: the update loses about twice what links lose."""
    loss = {lane: MEASURED.update_loss if lane is Lane.CPU else MEASURED.link_loss for lane in busy}
    passes = {lane: UPDATE_TRAFFIC_BYTES / UPDATE_BYTES if lane is Lane.CPU else 1.0 for lane in busy}
    speeds = {lane: alone[lane] for lane in busy}
    if {Lane.H2D, Lane.D2H} <= set(busy):
        speeds |= {lane: speeds[lane] * MEASURED.both_links for lane in (Lane.H2D, Lane.D2H)}
    excess = sum(speeds[lane] * passes[lane] for lane in busy) - room
    if excess <= 0 or len(busy) == 1:
        return speeds
    scale = excess / sum(speeds[lane] * passes[lane] * loss[lane] for lane in busy)
    return {lane: speeds[lane] * (1 - scale * loss[lane]) for lane in busy}


def _disk(spec: Spec) -> Disk:
    share = 1.0 if spec.dram_text == "measured" else ASSUMED_DISK
    read, write = share * spec.disk_read, share * spec.disk_write
    return Disk(
        name=spec.disk_text,
        is_direct=True,
        read_bytes_per_s=_rounded(read),
        write_bytes_per_s=_rounded(write),
        sustained_write_bytes_per_s=_rounded(write * spec.disk_keeps),
        written_bytes=(16 if spec.disk_keeps == 1.0 else 256) << 30,  # caches of desktop drives are large
        read_while_writing_bytes_per_s=_rounded(read * 2.6 / 3.5),
        write_while_reading_bytes_per_s=_rounded(write * 2.2 / 3.1),
        small=(
            SmallRequests(4 << 10, 0.2 * GB, 0.13 * GB),
            SmallRequests(32 << 10, 1.4 * GB, 0.8 * GB),
            SmallRequests(256 << 10, _rounded(0.9 * read), _rounded(0.9 * write)),
        ),
    )


def _sources(spec: Spec) -> tuple[Estimate, ...]:
    reached, raw = MEASURED, PCIE[spec.pcie] / GB
    is_h200 = spec.dram_text == "measured"
    links = (
        "measured on one: 55.5, 55.3 and both at once 50.9 GB/s each"
        if is_h200
        else f"PCIe {spec.pcie}.0 ×16, {raw} GB/s × {reached.h2d:.2f}, both at once × {reached.both_links:.2f} more, "
        "as measured on an H200 (PCIe 5.0)"
    )
    host = (
        "measured on one H200's host" if spec.dram is None
        else f"{spec.dram_text}, {spec.dram / GB:g} GB/s × {ASSUMED_DRAM} (assumed); copy and update in proportion to "
        "the H200's host"
    )  # fmt: skip
    return (
        Estimate(
            "speeds",
            f"{links}. Beside the update: what host memory does not take is lost as measured on an H200 with all "
            f"three busy (links lose {reached.link_loss:.0%}, the update {reached.update_loss:.0%}); other sets of "
            "lanes are interpolated",
        ),
        Estimate("latency_s", "assumed"),
        Estimate("gpu.memory_bytes", f"specification, {spec.gpu_gib:g} GiB × {VISIBLE}: the driver keeps some"),
        Estimate(
            "gpu.memory_bytes_per_s",
            f"specification, {spec.gpu_memory / GB:g} GB/s × {ASSUMED_GPU_MEMORY} (assumed)",
        ),
        Estimate(
            "gpu.matmul_flop_per_s",
            f"specification, dense, fp32 sums: bf16 and fp16 {spec.bf16:g}, tf32 {spec.tf32:g}, fp32 {spec.fp32:g} "
            f"TFLOP/s × {reached.matmul:.2f}, which an H200 reaches in bf16 (806 of 989)",
        ),
        Estimate("unpinned", "assumed: one core copies about 10 GB/s"),
        Estimate("host.num_cores", f"assumed: {spec.processor}"),
        Estimate("host.memory_bytes", f"{'measured' if spec.dram is None and is_h200 else 'assumed'}"),
        Estimate("host.copy_bytes_per_s", host),
        Estimate("host.read_bytes_per_s", host),
        Estimate("host.update_params_per_s", host),
        Estimate(
            "disk",
            "large requests measured on one, 2.9-4.2 and 3.0-3.3 GB/s, both at once 2.6 and 2.2; small ones assumed"
            if is_h200
            else f"{spec.disk_text}: specification {spec.disk_read / GB:g} and {spec.disk_write / GB:g} GB/s × "
            f"{ASSUMED_DISK} (assumed); when its cache is full × {spec.disk_keeps:g} (assumed); both at once in "
            "proportion to the H200 machine's disk; small ones assumed",
        ),
        *([] if spec.linked is None else [Estimate("links", _links_source(spec.linked))]),
    )


def _rounded(value: float) -> float:
    """Three digits: they are estimates."""
    return float(f"{value:.3g}")


def presets() -> dict[str, Machine]:
    return {name: replace(estimate(spec), name=name) for name, spec in (SPECS | NODES).items()}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name, machine in presets().items():
        machine.save(FOLDER / f"{name}.json")
        print(f"{name}: written")


if __name__ == "__main__":
    main()
