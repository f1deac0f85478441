"""A mixture of experts whose router's loss counts tokens per expert: an operation without a version without values."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers

import hightide
from unit.runtime.steps import adamw, train_step


@pytest.mark.parametrize("gpu", ["500KiB", "64MiB"])
def test_the_routers_loss_is_that_of_plain_pytorch(gpu: str) -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.3,
        use_cache=False,
    )
    model = transformers.MixtralForCausalLM(config).train()
    plain = copy.deepcopy(model)
    tokens = torch.randint(0, 97, (4, 12))
    batch = {"input_ids": tokens, "labels": tokens}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # that it cannot be probed
        limits = hightide.Limits(gpu=gpu, host="8MiB")
        model, optimizer = hightide.wrap(model, adamw(model), batch, limits=limits, device="cpu")
    its_optimizer = adamw(plain)
    for _ in range(4):
        loss, expected = train_step(model, optimizer, batch), train_step(plain, its_optimizer, batch)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    hightide.unwrap(model)
