"""Ranks of one model begin with the same values, as with DDP: those of the first. What a node has they share, and a
watchman asks each about its lanes."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hightide.ir.tier import Lane
from hightide.process.system import usable_cores
from hightide.runtime.lanes.lanes import CORES_FOR_OTHERS, Lanes
from hightide.runtime.schedule.in_flight import InFlight
from hightide.shard.collectives import Collectives
from hightide.shard.communicators import ACROSS, AT_LAST_S, GATHER, NCCL, REDUCE, STEP
from hightide.shard.own_rank import Standing
from hightide.shard.ranks import Ranks
from hightide.shard.watchman import Watchman

TILE_BYTES = 2**20  # that travel at once
ISSUED_ON = {Lane.GATHER: (GATHER,), Lane.REDUCE: (REDUCE, ACROSS, STEP)}  # by a lane's thread


def begin_alike(collectives: Collectives, model: nn.Module, from_files: Collection[str]) -> None:
    """Parameters and buffers that have values get those of the first rank. Mostly they have them already: sums tell.
    What comes from files is not looked at: all ranks read the same ones."""
    named = [*model.named_parameters(), *model.named_buffers()]
    found = {name: value.data for name, value in named if not value.is_meta and name not in from_files}
    _make_alike(collectives, found)


def keep_alike(collectives: Collectives, model: nn.Module) -> None:
    """Buffers of the model's state (statistics of batch normalisation) are those of the first rank again. DDP does it
    before each forward; here it is the end of a backward, where all ranks meet: an evaluation need not be all ranks'.
    Versions stay: a graph that is alive may have saved such a buffer."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, value in module._buffers.items():
            if value is not None and name not in module._non_persistent_buffers_set:
                found[f"{path}.{name}"] = value.data
    if found:
        _make_alike(collectives, found)


def _make_alike(collectives: Collectives, found: Mapping[str, Tensor]) -> None:
    own = b"".join(checksum(value).to_bytes(4, "little") for value in found.values())
    sums = collectives.exchange("sums of values", own)
    if any(len(other) != len(own) for other in sums):
        raise ValueError(
            f"ranks have models of different numbers of tensors: {', '.join(str(len(s) // 4) for s in sums)}"
        )
    for index, (name, value) in enumerate(found.items()):
        if len({other[4 * index : 4 * index + 4] for other in sums}) > 1:
            _take_first(collectives, name, value)


def _bytes(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def checksum(value: Tensor) -> int:
    return zlib.crc32(_bytes(value).numpy().data) if value.numel() else 0


def _take_first(collectives: Collectives, name: str, value: Tensor) -> None:
    content = _bytes(value).clone()
    for start in range(0, content.numel(), TILE_BYTES):
        tile = content[start : start + TILE_BYTES]
        sent = tile.numpy().tobytes() if collectives.ranks.rank == 0 else None
        received = collectives.broadcast_bytes(f"values of {name} from byte {start} on", sent)
        tile.copy_(torch.frombuffer(bytearray(received), dtype=torch.uint8))
    with torch.no_grad():
        value.copy_(content.view(value.dtype).view(value.shape))


@contextmanager
def drawing_alike(collectives: Collectives) -> Iterator[None]:
    """Inside, all ranks draw the random numbers that the first one draws. Afterwards each goes on with its own."""
    own = torch.get_rng_state()
    is_first = collectives.ranks.rank == 0
    drawn = collectives.broadcast_bytes("random numbers", own.numpy().tobytes() if is_first else None)
    torch.set_rng_state(torch.frombuffer(bytearray(drawn), dtype=torch.uint8))
    try:
        yield
    finally:
        if not is_first:
            torch.set_rng_state(own)


def lanes_of(ranks: Ranks, gpu: torch.device | None, in_turn: bool = True) -> Lanes:
    """A rank may wait as long for the others as the watchman lets it, and has its share of the node's cores.
    `in_turn`: over NCCL, see [Note: collectives in one order] in lanes/queues.py."""
    assert ranks.watchman is not None
    lanes = Lanes(
        timeout_s=ranks.watchman.patience.timeout_s + AT_LAST_S,
        device=gpu,
        num_update_threads=max(1, ranks.share_of_cores(usable_cores()) - CORES_FOR_OTHERS),
        several_ranks=True,
        in_turn=in_turn and ranks.backend == NCCL,
    )
    ranks.ends_first(lanes.end)
    return lanes


def is_watched_by(watchman: Watchman, flight: InFlight) -> None:
    """Answers to what the watchman asks about this rank. Its threads must not keep a run alive."""
    watchman.own.owes_others = _owes_others(weakref.ref(flight))
    watchman.own.standing = _standing(weakref.ref(flight))


def _owes_others(flight: weakref.ref[InFlight]) -> Callable[[], bool]:
    return lambda: (found := flight()) is None or found.lanes.owes_others


def _standing(flight: weakref.ref[InFlight]) -> Callable[[], Standing | None]:
    def look() -> Standing | None:
        if (found := flight()) is None:
            return None
        is_idle, at_work, num_taken = found.lanes.standing()
        at_others = tuple(ISSUED_ON[lane] for lane in at_work)
        return Standing(
            found.is_waiting, is_idle, at_others, num_taken + found.num_waits, found.lanes.streams.are_on_gpu
        )

    return look
