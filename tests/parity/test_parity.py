"""Training through chunks equals plain PyTorch in fp32, for every model, timing and kind of clipping: 20 steps of some
and six of the others, in which the learning rate rises and falls."""

from __future__ import annotations

from functools import partial

import pytest
from harness import SUBJECTS, assert_streamed, compare

FULL, SHORT = 20, 6  # steps; the schedule's rate falls in the sixth
TWENTY = [  # each timing, tied and untied, and a model that is none of transformers
    ("llama_tied", "in_backward", None, 1.02, "after"),
    ("hand_written", "deferred", "optimizer", 1.02, "after"),
]
COVERING = [  # with those every model, every timing and kind of clipping with tied and with untied weights
    ("llama", "deferred", "torch", 1.02, "after"),
    ("llama", "in_backward", None, 1.4, "before"),
    ("llama_tied", "deferred", "optimizer", 1.4, "before"),
    ("gpt2", "deferred", "torch", 1.4, "after"),
    ("gpt2_untied", "deferred", None, 1.02, "before"),
    ("vit", "in_backward", None, 1.4, "after"),
    ("plain", "deferred", "torch", 1.02, "before"),
    ("plain_tied", "in_backward", None, 1.02, "before"),
]
MORE = [  # of three steps in test_covering.py, where every pair of these features is
    *COVERING,
    ("gpt2", "in_backward", None, 1.02, "before"),
    ("vit", "deferred", "optimizer", 1.02, "after"),
    ("plain_tied", "deferred", None, 1.02, "after"),
    ("hand_written", "in_backward", None, 1.02, "before"),
]


@pytest.mark.parametrize(
    ("name", "update", "clip", "room", "scheduler", "num_steps"),
    [
        *((*case, FULL) for case in TWENTY),
        *((*case, SHORT) for case in COVERING),
        *(pytest.param(*case, FULL, marks=pytest.mark.long) for case in MORE),
    ],
)
def test_steps_equal_plain_pytorch(
    name: str, update: str, clip: str | None, room: float, scheduler: str, num_steps: int
) -> None:
    subject = SUBJECTS[name]
    plain, wrapped = compare(
        partial(subject.build, num_samples=7),
        lambda: subject.batches(num_steps),
        wrap={"micro_batch": 3, "update": update, "room": room},
        clip=clip,
        groups=2,
        scheduler=scheduler,
    )
    assert_streamed(wrapped, micro_batches=[3, 3, 1])
    assert clip is None or max(plain.norms) > 0.5, "clipping is idle"


def test_seven_samples_by_two_are_four_micro_batches() -> None:
    subject = SUBJECTS["llama"]
    _, wrapped = compare(
        partial(subject.build, num_samples=7), lambda: subject.batches(3), wrap={"micro_batch": 2}, clip=None
    )
    assert_streamed(wrapped, micro_batches=[2, 2, 2, 1])
