"""Loading, initialising, saving and resuming on a GPU: the same values as on the CPU."""

from __future__ import annotations

import copy
import filecmp
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hightide
import models
from gpu import streamed
from gpu.streamed import everything_moves
from hightide.ir.plan import Plan

pytestmark = pytest.mark.gpu


EDITS: dict[str, Callable[[Plan], Plan]] = {"moving": everything_moves, "resident": lambda plan: plan}


def wrap(model: nn.Module, plan: str) -> tuple[Any, Any]:
    return streamed.wrap(model, models.token_batch(), EDITS[plan])


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    values = found.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(values[name], value), name
    buffers = dict(found.named_buffers())
    for name, buffer in expected.named_buffers():
        assert buffers[name].is_cuda and torch.equal(buffers[name].cpu(), buffer), name


@pytest.mark.parametrize("plan", EDITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_and_back(plan: str, dtype: torch.dtype, tmp_path: Path) -> None:
    models.llama(tied=True)[0].save_pretrained(tmp_path / "folder", max_shard_size="60KB")  # type: ignore[operator]
    expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "folder", dtype=dtype)
    model = hightide.from_pretrained(tmp_path / "folder", dtype=dtype)
    model, _ = wrap(model, plan)
    assert_same(model, expected)
    for one, name in ((model, "wrapped"), (expected, "plain")):
        one.save_pretrained(tmp_path / name)  # type: ignore[operator]
    for file in os.listdir(tmp_path / "plain"):
        assert filecmp.cmp(tmp_path / "plain" / file, tmp_path / "wrapped" / file, shallow=False), file


@pytest.mark.parametrize("plan", EDITS)
def test_values_of_a_model_on_meta_do_not_depend_on_the_device(plan: str) -> None:
    expected = models.gpt2()[0]
    for module in expected.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    torch.manual_seed(5)
    expected.init_weights()  # type: ignore[operator]
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(expected.config)
    torch.manual_seed(5)
    model, _ = wrap(model, plan)
    assert_same(model, expected)


def test_a_bf16_run_resumes_with_the_same_bits() -> None:
    def pair(seed: int = 0) -> Any:
        return wrap(models.llama(seed=seed)[0].to(torch.bfloat16), "moving")

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            loss = model(**models.token_batch(seed=step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    straight, stopped = pair(), pair()
    losses = steps(*straight, 0, 6)
    steps(*stopped, 0, 3)
    saved = copy.deepcopy((stopped[0].state_dict(), stopped[1].state_dict()))
    model, optimizer = pair(seed=99)
    optimizer.load_state_dict(saved[1])
    model.load_state_dict(saved[0])
    assert steps(model, optimizer, 3, 6) == losses[3:]
    for name, value in straight[0].state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
