"""Verdicts by the signs of all ranks: pure functions of data. The watchman asks, and does what follows.

[Note: standstill] Ranks that call blocks, backward or step() unequally often may come to wait for each other on two
lanes. A rank is at a standstill when the thread that runs the model waits for what a lane owes, or for other ranks, and
no lane does anything but wait for others: nothing happens there until one of its waits ends. A wait ends when all ranks
that take part have issued it. So, of all ranks at a standstill, those are taken out that have a wait for which nobody
is missing but ranks that may go on; then again, until nobody is taken out any more. Who is left waits for ever, and who
is not at a standstill (it evaluates something else, or writes a file) is never taken for lost. Signs are of different
moments: each has a number that changes as soon as its rank does anything, and they count when all of them have come
again, and again, with the same numbers.

[Note: two lanes] A rank that has gone on is seen earlier, whatever it does: what a rank exchanges in the thread that
runs the model stands still with that thread. Once nothing is left to begin on its other lanes, what it has issued there
is all that comes before, but for lanes that are `apart`: a checkpoint is written beside. A rank that has issued more,
and has not come to the exchange, does something else. Work that has left its queue and is not issued yet is not seen,
so this must last for a few beats.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hightide.shard.issued import Issued, LaneLog
from hightide.shard.signs import ELSEWHERE, ENDED, OUTSIDE, Fault, Sign, Wait

APART = (OUTSIDE, ELSEWHERE)  # waits that are not numbered
SHOWN_RANKS = 4  # of those that wait for each other, in a message
EQUALLY = (
    "All ranks must call the same blocks in the same order, and the model, backward and step() equally often. A rank "
    "whose batches end earlier must not leave the loop alone: give all ranks equally many (drop_last=True)"
)
EXCHANGED = (
    "What ranks exchange all of them must call, in the same order: reading p.grad, norms of other types than 2, "
    "state_dict(), saving and loading, the model"
)
EVALUATE = (
    "The model is in shards on all ranks, so all of them must call it, also to evaluate or generate: each on a part of "
    "the data, or all on the same, of which one rank uses the result"
)


# ---- collectives that differ


def difference(lane: str, number: int, names: Sequence[str], ranks: Sequence[int]) -> str:
    """In words, who issued what."""
    by_name: dict[str, list[int]] = {}
    for rank, name in zip(ranks, names, strict=True):
        by_name.setdefault(name, []).append(rank)
    issued = ", ".join(f"{name} on {in_words(who)}" for name, who in by_name.items())
    is_of_model = any("of an evaluation" in name for name in by_name)
    return (
        f"ranks issued different collectives as number {number} of lane {lane}: {issued}. "
        f"{EVALUATE if is_of_model else f'{EXCHANGED}. {EQUALLY}'}"
    )


def compare(rank: int, logs: Mapping[str, LaneLog], other: int, sign: Sign) -> Fault | None:
    """Whether that rank has issued other collectives than this one. Whoever is ahead knows what it issued there."""
    for lane, position in sign.lanes.items():
        log = logs[lane]
        mine = log.at(position.number)
        if mine is None or mine.digest == position.digest:
            continue
        for number in range(position.number - len(position.names) + 1, position.number + 1):
            own = log.at(number)
            name = position.name_of(number)
            if own is not None and name is not None and own.name != name:
                names = {rank: own.name, other: name}
                return Fault(None, difference(lane, number, [names[one] for one in sorted(names)], sorted(names)))
        both = in_words(sorted((rank, other)))
        return Fault(None, f"{both} issued different collectives on lane {lane}, before number {position.number}")
    return None


# ---- ranks that wait for each other


def stuck(signs: Mapping[int, Sign]) -> list[int]:
    """Ranks that wait for ever; see [Note: standstill]."""
    stands = {rank: sign.standstill for rank, sign in signs.items() if sign.standstill is not None}
    left = set(stands)
    left |= {rank for rank, sign in signs.items() if sign.ended is not None}
    while True:
        may_go_on = {
            rank
            for rank in left & stands.keys()
            if any(not left.intersection(missing(wait, signs)) for wait in stands[rank].waits)
        }
        if not may_go_on:
            return sorted(left & stands.keys())
        left -= may_go_on


def missing(wait: Wait, signs: Mapping[int, Sign]) -> list[int]:
    """Ranks that have not come to what is waited for."""
    if wait.lane not in APART:
        return [rank for rank in wait.members if rank in signs and signs[rank].number(wait.lane) < wait.number]
    return [rank for rank in wait.members if rank in signs and not _is_outside(signs[rank], wait)]


def _is_outside(sign: Sign, wait: Wait) -> bool:
    """In the same collective, as far as one can see."""
    waits = () if sign.standstill is None else sign.standstill.waits
    return any((one.lane, one.name, one.members) == (wait.lane, wait.name, wait.members) for one in waits)


def deadlock(ranks: Sequence[int], signs: Mapping[int, Sign], callers_lane: str) -> Fault:
    """Of ranks that are `stuck`. `callers_lane`: of what is exchanged in the user's thread."""
    told, remedies = [], []
    for rank in ranks[:SHOWN_RANKS]:
        still = signs[rank].standstill
        assert still is not None
        wait = next((one for one in still.waits if one.lane in APART), still.waits[0])
        whom = missing(wait, signs)
        has = "has" if len(whom) == 1 else "have"
        if wait.lane == callers_lane:
            remedies = [EXCHANGED]
        told.append(
            f"rank {rank} (at {signs[rank].at}) waits for {in_full(wait)}, to which {in_words(whom)} {has} not come"
        )
    if len(ranks) > SHOWN_RANKS:
        told.append(f"and {len(ranks) - SHOWN_RANKS} more ranks wait")
    calls = _unequal({rank: signs[rank].calls for rank in ranks})
    remedies.append(EVALUATE if "evaluation" in calls else EQUALLY)
    return Fault(None, f"ranks wait for each other: {'; '.join(told)}. {_in_calls(calls)}{'. '.join(remedies)}")


def _unequal(calls: Mapping[int, Mapping[str, int]]) -> dict[str, dict[int, list[int]]]:
    """What some have called more often than others: by what, ranks by number."""
    found: dict[str, dict[int, list[int]]] = {}
    for what in sorted({what for one in calls.values() for what in one}):
        by_number: dict[int, list[int]] = {}
        for rank, one in calls.items():
            by_number.setdefault(one.get(what, 0), []).append(rank)
        if len(by_number) > 1:
            found[what] = by_number
    return found


def _in_calls(unequal: Mapping[str, Mapping[int, Sequence[int]]]) -> str:
    told = (
        f"{what}: " + ", ".join(f"{number} on {in_words(ranks)}" for number, ranks in by_number.items())
        for what, by_number in unequal.items()
    )
    return f"Calls so far: {'; '.join(told)}. " if unequal else ""


def gone_on(
    rank: int, waited: Issued, numbers: Mapping[str, int], signs: Mapping[int, Sign], apart: Collection[str]
) -> Fault | None:
    """Somebody without this rank, which waits for it and has issued so many: see [Note: two lanes]."""
    for other, sign in signs.items():
        if sign.number(waited.lane) >= waited.number:
            continue
        for lane, position in sign.lanes.items():
            if lane in (waited.lane, *apart) or position.number <= numbers[lane]:
                continue
            at = f"{position.names[-1]} (number {position.number} of lane {lane})" if position.names else f"lane {lane}"
            return Fault(
                None,
                f"rank {rank} came to {in_full(waited)}, and rank {other} has gone on without it, to {at}. "
                f"{EXCHANGED}. {EQUALLY}",
            )
    return None


# ---- ranks that are lost, or late


def lost(
    waits: Sequence[Issued], signs: Mapping[int, Sign], silent_s: Mapping[int, float], patience_s: float
) -> Fault | None:
    """Somebody without whom no wait ends."""
    for rank, sign in signs.items():
        if sign.ended is not None and any(sign.number(issued.lane) < issued.number for issued in waits):
            remedy = f". {EQUALLY}" if sign.ended == ENDED else ""
            return Fault(rank, f"rank {rank} is no longer there: {sign.ended} (at {sign.at}){remedy}")
        if sign.ended is None and silent_s[rank] > patience_s:
            return Fault(rank, f"rank {rank} has given no sign of life for {silent_s[rank]:.0f} s (at {sign.at})")
    return None


def behind(issued: Issued, signs: Mapping[int, Sign]) -> list[int]:
    return [rank for rank, sign in signs.items() if sign.number(issued.lane) < issued.number]


# ---- in words


def in_full(issued: Issued | Wait) -> str:
    if issued.lane == OUTSIDE:
        return f"{OUTSIDE}.{issued.name}()"
    if issued.lane == ELSEWHERE:
        return issued.name
    return f"{issued.name} (number {issued.number} of lane {issued.lane})"


def in_words(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def error_in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
