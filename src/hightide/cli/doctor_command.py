"""The output of `hightide doctor`: numbers as tables, what they mean, what to change. Fits 80 columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hightide.cli.target import JsonOption, check_target, writing
from hightide.doctor.between_gpus import measure_links, with_links
from hightide.doctor.disk_speed import DiskTest
from hightide.doctor.known import known_machine, remember
from hightide.doctor.measure import FreeMemory, Report, examine
from hightide.ir.codec import to_json
from hightide.ir.machine import Disk, Links, Machine, MatmulRates
from hightide.ir.tier import Lane
from hightide.ir.units import format_bytes, parse_bytes
from hightide.shard.collectives import Collectives
from hightide.shard.meeting import are_several, find_ranks

H, D, C = Lane.H2D, Lane.D2H, Lane.CPU
NONE = "-"


@dataclass(frozen=True)
class DoctorOptions:
    disk: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Measure this disk too; first says how much it will write.")
    ] = None
    disk_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size of the temporary file there; default 16GiB.")
    ] = None
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a machine file, for planning elsewhere.")] = (
        None
    )
    as_json: JsonOption = False


def doctor(options: DoctorOptions, device: torch.device, console: Console, progress: Console) -> None:
    """Results go to `console`, everything else to `progress`."""
    test = _disk_test(options)
    check_target("--out", options.out)
    before = known_machine(device)
    if before.problem and not before.is_first:
        progress.print(f"measuring anew: {before.problem}", style="yellow", markup=False, soft_wrap=True)
    if test is not None:
        test.check()
        progress.print(test.announcement(), markup=False, soft_wrap=True)
    with progress.status("measuring") as status:

        def tell(text: str) -> None:
            status.update(Text(f"measuring: {text}"))

        found = _of_ranks(device, test, tell) if are_several() else examine(device, test, tell=tell)
    if found is None:  # the first rank of this node writes it
        return
    report = found
    if options.as_json:
        console.print(to_json(report), markup=False, soft_wrap=True)
    else:
        show_report(console, report)
    if options.out is not None:
        with writing("--out", options.out):
            report.machine.save(options.out)
        progress.print(f"written: {options.out}", style="dim", markup=False, soft_wrap=True)
    try:
        progress.print(f"kept in {remember(report.machine)}", style="dim", markup=False, soft_wrap=True)
    except OSError as error:
        progress.print(f"not kept for later: {error}", style="yellow", markup=False, soft_wrap=True)


def _of_ranks(device: torch.device, test: DiskTest | None, tell: Callable[[str], None]) -> Report | None:
    """Under torchrun. The first rank of each node measures it alone, then all ranks what is between them."""
    collectives = Collectives(find_ranks(device=device))
    ranks = collectives.ranks
    assert ranks.watchman is not None
    ranks.watchman.doing = "hightide doctor"
    try:
        report = examine(ranks.device, test, tell=tell) if ranks.local_rank == 0 else None
        collectives.exchange("measured nodes", b"")
        links = measure_links(collectives, tell=tell)
        return None if report is None else replace(report, machine=with_links(report.machine, links))
    except BaseException as error:
        ranks.watchman.fail(error)
        raise
    finally:
        ranks.close()


def _disk_test(options: DoctorOptions) -> DiskTest | None:
    if options.disk is None:
        if options.disk_bytes is not None:
            raise ValueError(f"--disk-bytes {options.disk_bytes} without --disk; name the disk's folder too")
        return None
    if options.disk_bytes is None:
        return DiskTest(options.disk)
    return DiskTest(options.disk, parse_bytes(options.disk_bytes, "--disk-bytes"))


def show_report(console: Console, report: Report) -> None:
    machine = report.machine
    tables = [_overview(machine, report.free), _lanes(machine)]
    tables += [] if machine.disk is None else [_disk(machine.disk)]
    for table in [*tables, *([_links(machine.links)] if machine.links is not None else [])]:
        console.print(table)
        console.print()
    _list(console, "what this means", [(finding, "") for finding in report.findings], "bold")
    _list(console, "to look at", [(one.problem, one.remedy) for one in report.warnings], "bold yellow")
    console.print(f"measured {machine.date[:16].replace('T', ' ')} UTC, in {report.took_s:.0f} s", style="dim")


def _overview(machine: Machine, free: FreeMemory) -> Table:
    gpu, host = machine.gpu, machine.host
    assert gpu is not None and host is not None
    on_gpu = f"{format_bytes(free.gpu_bytes)} free" if free.gpu_bytes is not None else "inside of host memory"
    limit = free.cgroup_limit_bytes
    group = "no limit by a control group" if limit is None else f"the control group's limit is {format_bytes(limit)}"
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for name, text in (
        ("GPU", gpu.name),
        ("", f"{format_bytes(gpu.memory_bytes)}, {on_gpu}; copies inside: {_giga(gpu.memory_bytes_per_s)} GB/s"),
        ("matrices", _products(gpu.matmul_flop_per_s)),
        ("host", f"{host.processor}, {host.num_cores} cores"),
        ("", f"{format_bytes(host.memory_bytes)}, {format_bytes(free.host_bytes)} free; {group}"),
        ("", f"Limits(host=...) is {format_bytes(free.usable_host_bytes)} unless you give it"),
        ("", f"copies inside: {_giga(host.copy_bytes_per_s)} GB/s, reading: {_giga(host.read_bytes_per_s)} GB/s"),
        ("", f"updates by the {host.update_kernel} kernel; a transfer starts in {machine.latency_s * 1e6:.0f} µs"),
    ):
        table.add_row(Text(name, style="bold"), Text(text))
    return table


def _products(rates: MatmulRates) -> str:
    named = {"bf16": rates.bfloat16, "fp16": rates.float16, "tf32": rates.tf32, "fp32": rates.float32}
    unit, size = ("TFLOP/s", 1e12) if rates.bfloat16 >= 1e12 else ("GFLOP/s", 1e9)
    return ", ".join(f"{name} {_digits(rate / size)}" for name, rate in named.items() if rate) + f" {unit}"


def _lanes(machine: Machine) -> Table:
    """What lanes reach, by which others are busy. Parameters per second: of bf16 with fp32 states."""
    assert machine.host is not None
    update_alone = machine.speeds_of({C})[C]

    def cells(*busy: Lane) -> list[str]:
        speeds = machine.speeds_of(set(busy))
        update = speeds.get(C, 0.0) / update_alone * machine.host.update_params_per_s if machine.host else 0.0
        return [*(_giga(speeds.get(lane)) for lane in (H, D)), f"{update / 1e9:.2f}" if C in busy else NONE]

    table = _table("busy at once", "host→GPU\nGB/s", "GPU→host\nGB/s", "update\nG params/s")
    alone = [cells(lane)[at] for at, lane in enumerate((H, D, C))]
    table.add_row("each alone", *alone)
    table.add_row("both links", *cells(H, D))
    table.add_row("host→GPU and update", *cells(H, C))
    table.add_row("GPU→host and update", *cells(D, C))
    table.add_row("all three", *cells(H, D, C))
    if machine.unpinned is not None:
        unpinned = (machine.unpinned.h2d_bytes_per_s, machine.unpinned.d2h_bytes_per_s)
        table.add_row("each alone, memory not pinned", *map(_giga, unpinned), NONE)
    return table


def _disk(disk: Disk) -> Table:
    direct = "direct" if disk.is_direct else "through the page cache"
    table = _table(f"disk: {disk.name}, {direct}", "read\nGB/s", "write\nGB/s")
    table.add_row("16 MiB, each alone", _giga(disk.read_bytes_per_s), _giga(disk.write_bytes_per_s))
    both = (disk.read_while_writing_bytes_per_s, disk.write_while_reading_bytes_per_s)
    table.add_row("16 MiB, both at once", *map(_giga, both))
    written = format_bytes(disk.written_bytes)
    table.add_row(f"at the end of {written}", NONE, _giga(disk.sustained_write_bytes_per_s))
    for small in disk.small:
        name = f"{small.request_bytes >> 10} KiB, scattered"
        table.add_row(name, _giga(small.read_bytes_per_s), _giga(small.write_bytes_per_s))
    table.add_row(f"best both ways: {disk.depth} requests of {format_bytes(disk.request_bytes)}", NONE, NONE)
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(first, box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def _links(links: Links) -> Table:
    """What each GPU receives."""
    table = _table(
        f"between GPUs, over {links.backend}", "gather\nGB/s", "reduce\nGB/s", "all-reduce\nGB/s", "starts in\nµs"
    )
    rows = [(f"{links.gpus_per_node} of a node", links.inside, links.latency_s)]
    if links.across is not None:
        rows.append((f"{links.num_nodes} nodes, its share", links.across, links.across_latency_s))
    for name, rates, latency_s in rows:
        table.add_row(name, *(_giga(rate) for rate in vars(rates).values()), f"{latency_s * 1e6:.0f}")
    share = f"{100 * links.beside_copies:.0f}%"
    table.add_row("beside copies", share, NONE, NONE, NONE)
    table.add_row("gather and reduce at once", *[f"{100 * links.together:.0f}%"] * 2, NONE, NONE)
    return table


def _list(console: Console, title: str, entries: list[tuple[str, str]], style: str) -> None:
    if not entries:
        return
    console.print(title, style=style)
    for text, remedy in entries:
        console.print(Padding(Text(text), (0, 0, 0, 2)))
        if remedy:
            console.print(Padding(Text(f"→ {remedy}"), (0, 0, 0, 4)))
    console.print()


def _giga(bytes_per_s: float | None) -> str:
    return NONE if bytes_per_s is None else _digits(bytes_per_s / 1e9)


def _digits(value: float) -> str:
    """Three of them."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
