"""What is asked of a Trainer: refused with a remedy, or left to the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hightide
from hightide import api
from hightide.shard.signs import Patience
from hightide.trainer.arguments import as_limits, check_arguments, check_optimizer_name, settle_arguments
from trainers import arguments, data, full, trainer


def test_limits_by_any_name() -> None:
    expected = hightide.Limits(gpu="24GiB", host="96GiB")
    assert as_limits(expected) is expected and as_limits({"gpu": "24GiB", "host": "96GiB"}) == expected
    assert as_limits("24GiB") == hightide.Limits(gpu="24GiB") and as_limits(None) is None
    with pytest.raises(ValueError, match="gpu, host and disk"):
        as_limits({"vram": "24GiB"})
    with pytest.raises(ValueError, match="limits is an int"):
        as_limits(24)  # type: ignore[arg-type]


def test_the_mixin_behind_a_trainer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"before Trainer: class Late\(hightide.TrainerMixin, Trainer\)"):
        type("Late", (transformers.Trainer, hightide.TrainerMixin), {})
    with pytest.raises(TypeError, match=r"before Seq2SeqTrainer"):
        type("Late", (transformers.Seq2SeqTrainer, hightide.TrainerMixin), {})
    own = type("Own", (hightide.TrainerMixin,), {})
    type("Mine", (own, transformers.Seq2SeqTrainer), {})
    type("Derived", (hightide.Trainer,), {})


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("deepspeed", {"zero_optimization": {"stage": 3}}, "give limits="),
        ("fsdp", "full_shard", "torchrun"),
        ("auto_find_batch_size", True, "micro-batches"),
        ("bf16_full_eval", True, "bf16=True"),
        ("enable_jit_checkpoint", True, "save_steps"),
    ],
)
def test_what_is_refused(name: str, value: Any, remedy: str, tmp_path: Path) -> None:
    settings = arguments(tmp_path)
    setattr(settings, name, value)
    with pytest.raises(ValueError, match=rf"{name}=.*{remedy}"):
        check_arguments(settings, "deferred")


def test_nothing_is_pinned_where_no_gpu_would_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there in (True, False):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda is_there=is_there: is_there)
        settings = arguments(tmp_path)
        settings.dataloader_pin_memory = True
        settle_arguments(settings)
        assert settings.dataloader_pin_memory is is_there
        assert bool(settings.accelerator_config.non_blocking) is is_there


def test_promises_that_the_trainer_could_not_keep(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"in_backward.*max_grad_norm=1.*max_grad_norm=0"):
        check_arguments(arguments(tmp_path), "in_backward")
    with pytest.raises(ValueError, match=r"in_backward.*fp16=True.*bf16"):
        check_arguments(arguments(tmp_path, max_grad_norm=0.0, fp16=True), "in_backward")
    check_arguments(arguments(tmp_path, max_grad_norm=0.0), "in_backward")


def test_ranks_that_the_arguments_do_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = arguments(tmp_path)
    assert settings.world_size == 1
    hightide.Trainer(full(), settings, **data())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"all would train on the same data.*use_cpu=True"):
        hightide.Trainer(full(), settings, **data())


def test_ranks_wait_as_long_as_those_of_ddp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever wraps the model: to train, to train again, to evaluate only."""
    asked, find = [], api.find_ranks

    def noted(group: Any, device: Any, patience: Patience, even_alone: bool) -> Any:
        asked.append(patience.timeout_s)
        return find(group, device, patience, even_alone)

    monkeypatch.setattr(api, "find_ranks", noted)
    options = {"max_steps": 1, "eval_strategy": "no", "save_strategy": "steps", "save_steps": 1}
    trainer(tmp_path, ddp_timeout=77, **options).train()
    trainer(tmp_path, ddp_timeout=88, **options).train(resume_from_checkpoint=True)
    trainer(tmp_path, given={"train_dataset": None}, ddp_timeout=99).evaluate()
    assert asked == [77, 88, 99]


def test_optimizers(tmp_path: Path) -> None:
    for name in ("adamw_torch", "adamw_torch_fused", "sgd"):
        check_optimizer_name(arguments(tmp_path, optim=name))
    with pytest.raises(ValueError, match=r"optim='adafactor'.*'sgd'.*optimizers="):
        hightide.Trainer(full(), arguments(tmp_path, optim="adafactor"), **data())
    with pytest.raises(ValueError, match="use_cpu=True"):
        hightide.Trainer(full(), _on_meta(arguments(tmp_path)), device="cpu", **data())


def _on_meta(settings: transformers.TrainingArguments) -> Any:
    """A device that no machine lacks."""

    class Elsewhere(type(settings)):  # type: ignore[misc]
        device = property(lambda self: torch.device("meta"))

    settings.__class__ = Elsewhere
    return settings


def test_what_the_plan_decides_and_what_would_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    settings = arguments(tmp_path, gradient_checkpointing=True)
    settings.max_grad_norm = None
    settings.dataloader_pin_memory = True  # as where there is a GPU
    with pytest.warns(UserWarning, match="gradient_checkpointing=True is left off") as told:
        settle_arguments(settings)
        settle_arguments(settings)
    assert len(told) == 1
    assert not settings.gradient_checkpointing and not settings.logging_nan_inf_filter
    assert settings.accelerator_config.non_blocking and settings.max_grad_norm == 0.0
