"""A placeholder behaves as the gradient it stands for: norms, clipping, scaling, zeroing and reads reach the owner."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from hightide.runtime.gradients.gradient_placeholder import GradientPlaceholder


class Owner:
    """Keeps gradients away from parameters, as chunks do, and counts reads."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.num_reads = 0

    def norm(self, key: str, norm_type: float) -> Tensor:
        return torch.linalg.vector_norm(self.gradients[key].float(), norm_type)

    def is_finite(self, key: str) -> Tensor:
        return self.gradients[key].isfinite().all()

    def scale(self, key: str, factor: float | Tensor) -> None:
        self.gradients[key].mul_(factor)

    def zero(self, key: str) -> None:
        self.gradients[key].zero_()

    def read(self, key: str) -> Tensor:
        self.num_reads += 1
        return self.gradients[key].clone()


@pytest.fixture
def plain() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    (model(torch.randn(11, 5)).square().sum() * 3).backward()
    return model


@pytest.fixture
def absent(plain: nn.Module) -> tuple[nn.Module, Owner]:
    """The same model whose gradients are away, and whose parameters are too."""
    model, owner = copy.deepcopy(plain), Owner()
    for (name, param), original in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert original.grad is not None
        owner.gradients[name] = original.grad.clone()
        param.data = torch.full((), math.nan).expand(param.shape)
        param.grad = GradientPlaceholder(param, owner, name)
    return model, owner


def assert_same_gradients(plain: nn.Module, owner: Owner) -> None:
    for name, param in plain.named_parameters():
        torch.testing.assert_close(owner.gradients[name], param.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("foreach", [None, False])
def test_clip_grad_norm_is_exact_and_reads_nothing(plain, absent, norm_type, foreach):
    model, owner = absent
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type, foreach=foreach)
    found = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type, foreach=foreach)
    assert expected > 0.5
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert_same_gradients(plain, owner)
    assert owner.num_reads == 0


def test_clip_grad_norm_over_placeholders_and_ordinary_gradients(plain, absent):
    model, owner = absent
    extra = nn.Parameter(torch.ones(4))
    extra.grad = torch.full((4,), 7.0)
    other = copy.deepcopy(extra)
    other.grad = extra.grad.clone()
    expected = nn.utils.clip_grad_norm_([*plain.parameters(), other], 1.0)
    found = nn.utils.clip_grad_norm_([*model.parameters(), extra], 1.0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(extra.grad, other.grad)
    assert_same_gradients(plain, owner)


def test_foreach_operations_reach_the_owner(plain, absent):
    model, owner = absent
    gradients, expected = [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]
    ordinary = torch.full((3,), 2.0)
    found = torch._foreach_norm([*gradients, ordinary], 2.0)
    torch.testing.assert_close(found, torch._foreach_norm([*expected, ordinary], 2.0))
    torch._foreach_mul_([*gradients, ordinary], 0.25)
    torch._foreach_mul_(gradients, torch.tensor(3.0))
    torch._foreach_div_(gradients, 2.0)
    for gradient in expected:
        gradient.mul_(0.375)
    assert ordinary.tolist() == [0.5] * 3
    assert_same_gradients(plain, owner)
    torch._foreach_zero_([*gradients, ordinary])
    assert ordinary.tolist() == [0.0] * 3 and all(not g.any() for g in owner.gradients.values())


def test_scaling_in_place(plain, absent):
    model, owner = absent
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        kept = param.grad
        param.grad.mul_(2.0)
        param.grad *= torch.tensor(0.3)
        param.grad /= 3
        param.grad.data.mul_(5)
        assert param.grad is kept
        other.grad *= 2.0 * 0.3 / 3 * 5
    assert_same_gradients(plain, owner)


@pytest.mark.parametrize("through", ["module", "optimizer", "foreach optimizer"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(absent, through, set_to_none):
    model, owner = absent
    before = {name: gradient.clone() for name, gradient in owner.gradients.items()}
    foreach = True if through == "foreach optimizer" else None
    target = model if through == "module" else torch.optim.AdamW(model.parameters(), foreach=foreach)
    target.zero_grad(set_to_none=set_to_none)
    for name, param in model.named_parameters():
        assert (param.grad is None) == set_to_none
        assert torch.equal(owner.gradients[name], before[name]) == set_to_none
        assert set_to_none or not owner.gradients[name].any()


def test_grad_scaler_unscales_and_sees_infinities(plain, absent):
    model, owner = absent
    owner.gradients["0.weight"][0, 0] = math.inf
    for found_inf_expected in (1.0, 0.0):
        found_inf = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_(
            [p.grad for p in model.parameters()], found_inf, torch.tensor([0.5])
        )
        assert found_inf.item() == found_inf_expected
        owner.gradients["0.weight"][0, 0] = 1.0
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    owner.gradients = {name: param.grad * 8 for name, param in plain.named_parameters()}
    scaler.unscale_(torch.optim.AdamW(model.parameters()))
    assert_same_gradients(plain, owner)


def test_reads_give_the_real_values(plain, absent):
    model, _ = absent
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        grad, real = param.grad, other.grad
        assert grad.shape == real.shape and grad.dtype == real.dtype and grad.is_contiguous()
        assert type(grad.clone()) is Tensor and torch.equal(grad.clone(), real)
        torch.testing.assert_close(grad.norm(), real.norm())
        torch.testing.assert_close(grad.norm(dim=-1), real.norm(dim=-1))
        torch.testing.assert_close(torch.linalg.vector_norm(grad, 2, dtype=torch.float64).float(), real.norm())
        assert torch.equal(grad.abs().max(), real.abs().max())
        assert torch.isfinite(grad).all()
        assert torch.equal(grad + real, real + real)
        assert torch.equal(real - grad, real - real)
        assert torch.equal(torch.empty_like(real).copy_(grad), real)
        assert (grad.numpy() == real.numpy()).all() and grad.tolist() == real.tolist()
        assert torch.equal(torch.as_tensor(grad.double()), real.double())


def test_views_read_right_and_refuse_to_lose_writes(plain, absent):
    model, owner = absent
    grads, reals = [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]
    assert torch.equal(torch.cat([g.view(-1) for g in grads]), torch.cat([r.view(-1) for r in reals]))
    assert torch.equal(torch.cat([g.flatten() for g in grads]), torch.cat([r.flatten() for r in reals]))
    assert torch.equal(grads[0].t()[1:3].clone(), reals[0].t()[1:3])
    assert grads[0].t().stride() == reals[0].t().stride()
    for part, real in zip(grads[0].split(3), reals[0].split(3), strict=True):
        assert torch.equal(part.clone(), real)
    torch.testing.assert_close(grads[0][0].norm(), reals[0][0].norm())
    for write in (lambda: grads[0][0].mul_(2), lambda: grads[0].view(-1).zero_(), lambda: grads[0].t().fill_(1)):
        with pytest.raises(RuntimeError, match="keeps gradients in chunks"):
            write()
    with pytest.raises(RuntimeError, match="keeps gradients in chunks"):
        grads[0][0] = 1.0
    assert_same_gradients(plain, owner)


def test_other_writes_raise_and_name_what_to_call(plain, absent):
    model, owner = absent
    param = model[0].weight
    writes = [
        lambda: param.grad.add_(1.0),
        lambda: param.grad.copy_(torch.zeros(7, 5)),
        lambda: param.grad.mul_(torch.ones(7, 5)),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 0.1),
        lambda: torch.add(torch.ones(7, 5), 1.0, out=param.grad),
        lambda: torch._foreach_add_([param.grad], 1.0),
    ]
    for write in writes:
        with pytest.raises(RuntimeError, match=r"0\.weight.*p\.grad\.mul_\(number\).*p\.grad\.clone\(\)"):
            write()
    assert_same_gradients(plain, owner)


def test_printing_names_the_parameter_and_reads_nothing(absent):
    model, owner = absent
    text = f"{model[0].weight.grad} {model[0].weight.grad!r}"
    assert "'0.weight'" in text and "(7, 5)" in text
    assert owner.num_reads == 0


def test_copies_are_ordinary_gradients(plain, absent):
    model, _ = absent
    grad, real = model[0].weight.grad, plain[0].weight.grad
    for other in (copy.deepcopy(grad), pickle.loads(pickle.dumps(grad))):
        assert type(other) is Tensor and torch.equal(other, real)


def test_a_bf16_parameter_has_a_bf16_placeholder():
    owner = Owner()
    owner.gradients["w"] = torch.linspace(0, 1, 6).view(2, 3)
    param = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    param.grad = GradientPlaceholder(param, owner, "w")
    assert param.grad.dtype == torch.bfloat16
    assert torch.equal(param.grad.clone(), owner.gradients["w"].bfloat16())
    nn.utils.clip_grad_norm_([param], 0.5)
    torch.testing.assert_close(owner.gradients["w"].norm(), torch.tensor(0.5), rtol=1e-5, atol=0)
