"""What does not fit is made smaller, or refused with numbers."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import hightide
import models
from hightide.profiler.model.call_tree import Arguments
from hightide.verification.smaller import MemoryBudget, fitted, need_of

CPU = torch.device("cpu")


def llama(num_layers: int = 8, length: int = 64, num_samples: int = 8) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    options = models._llama_options(False, num_layers, 0.0)
    tokens = torch.randint(3, 96, (num_samples, length))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)).train()
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3)


class Words(nn.Module):
    def __init__(self, any_length: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.positions = nn.Parameter(torch.randn(64, 8))
        self.any_length = any_length

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids) + (self.positions[: ids.shape[1]] if self.any_length else self.positions)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


def test_the_batch_shrinks_first() -> None:
    model, ids = Words(any_length=True), torch.randint(0, 16, (8, 64))
    verdict = hightide.verify(model, torch.optim.SGD(model.parameters(), lr=0.1), ids, memory="45KiB")
    assert verdict.equal, verdict
    assert verdict.changed == ("samples: 3 of 8", "tokens per sample: 16 of 64")


def test_then_the_layers() -> None:
    model, batch = llama(num_layers=4, length=16, num_samples=3)
    optimizer = optimizer_of(model)
    task = fitted(model, optimizer, Arguments((), batch), None, 2, MemoryBudget(0, 1400 * 2**10), CPU)
    assert task.changed == ("num_hidden_layers: 2 of 4",)
    assert isinstance(task.model, transformers.LlamaForCausalLM) and task.model is not model
    assert model.config.num_hidden_layers == 4 and len(model.model.layers) == 4
    left = dict(task.model.named_parameters())
    assert all(torch.equal(param, model.get_parameter(name)) for name, param in left.items())
    groups = [{id(param) for param in group["params"]} for group in task.optimizer.param_groups]
    assert [len(group) for group in groups] == [
        sum(param.ndim > 1 for param in left.values()),
        sum(param.ndim < 2 for param in left.values()),
    ]


def test_a_model_whose_layers_have_kinds_keeps_one_kind_for_each() -> None:
    model, batch = models.gemma2(num_layers=4, num_samples=3)
    task = fitted(model, optimizer_of(model), Arguments((), batch), None, 2, MemoryBudget(0, 1300 * 2**10), CPU)
    assert "num_hidden_layers: 2 of 4" in task.changed
    assert len(task.model.config.layer_types) == 2


def test_layers_of_a_model_without_values_too() -> None:
    with torch.device("meta"):
        model, _ = llama(num_layers=4)
    _, batch = llama(num_layers=1, length=16, num_samples=3)
    verdict = hightide.verify(model, optimizer_of(model), batch, memory="1400KiB")
    assert verdict.equal, verdict
    assert any("num_hidden_layers" in text for text in verdict.changed)


def test_a_length_that_the_model_does_not_take_is_kept() -> None:
    model, ids = Words(any_length=False), torch.randint(0, 16, (8, 64))
    with pytest.raises(ValueError, match=r"samples: 3 of 8: still .*60.0 KiB may be taken"):
        hightide.verify(model, torch.optim.SGD(model.parameters()), ids, memory="60KiB")


def test_what_cannot_be_made_smaller_is_refused_with_numbers() -> None:
    model, batch = models.hand_written(num_samples=3)
    with pytest.raises(ValueError) as caught:
        hightide.verify(model, optimizer_of(model), batch, memory="64KiB")
    text = str(caught.value)
    numel = sum(param.numel() for param in model.parameters())
    assert "cannot be verified here" in text and "64.0 KiB may be taken" in text
    assert f"{16 * numel / 1024:.0f} KiB for parameters, gradients and states" in text
    assert "Verify a smaller model of the same classes" in text


def test_what_is_needed_is_about_what_plain_pytorch_takes() -> None:
    """Gradients and two moments for what is trained; activations grow with the batch."""
    model, ids = Words(any_length=True), torch.randint(0, 16, (8, 64))
    model.layers[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(param for param in model.parameters() if param.requires_grad)
    whole, half = (
        need_of(fitted(model, optimizer, Arguments((batch,), {}), None, 2, MemoryBudget(0, 2**40), CPU), 2)
        for batch in (ids, ids[:4])
    )
    frozen = sum(param.numel() for param in model.layers[0].parameters())
    trained = sum(param.numel() for param in model.parameters()) - frozen
    assert whole.weights_bytes == half.weights_bytes == 16 * trained + 4 * frozen
    assert 1.8 <= whole.activations_bytes / half.activations_bytes <= 2.2
