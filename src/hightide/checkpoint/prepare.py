"""`hightide.prepare_saves`: what a save will need is there before the first one.

[Note: memory ahead] The first use of memory is slow (the system zeroes its pages), and so is pinning what values leave
the GPU for: some seconds for every 10 GB, in which updates would wait for the first save of a process. So it is done
beforehand, by a thread of its own beside training, piece by piece. CUDA may hold up whoever calls it while it registers
memory: pieces are small, their pages are real by then, and after each there is a pause as long as it took; the GPU has
work queued for longer than that. A save that begins meanwhile finds what is there, and takes part.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from hightide.checkpoint.files.folder import found
from hightide.checkpoint.load import pair_of
from hightide.ir.foreign import user_path
from hightide.ir.save_sizes import BLOCK_BYTES, NUM_STAGED, TILE_BYTES
from hightide.planner.predict.save_forecast import SaveForecast
from hightide.planner.solution import Searched
from hightide.runtime.run import Run
from hightide.stores.disk_file import DiskFile, PageBuffer, open_disk_file
from hightide.stores.host_arena import HostArena
from hightide.stores.threads import background

THREAD = "hightide-save-memory"  # gets and pins memory for saves while training goes on
LEAST_BYTES = 2**24  # a checkpoint of less tells nothing about a disk, and needs to know nothing
TRY_BYTES = 2**28  # that are written to try a disk,
TRY_S = 0.5  # and no longer than that,
HANGS_S = 10.0  # unless a write hangs: then its speed is not known
NUM_WRITERS = 4
JOIN_TIMEOUT_S = 10.0
PIN_BYTES = 2**25  # at a time: two tiles
MOST_PAUSE_S = 0.1

_begun: weakref.WeakSet[HostArena] = weakref.WeakSet()


def prepare_saves(model: nn.Module, folder: str | os.PathLike[str] | None = None) -> SaveForecast | None:
    """For a wrapped model that will be saved: gets the host memory that a save takes, and pins what values leave the
    GPU for, in the background, so that the first save costs training no more than others. It is taken within the limit
    of the host, whether a save comes or not. `hightide train` and `hightide.Trainer` call this by themselves.

    Returns what a save is told to cost (`.in_words`), which `Saving.forecast` has too; None if nobody has simulated the
    plan. With `folder`, where checkpoints will go, by the speed of its disk: as the newest checkpoint there was
    written, or as a short trial writes (no longer than a second), unless a machine file knows it.
    """
    run = pair_of(model, None)
    if run is None:
        raise ValueError("the model is not wrapped: there is nothing to prepare. Call this after hightide.wrap")
    run.check_values()
    told = run.save_forecast
    knows_less = told is not None and told.num_bytes >= LEAST_BYTES and told.speed_source in ("assumed", "estimated")
    speed = _speed(user_path(folder)) if folder is not None and knows_less else None
    run.when_memory_is_fixed = partial(_prepare, weakref.ref(run), speed)  # another plan has other memory
    run.when_memory_is_fixed()
    return run.save_forecast


def _prepare(known: weakref.ref[Run], speed: tuple[float, str] | None) -> None:
    run = known()
    if run is None:
        return
    if run.save_forecast is not None:
        if speed is not None and isinstance(run.solution, Searched):
            run.save_forecast = run.solution.save_at(*speed)
        run.save_forecast = replace(run.save_forecast, is_ready=True)
    if run.host not in _begun:
        _begun.add(run.host)
        _get_memory(run, run.save_forecast)


def _get_memory(run: Run, told: SaveForecast | None) -> None:
    host, staged_bytes = run.host, NUM_STAGED * TILE_BYTES
    on_gpu = [place.chunk for place in run.chunks.placed if place.is_updated_on_gpu and place.chunk.optimised_numel]
    leaves = sum(chunk.param_bytes + chunk.state_bytes for chunk in on_gpu)
    pinned_bytes = leaves if told is None else told.pinned_bytes
    pinned_bytes += staged_bytes if leaves else 0
    num_bytes = host.spare_bytes if told is None else told.host_bytes
    over = threading.Event()
    work = partial(_make_ready, weakref.ref(host), pinned_bytes, num_bytes, over)
    thread = background(THREAD, work)
    # Joined: a thread that Python ends in the middle of a torch operation aborts the process.
    weakref.finalize(host, over.set).atexit = False
    atexit.register(_end, weakref.ref(thread), over)


def _end(known: weakref.ref[threading.Thread], over: threading.Event) -> None:
    over.set()
    if (thread := known()) is not None:
        thread.join(JOIN_TIMEOUT_S)


# -- the disk --------------------------------------------------------------------------------------------------------


def _speed(folder: Path) -> tuple[float, str] | None:
    """Bytes per second, and who says so. None: nothing can be written there; a save will say why."""
    for one in reversed(found(folder)):
        manifest = one.manifest
        if one.is_whole and manifest is not None and manifest.written_s and manifest.num_bytes >= LEAST_BYTES:
            return manifest.num_bytes / manifest.written_s, f"as {one.path.name} was written:"
    there = next((path for path in (folder, *folder.absolute().parents) if path.is_dir()), None)
    return None if there is None else _tried(there)


def _tried(folder: Path) -> tuple[float, str] | None:
    """A file without a name, past the page cache where that is possible."""
    try:
        file = open_disk_file(folder, TRY_BYTES, flags_through_cache=os.O_DSYNC)
    except ValueError:
        return None
    try:
        per_s = _written_per_s(file)
    except TimeoutError:
        return None  # the file stays open: whoever still writes to it must not find another under its number
    except OSError:
        file.close()
        return None
    file.close()
    return per_s, "tried:"


def _written_per_s(file: DiskFile) -> float:
    failed: list[OSError] = []
    block = PageBuffer(BLOCK_BYTES)
    block.memory[:] = os.urandom(BLOCK_BYTES)
    places, lock, written = iter(range(0, TRY_BYTES, BLOCK_BYTES)), threading.Lock(), 0
    began_s = time.monotonic()

    def write() -> None:
        nonlocal written
        while time.monotonic() - began_s < TRY_S:
            with lock:
                place = next(places, None)
            if place is None:
                return
            try:
                file.transfer(block.address, place, BLOCK_BYTES, is_write=True)
            except OSError as error:
                failed.append(error)
                return
            with lock:
                written += BLOCK_BYTES

    threads = [background(f"{THREAD}-{number}", write) for number in range(NUM_WRITERS)]
    for thread in threads:
        thread.join(max(0.0, began_s + HANGS_S - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"a disk has not written {BLOCK_BYTES} bytes in {HANGS_S:g} s")
    if failed:
        raise failed[0]
    return written / (time.monotonic() - began_s)


def _make_ready(arena: weakref.ref[HostArena], pinned_bytes: int, num_bytes: int, over: threading.Event) -> None:
    """`pinned_bytes` of the `num_bytes` that a save takes. Ends early if memory is needed otherwise, the run ends, or
    it is `over`."""
    while not over.is_set() and (host := arena()) is not None:
        began_s = time.monotonic()
        if not host.pin_spare(pinned_bytes, PIN_BYTES) and not host.make_ready(num_bytes):
            return
        del host  # nobody keeps it alive during a pause
        over.wait(min(MOST_PAUSE_S, time.monotonic() - began_s))
