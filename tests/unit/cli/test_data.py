"""The same settings mean the same text and the same batches."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import pytest
import torch

from hightide.cli.config import DataConfig
from hightide.cli.data import Batches, read_text


def test_default_text_is_python_source_up_to_the_cap() -> None:
    text = read_text(DataConfig(text_bytes=100_000))
    assert len(text) == 100_000
    assert b"import " in bytes(text.tolist())


def test_a_folder_is_read_in_sorted_order_without_installed_packages(tmp_path: Path) -> None:
    for name, content in {"b.py": "bb", "a.py": "aa", "c.txt": "no", "site-packages/d.py": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    text = read_text(DataConfig(path=str(tmp_path), sequence_bytes=2))
    assert bytes(text.tolist()) == b"aabb"


def test_too_little_text_is_refused_with_both_sizes(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(ValueError, match=r"3 bytes of text, but one sequence is 128 bytes"):
        read_text(DataConfig(path=str(tmp_path / "short.txt")))


def test_a_missing_text_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the text file .*absent.txt"):
        read_text(DataConfig(path=str(tmp_path / "absent.txt")))


def test_batches_are_windows_of_the_text_and_depend_on_the_seed_only() -> None:
    config = DataConfig(sequences=3, sequence_bytes=8)
    text = torch.arange(200, dtype=torch.uint8)
    first, again = (list(islice(Batches(text, config, seed=1), 4)) for _ in range(2))
    (other,) = islice(Batches(text, config, seed=2), 1)
    for left, right in zip(first, again, strict=True):
        assert torch.equal(left["input_ids"], right["input_ids"])
    assert not torch.equal(first[0]["input_ids"], other["input_ids"])
    assert not torch.equal(first[0]["input_ids"], first[1]["input_ids"])
    windows = first[0]["input_ids"]
    assert windows.shape == (3, 8) and windows.dtype == torch.int64
    assert torch.equal(windows - windows[:, :1], torch.arange(8).expand(3, 8))
    assert torch.equal(first[0]["labels"], windows)


def test_batches_go_on_where_others_stand_without_drawing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DataConfig(sequences=3, sequence_bytes=8)
    text = torch.arange(200, dtype=torch.uint8)
    whole = [batch["input_ids"] for batch in islice(Batches(text, config, seed=1), 6)]
    first = Batches(text, config, seed=1)
    for _ in range(4):
        next(first)
    rest = Batches(text, config, seed=1)
    num_drawn = 0
    draw = torch.randint

    def counted(*args: object, **options: object) -> torch.Tensor:
        nonlocal num_drawn
        num_drawn += 1
        return draw(*args, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "randint", counted)
    rest.load_state_dict(first.state_dict())
    for expected, batch in zip(whole[4:], rest, strict=False):
        assert torch.equal(batch["input_ids"], expected)
    assert num_drawn == 2


@pytest.mark.parametrize("state", [{}, {"generator": None}, {"generator": torch.zeros(3, dtype=torch.uint8)}, [], None])
def test_a_state_that_is_none_of_batches_is_refused(state: object) -> None:
    stream = Batches(torch.arange(200, dtype=torch.uint8), DataConfig(sequences=3, sequence_bytes=8), seed=1)
    with pytest.raises(ValueError, match="is no place in the data"):
        stream.load_state_dict(state)


def test_only_so_much_of_a_file_is_read(tmp_path: Path) -> None:
    """The file is larger than the memory of most machines, and takes no room on the disk."""
    with (tmp_path / "large").open("wb") as file:
        file.write(b"beginning")
        file.truncate(1 << 42)
    text = read_text(DataConfig(path=str(tmp_path / "large"), text_bytes=1000, sequence_bytes=4))
    assert len(text) == 1000 and bytes(text[:9].tolist()) == b"beginning"


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "nul\0"])
def test_what_has_no_end_is_no_text(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"cannot read the text file.*(pipe or a device|null)"):
        read_text(DataConfig(path=str(tmp_path / name)))


def test_a_file_may_hold_any_bytes(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    assert read_text(DataConfig(path=str(tmp_path / "bytes"))).tolist() == list(range(256))


def test_in_a_folder_only_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.py")
    (tmp_path / "b.py").symlink_to("gone")  # as editors leave them
    (tmp_path / "c.py").mkdir()
    (tmp_path / "d.py").write_text("text" * 10)
    assert len(read_text(DataConfig(path=str(tmp_path), sequence_bytes=2))) == 40
