"""What loops do to an optimizer beside stepping it, where states lie on a real GPU or in pinned memory."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch

import hightide
import models
from gpu.streamed import LIMITS, everything_moves

pytestmark = pytest.mark.gpu


def change(optimizer: Any, params: dict[str, Any], number: int) -> None:
    """One a step."""
    one, *rest = (param for name, param in params.items() if "layers.1" in name)
    if number == 1:
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.3)
            state["exp_avg_sq"] *= 0.9
    if number == 2:
        del optimizer.state[one]
        for param in rest[:2]:
            optimizer.state[param]["step"].zero_()
    if number == 3:
        group = optimizer.param_groups[0]
        taken = {id(param) for param in rest}
        group["params"] = [param for param in group["params"] if id(param) not in taken]
        optimizer.add_param_group({**group, "params": rest, "lr": 3e-4})
    if number == 4:
        optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]
    if number == 5:
        optimizer.state = defaultdict(dict)


@pytest.mark.parametrize("edit", [lambda plan: plan, everything_moves], ids=["resident", "everything moves"])
def test_equal_to_plain_pytorch(edit: Any) -> None:
    model, batch = models.llama(num_layers=2)
    plain = copy.deepcopy(model).cuda()
    on_gpu = {key: value.cuda() for key, value in batch.items()}
    optimizer, expected = (torch.optim.AdamW(one.parameters(), lr=1e-3, eps=1e-4) for one in (model, plain))
    plan = hightide.plan(model, optimizer, batch, limits=LIMITS, micro_batch=2, device="cuda")
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=edit(plan), device="cuda")  # type: ignore[assignment]
    held: Any = None
    for number in range(8):
        if number == 5:
            held = [(state["exp_avg"], state["exp_avg"].clone()) for state in optimizer.state.values()]
        for one, its, data in ((model, optimizer, batch), (plain, expected, on_gpu)):
            change(its, dict(one.named_parameters()), number)
            one(**data).loss.backward()
            its.step()
            one.zero_grad()
    assert len(held) == len(list(model.parameters()))
    assert all(torch.equal(moment.cpu(), value.cpu()) for moment, value in held), "what is held keeps its values"
    weights = model.state_dict()
    for key, weight in plain.state_dict().items():
        bound = 1e-5 * weight.abs().max().item() + 1e-6
        assert (weights[key].cuda() - weight).abs().max().item() <= bound, key
    hightide.unwrap(model)
