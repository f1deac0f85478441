"""Finds copies and kernels that a real GPU could run in the wrong order, on a machine without one.

Without a GPU, work is through when it returns; on one, it is only enqueued, and nothing but fences orders the streams.
So every fence is replaced by one that carries a vector clock: what its stream has done, and what it had waited for.
Every use of a slot, or of a gradient's or parameter's home, is then checked against the last uses of the same place by
other streams: the using stream must have joined a fence behind each of them. What threads wait for does not count.
Host memory that comes and goes (block inputs, parked gradients) is told apart by its addresses, whoever has it."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from typing import Any

import pytest
from torch import Tensor

from hightide.ir.tier import ChunkKind
from hightide.runtime.lanes.lanes import WORKERS, Streams
from hightide.runtime.run import Run
from hightide.stores.store import ALIGN_BYTES, Region
from hightide.stores.ticket import Ticket

STREAMS = {name: str(lane) for lane, name in WORKERS.items()}
ON_HOST = {str(lane) for lane in WORKERS if lane.on_host}
COMES_AND_GOES = "host memory that comes and goes"
Place = tuple[
    str, int
]  # (COMES_AND_GOES | "slot" | "gradient slot" | "home of gradient" | "home of parameter" | "buffer ...", number)


class Detector:
    def __init__(self) -> None:
        self.races: list[str] = []
        self.num_uses: dict[str, int] = defaultdict(int)
        self._clocks: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._last: dict[Place, dict[str, tuple[int, str, bool]]] = defaultdict(dict)
        self._lock = threading.RLock()

    def stream(self) -> str:
        """Lanes have their own; the user's thread and autograd's run compute. What other threads of hightide wait for
        orders no stream."""
        name = threading.current_thread().name
        return STREAMS.get(name, name if name.startswith("hightide") else "compute")

    def fence(self) -> FakeFence:
        with self._lock:
            return FakeFence(self, {**self._clocks[self.stream()]})

    def join(self, seen: dict[str, int]) -> None:
        with self._lock:
            clock = self._clocks[self.stream()]
            for stream, time in seen.items():
                clock[stream] = max(clock[stream], time)

    def use(self, places: list[Place], what: str, writes: bool = True) -> None:
        with self._lock:
            mine = self.stream()
            clock = self._clocks[mine]
            clock[mine] += 1
            for place in places:
                self.num_uses[place[0]] += 1
                for other, (time, earlier, wrote) in self._last[place].items():
                    ordered = other in (mine, *ON_HOST) or clock[other] >= time  # on the host: through when it returns
                    if not ordered and (writes or wrote):
                        self.races.append(f"{what} on {mine} may overtake {earlier} on {other} in {place}")
                self._last[place][mine] = (clock[mine], what, writes)

    def watch(self, run: Run) -> None:
        """Uses that begin with a wrapped call and last until a later one are noted at both ends."""
        chunks = run.chunks
        params, grads = chunks.param_slots, chunks.grad_slots

        def window(table: Any, kind: str, chunk: int) -> list[Place]:
            first = table.first(chunk)
            return [] if first is None else [(kind, first + at) for at in range(table._widths[chunk])]

        def noting(method: Any, table: Any, kind: str) -> Any:
            def noted(chunk: int, *rest: Any) -> Any:
                self.use(window(table, kind, chunk), f"{method.__name__} of {chunk}")
                return method(chunk, *rest)

            return noted

        def with_disk(disk: Any) -> None:
            """Its buffers, by the lanes that work on the host: h2d and d2h copy out of them and into them."""

            def filled(method: Any, writes: bool) -> Any:
                def noted(content: Any, *rest: Any) -> Any:
                    states = "buffer for updates" if content.kind is ChunkKind.STATE else "buffer towards the GPU"
                    name = "buffer away" if method.__name__ in ("leaving", "write_gradient") else states
                    if self.stream() in ON_HOST:
                        self.use([(name, content.buffer)], f"{method.__name__} of {content.chunk}", writes)
                    return method(content, *rest)

                return noted

            for name in ("leaving", "write_gradient", "write_updated"):
                setattr(disk, name, filled(getattr(disk, name), False))
            for name in ("read", "at_hand"):
                setattr(disk, name, filled(getattr(disk, name), True))

        homes: dict[int, Place] = {
            id(array.region): (f"home of {kind}", chunk)
            for kind, arrays in (("parameter", chunks._homes), ("gradient", chunks._grads))
            for chunk, array in enumerate(arrays)
            if array is not None and array.store is run.host
        }

        rings: dict[int, tuple[str, int]] = {}
        if chunks.disk is not None:
            found = chunks.disk.rings
            named = {"buffer towards the GPU": found.up, "buffer away": found.down, "buffer for updates": found.state}
            named["buffer of inputs"] = found.inputs
            rings = {id(ring._region): (name, ring._buffer_bytes) for name, ring in named.items()}
            with_disk(chunks.disk)

        def passing(start: int, num_bytes: int) -> list[Place]:
            return [(COMES_AND_GOES, at) for at in range(start // ALIGN_BYTES, -(-(start + num_bytes) // ALIGN_BYTES))]

        def at_home(method: Any, writes: bool) -> Any:
            def noted(region: Region, tensor: Tensor, *rest: Any) -> Ticket:
                if id(region) in homes:
                    self.use([homes[id(region)]], f"{method.__name__} of {homes[id(region)][1]}", writes)
                elif id(region) in rings:
                    name, size = rings[id(region)]
                    self.use([(name, rest[0] // size)], f"{method.__name__} of a buffer", writes)
                elif region.label in ("block inputs", "activations", "parked gradients", "gradients off the plan"):
                    start = region.offset + (rest[0] if rest else 0)
                    self.use(passing(start, tensor.nbytes), f"{method.__name__} of {region.label}", writes)
                return method(region, tensor, *rest)

            return noted

        def updating(prepare: Any) -> Any:
            def noted(chunk: int, *rest: Any) -> Any:
                work = prepare(chunk, *rest)

                def update() -> None:
                    if self.stream() == "cpu":
                        self.use([("home of gradient", chunk)], f"update of {chunk}", writes=False)
                        self.use([("home of parameter", chunk)], f"update of {chunk}")
                        if chunk in chunks.parked:
                            region = chunks.grad(chunk).region
                            self.use(passing(region.offset, region.num_bytes), f"update of {chunk}", writes=False)
                    work()

                return update

            return noted

        def settling(prepare: Any) -> Any:
            def noted(chunk: int) -> Any:
                work = prepare(chunk)

                def settle() -> None:
                    self.use([("home of gradient", chunk)], f"states of {chunk}", writes=False)
                    work()

                return settle

            return noted

        def with_rows(chunk: int, table: Any) -> None:
            """A table on the host: its three buffers."""
            gathered, leave, add = table._gathered, table.leave, None if table.sums is None else table.sums.add
            rows, made, arrived = (("rows", chunk), ("made rows", chunk), ("arrived rows", chunk))

            def gathering(*args: Any) -> Any:
                self.use([rows], f"gathering of {chunk}")
                send = gathered(*args)
                return lambda: (self.use([rows], f"look_up of {chunk}", writes=False), send())[1]

            def leaving(gradients: Tensor) -> Any:
                self.use([made], f"gradient of rows of {chunk}")
                found, send = leave(gradients)

                def sending() -> int:
                    self.use([made], f"copy of rows of {chunk}", writes=False)
                    self.use([arrived], f"copy of rows of {chunk}")
                    return int(send())

                return found, sending

            def adding(*args: Any) -> None:
                self.use([arrived], f"sum of {chunk}", writes=False)
                self.use([("home of gradient", chunk)], f"sum of {chunk}")
                add(*args)

            table._gathered, table.leave = gathering, leaving
            if add is not None:
                table.sums.add = adding

        for chunk, table in chunks.tables.items():
            with_rows(chunk, table)
        run.performer.updating.update = updating(run.performer.updating.update)
        run.performer.updating.settle = settling(run.performer.updating.settle)
        chunks.param_on_gpu = noting(chunks.param_on_gpu, params, "slot")
        chunks.binding.unbind = noting(chunks.binding.unbind, params, "slot")
        chunks.grad_on_gpu = noting(chunks.grad_on_gpu, grads, "gradient slot")
        run.gradients.harvest = noting(run.gradients.harvest, grads, "gradient slot")
        run.host.read, run.host.write = at_home(run.host.read, False), at_home(run.host.write, True)


class FakeFence:
    _numbers = itertools.count()

    def __init__(self, detector: Detector, seen: dict[str, int]) -> None:
        self._detector, self._seen = detector, seen
        self.number = next(self._numbers)

    def join(self) -> None:
        self._detector.join(self._seen)

    synchronize = join


def install(monkeypatch: pytest.MonkeyPatch) -> Detector:
    """From now on every wrapped model is watched."""
    detector = Detector()
    monkeypatch.setattr(Streams, "fence", lambda _: detector.fence())
    construct = Run.__init__

    def watched(run: Run, *args: Any, **options: Any) -> None:
        construct(run, *args, **options)
        detector.watch(run)

    monkeypatch.setattr(Run, "__init__", watched)
    return detector
