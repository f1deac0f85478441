"""A checkpoint is there as a whole or not at all, in the order that makes it so, and is what was put."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hightide.checkpoint.choosing import latest
from hightide.checkpoint.files import filesystem, manifest, writer
from hightide.checkpoint.files.blocks import NUM_WRITERS, THREAD
from hightide.checkpoint.files.folder import verify
from hightide.checkpoint.files.tensor_layout import Entry
from hightide.checkpoint.files.writer import CheckpointWriter
from hightide.ir.save_sizes import NUM_BLOCKS
from hightide.stores.threads import background
from small_checkpoints import content, values, write

CALLS = ("make_folder", "create", "write", "set_aside", "sync", "await_written", "rename", "unlink", "remove_folder")


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    """Small ones."""
    monkeypatch.setattr(manifest, "PIECE_BYTES", 4096)
    monkeypatch.setattr(writer, "BLOCK_BYTES", 1024)
    return 4096


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """All calls, each with the file that it is about."""
    calls: list[tuple[str, str]] = []

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            about = args[0] if isinstance(args[0], str) else Path(os.readlink(f"/proc/self/fd/{args[0]}")).name
            calls.append((name, about))
            return real(*args)

        return call

    for name in CALLS:
        monkeypatch.setattr(filesystem, name, noting(name, getattr(filesystem, name)))
    return calls


def test_what_is_put_is_there(tmp_path: Path, pieces: int) -> None:
    path = write(tmp_path, 20)
    assert path == tmp_path / "step-20"
    assert sorted(os.listdir(path)) == ["manifest.json", "model.safetensors", "optimizer.safetensors", "training.json"]
    assert os.listdir(tmp_path) == ["step-20"]
    for name in ("model", "optimizer"):
        found = load_file(path / f"{name}.safetensors")
        assert all(torch.equal(found[key], value) for key, value in values(20).items())
    told = verify(path)
    assert told.written_s is not None and told.written_s > 0
    assert (told.step, told.facts, told.piece_bytes) == (20, {"loss": 10.0, "written_s": told.written_s}, pieces)
    raw = (path / "model.safetensors").read_bytes()
    sums = [zlib.crc32(raw[start : start + pieces]) for start in range(0, len(raw), pieces)]
    assert list(told.file("model.safetensors").crc32) == sums and len(sums) > 2


def test_tensors_come_in_parts(tmp_path: Path) -> None:
    entries = [Entry("a", torch.float32, (5, 2)), Entry("b", torch.int16, (0,)), Entry("c", torch.int64, ())]
    with CheckpointWriter(tmp_path, 1) as checkpoint:
        file = checkpoint.tensors("model.safetensors", entries)
        for part in torch.arange(10.0).split(4):
            file.put(part)
        file.put(torch.empty(0, dtype=torch.int16))
        file.put((7).to_bytes(8, "little"))
        path = checkpoint.commit({})
    found = load_file(path / "model.safetensors")
    assert torch.equal(found["a"], torch.arange(10.0).view(5, 2)) and found["c"] == 7 and found["b"].shape == (0,)


def test_too_much_or_too_little_is_no_checkpoint(tmp_path: Path) -> None:
    for parts in ([torch.ones(3), torch.ones(2)], [torch.ones(3)], [torch.ones(4).double()], [torch.ones(4)] * 2):
        with pytest.raises(AssertionError), CheckpointWriter(tmp_path, 1) as checkpoint:
            file = checkpoint.tensors("model.safetensors", [Entry("a", torch.float32, (4,))])
            for part in parts:
                file.put(part)
            checkpoint.commit({})
    assert os.listdir(tmp_path) == []


def test_transformers_loads_the_folder(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    state = model.state_dict()
    with CheckpointWriter(tmp_path, 3) as checkpoint:
        checkpoint.bytes("config.json", config.to_json_string().encode())
        entries = [Entry(name, value.dtype, tuple(value.shape)) for name, value in state.items()]
        file = checkpoint.tensors("model.safetensors", entries)
        for value in state.values():
            file.put(value)
        path = checkpoint.commit({})
    found = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert all(torch.equal(found[name], value) for name, value in state.items())


def test_everything_is_synced_before_it_counts(tmp_path: Path, log: list[tuple[str, str]]) -> None:
    tmp_path.joinpath("run").mkdir()
    log.clear()
    write(tmp_path / "run", 5)
    order = [(call, about) for call, about in log if call not in ("write", "set_aside", "await_written")]
    assert order == [
        ("make_folder", "step-5.tmp"),
        ("create", "hightide-save-in-progress"),
        ("sync", "step-5.tmp"),
        ("create", "model.safetensors"),
        ("create", "optimizer.safetensors"),
        ("create", "training.json"),
        ("sync", "model.safetensors"),
        ("sync", "optimizer.safetensors"),
        ("sync", "training.json"),
        ("create", "manifest.json"),
        ("sync", "manifest.json"),
        ("sync", "step-5.tmp"),
        ("rename", "step-5.tmp"),
        ("sync", "run"),
        ("unlink", "hightide-save-in-progress"),
    ]
    for name in ("model.safetensors", "optimizer.safetensors", "training.json"):
        last_write = max(index for index, entry in enumerate(log) if entry == ("write", name))
        assert log.index(("set_aside", name)) < log.index(("write", name)) <= last_write < log.index(("sync", name))


def test_a_step_again_replaces_it_and_one_of_them_is_always_there(
    tmp_path: Path, log: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 10)
    first = content(write(tmp_path, 20, numel=10))
    log.clear()
    real = filesystem.rename

    def rename(name: str, target: str, folder: int) -> None:
        real(name, target, folder)
        found = latest(tmp_path, verify=True)
        assert found is not None and found.name.startswith("step-20")
        assert (content(found) == first) == (found.name == "step-20.old")

    monkeypatch.setattr(filesystem, "rename", rename)
    second = content(write(tmp_path, 20))
    assert second != first and sorted(os.listdir(tmp_path)) == ["step-10", "step-20"]
    moves = [entry for entry in log if entry[0] in ("rename", "remove_folder") or entry == ("sync", tmp_path.name)]
    assert moves == [
        ("rename", "step-20"), ("sync", tmp_path.name), ("rename", "step-20.tmp"), ("sync", tmp_path.name),
        ("rename", "step-20.old"), ("sync", tmp_path.name), ("remove_folder", "step-20.gone"),
    ]  # fmt: skip


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_permissions_are_those_of_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        path = write(tmp_path, 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~umask
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o666 & ~umask}


def test_the_users_own_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "big")
    assert write(tmp_path / "run", 1) == tmp_path / "run" / "step-1"
    assert (tmp_path / "big" / "step-1" / "manifest.json").exists()
    assert latest(tmp_path / "run") == tmp_path / "run" / "step-1"


@pytest.mark.parametrize("name", ["step-1", "step-1.tmp"])
@pytest.mark.parametrize("kind", ["link", "file", "folder"])
def test_what_is_not_ours_is_left_and_said(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("mine")
    there = tmp_path / name
    if kind == "link":
        there.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        there.write_text("mine")
    else:
        there.mkdir()
        (there / "precious").write_text("mine")
    before = sorted((path, path.is_file() and path.read_text()) for path in tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=rf"{name} is there"):
        write(tmp_path, 1)
    assert sorted((path, path.is_file() and path.read_text()) for path in tmp_path.rglob("*")) == before


def test_what_came_into_its_place_meanwhile_stays(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 1) as checkpoint:
        (tmp_path / "step-1").mkdir()
        with pytest.raises(ValueError, match="step-1 is there"):
            checkpoint.commit({})
    assert os.listdir(tmp_path) == ["step-1"] and os.listdir(tmp_path / "step-1") == []


def test_two_writers_of_one_step(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 7) as first:
        with pytest.raises(ValueError, match="another process writes it"):
            CheckpointWriter(tmp_path, 7)
        write(tmp_path, 8)  # beside it, and it is left
        first.bytes("training.json", b"{}")
        first.commit({})
    assert sorted(os.listdir(tmp_path)) == ["step-7", "step-8"] and latest(tmp_path, verify=True)


@pytest.mark.parametrize("step", [-1, 2**63, 1.0, True, "5"])
def test_steps_that_are_none(step: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step="):
        CheckpointWriter(tmp_path, step)


@pytest.mark.parametrize("name", ["../out", "a/b/c", "../b", "manifest.json", "hightide-save-in-progress", ""])
def test_names_do_not_leave_the_folder(name: str, tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 1) as checkpoint, pytest.raises(ValueError, match="no name of a file"):
        checkpoint.bytes(name, b"")
    assert os.listdir(tmp_path) == []


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, log: list[tuple[str, str]]) -> None:
    with pytest.raises(
        ValueError, match=r"it needs 1152921504606846976 bytes \(.*\), \d+ bytes \(.*\) are free"
    ) as told:
        CheckpointWriter(tmp_path, 1, expected_bytes=1 << 60)
    assert "Earlier checkpoints are as they were" in str(told.value)
    assert os.listdir(tmp_path) == [] and log == []
    with pytest.raises(ValueError, match="are free"), CheckpointWriter(tmp_path, 1) as checkpoint:
        checkpoint.tensors("model.safetensors", [Entry("x", torch.uint8, (1 << 60,))])
    assert os.listdir(tmp_path) == [] and not any(call == "write" for call, _ in log)


def test_a_disk_without_room_for_one_more_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes do not tell."""

    def create(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "has_names_left", lambda _: False)
    monkeypatch.setattr(filesystem, "create", create)
    with pytest.raises(ValueError, match=r"are free: no more files can be made \(df -i\)\. Earlier checkpoints"):
        write(tmp_path, 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", CALLS[:-2])
def test_an_error_of_any_call_is_told_and_leaves_nothing(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(write(tmp_path, 1))
    monkeypatch.setattr(writer, "BLOCK_BYTES", 250)
    monkeypatch.setattr(manifest, "PIECE_BYTES", 1000)
    monkeypatch.setattr(filesystem, "past_cache", lambda _: False)
    real, calls = getattr(filesystem, call), []

    def fail(*args: Any) -> Any:
        calls.append(call)
        if len(calls) == 2 or call in ("make_folder", "rename"):
            raise OSError(number, os.strerror(number))
        return real(*args)

    monkeypatch.setattr(filesystem, call, fail)
    with pytest.raises(ValueError, match=os.strerror(number)) as told:
        write(tmp_path, 2)
    assert ("are free" in str(told.value)) == (number != errno.EIO) and ", 0 bytes" not in str(told.value)
    assert os.listdir(tmp_path) == ["step-1"] and content(tmp_path / "step-1") == before


def test_a_parent_that_cannot_be_synced_is_told_and_the_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, but nobody knows whether it would be after a power failure: so an older one must not go."""
    write(tmp_path, 1)
    real = filesystem.sync

    def fail(file: int) -> None:
        if os.path.samestat(os.fstat(file), os.stat(tmp_path)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(file)

    monkeypatch.setattr(filesystem, "sync", fail)
    with pytest.raises(ValueError, match="Input/output error"):
        write(tmp_path, 2)
    assert {"step-1", "step-2"} <= set(os.listdir(tmp_path)) and latest(tmp_path, verify=True) == tmp_path / "step-2"


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a sector each, four to a piece."""
    monkeypatch.setattr(manifest, "PIECE_BYTES", 4 * 4096)
    monkeypatch.setattr(writer, "BLOCK_BYTES", 4096)
    return 4096


@pytest.mark.parametrize("is_direct", [True, False])
def test_blocks_that_wait_for_the_disk_are_bounded(
    is_direct: bool, tmp_path: Path, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk stands still, so many are filled; and nothing stays in the cache that is not waited for."""
    monkeypatch.setattr(filesystem, "past_cache", lambda _: is_direct)
    goes_on, waited, gone = threading.Event(), set(), set()
    real_write, real_await, real_let_go = filesystem.write, filesystem.await_written, filesystem.let_go

    def write_(file: int, memory: memoryview, offset: int) -> int:
        if len(memory) == blocks:
            assert goes_on.wait(60)
        return real_write(file, memory, offset)

    def await_written(file: int, offset: int, num_bytes: int) -> None:
        waited.add((file, offset))
        real_await(file, offset, num_bytes)

    def let_go(file: int, offset: int, num_bytes: int) -> None:
        gone.add((file, offset))
        real_let_go(file, offset, num_bytes)

    monkeypatch.setattr(filesystem, "write", write_)
    monkeypatch.setattr(filesystem, "await_written", await_written)
    monkeypatch.setattr(filesystem, "let_go", let_go)
    put: list[int] = []

    def save() -> None:
        with CheckpointWriter(tmp_path, 1) as checkpoint:
            file = checkpoint.tensors("model.safetensors", [Entry("a", torch.uint8, (100 * blocks,))])
            for number in range(100):
                file.put(torch.full((blocks,), number, dtype=torch.uint8))
                put.append(number)
            checkpoint.commit({})

    thread = threading.Thread(target=save)
    thread.start()
    deadline_s = time.monotonic() + 60
    while len(put) < NUM_BLOCKS - 1 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    time.sleep(0.2)
    assert NUM_BLOCKS - 1 <= len(put) <= NUM_BLOCKS
    goes_on.set()
    thread.join(60)
    assert verify(tmp_path / "step-1") and len(put) == 100
    assert len(waited) == (0 if is_direct else 101) and waited <= gone


def test_a_manifest_of_several_blocks_is_written_before_it_is_synced(
    tmp_path: Path, blocks: int, monkeypatch: pytest.MonkeyPatch, log: list[tuple[str, str]]
) -> None:
    real_write = filesystem.write

    def slowly(file: int, memory: memoryview, offset: int) -> int:
        time.sleep(0.02)
        return real_write(file, memory, offset)

    monkeypatch.setattr(filesystem, "write", slowly)
    with CheckpointWriter(tmp_path, 1) as checkpoint:
        path = checkpoint.commit({"notes": "x" * 3 * blocks})
    assert verify(path)
    calls = [call for call, about in log if about == "manifest.json"]
    assert calls.index("sync") > 3 and "write" not in calls[calls.index("sync") :]


def test_blocks_end_in_any_order(tmp_path: Path, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for one that was sent after it, as far as threads allow."""
    real_write, offsets, lock = filesystem.write, [], threading.Condition()

    def write_(file: int, memory: memoryview, offset: int) -> int:
        with lock:
            if len(memory) == blocks and offset % (2 * blocks) == 0:
                lock.wait_for(lambda: offset + blocks in offsets, timeout=0.1)
            count = real_write(file, memory, offset)
            offsets.append(offset)
            lock.notify_all()
        return count

    monkeypatch.setattr(filesystem, "write", write_)
    value = torch.randint(256, (40 * blocks,), dtype=torch.uint8)
    with CheckpointWriter(tmp_path, 1) as checkpoint:
        file = checkpoint.tensors("model.safetensors", [Entry("a", torch.uint8, (40 * blocks,))])
        for part in value.split(5000):
            file.put(part)
        checkpoint.commit({})
    assert offsets != sorted(offsets)
    assert verify(tmp_path / "step-1") and torch.equal(load_file(tmp_path / "step-1" / "model.safetensors")["a"], value)


def test_a_file_system_that_refuses_direct_writes_gets_others(
    tmp_path: Path, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some do so at the first write only."""
    real_write, refused = filesystem.write, []

    def write_(file: int, memory: memoryview, offset: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_write(file, memory, offset)

    monkeypatch.setattr(filesystem, "write", write_)
    path = write(tmp_path, 1, numel=20_000)
    assert verify(path)
    if not refused:
        pytest.skip("this file system has none anyway")


def test_the_writers_threads_end_with_it(tmp_path: Path, blocks: int) -> None:
    def living() -> int:
        return sum(thread.name.startswith(THREAD) for thread in threading.enumerate())

    with CheckpointWriter(tmp_path, 1) as checkpoint:
        file = checkpoint.tensors("model.safetensors", [Entry("a", torch.uint8, (20 * blocks,))])
        file.put(torch.ones(18 * blocks, dtype=torch.uint8))
        assert 0 < living() <= NUM_WRITERS
    assert living() == 0 and os.listdir(tmp_path) == []


@pytest.mark.parametrize("num_threads", [0, 1])
def test_where_no_threads_are_to_be_had(
    num_threads: int, tmp_path: Path, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may limit them, and a process that ends starts none."""
    started: list[str] = []

    def limited(name: str, work: Callable[[], object]) -> threading.Thread:
        if len(started) == num_threads:
            raise RuntimeError("can't start new thread")
        started.append(name)
        return background(name, work)

    monkeypatch.setattr("hightide.checkpoint.files.blocks.background", limited)
    assert verify(write(tmp_path, 1, numel=20_000)) and len(started) == num_threads


def test_nothing_is_synced_while_values_are_put(tmp_path: Path, log: list[tuple[str, str]]) -> None:
    """They may be those that an update waits for."""
    with CheckpointWriter(tmp_path, 1) as checkpoint:
        log.clear()
        file = checkpoint.tensors("model.safetensors", [Entry("a", torch.float32, (4,))])
        file.put(torch.ones(4))
        assert {call for call, _ in log} == {"create", "set_aside", "write"}
        checkpoint.commit({})
    assert ("sync", "model.safetensors") in log


def test_interrupted_and_abandoned_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = CheckpointWriter(tmp_path, 1)
    checkpoint.bytes("training.json", b"{}")
    checkpoint.abandon()
    checkpoint.abandon()
    assert os.listdir(tmp_path) == []

    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(filesystem, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 2)
    assert os.listdir(tmp_path) == []


def test_no_descriptor_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    before = len(os.listdir("/proc/self/fd"))
    write(tmp_path, 2)
    write(tmp_path, 2)
    for call in ("make_folder", "create", "write", "set_aside", "sync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(filesystem, call, lambda *_: os.stat("/nowhere"))
            with pytest.raises(ValueError, match="No such file or directory"):
                write(tmp_path, 2, numel=100)
    assert len(os.listdir("/proc/self/fd")) == before
