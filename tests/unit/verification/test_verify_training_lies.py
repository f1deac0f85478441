"""A wrong step is found, and found where it is wrong: each test makes hightide do one thing wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hightide
import models
from hightide.ir.refusal import Refused
from hightide.optim.chunk_updates import ChunkUpdates
from hightide.optim.groups import Groups
from hightide.runtime.blocks.rng import Draws
from hightide.runtime.gradients.gradients import Gradients
from hightide.runtime.run import Run
from hightide.runtime.surgery import WrappedBlock

BLOCK = "layers.1"


def verified(model: nn.Module | None = None, batch: Any = None, **options: Any) -> hightide.Verdict:
    if model is None:
        model, batch = models.hand_written(num_layers=3, num_samples=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    verdict = hightide.verify(model, optimizer, batch, **options)
    assert all(len(line) <= 80 for line in str(verdict).splitlines())
    return verdict


def assert_first(verdict: hightide.Verdict, what: str, where: str, step: int) -> None:
    assert not verdict.equal and verdict.first is not None, verdict
    assert (verdict.first.what, verdict.first.step) == (what, step), verdict
    assert verdict.first.where.startswith(where), verdict
    assert str(verdict).startswith("NOT equal: first differs in"), verdict


def patch_block(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """`change(module, output)` of the block, called in each of its forwards in hightide."""
    forward = WrappedBlock.forward

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        return change(self, output) if self.hightide_runner.spec.name == BLOCK else output

    monkeypatch.setattr(WrappedBlock, "forward", wrong)


def test_a_forward_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_block(monkeypatch, lambda module, output: output * 1.0003)
    verdict = verified()
    assert_first(verdict, "output", BLOCK, 1)
    before = [row for row in verdict.rows if row.what == "output" and row.where in ("first", "layers.0")]
    assert before and all(row.equal for row in before if row.step == 1)


def test_a_gradient_that_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    harvest = Gradients.harvest

    def wrong(self: Gradients, chunk: int, block: int | None) -> None:
        parameter = self._chunks.parameters["layers.1.mlp.0.weight"]
        if any(entry.param == "layers.1.mlp.0.weight" for entry in self._entries[chunk]) and parameter.grad is not None:
            parameter.grad.data.mul_(1.001)
        harvest(self, chunk, block)

    monkeypatch.setattr(Gradients, "harvest", wrong)
    assert_first(verified(), "gradient", "layers.1.mlp.0.weight", 1)


def test_a_gradient_that_does_not_reach_the_blocks_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the last micro-batch were left out of a backward: that block's own gradients are the first to differ."""

    def drop(module: nn.Module, output: Tensor) -> Tensor:
        if output.requires_grad:
            output.register_hook(lambda gradient: torch.cat([gradient[:4], torch.zeros_like(gradient[4:])]))
        return output

    patch_block(monkeypatch, drop)
    verdict = verified()
    assert_first(verdict, "gradient", BLOCK, 1)
    after = [
        row for row in verdict.rows if row.what == "gradient" and row.step == 1 and row.where.startswith("layers.2")
    ]
    assert after and all(row.equal for row in after), "backward was right until there"


def block_chunk(updates: ChunkUpdates, chunk: int) -> bool:
    return any(entry.param.startswith(BLOCK) for entry in updates._chunks.specs[chunk].params)


def test_an_update_that_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = ChunkUpdates._apply
    monkeypatch.setattr(
        ChunkUpdates, "_apply", lambda self, chunk, *rest: block_chunk(self, chunk) or apply(self, chunk, *rest)
    )
    verdict = verified()
    assert_first(verdict, "output", BLOCK, 2)
    assert "its update there, or the weights used now, are wrong" in " ".join(str(verdict).split())
    wrong = {row.where for row in verdict.rows if row.what == "exp_avg" and row.hightide == 0.0 and not row.equal}
    assert wrong and all(name.startswith(BLOCK) for name in wrong)


def test_an_update_that_is_skipped_in_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = ChunkUpdates._apply
    monkeypatch.setattr(
        ChunkUpdates, "_apply", lambda self, chunk, *rest: block_chunk(self, chunk) or apply(self, chunk, *rest)
    )
    assert_first(verified(steps=1), "update", BLOCK, 1)


def test_a_forward_with_the_weights_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update arrives one forward too late, and at the end all is where it belongs."""
    apply = ChunkUpdates._apply
    late: dict[int, Tensor] = {}

    def wrong(self: ChunkUpdates, chunk: int, *rest: Any) -> None:
        if not block_chunk(self, chunk):
            return apply(self, chunk, *rest)
        weights = self._whole(chunk, self._chunks.update_arrays(chunk)).master_values()
        if chunk in late:
            weights.copy_(late.pop(chunk))
            return apply(self, chunk, *rest)
        old = weights.clone()
        apply(self, chunk, *rest)
        late[chunk] = weights.clone()
        weights.copy_(old)

    monkeypatch.setattr(ChunkUpdates, "_apply", wrong)
    assert_first(verified(), "output", BLOCK, 2)


def test_a_learning_rate_that_is_a_little_off(monkeypatch: pytest.MonkeyPatch) -> None:
    hyper = Groups.hyper

    def wrong(self: Groups, group: int) -> Any:
        right = hyper(self, group)
        return type(right)(**{**vars(right), "lr": right.lr * 1.001})

    monkeypatch.setattr(Groups, "hyper", wrong)
    verdict = verified(steps=1)
    assert_first(verdict, "update", "", 1)


def test_masks_that_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def wrong(self: Draws, micro_batch: int) -> Iterator[None]:
        yield

    monkeypatch.setattr(Draws, "replay", wrong)
    model, batch = models.hand_written(num_layers=3, num_samples=6, dropout=0.3)
    verdict = verified(model, batch)
    assert_first(verdict, "gradient", "layers.2", 1)  # the first whose backward draws
    assert verdict.first is not None and verdict.first.run == verdict.runs[2] and "random as it is" in verdict.runs[2]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum() / 7


def test_statistics_that_are_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def count_again(module: nn.Module, output: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            module[1].running_var.mul_(1.01)  # type: ignore[index,union-attr,operator]
        return output

    patch_block(monkeypatch, count_again)
    verdict = verified(Normed(), torch.randn(6, 8))
    assert not verdict.equal
    wrong = {row.where for row in verdict.rows if row.what == "buffer" and not row.equal}
    assert "layers.1.1.running_var" in wrong
    assert any(row.what == "output" and row.step == 0 and row.where == BLOCK for row in verdict.rows if not row.equal)


def test_an_evaluation_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_block(monkeypatch, lambda module, output: output if torch.is_grad_enabled() else output * 1.001)
    assert_first(verified(), "output", BLOCK, 0)


def test_a_gradient_norm_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = Gradients.norm
    monkeypatch.setattr(Gradients, "norm", lambda *args: norm(*args) * 1.001)
    assert_first(verified(), "gradient norm", "", 1)


def test_a_random_state_that_moves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(module: nn.Module, output: Tensor) -> Tensor:
        torch.rand(())
        return output

    patch_block(monkeypatch, draw)
    assert_first(verified(), "random state", "torch", 0)


def test_weights_that_were_loaded_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one that no forward uses: only its value tells."""
    value_of = Run.value_of

    def wrong(self: Run, key: str, borrow: bool = False) -> Tensor:
        value = value_of(self, key, borrow)
        return value + 1e-3 if key == "never.weight" else value

    monkeypatch.setattr(Run, "value_of", wrong)
    model, batch = models.hand_written(num_layers=2, num_samples=6, unused=True)
    assert_first(verified(model, batch), "update", "never.weight", 2)


def test_values_that_are_not_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_block(monkeypatch, lambda module, output: torch.full_like(output, float("nan")))
    verdict = verified()
    assert_first(verdict, "output", BLOCK, 1)
    assert verdict.first is not None and verdict.first.difference == float("inf")


def test_a_gradient_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_block(monkeypatch, lambda module, output: output.detach())
    verdict = verified()
    assert not verdict.equal
    assert any(row.what == "gradient" and row.where.startswith(BLOCK) for row in verdict.rows if not row.equal), verdict


def test_what_hightide_raises_is_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: nn.Module, output: Tensor) -> Tensor:
        raise IndexError("lost in a slot")

    patch_block(monkeypatch, fail)
    verdict = verified()
    assert not verdict.equal and not verdict.refusal and verdict.failure == "IndexError: lost in a slot"
    assert str(verdict).startswith("NOT equal: hightide raised IndexError: lost in a slot, and plain PyTorch did not")


def test_what_hightide_refuses_in_a_step_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: nn.Module, output: Tensor) -> Tensor:
        raise Refused("p.norm() outside of a block; call it elsewhere")

    patch_block(monkeypatch, refuse)
    verdict = verified()
    assert not verdict.equal and not verdict.failure
    assert verdict.refusal == "p.norm() outside of a block; call it elsewhere"
    assert str(verdict).startswith("REFUSED: p.norm() outside of a block")


def test_a_difference_is_said_before_what_is_refused_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_block(monkeypatch, lambda module, output: output * 1.01)
    limits = hightide.Limits(gpu="8KiB", host="8MiB")
    verdict = verified(limits=limits)
    assert_first(verdict, "output", BLOCK, 1)
    assert verdict.refusal and "; then hightide refused: " in " ".join(str(verdict).split())


def test_what_wrap_raises_is_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Run) -> None:
        raise ZeroDivisionError("no slots")

    monkeypatch.setattr(Run, "fix_memory", fail)
    verdict = verified()
    assert not verdict.equal and verdict.failure == "ZeroDivisionError: no slots" and not verdict.rows
