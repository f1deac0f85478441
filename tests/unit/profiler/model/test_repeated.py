"""A deep model's profile made from a shallow one's is the one that probing all of it gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hightide.cli import workload as workload_module
from hightide.cli.workload import load_workload
from hightide.integrations.lora import Lora
from hightide.integrations.shapes import num_layers_of
from hightide.profiler.model.repeated import FEW_LAYERS, stack_of, with_layers


@pytest.mark.parametrize(("name", "lora"), [("llama-200m", None), ("gpt2-xl", None), ("llama-200m", "2:q_proj")])
def test_equal_layers_are_profiled_once(name: str, lora: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = Lora.parse(lora) if lora else None
    repeated = load_workload(name, 3, 32, None, adapters).profile()
    monkeypatch.setattr(workload_module, "FEW_LAYERS", 1000)
    whole = load_workload(name, 3, 32, None, adapters).profile()
    assert len(whole.calls) > num_layers_of(name)
    assert repeated == whole


def test_layers_that_are_not_alike_are_refused() -> None:
    profile = load_workload("tiny", 3, 32, None, None).profile()
    assert stack_of(profile) == "model.layers" and num_layers_of("tiny") == FEW_LAYERS
    assert len(with_layers(profile, 9, 0).calls) == len(profile.calls) + 5
    odd = next(index for index, call in enumerate(profile.calls) if profile.blocks[call.block].name == "model.layers.1")
    calls = tuple(replace(call, num_saved=7) if index == odd else call for index, call in enumerate(profile.calls))
    with pytest.raises(ValueError, match="not alike"):
        with_layers(replace(profile, calls=calls), 9, 0)
