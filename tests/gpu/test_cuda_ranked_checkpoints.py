"""Two ranks on one GPU, over gloo, save together beside training and go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from started_ranks import StartedRanks

pytestmark = pytest.mark.gpu

PROGRAMS = Path(__file__).resolve().parents[1] / "ranks"


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[StartedRanks]:
    ranks = StartedRanks("ranked_checkpoints", PROGRAMS)
    yield ranks
    ranks.close()


def test_as_many_ranks_go_on_to_the_bit(on_gpu: StartedRanks, tmp_path: Path) -> None:
    """With the random numbers of the GPU that each draws from."""
    own = {"subject": "llama_dropout", "dtype": "bfloat16", "where": "mixed", "device": "cuda:0"}
    saved = on_gpu.run("save_then_train", 2, 110.0, folder=str(tmp_path), **own)
    again = on_gpu.run("load_then_train", 2, 110.0, folder=str(tmp_path), again=str(tmp_path / "again"), **own)
    for one, other in zip(saved, again, strict=True):
        assert {name: other.result[name] for name in one.result} == one.result
