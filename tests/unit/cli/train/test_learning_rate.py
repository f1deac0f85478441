"""The learning rate is a function of the step alone."""

from __future__ import annotations

import itertools

import pytest

from hightide.cli.train.config import LrSchedule, OptimizerConfig
from hightide.cli.train.learning_rate import lr_factor


def test_learning_rate_warms_up_then_falls_to_its_final_share() -> None:
    config = OptimizerConfig(warmup_steps=4, final_lr_fraction=0.1)
    factors = [lr_factor(step, 20, config) for step in range(21)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert all(later <= earlier for earlier, later in itertools.pairwise(factors[4:]))
    assert factors[20] == pytest.approx(0.1)


def test_it_falls_in_a_line_or_stays_where_that_is_asked_for() -> None:
    line = OptimizerConfig(warmup_steps=0, schedule=LrSchedule.LINEAR, final_lr_fraction=0.0)
    assert [lr_factor(step, 4, line) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    constant = OptimizerConfig(warmup_steps=2, schedule=LrSchedule.CONSTANT)
    assert [lr_factor(step, 4, constant) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]


def test_a_tenth_of_the_steps_is_warm_up_but_not_more_than_a_hundred() -> None:
    config = OptimizerConfig()
    assert lr_factor(0, 30, config) == pytest.approx(1 / 3) and lr_factor(2, 30, config) == 1.0
    assert lr_factor(99, 10_000, config) == 1.0 and lr_factor(98, 10_000, config) < 1.0
