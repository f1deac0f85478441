"""Tensors over files: as they come, each where readers expect it, and none beyond the size of a shard."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from hightide.checkpoint import shards
from hightide.checkpoint.files.tensor_layout import Entry
from hightide.checkpoint.files.writer import CheckpointWriter
from hightide.checkpoint.shards import ModelShards, Shards
from hightide.integrations.model_files import MODEL, Named, Written
from hightide.loading.tensor_file import read_header

TENSORS = {
    "odd": torch.arange(7, dtype=torch.bfloat16),
    "wide": torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    "byte": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 4),
    "plain": torch.randn(64, 8, generator=torch.Generator().manual_seed(1)),
    "single": torch.tensor(3.0, dtype=torch.float16),
    "last": torch.arange(12, dtype=torch.int32),
}


def entries() -> list[Entry]:
    return [Entry(name, value.dtype, tuple(value.shape)) for name, value in TENSORS.items()]


def put(target: Shards | ModelShards, name: str, value: Tensor) -> None:
    for part in value.view(-1).split(5) or (value.view(-1),):
        target.put(name, part)


def written(path: Path) -> dict[str, Tensor]:
    """As the format's own library reads them."""
    files = sorted(path.glob("*.safetensors"))
    for file in files:
        assert all(one.offset % max(1, one.dtype.itemsize) == 0 for one in read_header(file).values()), file.name
    return {name: value for file in files for name, value in safetensors.torch.load_file(file).items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name


@pytest.mark.parametrize(("max_bytes", "num_files"), [(10**9, 1), (2048 + 200, 1), (2048 + 100, 2), (1, 6)])
def test_all_are_there_each_at_a_multiple_of_its_size(
    max_bytes: int, num_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "MAX_SHARD_BYTES", max_bytes)
    with CheckpointWriter(tmp_path, 1) as writer:
        files = Shards(writer, MODEL, entries())
        for name, value in TENSORS.items():
            put(files, name, value)
        files.finish()
        index = next(iter(shards.index_of(files.files, 5).values()), None)
        path = writer.commit({})
    assert_equal(written(path), TENSORS)
    names = sorted(file.name for file in path.glob("*.safetensors"))
    if num_files == 1:
        assert names == ["model.safetensors"] and index is None
    else:
        assert names[0] == f"model-00001-of-{len(names):05d}.safetensors" and len(names) >= num_files
        assert index is not None
        content = json.loads(index)
        assert content["metadata"] == {
            "total_parameters": 5,
            "total_size": sum(value.nbytes for value in TENSORS.values()),
        }
        assert {name: file for file in names for name in read_header(path / file)} == content["weight_map"]


def test_of_equal_elements_none_waits(tmp_path: Path) -> None:
    """What waits is in memory."""
    tensors = {name: torch.randn(numel) for name, numel in (("a", 3), ("b", 1), ("c", 5))}
    with CheckpointWriter(tmp_path, 1) as writer:
        files = Shards(writer, MODEL, [Entry(name, one.dtype, tuple(one.shape)) for name, one in tensors.items()])
        assert not files._waiting
        for name, value in tensors.items():
            put(files, name, value)
        files.finish()
        path = writer.commit({})
    assert_equal(written(path), tensors)


def test_very_many_tensors_take_no_time(tmp_path: Path) -> None:
    many, began_s = [Entry(f"{number}", torch.float32, (2,)) for number in range(30_000)], time.process_time()
    with CheckpointWriter(tmp_path, 1) as writer:
        assert sum(map(len, Shards(writer, MODEL, many).files.values())) == len(many)
    assert time.process_time() - began_s < 5, (
        "it takes a quarter of a second, and two minutes if files are added up anew"
    )


def test_what_is_converted_waits_for_all_of_its_sources(tmp_path: Path) -> None:
    """One tensor in two files, or twice in one, or joined with another."""
    whole = Named("joined", torch.float32, (6, 4))
    one, other = torch.randn(2, 4), torch.randn(4, 4)
    files = (
        Written("model", ("alone",), (Named("first", torch.float32, (8,)),)),
        Written("model", ("alone",), (Named("again", torch.float32, (8,)),)),
        Written("trained", ("alone",), (Named("elsewhere", torch.float32, (8,)),)),
        Written(
            "model", ("one", "other"), (whole,), lambda values: {"joined": torch.cat([values["one"], values["other"]])}
        ),
    )
    alone = torch.randn(8)
    order = [
        Named("one", torch.float32, (2, 4)),
        Named("alone", torch.float32, (8,)),
        Named("other", torch.float32, (4, 4)),
    ]
    with CheckpointWriter(tmp_path, 1) as writer:
        target = ModelShards(writer, files, order)
        for name, value in (("one", one), ("alone", alone), ("other", other)):
            put(target, name, value)
        assert target.finish(0) == {}
        path = writer.commit({})
    expected = {"first": alone, "again": alone, "elsewhere": alone, "joined": torch.cat([one, other])}
    assert_equal(written(path), expected)
