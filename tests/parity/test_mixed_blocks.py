"""Any blocks, also those in which samples meet, which keep state, draw random numbers or read shapes, in any limits:
equal to plain PyTorch and within the limits, or refused before a wrong number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from equal_or_refused import Case, Step, Way, call, one_step, problem, train
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from random_blocks import Sketch, sketches
from torch import nn


@dataclass(frozen=True)
class Trial:
    sketch: Sketch
    num_samples: int
    smaller_last: bool  # the last step's batch has one sample less
    way: Way
    optimizer: str
    mode: str  # what happens beside training, see STEPS

    def check(self) -> None:
        case = Case(
            name=repr(self),
            build=self.sketch.build,
            batch=self.batch,
            outcome="either",
            ways=(self.way,),
            step=STEPS[self.mode],
            optimizer=OPTIMIZERS[self.optimizer],
        )
        plain = train(case, None)
        assume(all(abs(loss) < 1e4 for loss in plain.losses))  # else rounding decides
        wrong = problem(case, plain, self.way)
        assert not wrong, wrong

    def batch(self, seed: int) -> Any:
        return self.sketch.batch(self.num_samples - (self.smaller_last and seed == 3), seed)


OPTIMIZERS = {  # a larger eps: before a norm a bias has no gradient but rounding, which Adam makes a walk
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-2),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-2),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.02),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True),
}


def evaluated_before(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    model.eval()
    with torch.no_grad():
        before = call(model, batch)
    model.train()
    return {**one_step(model, optimizer, batch, index), "before": before}


def looked_at_before(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    with torch.no_grad():
        before = call(model, batch)
    return {**one_step(model, optimizer, batch, index), "before": before}


def in_evaluation_by_turns(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    model.train(index != 1)
    return one_step(model, optimizer, batch, index)


def one_block_in_evaluation(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    model.train()
    model.blocks[0].eval()  # type: ignore[index]
    return one_step(model, optimizer, batch, index)


STEPS: dict[str, Step] = {
    "train": one_step,
    "evaluated before": evaluated_before,
    "looked at before": looked_at_before,
    "evaluation by turns": in_evaluation_by_turns,
    "one block in evaluation": one_block_in_evaluation,
}


@st.composite
def trials(draw: st.DrawFn) -> Trial:
    sketch = draw(sketches())
    num_samples = draw(st.sampled_from([2, 4, 5, 6]))
    rows = sketch.tokens if sketch.time_first != sketch.turned else num_samples  # what the library takes for samples
    parts = [rows] if sketch.draws_by_sample else [None, 1, 2, 3, rows]
    micro_batch = draw(st.sampled_from(parts))
    tight = draw(st.booleans())
    return Trial(
        sketch=sketch,
        num_samples=num_samples,
        smaller_last=num_samples > 2 and rows == num_samples and draw(st.booleans()),
        way=Way(
            micro_batch and min(micro_batch, rows),
            tight,
            draw(st.sampled_from(["deferred", "deferred", "in_backward"])),
            draw(st.sampled_from([1.02, 1.3, 2.0])) if tight else 1.0,
        ),
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        mode=draw(st.sampled_from(["train", *STEPS])),
    )


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@pytest.mark.timeout(300)
@given(trials())
@settings(max_examples=8, deadline=None, suppress_health_check=SLOW, phases=(Phase.explicit, Phase.generate))
def test_any_blocks(trial: Trial) -> None:
    trial.check()


@pytest.mark.long
@pytest.mark.timeout(3000)
@given(trials())
@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=SLOW,
    derandomize=False,
    print_blob=True,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
)
def test_any_blocks_at_length(trial: Trial) -> None:
    trial.check()
