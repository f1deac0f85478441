"""Which inputs of a call leave for the host."""

from __future__ import annotations

import torch

from hightide.runtime.waiting.inputs_away import InputsAway


def test_an_input_without_elements_stays() -> None:
    away = InputsAway(3)
    tensors = away.choose([torch.ones(2, 3), torch.ones(0, 3), torch.ones(2)], [True, True, False], is_whole=True)
    assert away.which == [True, False, False]
    assert [tensor.shape for tensor in away.of(tensors)] == [(2, 3)]
