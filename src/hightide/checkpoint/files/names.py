"""Names of what is in a folder of checkpoints. See [Note: a checkpoint]. One of a Trainer is called as its callbacks
and `resume_from_checkpoint` look for it."""

from __future__ import annotations

import re
from pathlib import Path

from hightide.ir.foreign import MAX_COUNT, quoted

TMP = ".tmp"  # being written
OLD = ".old"  # replaced by another of its step, a moment before it is removed: a checkpoint still
GONE = ".gone"  # being removed
_NAME = re.compile(r"(step|checkpoint)-(0|[1-9][0-9]{0,18})(\.tmp|\.old|\.gone|)")


def step_name(step: int) -> str:
    return f"step-{step}"


def trainer_name(step: int) -> str:
    return f"checkpoint-{step}"


def whole_name(name: str) -> str:
    """Of the checkpoint that a folder of ours is, was or will be."""
    found = _NAME.fullmatch(name)
    assert found is not None, name
    return name.removesuffix(found[3])


def parse_name(name: str) -> tuple[int, str] | None:
    """The step and what kind of folder it is ("" for a checkpoint). None for what is not ours by its name."""
    found = _NAME.fullmatch(name)
    if found is None or int(found[2]) > MAX_COUNT:
        return None
    return int(found[2]), found[3]


def step_of(path: Path) -> int:
    """Of a folder that is one of ours by its name."""
    parsed = parse_name(path.name)
    assert parsed is not None, path
    return parsed[0]


def check_step(step: int) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_COUNT:
        raise ValueError(f"step={quoted(step)}; it must be an integer from 0 to {MAX_COUNT}")
