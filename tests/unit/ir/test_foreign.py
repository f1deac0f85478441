"""Files of strangers are read in one place: bounded, plain, and quoted so that no terminal obeys them."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from hightide.doctor.known import load_machine
from hightide.ir import foreign
from hightide.ir.codec import build, from_json
from hightide.ir.foreign import kind_of, quoted, read_json, read_text, shown, user_path, with_article
from hightide.ir.machine import Machine
from hightide.ir.plan import Plan
from hightide.ir.units import parse_bytes


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" * 100_000, "nested deeper than 64 levels"),
        (b"[" * 100 + b"]" * 100, "nested deeper than 64 levels"),
        (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' is given twice"),
        (b'{"a": ' + b"9" * 400 + b"}", "an integer has 400 digits"),
        (b'{"a": ' + b"9" * 5000 + b"}", "an integer has 5000 digits"),
        (b'["\\ud800"]', "no Unicode"),
        (b'{"\\udfff": 1}', "no Unicode"),
        (b"\xff\xfe{}", "not UTF-8 text: invalid start byte at byte 0"),
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b"\0", "is not JSON"),
    ],
)
def test_json_that_is_none(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "file.json").write_bytes(data)
    with pytest.raises(ValueError, match=message) as refused:
        read_json(tmp_path / "file.json", "plan")
    assert "file.json" in str(refused.value) and len(str(refused.value)) < 500


def test_a_mark_at_the_beginning_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "file.json", "plan") == {"a": 1}


def test_a_file_is_not_read_beyond_its_bound(tmp_path: Path) -> None:
    with open(tmp_path / "large", "wb") as file:
        file.truncate(foreign.MAX_FILE_BYTES + 1)
    with pytest.raises(ValueError, match=r"the plan .*large has 67108865 bytes; one may have 67108864"):
        Plan.load(tmp_path / "large")


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ValueError, match="it is no regular file"):
            read_text(path, "plan")
    for path in (tmp_path / "absent", tmp_path / "nul\0"):
        with pytest.raises(ValueError, match=r"cannot read the plan .*; name another file$"):
            read_text(path, "plan")
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(ValueError, match=r"cannot read the part absent: No such file or directory$"):
        foreign.read_bytes("absent", "part", folder=folder)  # which nobody has named
    os.close(folder)


@pytest.mark.parametrize(
    "value",
    ["x" * 10**7, ["y" * 1000] * 1000, {"k" * 10**6: 1}, [10**5000], [[[[["deep"]]]]], "\x1b[2Jgone\x9b", "\u202eab"],
)
def test_quoted_text_is_short_and_harmless(value: Any) -> None:
    for text in (quoted(value), shown("\x1b\0" * 1000)):
        assert len(text) <= foreign.QUOTED * 4 and text.isprintable()


def test_a_message_about_a_large_file_is_short(tmp_path: Path) -> None:
    load_machine("h200").save(tmp_path / "machine.json")
    data = json.loads((tmp_path / "machine.json").read_text())
    for change in ({"name": ["a" * 10**6] * 5}, {"b" * 10**6: 1}, {"speeds": {"c" * 10**6: 2}}, {"date": 10**39}):
        with pytest.raises(ValueError) as refused:
            from_json(Machine, json.dumps({**data, **change}))
        assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**63, -(2**64), True])
def test_numbers_that_are_none(value: Any) -> None:
    with pytest.raises(ValueError, match=r"x is .*; it must be"):
        build(float, value, "x")


@pytest.mark.parametrize("text", ["\x1b[31m", "a\0", "\x9b", "a\rb"])
def test_text_for_terminals_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="without control characters"):
        build(str, text, "x")


@pytest.mark.parametrize("size", ["9" * 400, "9" * 400 + "GiB", "1e999GiB", 10**300, 2**63, "99999999999TiB"])
def test_sizes_beyond_any_machine(size: Any) -> None:
    with pytest.raises(ValueError, match="Limits") as refused:
        parse_bytes(size, "Limits(gpu)")
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("gpu", "memory_bytes", 0),
        ("gpu", "memory_bytes_per_s", -1.0),
        ("host", "update_params_per_s", 0.0),
        ("host", "num_cores", -3),
        ("disk", "read_bytes_per_s", 1e300),
    ],
)
def test_a_machine_with_nothing_of_something(part: str, field: str, value: float, tmp_path: Path) -> None:
    load_machine("h200").save(tmp_path / "machine.json")
    data = json.loads((tmp_path / "machine.json").read_text())
    data[part][field] = value
    (tmp_path / "machine.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"{part}: {field} is .*; it must be from"):
        load_machine(tmp_path / "machine.json")


def test_no_file_stays_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        num_open = len(os.listdir("/proc/self/fd"))
        assert foreign.read_text(tmp_path / "file", "text") == "text"
        assert len(os.listdir("/proc/self/fd")) == num_open


def test_articles_follow_how_a_name_is_said() -> None:
    assert [kind_of(value) for value in (7, "x", None, [], {})] == ["an int", "a str", "None", "a list", "a dict"]
    names = ["Embedding", "LSTM", "UNet", "Linear", "MLP", "OrderedDict", "T5Model", "GPT2LMHeadModel"]
    articles = [with_article(name).split(" ")[0] for name in names]
    assert articles == ["an", "an", "a", "a", "an", "an", "a", "a"]


@pytest.mark.parametrize("value", [None, 3, b"x", "", "a\0b", ["x"]])
def test_what_names_no_folder(value: object) -> None:
    with pytest.raises(ValueError, match="folder"):
        user_path(value)


def test_the_users_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/a b") == user_path(Path("~/a b")) == Path("/home/me/a b")
    assert user_path("~") == Path("/home/me") and user_path("a/~") == Path("a/~")
