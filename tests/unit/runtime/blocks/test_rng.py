"""Random numbers inside blocks: the same in forward and recomputation, and independent of the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hightide
import models
from hightide.ir.activation import Activation
from hightide.runtime.blocks.rng import Draws, pass_seed
from unit.runtime.steps import Twins, train_step, twins

WIDTH = 8


def drawn(draws: Draws, micro_batch: int, replay: bool = False) -> torch.Tensor:
    with draws.replay(micro_batch) if replay else draws.forward(micro_batch):
        return torch.rand(4)


def test_a_replay_draws_what_its_forward_drew() -> None:
    for num_micro_batches in (1, 3):
        draws = Draws(pass_seed(1), 2, 0, num_micro_batches)
        first = [drawn(draws, index) for index in range(num_micro_batches)]
        torch.rand(7)
        again = [drawn(draws, index, replay=True) for index in reversed(range(num_micro_batches))]
        assert all(torch.equal(one, two) for one, two in zip(first, reversed(again), strict=True))


def test_pass_block_call_and_micro_batch_have_numbers_of_their_own() -> None:
    seeds = pass_seed(1), pass_seed(2)
    values = [
        tuple(drawn(Draws(seed, block, call, 3), index).tolist())
        for seed in seeds
        for block in (0, 1)
        for call in (0, 1)
        for index in range(3)
    ]
    assert len(set(values)) == len(values)


def test_the_seed_follows_the_users_seed() -> None:
    torch.manual_seed(5)
    first = pass_seed(1)
    torch.manual_seed(6)
    second = pass_seed(1)
    torch.manual_seed(5)
    assert pass_seed(1) == first != second


def test_the_global_generator_is_left_alone_by_split_blocks_and_replays() -> None:
    state = torch.default_generator.get_state()
    draws = Draws(pass_seed(1), 0, 0, 3)
    drawn(draws, 1)
    drawn(draws, 1, replay=True)
    assert torch.equal(torch.default_generator.get_state(), state)
    single = Draws(pass_seed(1), 0, 0, 1)
    drawn(single, 0)
    moved = torch.default_generator.get_state()
    assert not torch.equal(moved, state)  # as plain PyTorch would
    drawn(single, 0, replay=True)
    assert torch.equal(torch.default_generator.get_state(), moved)


def test_the_generator_is_restored_when_the_block_raises() -> None:
    state = torch.default_generator.get_state()
    draws = Draws(pass_seed(1), 0, 0, 3)
    with pytest.raises(ZeroDivisionError), draws.forward(0):
        raise ZeroDivisionError
    assert torch.equal(torch.default_generator.get_state(), state)


def with_dropout(gpu: str) -> Twins:
    model, batch = models.hand_written(num_layers=3, dropout=0.5)
    return twins(model, batch, gpu=gpu)


def losses(pair: Twins) -> list[float]:
    torch.manual_seed(3)
    values = [train_step(pair.model, pair.optimizer, pair.batch).item() for _ in range(3)]
    pair.close()
    return values


def test_dropout_does_not_depend_on_the_plan() -> None:
    """Streamed with recomputation, and everything kept on the GPU."""
    lean, rich = with_dropout("100KiB"), with_dropout("8MiB")
    plans = [[(block.params, block.activation) for block in pair.run.plan.blocks] for pair in (lean, rich)]
    assert plans[0] != plans[1]
    first = losses(lean)
    assert first == losses(rich)
    assert len(set(first)) == 3


def test_dropout_of_one_micro_batch_is_that_of_plain_pytorch() -> None:
    model, batch = models.hand_written(num_layers=3, dropout=0.5)
    pair = twins(model, batch, gpu="8MiB", micro_batch=6)
    for _ in range(3):
        torch.manual_seed(4)
        ours = train_step(pair.model, pair.optimizer, batch)
        torch.manual_seed(4)
        pair.assert_equal(ours, train_step(pair.plain, pair.plain_optimizer, batch))
    pair.close()


class Doubles(nn.Module):
    """What its dropout has kept shows in what it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.linear(x), 0.5)


class InPairs(nn.Module):
    """A checkpoint of the user's own around two blocks each: the input of the second is computed again."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks, self.options = nn.ModuleList(Doubles() for _ in range(4)), options
        self.order = [(0, 1), (2, 3)]

    def _pair(self, pair: tuple[int, int], x: torch.Tensor) -> torch.Tensor:
        for index in pair:
            before, x = x, self.blocks[index](x)
            self.inputs.setdefault(index, before.detach())
            self.added.setdefault(index, (x - before).detach())
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inputs, self.added = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        x = x.requires_grad_()
        for pair in self.order:
            x = checkpoint(self._pair, pair, x, **self.options)
        return x.sum()


def wrapped_in_parts(model: InPairs, x: torch.Tensor, micro_batch: int) -> InPairs:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = hightide.plan(model, optimizer, x, limits=hightide.Limits("4MiB", "4MiB"), micro_batch=micro_batch)
    blocks = tuple(replace(block, activation=Activation.RECOMPUTE) for block in plan.blocks)
    return hightide.wrap(model, optimizer, x, plan=replace(plan, blocks=blocks))[0]  # type: ignore[return-value]


@pytest.mark.parametrize("micro_batch", [8, 4, 2])
def test_a_checkpoint_around_blocks_draws_what_they_drew(micro_batch: int) -> None:
    model = wrapped_in_parts(InPairs(use_reentrant=False), x := torch.randn(8, WIDTH), micro_batch)
    for _ in range(2):
        model.zero_grad()
        model(x.clone()).backward()
        gradient = 2 * (model.added[3] != 0).float().T @ model.inputs[3]  # the last block's, by hand
        assert torch.allclose(model.blocks[3].linear.weight.grad + 0, gradient, atol=1e-4)
    hightide.unwrap(model)


@pytest.mark.parametrize("how", ["reentrant", "called twice", "two forwards"])
def test_who_repeats_what_is_not_known_must_not_draw(how: str) -> None:
    model = wrapped_in_parts(InPairs(use_reentrant=how == "reentrant"), x := torch.randn(8, WIDTH), 2)
    if how == "called twice":
        model.order = [(0, 1), (2, 3), (0, 1)]
    loss = model(x.clone())
    if how == "two forwards":
        loss = loss + model(x.clone())
    with pytest.raises(hightide.Refused, match=r"'blocks\.\d' draws random numbers and is called again in backward"):
        loss.backward()
