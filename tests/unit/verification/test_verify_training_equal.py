"""What is equal is found equal, in every kind of run that verify makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import hightide
import models
from hightide.verification.verdict import ComparedRow

SMALL: dict[str, Any] = {"num_layers": 2, "num_samples": 6}


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3, **options)


def whats(verdict: hightide.Verdict) -> set[str]:
    return {row.what for row in verdict.rows}


def find(verdict: hightide.Verdict, what: str, where: str) -> list[ComparedRow]:
    return [row for row in verdict.rows if row.what == what and row.where == where]


@pytest.mark.parametrize("name", ["plain", "hand_written", "vit", "gpt2"])
def test_models_of_the_zoo_are_equal(name: str) -> None:
    model, batch = models.ZOO[name](**SMALL)
    verdict = hightide.verify(model, adamw(model), batch)
    assert verdict.equal, verdict
    assert {"output", "loss", "gradient", "gradient norm", "update", "exp_avg", "exp_avg_sq", "step"} <= whats(verdict)
    assert verdict.runs == (
        "2 steps, 3 micro-batches, everything streamed",
        "2 steps, 1 micro-batch, as wrap plans it",
    )
    assert all(len(line) <= 80 for line in str(verdict).splitlines())


def test_every_parameter_is_compared_in_every_step_and_run() -> None:
    model, batch = models.hand_written(**SMALL)
    verdict = hightide.verify(model, adamw(model), batch, steps=3)
    for name, _ in model.named_parameters():
        assert [row.step for row in find(verdict, "gradient", name)] == 2 * [1, 2, 3]
        assert [row.step for row in find(verdict, "update", name)] == 2 * [3]
        assert all(row.size > 0 for row in find(verdict, "update", name))


def test_dropout_is_compared_in_one_micro_batch_and_without_it_in_several() -> None:
    model, batch = models.llama(dropout=0.3, **SMALL)
    verdict = hightide.verify(model, adamw(model), batch)
    assert verdict.equal, verdict
    assert verdict.runs == (
        "2 steps, 3 micro-batches, everything streamed, without dropout",
        "2 steps, 1 micro-batch, as wrap plans it, without dropout",
        "2 steps, 1 micro-batch, everything streamed, random as it is",
    )
    assert any("dropout switched off" in text for text in verdict.changed)
    assert model.config.attention_dropout == 0.3


class Noisy(nn.Module):
    """Draws random numbers that no dropout rate turns off, in a block or outside of blocks."""

    def __init__(self, in_block: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NoisyLayer() if in_block else nn.Linear(8, 8) for _ in range(2))
        self.in_block = in_block

    def forward(self, x: Tensor) -> Tensor:
        if not self.in_block:
            x = x + torch.randn_like(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class NoisyLayer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn_like(x)


def test_randomness_that_cannot_be_switched_off_is_compared_in_one_micro_batch_only() -> None:
    model = Noisy(in_block=True)
    verdict = hightide.verify(model, adamw(model), torch.randn(6, 8))
    assert verdict.equal, verdict
    assert [run.split(", ")[1] for run in verdict.runs] == ["1 micro-batch", "1 micro-batch"]
    assert any("cannot be switched off" in text for text in verdict.changed)


def test_randomness_between_blocks_is_compared_in_several() -> None:
    model = Noisy(in_block=False)
    verdict = hightide.verify(model, adamw(model), torch.randn(6, 8))
    assert verdict.equal, verdict
    assert "3 micro-batches" in verdict.runs[0] and not any("dropout" in text for text in verdict.changed)


def test_adapters_beside_frozen_weights_are_equal() -> None:
    base, batch = models.llama(**SMALL)
    config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config).train()
    verdict = hightide.verify(model, adamw(model), batch)
    assert verdict.equal, verdict
    frozen = [row for row in verdict.rows if row.what == "update" and "base_layer" in row.where]
    assert frozen and all(row.size == row.allowed == 0 for row in frozen), "frozen weights must not change by a bit"


def test_16_bit_models_are_compared_in_fp32() -> None:
    model, batch = models.llama(**SMALL)
    model.to(torch.bfloat16)
    verdict = hightide.verify(model, adamw(model), batch, gradients="param")
    assert verdict.equal, verdict
    assert any("as fp32" in text for text in verdict.changed)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert max(row.difference / row.size for row in verdict.rows if row.what == "loss") < 1e-6


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.1),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "groups": lambda model: torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1]},
            {"params": [p for p in model.parameters() if p.ndim < 2]},
        ],
        lr=1e-3,
    ),
    "warming up": lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
    "tiny steps": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-7),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizers_are_equal(name: str) -> None:
    model, batch = models.hand_written(**SMALL)
    verdict = hightide.verify(model, OPTIMIZERS[name](model), batch)
    assert verdict.equal, verdict
    assert all(row.size > 0 for row in verdict.rows if row.what == "update")
    assert ("momentum_buffer" in whats(verdict)) == (name == "momentum")
    assert any("eps of Adam" in text for text in verdict.changed) == (name in ("adam", "groups", "tiny steps"))
    assert any("learning rate" in text for text in verdict.changed) == (name in ("warming up", "tiny steps"))
    updates = [row for row in verdict.rows if row.what == "update"]
    assert all(row.allowed <= 0.02 * row.size for row in updates), "updates are large enough to be compared"


def test_updates_in_backward_are_equal_and_show_no_gradients() -> None:
    model, batch = models.hand_written(**SMALL)
    verdict = hightide.verify(model, adamw(model), batch, update="in_backward")
    assert verdict.equal, verdict
    assert "gradient" not in whats(verdict) and {"update", "exp_avg"} <= whats(verdict)


def test_optimizer_states_of_earlier_steps_go_with_the_copies() -> None:
    model, batch = models.hand_written(**SMALL)
    optimizer = adamw(model)
    models.loss_of(model, batch).backward()
    optimizer.step()
    verdict = hightide.verify(model, optimizer, batch)
    assert verdict.equal, verdict
    assert {row.plain for row in verdict.rows if row.what == "step"} == {3.0}


def test_a_loss_of_the_user_and_limits_of_the_user() -> None:
    model, batch = models.sequential(num_samples=6)
    limits = hightide.Limits(gpu="1MiB", host="8MiB")
    verdict = hightide.verify(model, adamw(model), batch, loss=lambda result: result.square().mean(), limits=limits)
    assert verdict.equal, verdict
    assert "within your limits" in verdict.runs[1]
    assert "result" in whats(verdict)


@pytest.mark.parametrize("kind", ["number", "tuple", "mapping"])
def test_the_loss_is_found_in_what_models_return(kind: str) -> None:
    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            result = super().forward(x)
            loss = result.square().mean()
            return {"number": loss, "tuple": (result, loss), "mapping": {"loss": loss}}[kind]

    model = Model(nn.Linear(4, 4), nn.Linear(4, 4))
    assert hightide.verify(model, adamw(model), torch.randn(3, 4)).equal


class Counting(nn.Module):
    """Counts in its own code, where hightide runs it once: an average that is a buffer, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("average", torch.zeros(8))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(x.mean(0), 0.1)
            self.num_calls += 1
        for layer in self.layers:
            x = layer(x)
        return (x - self.average).square().mean()


def test_buffers_and_counters_are_compared() -> None:
    model = Counting()
    verdict = hightide.verify(model, adamw(model), torch.randn(6, 8))
    assert verdict.equal, verdict
    assert [row.plain for row in find(verdict, "attribute", "num_calls")] == [2, 2]
    assert all(row.size > 0 for row in find(verdict, "buffer", "average"))
    assert model.num_calls == 0 and not model.average.any()


def test_a_model_without_values_gets_some(tmp_path: Path) -> None:
    with torch.device("meta"):
        model, batch = models.llama(**SMALL)
    batch = models.token_batch()
    verdict = hightide.verify(model, adamw(model), batch)
    assert verdict.equal, verdict
    assert any("without values" in text for text in verdict.changed)
    assert all(param.is_meta for param in model.parameters())


def test_a_model_whose_values_are_in_files_gets_others(tmp_path: Path) -> None:
    saved, batch = models.llama(**SMALL)
    saved.save_pretrained(tmp_path)
    model = hightide.from_pretrained(tmp_path).train()
    optimizer = adamw(model)
    verdict = hightide.verify(model, optimizer, batch)
    assert verdict.equal, verdict
    hightide.wrap(model, optimizer, batch)
    assert torch.equal(model.state_dict()["lm_head.weight"], saved.lm_head.weight), "it still knows its files"


def test_one_sample_is_one_micro_batch() -> None:
    model, batch = models.hand_written(num_layers=2, num_samples=1, dropout=0.5)
    verdict = hightide.verify(model, adamw(model), batch)
    assert verdict.equal, verdict
    assert all("1 micro-batch" in run for run in verdict.runs)
