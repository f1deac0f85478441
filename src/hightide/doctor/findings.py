"""The meaning of a machine's numbers for training, in sentences."""

from __future__ import annotations

from hightide.ir.machine import SHARING, UPDATE_BYTES, UPDATE_TRAFFIC_BYTES, Gpu, Host, Machine
from hightide.ir.tier import Lane

# Per parameter of a block whose parameters are streamed in bf16, and whose states are on the host.
FETCHED_BYTES = 4  # for forward and for backward
FLOP_PER_TOKEN = 8  # forward 2, recompute 2, backward 4
DISK_STATE_BYTES = 12  # moments and a master in two parts, each way, if they lie on the disk
NOTABLE = 0.9  # less than this of what it is alone
USED_UP = 0.7  # of a bandwidth: mixed reads and writes do not reach all of it


def findings_of(machine: Machine) -> list[str]:
    found = [*_links(machine), *_host_memory(machine)]
    if machine.gpu is not None and machine.host is not None and not machine.is_simulated:
        found += _tokens(machine, machine.gpu, machine.host)
    return [*found, *_disk(machine)]


def _links(machine: Machine) -> list[str]:
    found = []
    alone = {lane: machine.speeds_of({lane})[lane] for lane in (Lane.H2D, Lane.D2H)}
    both = machine.speeds_of({Lane.H2D, Lane.D2H})
    share = sum(both.values()) / sum(alone.values())
    if share < NOTABLE:
        each = " and ".join(f"{both[lane] / 1e9:.1f}" for lane in alone)
        found.append(f"The two directions hinder each other: together they reach {each} GB/s, {share:.0%} of alone.")
    if machine.unpinned is not None:
        slower = alone[Lane.H2D] / machine.unpinned.h2d_bytes_per_s, alone[Lane.D2H] / machine.unpinned.d2h_bytes_per_s
        found.append(f"Pinned memory is {slower[0]:.1f} times as fast to the GPU and {slower[1]:.1f} times back.")
    return found


def _host_memory(machine: Machine) -> list[str]:
    """Whether links and update hinder each other, and whether that is because host memory is used up."""
    if machine.host is None:
        return []
    everything = machine.speeds_of(set(SHARING))
    shares = {lane: everything[lane] / machine.speeds_of({lane})[lane] for lane in SHARING}
    if min(shares.values()) >= NOTABLE:
        return ["Links and update do not hinder each other: all at once, each is as fast as alone."]
    update = shares[Lane.CPU] * machine.host.update_params_per_s
    return [
        f"{_cause(machine, machine.host, everything)} With all three busy, host to GPU keeps {shares[Lane.H2D]:.0%} of "
        f"its speed, GPU to host {shares[Lane.D2H]:.0%} and the update {shares[Lane.CPU]:.0%} "
        f"({update / 1e9:.2f} G parameters/s)."
    ]


def _cause(machine: Machine, host: Host, everything: dict[Lane, float]) -> str:
    if machine.is_simulated:
        return "Without a GPU, copies and updates share the cores and host memory."
    bandwidth = max(host.read_bytes_per_s, host.copy_bytes_per_s)
    traffic = everything[Lane.H2D] + everything[Lane.D2H] + everything[Lane.CPU] * UPDATE_TRAFFIC_BYTES / UPDATE_BYTES
    if traffic >= USED_UP * bandwidth:
        return f"Host memory bandwidth is the limit: {max(bandwidth, traffic) / 1e9:.0f} GB/s."
    used = f"{traffic / 1e9:.0f} of {bandwidth / 1e9:.0f} GB/s"
    return f"Links and update hinder each other, although they use only {used} of host memory."


def _tokens(machine: Machine, gpu: Gpu, host: Host) -> list[str]:
    """From how many tokens per step on computing takes longer than moving and updating, per parameter."""
    everything = machine.speeds_of(set(SHARING))
    rate = gpu.matmul_flop_per_s.bfloat16 / FLOP_PER_TOKEN  # tokens per second, for one parameter
    for_links = FETCHED_BYTES / everything[Lane.H2D] * rate
    slowdown = everything[Lane.CPU] / machine.speeds_of({Lane.CPU})[Lane.CPU]
    for_update = rate / (host.update_params_per_s * slowdown)
    return [
        f"Streaming weights (bf16, recomputing) hides behind computing from about {_round(for_links)} tokens per step "
        f"on, updating all parameters on the host from about {_round(for_update)}: more tokens per step cost nothing "
        "but compute, fewer wait."
    ]


def _disk(machine: Machine) -> list[str]:
    disk = machine.disk
    if disk is None:
        return []
    read, write = disk.read_while_writing_bytes_per_s, disk.write_while_reading_bytes_per_s
    step_s = DISK_STATE_BYTES * 1e9 / min(read, write)
    written = DISK_STATE_BYTES * 1e9
    found = [
        f"Optimizer states of 1 billion parameters on this disk take {step_s:.1f} s per step, and write "
        f"{written / 1e9:.0f} GB."
    ]
    if disk.sustained_write_bytes_per_s < NOTABLE * disk.write_bytes_per_s:
        found.append(
            f"Writing gets slower: {disk.write_bytes_per_s / 1e9:.1f} GB/s on average over "
            f"{disk.written_bytes / 1e9:.0f} GB, {disk.sustained_write_bytes_per_s / 1e9:.1f} at the end: a cache was "
            "full. Plan with the latter."
        )
    return found


def _round(count: float) -> str:
    """Two digits: it is a rule of thumb."""
    return f"{float(f'{count:.2g}'):,.0f}"
