"""Memory for saves, before the first one needs it.

[Note: memory ahead] The first use of memory is slow (the system zeroes its pages), and so is pinning what values leave
the GPU for: some seconds for every 10 GB, in which updates would wait for the first save of a process. So it is done
beforehand, by a thread of its own beside training, piece by piece. CUDA may hold up whoever calls it while it registers
memory: pieces are small, their pages are real by then, and after each there is a pause as long as it took; the GPU has
work queued for longer than that. A save that begins meanwhile finds what is there, and takes part.
"""

from __future__ import annotations

import threading
import time
import weakref

from hightide.stores.host_arena import HostArena

PIN_BYTES = 2**25  # at a time: two tiles
MOST_PAUSE_S = 0.1


def make_ready(arena: weakref.ref[HostArena], pinned_bytes: int, num_bytes: int, over: threading.Event) -> None:
    """`pinned_bytes` of the `num_bytes` that a save takes. Ends early if memory is needed otherwise, the run ends, or
    it is `over`."""
    while not over.is_set() and (host := arena()) is not None:
        began_s = time.monotonic()
        if not host.pin_spare(pinned_bytes, PIN_BYTES) and not host.make_ready(num_bytes):
            return
        del host  # nobody keeps it alive during a pause
        over.wait(min(MOST_PAUSE_S, time.monotonic() - began_s))
