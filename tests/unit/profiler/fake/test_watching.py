"""Whoever watches operations sees each once, in the order in which it was asked for."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from hightide.profiler.fake.fake import fake_parameters
from hightide.profiler.fake.watching import watched

aten = torch.ops.aten


def seen_of(model: nn.Module, x: torch.Tensor) -> list[tuple[str, Any]]:
    seen: list[tuple[str, Any]] = []

    def before(name: str) -> Any:
        return lambda func, args, kwargs: seen.append((f"{name} before", func))

    def after(name: str) -> Any:
        return lambda func, args, kwargs, out: seen.append((f"{name} after", func))

    with (
        watched(before=[before("outer")], after=[after("outer")]),
        watched(before=[before("inner")], after=[after("inner")]),
    ):
        model(x).relu_()
    model(x)
    return seen


def test_each_operation_is_seen_with_and_without_values() -> None:
    model, x = nn.Linear(3, 4), torch.ones(2, 3)
    expected = [
        (f"{name} {when}", func)
        for func in (aten.t.default, aten.addmm.default, aten.relu_.default)
        for name, when in (("inner", "before"), ("outer", "before"), ("outer", "after"), ("inner", "after"))
    ]
    assert [entry for entry in seen_of(model, x) if entry[1] is not aten.detach.default] == expected
    with fake_parameters(model):
        mode = _get_current_dispatch_mode()
        found = seen_of(model, x)
        assert _get_current_dispatch_mode() is mode  # no other one was entered
    assert [entry for entry in found if entry[1] in {func for _, func in expected}] == expected


def test_what_fails_is_looked_at_and_not_seen() -> None:
    looked: list[Any] = []
    seen: list[Any] = []
    with (
        suppress(RuntimeError),
        watched(before=[lambda func, *_: looked.append(func)], after=[lambda func, *_: seen.append(func)]),
    ):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert looked == [aten.ones.default, aten.ones.default, aten.mm.default] and seen == looked[:2]
