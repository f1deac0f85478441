from pathlib import Path
from typing import Any

import pytest

from hightide.ir.limits import DiskLimit, Limits
from hightide.ir.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        ("1.5TB", 1_500_000_000_000),
        ("0.5 KiB", 512),
        ("7B", 7),
        ("3MB", 3_000_000),
    ],
)
def test_sizes_as_people_write_them(text, num_bytes):
    assert Limits(gpu=text).gpu_bytes == num_bytes


@pytest.mark.parametrize("nonsense", ["", "lots", "24 GiBs", "GiB", "-3GiB", 0, -5, 1.5, True, "1e9", "0GiB", [1]])
def test_nonsense_is_rejected_by_name(nonsense):
    with pytest.raises(ValueError, match=r"Limits\(gpu\)="):
        Limits(gpu=nonsense)
    with pytest.raises(ValueError, match=r"Limits\(host\)="):
        Limits(host=nonsense)


def test_a_few_bytes_are_asked_for_their_unit() -> None:
    """--gpu 24 means GiB."""
    with pytest.raises(ValueError, match=r"Limits\(gpu\)='24' is 24 bytes; write a unit too, such as '24GiB'"):
        Limits(gpu="24")
    assert Limits(gpu="24B").gpu_bytes == 24


def test_no_limit_is_what_the_machine_has():
    assert (Limits().gpu_bytes, Limits().host_bytes, Limits().disks) == (None, None, ())


def test_one_disk_or_several():
    assert Limits(disk="/scratch:200GiB").disks == (DiskLimit("/scratch", 200 * 2**30),)
    two = Limits(disk=["/a:1GB", "/b:with:colon:2GB", DiskLimit("/c", 3)])
    assert two.disks == (DiskLimit("/a", 10**9), DiskLimit("/b:with:colon", 2 * 10**9), DiskLimit("/c", 3))


@pytest.mark.parametrize("nonsense", ["/scratch", "200GiB", ":200GiB", "/scratch:lots", ["/a:1GB", 5]])
def test_a_disk_without_folder_or_size_is_rejected_by_name(nonsense):
    with pytest.raises(ValueError, match=r"Limits\(disk\)"):
        Limits(disk=nonsense)


def test_a_size_in_the_middle_is_no_part_of_a_folder_name():
    for several in ("/a:1TB,/b:2TB", "/a: 1.5 TiB, /b:2TB", "/a:1TB,/b:2TB,/c:1GB"):
        with pytest.raises(ValueError, match="is more than one folder; give each by itself"):
            Limits(disk=several)
    assert Limits(disk="/a,b:1TB").disks == (DiskLimit("/a,b", 10**12),)


def test_a_disk_given_twice_is_rejected():
    with pytest.raises(ValueError, match=r"names a folder twice"):
        Limits(disk=["/a:1GB", "/a/:2GB"])


def test_a_disk_in_the_users_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert Limits(disk="~/scratch:1GB").disks == (DiskLimit("/home/me/scratch", 10**9),)


def test_limits_are_frozen_and_equal_by_value():
    assert Limits(gpu="1KiB") == Limits(gpu=1024)


def test_bytes_for_people():
    texts = [format_bytes(n) for n in (0, 1023, 1536, 150 * 2**20, 2**40, 5000 * 2**40)]
    assert texts == ["0 B", "1023 B", "1.5 KiB", "150 MiB", "1.0 TiB", "5000 TiB"]
    assert parse_bytes("1.5 KiB", "x") == 1536


@pytest.mark.parametrize("value", [5, 2.5, Path("/scratch"), {"/scratch": "1GiB"}])
def test_a_disk_of_another_type_is_refused_in_words(value: Any) -> None:
    with pytest.raises(ValueError, match=r"Limits\(disk\)=.* is not a folder and a size; write '/path:200GiB'"):
        Limits(disk=value)
