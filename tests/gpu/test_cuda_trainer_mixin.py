"""hightide.Trainer on a real GPU: equal to transformers' own, no model on the GPU before it is planned, no waiting."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hightide
from trainers import (
    LENGTHS,
    assert_same_logs,
    assert_same_scalars,
    data,
    fresh_accelerate,
    full,
    logs,
    lora,
    shown_scalars,
)

pytestmark = pytest.mark.gpu

LIMITS = hightide.Limits(gpu="1GiB", host="2GiB")


@pytest.fixture(autouse=True)
def _fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with fresh_accelerate():
        yield


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    chosen = {"per_device_train_batch_size": 2, "max_steps": 6, "logging_steps": 1, "save_strategy": "no"}
    chosen |= {"eval_strategy": "steps", "eval_steps": 3, "learning_rate": 1e-3, "adam_epsilon": 1e-4}
    chosen |= {"report_to": [], "disable_tqdm": True}
    return transformers.TrainingArguments(str(folder), **{**chosen, **options})


@pytest.mark.parametrize(
    ("build", "given", "options"),
    [
        (full, {}, {"gradient_accumulation_steps": 4}),
        (full, {"update": "in_backward"}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0}),
        (lora, {}, {"label_names": ["labels"]}),
    ],
    ids=["accumulated", "in backward", "LoRA"],
)
def test_equal_to_the_plain_trainer(build: Any, given: Any, options: dict[str, Any], tmp_path: Path) -> None:
    plain = transformers.Trainer(build(), arguments(tmp_path / "plain", **options), **data(LENGTHS))
    plain.train()
    of = hightide.Trainer(build(), arguments(tmp_path / "wrapped", **options), limits=LIMITS, **given, **data(LENGTHS))
    of.train()
    assert_same_logs(logs(of), logs(plain), error=1e-4)
    hightide.unwrap(of.model)


def test_tensorboard_shows_what_it_shows_of_the_plain_trainer(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    options = {"report_to": "tensorboard", "gradient_accumulation_steps": 2}
    transformers.Trainer(full(), arguments(tmp_path / "plain", **options), **data(LENGTHS)).train()
    of = hightide.Trainer(full(), arguments(tmp_path / "wrapped", **options), limits=LIMITS, **data(LENGTHS))
    of.train()
    assert_same_scalars(shown_scalars(tmp_path / "wrapped"), shown_scalars(tmp_path / "plain"), error=1e-4)
    hightide.unwrap(of.model)


def billion() -> Any:
    """Of 1B parameters, in bf16, without values worth anything."""
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=14,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


class Tokens(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        ids = torch.randint(32000, (512,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class NoLastSave(transformers.TrainerCallback):
    """Of 14 GB, which nobody would read: two of these tests may run at once, and a disk has room for so many."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == state.max_steps:
            control.should_save = False


class SameBits(transformers.TrainerCallback):
    """From the checkpoint on: attention of 512 tokens adds its gradients up in any order else."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.use_deterministic_algorithms(state.global_step >= args.save_steps)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.use_deterministic_algorithms(False)  # its kernels take more: not those of a plan


class NoWaits(transformers.TrainerCallback):
    """From the first steady step on, between logs."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if state.global_step in (4, 5) else "default")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_a_billion_parameters_in_a_few_gigabytes(update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their states take 14 GB. The model is never on the GPU as a whole, steady steps do not wait for the GPU, and a
    run that goes on has the weights of one that never stopped, and the plan of its checkpoint."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    options = {"max_steps": 8, "eval_strategy": "no", "logging_steps": 8, "save_strategy": "steps", "save_steps": 6}
    options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    options["max_grad_norm"] = 0.0 if update == "in_backward" else 1.0
    found = []
    try:
        for resumes in (False, True):
            torch.cuda.reset_peak_memory_stats()
            of = hightide.Trainer(
                billion(),
                arguments(tmp_path, **options),
                train_dataset=Tokens(),
                limits="5GiB",
                update=update,
                callbacks=[NoLastSave(), SameBits(), *([NoWaits()] if not resumes else [])],
            )
            of.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6") if resumes else None)
            assert torch.cuda.max_memory_reserved() <= 5.2 * 2**30
            found.append({name: value.cpu() for name, value in of.model.state_dict().items()})
            if resumes:
                assert hightide.stats(of.model).plan == hightide.Plan.load(tmp_path / "checkpoint-6" / "plan.json")
            del of
    finally:
        torch.use_deterministic_algorithms(False)
        torch.cuda.set_sync_debug_mode("default")
        shutil.rmtree(tmp_path)  # 14 GB of a checkpoint
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
