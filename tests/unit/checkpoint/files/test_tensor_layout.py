"""A header is what the format's own library reads, known before any value is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hightide.checkpoint.files.tensor_layout import DTYPE_NAMES, Entry, header
from hightide.loading.tensor_file import ALL_DTYPES, read_header


def test_values_begin_aligned_and_read_back(tmp_path: Path) -> None:
    tensors = {f"{'x' * index}é/{dtype}": torch.ones(index, 3).to(dtype) for index, dtype in enumerate(DTYPE_NAMES)}
    head = header([Entry(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()], {"format": "pt"})
    assert len(head) % 8 == 0
    path = tmp_path / "a.safetensors"
    path.write_bytes(head + b"".join(bytes(value.flatten().view(torch.uint8).tolist()) for value in tensors.values()))
    for found in (load_file(path), {name: one.read() for name, one in read_header(path, ALL_DTYPES).items()}):
        assert found.keys() == tensors.keys()
        for name, value in tensors.items():
            assert found[name].dtype == value.dtype and found[name].shape == value.shape
            assert torch.equal(found[name].to(torch.complex64), value.to(torch.complex64))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_states_of_8_bits_are_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(header([Entry("x", torch.float8_e5m2, (1,))], {}) + b"0")
    with pytest.raises(ValueError, match="F8_E5M2"):
        read_header(path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([Entry("x", torch.float32, ()), Entry("x", torch.float32, (2,))], "two tensors of the name 'x'"),
        ([Entry("__metadata__", torch.float32, ())], "two tensors"),
        ([Entry("x", torch.complex128, ())], "complex128"),
    ],
)
def test_what_no_file_can_have(entries: list[Entry], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        header(entries, {})
