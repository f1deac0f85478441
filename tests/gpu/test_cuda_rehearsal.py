"""The rehearsal on a real GPU: times by its own events, true peaks, and nothing left behind."""

from __future__ import annotations

import time

import pytest
import torch

import models
from hightide.rehearsal.rehearse import let_go
from unit.rehearsal.rehearsals import rehearse

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("error:.*cannot be compiled")  # blocks that take less than torch.compile itself, too
@pytest.mark.parametrize("compile", [False, True])
def test_a_rehearsal_measures_and_leaves_nothing(compile: bool) -> None:
    device = torch.device("cuda", 0)
    model, batch = models.llama(num_layers=3)
    model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    torch.mm(*(torch.ones(8, 8, device=device, dtype=torch.bfloat16) for _ in range(2)))  # workspaces stay
    let_go(device)
    before_bytes = torch.cuda.memory_allocated(device)
    _, costs = rehearse(model, optimizer, batch, device=device, compile=compile, sizes=[2, 6])
    # Each stream and thread that multiplies has a workspace, and keeps it.
    assert torch.cuda.memory_allocated(device) - before_bytes < 100 * 2**20
    layer, peaks = costs.calls[1], costs.peaks[1]
    assert all(0 < seconds < 0.1 for seconds in layer.forward_s.values + layer.backward_s.values)
    assert peaks.kept_bytes.at(6) > peaks.kept_bytes.at(2) > 0
    assert costs.memory_bytes_per_s > 1e11 and costs.update_bytes_per_s > 5e10
    assert costs.loss is not None and 0 < costs.loss.forward_s < 0.1


@pytest.mark.alone
def test_a_layer_of_8b_shape_takes_seconds() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(128256, (8, 2048))
    started_s = time.perf_counter()
    _, costs = rehearse(
        model, optimizer, {"input_ids": tokens, "labels": tokens}, device=torch.device("cuda", 0), sizes=[1, 8]
    )
    assert time.perf_counter() - started_s < 10.0
    assert costs.calls[1].forward_s.at(8) > costs.calls[1].forward_s.at(1)
