"""Kernels in C, built on first use with the system's compiler and kept in the user's cache folder. Optional: without a
compiler everything runs on torch's own operations, and says so once.

[Note: what is loaded] A library is code that runs with all that the user may do, and half of one ends the process. So
one from the cache is loaded only if nobody else may write to its folder and if the checksum beside it is right, which
is of the source, the flags, the compiler, the processor and the library's bytes. Otherwise it is built again. What was
built is opened in a process of its own first: compilers can be scripts. Where the cache cannot be used, it is built in
a temporary folder, for this process only.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import select
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from hightide.process import files
from hightide.process.system import KERNELS_SWITCH, cache_folder, is_private, make_private, own_kernels_allowed

# Never -ffast-math: infinities and NaN must come out as they do in torch. The last two only let loops become vectors.
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
    "-shared",
    "-fPIC",
)
COMPILE_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 10.0  # to say its version, to open a library
MOST_OUTPUT_BYTES = 1 << 20
_CREW = ("serve", "share", "dismiss", "bytes", "make")  # what each library has beside its update
_OPENING = """
import ctypes, sys
try:
    library = ctypes.CDLL(sys.argv[1])
    [library[name] for name in sys.argv[2:]]
except (OSError, AttributeError) as error:
    sys.exit(str(error))
"""


@functools.cache
def load(name: str) -> ctypes.CDLL | None:
    """The library of kernels/<name>.c. None if it is switched off, or cannot be had here."""
    if not own_kernels_allowed():
        return None
    try:
        functions = (f"hightide_{name}", *(f"hightide_crew_{part}" for part in _CREW))
        return opened(name, _source(f"{name}.c"), _cache(), functions)
    except (OSError, ValueError) as error:
        warnings.warn(
            f"the compiled {name} update is not available ({str(error).strip()[-500:]}), so updates run on torch's "
            "operations: same results, more load on Python. Install a C compiler (or set CC), or silence this with "
            f"{KERNELS_SWITCH}=0",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def opened(name: str, source: bytes, cache: Path | None, functions: tuple[str, ...]) -> ctypes.CDLL:
    """Built unless it is in the cache: there, else where temporary files are, and then for this process only."""
    compiler = _compiler()
    shelf = None if cache is None else _Shelf(cache, name, _identity(source, compiler))
    kept = None if shelf is None else shelf.find()
    if kept is not None:
        with suppress(OSError):  # the file system may let nothing run
            return ctypes.CDLL(str(kept))
    problem: OSError | None = None
    for folder in dict.fromkeys((cache, None)):
        try:
            with tempfile.TemporaryDirectory(dir=folder, prefix="hightide-", ignore_cleanup_errors=True) as scratch:
                made = _compiled(name, source, compiler, Path(scratch), functions)
                if shelf is not None and folder is not None:
                    with suppress(OSError):
                        made = shelf.put(made.read_bytes())
                return ctypes.CDLL(str(made))  # stays when its file goes
        except TimeoutError:
            raise
        except OSError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _compiled(name: str, source: bytes, compiler: list[str], folder: Path, functions: tuple[str, ...]) -> Path:
    code, made = folder / f"{name}.c", folder / f"{name}.so"
    code.write_bytes(source)
    _run([*compiler, *FLAGS, str(code), "-o", str(made), "-lm"], COMPILE_TIMEOUT_S)
    if not made.is_file():
        raise OSError(f"{compiler[0]} has made no library")
    if sys.executable:
        _run([sys.executable, "-I", "-S", "-c", _OPENING, str(made), *functions], ANSWER_TIMEOUT_S, "the new library")
    return made


@dataclass(frozen=True)
class _Shelf:
    """One library's place in the cache. Its file has a name of its own contents, and what says which one it is is
    written last: processes that build at once see a whole pair."""

    folder: Path
    name: str
    identity: bytes

    @property
    def _note(self) -> Path:
        return self.folder / f"{self.name}-{hashlib.sha256(self.identity).hexdigest()[:20]}.sha256"

    def _library(self, checksum: str) -> Path:
        return self.folder / f"{self.name}-{checksum[:20]}.so"

    def _checksum(self, content: bytes) -> str:
        return hashlib.sha256(self.identity + content).hexdigest()

    def find(self) -> Path | None:
        try:
            checksum = _content(self._note).decode("ascii", "replace").strip()
            if not re.fullmatch("[0-9a-f]{64}", checksum):
                return None
            library = self._library(checksum)
            return library if self._checksum(_content(library)) == checksum else None
        except OSError:
            return None

    def put(self, content: bytes) -> Path:
        checksum = self._checksum(content)
        library = self._library(checksum)
        for path, written in ((library, content), (self._note, f"{checksum}\n".encode())):
            if path.is_symlink() or (path.exists() and not path.is_file()):
                path.unlink()
            files.write_bytes(path, written, mode=0o600)
        return library


def _content(path: Path) -> bytes:
    """Of a plain file: a link may lead to where others write, and a pipe would be waited for."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(f"{path} is no plain file")
    return path.read_bytes()


def _cache() -> Path | None:
    """None: there is none that is ours alone, or nobody knows whether other processors share it."""
    try:
        folder = cache_folder() / "kernels"
        make_private(folder)
        return folder if is_private(folder) and _processor() else None
    except (OSError, ValueError):
        return None


def _source(file: str) -> bytes:
    """With our headers put in: one text to hash and to compile."""
    text = resources.files("hightide.optim").joinpath("kernels", file).read_bytes()
    return re.sub(rb'^#include "(\w+\.h)"$', lambda found: _source(found[1].decode()), text, flags=re.MULTILINE)


def _compiler() -> list[str]:
    """CC may have arguments, or be a path with spaces in it."""
    named = os.environ.get("CC", "").strip() or "cc"
    whole = shutil.which(named)
    if whole is not None:
        return [whole]
    words = shlex.split(named)
    found = shutil.which(words[0]) if words else None
    if found is None:
        raise FileNotFoundError(f"there is no C compiler {named!r}")
    return [found, *words[1:]]


def _identity(source: bytes, compiler: list[str]) -> bytes:
    """What a library is made of. A home folder may be shared by machines whose processors differ."""
    version = _run([*compiler, "--version"], ANSWER_TIMEOUT_S)
    command = "\0".join((*compiler, *FLAGS)).encode(errors="surrogateescape")
    parts = (source, command, version, platform.machine().encode(), _processor())
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _processor() -> bytes:
    """What it is and can do."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0].splitlines()
    except OSError:
        return b""
    names = (b"model", b"cpu family", b"stepping", b"flags", b"Features", b"CPU ")
    return b"\n".join(line for line in lines if line.startswith(names))


def _run(command: list[str], timeout_s: float, name: str = "") -> bytes:
    """What it prints. OSError: it failed, printed without end or took too long; whatever it has started is ended.
    `name` is what it is called then, else the command."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    with process:
        try:
            printed = _printed(process, time.monotonic() + timeout_s)
        except BaseException as error:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutError(f"{name or command[0]} took longer than {timeout_s:.0f} s") from None
            raise
    if process.returncode:
        text = printed.decode(errors="replace").strip()[-400:]
        raise OSError(f"{name or command[0]} failed with exit code {process.returncode}: {text}")
    return printed


def _printed(process: subprocess.Popen[bytes], end_s: float) -> bytes:
    """Until the process has ended, also where a child of it keeps the pipe."""
    assert process.stdout is not None
    printed = b""
    is_open = True
    while is_open or process.poll() is None:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise subprocess.TimeoutExpired(process.args, 0)
        if not is_open:
            process.wait(left_s)
        elif select.select([process.stdout], [], [], min(left_s, 0.1))[0]:
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            is_open, printed = bool(chunk), printed + chunk
            if len(printed) > MOST_OUTPUT_BYTES:
                raise OSError("the compiler prints without end")
        elif process.poll() is not None:
            break
    return printed
