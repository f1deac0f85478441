"""Files that several ranks write, each its own runs of bytes."""

from __future__ import annotations

import ctypes
import random
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hightide.checkpoint.files import blocks, filesystem, manifest, shared_folder
from hightide.checkpoint.files.blocks import Blocks, Lent
from hightide.checkpoint.files.folder import damages
from hightide.checkpoint.files.manifest import MARKER
from hightide.checkpoint.files.shared_file import SharedFile, Sum, joined_sums
from hightide.checkpoint.files.shared_folder import SharedFolder
from hightide.checkpoint.files.writer import CheckpointWriter
from hightide.ir.save_sizes import NUM_OPEN as NUM_FILLED
from hightide.ir.save_sizes import num_blocks

PIECE_BYTES = 32 * 1024
BLOCK_BYTES = 8 * 1024
NUM_BYTES = 3 * PIECE_BYTES + 12_345


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "PIECE_BYTES", PIECE_BYTES)


def cuts(chance: random.Random) -> list[range]:
    """Of a file, in runs of very different lengths."""
    places = sorted({0, NUM_BYTES, *(chance.randrange(NUM_BYTES) for _ in range(40)), 4096, 2 * PIECE_BYTES})
    return [range(start, stop) for start, stop in pairwise(places)]


@pytest.mark.parametrize("way", ["direct", "refused at the first write", "cached", "less than a sector"])
@pytest.mark.parametrize("seed", range(3))
def test_runs_of_several_ranks_are_one_file(
    seed: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    content = chance.randbytes(NUM_BYTES)
    real_open, real_write, direct = filesystem.open_to_write, filesystem.write, set()

    def opened(name: str, folder: int, past_cache: bool = False) -> int:
        if past_cache and way == "cached":
            raise OSError(22, "no direct transfers")
        file = real_open(name, folder)  # a file system of this test's need not know them
        if past_cache:
            direct.add(file)
        return file

    def write(file: int, memory: memoryview, offset: int) -> int:
        if file in direct:
            if way == "refused at the first write":
                raise OSError(22, "no direct transfers")
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            assert offset % 4096 == len(memory) % 4096 == address % 4096 == 0
        return real_write(file, memory, offset)

    monkeypatch.setattr(filesystem, "open_to_write", opened)
    monkeypatch.setattr(filesystem, "write", write)
    (tmp_path / "file").write_bytes(bytes(NUM_BYTES))
    block_bytes = 1024 if way == "less than a sector" else BLOCK_BYTES
    folder, of_ranks = filesystem.open_folder(tmp_path), [Blocks(block_bytes) for _ in range(3)]
    ranks = [SharedFile("file", NUM_BYTES, its) for its in of_ranks]
    for file in ranks:
        file.open(folder)
    runs = [(chance.randrange(3), run) for run in cuts(chance)]
    chance.shuffle(runs)
    for rank, run in runs:
        ranks[rank].write(run.start, content[run.start : run.stop])
    sums: list[Sum] = []
    for file, its in zip(ranks, of_ranks, strict=True):
        file.end_run()
        its.settle()
        assert its.failure is None
        file.sync()
        file.close()
        its.close()
        sums += file.sums
    filesystem.close(folder)
    assert (tmp_path / "file").read_bytes() == content
    assert bool(direct) == (way not in ("cached", "less than a sector"))
    told = joined_sums("file", NUM_BYTES, sums).crc32
    assert list(told) == [zlib.crc32(content[at : at + PIECE_BYTES]) for at in range(0, NUM_BYTES, PIECE_BYTES)]
    with pytest.raises(ValueError, match="was not written by the ranks as one"):
        joined_sums("file", NUM_BYTES, sums[1:])
    with pytest.raises(ValueError, match="was not written by the ranks as one"):
        joined_sums("file", NUM_BYTES, [*sums, sums[0]])
    with pytest.raises(ValueError, match="lacks 1 bytes"):
        joined_sums("file", NUM_BYTES + 1, sums)


def test_a_checkpoint_of_two_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In more files than are open at a time, to each of which they come back."""
    monkeypatch.setattr(shared_folder, "NUM_OPEN", 2)
    content = random.Random(7).randbytes(NUM_BYTES)
    names = [f"large-{number}" for number in range(5)]
    with CheckpointWriter(tmp_path, 4) as writer:
        writer.bytes("small", b"here")
        for name in names:
            writer.reserve(name, NUM_BYTES)
        writer.show(b"secret")
        found: dict[str, list[Sum]] = {name: [] for name in names}
        for rank, part in enumerate((range(50_001), range(50_001, NUM_BYTES))):
            folder = SharedFolder(writer.path, b"secret", rank)
            for name in names:
                folder.check(name, NUM_BYTES)
            middle = part.start + 20_000
            for name in names:
                folder.write(name, middle, content[middle : part.stop])
            for name in names:
                folder.write(name, part.start, content[part.start : middle])
                assert len(folder._open) <= 2
            for name, its in folder.finish().items():
                found[name] += its
            folder.close()
        path = writer.commit({}, [joined_sums(name, NUM_BYTES, its) for name, its in found.items()])
    assert sorted(file.name for file in path.iterdir()) == [*names, "manifest.json", "small"]
    assert all((path / name).read_bytes() == content for name in names) and not damages(path)


@pytest.mark.parametrize("expected_bytes", [NUM_BYTES, 0])
def test_all_memory_is_lent_and_given_back(
    expected_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts against a plan's limit: what is not there is waited for, and none comes from elsewhere."""
    lent: dict[int, torch.Tensor] = {}

    def lend(num_bytes: int) -> Lent:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        lent[memory.data_ptr()] = memory
        return memory, lambda: lent.pop(memory.data_ptr())

    content, names = random.Random(7).randbytes(NUM_BYTES), [f"large-{number}" for number in range(5)]
    with CheckpointWriter(tmp_path, 4) as writer:
        for name in names:
            writer.reserve(name, NUM_BYTES)
        writer.show(b"secret")
        with monkeypatch.context() as patched:
            patched.setattr(blocks, "_new", lambda num_bytes: pytest.fail("memory of the system"))
            folder = SharedFolder(writer.path, b"secret", 0, lend, expected_bytes)
            num_lent = len(lent)
            for name in names:
                folder.check(name, NUM_BYTES)
            for start in range(0, NUM_BYTES, 9_000):
                for name in names:
                    folder.write(name, start, content[start : start + 9_000])
            found = folder.finish()
            assert num_lent == len(lent) == num_blocks(expected_bytes, PIECE_BYTES) and NUM_FILLED < num_lent < 8
            folder.close()
            assert not lent
        path = writer.commit({}, [joined_sums(name, NUM_BYTES, sums) for name, sums in found.items()])
    assert all((path / name).read_bytes() == content for name in names) and not damages(path)


def test_a_folder_of_the_same_name_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "VISIBLE_S", 0.1)
    with CheckpointWriter(tmp_path, 4) as writer:
        writer.show(b"secret")
        with pytest.raises(ValueError, match=r"rank 1 .* does not see .*another folder is there. Name a folder"):
            SharedFolder(writer.path, b"another secret", 1, lambda num_bytes: pytest.fail("nobody would give it back"))
        folder = SharedFolder(writer.path, b"secret", 1)
        with pytest.raises(ValueError, match="cannot be written by rank 1: No such file"):
            folder.check("large", 10)
        (tmp_path / "step-4.tmp" / "large").write_bytes(b"short")
        with pytest.raises(ValueError, match="with 5 bytes, rank 0 has made it with 10"):
            folder.check("large", 10)
        folder.close()
        assert (tmp_path / "step-4.tmp" / MARKER).exists()
    assert not list(tmp_path.iterdir())
