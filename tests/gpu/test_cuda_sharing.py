"""Updates that many threads share in C, beside a GPU that copies what they write: the same bits as torch's operations,
and no thread stays behind."""

from __future__ import annotations

import threading

import pytest
import torch

import hightide
import models
from gpu.streamed import wrap
from hightide.ir.chunk import ALIGN_NUMEL
from hightide.optim import host_update as host
from hightide.optim.adam import AdamWRule
from hightide.runtime.lanes.lanes import UPDATER

pytestmark = pytest.mark.gpu


def trained(update: str) -> tuple[str, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, batch = models.llama(num_layers=3)
    model, optimizer = wrap(model.to(torch.bfloat16), batch, update=update)
    for _ in range(20):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    kernel, weights = hightide.stats(model).update_kernel, {key: v.cpu() for key, v in model.state_dict().items()}
    hightide.unwrap(model)
    return kernel, weights


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_shared_in_c_or_by_torch_the_weights_are_the_same_bits(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    monkeypatch.setattr(host, "C_TILE_NUMEL", ALIGN_NUMEL)  # enough tiles for every thread
    kernel, weights = trained(update)
    assert kernel == "c", "a machine with a GPU and no C compiler would be slow, and nobody would know"
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith(UPDATER)]
    monkeypatch.setattr(AdamWRule, "kernel", lambda _: None)
    kernel, expected = trained(update)
    assert kernel == "torch"
    for key, weight in expected.items():
        assert torch.equal(weights[key], weight), key
