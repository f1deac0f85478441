"""Parameters that stay on the GPU: what is read of them is right, what is written has its effect or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hightide
from hightide.ir.refusal import Refused

SIZE = 8
LIMITS = hightide.Limits(gpu="8MiB", host="8MiB")
HALVES = [torch.bfloat16, torch.float16]
NAMES = ["layers.1.weight", "scale"]  # of a block, and loose


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


def wrapped(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    model, x = Model().to(dtype), torch.ones(4, SIZE, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = hightide.wrap(model, optimizer, x, **{"limits": LIMITS} | options)
    return model, optimizer, x


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).float().square().mean().backward()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    backward(model, x)
    optimizer.step()
    optimizer.zero_grad()


def under_no_grad(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.mul_(0.5)


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "p.data.zero_()": lambda p: p.data.zero_(),
    "p.data[0] = 0": lambda p: p.data.__setitem__(0, 0.0),
    "p.mul_()": under_no_grad,
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_beside_a_master_is_refused(dtype: torch.dtype, name: str, write: str) -> None:
    """The next update would undo it, or, with half a master that does not fit it any more, make NaN of it."""
    model, optimizer, x = wrapped(dtype)
    step(model, optimizer, x)
    WRITES[write](model.get_parameter(name))
    with pytest.raises(Refused, match=f"{name}.*master.*load_state_dict"):
        step(model, optimizer, x)
    hightide.unwrap(model)


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_beside_a_master_can_be_read_and_loaded(dtype: torch.dtype) -> None:
    model, optimizer, x = wrapped(dtype)
    step(model, optimizer, x)
    expected = model.state_dict()
    for name, param in model.named_parameters():
        assert torch.equal(param.data, expected[name]) and torch.equal(param * 2, expected[name] * 2)
    model.load_state_dict({name: value / 2 for name, value in expected.items()})
    assert all(torch.equal(param.data, expected[name] / 2) for name, param in model.named_parameters())
    step(model, optimizer, x)
    hightide.unwrap(model)
    assert all(type(param) is nn.Parameter for param in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_write_to_what_has_no_master_has_its_effect(name: str) -> None:
    model, optimizer, x = wrapped()
    for write in WRITES.values():
        write(model.get_parameter(name))
        step(model, optimizer, x)
    hightide.unwrap(model)


BETWEEN: dict[str, Callable[[nn.Module, nn.Parameter], object]] = {
    "a norm": lambda model, p: p.norm(),
    "p.data": lambda model, p: p.data,
    "a write": lambda model, p: under_no_grad(p),
    "all weights": lambda model, p: model.state_dict(),
    "others": lambda model, p: model.load_state_dict(
        {key: torch.zeros(p.shape) for key, p in Model().named_parameters()}
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use", BETWEEN)
def test_weights_are_nobodys_between_an_update_in_backward_and_step(dtype: torch.dtype, name: str, use: str) -> None:
    """In plain PyTorch they are those of before the update."""
    model, optimizer, x = wrapped(dtype, update="in_backward")
    step(model, optimizer, x)
    backward(model, x)
    with pytest.raises(Refused, match=r"between backward and optimizer.step\(\).*deferred"):
        BETWEEN[use](model, model.get_parameter(name))
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(model.get_parameter(name).data, model.state_dict()[name])
    step(model, optimizer, x)
    hightide.unwrap(model)


def test_a_larger_batch_before_step_changes_nothing() -> None:
    """It is refused like any forward there, and not planned for: weights stay nobody's, wherever they would be then."""
    model, optimizer, x = wrapped(update="in_backward", limits=hightide.Limits(gpu="100KiB", host="8MiB"))
    step(model, optimizer, x)
    backward(model, x)
    plan = hightide.stats(model).plan
    with pytest.raises(Refused, match=r"between backward and optimizer.step\(\)"):
        model(torch.ones(300, SIZE))
    with pytest.raises(Refused, match=r"between backward and optimizer.step\(\)"):
        model.get_parameter("scale").norm()
    assert hightide.stats(model).plan is plan
    hightide.unwrap(model)


@pytest.mark.parametrize("name", NAMES)
def test_other_memory_is_noticed_before_values_are_taken(name: str) -> None:
    """Averages that are swapped in for an evaluation, and the weights out again, come after the last forward."""
    model, optimizer, x = wrapped()
    step(model, optimizer, x)
    param = model.get_parameter(name)
    param.data = param.data.clone()
    model.get_submodule("layers.0").state_dict()  # values of others are right, and asking for them looks at no more
    with pytest.raises(Refused, match=f"{name}.*other memory.*load_state_dict"):
        model.state_dict()
    hightide.unwrap(model)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("name", NAMES)
def test_a_write_to_what_is_frozen_has_its_effect(dtype: torch.dtype, name: str) -> None:
    """Nobody keeps a master of it, though one of its neighbours in the chunk has one: a temperature that is lowered
    from step to step, weights into which an adapter is merged."""
    model, x = Model().to(dtype), torch.ones(4, SIZE, dtype=dtype)
    model.get_parameter(name).requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = hightide.wrap(model, torch.optim.AdamW(trained, lr=1e-2, eps=1e-4), x, limits=LIMITS)
    param = model.get_parameter(name)
    for write in WRITES.values():
        step(model, optimizer, x)
        before = model(x).detach()
        write(param)
        assert torch.equal(model.state_dict()[name], param.data)
        assert not torch.equal(model(x).detach(), before)
        param.data.fill_(1.0)
    hightide.unwrap(model)


class Scaled(nn.Module):
    """Its logits are lazy, and are multiplied by what is loose."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(vocab_size=11)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        self.head = nn.Linear(SIZE, 11, bias=False)
        self.scale = nn.Parameter(torch.full((1,), 1.5))

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.nn.functional.cross_entropy(self.scale * self.head(x), labels)


@pytest.mark.filterwarnings("ignore:.*logits:UserWarning")
def test_what_is_beside_a_master_computes_with_tensors_of_other_kinds() -> None:
    losses = []
    for wraps in (False, True):
        model = Scaled().bfloat16()
        batch = {"x": torch.ones(4, SIZE, dtype=torch.bfloat16), "labels": torch.arange(4)}
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if wraps:
            model, optimizer = hightide.wrap(model, optimizer, batch, limits=LIMITS)
        for _ in range(2):
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    torch.testing.assert_close(losses[2:], losses[:2], rtol=2**-7, atol=0.0)


def test_a_copy_of_what_is_beside_a_master_is_an_ordinary_parameter() -> None:
    model, _, _ = wrapped(torch.bfloat16)
    for param in model.parameters():
        copied = copy.deepcopy(param)
        assert type(copied) is nn.Parameter and torch.equal(copied, param.data)
    hightide.unwrap(model)
