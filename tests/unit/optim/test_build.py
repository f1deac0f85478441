"""A kernel is loaded only as it was built, and training goes on where there is none."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hightide.optim import build

SOURCE = b"int answer(void) { return 42; }\n"
ANSWERS = 'case "$*" in *--version*) echo cc 1.0; exit;; esac\n'
needs_compiler = pytest.mark.skipif(build.shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with a library that this process has not mapped: a mapped one would be changed under it."""
    folder = tmp_path_factory.mktemp("built")
    folder.chmod(0o700)
    assert elsewhere(folder).wait(90) == 0
    return folder


@pytest.fixture
def unloaded() -> Iterator[None]:
    build.load.cache_clear()
    yield
    build.load.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of libraries that were compiled."""
    names: list[str] = []
    before = build._compiled

    def counted(name: str, *rest: object) -> Path:
        names.append(name)
        return before(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "_compiled", counted)
    return names


def answer(library: ctypes.CDLL) -> int:
    return int(library.answer())


def elsewhere(cache: Path) -> subprocess.Popen[bytes]:
    """A process that builds it, or finds it."""
    script = (
        f"from pathlib import Path; from hightide.optim import build; "
        f"assert build.opened('one', {SOURCE!r}, Path({str(cache)!r}), ()).answer() == 42"
    )
    source = str(Path(build.__file__).parents[2])
    return subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": source})


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def compiler(tmp_path: Path, script: str) -> str:
    path = tmp_path / "tools and more" / "my cc"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@needs_compiler
def test_a_build_is_kept_by_source_and_used_again(cache: Path, compiled: list[str]) -> None:
    assert answer(build.opened("one", SOURCE, cache, ("answer",))) == 42
    assert answer(build.opened("one", SOURCE, cache, ("answer",))) == 42 and compiled == ["one"]
    assert answer(build.opened("one", SOURCE.replace(b"42", b"43"), cache, ("answer",))) == 43 and compiled == [
        "one",
        "one",
    ]
    names = sorted(path.suffix for path in cache.iterdir())
    assert names == [".sha256", ".sha256", ".so", ".so"]
    assert {path.stat().st_mode & 0o777 for path in cache.iterdir()} == {0o600}


@needs_compiler
def test_what_cannot_be_compiled_says_why_and_leaves_nothing(cache: Path) -> None:
    with pytest.raises(OSError, match="error"):
        build.opened("one", b"no C at all", cache, ())
    assert list(cache.iterdir()) == []


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


SPOILS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "half a library": ("*.so", half),
    "an empty library": ("*.so", lambda path: os.truncate(path, 0)),
    "one bit": ("*.so", flipped),
    "a foreign library": ("*.so", lambda path: path.write_bytes(Path(ctypes.util.__file__).read_bytes())),
    "no library": ("*.so", lambda path: path.unlink()),
    "a link": ("*.so", lambda path: (path.rename(path.with_name("away")), path.symlink_to("away"))),
    "a link to a device": ("*.so", lambda path: (path.unlink(), path.symlink_to("/dev/null"))),
    "a pipe": ("*.so", lambda path: (path.unlink(), os.mkfifo(path))),
    "a pipe for a checksum": ("*.sha256", lambda path: (path.unlink(), os.mkfifo(path))),
    "junk for a checksum": ("*.sha256", lambda path: path.write_bytes(b"\xff../../junk")),
    "another checksum": ("*.sha256", lambda path: path.write_text("0" * 64)),
    "no checksum": ("*.sha256", lambda path: path.unlink()),
}


@needs_compiler
@pytest.mark.parametrize("spoil", SPOILS)
def test_a_spoilt_library_is_built_again(spoil: str, built: Path, cache: Path, compiled: list[str]) -> None:
    for path in built.iterdir():
        shutil.copy2(path, cache)
    pattern, change = SPOILS[spoil]
    change(only(cache, pattern))
    assert answer(build.opened("one", SOURCE, cache, ("answer",))) == 42
    assert compiled == ["one"]
    assert answer(build.opened("one", SOURCE, cache, ("answer",))) == 42
    assert compiled == ["one"]


@needs_compiler
def test_another_processor_builds_its_own(cache: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    build.opened("one", SOURCE, cache, ("answer",))
    monkeypatch.setattr(build, "_processor", lambda: b"flags: fewer")
    build.opened("one", SOURCE, cache, ("answer",))
    assert compiled == ["one", "one"]


@needs_compiler
def test_two_processes_at_once_both_get_it(cache: Path) -> None:
    both = [elsewhere(cache) for _ in range(2)]
    assert [process.wait(90) for process in both] == [0, 0]
    assert build._Shelf(cache, "one", build._identity(SOURCE, build._compiler())).find() is not None


@needs_compiler
@pytest.mark.parametrize("spoilt", ["others may write", "nobody's", "unknown processor", "no home"])
def test_a_cache_that_is_not_ours_alone_is_not_used(
    spoilt: str, tmp_path: Path, unloaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = build._cache()
    assert folder == tmp_path / "hightide/kernels"
    if spoilt == "others may write":
        folder.chmod(0o722)
    elif spoilt == "unknown processor":
        monkeypatch.setattr(build, "_processor", lambda: b"")
    elif spoilt == "no home":
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
        monkeypatch.setenv("CC", compiler(tmp_path, 'exec cc "$@" -O0'))  # the kernel as it is takes seconds
    else:
        monkeypatch.setattr("hightide.process.system.os.geteuid", lambda: 4321)
    assert build._cache() is None
    if spoilt == "no home":
        assert build.load("adam") is not None
    else:
        assert answer(build.opened("one", SOURCE, build._cache(), ("answer",))) == 42
    assert list(folder.iterdir()) == []


COMPILERS = {
    "missing": ("/nowhere/cc", "no C compiler"),
    "half a quotation": ("'cc", "quotation"),
    "fails": ("exit 7", "exit code 7"),
    "prints junk": ("printf '\\377\\376'; exit 1", "exit code 1"),
    "prints without end": ("yes", "without end"),
    "writes nothing": ("exit 0", "no library"),
    "writes junk": (
        ANSWERS + 'for o; do case "$o" in *.so) echo no > "$o";; esac; done',
        "invalid ELF|too short|failed",
    ),
    "writes half": (
        ANSWERS + 'cc "$@" -O0; for o; do case "$o" in *.so) truncate -s 9000 "$o";; esac; done',
        "exit code -7|failed",
    ),
    "writes another library": (ANSWERS + 'cc -shared -x c /dev/null -o "${11}"', "undefined symbol"),
    "hangs": ("sleep 100", "longer than 1 s"),
    "leaves a child": ("sleep 100 & exit 0", "no library"),
}


@needs_compiler
@pytest.mark.parametrize("kind", COMPILERS)
def test_an_odd_compiler_means_no_kernel_and_one_warning(
    kind: str, tmp_path: Path, unloaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, reason = COMPILERS[kind]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", script if kind in ("missing", "half a quotation") else compiler(tmp_path, script))
    if kind == "hangs":
        monkeypatch.setattr(build, "ANSWER_TIMEOUT_S", 1.0)
    began_s = time.monotonic()
    with pytest.warns(RuntimeWarning, match=rf"(?s)adam update is not available.*({reason})") as said:
        assert build.load("adam") is None
        assert build.load("adam") is None
    assert len(said) == 1 and time.monotonic() - began_s < 60
    assert not list((tmp_path / "cache/hightide/kernels").glob("adam*"))


@needs_compiler
@pytest.mark.parametrize("named", ["", "cc -g -Wall", "@path with spaces"])
def test_a_compiler_may_have_arguments_and_spaces(
    named: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, 'exec cc "$@"') if named.startswith("@") else named)
    assert answer(build.opened("one", SOURCE, cache, ("answer",))) == 42


@needs_compiler
def test_a_full_cache_means_a_build_for_this_process_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build.files, "write_bytes", full)
    assert answer(build.opened("one", SOURCE, cache, ("answer",))) == 42
    assert list(cache.iterdir()) == []


@needs_compiler
def test_a_cache_that_is_gone_means_a_build_for_this_process_only(tmp_path: Path) -> None:
    assert answer(build.opened("one", SOURCE, tmp_path / "missing", ())) == 42
    assert answer(build.opened("one", SOURCE, None, ())) == 42
