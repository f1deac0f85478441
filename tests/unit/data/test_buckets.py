"""Padding to a few lengths: which lengths, what is padded with what, and that no loss changes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from hightide.data.buckets import PadToBucket, bucket_lengths
from models import VOCABULARY, llama, t5

PAD = 0


def stacked(examples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    return {key: torch.stack([example[key] for example in examples]) for key in examples[0]}


def examples_of(length: int, count: int = 3) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, VOCABULARY, (count, length))
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


@given(longest=st.integers(1, 5000), count=st.integers(1, 9), multiple=st.integers(1, 300))
def test_bucket_lengths(longest: int, count: int, multiple: int) -> None:
    lengths = bucket_lengths(longest, count, multiple)
    assert 1 <= len(lengths) <= count and lengths[-1] == longest
    assert list(lengths) == sorted(set(lengths))
    assert all(length % multiple == 0 for length in lengths[:-1])
    assert max(b - a for a, b in zip((0, *lengths), lengths, strict=False)) < longest / count + 2 * multiple


def test_bucket_lengths_of_a_model() -> None:
    assert bucket_lengths(2048) == (512, 1024, 1536, 2048)
    assert bucket_lengths(1000) == (256, 512, 768, 1000)
    assert bucket_lengths(40) == (40,)
    for wrong in ({"longest": 0}, {"longest": 8, "count": 0}, {"longest": 8, "multiple": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            bucket_lengths(**wrong)


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_tensor_gets_its_value(side: Any) -> None:
    def collate(examples: list[Any]) -> dict[str, Any]:
        batch = stacked(examples)
        types = torch.ones_like(batch["input_ids"])
        return {**batch, "types": types, "soft": torch.ones(3, 7, 2), "image": torch.ones(3, 5), "count": 9}

    pad = PadToBucket(collate, (4, 8), pad_values={"input_ids": PAD, "types": 5, "soft": 2}, side=side)
    batch = pickle.loads(pickle.dumps(PadToBucket(stacked, (4, 8), pad_values={"input_ids": PAD}, side=side)))
    for result in (pad(examples_of(7)), batch(examples_of(7))):
        place = 0 if side == "left" else -1
        assert result["input_ids"].shape == result["labels"].shape == result["attention_mask"].shape == (3, 8)
        assert (result["input_ids"][:, place] == PAD).all() and (result["input_ids"] == PAD).sum() == 3
        assert (result["labels"][:, place] == -100).all() and (result["labels"] == -100).sum() == 3
        assert (result["attention_mask"][:, place] == 0).all() and result["attention_mask"].sum() == 21
    result = pad(examples_of(7))
    assert result["types"].sum() == 3 * (7 + 5) and result["soft"].shape == (3, 8, 2)
    assert (result["soft"][:, place] == 2).all() and result["image"].shape == (3, 5) and result["count"] == 9


def test_what_fits_a_bucket_stays() -> None:
    pad = PadToBucket(stacked, (4, 8), pad_values={"input_ids": PAD})
    assert set(pad(examples_of(4))) == {"input_ids", "labels"}
    assert pad(examples_of(1))["input_ids"].shape == (3, 4)


def test_packed_sequences_get_no_mask() -> None:
    """With a mask transformers would let them see each other."""

    def packed(examples: list[Any]) -> dict[str, Any]:
        return {**stacked(examples), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}

    with pytest.raises(ValueError, match="position_ids has as many entries"):
        PadToBucket(packed, (8,), pad_values={"input_ids": PAD})(examples_of(6, 1))
    batch = PadToBucket(packed, (8,), pad_values={"input_ids": PAD, "position_ids": 0})(examples_of(6, 1))
    assert "attention_mask" not in batch and batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]


def test_refused() -> None:
    pad = PadToBucket(stacked, (4, 8), pad_values={"input_ids": PAD})
    with pytest.raises(ValueError, match=r"9 tokens long, and the longest bucket has 8: cut the examples to 8 tokens"):
        pad(examples_of(9))
    with pytest.raises(ValueError, match="types has as many entries per sample as there are tokens"):
        pad([{**example, "types": example["labels"]} for example in examples_of(3)])
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        pad([{**example, "cu_seq_lens_q": torch.tensor([0, 3])} for example in examples_of(3)])
    with pytest.raises(ValueError, match="masks of samples x tokens"):
        pad([{**example, "attention_mask": torch.ones(3, 3)} for example in examples_of(3)])
    with pytest.raises(ValueError, match="nothing in the batch says how long it is"):
        PadToBucket(stacked, (8,), pad_values={})([{"input_ids": torch.ones(3)}])
    with pytest.raises(ValueError, match="a dict of tensors is padded"):
        PadToBucket(tuple, (8,), pad_values={"input_ids": PAD})(examples_of(3))  # type: ignore[arg-type]
    for lengths in ((), (0, 8), (8, 8), (8, 4)):
        with pytest.raises(ValueError, match="positive and increasing"):
            PadToBucket(stacked, lengths, pad_values={"input_ids": PAD})
    with pytest.raises(ValueError, match="side is 'top'"):
        PadToBucket(stacked, (8,), pad_values={"input_ids": PAD}, side="top")  # type: ignore[arg-type]


def test_losses_of_a_causal_model_are_those_of_the_batch_unpadded() -> None:
    model, _ = llama()
    model.eval()
    pad = PadToBucket(stacked, (4, 8, 16), pad_values={"input_ids": PAD})
    for length in (2, 7, 10, 16):
        examples = examples_of(length)
        plain, padded = model(**stacked(examples)), model(**pad(examples))
        torch.testing.assert_close(padded.loss, plain.loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(padded.logits[:, :length], plain.logits, rtol=1e-5, atol=1e-6)


def test_an_encoder_and_a_decoder_have_lengths_of_their_own() -> None:
    model, _ = t5()
    model.eval()
    examples = [
        {"input_ids": torch.randint(3, VOCABULARY, (7,)), "labels": torch.randint(3, VOCABULARY, (3,))}
        for _ in range(2)
    ]
    batch = PadToBucket(stacked, (4, 8), pad_values={"input_ids": PAD})(examples)
    assert batch["input_ids"].shape == (2, 8) and batch["labels"].shape == (2, 4)
    torch.testing.assert_close(model(**batch).loss, model(**stacked(examples)).loss, rtol=1e-6, atol=0)


def test_labels_of_classes_stay() -> None:
    def collate(examples: list[Any]) -> dict[str, Any]:
        ids = torch.stack([example["input_ids"] for example in examples])
        return transformers.BatchEncoding({"input_ids": ids, "labels": torch.ones(3, 5)})

    batch = PadToBucket(collate, (4, 8), pad_values={"input_ids": PAD})(examples_of(7))
    assert isinstance(batch, transformers.BatchEncoding)
    assert batch["labels"].shape == (3, 5) and batch["attention_mask"].shape == (3, 8)
