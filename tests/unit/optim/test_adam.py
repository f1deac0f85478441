"""The rule on ranges equals torch.optim.AdamW, whatever way a range is cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from hightide.ir.chunk import ALIGN_NUMEL
from hightide.optim import rule as rules
from hightide.optim.adam import AdamWRule
from hightide.optim.operands import Operands
from hightide.optim.registry import rule_for

OPTIONS = [
    {"lr": 1e-3},
    {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.3},
    {"lr": 1e-2, "maximize": True, "weight_decay": 0.0},
    {"lr": torch.tensor(2e-3), "foreach": False},
]


def update(rule, param, grad, moments, *rest) -> None:
    rule.update(Operands(param, grad, tuple(moments)), *rest)


def states(numel: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator), torch.zeros(numel), torch.zeros(numel)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("numel", [1, 7, 128, 1000, 4097])
def test_twenty_steps_equal_torch(options, numel):
    param, first, second = states(numel)
    reference = nn.Parameter(param.clone())
    optimizer = torch.optim.AdamW([reference], **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    rule, generator = rule_for(optimizer), torch.Generator().manual_seed(1)
    for step in range(1, 21):
        grad = torch.randn(numel, generator=generator)
        reference.grad = grad.clone()
        hyper = rule.read(optimizer.param_groups[0])
        optimizer.step()
        scheduler.step()
        update(rule, param, grad, [first, second], step, hyper)
        torch.testing.assert_close(param, reference.detach(), rtol=3e-7, atol=2e-7)
    state = optimizer.state[reference]
    torch.testing.assert_close(first, state["exp_avg"], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(second, state["exp_avg_sq"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("tail", [0, 1, 13, 127])
def test_cuts_at_aligned_elements_do_not_change_a_bit(scale, tail, monkeypatch):
    numel = 40 * ALIGN_NUMEL + tail
    rule = AdamWRule()
    hyper = rule.read(torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-2).param_groups[0])
    whole, parts = states(numel), states(numel)
    cuts = [0, ALIGN_NUMEL, 2 * ALIGN_NUMEL, 5 * ALIGN_NUMEL, 38 * ALIGN_NUMEL, numel]
    for step in range(1, 4):
        grad = states(numel, seed=step)[0]
        update(rule, whole[0], grad, whole[1:], step, hyper, scale)
        monkeypatch.setattr(rules, "TILE_NUMEL", 3 * ALIGN_NUMEL)
        for start, stop in itertools.pairwise(cuts):
            cut = slice(start, stop)
            update(rule, parts[0][cut], grad[cut], [m[cut] for m in parts[1:]], step, hyper, scale)
        monkeypatch.undo()
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)


def test_large_ranges_are_independent_of_the_number_of_threads():
    numel = 300_000  # many threads' worth
    rule = AdamWRule()
    hyper = rule.read(torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).param_groups[0])
    grad, results, threads = states(numel, 5)[0], [], torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            param, *moments = states(numel)
            update(rule, param, grad, moments, 1, hyper)
            results.append(param)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], result) for result in results)


def test_scale_multiplies_the_gradient_and_leaves_it_alone(monkeypatch):
    monkeypatch.setattr(rules, "TILE_NUMEL", 2 * ALIGN_NUMEL)  # several tiles and a tail
    numel, scale = 5 * ALIGN_NUMEL + 9, 0.37
    rule = AdamWRule()
    hyper = rule.read(torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-2, eps=1e-3).param_groups[0])
    grad = states(numel, 3)[0]
    kept = grad.clone()
    scaled, expected = states(numel), states(numel)
    update(rule, scaled[0], grad, scaled[1:], 1, hyper, scale)
    update(rule, expected[0], grad * scale, expected[1:], 1, hyper)
    assert torch.equal(grad, kept)
    for one, other in zip(scaled, expected, strict=True):
        assert torch.equal(one, other)
    grad[0] = torch.inf
    zeroed, expected = states(numel), states(numel)
    update(rule, zeroed[0], grad, zeroed[1:], 1, hyper, 0.0)
    update(rule, expected[0], torch.zeros(numel), expected[1:], 1, hyper)
    assert torch.equal(zeroed[0], expected[0])


def test_scale_one_is_the_gradient_itself():
    numel = 300
    rule = AdamWRule()
    hyper = rule.read(torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-2, eps=1e-3).param_groups[0])
    grad = states(numel, 3)[0]
    scaled = states(numel)
    update(rule, scaled[0], grad, scaled[1:], 1, hyper, 0.37)
    unscaled = states(numel)
    update(rule, unscaled[0], grad, unscaled[1:], 1, hyper)
    assert not torch.equal(unscaled[0], scaled[0])


def test_hyper_parameters_are_copied_by_value():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.5), foreach=False)
    hyper = rule_for(optimizer).read(optimizer.param_groups[0])
    optimizer.param_groups[0]["lr"].fill_(0.1)
    optimizer.param_groups[0]["betas"] = (0.1, 0.2)
    assert type(hyper.lr) is float and hyper.lr == 0.5
    assert (hyper.beta1, hyper.beta2) == (0.9, 0.999)


@pytest.mark.parametrize("option", ["amsgrad", "differentiable", "capturable"])
def test_unsupported_options_are_refused_by_name(option):
    param = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([{"params": [param]}])
    optimizer.param_groups[0][option] = True
    with pytest.raises(ValueError, match=rf"AdamW\({option}=True\).*{option}=False"):
        rule_for(optimizer)
