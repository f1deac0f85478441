"""Sequences that share a row do not see each other: each model type that is said to keep them apart has the losses and
gradients of single sequences, in hightide as in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hightide
from hightide.data.batches import Batches
from hightide.data.packing import SEPARATED, pack
from hightide.data.tokens import RowKind, Sequences

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 97, 24
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_local_experts": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "embedding_dropout": 0.0,
}
DEFAULT = ("llama", "qwen2", "gemma2")  # plain, with biases, with windows and capped scores


def sequences() -> Sequences:
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 9, 7, 3, 11, 6, 2, 4]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.randint(3, VOCABULARY, (int(starts[-1]),), generator=generator, dtype=torch.int32)
    is_learned = torch.rand(len(ids), generator=generator) < 0.7
    is_learned[starts[:-1]] = False
    is_learned[starts[1:] - 1] = True
    return Sequences(ids, is_learned, starts, RowKind.CHAT)


def made(model_type: str) -> Any:
    torch.manual_seed(0)
    kind = transformers.CONFIG_MAPPING[model_type]
    config = kind(**SIZES, **({"sliding_window": 6} if model_type in ("mistral", "gemma2", "starcoder2") else {}))
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def alone(model: Any, data: Sequences) -> tuple[float, list[torch.Tensor]]:
    """Each sequence in a call of its own; the mean over all tokens that are learned."""
    total = int(data.is_learned.sum())
    value = 0.0
    for begin, end in zip(data.starts.tolist(), data.starts.tolist()[1:], strict=False):
        ids, learned = data.ids[begin:end].long(), data.is_learned[begin:end]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits[learned[1:]], ids[1:][learned[1:]], reduction="sum") / total
        loss.backward()
        value += loss.item()
    gradients = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    return value, gradients


@pytest.mark.parametrize(
    "model_type",
    [*DEFAULT, *(pytest.param(one, marks=pytest.mark.long) for one in sorted(SEPARATED - set(DEFAULT)))],
)
def test_packed_sequences_train_as_if_they_were_alone(model_type: str) -> None:
    model, data = made(model_type), sequences()
    expected, gradients = alone(model, data)
    rows = pack(data, LENGTH)
    assert rows.are_packed and len(rows) < len(data)
    batch = Batches(data, rows, LENGTH, 0, one_shape=True).batch(range(len(rows)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    limits = hightide.Limits(gpu="64MiB", host="256MiB")
    model, optimizer = hightide.wrap(model, optimizer, batch, limits=limits, device="cpu", micro_batch=1)
    loss = model(**batch).loss
    loss.backward()
    found = [param.grad.float() for param in model.parameters() if param.grad is not None]
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert len(found) == len(gradients)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_what_the_test_above_relies_on() -> None:
    """Without positions that begin again, sequences of a row do see each other."""
    model, data = made("llama"), sequences()
    expected, _ = alone(model, data)
    batch = Batches(data, pack(data, LENGTH), LENGTH, 0, one_shape=True).batch(range(2))
    del batch["position_ids"]
    assert model(**batch).loss.item() != pytest.approx(expected, rel=1e-4)
