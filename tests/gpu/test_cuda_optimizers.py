"""Adam and SGD on a real GPU, and what absent parameters answer there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hightide
import models
from gpu.streamed import LIMITS, everything_moves

pytestmark = pytest.mark.gpu

OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1}),
    "nesterov": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
}


@pytest.mark.parametrize("edit", [lambda plan: plan, everything_moves], ids=["resident", "everything moves"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equal_to_plain_pytorch(name: str, edit: Any) -> None:
    """The C kernels on the host, torch's fused kernels on the GPU."""
    kind, options = OPTIMIZERS[name]
    model, batch = models.llama(num_layers=2)
    plain = copy.deepcopy(model).cuda()
    on_gpu = {key: value.cuda() for key, value in batch.items()}
    optimizer, expected = kind(model.parameters(), **options), kind(plain.parameters(), **options)
    plan = hightide.plan(model, optimizer, batch, limits=LIMITS, micro_batch=2, device="cuda")
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=edit(plan), device="cuda")
    for _ in range(10):
        for one, its, data in ((model, optimizer, batch), (plain, expected, on_gpu)):
            one(**data).loss.backward()
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            its.step()
            its.zero_grad()
    weights = model.state_dict()
    for key, weight in plain.state_dict().items():
        bound = 1e-5 * weight.abs().max().item() + 1e-6
        assert (weights[key].cuda() - weight).abs().max().item() <= bound, key
    states = optimizer.state_dict()["state"]
    for index, entry in expected.state_dict()["state"].items():
        for field, value in entry.items():
            assert (states[index][field].cuda() - value.cuda()).abs().max() <= 1e-5 * value.abs().max() + 1e-6
    hightide.unwrap(model)


def test_absent_parameters_say_where_they_belong_and_refuse_to_compute() -> None:
    model, batch = models.llama(num_layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = hightide.plan(model, optimizer, batch, limits=LIMITS, micro_batch=2, device="cuda")
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=everything_moves(plan), device="cuda")
    assert all(param.is_cuda for param in model.parameters())
    model.to("cuda")
    loss = model(**batch).loss
    with pytest.raises(RuntimeError, match="weight_decay"):
        (loss + sum(param.square().sum() for param in model.parameters())).backward()
    loss.backward()
    noise = torch.randn(48, 32, device="cuda")
    gradient = model.model.layers[1].mlp.up_proj.weight.grad
    before = gradient.clone()
    gradient.add_(noise)
    torch.testing.assert_close(gradient.clone(), before + noise)
    optimizer.step()
    hightide.unwrap(model)
