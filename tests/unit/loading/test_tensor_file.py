"""Tensors are read from safetensors files as the format's own reader reads them, into memory that exists already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hightide.loading import tensor_file
from hightide.loading.tensor_file import read_header, same_values


def tensors() -> dict[str, Tensor]:
    return {
        "matrix": torch.randn(7, 11),
        "half": torch.randn(5, 3).to(torch.bfloat16),
        "steps": torch.arange(9),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def test_all_tensors_are_found_and_read(tmp_path: Path) -> None:
    values = tensors()
    save_file(values, tmp_path / "file", metadata={"format": "pt"})
    stored = read_header(tmp_path / "file")
    assert set(stored) == set(values)
    for name, value in values.items():
        assert (stored[name].shape, stored[name].dtype) == (tuple(value.shape), value.dtype)
        assert torch.equal(stored[name].read(), value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_are_converted_piece_by_piece(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.randn(13, 17)
    save_file({"x": value}, tmp_path / "file")
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 100)  # 25 elements: the last piece is shorter
    target = torch.full((13, 17), float("nan"), dtype=dtype)
    read_header(tmp_path / "file")["x"].fill(target)
    assert torch.equal(target, value.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_is_read_alone(file: Path, dtype: torch.dtype) -> None:
    stored = read_header(file)["matrix"]
    part = torch.empty(20, dtype=dtype)
    stored.fill_part(part, 13)
    assert torch.equal(part, stored.read().view(-1)[13:33].to(dtype))


def test_reading_fills_only_its_own_place(file: Path) -> None:
    flat = torch.full((100,), 7.0)
    stored = read_header(file)["matrix"]
    stored.fill(flat[10:87].view(7, 11))
    assert torch.equal(flat[10:87].view(7, 11), stored.read())
    assert bool((flat[:10] == 7).all()) and bool((flat[87:] == 7).all())


@pytest.mark.parametrize("num_bytes", [0, 4, 8, 100, -1])
def test_a_damaged_file_is_refused(file: Path, num_bytes: int) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:num_bytes])
    with pytest.raises(ValueError, match="copy it again"):
        read_header(file)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}, "F8_E4M3"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}, "has 4 bytes, its shape takes 16"),
        ({"dtype": "F32", "shape": [4]}, "data_offsets"),
    ],
)
def test_a_strange_header_is_refused(tmp_path: Path, entry: dict[str, object], message: str) -> None:
    header = json.dumps({"x": entry}).encode()
    path = tmp_path / "file"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ValueError, match=message):
        read_header(path)


def written(path: Path, header: bytes, num_bytes: int, length: int | None = None) -> Path:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + bytes(num_bytes))
    return path


def entry(start: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("entries", "num_bytes", "message"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "between 'a' and 'b' is an overlap of 4 bytes"),
        ({"a": entry(0, 8), "b": entry(0, 8)}, 8, "an overlap of 8 bytes"),
        ({"a": entry(0, 8), "b": entry(12, 16)}, 16, "a hole of 4 bytes"),
        ({"a": entry(4, 8)}, 8, "between the header and 'a' is a hole of 4 bytes"),
        ({"a": entry(0, 8)}, 12, "4 bytes behind its last tensor belong to none"),
        ({"a": entry(0, 16)}, 12, "cut off: 4 of its bytes"),
        ({"a": entry(-4, 4)}, 8, "offsets"),
        ({"a": entry(8, 0, [2])}, 8, "has -8 bytes, its shape takes 8"),
        ({"a": entry(0, 2**62, [2**60])}, 8, "cut off"),
        ({"a": entry(0, 2**70)}, 8, "offsets"),
        ({"a": entry(0, 0, [2**40, 2**40, 2**40])}, 8, "has 0 bytes, its shape takes"),
        ({"a": entry(0, 8, [-2])}, 8, "shape"),
        ({"a": entry(0, 8, [True, 2])}, 8, "shape"),
        ({"a": entry(0, 8, dtype="F8_E8M0")}, 8, "'F8_E8M0'"),
        ({"a": {**entry(0, 8), "more": 1}}, 8, "it must have data_offsets, dtype, shape"),
        ({"a": [1]}, 8, "it must have"),
        ({"a": entry(0, 8), "__metadata__": {"b": 1}}, 8, "__metadata__"),
        ([1], 8, "no mapping"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, entries: object, num_bytes: int, message: str) -> None:
    path = written(tmp_path / "file", json.dumps(entries).encode(), num_bytes)
    with pytest.raises(ValueError, match=message) as refused:
        read_header(path)
    assert "copy it again" in str(refused.value)


@pytest.mark.parametrize(
    ("header", "length", "message"),
    [
        (b"{}", 2**63, "no safetensors file"),
        (b"{}", 2**64 - 1, "no safetensors file"),
        (b"[" * 100_000, None, "nested deeper"),
        (b'{"a":' + b"[" * 80 + b"]" * 80 + b"}", None, "nested deeper"),
        (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', None, "given twice"),
        (b'{"a":\xff}', None, "cannot be read"),
        (b"\xef\xbb\xbf{}", None, "no mapping"),
        (b'{"a\\ud800":1}', None, "no Unicode"),
        (b'{"\\u001b[31m":1}', None, "x1b"),
    ],
)
def test_headers_that_are_none_are_refused(tmp_path: Path, header: bytes, length: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        read_header(written(tmp_path / "file", header, 0, length))
    assert len(str(refused.value)) < 1000


def test_a_pointer_of_git_lfs_says_how_to_get_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")
    with pytest.raises(
        ValueError, match=r"file is a pointer of Git LFS, without the file itself; get it: git lfs pull"
    ):
        read_header(tmp_path / "file")


def test_a_header_of_100_megabytes_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "wb") as file:
        file.write((10**8).to_bytes(8, "little") + b"{")
        file.truncate(10**8 + 100)
    with pytest.raises(ValueError, match="its header would have 100000000 bytes"):
        read_header(path)


def test_a_file_that_shrinks_meanwhile_is_an_error(file: Path) -> None:
    stored = read_header(file)
    last = max(stored.values(), key=lambda one: one.offset + one.num_bytes)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="ends 1 bytes before"):
        last.read()


def test_same_values(tmp_path: Path) -> None:
    value = torch.randn(6, 6)
    other = value.clone()
    other[-1, -1] += 1
    save_file({"a": value, "b": value.clone(), "c": other, "d": value.double()}, tmp_path / "file")
    stored = read_header(tmp_path / "file")
    assert same_values(stored["a"], stored["b"])
    assert not same_values(stored["a"], stored["c"])
    assert not same_values(stored["a"], stored["d"])
