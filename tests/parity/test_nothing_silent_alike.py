"""Blocks that look alike and are not, changes that nobody announces, and state in unusual places."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from equal_or_refused import (
    NUM_SAMPLES,
    ROOMY,
    SPLIT,
    WIDTH,
    Block,
    Case,
    Cases,
    Net,
    Way,
    check,
    one_step,
    sequences,
    vectors,
)
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

CASES = Cases()
add = CASES.add
FREE = (Way(2, tight=False),)


def centred(h: Tensor) -> Tensor:
    return h - h.mean(0)


def unchanged(h: Tensor) -> Tensor:
    return h


class Centring(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


# --- one of several blocks that look alike ---


class Configured(Block):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def mix(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if self.config.centre else h


@add(ways=ROOMY)
def one_of_four_has_another_configuration() -> nn.Module:
    return Net(*(Configured(SimpleNamespace(centre=number == 2)) for number in range(4)))


class Indexed(Block):
    def __init__(self, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index

    def mix(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if self.layer_index == 2 else h


@add(ways=ROOMY)
def one_of_four_by_its_number() -> nn.Module:
    return Net(*(Indexed(number) for number in range(4)))


class Given(Block):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def mix(self, h: Tensor) -> Tensor:
        return self.function(h)


@add(ways=ROOMY)
def one_of_four_has_another_function() -> nn.Module:
    return Net(*(Given(centred if number == 2 else unchanged) for number in range(4)))


@add(slow=True, ways=ROOMY)
def one_of_four_has_another_closure() -> nn.Module:
    def made(share: float) -> Any:
        return lambda h: h - share * h.mean(0)

    return Net(*(Given(made(1.0 if number == 2 else 0.0)) for number in range(4)))


@add(slow=True, ways=ROOMY)
def one_of_four_has_another_partial_function() -> nn.Module:
    def less(h: Tensor, share: float) -> Tensor:
        return h - share * h.mean(0)

    return Net(*(Given(functools.partial(less, share=float(number == 2))) for number in range(4)))


@add(slow=True, ways=ROOMY)
def one_of_four_has_another_method() -> nn.Module:
    blocks = [Block() for _ in range(4)]
    blocks[2].mix = centred  # type: ignore[method-assign]
    return Net(*blocks)


@add("refused")
def one_of_four_has_another_forward() -> nn.Module:
    blocks = [Block() for _ in range(4)]
    linear = blocks[2].linear
    blocks[2].forward = lambda x: x + centred(torch.tanh(linear(x)))  # type: ignore[method-assign]
    return Net(*blocks)


@add(ways=ROOMY)
def one_of_four_has_a_hook() -> nn.Module:
    blocks = [Block() for _ in range(4)]
    blocks[2].linear.register_forward_hook(lambda _, args, output: output - output.mean(0))
    return Net(*blocks)


@add(slow=True, ways=ROOMY)
def one_of_four_has_another_module() -> nn.Module:
    blocks = [Given(Centring() if number == 2 else nn.Identity()) for number in range(4)]
    return Net(*blocks)


@add(slow=True, ways=ROOMY)
def one_of_four_has_a_module_in_a_list() -> nn.Module:
    return Net(*(Given([Centring() if number == 2 else nn.Identity()][0].forward) for number in range(4)))


class Shared(Block):
    def make(self) -> None:
        self.register_buffer("share", torch.zeros(()))

    def mix(self, h: Tensor) -> Tensor:
        return h - self.share * h.mean(0)


@add(ways=ROOMY)
def one_of_four_has_another_buffer() -> nn.Module:
    blocks = [Shared() for _ in range(4)]
    blocks[2].share.fill_(1.0)
    return Net(*blocks)


class SharedAsTensor(Block):
    def make(self) -> None:
        self.share = torch.zeros(())

    def mix(self, h: Tensor) -> Tensor:
        return h - self.share * h.mean(0)


@add(slow=True, ways=ROOMY)
def one_of_four_has_another_tensor() -> nn.Module:
    blocks = [SharedAsTensor() for _ in range(4)]
    blocks[2].share.fill_(1.0)
    return Net(*blocks)


class Weighted(Block):
    def make(self) -> None:
        self.share = nn.Parameter(torch.zeros(()))

    def mix(self, h: Tensor) -> Tensor:
        return h - self.share.detach().round() * h.mean(0) + self.share


@add(ways=ROOMY)
def one_of_four_has_another_weight() -> nn.Module:
    """What is rounded shows no gradient."""
    blocks = [Weighted() for _ in range(4)]
    blocks[2].share.data.fill_(1.0)
    return Net(*blocks)


@add(after_wrap=lambda model: model.blocks[2].eval(), ways=ROOMY)
def one_of_four_is_in_evaluation_later() -> nn.Module:
    class InEvaluation(Block):
        def mix(self, h: Tensor) -> Tensor:
            return h if self.training else h - h.mean(0)

    return Net(*(InEvaluation() for _ in range(4)))


class CentredIfTold(Block):
    def forward(self, x: Tensor, centre: bool) -> Tensor:
        h = torch.tanh(self.linear(x))
        return x + (h - h.mean(0) if centre else h)


class CalledInTwoWays(Net):
    def forward(self, x: Tensor, labels: Tensor, **others: Any) -> dict[str, Any]:
        for block in self.blocks:
            x = block(block(x, centre=False), centre=True)
        return super().forward(x, labels)


class Untold(CentredIfTold):
    def forward(self, x: Tensor, centre: bool = False) -> Tensor:
        return super().forward(x, centre)


@add()
def one_block_called_in_two_ways() -> nn.Module:
    return CalledInTwoWays(Untold(), Untold())


# --- changes that nobody announces ---


def switch_configuration(model: nn.Module) -> None:
    model.blocks[0].config.centre = True  # type: ignore[union-attr,index]


@add(after_wrap=switch_configuration, ways=FREE)
def a_shared_configuration_is_switched_after_wrapping() -> nn.Module:
    config = SimpleNamespace(centre=False)
    return Net(Configured(config), Configured(config))


class InADict(Block):
    def make(self) -> None:
        self.options = {"mixing": {"centre": False}}

    def mix(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if self.options["mixing"]["centre"] else h


def switch_dict(model: nn.Module) -> None:
    model.blocks[1].options["mixing"]["centre"] = True  # type: ignore[union-attr,index]


@add(after_wrap=switch_dict, ways=FREE, slow=True)
def a_dict_is_switched_after_wrapping() -> nn.Module:
    return Net(InADict(), InADict())


FLAGS = {"centre": False}


class ReadsAGlobal(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if FLAGS["centre"] else h


@add(after_wrap=lambda model: FLAGS.update(centre=True), ways=FREE)
def a_global_is_switched_after_wrapping() -> nn.Module:
    FLAGS["centre"] = False
    return Net(ReadsAGlobal(), ReadsAGlobal())


@add(after_wrap=lambda model: setattr(type(model.blocks[0]), "mix", lambda self, h: h - h.mean(0)), ways=FREE)
def a_class_is_patched_after_wrapping() -> nn.Module:
    class Patched(Block):
        def mix(self, h: Tensor) -> Tensor:
            return h

    return Net(Patched(), Patched())


def method_after_wrapping(model: nn.Module) -> None:
    model.blocks[1].mix = centred  # type: ignore[union-attr,index]


@add(after_wrap=method_after_wrapping, ways=FREE, slow=True)
def a_method_is_replaced_after_wrapping() -> nn.Module:
    return Net(Block(), Block())


def switch_buffer(model: nn.Module) -> None:
    model.blocks[1].share.fill_(1.0)  # type: ignore[union-attr,index,operator]


@add(after_wrap=switch_buffer, ways=FREE)
def a_buffer_is_switched_after_wrapping() -> nn.Module:
    return Net(Shared(), Shared())


def under_a_global_hook(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return output - output.mean(0) if isinstance(module, nn.Tanh) else None

    handle = register_module_forward_hook(hook)
    try:
        return one_step(model, optimizer, batch, index)
    finally:
        handle.remove()


class WithTanh(Block):
    def make(self) -> None:
        self.active = nn.Tanh()

    def mix(self, h: Tensor) -> Tensor:
        return self.active(h)


@add(step=under_a_global_hook, ways=FREE)
def a_hook_of_all_modules_while_training() -> nn.Module:
    return Net(WithTanh(), WithTanh())


def in_the_third_step(change: Any) -> Any:
    """Where all has been seen before, with the same shapes."""

    def step(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
        if index == 2:
            change(model)
        return one_step(model, optimizer, batch, index)

    return step


@add(step=in_the_third_step(switch_configuration), ways=FREE)
def a_shared_configuration_is_switched_in_the_third_step() -> nn.Module:
    config = SimpleNamespace(centre=False)
    return Net(Configured(config), Configured(config))


@add(step=in_the_third_step(switch_dict), ways=FREE, slow=True)
def a_dict_is_switched_in_the_third_step() -> nn.Module:
    return Net(InADict(), InADict())


@add(
    step=in_the_third_step(lambda model: FLAGS.update(centre=True)),
    ways=FREE,
)
def a_global_is_switched_in_the_third_step() -> nn.Module:
    FLAGS["centre"] = False
    return Net(ReadsAGlobal(), ReadsAGlobal())


@add(
    step=in_the_third_step(lambda model: setattr(type(model.blocks[0]), "mix", lambda self, h: h - h.mean(0))),
    ways=FREE,
    slow=True,
)
def a_class_is_patched_in_the_third_step() -> nn.Module:
    class Patched(Block):
        def mix(self, h: Tensor) -> Tensor:
            return h

    return Net(Patched(), Patched())


@add(
    step=in_the_third_step(method_after_wrapping),
    ways=FREE,
    slow=True,
)
def a_method_is_replaced_in_the_third_step() -> nn.Module:
    return Net(Block(), Block())


@add(step=in_the_third_step(switch_buffer), ways=FREE)
def a_buffer_is_switched_in_the_third_step() -> nn.Module:
    return Net(Shared(), Shared())


def hook_inside(model: nn.Module) -> None:
    model.blocks[1].linear.register_forward_hook(lambda _, args, output: output - output.mean(0))  # type: ignore[union-attr,index]


@add(step=in_the_third_step(hook_inside), ways=FREE)
def a_hook_is_added_in_the_third_step() -> nn.Module:
    return Net(Block(), Block())


def exchange(model: nn.Module) -> None:
    model.blocks[1].active = Centring()  # type: ignore[union-attr,index]


@add(step=in_the_third_step(exchange), ways=FREE)
def a_module_is_exchanged_in_the_third_step() -> nn.Module:
    return Net(WithTanh(), WithTanh())


class GradientIfTold(Block):
    """Outputs are the same with and without."""

    def make(self) -> None:
        self.centre = False

    def mix(self, h: Tensor) -> Tensor:
        if self.centre and h.requires_grad:
            h.register_hook(lambda grad: grad - grad.mean(0))
        return h


def switch_gradient(model: nn.Module) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        block.centre = True


@add(after_wrap=switch_gradient, ways=FREE, limit="at real size outputs are compared, gradients are not")
def gradients_meet_by_an_attribute_after_wrapping() -> nn.Module:
    return Net(GradientIfTold(), GradientIfTold())


class GradientIfArgued(Block):
    def forward(self, x: Tensor, centre: bool) -> Tensor:
        h = torch.tanh(self.linear(x))
        if centre and h.requires_grad:
            h.register_hook(lambda grad: grad - grad.mean(0))
        return x + h


@add(batch=lambda seed: {**vectors(seed), "centre": seed > 0}, ways=FREE)
def gradients_meet_by_a_flag_that_comes_later() -> nn.Module:
    return Net(GradientIfArgued(), GradientIfArgued())


@add(
    batch=lambda seed: sequences(seed, num_tokens=4 + seed % 90),
    ways=FREE,
    limit="at real size outputs are compared, gradients are not",
)
class GradientsMeetInLongSequences(Block):
    def mix(self, h: Tensor) -> Tensor:
        if h.shape[1] > 4 and h.requires_grad:
            h.register_hook(lambda grad: grad - grad.mean(0))
        return h


def backward_hook(model: nn.Module) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        block.linear.register_full_backward_hook(lambda _, inputs, outputs: tuple(g - g.mean(0) for g in inputs))


@add(after_wrap=backward_hook, ways=FREE)
def a_backward_hook_after_wrapping() -> nn.Module:
    return Net(Block(), Block())


class InTraining(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if self.training else h


def evaluated_first(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    model.eval()
    with torch.no_grad():
        before = model(**batch)
    model.train()
    return {**one_step(model, optimizer, batch, index), "before": before}


@add(prepare=lambda model: model.eval(), step=evaluated_first, ways=FREE)
def samples_meet_in_training_and_it_is_evaluated_first() -> nn.Module:
    return Net(InTraining(), InTraining())


@add(batch=lambda seed: vectors(seed, num_samples=6 if seed in (0, 3, 99) else 2), after_wrap=switch_buffer, ways=FREE)
def the_first_batches_are_too_small_to_be_split() -> nn.Module:
    return Net(Shared(), Shared())


class FromAStep(Block):
    def forward(self, x: Tensor, step: int) -> Tensor:
        h = torch.tanh(self.linear(x))
        return x + (h - h.mean(0) if step >= 3 else h)


@add(batch=lambda seed: {**vectors(seed), "step": seed}, ways=FREE)
def samples_meet_from_a_step_that_is_told() -> nn.Module:
    return Net(FromAStep(), FromAStep())


class FromAStepAsTensor(Block):
    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        return x + torch.where(step >= 3, h - h.mean(0), h)


@add(
    batch=lambda seed: {**vectors(seed), "step": torch.tensor(seed)},
    ways=FREE,
    limit="values that come later are not compared again",
)
def samples_meet_from_a_step_in_a_tensor() -> nn.Module:
    return Net(FromAStepAsTensor(), FromAStepAsTensor())


class WarmsUp(Block):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def mix(self, h: Tensor) -> Tensor:
        self.left -= self.training
        return h if self.left > 0 else h - h.mean(0)


def several_steps(model: nn.Module, optimizer: Any, batch: Any, index: int) -> Any:
    for number in range(4):
        one_step(model, optimizer, vectors(100 + 10 * index + number), index)
    return one_step(model, optimizer, batch, index)


@add(step=several_steps, ways=FREE)
def samples_meet_after_ten_steps() -> nn.Module:
    return Net(WarmsUp(11), WarmsUp(12))


@add(batch=lambda seed: vectors(seed, num_samples=6 if seed in (0, 1) else 5), ways=FREE)
class OnlyInFives(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if len(h) == 5 else h


@add(batch=lambda seed: vectors(seed, num_samples=6 - seed % 6 if seed != 99 else 6), ways=FREE, slow=True)
class OnlyInSomeSizes(Block):
    """Harmless in the example, not in a batch of three or four."""

    def mix(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if len(h) in (3, 4) else h


class Deduplicated(Block):
    """The same sample twice counts half each."""

    def mix(self, h: Tensor) -> Tensor:
        same = (h.unsqueeze(0) == h.unsqueeze(1)).all(-1).sum(1, keepdim=True)
        return h / same


def repeated_later(seed: int) -> dict[str, Tensor]:
    batch = vectors(seed)
    if seed == 3:  # the last step, when all has been seen before
        batch["x"][3:] = batch["x"][:3]
    return batch


@add(batch=repeated_later, limit="values that come later are not compared again")
def the_same_samples_later() -> nn.Module:
    return Net(Deduplicated(), Deduplicated())


class AveragedById(Block):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        same = (ids.unsqueeze(0) == ids.unsqueeze(1)).float()
        return x + same @ h / same.sum(1, keepdim=True)


@add(batch=lambda seed: {**vectors(seed), "ids": torch.arange(NUM_SAMPLES) % (2 if seed else 6)}, ways=ROOMY)
def the_same_ids_later() -> nn.Module:
    return Net(AveragedById(), AveragedById())


class Opens(Block):
    """A gate with a threshold, of which nothing shows in gradients; its loss makes it grow."""

    def make(self) -> None:
        self.gate = nn.Parameter(torch.tensor(4.97))

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        return x + torch.where(self.gate.detach() > 5, h - h.mean(0), h), -self.gate


@add(
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.2),
    limit="values that come later are not compared again",
)
def a_gate_opens_in_training() -> nn.Module:
    return Net(Opens(), Opens())


class RarelyCentred(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if random.random() < 0.2 else h


@add()
def samples_meet_rarely() -> nn.Module:
    return Net(*(RarelyCentred() for _ in range(4)))


class RarelyCentredByTorch(Block):
    def mix(self, h: Tensor) -> Tensor:
        return torch.where(torch.rand(()) < 0.2, h - h.mean(0), h)


@add(slow=True)
def samples_meet_rarely_by_torch() -> nn.Module:
    return Net(*(RarelyCentredByTorch() for _ in range(4)))


class KnowsTheSize(Block):
    def make(self) -> None:
        self.size = NUM_SAMPLES

    def mix(self, h: Tensor) -> Tensor:
        return h.reshape(self.size, 2, -1).flip(1).reshape(self.size, -1)


@add()
def the_number_of_samples_is_an_attribute() -> nn.Module:
    return Net(KnowsTheSize(), KnowsTheSize())


@add(split=True)
class Mapped(Block):
    """Sample by sample, by torch.func."""

    def mix(self, h: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: row / (1 + row.norm()))(h)


@add(split=True)
class WarnsOnce(Block):
    def make(self) -> None:
        self.has_warned = False

    def mix(self, h: Tensor) -> Tensor:
        self.has_warned = True
        return h


@add(batch=sequences, split=True, ways=SPLIT[1:], limit="a number that is noted is taken for state")
class RemembersSizes(Block):
    """For a log; the same in each call."""

    def make(self) -> None:
        self.num_tokens = 0

    def mix(self, h: Tensor) -> Tensor:
        self.num_tokens = h.shape[1]
        return h


# --- state in unusual places ---


class Tally:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class CountsInSlots(Block):
    def make(self) -> None:
        self.tally = Tally()

    def mix(self, h: Tensor) -> Tensor:
        self.tally.calls += 1
        return h / self.tally.calls


@add()
def counted_in_slots() -> nn.Module:
    return Net(CountsInSlots(), CountsInSlots())


@add(slow=True)
def counted_in_an_object_that_two_blocks_share() -> nn.Module:
    blocks = [CountsInSlots(), CountsInSlots()]
    blocks[1].tally = blocks[0].tally
    return Net(*blocks)


class CountsInTheParent(Block):
    def mix(self, h: Tensor) -> Tensor:
        parent = self.__dict__["parent"][0]
        parent.calls += 1
        return h / parent.calls


class Parent(Net):
    calls = 0

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.calls = 0
        for block in blocks:
            block.__dict__["parent"] = [self]


@add("refused")
def counted_in_the_parent() -> nn.Module:
    return Parent(CountsInTheParent(), CountsInTheParent())


class CountsInANestedList(Block):
    def make(self) -> None:
        self.notes: list[dict[str, Any]] = [{"calls": 0, "means": [torch.zeros(WIDTH)]}]

    def mix(self, h: Tensor) -> Tensor:
        self.notes[0]["calls"] += 1
        self.notes[0]["means"][0] += h.detach().mean(0)
        return h - self.notes[0]["means"][0] / self.notes[0]["calls"]


@add()
def counted_in_a_nested_list() -> nn.Module:
    return Net(CountsInANestedList(), CountsInANestedList())


@add()
class Histogram(Block):
    def make(self) -> None:
        self.histogram = np.zeros(4)

    def mix(self, h: Tensor) -> Tensor:
        self.histogram += np.histogram(h.detach().numpy(), bins=4, range=(-1, 1))[0]
        return h


@add(ways=ROOMY)
class GrowingBuffer(Block):
    def make(self) -> None:
        self.register_buffer("history", torch.zeros(1, WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        self.history = torch.cat([self.history, h.detach().mean(0, keepdim=True)])
        return h - self.history.mean(0)


@add(slow=True)
class BufferByOut(Block):
    def make(self) -> None:
        self.register_buffer("average", torch.zeros(WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        torch.lerp(self.average, h.detach().mean(0), 0.3, out=self.average)
        return h


@add()
class BufferByData(Block):
    def make(self) -> None:
        self.register_buffer("average", torch.zeros(WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        self.average.data = 0.7 * self.average.data + 0.3 * h.detach().mean(0)
        return h


@add(slow=True)
class BufferByDict(Block):
    def make(self) -> None:
        self.register_buffer("average", torch.zeros(WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        self._buffers["average"] = 0.7 * self.average + 0.3 * h.detach().mean(0)
        return h


class SharedStep(Block):
    """One buffer of two modules."""

    def mix(self, h: Tensor) -> Tensor:
        self.step += 1
        return h / self.step.clone()


@add()
def a_buffer_that_two_blocks_share() -> nn.Module:
    blocks = [SharedStep(), SharedStep()]
    step = torch.zeros(())
    for block in blocks:
        block.register_buffer("step", step)
    return Net(*blocks)


class DrawsFromOne(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h * torch.rand((), generator=self.generator)


@add()
def a_generator_that_two_blocks_share() -> nn.Module:
    blocks = [DrawsFromOne(), DrawsFromOne()]
    generator = torch.Generator().manual_seed(7)
    for block in blocks:
        block.generator = generator
    return Net(*blocks)


GENERATOR = np.random.default_rng(1)


class DrawsFromAGlobal(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h * float(GENERATOR.uniform(0.5, 1.5))


@add("refused")
def a_generator_of_the_file() -> nn.Module:
    GENERATOR.bit_generator.state = np.random.default_rng(1).bit_generator.state
    return Net(DrawsFromAGlobal(), DrawsFromAGlobal())


def counting(kind: str) -> Any:
    def build() -> nn.Module:
        blocks = [Block(), Block()]
        for block in blocks:
            for module in (block, block.linear):
                module.calls = 0

                def hook(module: nn.Module, *_: Any) -> None:
                    module.calls += 1

                getattr(module, f"register_{kind}")(hook)
        return Net(*blocks)

    build.__name__ = f"counted_by_a_{kind}"
    return build


for kind in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
    add(ways=SPLIT[:1])(counting(kind))


@pytest.mark.parametrize(("case", "ways"), CASES.quick)
def test_what_looks_alike(case: Case, ways: tuple[Way, ...]) -> None:
    check(case, ways)


@pytest.mark.long
@pytest.mark.parametrize(("case", "ways"), CASES.at_length)
def test_what_looks_alike_at_length(case: Case, ways: tuple[Way, ...]) -> None:
    check(case, ways)
