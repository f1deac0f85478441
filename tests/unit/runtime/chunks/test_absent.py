"""What users see of parameters whose values are elsewhere: all that describes them, and for the rest an error that says
what to call instead. Never NaN, never an old value, never a gradient that reaches no one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hightide
import models
from unit.runtime.steps import Twins, assert_equal_weights, twins
from whole.test_review import PLANS, REFRESHED, RESIDENT, STREAMED, assert_equal_gradients, both

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module", params=[STREAMED, REFRESHED], ids=["streamed", "host states"])
def pair(request: pytest.FixtureRequest) -> Iterator[Twins]:
    model, batch = models.llama(num_layers=2)
    made = twins(model, batch, edit=request.param)
    made.step()
    yield made
    made.close()


@PLANS
def test_parameters_describe_themselves_right_after_wrapping(edit: Any) -> None:
    model, batch = models.llama(num_layers=2, tied=True)
    expected = copy.deepcopy(model)
    made = twins(model, batch, edit=edit)
    theirs = dict(expected.named_parameters())
    assert list(dict(made.model.named_parameters())) == list(theirs)
    for name, param in made.model.named_parameters():
        plain = theirs[name]
        assert param.grad is None and param.grad_fn is None
        assert isinstance(param, nn.Parameter) and torch.is_tensor(param)
        assert (param.shape, param.size(), param.size(0)) == (plain.shape, plain.size(), plain.size(0))
        assert (param.dtype, param.device, param.layout) == (plain.dtype, plain.device, plain.layout)
        assert (param.numel(), param.dim(), len(param)) == (plain.numel(), plain.ndim, len(plain))
        assert (param.nbytes, param.element_size(), param.itemsize) == (plain.nbytes, 4, 4)
        assert param.requires_grad and param.is_leaf and not param.is_cuda and param.is_floating_point()
        assert param.type() == plain.type() and not torch.is_complex(param)
    assert sum(param.numel() for param in made.model.parameters()) == sum(p.numel() for p in expected.parameters())
    made.close()


READS: dict[str, Callable[[nn.Parameter], object]] = {
    "p.data": lambda p: p.data,
    "p.detach()": lambda p: p.detach(),
    "p.clone()": lambda p: p.clone(),
    "p.norm()": lambda p: p.norm(),
    "p.sum()": lambda p: p.sum(),
    "p * 2": lambda p: p * 2,
    "2 * p": lambda p: 2 * p,
    "p[0]": lambda p: p[0],
    "p.T": lambda p: p.T,
    "p.tolist()": lambda p: p.tolist(),
    "p.numpy()": lambda p: p.numpy(),
    "p.cpu().numpy()": lambda p: p.to(torch.float64),
    "torch.isnan(p)": lambda p: torch.isnan(p),
    "torch.stack": lambda p: torch.stack([p, p]),
    "torch.save": lambda p: torch.save(p, io.BytesIO()),
    "copy.deepcopy": lambda p: copy.deepcopy(p),
    "parameters_to_vector": lambda p: torch.nn.utils.parameters_to_vector([p]),
    "F.linear": lambda p: torch.nn.functional.linear(torch.zeros(1, 32), p),
    "an average": lambda p: torch.zeros(p.shape).lerp_(p, 0.5),
}
WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "p.data = ...": lambda p: setattr(p, "data", torch.zeros(p.shape)),
    "p.data.mul_": lambda p: p.data.mul_(0.5),
    "p.mul_": lambda p: p.mul_(0.5),
    "p.copy_": lambda p: p.copy_(torch.zeros(p.shape)),
    "p[0, 0] = 1": lambda p: p.__setitem__((0, 0), 1.0),
    "nn.init": lambda p: nn.init.normal_(p),
    "vector_to_parameters": lambda p: torch.nn.utils.vector_to_parameters(torch.zeros(p.numel()), [p]),
    "another optimizer": lambda p: torch.optim.RMSprop([p]).step() if p.grad is not None else p.add_(1),
    "register_hook": lambda p: p.register_hook(lambda gradient: gradient),
    "register_post_accumulate_grad_hook": lambda p: p.register_post_accumulate_grad_hook(lambda param: None),
}
REMEDIES = (repr(NAME), "get_submodule('model.layers.1.mlp.up_proj').state_dict()['weight']", "load_state_dict()")


@pytest.mark.parametrize("use", [*READS, *WRITES])
@pytest.mark.parametrize("grad", [True, False], ids=["", "no_grad"])
def test_values_are_refused_with_a_remedy(pair: Twins, use: str, grad: bool) -> None:
    before = pair.model.state_dict()[NAME]
    with pytest.raises(RuntimeError) as raised, torch.set_grad_enabled(grad):
        (READS | WRITES)[use](pair.model.get_parameter(NAME))
    for words in (*REMEDIES, "weight_decay", "hightide.unwrap"):
        assert words in str(raised.value)
    assert torch.equal(pair.model.state_dict()[NAME], before)


def test_what_the_message_names_works(pair: Twins) -> None:
    part = pair.model.get_submodule("model.layers.1.mlp.up_proj")
    expected = pair.plain.get_parameter(NAME)
    torch.testing.assert_close(part.state_dict()["weight"], expected.detach(), rtol=1e-5, atol=1e-6)
    for model in (pair.model, pair.plain):
        where = model.get_submodule("model.layers.1.mlp.up_proj")
        where.load_state_dict({"weight": pair.plain.get_parameter(NAME).detach() * 0.5})
    pair.assert_equal(*pair.step())
    with pytest.raises(RuntimeError, match="elsewhere"):
        pair.model.get_parameter(NAME).sum()


def test_printing_reads_nothing(pair: Twins) -> None:
    param = pair.model.get_parameter(NAME)
    for text in (repr(param), str(param), f"{param}"):
        assert NAME in text and "(48, 32)" in text and "nan" not in text


def test_a_move_to_where_it_is_changes_nothing_and_any_other_is_refused(pair: Twins) -> None:
    models.loss_of(pair.model, pair.batch).backward()
    pair.model.to("cpu").to(torch.float32).float()
    pair.model.cpu()
    for move in (lambda model: model.double(), lambda model: model.to(torch.bfloat16), lambda model: model.to("meta")):
        with pytest.raises(RuntimeError, match="cannot be converted, moved or emptied"):
            move(pair.model)
    pair.optimizer.zero_grad()
    pair.assert_equal(*pair.step())


def test_gradients_of_absent_parameters_by_autograd_grad_are_refused(pair: Twins) -> None:
    """Autograd would say that they are not part of the graph. See p.grad after backward()."""
    loss = models.loss_of(pair.model, pair.batch)
    with pytest.raises(RuntimeError, match=r"autograd\.grad of.*elsewhere.*p\.grad after backward"):
        torch.autograd.grad(loss, list(pair.model.parameters()))


# -- parts of the loss that blocks do not see ----------------------------------------------------------------------


def penalty(model: nn.Module) -> Tensor:
    return 0.01 * sum(param.square().sum() for param in model.parameters())  # type: ignore[return-value]


@pytest.mark.parametrize("first", ["loss", "penalty"])
def test_a_regulariser_over_absent_parameters_is_refused_and_names_weight_decay(pair: Twins, first: str) -> None:
    with pytest.raises(RuntimeError, match="weight_decay"):
        if first == "loss":
            loss = models.loss_of(pair.model, pair.batch)
            (loss + penalty(pair.model)).backward()
        else:
            total = penalty(pair.model)
            (models.loss_of(pair.model, pair.batch) + total).backward()
    pair.optimizer.zero_grad()
    pair.assert_equal(*pair.step())


@pytest.mark.parametrize(
    ("first", "backwards", "clip"), [("loss", 1, False), ("penalty", 1, True), ("loss", 2, True), ("penalty", 2, False)]
)
def test_a_regulariser_over_resident_parameters_is_right(first: str, backwards: int, clip: bool) -> None:
    model, batch = models.llama(num_layers=2, tied=True)
    made = twins(model, batch, edit=RESIDENT)
    for _ in range(2):
        for model, _ in both(made):
            for _ in range(backwards):
                if first == "loss":
                    total = models.loss_of(model, batch) + penalty(model)
                else:
                    extra = penalty(model)
                    total = models.loss_of(model, batch) + extra
                total.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert_equal_gradients(made.model, made.plain)
        for _, optimizer in both(made):
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_weights(made.model, made.plain)
    made.close()


def test_a_loss_of_parameters_alone_trains_them_or_is_refused() -> None:
    for edit in (RESIDENT, STREAMED):
        model, batch = models.llama(num_layers=2)
        made = twins(model, batch, edit=edit)
        if edit is STREAMED:
            with pytest.raises(RuntimeError, match="weight_decay"):
                penalty(made.model).backward()
        else:
            for model, optimizer in both(made):
                penalty(model).backward()
                optimizer.step()
                optimizer.zero_grad()
        made.assert_equal(*made.step())
        made.close()


# -- p.grad --------------------------------------------------------------------------------------------------------


def add_noise(param: nn.Parameter) -> None:
    assert param.grad is not None
    noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel()))
    param.grad.add_(noise, alpha=0.01)


def scale_by_hand(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad * 0.5


def clamp_by_hand(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad.clamp(-1e-3, 1e-3)


CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "p.grad.mul_(x)": lambda p: p.grad.mul_(0.25),  # type: ignore[union-attr]
    "p.grad /= x": lambda p: p.grad.div_(4),  # type: ignore[union-attr]
    "p.grad = p.grad * x": scale_by_hand,
    "p.grad = p.grad.clamp": clamp_by_hand,
    "p.grad.add_(noise)": add_noise,
    "p.grad.zero_()": lambda p: p.grad.zero_(),  # type: ignore[union-attr]
    "p.grad = None": lambda p: setattr(p, "grad", None),
    "scaled, then noise": lambda p: (p.grad.mul_(0.5), add_noise(p)),  # type: ignore[union-attr]
}


@pytest.mark.parametrize(
    ("change", "edit"),
    [
        pytest.param(change, edit, id=f"{change} {name}", marks=[] if number % 3 == at else pytest.mark.long)
        for number, change in enumerate(CHANGES)
        for at, (name, edit) in enumerate({"streamed": STREAMED, "host": REFRESHED, "gpu": RESIDENT}.items())
    ],
)
def test_gradients_changed_by_hand(edit: Any, change: str) -> None:
    """Of every second parameter, twice within an accumulation: read, normed and stepped as in plain PyTorch."""
    model, batch = models.llama(num_layers=2)
    made = twins(model, batch, edit=edit)
    for model, _ in both(made):
        for seed in (1, 2):
            models.loss_of(model, models.token_batch(seed)).backward()
            for param in list(model.parameters())[::2]:
                CHANGES[change](param)
    assert_equal_gradients(made.model, made.plain)
    norms = [float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)) for model, _ in both(made)]
    assert abs(norms[0] - norms[1]) <= 1e-5 * norms[1]
    for _, optimizer in both(made):
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_weights(made.model, made.plain)
    made.assert_equal(*made.step())
    made.close()


def test_other_changes_of_a_gradient_are_refused_with_a_remedy(pair: Twins) -> None:
    models.loss_of(pair.model, pair.batch).backward()
    gradient = pair.model.get_parameter(NAME).grad
    assert gradient is not None
    for change in (
        lambda: gradient.clamp_(-1, 1),
        lambda: gradient.copy_(torch.zeros(48, 32)),
        lambda: gradient[0].mul_(2),
        lambda: torch.nn.utils.clip_grad_value_(pair.model.parameters(), 1e-3),
    ):
        with pytest.raises(RuntimeError, match=r"p\.grad\.mul_.*p\.grad = tensor"):
            change()
    pair.optimizer.zero_grad()


def test_unwrapping_gives_parameters_their_class_back() -> None:
    model, batch = models.llama(num_layers=2)
    made = twins(model, batch, edit=STREAMED)
    model = hightide.unwrap(made.model)
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert penalty(model).isfinite()


class Marked(nn.Parameter):
    """Somebody's own kind of parameter."""


def test_a_parameter_of_another_class_has_it_while_its_block_runs() -> None:
    torch.manual_seed(0)
    model, batch = models.hand_written()
    assert isinstance(model, models.HandWritten)
    weight = model.layers[1].mlp[0].weight
    weight.__class__ = Marked
    seen: list[type] = []
    model.layers[1].register_forward_pre_hook(lambda module, _: seen.append(type(weight)))
    made = twins(model, batch, edit=STREAMED)
    assert isinstance(weight, Marked) and type(weight) is not Marked
    with pytest.raises(RuntimeError, match=r"layers\.1\.mlp\.0\.weight"):
        weight.sum()
    made.step()
    hightide.unwrap(made.model)
    assert type(weight) is Marked
