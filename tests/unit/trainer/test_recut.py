"""Samples of a step come in other calls, and the sum over them stays."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers

import models
from hightide.trainer.recut import can_join, cut, cut_apart, is_sum_over_samples, joined, lengthened, num_samples


def batch(num_samples: int, length: int, seed: int = 1, mask: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 90, (num_samples, length), generator=generator)
    return {"input_ids": ids, "labels": ids} | ({"attention_mask": torch.ones_like(ids)} if mask else {})


def rows(calls: list[dict[str, Any]]) -> list[list[int]]:
    """What is labelled, sample by sample."""
    return [[token for token in row.tolist() if token != -100] for call in calls for row in call["labels"]]


BATCHES = [batch(3, 4, 1), batch(3, 7, 2), batch(2, 7, 3)]


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8])
def test_every_sample_once_and_in_order(number: int) -> None:
    calls = cut(BATCHES, number)
    sizes = [num_samples(call) or 0 for call in calls]
    assert len(calls) == number and sum(sizes) == 8 and max(sizes) - min(sizes) <= 1
    assert rows(calls) == rows(BATCHES)
    for call in calls:
        assert torch.equal(call["attention_mask"].bool(), call["labels"] != -100)


def test_fewer_samples_than_calls() -> None:
    with pytest.raises(ValueError, match="8 samples cannot be cut into 9 calls"):
        cut(BATCHES, 9)


def test_batches_that_cannot_be_joined_are_cut_by_themselves() -> None:
    calls = cut_apart(BATCHES, 2)
    assert [num_samples(call) for call in calls] == [1, 2, 1, 2, 2] and rows(calls) == rows(BATCHES)


def test_what_can_be_joined() -> None:
    assert can_join(BATCHES)
    assert not can_join([BATCHES[0], batch(3, 7, mask=False)]), "one has a mask"
    positions = [{**one, "position_ids": torch.arange(one["labels"].shape[1]).expand(3, -1)} for one in BATCHES[:2]]
    assert not can_join(positions), "nobody knows what positions of padding are"
    assert can_join([positions[1], positions[1]])
    assert not can_join([{**one, "scores": one["labels"].float()} for one in BATCHES])


def test_samples_of_different_lengths_have_the_loss_that_they_had() -> None:
    """Without a mask too, on a model that is not causal by itself."""
    for build, has_mask in [(models.llama, True), (models.llama, False), (models.gpt2, True)]:
        model = build(num_layers=2)[0].eval()
        parts = [batch(2, 4, 1, has_mask), batch(2, 9, 2, has_mask)]
        apart = sum(float(model(**part, num_items_in_batch=10).loss.detach()) for part in parts)
        together = float(model(**joined(parts), num_items_in_batch=10).loss.detach())
        assert abs(apart - together) < 1e-5 * apart


def test_an_example_is_lengthened_where_that_changes_nothing() -> None:
    one = batch(2, 4, mask=False)
    longer = lengthened(one, 6)
    assert {name: tuple(value.shape) for name, value in longer.items()} == dict.fromkeys(
        ("attention_mask", "input_ids", "labels"), (2, 6)
    )
    assert longer["labels"][:, 4:].eq(-100).all() and longer["attention_mask"].sum() == 8
    assert lengthened(one, 3).keys() == one.keys()
    scored = {**one, "scores": one["labels"].float()}
    assert lengthened(scored, 6)["labels"].shape == (2, 4), "nobody knows what scores of padding are"


def test_whose_loss_is_a_sum() -> None:
    assert is_sum_over_samples(models.llama()[0]) and is_sum_over_samples(models.gpt2()[0])
    adapted: Any = peft.get_peft_model(models.llama()[0], peft.LoraConfig(target_modules=["q_proj"]))  # type: ignore[arg-type]
    assert is_sum_over_samples(adapted.get_base_model())
    for build in (models.bert, models.vit, models.t5, models.plain):
        assert not is_sum_over_samples(build()[0]), build
    mixture: Any = models.qwen3_moe()[0]
    mixture.config.output_router_logits = True
    assert not is_sum_over_samples(mixture), "how evenly experts are used is a mean of a call"

    scaled: Any = models.llama()[0].config
    scaled.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert not is_sum_over_samples(transformers.LlamaForCausalLM(scaled)), "positions follow the longest of a call"

    class OwnLoss(type(models.llama()[0])):  # type: ignore[misc]
        @property
        def loss_function(self) -> Any:
            return lambda logits, labels, vocab_size, **_: logits.float().mean()

    assert not is_sum_over_samples(OwnLoss(models.llama()[0].config))

    class Own(type(models.llama()[0])):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    assert not is_sum_over_samples(Own(models.llama()[0].config))
