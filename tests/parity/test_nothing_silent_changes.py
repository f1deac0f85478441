"""Loops that change a model, its optimizer or its gradients while it is trained."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equal_or_refused import (
    NUM_SAMPLES,
    WIDTH,
    Block,
    Case,
    Cases,
    Net,
    Way,
    check,
    loss_in,
    one_step,
    sequences,
    vectors,
)
from torch import Tensor, nn

CASES = Cases()
add = CASES.add
FREE = (Way(2, tight=False),)


# --- between a forward and its backward, which runs blocks again ---


def between(change: Any) -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
        output = model(**batch)
        change(model, index)
        loss_in(output).backward()
        optimizer.step()
        optimizer.zero_grad()
        return output

    return step


class Tempered(Block):
    def make(self) -> None:
        self.temperature = 1.0
        self.config = SimpleNamespace(power=1, options={"shift": 0.0})

    def mix(self, h: Tensor) -> Tensor:
        return torch.tanh(self.temperature * h) ** self.config.power + torch.sin(h * self.config.options["shift"])


def colder(model: nn.Module, index: int) -> None:
    for block in model.blocks:
        block.temperature *= 0.5
        block.config.power += 1
        block.config.options["shift"] += 0.3


@add(step=between(colder))
def a_schedule_is_moved_before_backward() -> nn.Module:
    return Net(Tempered(), Tempered())


class WithDropout(Block):
    def make(self) -> None:
        self.dropout = nn.Dropout(0.5)

    def mix(self, h: Tensor) -> Tensor:
        return self.dropout(h)


def evaluated(model: nn.Module, index: int) -> None:
    model.eval()
    with torch.no_grad():
        model(**vectors(50 + index))


def then_trains(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    model.train()
    return between(evaluated)(model, optimizer, batch, index)


class Halved(Block):
    def mix(self, h: Tensor) -> Tensor:
        return torch.tanh(h / 2 if self.training else h * h)


@add(step=then_trains, batch=sequences)
def in_evaluation_before_backward() -> nn.Module:
    return Net(Halved(), Halved())


@add(step=then_trains, batch=sequences, ways=(Way(NUM_SAMPLES),))
def dropout_in_evaluation_before_backward() -> nn.Module:
    return Net(WithDropout(), WithDropout())


def exchanged(model: nn.Module, index: int) -> None:
    model.blocks[index % 2].active = (nn.Tanh(), nn.Sigmoid(), nn.SiLU())[index]


class Active(Block):
    def make(self) -> None:
        self.active: nn.Module = nn.ReLU()

    def mix(self, h: Tensor) -> Tensor:
        return self.active(h)


@add(step=between(exchanged))
def a_module_is_exchanged_before_backward() -> nn.Module:
    return Net(Active(), Active())


class Masked(Block):
    def make(self) -> None:
        self.mask = torch.ones(WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        return h * self.mask * self.linear.weight.sum()


def masked(model: nn.Module, index: int) -> None:
    for block in model.blocks:
        block.mask = torch.arange(WIDTH) % (index + 2) / 1.0


@add("refused", step=between(masked), ways=(Way(2), Way(NUM_SAMPLES)))
def another_tensor_before_backward() -> nn.Module:
    return Net(Masked(), Masked())


@add(step=between(lambda model, index: model.blocks[0].__dict__.update(seen=torch.ones(index + 1))))
def a_tensor_that_no_block_reads_before_backward() -> nn.Module:
    return Net(Masked(), Masked())


# --- in a later step ---


def at_each_step(change: Any) -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
        change(model, index)
        return one_step(model, optimizer, batch, index)

    return step


class CountsIfTold(Block):
    def make(self) -> None:
        self.counts, self.calls = False, 0

    def mix(self, h: Tensor) -> Tensor:
        self.calls += self.counts
        return h / (1 + self.calls)


def begin_to_count(model: nn.Module, index: int) -> None:
    for block in model.blocks:
        block.counts = index > 0


@add(step=at_each_step(begin_to_count), ways=FREE)
def it_begins_to_count_later() -> nn.Module:
    return Net(CountsIfTold(), CountsIfTold())


class Centres(Block):
    def make(self) -> None:
        self.share = 0.0

    def mix(self, h: Tensor) -> Tensor:
        return h - self.share * h.mean(0)


@add(step=at_each_step(lambda model, index: [setattr(block, "share", index / 2) for block in model.blocks]), ways=FREE)
def a_share_of_the_mean_grows() -> nn.Module:
    return Net(Centres(), Centres())


def to_and_fro(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    for number in range(3):
        for block in model.blocks:
            block.share = float(number % 2)
        one_step(model, optimizer, vectors(10 * index + number), index)
    return one_step(model, optimizer, batch, index)


@add(step=to_and_fro, ways=FREE)
def a_mean_is_on_at_every_other_step() -> nn.Module:
    return Net(Centres(), Centres())


RATE = [1.0]


class ReadsAGlobalRate(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h * RATE[0]


@add(step=at_each_step(lambda model, index: RATE.__setitem__(0, 1.0 / (index + 1))))
def a_rate_in_a_global_list() -> nn.Module:
    RATE[0] = 1.0
    return Net(ReadsAGlobalRate(), ReadsAGlobalRate())


class Share:
    """Of the mean, that a hook takes off; an object, as no function is."""

    def __init__(self) -> None:
        self.share = 0.0

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output - self.share * output.mean(0)

    def less(self, h: Tensor, share: float | None = None) -> Tensor:
        return h - (self.share if share is None else share) * h.mean(0)


class Sharing(Block):
    """It takes off a share of the mean, which it has from elsewhere."""

    def __init__(self, kept: Any, share: Any) -> None:
        super().__init__()
        self.kept, self.share = kept, share

    def mix(self, h: Tensor) -> Tensor:
        return h - float(self.share(self.kept)) * h.mean(0)


def in_the_third(change: Any) -> Any:
    return at_each_step(lambda model, index: change(model) if index == 2 else None)


@add(step=in_the_third(lambda model: setattr(model.hook, "share", 1.0)), ways=FREE)
def an_object_is_a_hook() -> nn.Module:
    model = Net(Block(), Block())
    model.__dict__["hook"] = Share()
    model.blocks[0].linear.register_forward_hook(model.hook)
    return model


@add(step=in_the_third(lambda model: setattr(model.first, "share", 1.0)), ways=FREE)
def a_number_of_another_module() -> nn.Module:
    model = Net()
    model.first.share = 0.0
    model.blocks.extend(Sharing([model.first], lambda kept: kept[0].share) for _ in range(2))
    return model


@add(step=in_the_third(lambda model: model.blocks[0].kept.keywords.update(share=1.0)), ways=FREE)
def an_argument_of_a_partial_function() -> nn.Module:
    kept = functools.partial(lambda share: share, share=0.0)
    return Net(*(Sharing(kept, lambda kept: kept()) for _ in range(2)))


@add(step=in_the_third(lambda model: setattr(model.blocks[0].kept.__self__, "share", 1.0)), ways=FREE)
def an_object_behind_a_method() -> nn.Module:
    kept = Share().less
    return Net(*(Sharing(kept, lambda kept: kept.__self__.share) for _ in range(2)))


def buffer_by_data(model: nn.Module) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        block.taken.data = torch.ones(())


class TakesOff(Block):
    def make(self) -> None:
        self.register_buffer("taken", torch.zeros(()))

    def mix(self, h: Tensor) -> Tensor:
        return h - self.taken * h.mean(0)


@add(step=in_the_third(buffer_by_data), ways=FREE)
def a_buffer_is_given_other_data() -> nn.Module:
    return Net(TakesOff(), TakesOff())


def give_another_forward(model: nn.Module) -> None:
    *_, own = (cls for cls in type(model.blocks[0]).__mro__ if cls.__name__ == "Own")  # type: ignore[union-attr,index]
    own.forward = lambda self, x: 2 * x  # type: ignore[attr-defined]


@add("refused", step=in_the_third(give_another_forward), ways=(Way(NUM_SAMPLES, tight=False),))
def a_class_is_given_another_forward() -> nn.Module:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.linear(x))

    return Net(Own(), Own())


# --- what the model's own code, or the loop, gives to blocks and to gradients ---


class Scaled(Block):
    scale: Any = 1.0

    def mix(self, h: Tensor) -> Tensor:
        return torch.tanh(h * self.scale)


class Scaling(Net):
    """It gives its blocks something before it calls them."""

    def __init__(self, how: Any) -> None:
        super().__init__(Scaled(), Scaled())
        self.how = how

    def forward(self, x: Tensor, labels: Tensor | None = None, **others: Any) -> dict[str, Any]:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            block.scale = self.how(x, number)
            x = block(x)
        prediction = self.head(x)
        return {"loss": (prediction - labels).square().mean(), "prediction": prediction}


@add(ways=FREE)
def a_number_for_each_block() -> nn.Module:
    return Scaling(lambda x, number: number + 0.5)


@add(ways=FREE)
def a_tensor_for_each_block() -> nn.Module:
    return Scaling(lambda x, number: x.detach().abs().mean())


@add(ways=FREE)
def a_tensor_of_all_samples_for_each_block() -> nn.Module:
    return Scaling(lambda x, number: x.detach().abs().mean(-1, keepdim=True))


def some_dropped(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    output = model(**batch)
    loss_in(output).backward()
    for parameter in model.blocks[0].parameters():  # type: ignore[union-attr,index]
        parameter.grad = None
    optimizer.step()
    optimizer.zero_grad()
    return output


@add(step=some_dropped)
def gradients_of_a_block_are_dropped() -> nn.Module:
    return Net(Block(), Block())


@add("refused", step=some_dropped, ways=(Way(2, tight=False, update="in_backward"),))
def gradients_of_a_block_are_dropped_after_its_update() -> nn.Module:
    return Net(Block(), Block())


@pytest.mark.parametrize(("case", "ways"), CASES.quick)
def test_what_changes(case: Case, ways: tuple[Way, ...]) -> None:
    check(case, ways)


@pytest.mark.long
@pytest.mark.parametrize(("case", "ways"), CASES.at_length)
def test_what_changes_at_length(case: Case, ways: tuple[Way, ...]) -> None:
    check(case, ways)
