"""Training through chunks equals plain PyTorch: 20 steps in fp32, for every model, timing and kind of clipping."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from harness import SUBJECTS, assert_streamed, compare

TIMINGS_AND_CLIPS = [("deferred", None), ("deferred", "torch"), ("deferred", "optimizer"), ("in_backward", None)]
COVERING = [  # every model, every timing and kind of clipping with tied and with untied weights
    ("llama", "deferred", "torch", 1.02, "after"),
    ("llama", "in_backward", None, 1.4, "before"),
    ("llama_tied", "deferred", "optimizer", 1.4, "before"),
    ("llama_tied", "in_backward", None, 1.02, "after"),
    ("gpt2", "deferred", "torch", 1.4, "after"),
    ("gpt2", "in_backward", None, 1.02, "before"),
    ("gpt2_untied", "deferred", None, 1.02, "before"),
    ("vit", "deferred", "optimizer", 1.02, "after"),
    ("vit", "in_backward", None, 1.4, "after"),
    ("plain", "deferred", "torch", 1.02, "before"),
    ("plain_tied", "deferred", None, 1.02, "after"),
    ("plain_tied", "in_backward", None, 1.02, "before"),
    ("hand_written", "deferred", "optimizer", 1.02, "after"),
    ("hand_written", "in_backward", None, 1.02, "before"),
]
FULL = [
    (name, update, clip, room, scheduler)
    for name, (update, clip), room, scheduler in itertools.product(
        SUBJECTS, TIMINGS_AND_CLIPS, (1.02, 1.4), ("before", "after")
    )
    if (name, update, clip, room, scheduler) not in COVERING
]


def check(name: str, update: str, clip: str | None, room: float, scheduler: str) -> None:
    subject = SUBJECTS[name]
    _, wrapped = compare(
        partial(subject.build, num_samples=7),
        subject.batches,
        wrap={"micro_batch": 3, "update": update, "room": room},
        clip=clip,
        groups=2,
        scheduler=scheduler,
    )
    assert_streamed(wrapped, micro_batches=[3, 3, 1])


@pytest.mark.parametrize(("name", "update", "clip", "room", "scheduler"), COVERING)
def test_twenty_steps_equal_plain_pytorch(
    name: str, update: str, clip: str | None, room: float, scheduler: str
) -> None:
    check(name, update, clip, room, scheduler)


@pytest.mark.long
@pytest.mark.parametrize(("name", "update", "clip", "room", "scheduler"), FULL)
def test_twenty_steps_equal_plain_pytorch_full(
    name: str, update: str, clip: str | None, room: float, scheduler: str
) -> None:
    check(name, update, clip, room, scheduler)


def test_clipping_is_not_idle() -> None:
    """The parity above would also hold if nothing clipped at all: norms must exceed the limit that is used there."""
    subject = SUBJECTS["llama"]
    clipped, _ = compare(
        partial(subject.build, num_samples=7), lambda: subject.batches(4), wrap={"micro_batch": 3}, clip="torch"
    )
    assert min(clipped.norms) > 0.5


def test_seven_samples_by_two_are_four_micro_batches() -> None:
    subject = SUBJECTS["llama"]
    _, wrapped = compare(
        partial(subject.build, num_samples=7), lambda: subject.batches(3), wrap={"micro_batch": 2}, clip=None
    )
    assert_streamed(wrapped, micro_batches=[2, 2, 2, 1])
