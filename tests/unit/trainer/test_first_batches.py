"""The example is what training begins with, and training does not notice that it was taken."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from hightide.trainer.first_batches import ReplayedStream, first_batches, first_call, kept_generators, replayed
from trainers import fresh_accelerate, plain_trainer, rows


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    with fresh_accelerate():
        yield


class Drawn(IterableDataset[Any]):
    """Random samples, from the generators of everybody, anew each time."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(9):
            ids = torch.randint(1, 90, (6,)) + random.randrange(3)
            yield {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("options", [{}, {"accelerator_config": {"use_seedable_sampler": False}}])
def test_training_begins_with_them(options: dict[str, Any], tmp_path: Path) -> None:
    for dataset in (rows(24, 1), Drawn()):
        trainer = plain_trainer(tmp_path, **options)
        trainer.train_dataset = dataset
        states = torch.get_rng_state(), random.getstate()
        found = first_batches(trainer, 2)
        assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
        assert not trainer.accelerator._dataloaders
        assert not trainer.accelerator.gradient_state.in_dataloader
        for batch, expected in zip(found, trainer.get_train_dataloader(), strict=False):
            assert torch.equal(batch["input_ids"], expected["input_ids"])


class Once(IterableDataset[Any]):
    name = "once"

    def __init__(self) -> None:
        self.samples = iter(range(6))

    def __iter__(self) -> Iterator[int]:
        return self.samples


class ReadOn(Once):
    """Each iterator is another, and goes on where the one before was."""

    def __iter__(self) -> Iterator[int]:
        yield from self.samples

    def __len__(self) -> int:
        return 6


class Drawing(Once):
    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        random.random()
        return next(self.samples)


class Again(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


@pytest.mark.parametrize("kind", [Once, ReadOn, Drawing, Again])
def test_a_stream_is_given_whole(kind: Any) -> None:
    stream = replayed(kind(), 0)
    assert isinstance(stream, ReplayedStream) and replayed(stream, 0) is stream
    for number in (2, 3):  # looked into twice
        stream.is_look = True
        look = iter(stream)
        assert [next(look) for _ in range(number)] == [0, 1, 2][:number]
        stream.is_look = False
    assert list(stream) == [0, 1, 2, 3, 4, 5]
    assert list(stream) == ([0, 1, 2, 3, 4, 5] if kind is Again else [])
    assert not isinstance(replayed(kind(), 2), ReplayedStream), "each worker has a copy"


def test_a_stream_is_what_it_was() -> None:
    assert replayed(Once(), 0).name == "once" and len(replayed(ReadOn(), 0)) == 6
    with pytest.raises(TypeError):
        len(replayed(Once(), 0))
    ordered: Any = Again()
    ordered.set_epoch = lambda epoch: None
    assert replayed(ordered, 0) is ordered


def test_what_draws_from_the_generators_that_are_put_back_begins_anew() -> None:
    torch.manual_seed(0)
    random.seed(0)
    expected = [sample["input_ids"].tolist() for sample in Drawn()]
    torch.manual_seed(0)
    random.seed(0)
    stream = replayed(Drawn(), 0)
    with kept_generators():
        stream.is_look = True
        next(iter(stream))
        stream.is_look = False
    assert [sample["input_ids"].tolist() for sample in stream] == expected


def test_no_batch_at_all(tmp_path: Path) -> None:
    trainer = plain_trainer(tmp_path)
    trainer.get_train_dataloader = list
    with pytest.raises(ValueError, match="no batch"):
        first_batches(trainer, 1)


def test_the_call_is_the_one_that_compute_loss_makes(tmp_path: Path) -> None:
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.ones(2, 3, dtype=torch.long)}
    assert first_call(plain_trainer(tmp_path), batch).keys() == {"input_ids", "labels", "num_items_in_batch"}
    assert first_call(plain_trainer(tmp_path, label_smoothing_factor=0.1), batch).keys() == {
        "input_ids",
        "num_items_in_batch",
    }
    trainer = plain_trainer(tmp_path)
    trainer.compute_loss = lambda model, inputs, **_: model(inputs["input_ids"], use_cache=False, fused=True)
    found = first_call(trainer, batch)
    assert found.keys() == {"input_ids", "use_cache", "fused"} and found["fused"] is True
    trainer.compute_loss = lambda model, inputs, **_: torch.zeros(())
    with pytest.raises(ValueError, match="does not call the model"):
        first_call(trainer, batch)
