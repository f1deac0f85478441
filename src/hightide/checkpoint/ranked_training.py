"""At the moment of a save ranks tell each other where each of them is, and whether all mean the same."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hightide.checkpoint.extra import from_plain, to_plain
from hightide.checkpoint.saving import Saving
from hightide.checkpoint.shards import FilePlaces
from hightide.checkpoint.training import OfRank, Training, generator_states, seed_generators, set_generator_states
from hightide.checkpoint.writing import CheckpointContent
from hightide.integrations.model_files import Named
from hightide.runtime.run import Run
from hightide.shard.agreement import check_same, of_each
from hightide.shard.collectives import Collectives

RANK_EXTRA = "rank_extra"
SAME_STEP = "All ranks must save after the same step, with the same step= if they give one"
SAME_TENSORS = "All ranks must save the same: a model with the same parameters, and with its optimizer or without"


@dataclass(frozen=True)
class Prepared:
    """Of one rank: what it has taken for a checkpoint, or why it could not."""

    saving: Saving
    training: Training
    content: CheckpointContent | None
    failure: OSError | None = None  # of small files, which is a failed save and no wrong call


def own_state(run: Run | None, extra: Any) -> OfRank:
    """Of this moment. ValueError for an `extra` that cannot be written."""
    passes, random = 0 if run is None else run.num_passes, generator_states()
    if run is not None and run.gpu.device.type == "cuda":
        random["device"] = run.gpu.device.index  # whose generator among those of "cuda" this rank draws from
    return OfRank(random, passes, from_plain(*to_plain(extra, RANK_EXTRA)))


def places_of(content: CheckpointContent) -> FilePlaces:
    buffers = [Named(name, value.dtype, tuple(value.shape)) for name, value in content.buffers.items()]
    return FilePlaces(content.files, buffers, content.values.tensors)


def prepared_by_all(
    collectives: Collectives, run: Run, rank_extra: Any, prepare: Callable[[], Prepared]
) -> tuple[Prepared, list[OfRank], str]:
    """What each has of its own, and why the save has failed on some rank ("": it has not). Raises on all ranks or on
    none; then nothing is kept for anybody."""
    mine: list[Prepared] = []

    def tell() -> bytes:
        mine.append(prepare())
        (found,) = mine
        digest = "" if found.content is None else places_of(found.content).digest
        failure = "" if found.failure is None else str(found.failure)
        return pickle.dumps((own_state(run, rank_extra), found.saving.step, digest, failure))

    try:
        told = [pickle.loads(one) for one in of_each(collectives, "a checkpoint", tell)]
        (found,) = mine
        failures = [f"rank {rank}: {failure}" for rank, (*_, failure) in enumerate(told) if failure]
        check_same(collectives, {"the step of a checkpoint": found.saving.step}, SAME_STEP)
        if run is not None:
            run.check_same_acts("what was done before a checkpoint")
        if not failures:
            check_same(collectives, {"what a checkpoint has": told[collectives.ranks.rank][2]}, SAME_TENSORS)
    except BaseException:
        for one in mine:
            if one.content is not None:
                one.content.values.close()
        raise
    return found, [state for state, *_ in told], "; ".join(failures)


def set_own_state(training: Training, run: Run | None, rank: int, world: int) -> Any:
    """Random numbers and counters, of a rank that loads a checkpoint; returns what it had told as its own, if as many
    ranks have saved. A rank that was not there begins with random numbers of its own."""
    saved = training.ranks or (OfRank(training.random, training.passes, None),)
    own = saved[rank] if rank < len(saved) else None
    if own is not None:
        set_generator_states(own.random)
        its = own.random.get("device")
        if run is not None and run.gpu.device.type == "cuda" and its is not None:  # it may have another number here
            torch.cuda.set_rng_state(own.random["cuda"][its], run.gpu.device)
    else:
        seed_generators(training.random, rank)
    if run is not None:
        run.num_passes = training.passes if own is None else own.passes
    return own.extra if own is not None and len(saved) == world else None
