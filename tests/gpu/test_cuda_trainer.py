"""Transformers' own Trainer with a wrapped pair on a real GPU, where it places model, batches and optimizer itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

import hightide
import models
from gpu.streamed import LIMITS, everything_moves

pytestmark = pytest.mark.gpu

NUM_SAMPLES = 4
TRAIN = [{name: value[0] for name, value in models.token_batch(1 + row, num_samples=1).items()} for row in range(24)]
EVAL = [{name: value[0] for name, value in models.token_batch(99 + row, num_samples=1).items()} for row in range(6)]
BATCH = {name: torch.stack([row[name] for row in TRAIN[:NUM_SAMPLES]]) for name in TRAIN[0]}
EDITS: dict[str, Any] = {"resident": lambda plan: plan, "everything moves": everything_moves}
LOGGED = ("loss", "grad_norm", "eval_loss", "learning_rate")


@pytest.fixture(autouse=True)
def _fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_pair(edit: Any = None, dtype: torch.dtype = torch.float32, micro_batch: int = 2) -> tuple[Any, Any]:
    """Plain without `edit`."""
    model: Any = models.llama(num_layers=2)[0].to(dtype)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    if edit is None:
        return model, optimizer
    plan = hightide.plan(model, optimizer, BATCH, limits=LIMITS, micro_batch=micro_batch, device="cuda")
    return hightide.wrap(model, optimizer, BATCH, plan=edit(plan), device="cuda")


def make_trainer(pair: tuple[Any, Any], folder: Path, **options: Any) -> transformers.Trainer:
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=NUM_SAMPLES,
        per_device_eval_batch_size=NUM_SAMPLES,
        **{"max_steps": 4, "save_steps": 2, "eval_steps": 2, **options},
        logging_steps=1,
        eval_strategy="steps",
        save_strategy="steps",
        report_to=[],
        disable_tqdm=True,
    )
    return transformers.Trainer(pair[0], settings, train_dataset=TRAIN, eval_dataset=EVAL, optimizers=(pair[1], None))


def logs(trainer: transformers.Trainer) -> list[tuple[str, float]]:
    found = [(name, entry[name]) for entry in trainer.state.log_history for name in LOGGED if name in entry]
    assert {name for name, _ in found} == set(LOGGED)
    return found


def assert_same_logs(found: Any, expected: Any, error: float = 1e-5) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, value), (_, other) in zip(found, expected, strict=True):
        assert abs(value - other) <= error * abs(other), (name, value, other)


@pytest.mark.parametrize(
    ("edit", "options"), [("everything moves", {}), ("resident", {"gradient_accumulation_steps": 2})]
)
def test_equal_to_plain_pytorch(edit: str, options: dict[str, Any], tmp_path: Path) -> None:
    plain = make_trainer(make_pair(), tmp_path / "plain", **options)
    plain.train()
    wrapped = make_trainer(make_pair(EDITS[edit]), tmp_path / "wrapped", **options)
    assert wrapped.model.device.type == "cuda"
    wrapped.train()
    assert_same_logs(logs(wrapped), logs(plain))
    assert abs(wrapped.evaluate()["eval_loss"] - plain.evaluate()["eval_loss"]) < 1e-4
    weights = wrapped.model.state_dict()
    for name, weight in plain.model.state_dict().items():
        bound = 1e-5 * weight.abs().max().item() + 1e-6
        assert (weights[name].cuda() - weight).abs().max().item() <= bound, name
    hightide.unwrap(wrapped.model)


def test_autocast(tmp_path: Path) -> None:
    plain = make_trainer(make_pair(), tmp_path / "plain", bf16=True)
    plain.train()
    wrapped = make_trainer(make_pair(everything_moves, micro_batch=NUM_SAMPLES), tmp_path / "wrapped", bf16=True)
    wrapped.train()
    assert_same_logs(logs(wrapped), logs(plain), error=2e-3)
    assert not torch.is_autocast_enabled("cuda")
    hightide.unwrap(wrapped.model)


def test_a_16_bit_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    straight = make_trainer(make_pair(everything_moves, torch.bfloat16), tmp_path / "straight")
    straight.train()
    resumed = make_trainer(make_pair(everything_moves, torch.bfloat16), tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    expected = straight.model.state_dict()
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    for trainer in (straight, resumed):
        hightide.unwrap(trainer.model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_states_are_not_sent_to_the_gpu_when_the_optimizer_is_prepared(dtype: torch.dtype) -> None:
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    model: Any = transformers.LlamaForCausalLM(config).to(dtype).train()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = hightide.plan(model, optimizer, BATCH, limits=LIMITS, device="cuda")
    model, optimizer = hightide.wrap(model, optimizer, BATCH, plan=everything_moves(plan), device="cuda")
    accelerator = Accelerator()
    assert accelerator.device.type == "cuda"
    for has_trained in (False, True):
        if has_trained:
            model(**BATCH).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        states = optimizer.state_dict()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        prepared = accelerator.prepare(optimizer)
        assert torch.cuda.max_memory_allocated() - before < 2**20, "its moments alone take 17 MiB"
        again = prepared.state_dict()
        assert len(again["state"]) == has_trained * len(list(model.parameters()))
        for index, state in states["state"].items():
            assert all(torch.equal(value, again["state"][index][name]) for name, value in state.items())
    hightide.unwrap(model)
