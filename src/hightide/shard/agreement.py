"""Agreement of all ranks before they go on: one plan, the least limits, the same model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from hightide.ir.refusal import Refused
from hightide.ir.tier import Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.shard.collectives import Collectives
from hightide.shard.communicators import CONTROL

LONG = 200  # characters of a value in a message
STARTED = "All ranks must be started with the same"

Value = TypeVar("Value")


ORDINARY, INFEASIBLE, REFUSED = b"0", b"2", b"3"  # how what a rank tells of its error begins; b"1": there was none


class FailedElsewhere(ValueError):
    """Another rank has raised, and knows more about it."""


class InfeasibleElsewhere(FailedElsewhere, InfeasiblePlan):
    """A loop that tries again with other limits does so on all ranks, or they would wait for each other."""


class RefusedElsewhere(FailedElsewhere, Refused):
    """A loop that goes on after a refusal does so on all ranks, whichever of them had a reason."""


def from_first(collectives: Collectives, what: str, make: Callable[[], str]) -> str:
    """Rank 0 makes it (a plan, as text), and all get it. What it raises there is a `FailedElsewhere` on
    the others."""
    ranks = collectives.ranks
    if ranks.watchman is None:
        return make()
    content, error = None, None
    if ranks.rank == 0:
        before, ranks.watchman.doing = ranks.watchman.doing, f"making {what}"
        try:
            content = b"1" + make().encode()
        except Exception as raised:
            error, content = raised, _told(raised)
        except BaseException as raised:  # an interrupt
            ranks.watchman.fail(raised)
            raise
        ranks.watchman.doing = before
    content = collectives.broadcast_bytes(what, content)
    if error is not None:
        raise error
    if content[:1] != b"1":
        raise _error_of(content, f"rank 0 could not make {what}")
    check_same(collectives, {f"digest of {what}": hashlib.sha256(content).hexdigest()[:16]})
    return content[1:].decode()


def of_each(collectives: Collectives, what: str, make: Callable[[], bytes], lane: str = CONTROL) -> list[bytes]:
    """What each rank makes, told to all. Whatever one of them raises is raised there, and is a
    `FailedElsewhere` on all others: so all go on, or none does."""
    error: Exception | None = None
    try:
        content = b"1" + make()
    except Exception as raised:
        error, content = raised, _told(raised)
    except BaseException as raised:  # an interrupt
        if (watchman := collectives.ranks.watchman) is not None:
            watchman.fail(raised)
        raise
    found = collectives.exchange(what, content, lane)
    if error is not None:
        raise error
    for rank, told in enumerate(found):
        if told[:1] != b"1":
            raise _error_of(told, f"{what} failed on rank {rank}")
    return [told[1:] for told in found]


def _told(error: Exception) -> bytes:
    """For `_error_of`, on other ranks."""
    if not isinstance(error, InfeasiblePlan):
        return (REFUSED if isinstance(error, Refused) else ORDINARY) + f"{type(error).__name__}: {error}".encode()
    fields = [error.moment, error.tier, error.num_bytes, [dict(limits) for limits in error.enough], error.num_calls]
    return INFEASIBLE + json.dumps([str(error), *fields]).encode()


def _error_of(told: bytes, where: str) -> FailedElsewhere:
    if told[:1] in (ORDINARY, REFUSED):
        kind = FailedElsewhere if told[:1] == ORDINARY else RefusedElsewhere
        return kind(f"{where}: {told[1:].decode()}")
    message, moment, tier, num_bytes, enough, num_calls = json.loads(told[1:])
    limits = tuple({Tier(name): size for name, size in one.items()} for one in enough)
    tier = None if tier is None else Tier(tier)
    return InfeasibleElsewhere(f"{where}: {message}", moment, tier, num_bytes, limits, num_calls)


def least(collectives: Collectives, limits: Mapping[str, float | None]) -> dict[str, float | None]:
    """Of each, what all ranks have. None is no limit."""
    found = [json.loads(content) for content in collectives.exchange("limits", json.dumps(dict(limits)).encode())]
    names = [", ".join(sorted(one)) for one in found]
    if len(set(names)) > 1:
        raise ValueError(f"ranks have different limits: {_who(names)}")
    given = {name: [value for one in found if (value := one[name]) is not None] for name in limits}
    return {name: min(values, default=None) for name, values in given.items()}


def check_same(
    collectives: Collectives,
    facts: Mapping[str, object],
    remedy: str = STARTED,
    details: Callable[[], Mapping[str, object]] = dict,
) -> None:
    """A ValueError on all ranks where one differs, or is not there. `details`, of which there are many, are looked at
    where facts differ, and told first."""
    found = [json.loads(content) for content in collectives.exchange("facts", json.dumps(dict(facts)).encode())]
    if all(one == found[0] for one in found):
        return
    if more := details():
        check_same(collectives, more, remedy)
    for name in dict.fromkeys(name for one in found for name in one):
        values = [json.dumps(one[name]) if name in one else "nothing" for one in found]
        if len(set(values)) > 1:
            raise ValueError(f"ranks differ in {name}: {_who(values)}. {remedy}")


def _who(values: Sequence[str]) -> str:
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    return "; ".join(
        f"{value if len(value) <= LONG else value[:LONG] + ' ...'} on rank{'s' if len(who) > 1 else ''} "
        f"{', '.join(map(str, who))}"
        for value, who in by_value.items()
    )
