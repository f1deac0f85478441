"""Files of every format give the same rows; what cannot be read is named with its line."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hightide.data import readers
from hightide.data.readers import Row, read_rows

LFS_POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
ROWS = [{"prompt": "a, b\nc", "completion": "é"}, {"prompt": "d", "completion": "e"}]


def rows_of(path: Path, most_bytes: int | None = None) -> list[Row]:
    shares: list[float] = []
    found = list(read_rows(path, shares.append, most_bytes))
    assert shares == sorted(shares) and (not found or (0 < shares[-1] <= 1.0))
    return found


def written(folder: Path, kind: str) -> Path:
    path = folder / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(ROWS[0]))
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        datasets = pytest.importorskip("datasets")
        data = datasets.Dataset.from_list(ROWS)
        data.to_parquet(str(path)) if kind == "parquet" else data.save_to_disk(str(path))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "folder"])
def test_every_format_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind)
    found = rows_of(path)
    assert [dict(row.fields) for row in found] == ROWS
    assert all(row.where.startswith(str(path)) for row in found)


def test_rows_are_named_by_the_line_on_which_they_begin(tmp_path: Path) -> None:
    assert [row.where.split(", ")[1] for row in rows_of(written(tmp_path, "jsonl"))] == ["line 1", "line 3"]
    assert [row.where.split(", ")[1] for row in rows_of(written(tmp_path, "csv"))] == ["line 2", "line 4"]


def test_lines_of_json_may_be_called_json(tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl").rename(tmp_path / "lines.json")
    assert [dict(row.fields) for row in rows_of(path)] == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": ', r"a.jsonl, line 2: it is not JSON"),
        ("a.jsonl", '{"text"\n{"text": "a"}', r"a.jsonl, line 1: it is not JSON .* at character 8\)"),
        ("a.jsonl", '{"text": "a', r"a.jsonl, line 1: it is not JSON \(Unterminated string starting at character 10\)"),
        ("a.jsonl", '{"text": "a"}\n\n["b"]', r"a.jsonl, line 3: a row is a mapping.*\['b'\]; a list .* \.json file"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', r"a.jsonl, line 2: it is not UTF-8"),
        ("a.json", '[{"text": "a"},\n 3]', r"a.json, row 2: a row is a mapping"),
        ("a.json", '[{"text": "a"},\n 3', r"a.json, line 2: it is not JSON"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b", "text": "c"}', r"a.jsonl, line 2: it names 'text' twice"),
        ("a.json", '[{"messages": [{"role": "a", "role": "b"}]}]', r"a.json: it names 'role' twice"),
        ("a.json", '"text"', r"it must be a list of rows"),
        ("a.csv", "text,more\na,b\nc\n", r"a.csv, line 3: it has 1 values, and the first line names 2"),
        ("a.csv", "text\na,b\n", r"a.csv, line 2: it has 2 values"),
        ("a.csv", "text,n,text\na,1,b\n", r"a.csv, line 1: it names 'text' twice"),
        ("a.csv", "id;text\n1;a\n", r"a.csv, line 1: columns seem to be separated by ';'"),
        ("a.csv", 'text\n"a', r"a.csv, line 2: it is not CSV"),
        ("a.txt", b"first\nsecond \xff", r"a.txt, line 2: it is not UTF-8 .*; convert the file: iconv"),
        ("a.csv", b"text\nsecond \xff", r"a.csv, line 2: it is not UTF-8 .*; convert the file: iconv"),
        ("a.jsonl", '{"text": "a"}\n{"n": ' + "9" * 5000 + "}", r"a.jsonl, line 2: it has a number of thousands"),
        ("a.json", '[{"n": ' + "9" * 5000 + "}]", r"a.json has a number of thousands"),
        (
            "a.json",
            '{\n "data": [{"text": "a"}]\n}',
            r"a.json holds one mapping over several lines; .* one row per line",
        ),
        ("a.jsonl.gz", b"\x1f\x8b\x08", r"a.jsonl.gz is compressed: gunzip it first"),
        ("a.jsonl", b"\x1f\x8b\x08", r"a.jsonl is compressed: gunzip it first, it lacks the ending"),
        ("a.txt", LFS_POINTER, r"a.txt is a pointer of Git LFS.*: git lfs pull"),
        ("a.parquet", "text", r"a.parquet is no Parquet file"),
        ("a.parquet", LFS_POINTER, r"a.parquet is a pointer of Git LFS.*: git lfs pull"),
        ("a.docx", "text", r"a.docx is of no known format"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("datasets")
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        rows_of(path)


def test_text_that_begins_like_a_pointer_of_git_lfs_is_text(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    for text in (LFS_POINTER.partition("oid")[0] + "is what such a file begins with", LFS_POINTER + "\n" + "x" * 1000):
        path.write_text(text)
        assert [row.fields["text"] for row in rows_of(path)] == [text]


def test_what_is_not_there_or_has_no_end_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match="no regular file"):
        rows_of(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match=r"there is no data at .*absent"):
        rows_of(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="has no text files"):
        rows_of(tmp_path)


def test_files_of_a_folder_that_are_not_read_are_told(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for name in ("rows.jsonl", "more.csv", "tests/other.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=r"has no text files.*name the file with the data itself, such as .*more.csv"):
        rows_of(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    with pytest.warns(UserWarning, match=r"only text files.*and not more.csv, \.\.\.: name such a file itself"):
        assert [row.fields["text"] for row in rows_of(tmp_path)] == ["text"]


@pytest.mark.parametrize("table", ["data/train.jsonl", "train.json", "Train.CSV"])
def test_what_is_said_about_data_is_not_learned_instead_of_them(tmp_path: Path, table: str) -> None:
    """A folder as hubs have it."""
    for name in ("README.md", "LICENSE.txt", table):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    with pytest.raises(ValueError, match=rf"no text files .* but LICENSE.txt .* data itself, such as .*{table}"):
        rows_of(tmp_path)
    (tmp_path / table).unlink()
    assert len(rows_of(tmp_path)) == 2


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_without_datasets_its_formats_say_how_to_get_it(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, kind)
    for name in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"needs `datasets`: pip install datasets, or"):
        rows_of(path)


def test_parts_of_a_dataset_are_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=part, test=part).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(ValueError, match=r"several parts \(train, test\); name one of them: .*both/train"):
        rows_of(tmp_path / "both")
    assert len(rows_of(tmp_path / "both" / "train")) == 2


CALLS = [
    {
        "tools": [{"name": "f", "properties": {"a": {"type": "integer"}}}],
        "messages": [{"role": "user", "content": "a"}],
    },
    {
        "tools": [{"name": "g", "properties": {"b": {"type": "text", "any": ["x"]}, "content": {"type": "text"}}}],
        "messages": [{"role": "assistant", "content": None, "calls": [{"name": "g", "arguments": {"b": 1}}]}],
    },
]


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_tables_add_no_keys_to_mappings(tmp_path: Path, kind: str) -> None:
    """Each has the keys of all others, which a template would write."""
    datasets = pytest.importorskip("datasets")
    data, path = datasets.Dataset.from_list(CALLS), tmp_path / f"data.{kind}"
    data.to_parquet(str(path)) if kind == "parquet" else data.save_to_disk(str(path))
    assert [dict(row.fields) for row in rows_of(path)] == CALLS


def test_a_table_that_is_damaged_in_the_middle_names_its_row(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    path = written(tmp_path, "parquet")
    content = path.read_bytes()
    path.write_bytes(content[:20] + bytes(20) + content[40:])
    with pytest.raises(ValueError, match=r"data.parquet is damaged behind row 0: .*; get it again"):
        rows_of(path)


def test_columns_of_a_table_that_would_be_lost_or_cannot_be_read_are_told(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    import pyarrow
    from pyarrow import parquet

    tables = {
        r"names the column 'text' twice": pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], ["text", "text"]),
        r"a value behind row 0 that Python cannot hold: .*leave its column out": pyarrow.table(
            {"text": ["a"], "at": pyarrow.array([2**60], pyarrow.timestamp("us"))}
        ),
    }
    for message, table in tables.items():
        parquet.write_table(table, tmp_path / "data.parquet")
        with pytest.raises(ValueError, match=message):
            rows_of(tmp_path / "data.parquet")


def test_a_dataset_that_was_saved_with_a_format_has_all_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"text": "a", "ids": [1]}]).with_format("numpy", columns=["ids"])
    data.save_to_disk(str(tmp_path / "shown"))
    assert [dict(row.fields) for row in rows_of(tmp_path / "shown")] == [{"text": "a", "ids": [1]}]


# -- text ------------------------------------------------------------------------------------------------------------


def texts(path: Path, most_bytes: int | None = None) -> list[tuple[Any, bool]]:
    return [(row.fields["text"], row.goes_on) for row in rows_of(path, most_bytes)]


def test_a_large_text_comes_in_pieces_of_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE_BYTES", 16)
    lines = [f"line {number} é\n" for number in range(9)]
    (tmp_path / "a.txt").write_text("".join(lines))
    found = texts(tmp_path / "a.txt")
    assert "".join(text for text, _ in found) == "".join(lines)
    assert len(found) > 3 and all(text.endswith("\n") for text, _ in found)
    assert [goes_on for _, goes_on in found] == [True] * (len(found) - 1) + [False]


def test_a_line_without_end_is_cut_between_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE_BYTES", 8)
    for text in ("x" + "é" * 50, "é" * 50, "xyz" + "😀" * 40):
        (tmp_path / "a.txt").write_text(text)
        assert "".join(piece for piece, _ in texts(tmp_path / "a.txt")) == text


def test_a_folder_is_read_in_sorted_order_without_installed_packages(tmp_path: Path) -> None:
    names = {"b.PY": "bb", "a.py": "aa", "c.bin": "no", "site-packages/d.py": "no", ".git/e.txt": "no", ".f.md": "no"}
    for name, content in names.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "gone.py").symlink_to("nowhere")  # as editors leave them
    assert texts(tmp_path) == [("aa", False), ("bb", False)]


def test_only_so_much_of_a_file_is_read(tmp_path: Path) -> None:
    """The file is larger than the memory of most machines, and takes no room on the disk."""
    with (tmp_path / "large.txt").open("wb") as file:
        file.write("é".encode() * 500)
        file.truncate(1 << 42)
    assert texts(tmp_path / "large.txt", 999) == [("é" * 499, False)]
