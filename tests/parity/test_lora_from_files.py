"""Adapters of PEFT on a model whose values are still in files: they begin as PEFT lets them begin."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
import transformers
from torch import nn

import hightide
import models
from unit.runtime.steps import adamw, train_step

LIMITS = hightide.Limits(gpu="1MiB", host="64MiB")


def config(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    models.llama(num_layers=2)[0].save_pretrained(path)
    return path


def both(folder: Path, **options: Any) -> tuple[nn.Module, nn.Module]:
    found = []
    for load in (hightide.from_pretrained, transformers.AutoModelForCausalLM.from_pretrained):
        model = load(folder)
        torch.manual_seed(5)
        found.append(peft.get_peft_model(model, config(**options)).train())
    return found[0], found[1]


@pytest.mark.parametrize(
    "options",
    [{}, {"init_lora_weights": "gaussian"}, {"init_lora_weights": False}, {"modules_to_save": ["lm_head"]}],
    ids=str,
)
def test_adapters_begin_as_with_peft_and_train_as_there(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    model, plain = both(folder, **options)
    theirs = dict(plain.named_parameters())
    adapters = {name: param for name, param in model.named_parameters() if "lora" in name}
    assert len(adapters) == 8 and all(torch.equal(param, theirs[name]) for name, param in adapters.items())
    assert all(param.is_meta for name, param in model.named_parameters() if name not in adapters)
    batch = models.token_batch()
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=LIMITS)
    assert {type(param) for param in hightide.unwrap(model).parameters()} == {nn.Parameter}
    assert all(torch.equal(param, theirs[name]) for name, param in model.named_parameters())
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=LIMITS)
    plain_optimizer = adamw(plain)
    for _ in range(3):
        torch.testing.assert_close(
            train_step(model, optimizer, batch), train_step(plain, plain_optimizer, batch), rtol=1e-5, atol=0
        )
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    again = peft.PeftModel.from_pretrained(base, tmp_path).state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "options",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"use_dora": True},
        {"trainable_token_indices": {"embed_tokens": [1, 2]}},
    ],
)
def test_what_is_made_from_the_weights_is_refused(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"none before hightide.wrap.*transformers' own from_pretrained"):
        peft.get_peft_model(hightide.from_pretrained(folder), config(**options))


def test_values_are_neither_read_nor_written_before_they_are_there(folder: Path) -> None:
    """What torch computes from them would be memory that nobody has filled, and what is written would be lost."""
    param = hightide.from_pretrained(folder).get_parameter("lm_head.weight")
    for touch in (
        torch.mean,
        lambda param: param[[0, 1]],
        lambda param: torch.cat([param, torch.zeros(1, param.shape[1])]),
        torch.nn.init.zeros_,
        lambda param: param.requires_grad_(False).mul_(2),
        lambda param: param.__setitem__(0, 1.0),
    ):
        with pytest.raises(RuntimeError, match=r"none before hightide\.wrap"):
            touch(param)
    assert torch.equal(torch.zeros_like(param), torch.zeros(param.shape)) and torch.randn_like(param).isfinite().all()
    assert param.new_ones(2).tolist() == [1, 1] and param.detach().is_meta and param.T.shape == param.shape[::-1]


def test_a_wrap_that_fails_can_be_done_again(folder: Path) -> None:
    model = hightide.from_pretrained(folder).train()
    with pytest.raises(ValueError, match="no plan fits"):
        hightide.wrap(model, adamw(model), models.token_batch(), limits=hightide.Limits(gpu="20KiB", host="64MiB"))
    model = peft.get_peft_model(model, config())
    assert not any(param.is_meta for name, param in model.named_parameters() if "lora" in name)
    model, optimizer = hightide.wrap(model, adamw(model), models.token_batch(), limits=LIMITS)
    train_step(model, optimizer, models.token_batch())


def test_it_can_be_converted(folder: Path) -> None:
    model = hightide.from_pretrained(folder).to(torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    model, _ = hightide.wrap(model, adamw(model), models.token_batch(), limits=LIMITS)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16).state_dict()
    assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("gpu", ["440KiB", "1MiB"], ids=["no room", "room"])
def test_the_head_that_a_trained_copy_stands_for_is_used_without_the_adapters(folder: Path, gpu: str) -> None:
    """The example does not call it."""
    model, plain = (cast(Any, one) for one in both(folder, modules_to_save=["lm_head"]))
    batch = models.token_batch()
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=hightide.Limits(gpu=gpu, host="64MiB"))
    train_step(model, optimizer, batch)
    with model.disable_adapter(), plain.disable_adapter(), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*did not foresee.*")
        if gpu == "1MiB":
            assert float(model(**batch).loss) == pytest.approx(float(plain(**batch).loss), rel=1e-6)
        else:
            with pytest.raises(hightide.Refused, match=r"no room .*lm_head"):
                model(**batch)
    train_step(model, optimizer, batch)
