"""bench/published.py: the step that is told to be fastest, of the shapes that were published."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import published
import torch

from hightide.integrations.shapes import config_of, shaped_model
from hightide.ir.state_spec import ADAM_STATES
from hightide.planner.predict.estimate import estimate
from hightide.planner.problem import Problem, Terms
from unit.planner.predict.test_step_seconds import GPU
from unit.planner.profiles import UNLIMITED, stack


@pytest.mark.parametrize(("name", "numel"), [("qwen2.5-3b", 3.09e9), ("qwen2.5-7b", 7.62e9), ("qwen2.5-14b", 14.77e9)])
def test_the_shapes_have_the_published_numbers_of_parameters(name: str, numel: float) -> None:
    model = shaped_model(config_of(name, published.LENGTH), torch.bfloat16)
    assert sum(param.numel() for param in model.parameters()) == pytest.approx(numel, rel=0.002)
    assert all(name in rows for rows in published.PUBLISHED.values())


def test_what_does_not_fit_in_any_number_of_calls_is_none() -> None:
    profile = stack()
    problem = Problem(profile, estimate(profile, GPU), GPU, Terms(UNLIMITED, UNLIMITED), quick=True)
    assert published.best(problem) is not None
    assert published.best(problem.with_terms(gpu_bytes=1, host_bytes=1)) is None


def test_narrow_states_are_half_as_wide() -> None:
    assert sum(state.num_bytes(100) for state in published.NARROW) * 2 == sum(one.num_bytes(100) for one in ADAM_STATES)
