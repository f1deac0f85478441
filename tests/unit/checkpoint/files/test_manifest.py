"""A manifest is read back as it was written; a damaged, foreign or malicious one is refused in words."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hightide.checkpoint.files import manifest
from hightide.checkpoint.files.manifest import FileSums, Manifest, check_name, parse, read_manifest
from small_checkpoints import write

GOOD = Manifest(
    step=20,
    time=1.5e9,
    files=(FileSums("model.safetensors", 100 * 1024**2, (1, 2**32 - 1)), FileSums("training.json", 0, ())),
    facts={"loss": 0.1, "plan": {"gpu": 3}, "text": "ä"},
)


def test_it_comes_back() -> None:
    assert parse(GOOD.to_bytes().decode(), "m") == GOOD
    assert GOOD.num_bytes == 100 * 1024**2 and GOOD.file("training.json").num_bytes == 0


def changed(change: Callable[[dict[str, Any]], object], with_sum: bool = True) -> str:
    entries = json.loads(GOOD.to_bytes())
    change(entries)
    if with_sum:
        entries.pop("crc32", None)
        entries["crc32"] = manifest._own_sum(entries)
    return json.dumps(entries)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["files"][0].update(name="../other"), "no name of a file"),
        (lambda m: m["files"][0].update(name="/etc/passwd"), "no name of a file"),
        (lambda m: m["files"][0].update(name="a/b/c"), "no name of a file"),
        (lambda m: m["files"][0].update(name="../b"), "no name of a file"),
        (lambda m: m["files"][0].update(name="./b"), "no name of a file"),
        (lambda m: m["files"][0].update(name="a/.."), "no name of a file"),
        (lambda m: m["files"][0].update(name="a/manifest.json"), "no name of a file"),
        (lambda m: m["files"][0].update(name="\u00e9" * 200 + "/b"), "no name of a file"),
        (lambda m: m["files"][0].update(name="a\x1b[2J/b"), "control characters"),
        (lambda m: m["files"][0].update(name=".."), "no name of a file"),
        (lambda m: m["files"][0].update(name="manifest.json"), "no name of a file"),
        (lambda m: m["files"][0].update(name="x" * 300), "no name of a file"),
        (lambda m: m["files"][0].update(name="a\x1b[2J"), "control characters"),
        (lambda m: m["files"][1].update(name="model.safetensors"), "twice"),
        (lambda m: m["files"][0].update(num_bytes=-1), "-1 bytes"),
        (lambda m: m["files"][0].update(num_bytes=2**70), "at most"),
        (lambda m: m["files"][0].update(num_bytes=1), "has 2 sums"),
        (lambda m: m["files"][0].update(crc32=[1]), "has 1 sums"),
        (lambda m: m["files"][0].update(crc32=[1, 2**32]), "no CRC-32"),
        (lambda m: m["files"][0].update(crc32=[1, 2.5]), "type int"),
        (lambda m: m["files"][0].update(more=1), "unknown key"),
        (lambda m: m.update(files=3), "must be a list"),
        (lambda m: m.update(step=-1), "step is -1"),
        (lambda m: m.update(step="20"), "type int"),
        (lambda m: m.update(time="today"), "type float"),
        (lambda m: m.update(piece_bytes=0), "piece_bytes is 0"),
        (lambda m: m.update(piece_bytes=2**40), "piece_bytes is"),
        (lambda m: m.update(facts=[1]), "must be a mapping"),
        (lambda m: m.update(more=1), "unknown or missing"),
        (lambda m: m.pop("time"), "unknown or missing"),
        (lambda m: m.update(version=2), "format version 2, this hightide reads 1: use the one that wrote it"),
        (lambda m: m.update(format="other"), "no manifest of a hightide checkpoint"),
    ],
)
def test_what_is_refused(change: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(changed(change), "m")


def test_a_changed_fact_is_noticed() -> None:
    with pytest.raises(ValueError, match="m is damaged: its entries have the sum"):
        parse(changed(lambda m: m["facts"].update(loss=0.2), with_sum=False), "m")


def test_every_changed_bit_is_noticed_or_means_the_same() -> None:
    text = GOOD.to_bytes()
    num_refused = 0
    for index in range(len(text)):
        damaged = bytearray(text)
        damaged[index] ^= 1 << index % 7
        try:
            assert parse(damaged.decode("utf-8", "surrogateescape"), "m") == GOOD
        except ValueError:
            num_refused += 1
    assert num_refused > 0.6 * len(text)  # the others are blanks between entries


@pytest.mark.parametrize("facts", [{"x": float("nan")}, {"x": object()}, {"x": 10**50}])
def test_facts_that_could_not_be_read_are_not_written(facts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="plain data"):
        Manifest(1, 0.0, (), facts).to_bytes()


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "a", "_x+y.json", "my judge/a"])
def test_names_of_files(name: str) -> None:
    check_name(name)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    path.joinpath("manifest.json").rename(tmp_path / "elsewhere.json")
    path.joinpath("manifest.json").symlink_to(tmp_path / "elsewhere.json")
    folder = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(ValueError, match="a link"):
            read_manifest(folder, path)
    finally:
        os.close(folder)
