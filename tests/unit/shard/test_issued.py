"""The log of one lane."""

from __future__ import annotations

from hightide.shard.issued import REMEMBERED, LaneLog
from hightide.shard.signs import Fault, Position, Sign


def log_of(*names: str) -> LaneLog:
    log = LaneLog("gather")
    for name in names:
        log.add(name, 0.0, lambda: False)
    return log


def test_digests_tell_order_and_names() -> None:
    assert log_of("a", "b").digest == log_of("a", "b").digest
    assert len({log_of(*names).digest for names in (("a", "b"), ("b", "a"), ("a",), ("a\nb",), ())}) == 5


def test_the_oldest_is_the_first_that_is_not_through() -> None:
    log, through = LaneLog("gather"), {"a"}
    for name in "abc":
        log.add(name, 0.0, lambda name=name: name in through)
    oldest = log.oldest()
    assert oldest is not None and (oldest.name, oldest.number) == ("b", 2)
    through |= {"b", "c"}
    assert log.oldest() is None


def test_the_last_ones_are_remembered() -> None:
    log = log_of(*map(str, range(1, REMEMBERED + 11)))
    assert log.at(10) is None and log.at(0) is None and log.at(REMEMBERED + 11) is None
    for number in (11, 500, REMEMBERED + 10):
        issued = log.at(number)
        assert issued is not None and (issued.name, issued.number) == (str(number), number)


def test_a_sign_is_read_as_it_was_given() -> None:
    position = Position.of(log_of(*"abcdefghijk"))
    assert (position.number, position.names) == (11, tuple("defghijk"))
    assert [position.name_of(number) for number in (3, 4, 11, 12)] == [None, "d", "k", None]
    sign = Sign(3, "tick 4", {"gather": position}, Fault(None, "nobody's"), "it has ended")
    assert Sign.from_json(sign.to_json()) == sign
    assert Sign.from_json(Sign(1, "").to_json()) == Sign(1, "")
