"""Numbers arrive late, but in order, whole, and never more than two steps late."""

from __future__ import annotations

import time

import pytest
import torch

from hightide.cli.train import readings
from hightide.cli.train.readings import MAX_LAG, Readings

CPU = torch.device("cpu")


class Clock:
    """Makes moments that pass when `now` reaches them. Each question about one lets time go on by `tick`."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 0.0, tick
        self.made = 0
        self.broken: Exception | None = None

    def moment(self) -> ClockMoment:
        self.made += 1
        return ClockMoment(self, 10.0 * (self.made - 1))  # the first one is the start, and not of a step


class ClockMoment:
    def __init__(self, clock: Clock, at_s: float) -> None:
        self.clock, self.at_s = clock, at_s

    def passed(self) -> bool:
        if self.clock.broken is not None:
            raise self.clock.broken
        self.clock.now += self.clock.tick
        return self.clock.now >= self.at_s

    def seconds_since(self, earlier: ClockMoment) -> float:
        assert self.clock.now >= self.at_s >= earlier.at_s, "asked before it had passed"
        return self.at_s - earlier.at_s


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[list[float], float]] = []

    def __call__(self, values: list[float], step_s: float) -> None:
        self.lines.append((values, step_s))

    @property
    def steps(self) -> list[float]:
        return [values[0] for values, _ in self.lines]


def number(value: float) -> torch.Tensor:
    return torch.tensor(float(value), requires_grad=True) * 1


def test_on_a_cpu_numbers_are_handed_on_at_once_with_the_time_between_steps() -> None:
    log, began_s = Log(), time.perf_counter()
    with Readings(CPU) as taken:
        for step in range(1, 5):
            time.sleep(0.02)
            taken.add([number(step), number(-step)], log)
            assert [values for values, _ in log.lines] == [[float(n), float(-n)] for n in range(1, step + 1)]
    steps_s = [step_s for _, step_s in log.lines]
    assert min(steps_s) >= 0.02 and sum(steps_s) <= time.perf_counter() - began_s


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_are_those_that_item_would_give(dtype: torch.dtype) -> None:
    log, value = Log(), torch.tensor(1 / 3, dtype=torch.float64).to(dtype)
    with Readings(CPU) as taken:
        taken.add([value], log)
    assert log.lines[0][0] == [value.item()]


def test_nothing_is_waited_for_until_the_log_is_two_steps_behind() -> None:
    clock, log = Clock(), Log()
    with Readings(CPU, clock.moment) as taken:
        for step in range(1, MAX_LAG + 1):
            taken.add([number(step)], log)
        assert log.steps == []  # time stands still: waiting would never have ended
        clock.now = 10.0
        clock.tick = 1.0
        for step in range(MAX_LAG + 1, 21):
            taken.add([number(step)], log)
            assert step - MAX_LAG <= len(log.steps) < step
            assert log.steps == list(range(1, len(log.steps) + 1))
    assert log.steps == list(range(1, 21))
    assert [step_s for _, step_s in log.lines] == [10.0] * 20


def test_what_has_arrived_is_handed_on_without_being_waited_for() -> None:
    clock, log = Clock(), Log()
    with Readings(CPU, clock.moment) as taken:
        taken.add([number(1)], log)
        clock.now = 10.0
        taken.add([number(2)], log)
        assert log.steps == [1.0]
        clock.now = 20.0
    assert log.steps == [1.0, 2.0]


def test_a_failure_inside_is_raised_after_all_earlier_steps_were_handed_on() -> None:
    clock, log = Clock(tick=1.0), Log()
    with pytest.raises(KeyError, match="the cause"), Readings(CPU, clock.moment) as taken:
        for step in (1, 2):
            taken.add([number(step)], log)
        assert log.steps == []
        raise KeyError("the cause")
    assert log.steps == [1.0, 2.0]


def test_a_device_that_gives_no_numbers_any_more_does_not_hide_the_cause() -> None:
    clock, log = Clock(), Log()
    with pytest.raises(KeyError, match="the cause") as caught, Readings(CPU, clock.moment) as taken:
        taken.add([number(1)], log)
        clock.broken = RuntimeError("illegal access")
        raise KeyError("the cause")
    assert "illegal access" in caught.value.__notes__[0]
    assert log.steps == []


def test_a_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "TIMEOUT_S", 0.05)
    with (
        pytest.raises(TimeoutError, match=r"did not finish a step within 0.05 s"),
        Readings(CPU, Clock().moment) as taken,
    ):
        taken.add([number(1)], Log())


def test_of_several_ranks_each_hands_a_step_on_at_the_same_moment() -> None:
    """Although the numbers are there at once."""
    log = Log()
    with Readings(CPU, is_steady=True) as several:
        for step in range(5):
            several.add([number(step)], log)
            assert log.steps == list(range(max(0, step + 1 - MAX_LAG)))
        several.wait()
        assert log.steps == [0, 1, 2, 3, 4]


def test_an_evaluation_between_two_steps_is_part_of_neither() -> None:
    clock, log = Clock(tick=100.0), Log()
    with Readings(CPU, clock.moment) as readings:
        readings.add([number(1)], log)
        readings.wait()
        for _ in range(3):
            clock.moment()  # time goes by
        readings.restart()
        readings.add([number(2)], log)
    assert log.lines == [([1.0], 10.0), ([2.0], 10.0)]
