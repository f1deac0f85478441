"""What may be done to a wrapped model, streamed or resident: it equals plain PyTorch, or is refused with a remedy."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, vjp, vmap
from torch.nn.utils import parametrizations, parametrize, prune

import hightide
from hightide.ir.activation import Activation
from hightide.ir.tier import Tier
from hightide.runtime.surgery import run_of

SIZE = 16
LIMITS = hightide.Limits(gpu="8MiB", host="64MiB")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    """`scale` is loose."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(SIZE, 4)
        self.scale = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale
        return self.head(x)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def example() -> Tensor:
    return torch.randn(6, SIZE, generator=torch.Generator().manual_seed(1))


def wrapped(streamed: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model()
    plan = hightide.plan(model, sgd(model), example(), limits=LIMITS, micro_batch=2)
    if streamed:
        moving = {
            "params": Tier.HOST,
            "states": Tier.HOST,
            "activation": Activation.RECOMPUTE,
            "inputs": Tier.HOST,
        }
        slots = 2 * max(plan.layout.num_slots(chunk) for chunk in plan.layout.chunks) + 2
        blocks = tuple(replace(block, **moving) if block.name else block for block in plan.blocks)  # type: ignore[arg-type]
        plan = replace(plan, blocks=blocks, num_slots=slots, num_grad_slots=slots)
    return hightide.wrap(model, sgd(model), example(), plan=plan)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Any:
    losses = []
    for _ in range(2):
        loss = loss_of(model, x)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, values_of(model)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


Action = Callable[[Any, torch.optim.Optimizer, Tensor], Any]
REFUSED: dict[str, tuple[Action, str]] = {}
EQUAL: dict[str, Action] = {}


def refused(words: str) -> Callable[[Action], Action]:
    def keep(action: Action) -> Action:
        REFUSED[action.__name__] = action, words
        return action

    return keep


def equal(action: Action) -> Action:
    EQUAL[action.__name__] = action
    return action


ABSENT = "values are elsewhere"


# -- torch.func and the like ------------------------------------------------------------------------------------------


@refused("torch.func .*unwrap")
def per_sample(model: Any, optimizer: Any, x: Tensor) -> Any:
    return vmap(lambda row: model(row[None])[0])(x)


@refused("torch.func .*unwrap")
def functional_gradient(model: Any, optimizer: Any, x: Tensor) -> Any:
    return grad(lambda x: loss_of(model, x))(x)


@refused("torch.func .*unwrap")
def functional_jvp(model: Any, optimizer: Any, x: Tensor) -> Any:
    return jvp(model, (x,), (x,))


@refused("torch.func .*unwrap")
def functional_vjp(model: Any, optimizer: Any, x: Tensor) -> Any:
    return vjp(model, x)


@refused("torch.func .*unwrap")
def second_derivatives(model: Any, optimizer: Any, x: Tensor) -> Any:
    return hessian(lambda x: loss_of(model, x))(x)


@refused("torch.func .*unwrap")
def several_gradients_at_once(model: Any, optimizer: Any, x: Tensor) -> Any:
    x.requires_grad_()
    out = model(x)
    return torch.autograd.grad(out, x, torch.ones(2, *out.shape), is_grads_batched=True)


@refused("forward-mode .*no_grad")
def forward_mode(model: Any, optimizer: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(x, x))


@equal
def forward_mode_without_training(model: Any, optimizer: Any, x: Tensor) -> Any:
    with torch.no_grad(), forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).tangent.clone()


@refused("exchanged .functional_call.*no_grad")
def other_values_in_training(model: Any, optimizer: Any, x: Tensor) -> Any:
    new = {name: torch.full(param.shape, 0.01).requires_grad_() for name, param in model.named_parameters()}
    functional_call(model, new, (x,)).sum().backward()


@equal
def other_values_in_evaluation(model: Any, optimizer: Any, x: Tensor) -> Any:
    new = {name: torch.full(param.shape, 0.01) for name, param in model.named_parameters()}
    with torch.no_grad():
        return functional_call(model, new, (x,))


@refused("traced or exported.*unwrap")
def traced(model: Any, optimizer: Any, x: Tensor) -> Any:
    with torch.no_grad():
        return torch.jit.trace(model, (x,), check_trace=False)


@refused(f"traced or exported.*unwrap|{ABSENT}")
def exported(model: Any, optimizer: Any, x: Tensor) -> Any:
    return torch.export.export(model, (x,))


@equal
def compiled_as_a_whole(model: Any, optimizer: Any, x: Tensor) -> Any:
    return trained(torch.compile(model, backend="eager"), optimizer, x)[0], values_of(model)


@equal
def in_data_parallel(model: Any, optimizer: Any, x: Tensor) -> Any:
    return trained(nn.DataParallel(model), optimizer, x)[0], values_of(model)


# -- gradients --------------------------------------------------------------------------------------------------------


@refused("gradients of gradients.*unwrap")
def gradient_penalty(model: Any, optimizer: Any, x: Tensor) -> Any:
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
    gradient.square().sum().backward()


@refused("gradients of gradients.*unwrap")
def gradient_penalty_of_a_sum(model: Any, optimizer: Any, x: Tensor) -> Any:
    """What comes into the last block is a constant. The penalty would be lost without a word beside another loss."""
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (loss_of(model, x.detach()) + gradient.square().sum()).backward()


@refused("gradients of gradients.*unwrap")
def graph_of_the_gradients(model: Any, optimizer: Any, x: Tensor) -> Any:
    loss_of(model, x).backward(create_graph=True)


@refused(f"asks for gradients of parameters.*p.grad|{ABSENT}")
def backward_of_parameters(model: Any, optimizer: Any, x: Tensor) -> Any:
    loss_of(model, x).backward(inputs=list(model.layers.parameters()))


@refused(f"asks for gradients of parameters.*p.grad|{ABSENT}")
def backward_of_one_parameter_and_the_input(model: Any, optimizer: Any, x: Tensor) -> Any:
    x.requires_grad_()
    loss_of(model, x).backward(inputs=[x, model.layers[1].linear.weight])


@refused(f"asks for gradients of parameters.*p.grad|{ABSENT}")
def gradients_of_parameters(model: Any, optimizer: Any, x: Tensor) -> Any:
    torch.autograd.grad(loss_of(model, x), list(model.layers.parameters()), allow_unused=True)


@equal
def backward_of_a_loose_parameter(model: Any, optimizer: Any, x: Tensor) -> Any:
    loss_of(model, x).backward(inputs=[model.scale])
    return model.scale.grad.clone(), gradients_of(model.layers)


@equal
def gradient_of_the_input(model: Any, optimizer: Any, x: Tensor) -> Any:
    x.requires_grad_()
    loss_of(model, x).backward(inputs=[x])
    with_graph = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
    return x.grad, [value.detach() for value in with_graph], gradients_of(model)


@refused("a second time")
def two_backwards(model: Any, optimizer: Any, x: Tensor) -> Any:
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    loss.backward()


@equal
def cleared_gradients(model: Any, optimizer: Any, x: Tensor) -> Any:
    loss_of(model, x).backward()
    model.zero_grad()
    first = gradients_of(model)
    loss_of(model, x).backward()
    model.zero_grad(set_to_none=False)
    return first, gradients_of(model)


@refused("chunks, where aten.clamp")
def clipped_by_value(model: Any, optimizer: Any, x: Tensor) -> Any:
    loss_of(model, x).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


@refused(f"gradient hook.*micro-batch|{ABSENT}")
def late_gradient_hook(model: Any, optimizer: Any, x: Tensor) -> Any:
    model.layers[1].linear.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    model(x)


@refused("requires_grad .*unwrap")
def frozen_later(model: Any, optimizer: Any, x: Tensor) -> Any:
    model.layers[1].requires_grad_(False)
    model(x)


# -- parameters and modules -------------------------------------------------------------------------------------------


@refused("cannot be converted.*unwrap")
def in_half(model: Any, optimizer: Any, x: Tensor) -> Any:
    model.half()


@refused("cannot be converted.*unwrap")
def layer_in_double(model: Any, optimizer: Any, x: Tensor) -> Any:
    model.layers[0].to(torch.float64)


@refused("cannot be converted, moved.*unwrap")
def on_another_device(model: Any, optimizer: Any, x: Tensor) -> Any:
    model.to("meta")


@refused("or emptied.*unwrap")
def emptied(model: Any, optimizer: Any, x: Tensor) -> Any:
    model.to_empty(device="cpu")


@equal
def conversions_that_do_nothing(model: Any, optimizer: Any, x: Tensor) -> Any:
    return trained(model.to("cpu").float().to(torch.float32), optimizer, x)


@refused("pickled")
def pickled(model: Any, optimizer: Any, x: Tensor) -> Any:
    pickle.dumps(model)


@refused("pickled")
def saved_as_a_whole(model: Any, optimizer: Any, x: Tensor) -> Any:
    torch.save(model, io.BytesIO())


@refused("deep-copied")
def copied(model: Any, optimizer: Any, x: Tensor) -> Any:
    copy.deepcopy(model)


@refused("share_memory.*before hightide.wrap")
def shared_among_processes(model: Any, optimizer: Any, x: Tensor) -> Any:
    model.layers.share_memory()


@refused("assign=True")
def assigned(model: Any, optimizer: Any, x: Tensor) -> Any:
    model.load_state_dict(model.state_dict(), assign=True)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


@refused(f"parametrization .*before hightide.wrap|{ABSENT}")
def parametrized(model: Any, optimizer: Any, x: Tensor) -> Any:
    parametrize.register_parametrization(model.layers[1].linear, "weight", Symmetric())
    model(x)


@refused(f"parametrization .*before hightide.wrap|{ABSENT}")
def weight_normed(model: Any, optimizer: Any, x: Tensor) -> Any:
    parametrizations.weight_norm(model.layers[1].linear)
    model(x)


@refused(f"parametrization .*before hightide.wrap|{ABSENT}")
def pruned(model: Any, optimizer: Any, x: Tensor) -> Any:
    prune.random_unstructured(model.layers[1].linear, "weight", amount=0.5)
    model(x)


@refused("exchanged .*before hightide.wrap")
def tied_later(model: Any, optimizer: Any, x: Tensor) -> Any:
    model.layers[1].linear.weight = model.layers[0].linear.weight
    model(x)


@refused("exchanged .*before hightide.wrap")
def exchanged_before_backward(model: Any, optimizer: Any, x: Tensor) -> Any:
    loss = loss_of(model, x)
    model.layers[1].linear.weight = nn.Parameter(torch.ones(SIZE, SIZE))
    loss.backward()


@refused(f"given other memory.*load_state_dict|{ABSENT}")
def other_data(model: Any, optimizer: Any, x: Tensor) -> Any:
    model.head.weight.data = torch.ones(4, SIZE)
    model(x)


@refused("given other memory.*load_state_dict")
def other_data_of_a_loose_parameter(model: Any, optimizer: Any, x: Tensor) -> Any:
    model.scale.data = torch.ones(SIZE) * 2
    model(x)


@refused("given other memory.*load_state_dict")
def swapped_tensors(model: Any, optimizer: Any, x: Tensor) -> Any:
    torch.utils.swap_tensors(model.head.weight, nn.Parameter(torch.ones(4, SIZE)))
    model(x)


@refused(f"given other memory.*load_state_dict|{ABSENT}")
def values_from_a_vector(model: Any, optimizer: Any, x: Tensor) -> Any:
    nn.utils.vector_to_parameters(torch.ones(sum(map(torch.numel, model.parameters()))), model.parameters())
    model(x)


@equal
def another_module_inside(model: Any, optimizer: Any, x: Tensor) -> Any:
    torch.manual_seed(5)
    model.layers[1].linear = nn.Linear(SIZE, SIZE)
    losses, values = trained(model, optimizer, x)
    return losses, values, model.layers[1].linear.weight.grad


@equal
def another_block(model: Any, optimizer: Any, x: Tensor) -> Any:
    torch.manual_seed(5)
    model.layers[1] = Layer()
    return trained(model, optimizer, x)


@equal
def one_more_and_one_less(model: Any, optimizer: Any, x: Tensor) -> Any:
    del model.layers[0]
    model.layers.append(model.layers[0])
    return trained(model, optimizer, x)


@equal
def one_more_parameter(model: Any, optimizer: Any, x: Tensor) -> Any:
    layer = model.layers[1]
    layer.factor = nn.Parameter(torch.full((SIZE,), 2.0))
    layer.linear.register_forward_hook(lambda module, args, output: output * layer.factor)
    loss = loss_of(model, x)
    loss.backward()
    model.load_state_dict(model.state_dict())
    return loss.detach(), layer.factor.grad, gradients_of(model)


@pytest.mark.parametrize("streamed", [False, True], ids=["resident", "streamed"])
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_a_remedy(name: str, streamed: bool) -> None:
    action, words = REFUSED[name]
    model, optimizer = wrapped(streamed)
    before = values_of(model)
    with pytest.raises(hightide.Refused, match=words):
        action(model, optimizer, example())
    run = run_of(model)
    assert run is not None
    after = {key: run.value_of(key) for key in run.parameters}
    assert all(torch.equal(after[key], before[key]) for key in after)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("streamed", [False, True], ids=["resident", "streamed"])
@pytest.mark.parametrize("name", EQUAL)
def test_it_equals_plain_pytorch(name: str, streamed: bool) -> None:
    plain = Model()
    expected = EQUAL[name](plain, sgd(plain), example())
    found = EQUAL[name](*wrapped(streamed), example())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("streamed", [False, True], ids=["resident", "streamed"])
def test_training_goes_on_after_a_refusal(streamed: bool) -> None:
    plain = Model()
    expected = trained(plain, sgd(plain), example())
    model, optimizer = wrapped(streamed)
    for action in (in_half, per_sample, gradient_penalty, swapped_tensors, other_data_of_a_loose_parameter):
        with pytest.raises(hightide.Refused):
            action(model, optimizer, example())
        optimizer.zero_grad()
    torch.testing.assert_close(trained(model, optimizer, example()), expected, rtol=1e-4, atol=1e-5)


def test_a_batch_that_is_too_large_is_refused_as_a_value_too() -> None:
    model, _ = wrapped(streamed=True)
    for kind in (hightide.Refused, ValueError):
        with pytest.raises(kind, match=rf"a batch of argument 0 2000000x{SIZE}.*largest batch"):
            model(torch.randn(2_000_000, SIZE))
